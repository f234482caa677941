"""Wants no Python signal handler ever to run: a deadlock in C that holds the interpreter's lock."""

import ctypes
import signal
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(300)  # a broken sandbox does not keep it for ever
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    ready({})
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # unlike pause() or sleep(), a signal does not end this wait


if __name__ == "__main__":
    __import__("_common").command(attack)
