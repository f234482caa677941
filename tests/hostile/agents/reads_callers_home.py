"""Wants the caller's keys: lists `home`, and reads what lies in it, `canary` above all."""

import contextlib
import os
from collections.abc import Callable

PRIVATE = (".ssh", ".netrc", ".aws", ".config", ".gnupg", ".bash_history", ".bashrc", ".gitconfig")


def attack(
    ready: Callable[[dict[str, object]], object], home: str = "~", canary: str | None = None
) -> dict[str, object]:
    home, seen, found = os.path.expanduser(home), [], []
    ready({})
    with contextlib.suppress(OSError):
        seen = sorted(os.listdir(home))[:100]
    for path in (*(os.path.join(home, name) for name in PRIVATE), *([canary] if canary else [])):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDONLY))
            found.append(path)
    return {"escaped": bool(found), "detail": {"found": found, "seen": seen}}


if __name__ == "__main__":
    __import__("_common").command(attack)
