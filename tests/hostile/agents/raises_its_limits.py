"""Wants more than it was given: raises each hard resource limit that is finite."""

import contextlib
import resource
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    raised = []
    ready({})
    for name in (name for name in dir(resource) if name.startswith("RLIMIT_")):
        kind = getattr(resource, name)
        soft, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(kind, (soft, hard + 1))
                raised.append(name)
    return {"escaped": bool(raised), "detail": raised}


if __name__ == "__main__":
    __import__("_common").command(attack)
