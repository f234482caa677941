"""Wants to use the grace after SIGTERM: it answers with a burst of daemons and then hangs."""

import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    def detach(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                time.sleep(300)
                os._exit(0)
        time.sleep(300)

    signal.signal(signal.SIGTERM, detach)
    ready({})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
