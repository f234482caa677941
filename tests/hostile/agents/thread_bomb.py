"""Wants every task slot of the machine with threads instead of processes; stops by itself at 500."""

import threading
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    threading.stack_size(64 * 1024)
    started = 0
    ready({})
    while started < 500:
        try:
            threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
        except RuntimeError:
            break  # refused
        started += 1
    ready({"threads": started})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
