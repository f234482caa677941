"""Wants a process that answers nothing: a parent in vfork, which waits in the kernel for a stubborn child."""

import ctypes
import os
import signal
import time
from collections.abc import Callable

CLONE_VFORK = 0x4000


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    # PyDLL keeps the interpreter's lock, so that the child's copy of it is in a known state.
    if ctypes.PyDLL(None).syscall(clone, CLONE_VFORK | signal.SIGCHLD, None, None, None, None) == 0:
        ready({})
        time.sleep(300)
        os._exit(0)


if __name__ == "__main__":
    __import__("_common").command(attack)
