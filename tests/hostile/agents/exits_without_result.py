"""Wants success for nothing: ends the interpreter with 0 before there is a result."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    ready({})
    os._exit(0)


if __name__ == "__main__":
    __import__("_common").command(attack)
