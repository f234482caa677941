"""Wants a reader that fails in its own code: `result.json` is a socket."""

import os
import socket
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    os.chdir(os.environ["SANDBOX_EXEC_OUT"])  # a short name: paths of sockets have a limit
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("result.json")
    ready({})
    return {"escaped": False, "detail": "a socket"}


if __name__ == "__main__":
    __import__("_common").command(attack)
