"""Wants somebody else killed for its memory: lowers its own oom_score_adj, raises its parent's, then hogs.

What it may write in the parent's it writes back unchanged. Stops by itself at 256 MiB.
"""

import contextlib
import os
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    written = []
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as own:
        own.write("-1000")
        own.flush()
        written.append("its own, lowered")
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/oom_score_adj", "r+") as parents:
        value = parents.read()
        parents.seek(0)
        parents.write(value)
        parents.flush()
        written.append("its parent's")
    ready({"escaped": bool(written), "detail": written})
    held = [b"\xff" * (16 << 20) for _ in range(16)]
    time.sleep(300)
    del held


if __name__ == "__main__":
    __import__("_common").command(attack)
