"""Wants every process slot of the machine: it forks as fast as it can, and so does each child.

A pipe holds 500 tickets and a fork costs one, so that a broken sandbox fails the test only.
"""

import os
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    taking, giving = os.pipe()
    os.set_blocking(taking, False)
    os.write(giving, b"." * 500)
    ready({})
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        try:
            os.read(taking, 1)
        except BlockingIOError:
            break  # every ticket is used
        try:
            os.fork()
        except OSError:
            os.write(giving, b".")  # refused: again
    time.sleep(300)
    os._exit(0)


if __name__ == "__main__":
    __import__("_common").command(attack)
