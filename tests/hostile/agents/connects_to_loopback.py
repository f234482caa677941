"""Wants a service of the host's loopback: connects to the TCP port `target` by every local address."""

import socket
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], target: str = "9") -> dict[str, object]:
    answers = {}
    ready({})
    for host in ("127.0.0.1", "0.0.0.0", "::1"):
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as door:
                door.settimeout(0.3)
                door.connect((host, int(target)))
                answers[host] = "connected"
        except OSError as error:
            answers[host] = str(error)
    return {"escaped": "connected" in answers.values(), "detail": answers}


if __name__ == "__main__":
    __import__("_common").command(attack)
