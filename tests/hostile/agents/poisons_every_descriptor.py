"""Wants its watcher's channels: writes garbage to every descriptor, then closes them all and hangs."""

import contextlib
import os
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    names = os.listdir("/proc/self/fd")
    ready({"descriptors": len(names)})
    for name in names:
        with contextlib.suppress(OSError):
            os.write(int(name), b"\xff\x00garbage\n" * 100)
    os.closerange(0, 65536)
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
