"""Wants to hold others still or to steer them: ptrace of every process in sight, and a stopped child.

`outer_pidns` is the pid namespace of the machine (`readlink /proc/self/ns/pid`): it refuses to run there.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable

PTRACE_ATTACH = 16


def attack(ready: Callable[[dict[str, object]], object], outer_pidns: str | None = None) -> None:
    if outer_pidns in (None, os.readlink("/proc/self/ns/pid")):
        raise RuntimeError("refused: this would harm the machine outside of a pid namespace of its own")
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
        os._exit(0)
    libc = ctypes.CDLL(None)
    held = [pid for pid in (*others, child) if libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0]
    ready({"escaped": bool(set(held) & set(others)), "detail": held, "child_held": child in held})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
