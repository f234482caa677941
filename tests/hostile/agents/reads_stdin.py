"""Wants what the caller types or pipes: reads its inherited stdin to the end."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    ready({})
    try:
        data = os.read(0, 4096)
    except OSError as error:
        return {"escaped": False, "detail": str(error)}
    return {"escaped": bool(data) or os.isatty(0), "detail": f"{len(data)} bytes"}


if __name__ == "__main__":
    __import__("_common").command(attack)
