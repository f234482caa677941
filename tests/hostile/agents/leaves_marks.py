"""Wants to reach the next trial: leaves a segment, a queue, a key and files where that may look.

`finds_marks` is the other half, and removes what it finds.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable

KEY, IPC_CREAT = 0x5B0F0001, 0o1000
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", os.curdir)


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    libc, left = ctypes.CDLL(None), []
    add_key, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
    ready({})
    if libc.shmget(KEY, ctypes.c_size_t(4096), IPC_CREAT | 0o666) >= 0:
        left.append("shm")
    if libc.msgget(KEY, IPC_CREAT | 0o666) >= 0:
        left.append("msg")
    key = libc.syscall(add_key, b"user", b"hostile-mark", b"x", 1, -4)  # -4: the user's own keyring
    if key >= 0:
        libc.syscall(keyctl, 15, key, 60)  # it ends after a minute if nobody removes it
        left.append("key")
    for place in PLACES:
        with contextlib.suppress(OSError), open(f"{place}/hostile-mark", "w") as file:
            file.write("was here")
            left.append(place)
    return {"escaped": False, "detail": left}


if __name__ == "__main__":
    __import__("_common").command(attack)
