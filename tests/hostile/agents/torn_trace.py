"""Wants the events before the last one lost: dies in the middle of a line."""

import os
import signal
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    ready({})
    with open(os.environ["SANDBOX_EXEC_TRACE"], "ab", 0) as pipe:
        pipe.write(b'{"type": "whole"}\n{"type": "torn", "data": "' + b"x" * 100)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    __import__("_common").command(attack)
