"""Wants to be faster than a kill by pid: it forks, exits, opens a new session, for ever."""

import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready({})
        end_s = time.monotonic() + 60  # a broken sandbox does not keep it for ever
        while time.monotonic() < end_s:
            try:
                if os.fork():
                    os._exit(0)
                os.setsid()
            except OSError:
                continue  # no process slot just now
        os._exit(0)
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
