"""What runs inside the sandbox, and what an agent may use there. Standard library only.

`zygote` forks trials, `keeper` holds one of them, `runner` calls the agent, `context` is what it sees. `registry`, for
benchmarks, is loaded when it is used: a zygote has no need of it.
"""

from __future__ import annotations

from .context import RateLimited, TrialContext, TrialTimeout, context

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .registry import ComponentRegistry

__all__ = ["ComponentRegistry", "RateLimited", "TrialContext", "TrialTimeout", "context"]


def __getattr__(name: str) -> object:
    if name != "ComponentRegistry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .registry import ComponentRegistry

    return ComponentRegistry
