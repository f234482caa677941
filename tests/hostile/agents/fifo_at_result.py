"""Wants a reader that hangs: `result.json` is a named pipe that nobody writes to."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    os.mkfifo(os.path.join(os.environ["SANDBOX_EXEC_OUT"], "result.json"))
    ready({})
    return {"escaped": False, "detail": "a named pipe"}


if __name__ == "__main__":
    __import__("_common").command(attack)
