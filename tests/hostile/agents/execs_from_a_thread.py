"""Wants its watcher to lose it: a thread other than the first replaces the program."""

import os
import sys
import threading
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    program = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
    ready({})
    threading.Thread(target=os.execv, args=(sys.executable, program)).start()
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
