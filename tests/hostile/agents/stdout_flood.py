"""Wants the supervisor's memory or disk: writes to stdout and stderr without end; stops itself at 4 GiB."""

import contextlib
import os
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    chunk = b"x" * (1 << 16)
    ready({})
    with contextlib.suppress(OSError):  # the other end may be closed
        for _ in range(1 << 15):
            os.write(1, chunk)
            os.write(2, chunk)
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
