"""Wants process slots that nobody frees: orphans for the reaper, then dead children never waited for."""

import contextlib
import os
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    reading, writing = os.pipe()
    for _ in range(20):
        if os.fork() == 0:
            if os.fork() == 0:
                os.write(writing, b"%d\n" % os.getpid())
            os._exit(0)
        os.wait()
    os.close(writing)
    with open(reading) as orphans:
        left = {int(line) for line in orphans}
    end_s = time.monotonic() + 5
    while left and time.monotonic() < end_s:
        for pid in tuple(left):
            with contextlib.suppress(PermissionError):
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    left.discard(pid)
    for _ in range(40):
        if os.fork() == 0:
            os._exit(0)
    ready({"orphans_not_reaped": len(left)})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
