"""Wants to look dead: the main thread ends, the process shows as a zombie, another thread goes on."""

import ctypes
import os
import threading
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
    ready({})
    exit_of_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    ctypes.CDLL(None).syscall(exit_of_thread, 0)


if __name__ == "__main__":
    __import__("_common").command(attack)
