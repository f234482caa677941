"""Wants the disk full: files of 16 MiB in every place it may write, until refused or at 2 GiB.

Its folders are named `hostile-*` and it removes them, unless it is killed first.
"""

import os
import shutil
import tempfile
from collections.abc import Callable

LIMIT = 2 << 30


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    chunk, written, refusals, folders = b"\xff" * (1 << 20), 0, [], []
    named = [os.environ.get("SANDBOX_EXEC_OUT", "."), os.environ.get("SANDBOX_EXEC_WORKSPACE", ".")]
    ready({})
    for place in (*named, tempfile.gettempdir(), "/var/tmp", "/dev/shm"):
        try:
            folders.append(tempfile.mkdtemp(prefix="hostile-", dir=place))
            while written < LIMIT:
                with open(f"{folders[-1]}/{written}", "wb", 0) as file:
                    for _ in range(16):
                        written += file.write(chunk)
        except OSError as error:
            refusals.append(f"{place}: {error.strerror}")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return {"escaped": written >= LIMIT, "detail": {"bytes": written, "refusals": refusals}}


if __name__ == "__main__":
    __import__("_common").command(attack)
