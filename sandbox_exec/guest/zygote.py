"""The zygote: a small process with one thread that forks keepers, and knows nothing of trials.

It has loaded this folder, the little of the standard library that the folder needs, and what the user asked
to preload: a fork costs by the memory of the forker. It lives in the view of its agents. On its socket come
dicts from the supervisor: boot, once; preload; further clients, as each worker of a run is one; and slots, each
with the descriptors of its keeper. It tells
the supervisor of each keeper on that keeper's own channel, with a pidfd: a zygote that dies costs only the
slots it was just starting. When the supervisor is gone it waits until its keepers are, and clears away what
would be left of the pool: empty cgroups, scratch folders.
"""

from __future__ import annotations

import _signal as signal  # whose public face loads enum, and wraps every number into one
import _socket
import gc
import os
import select
import site
import sys

from . import keeper, view, wire
from . import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAMESPACES = k.CLONE_NEWPID | k.CLONE_NEWNS | k.CLONE_NEWIPC | k.CLONE_NEWUTS


def main(control_fd: int) -> None:
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, control_fd)
    os.set_inheritable(control_fd, False)
    boot: dict[str, Any] = {}
    clients = {control_fd: control}
    poll = select.poll()
    poll.register(control_fd, select.POLLIN)
    while clients:
        for fd, _ in poll.poll():
            message = wire.receive_dict(clients[fd])
            if message is None:
                poll.unregister(fd)
                clients.pop(fd).close()
                continue
            content, fds = message
            if "boot" in content:
                boot = content["boot"]
                boot["handles"], boot["keepers"] = fds, set()
                _boot(control, boot)
            elif "preload" in content:
                _preload(content["preload"])
            elif "client" in content:
                clients[fds[0]] = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fds[0])
                poll.register(fds[0], select.POLLIN)
            else:
                _fork_keeper(clients, boot, content, fds)
    if boot:
        _clear_away(boot)


def _boot(control: _socket.socket, boot: dict[str, Any]) -> None:
    """Take up the containment's mode, and say what is in force, or why it cannot be."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are reaped by the kernel; pidfds tell of their end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    boot["landlock"] = 0
    os.umask(0o022)  # whatever the caller's is: agents of another uid must find their way in what is made here
    try:
        if boot["mode"] == "namespaces":
            if boot["user_namespace"]:
                view.become_user()
            view.enter(boot["view"])
        if k.SUPPORTED:
            k.set_name("sx-zygote")
            k.set_no_new_privs()
            k.drop_capability_bounds()
            if boot["mode"] != "namespaces":
                k.set_subreaper()  # of an agent that killed its keeper: its orphans come here
                boot["landlock"] = abi if (abi := k.landlock_abi()) >= k.SCOPING_ABI else 0
        for name, value in boot["python"].items():
            setattr(sys, name, value)
        _prepare_python(boot)
    except Exception as error:
        wire.send_line(control, "failed", f"{type(error).__name__}: {error}")
    else:
        wire.send_line(control, "booted", boot["landlock"])


def _prepare_python(boot: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(boot["env"])
    sys.argv = ["agent"]
    site.setquit()  # -S leaves out exit() and quit(), which agents use
    for stream in (sys.stdout, sys.stderr):  # a kill loses no finished line
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    _preload(boot["preload"])


def _preload(modules: list[str]) -> None:
    for name in modules:
        __import__(name)
    gc.collect()
    gc.freeze()  # so that a collection in a trial does not copy the pages of all that stands here


def _fork_keeper(
    clients: dict[int, _socket.socket], boot: dict[str, Any], slot: dict[str, Any], fds: list[int]
) -> None:
    try:
        pid, pidfd = k.fork_into(_NAMESPACES) if boot["mode"] == "namespaces" else _fork()
    except OSError as error:
        pid, pidfd = -1, -1
        failure = str(error)
    if pid == 0:
        for client in clients.values():
            client.close()
        keeper.keep(boot, slot, fds)
    boot["keepers"].add(pid)
    channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fds[0])
    try:
        if pid > 0:
            wire.send_line(channel, "forked", pid, fds=(pidfd,) if pidfd >= 0 else ())
        else:
            wire.send_line(channel, "failed", f"the zygote cannot fork: {failure}")
    except OSError:
        pass  # the supervisor has closed it: so does the keeper
    channel.close()
    for fd in (*fds[1:], pidfd):
        if fd >= 0:
            os.close(fd)


def _fork() -> tuple[int, int]:
    pid = os.fork()
    if pid == 0 or not hasattr(os, "pidfd_open"):
        return pid, -1
    try:
        return pid, os.pidfd_open(pid)
    except ProcessLookupError:  # ended already, and reaped
        return pid, -1


def _clear_away(boot: dict[str, Any]) -> None:
    """Wait until no keeper is left. On the rungs without namespaces what survived one is our child by now: kill it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # so that the wait tells of each one
    try:
        while True:
            if boot["mode"] != "namespaces":
                _kill_orphans(boot["keepers"])
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    for parent, name in zip(boot["handles"], boot["cgroups"], strict=True):
        try:
            remove_cgroup(parent, name)
        except OSError:
            pass  # the pool removed it in time
    if boot["scratch"]:
        view.remove_scratch(boot["scratch"])


def _kill_orphans(keepers: set[int]) -> None:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = set(map(int, file.read().split()))
    except OSError:
        return  # not Linux: orphans do not come to us either
    for pid in children - keepers:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def remove_cgroup(parent: int, name: str) -> None:
    """Remove a pool's cgroup and those of its slots, by handle: the zygote no longer sees the path."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        with os.scandir(fd) as entries:
            slots = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for slot in slots:
            os.rmdir(slot, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
