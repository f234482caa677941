"""Run a module as an ordinary user, or as root, where it can hurt nobody: `start("hostile.driver", {...})`.

Who runs
  test      starts the outer process and reads lines of JSON from its stdout
  outer     has the test's rights; makes a mount, an ipc and a pid namespace, and waits for the warden
  warden    process 1 of that pid namespace: what is in there cannot signal it, and ends when it does. It shows the
            module another set of /tmp, /var/tmp, /dev/shm and homes, with the interpreter bound back where it was,
            however private the home that it lies in; reaps all orphans; and says at the end what was left
  driver    the module: the user's uid, no descriptors but the first three, an environment of its own

Each dies with the one above it. Without root, the outer process makes a user namespace too, and the driver keeps
its uid; on a machine that forbids that, `start` raises PermissionError.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import leftovers

UID = 54_000  # the first of many that are nobody's; the kernel asks for no entry in passwd
TESTS = Path(__file__).resolve().parent
CHECKOUT = TESTS.parent
HANG_S = 100.0  # bounds a failing test
_SMALL = "mode=1777,size=64m,nr_inodes=20000"  # what nothing else bounds is bounded here
_COVERED = {"/tmp": _SMALL, "/var/tmp": _SMALL, "/dev/shm": _SMALL}


@dataclass
class Driver:
    """A driver under way. `lines` are what it says; `verdict` is the warden's last word."""

    process: subprocess.Popen[str]
    verdict: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[dict[str, Any]]:
        """What the driver says, until its end. Then `verdict` is there."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line: dict[str, Any] = json.loads(text)
            if "verdict" in line:
                self.verdict = line["verdict"]
            else:
                yield line
        self.close()

    def close(self) -> None:
        """End it, if it has not, and with it all that is in its namespaces."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        warden = leftovers.children(self.process.pid)
        if not self.verdict:
            self.process.kill()
        self.process.wait()
        for pid in warden:  # it is ours to reap, if it lost its parent
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def start(
    module: str, spec: dict[str, Any], *, uid: int | None, cgroups: Sequence[Path] = (), patience_s: float = 5.0
) -> Driver:
    """Run `python -m module SPEC`. `uid` None: as the user of this process. `cgroups`: to be in from the start.

    `patience_s`: how long the warden waits, once the driver has ended, for the rest to end too.
    """
    order = {
        "module": module,
        "spec": spec,
        "uid": uid if os.geteuid() == 0 else None,
        "cgroups": [str(path) for path in cgroups],
        "patience_s": patience_s,
        "prefixes": [sys.base_prefix, sys.prefix, str(CHECKOUT)],
    }
    command = [sys.executable, "-S", "-E", __file__, json.dumps(order)]
    return Driver(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True))


class DelegatedCgroups:
    """A cgroup in each hierarchy that belongs to `uid`. `left` says, at the end, what had been left in them."""

    def __init__(self, homes: Sequence[Path], uid: int) -> None:
        self._homes, self._uid = homes, uid
        self.folders: list[Path] = []
        self.left: list[str] = []

    def __enter__(self) -> DelegatedCgroups:
        for home in self._homes:
            folder = (
                home / f"sandbox-exec-delegated-{os.getpid()}-{os.stat('/proc/self/ns/pid').st_ino}-{next(_counter)}"
            )
            folder.mkdir()
            self.folders.append(folder)
            for path in (folder, *(folder / name for name in _DELEGATED)):
                if path.exists():
                    os.chown(path, self._uid, self._uid)
        return self

    def __exit__(self, *_: object) -> None:
        for top in self.folders:
            below = [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
            self.left += [str(folder.relative_to(top)) for folder in below if folder != top]
            for folder in below:
                folder.rmdir()


def new_uid() -> int:
    """A user that no driver has been before: agents of one must not meet those of another in what users share."""
    return UID + next(_counter)


_counter = itertools.count()
_DELEGATED = ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks")


# --- the outer process and the warden --------------------------------------------------------------


def main() -> NoReturn:
    sys.path.insert(0, str(CHECKOUT))
    from sandbox_exec.guest import kernel as k

    order = json.loads(sys.argv[1])
    k.set_parent_death_signal(signal.SIGKILL)
    flags = k.CLONE_NEWNS | k.CLONE_NEWPID | k.CLONE_NEWIPC
    uid, gid = os.geteuid(), os.getegid()
    k.unshare(flags if uid == 0 else flags | k.CLONE_NEWUSER)
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    warden = os.fork()
    if warden == 0:
        k.set_parent_death_signal(signal.SIGKILL)
        _watch(order)
    os.close(1)  # the warden's copy is the one whose end is the end
    os.waitpid(warden, 0)
    os._exit(0)


def _watch(order: dict[str, Any]) -> NoReturn:
    home = _build_view(order["prefixes"], order["uid"])
    os.closerange(3, 1 << 16)
    driver = os.fork()
    if driver == 0:
        _become_driver(order, home)
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    end = _wait_for(driver)
    signal.setitimer(signal.ITIMER_REAL, order["patience_s"])
    with contextlib.suppress(ChildProcessError, _GivenUp):
        while True:
            os.waitpid(-1, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    folders = [name for name in os.listdir("/tmp") if name.startswith("sandbox-exec-")]
    verdict = {"driver": end, "left": _others(), "folders": folders}
    print(json.dumps({"verdict": verdict}), flush=True)
    os._exit(0)


class _GivenUp(Exception):
    pass


def _give_up(*_: object) -> NoReturn:
    raise _GivenUp


def _wait_for(driver: int) -> str:
    """How the driver ended. One that is stopped has been harmed, and is killed: it would never end."""
    stopped = ""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WUNTRACED)
        except _GivenUp:
            stopped = "hung"
            os.kill(driver, signal.SIGKILL)
            continue
        if pid == driver and os.WIFSTOPPED(status):
            stopped = "stopped"
            os.kill(driver, signal.SIGKILL)
        elif pid == driver:
            return stopped or str(os.waitstatus_to_exitcode(status))


def _others() -> list[str]:
    """Every process in here that has not ended."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
            if pid != "1" and rest.split()[0] != "Z":
                found.append(f"{name.split('(')[-1]} {rest.split()[0]}")
    return found


def _build_view(prefixes: list[str], uid: int | None) -> str:
    """Cover what is shared with the machine or not for this user; returns the user's home."""
    from sandbox_exec.guest import kernel as k

    k.mount("none", "/", flags=k.MS_REC | k.MS_PRIVATE)
    k.mount("proc", "/proc", "proc", k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC)
    covered = dict(_COVERED)
    for prefix in prefixes:
        for folder in reversed(Path(prefix).parents):
            if not folder.stat().st_mode & stat.S_IXOTH and str(folder) not in covered:
                covered[str(folder)] = "mode=755,size=1m"
    homes = "/home" if os.path.isdir("/home") else "/tmp"
    covered.setdefault(homes, "mode=755,size=1m")
    kept = {prefix: os.open(prefix, os.O_PATH) for prefix in prefixes}
    for path, options in covered.items():
        if os.path.isdir(path):
            k.mount("tmpfs", path, "tmpfs", k.MS_NOSUID | k.MS_NODEV, options)
    for prefix, fd in kept.items():
        if not os.path.exists(prefix):
            os.makedirs(prefix)
            k.mount(f"/proc/self/fd/{fd}", prefix, flags=k.MS_BIND | k.MS_REC)
    home = f"{homes}/ordinary"
    os.mkdir(home, 0o700)
    Path(home, ".netrc").write_text("machine example login ordinary password canary\n")
    for path in (home, f"{home}/.netrc"):
        os.chown(path, os.geteuid() if uid is None else uid, os.getegid() if uid is None else uid)
    return home


def _become_driver(order: dict[str, Any], home: str) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        for folder in order["cgroups"]:
            Path(folder, "cgroup.procs").write_text("0")
        uid = order["uid"]
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.chdir(home)
        env = {"HOME": home, "PATH": os.defpath, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        env["PYTHONPATH"] = f"{TESTS}:{CHECKOUT}"
        argv = [sys.executable, "-P", "-m", order["module"], json.dumps(order["spec"])]
        os.execve(sys.executable, argv, env)
    finally:
        os._exit(127)


if __name__ == "__main__":
    main()
