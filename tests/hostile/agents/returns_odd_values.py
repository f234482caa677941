"""Wants a result that JSON cannot carry: not a number, half a character, an endless integer, not text."""

from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    ready({})
    odd: list[object] = [float("nan"), float("-inf"), "\ud800", 10**5000, b"\xff", {1, 2}, object()]
    return {"escaped": False, "detail": odd}


if __name__ == "__main__":
    __import__("_common").command(attack)
