"""The agent's process from its fork to its first own instruction: join the cgroup, take the pipes, lose all rights.

All here runs once for each trial, and most of its cost is the pages it touches: each is copied from the
keeper. So it does what must be done for each trial, and the keeper has done the rest for the slot; and it calls
`_signal`, whose public face would wrap every number into an enum.
What fails is told to the keeper through a pipe that closes on exec, and blamed on the set-up, not the agent.
"""

from __future__ import annotations

import _socket
import os
import resource
from _signal import SIG_DFL, SIGCHLD, SIGKILL, set_wakeup_fd, signal

from . import kernel as k
from . import runner, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

# The keeper leaves these numbers free; programs that the agent runs inherit only the first three.
STDOUT, STDERR, RESULT, PAUSED, FAILURE, TRACE = 1, 2, 3, 4, 5, 6
FIRST_FREE = 7
_MAX_FD = 1 << 20


def become(boot: dict[str, Any], slot: dict[str, Any], scratch: int, orders: _socket.socket) -> NoReturn:
    """Prepare, wait for the request, and be its agent. `orders` brings the request and the cgroups to join."""
    try:
        os.setsid()
        set_wakeup_fd(-1)
        signal(SIGCHLD, SIG_DFL)
        for name, number in (("stdout", STDOUT), ("stderr", STDERR), ("result", RESULT), ("trace", TRACE)):
            os.dup2(os.open(name, os.O_WRONLY, dir_fd=scratch), number, inheritable=number <= STDERR)
        os.dup2(os.open("paused", os.O_RDONLY, dir_fd=scratch), PAUSED, inheritable=False)
        _, fds = wire.receive(orders, 1)
        request, payload = wire.read_dict_file(fds[0])
        for fd in fds[1:]:
            os.write(fd, b"0")
        os.closerange(FIRST_FREE, _MAX_FD)
        for kind, value in request["rlimits"]:
            _lower_limit(kind, value)
        _drop_rights(boot, slot, request)
        for name, value in request["env"].items():
            os.environ[name] = value
        if request["argv"]:
            runner.run_command(request["argv"])
        os.close(FAILURE)
    except BaseException as error:
        os.write(FAILURE, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(127)
    runner.run_call(request, payload, TRACE, PAUSED, RESULT)


def _lower_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))


def _drop_rights(boot: dict[str, Any], slot: dict[str, Any], request: dict[str, Any]) -> None:
    """What the keeper could not drop for itself. Seccomp and no-new-privileges are inherited from it."""
    if not k.SUPPORTED:
        return
    if boot["mode"] != "namespaces":
        k.set_parent_death_signal(SIGKILL)
        k.set_name("sx-agent")  # who looks for orphans must not take it for a keeper
        if boot["landlock"]:
            k.landlock_scope()  # here, so that the keeper is outside
    uid, gid = slot["uid"], slot["gid"]
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)  # and with it all capabilities
    if not request["argv"]:
        k.set_dumpable(True)  # its own /proc/self is its own; exec does this by itself
