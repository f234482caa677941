"""Wants everybody dead: SIGKILL to every process in sight, to all at once, at last to its own group.

`outer_pidns` is the pid namespace of the machine (`readlink /proc/self/ns/pid`): it refuses to run there.
"""

import contextlib
import os
import signal
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], outer_pidns: str | None = None) -> None:
    if outer_pidns in (None, os.readlink("/proc/self/ns/pid")):
        raise RuntimeError("refused: this would harm the machine outside of a pid namespace of its own")
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    ready({"targets": len(others)})
    for pid in (*others, -1, 0):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    __import__("_common").command(attack)
