"""Wants its memory use forgiven: a child is killed at the ceiling, the parent ends with success."""

import os
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    ready({})
    child = os.fork()
    if child == 0:
        try:
            held = [b"\xff" * (16 << 20) for _ in range(16)]
            time.sleep(300)
            del held
        finally:
            os._exit(1)
    return {"escaped": False, "child_exit": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


if __name__ == "__main__":
    __import__("_common").command(attack)
