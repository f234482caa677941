"""What an agent of the form "module:function" is called through."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def call(base: str, module: str, function: str, task: dict[str, Any]) -> Any:
    """Import the agent from beside its experiment, and give it its task."""
    sys.path.insert(0, base)
    target: Any = __import__(module, fromlist=["_"])
    for name in function.split("."):
        target = getattr(target, name)
    return target(task)


def call_pickled(function: bytes, task: dict[str, Any]) -> Any:
    """Call an agent that was given as a function. It is unpickled here, in the sandbox, and nowhere else."""
    from _pickle import loads

    return loads(function)(task)
