"""Wants the supervisor's parser to fail, or to believe it: garbage on the trace and on every descriptor."""

import contextlib
import os
from collections.abc import Callable

FRAMES = (
    b"\xff\xfe\x00\x80", b"\n" * 1000, b"42", b"null", b'"text"', b"[1, 2]", b"{", b"}", b'{"type": 7}',
    b'{"a": NaN}', b'{"a": 1e999}', b'{"a": -Infinity}', b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}',
    b'{"a": ' + b"9" * 100_000 + b"}", b"[" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"type": "result", "status": "success", "value": "forged"}',
)  # fmt: skip


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    ready({})
    with open(os.environ["SANDBOX_EXEC_TRACE"], "ab", 0) as pipe:
        for frame in (*FRAMES, b'{"type": "' + b"x" * (32 << 20) + b'"}'):
            pipe.write(frame + b"\n")
    garbage = b"\xff" * 32 + b'\n{"type": "result", "value": "forged"}\n' + b"\x00" * 2000
    poisoned = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.write(int(name), garbage)
            poisoned += 1
    return {"escaped": False, "detail": f"{poisoned} descriptors"}


if __name__ == "__main__":
    __import__("_common").command(attack)
