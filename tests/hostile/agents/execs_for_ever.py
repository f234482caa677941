"""Wants never to be the program that was looked at: it replaces itself thousands of times a second."""

import os
from collections.abc import Callable

AGAIN = 'trap "" TERM; test "$1" -gt 0 && exec /bin/sh -c "$0" "$0" $(($1 - 1)); sleep 300'


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    ready({})
    os.execv("/bin/sh", ["sh", "-c", AGAIN, AGAIN, "100000"])  # minutes, then it only sleeps


if __name__ == "__main__":
    __import__("_common").command(attack)
