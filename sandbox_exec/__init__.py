"""Run untrusted agents in sandboxes that can truly be killed.

`Pool` calls a function or a command in a sandbox and gives back an `Outcome`, never a hang; `Limits` says
what the call may use. `run` works through an `Experiment`, durably, and `continue_run` goes on with it. `Benchmark` is
for benchmarks that are written in Python. Names are loaded when they are first used, so that the part that runs
inside a sandbox (`sandbox_exec.guest`) starts without loading the rest.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself is too large for the guest
if TYPE_CHECKING:
    from sandbox_exec.benchmark import AgentFault, Benchmark, EnvironmentFault, UserFault
    from sandbox_exec.contracts import (
        AgentError,
        Blame,
        Experiment,
        Isolation,
        KillReport,
        Limits,
        Outcome,
        Rung,
        Status,
        Usage,
    )
    from sandbox_exec.coordinator import RunCallback
    from sandbox_exec.errors import (
        AgentFailed,
        BrokenPool,
        InvalidExperiment,
        InvalidValue,
        PoolClosed,
        PreflightFailed,
        QueueFull,
        RunLocked,
        SandboxExecError,
        SandboxUnavailable,
    )
    from sandbox_exec.guest import ComponentRegistry, RateLimited, TrialContext, TrialTimeout, context
    from sandbox_exec.pool import Command, Pool
    from sandbox_exec.runs import continue_run, run
    from sandbox_exec.schedule.queues import Entry, SequentialQueue, TaskQueue
    from sandbox_exec.submission import submit
    from sandbox_exec.trial_reports import TrialReport, reports_of

__version__ = "0.1.0"

__all__ = [
    "AgentError",
    "AgentFailed",
    "AgentFault",
    "Benchmark",
    "Blame",
    "BrokenPool",
    "Command",
    "ComponentRegistry",
    "Entry",
    "EnvironmentFault",
    "Experiment",
    "InvalidExperiment",
    "InvalidValue",
    "Isolation",
    "KillReport",
    "Limits",
    "Outcome",
    "Pool",
    "PoolClosed",
    "PreflightFailed",
    "QueueFull",
    "RateLimited",
    "RunCallback",
    "RunLocked",
    "Rung",
    "SandboxExecError",
    "SandboxUnavailable",
    "SequentialQueue",
    "Status",
    "TaskQueue",
    "TrialContext",
    "TrialReport",
    "TrialTimeout",
    "Usage",
    "UserFault",
    "__version__",
    "context",
    "continue_run",
    "reports_of",
    "run",
    "submit",
]

_HOME = {
    "sandbox_exec.benchmark": ("AgentFault", "Benchmark", "EnvironmentFault", "UserFault"),
    "sandbox_exec.contracts": (
        "AgentError",
        "Blame",
        "Experiment",
        "Isolation",
        "KillReport",
        "Limits",
        "Outcome",
        "Rung",
        "Status",
        "Usage",
    ),
    "sandbox_exec.coordinator": ("RunCallback",),
    "sandbox_exec.errors": (
        "AgentFailed",
        "BrokenPool",
        "InvalidExperiment",
        "InvalidValue",
        "PoolClosed",
        "PreflightFailed",
        "QueueFull",
        "RunLocked",
        "SandboxExecError",
        "SandboxUnavailable",
    ),
    "sandbox_exec.guest": ("ComponentRegistry", "RateLimited", "TrialContext", "TrialTimeout", "context"),
    "sandbox_exec.pool": ("Command", "Pool"),
    "sandbox_exec.runs": ("continue_run", "run"),
    "sandbox_exec.schedule.queues": ("Entry", "SequentialQueue", "TaskQueue"),
    "sandbox_exec.submission": ("submit",),
    "sandbox_exec.trial_reports": ("TrialReport", "reports_of"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(__import__(module, fromlist=[name]), name)
    globals()[name] = value  # the next use is an ordinary lookup
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
