"""Wants all memory of the machine; stops by itself at 256 MiB, above any ceiling that a test sets."""

import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    ready({})
    held = [b"\xff" * (16 << 20) for _ in range(16)]
    time.sleep(300)
    del held


if __name__ == "__main__":
    __import__("_common").command(attack)
