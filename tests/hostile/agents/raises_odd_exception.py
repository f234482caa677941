"""Wants whoever reports its error to fail: an exception whose text, name and traceback are traps."""

from collections.abc import Callable


class OddError(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)

    __repr__ = __str__


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    ready({})
    OddError.__name__ = OddError.__qualname__ = "x" * 1_000_000
    raise OddError("\ud800" * 1000) from OddError("cause")


if __name__ == "__main__":
    __import__("_common").command(attack)
