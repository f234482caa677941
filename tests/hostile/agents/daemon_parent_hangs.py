"""Wants to leave the process tree: a double-forked daemon in its own session, while the parent hangs."""

import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready({})
            time.sleep(300)
        os._exit(0)
    os.wait()
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
