"""Wants its watcher dead: SIGKILL to its parent, and to process 1 of what it sees.

Without a session of its own, a parent outside of the pid namespace reads as 0: then this hits its group.
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
    ready({})
    for pid in (os.getppid(), 1):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
