"""Wants to work together with another trial: waits for it on an abstract socket and a TCP port `target`.

`connects_to_abstract_socket` and `connects_to_loopback`, run beside it, are the other half.
"""

import contextlib
import socket
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], target: str = "47113") -> None:
    abstract, tcp, listening = socket.socket(socket.AF_UNIX), socket.socket(), []
    with contextlib.suppress(OSError):
        abstract.bind(b"\0" + target.encode())
        abstract.listen()
        listening.append("abstract")
    with contextlib.suppress(OSError):
        tcp.bind(("0.0.0.0", int(target)))
        tcp.listen()
        listening.append("tcp")
    ready({"listening": listening})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
