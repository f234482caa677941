"""Wants a collector that never ends: 20 000 empty files in its output folder, left there."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    out, made = os.environ["SANDBOX_EXEC_OUT"], 0
    ready({})
    try:
        for made in range(1, 20_001):
            os.close(os.open(f"{out}/{made}", os.O_CREAT | os.O_WRONLY))
    except OSError as error:
        return {"escaped": False, "detail": f"{error.strerror} at file {made}"}
    return {"escaped": False, "detail": f"{made} files"}


if __name__ == "__main__":
    __import__("_common").command(attack)
