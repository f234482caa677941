"""Wants to run after the trial: a process that changes its pid and session all the time is left behind."""

import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    reading, writing = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_s = time.monotonic() + 60  # a broken sandbox does not keep it for ever
        ready({})
        os.write(writing, b".")
        while time.monotonic() < end_s:
            try:
                if os.fork():
                    os._exit(0)
                os.setsid()
            except OSError:
                continue  # no process slot just now
        os._exit(0)
    os.read(reading, 1)
    return {"escaped": False, "detail": "left a process that hops from pid to pid"}


if __name__ == "__main__":
    __import__("_common").command(attack)
