"""Wants memory in /dev/shm, which no process maps and which stays; stops by itself at 1 GiB.

The files are named `hostile-*`, so that a test on a rung without a private /dev/shm can remove them.
"""

import errno
import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    chunk, written = b"\xff" * (1 << 20), 0
    ready({})
    try:
        for _ in range(64):
            with open(f"/dev/shm/hostile-{os.getpid()}-{written}", "wb", 0) as file:
                for _ in range(16):
                    written += file.write(chunk)
    except OSError as error:
        return {"escaped": False, "detail": f"{errno.errorcode[error.errno or 0]} after {written} bytes"}
    return {"escaped": True, "detail": f"{written} bytes in /dev/shm"}


if __name__ == "__main__":
    __import__("_common").command(attack)
