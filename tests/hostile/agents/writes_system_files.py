"""Wants to change what others run: creates a file in each folder of the system, of Python and of sys.path.

It removes what it made. Existing files it opens for writing, and writes nothing.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable

SYSTEM = "/ /bin /boot /etc /home /lib /mnt /opt /proc /root /run /sbin /srv /sys /usr /usr/bin /usr/lib /var"


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    named = [os.environ.get(f"SANDBOX_EXEC_{name}", "/tmp") for name in ("OUT", "WORKSPACE")]
    own = tuple(f"{path}/" for path in (*named, tempfile.gettempdir()))  # these it may write
    paths = {*SYSTEM.split(), sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *sys.path}
    paths = {path for path in paths if path and not f"{path}/".startswith(own)}
    ready({})
    written = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            os.close(os.open(f"{path}/hostile-{os.getpid()}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            written.append(path)
            os.unlink(f"{path}/hostile-{os.getpid()}")
    for path in ("/etc/passwd", "/etc/ld.so.cache", sys.executable, os.__file__):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY))
            written.append(path)
    return {"escaped": bool(written), "detail": written}


if __name__ == "__main__":
    __import__("_common").command(attack)
