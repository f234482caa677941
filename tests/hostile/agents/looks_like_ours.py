"""Wants to be spared by a search for names: calls itself and a detached child what a supervisor is called."""

import ctypes
import os
import sys
import time
from collections.abc import Callable

PR_SET_NAME = 15


def attack(ready: Callable[[dict[str, object]], object], name: str = "sandbox-exec") -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(300)"
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.dup2(writing, 1)
        os.execv(sys.executable, [name, "-S", "-c", code])
    os.read(reading, 1)
    ready({})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
