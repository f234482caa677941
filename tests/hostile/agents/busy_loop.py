"""Wants the processor for ever: never returns, never sleeps, never makes a system call."""

from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    ready({})
    for _ in range(10**10):  # minutes: a broken sandbox does not burn a core for ever
        pass


if __name__ == "__main__":
    __import__("_common").command(attack)
