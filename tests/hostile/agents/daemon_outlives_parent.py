"""Wants to run after the trial: a silent daemon in its own session, while the parent ends with success."""

import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for stream in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            ready({})
            os.write(writing, b".")
            time.sleep(300)
        os._exit(0)
    os.read(reading, 1)
    os.wait()
    return {"escaped": False, "detail": "left a daemon"}


if __name__ == "__main__":
    __import__("_common").command(attack)
