"""What runs inside the sandbox, and what an agent may use there. Standard library only.

`zygote` forks trials, `keeper` holds one of them, `runner` calls the agent, `context` is what it sees.
"""

from __future__ import annotations

from .context import TrialContext, TrialTimeout, context

__all__ = ["TrialContext", "TrialTimeout", "context"]
