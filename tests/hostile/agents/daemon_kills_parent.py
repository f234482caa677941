"""Wants to have no watcher to be found by: a daemon in its own session kills the watcher of its tree.

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
    watcher = os.getppid()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready({})
            with contextlib.suppress(OSError):
                os.kill(watcher, signal.SIGKILL)
            time.sleep(300)
        os._exit(0)
    os.wait()
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
