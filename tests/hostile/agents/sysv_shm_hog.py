"""Wants memory that outlives every process: System V segments, filled and left; stops itself at `mib`.

The keys count up from 0x5B0E0000, so that a test on a rung without ipc namespace can remove them.
"""

import ctypes
import errno
from collections.abc import Callable

IPC_CREAT, MODE, SIZE = 0o1000, 0o600, 16 << 20


def attack(ready: Callable[[dict[str, object]], object], mib: str = "256") -> dict[str, object]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    ready({})
    for count in range(int(mib) // 16):
        segment = libc.shmget(0x5B0E0000 + count, ctypes.c_size_t(SIZE), IPC_CREAT | MODE)
        if segment < 0:
            refusal = errno.errorcode[ctypes.get_errno()]
            return {"escaped": False, "detail": f"refused after {count * SIZE} bytes: {refusal}"}
        address = ctypes.c_void_p(libc.shmat(segment, None, 0))
        ctypes.memset(address, 255, SIZE)
        libc.shmdt(address)
    return {"escaped": True, "detail": f"{mib} MiB in segments"}


if __name__ == "__main__":
    __import__("_common").command(attack)
