"""Names of processes that own something outside of themselves: a container, a folder, a mount.

A pid is given again. With its birth in ticks since the boot, the boot, and the pid namespace it counts in, it is not.
"""

from __future__ import annotations

import os
import select
import tempfile
from pathlib import Path
from typing import Final, Literal

DOCKER_SCRATCH: Final = "sandbox-exec-docker-"  # what the names of folders begin with; the owner's name follows
PROCESS_SCRATCH: Final = "sandbox-exec-scratch-"

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NOWHERE = "nowhere-0"  # without /proc nobody can be found again


def name_of(pid: int) -> str:
    """A name that no later process will have; it is safe in a path and in a label."""
    return f"{pid}-{_birth(pid) or 'gone'}-{_place()}"


def find(name: str) -> int | None:
    """A handle on the process of that name, if it lives."""
    pid = name.partition("-")[0]
    try:
        pidfd = os.pidfd_open(int(pid))
    except (ValueError, OSError):
        return None
    if name_of(int(pid)) == name and not _has_ended(pidfd):
        return pidfd
    os.close(pidfd)
    return None


def state_of(name: str) -> Literal["alive", "dead", "unknown"]:
    """Whether the process lives. Unknown: it is of another boot, pid namespace or machine, or hidden from us."""
    if not name.endswith(f"-{_place()}") or name.endswith(_NOWHERE):
        return "unknown"
    pid, born, *_ = name.split("-")
    try:
        pidfd = os.pidfd_open(int(pid))
    except (ValueError, OSError):
        return "dead"
    try:
        found = _birth(int(pid))  # before the next look: what has ended meanwhile cannot be read
        if _has_ended(pidfd):
            return "dead"
    finally:
        os.close(pidfd)
    if found is None:  # of another user, where /proc is mounted with hidepid
        return "unknown"
    return "alive" if found == born else "dead"


def make_folder(prefix: str) -> Path:
    """A temporary folder that has this process's name in its own: should it be killed, the reaper takes it away."""
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{name_of(os.getpid())}-"))


def owner_of(folder: str) -> str | None:
    """Whose folder that is, by its name; None: it is none of ours."""
    for prefix in (DOCKER_SCRATCH, PROCESS_SCRATCH):
        if folder.startswith(prefix):
            return folder.removeprefix(prefix).rpartition("-")[0]
    return None


def _birth(pid: int) -> str | None:
    try:
        # Nobody sets ticks, as they do clocks.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return None


def _place() -> str:
    try:
        return f"{_BOOT.read_text()[:8]}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return _NOWHERE


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
