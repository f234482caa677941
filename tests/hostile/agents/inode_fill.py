"""Wants every inode of a file system: empty files until refused; stops by itself at 300 000.

Its folder is named `hostile-*` and it removes it, unless it is killed first.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable

LIMIT = 300_000


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    folder = tempfile.mkdtemp(prefix="hostile-")
    made, refusal = 0, None
    ready({})
    try:
        while made < LIMIT:
            os.close(os.open(f"{folder}/{made}", os.O_CREAT | os.O_WRONLY))
            made += 1
    except OSError as error:
        refusal = errno.errorcode[error.errno or 0]
    shutil.rmtree(folder, ignore_errors=True)
    return {"escaped": refusal is None, "detail": {"files": made, "refusal": refusal}}


if __name__ == "__main__":
    __import__("_common").command(attack)
