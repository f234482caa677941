"""Wants to survive a polite stop: ignores every signal that can be ignored, and blocks them as well."""

import contextlib
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ready({})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
