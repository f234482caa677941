"""Wants two results for one call: it forks, and the child returns through the harness first."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    ready({})
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return {"escaped": False, "detail": "parent" if child else "child"}


if __name__ == "__main__":
    __import__("_common").command(attack)
