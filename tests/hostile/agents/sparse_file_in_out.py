"""Wants the run's disk for nothing: a file of 1 TiB in its output folder that is one single hole."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    ready({})
    try:
        with open(os.path.join(os.environ["SANDBOX_EXEC_OUT"], "hole"), "wb") as file:
            file.truncate(1 << 40)
    except OSError as error:
        return {"escaped": False, "detail": str(error.strerror)}
    return {"escaped": False, "detail": "made; it must not be collected"}


if __name__ == "__main__":
    __import__("_common").command(attack)
