"""Wants to be there and not there: it stops itself, so that it neither ends nor answers SIGTERM."""

import os
import signal
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    ready({})
    for _ in range(1000):  # a supervisor may continue it
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    __import__("_common").command(attack)
