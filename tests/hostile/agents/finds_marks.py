"""Wants what an earlier trial left: looks for, and removes, all that `leaves_marks` makes."""

import contextlib
import ctypes
import os
from collections.abc import Callable

KEY, IPC_RMID = 0x5B0F0001, 0
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", os.curdir)


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    libc, found = ctypes.CDLL(None), []
    keyctl = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
    ready({})
    segment, queue = libc.shmget(KEY, ctypes.c_size_t(0), 0), libc.msgget(KEY, 0)
    if segment >= 0:
        found.append("shm")
        libc.shmctl(segment, IPC_RMID, None)
    if queue >= 0:
        found.append("msg")
        libc.msgctl(queue, IPC_RMID, None)
    key = libc.syscall(keyctl, 10, -4, b"user", b"hostile-mark", 0)  # search the user's own keyring
    if key >= 0:
        found.append("key")
        libc.syscall(keyctl, 9, key, -4)
    for place in PLACES:
        with contextlib.suppress(OSError):
            os.stat(f"{place}/hostile-mark")
            found.append(place)
            os.unlink(f"{place}/hostile-mark")
    return {"escaped": bool(found), "detail": found}


if __name__ == "__main__":
    __import__("_common").command(attack)
