"""Wants the hypervisor or other machines: vsock, which a network namespace does not hold back.

To have such a socket is enough: it does not connect anywhere.
"""

import socket
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    ready({})
    try:
        with socket.socket(socket.AF_VSOCK):
            return {"escaped": True, "detail": "has a vsock socket"}
    except OSError as error:
        return {"escaped": False, "detail": str(error)}


if __name__ == "__main__":
    __import__("_common").command(attack)
