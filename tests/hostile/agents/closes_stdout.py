"""Wants to be taken for finished: closes stdin, stdout and stderr and keeps running."""

import os
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    os.closerange(0, 3)
    ready({})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
