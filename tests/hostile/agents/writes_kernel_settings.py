"""Wants code run by the kernel outside of the sandbox: core_pattern and its like.

It writes core_pattern back unchanged, and only opens the others.
"""

import contextlib
import os
from collections.abc import Callable

OTHERS = (
    "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches",
    "/proc/sys/net/ipv4/ip_forward", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper",
    "/sys/power/state", "/sys/kernel/mm/transparent_hugepage/enabled",
)  # fmt: skip


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    writable = []
    ready({})
    with contextlib.suppress(OSError), open("/proc/sys/kernel/core_pattern", "r+b", 0) as file:
        file.write(file.read())
        writable.append("/proc/sys/kernel/core_pattern")
    for path in OTHERS:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY))
            writable.append(path)
    return {"escaped": bool(writable), "detail": writable}


if __name__ == "__main__":
    __import__("_common").command(attack)
