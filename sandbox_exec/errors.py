"""The exceptions of the package: for a caller's mistake, or a machine that cannot do what was asked.

What an agent does is never one of these: it is data in an outcome. The one exception is `AgentFailed`, which
only `Outcome.unwrap()` raises, because its caller asked for the value or an exception.
"""

from __future__ import annotations

import errno
from typing import Any, Final

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})  # how the kernel says what `StoreFull` says


class SandboxExecError(Exception):
    """The root of every exception that this package raises on purpose."""


class InvalidValue(SandboxExecError, ValueError):
    """A value that was given cannot be used; the message says what stood there and what is allowed."""


class InvalidExperiment(SandboxExecError):
    """An experiment, its tasks or its variants contradict themselves or point at what is not there."""


class InvalidArtifact(InvalidExperiment):
    """A frozen artifact is not what its manifest says, or a folder cannot be frozen; the message says why."""


class PreflightFailed(SandboxExecError):
    """A check made before the first trial failed; nothing has been run."""


class SandboxUnavailable(SandboxExecError):
    """This machine cannot give the sandbox that was asked for; the message says why and what to do."""


class RunLocked(SandboxExecError):
    """Another process holds this run; only one coordinator may write it."""


class RunNotActive(SandboxExecError):
    """No coordinator holds this run, so there is nobody to steer; the message says how to start one."""


class QueueFull(SandboxExecError):
    """A run has no room for what was submitted; nothing of it was taken. Try again when trials have ended."""


class ProtocolFault(SandboxExecError):
    """A backend or a queue broke its protocol, for instance with an event for a ticket that it never got.

    What it says can no longer be believed: it is quarantined, and the run has failed.
    """


class StoreFull(SandboxExecError):
    """There is no room left where the run is kept: a full disk, a quota, or no more files.

    Nothing is torn: what was committed stays so, the rest was not written. The run continues once there is room.
    """


class PoolClosed(SandboxExecError, RuntimeError):
    """A call was submitted to a pool that has been shut down.

    Also a `RuntimeError`, as `concurrent.futures` raises one here and callers catch that.
    """


class BrokenPool(SandboxExecError, RuntimeError):
    """The pool's own machinery failed and could not be repaired; what it still held is lost.

    No agent can cause this: what an agent breaks is its own trial.
    """


class AgentFailed(SandboxExecError):
    """`Outcome.unwrap()` was called on a trial that did not succeed; `outcome` is that trial's."""

    # Typed loosely: `Outcome` stands below this module and may not be imported here.
    def __init__(self, message: str, outcome: Any) -> None:
        super().__init__(message)
        self.outcome = outcome

    def __reduce__(self) -> tuple[type[AgentFailed], tuple[str, Any]]:
        # The default would call the class with the message alone when it is unpickled.
        return type(self), (str(self), self.outcome)
