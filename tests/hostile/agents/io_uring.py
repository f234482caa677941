"""Wants system calls that no filter sees: sets up an io_uring, whose requests bypass seccomp."""

import ctypes
import errno
import os
from collections.abc import Callable

IO_URING_SETUP = 425


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    ready({})
    ring = ctypes.CDLL(None, use_errno=True).syscall(IO_URING_SETUP, 8, ctypes.create_string_buffer(120))
    if ring < 0:
        return {"escaped": False, "detail": errno.errorcode[ctypes.get_errno()]}
    os.close(ring)
    return {"escaped": True, "detail": "has a ring"}


if __name__ == "__main__":
    __import__("_common").command(attack)
