"""Wants nobody left to watch the deadline: SIGSTOP to its parent and to every process that it may signal.

`outer_pidns` is the pid namespace of the machine (`readlink /proc/self/ns/pid`): it refuses to run there.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], outer_pidns: str | None = None) -> None:
    if outer_pidns in (None, os.readlink("/proc/self/ns/pid")):
        raise RuntimeError("refused: this would harm the machine outside of a pid namespace of its own")
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    ready({"targets": len(others)})
    for pid in (os.getppid(), *others, -1):
        if pid != 0:  # 0 is its own group: it would stop itself first
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
