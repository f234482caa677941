"""Wants a recursive walk to fail: 2 000 folders one in the other, with a path far beyond PATH_MAX."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    os.chdir(os.environ["SANDBOX_EXEC_OUT"])
    ready({})
    for _ in range(2000):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    with open("bottom", "w") as file:
        file.write("reached")
    return {"escaped": False, "detail": "2000 folders deep"}


if __name__ == "__main__":
    __import__("_common").command(attack)
