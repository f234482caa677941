"""Names of processes that own something outside of themselves: a container, a folder, a mount.

A pid is given again. With its birth in ticks since the boot, the boot, and the pid namespace it counts in, it is not.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Literal

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def name_of(pid: int) -> str:
    """A name that no later process will have; it is safe in a path and in a label."""
    try:
        # Nobody sets ticks, as they do clocks.
        born = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        born = "gone"
    return f"{pid}-{born}-{_place()}"


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
    """Whether the process lives. Unknown: it is of another boot or pid namespace, or of another machine."""
    if not name.endswith(_place()):
        return "unknown"
    pidfd = find(name)
    if pidfd is None:
        return "dead"
    os.close(pidfd)
    return "alive"


def _place() -> str:
    return f"{_BOOT.read_text()[:8]}-{os.stat('/proc/self/ns/pid').st_ino}"


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
