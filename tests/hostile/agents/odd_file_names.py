"""Wants whoever lists its output to stumble: names of 255 odd bytes."""

import os
from collections.abc import Callable

ODD = (
    b"\n", b"\xff", b"\x01", b"\x1b[2J", b"\xe2\x80\xae", b" ", b"\\", b'"', b"$(id)", b"%s", b"a",
)  # fmt: skip


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    out, made = os.fsencode(os.environ["SANDBOX_EXEC_OUT"]), 0
    ready({})
    for odd in ODD:
        name = (odd * 255)[:255]
        with open(os.path.join(out, name), "wb") as file:
            file.write(name)
        made += 1
    for name in (b"-rf", b"~", b"...", b"result.json\n", b"\x1b]0;title\x07"):
        os.mkdir(os.path.join(out, name))
        made += 1
    return {"escaped": False, "detail": f"{made} names"}


if __name__ == "__main__":
    __import__("_common").command(attack)
