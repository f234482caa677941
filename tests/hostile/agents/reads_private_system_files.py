"""Wants what only root may read of the system that it sees: password hashes, host keys. It opens, and reads nothing."""

import contextlib
import glob
import os
from collections.abc import Callable

PATTERNS = (
    "/etc/shadow*", "/etc/gshadow*", "/etc/sudoers", "/etc/ssh/ssh_host_*_key", "/etc/ssl/private/*",
    "/var/lib/*/*", "/boot/*", "/root/.*",
)  # fmt: skip


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    private, opened = [], []
    ready({})
    for path in (path for pattern in PATTERNS for path in glob.glob(pattern)):
        with contextlib.suppress(OSError):
            if os.path.isfile(path) and not os.stat(path).st_mode & 0o004:
                private.append(path)
                os.close(os.open(path, os.O_RDONLY))
                opened.append(path)
    return {"escaped": bool(opened), "detail": {"private": private, "opened": opened}}


if __name__ == "__main__":
    __import__("_common").command(attack)
