"""Wants the raw disk or the raw memory: opens block devices and memory devices, or makes such nodes."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    # Only what is harmless to open for reading: opening a watchdog, say, starts it.
    nodes = ["/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg"]
    nodes += [node.path for node in os.scandir("/dev") if stat.S_ISBLK(os.lstat(node).st_mode)]
    folder, opened = tempfile.mkdtemp(prefix="hostile-"), []
    ready({})
    with contextlib.suppress(OSError):
        os.mknod(f"{folder}/disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0))
        opened.append("made a node")
    for node in nodes:
        with contextlib.suppress(OSError):
            os.close(os.open(node, os.O_RDONLY | os.O_NONBLOCK))
            opened.append(node)
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/disk")
    os.rmdir(folder)
    return {"escaped": bool(opened), "detail": opened}


if __name__ == "__main__":
    __import__("_common").command(attack)
