"""Wants the supervisor's memory: five million trace events, 500 MB, as fast as the pipe takes them."""

import json
import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    line = json.dumps({"type": "flood", "data": "x" * 72}).encode() + b"\n"
    ready({})
    with open(os.environ["SANDBOX_EXEC_TRACE"], "ab", 0) as pipe:
        for _ in range(5_000_000 // 40):
            pipe.write(line * 40)  # below 4096 bytes: never torn
    return {"escaped": False, "detail": "5 000 000 events"}


if __name__ == "__main__":
    __import__("_common").command(attack)
