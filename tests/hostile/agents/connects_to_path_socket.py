"""Wants a service of the host by its file: connects to the unix socket at the path `target`."""

import socket
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], target: str = "/hostile") -> dict[str, object]:
    ready({})
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.connect(target)
        except OSError as error:
            return {"escaped": False, "detail": str(error)}
    return {"escaped": True, "detail": "connected"}


if __name__ == "__main__":
    __import__("_common").command(attack)
