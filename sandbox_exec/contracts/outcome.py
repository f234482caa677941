"""What is known of one call in a sandbox once it has ended. Made by the supervisor, never by the agent."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, SkipValidation

from sandbox_exec.contracts.base import Contract
from sandbox_exec.contracts.limits import Rung
from sandbox_exec.contracts.status import Judged
from sandbox_exec.errors import AgentFailed

KillReason = Literal["deadline", "memory", "pids", "output", "disk", "cancelled", "sweep", "fault"]
"""Why a sandbox was emptied. `sweep`: the agent had ended by itself, the rest of its processes had not.
`fault`: the sandbox itself failed."""

STDERR_TAIL_CHARS: Final = 2000  # what a person reads of it in an exception; all that was kept is in the outcome


class Usage(Contract):
    """What a trial used, as measured from outside. None: this machine's containment cannot tell."""

    wall_s: float = Field(ge=0, description="From the start of the agent to the end of its last process.")
    cpu_s: float | None = Field(default=None, ge=0, description="Processor time of all its processes.")
    peak_memory_bytes: int | None = Field(default=None, ge=0, description="The most memory it held at once.")


class KillReport(Contract):
    """That a sandbox was emptied: why, how fast, and how it is known that nothing is left."""

    reason: KillReason
    latency_s: float = Field(ge=0, description="From the decision to kill, after any grace, to the proof.")
    proof: str = Field(description="How it was established that no process is left.")
    grace_used: bool = Field(default=False, description="Whether SIGTERM and a grace came first.")


class Isolation(Contract):
    """What was in force around a trial."""

    rung: Rung | Literal["container"] = Field(description="Of the ladder; or a container of an engine's.")
    memory: str = Field(description="cgroup-v2, cgroup-v1, watched, rlimit, engine or none.")
    pids: str = Field(description="cgroup-v2, cgroup-v1, watched, rlimit, engine or none.")
    cpu: str = Field(description="cgroup-v2, cgroup-v1, engine or none.")
    freeze: str = Field(description="cgroup-v2, cgroup-v1, signals, engine or none.")
    filesystem: str = Field(description="private or host.")
    disk: str = Field(default="tmpfs", description="tmpfs (a file system of that size), watched or none.")
    network: str = Field(description="none (an empty network namespace) or host.")
    uid: int | None = Field(default=None, description="The uid that the agent ran as, seen from the host.")
    seccomp: bool = Field(default=False, description="Whether a filter of system calls was in force.")
    landlock: int = Field(default=0, ge=0, description="The Landlock ABI in force; 0: none.")
    notes: tuple[str, ...] = Field(default=(), description="What was asked for and not held, in words.")


class AgentError(Contract):
    """What went wrong in the agent, in its own words: text from the guest, to be shown and never obeyed."""

    type: str
    message: str
    traceback: str = ""


class Dropped(Contract):
    """What came out of the sandbox and was not kept."""

    stdout_bytes: int = 0
    stderr_bytes: int = 0
    trace_bytes: int = 0
    trace_events: int = 0
    trace_malformed: int = 0
    trace_torn: int = 0


class Outcome(Judged):
    """How one call ended. An agent that dies, hangs, floods or lies yields one, never an exception."""

    value: Any = Field(default=None, description="What the agent returned; of a JSON type unless results are trusted.")
    error: AgentError | None = None
    exit_code: int | None = None
    signal: int | None = None
    # Not validated event by event: the trace reader made each from a JSON object, and there may be 100 000.
    trace: tuple[SkipValidation[dict[str, Any]], ...] = ()
    stdout: str = ""
    stderr: str = ""
    dropped: Dropped = Dropped()
    usage: Usage
    kill: KillReport | None = None
    isolation: Isolation | None = None

    def unwrap(self) -> Any:
        """Return the value, or raise `AgentFailed` with what a person needs to see why there is none."""
        if self.ok:
            return self.value
        raise AgentFailed(self._why(), self)

    def _why(self) -> str:
        parts = [str(self.status)]
        if self.error is not None:
            parts[0] += f": {self.error.type}: {self.error.message}"
        elif self.signal is not None:
            parts[0] += f": ended by signal {self.signal}"
        elif self.exit_code is not None:
            parts[0] += f": exit code {self.exit_code}"
        if self.error is not None and self.error.traceback:
            parts.append(f"in the sandbox:\n{self.error.traceback.rstrip()}")
        if self.stderr.strip():
            parts.append(f"the end of its stderr:\n{self.stderr[-STDERR_TAIL_CHARS:].rstrip()}")
        return "\n\n".join(parts)
