"""Wants its watcher drowned: a timer every 100 us, and signals to its own group without end.

`outer_pidns` is the pid namespace of the machine (`readlink /proc/self/ns/pid`): it refuses to run there.
"""

import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], outer_pidns: str | None = None) -> None:
    if outer_pidns in (None, os.readlink("/proc/self/ns/pid")):
        raise RuntimeError("refused: this would harm the machine outside of a pid namespace of its own")
    storm = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD)
    for number in storm:
        signal.signal(number, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    ready({})
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        for number in storm:
            os.kill(0, number)
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
