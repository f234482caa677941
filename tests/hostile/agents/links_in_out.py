"""Wants the collector to read or overwrite files of the host: links of every kind in its output folder."""

import contextlib
import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    os.chdir(os.environ["SANDBOX_EXEC_OUT"])
    ready({})
    os.symlink("/etc/passwd", "result.json")
    os.symlink("/etc/passwd", "passwd")
    os.symlink("/", "root")
    os.symlink("../" * 40 + "etc", "climbs")
    os.symlink("loop", "loop")
    os.symlink("/proc/self/root/etc", "through_proc")
    hard = False
    with contextlib.suppress(OSError):
        os.link("/etc/passwd", "hard")
        hard = True
    return {"escaped": hard, "detail": "6 symbolic links"}


if __name__ == "__main__":
    __import__("_common").command(attack)
