"""Wants the supervisor's stack: returns lists nested 100 000 deep."""

from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> list[object]:
    ready({})
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


if __name__ == "__main__":
    __import__("_common").command(attack)
