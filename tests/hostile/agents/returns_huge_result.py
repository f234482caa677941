"""Wants the supervisor's memory: returns a string of 64 MiB."""

from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> str:
    ready({})
    return "x" * (64 << 20)


if __name__ == "__main__":
    __import__("_common").command(attack)
