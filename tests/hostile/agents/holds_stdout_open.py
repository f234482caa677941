"""Wants a supervisor that waits for the end of the output: a daemon keeps stdout and stderr open."""

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
            ready({})
            os.write(writing, b".")
            time.sleep(300)
        os._exit(0)
    os.read(reading, 1)
    os.wait()
    return {"escaped": False, "detail": "left a daemon that holds stdout and stderr"}


if __name__ == "__main__":
    __import__("_common").command(attack)
