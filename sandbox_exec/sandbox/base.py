"""What a sandbox is to its supervisor: something that is started, listened to, and emptied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from sandbox_exec.contracts import ContainerSpec, Isolation, Limits

Stream = Literal["stdout", "stderr", "trace", "result"]
Role = Literal["agent", "grader", "grader-writable"]
Ceiling = Literal["memory", "pids", "disk"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr", "trace", "result")


@dataclass(frozen=True)
class Launch:
    """What to run: a command, or a pickled call. The environment is added to what every agent gets."""

    limits: Limits
    argv: tuple[str, ...] = ()
    payload: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    trusted_results: bool = False
    staged: dict[str, bytes] = field(default_factory=dict)  # "in/task.json" -> its bytes
    workspace: Path | None = None  # what the working directory is filled from
    role: Role = "agent"
    assets: Path | None = None  # of a grader: what SANDBOX_EXEC_GRADING is filled from
    beside: Sandbox | None = None  # whose network it shares, and nobody else
    like: Sandbox | None = None  # whose file system it gets: one of an agent, in which no process is left
    agent: Path | None = None  # the unpacked artifact, shown read-only at SANDBOX_EXEC_AGENT
    container: ContainerSpec | None = None
    labels: dict[str, str] = field(default_factory=dict)  # by which its container is known: run, trial, attempt


@dataclass(frozen=True)
class End:
    """That the sandbox is empty, and how it came to be."""

    exit_code: int | None = None
    signal: int | None = None
    setup: str = ""  # why the agent never started
    fault: str = ""  # what of ours broke
    swept: int = 0  # processes that were still there when the main one had ended
    sweep_s: float = 0.0  # how long it took until they were gone
    left: int = 0  # processes that could not be killed: only where there is no pid namespace
    proof: str = ""
    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    disk_full: bool = False


class Listener(Protocol):
    """The supervisor's side."""

    def on_output(self, stream: Stream, data: memoryview) -> None:
        """`data` is only good during the call."""

    def on_started(self) -> None:
        """The agent begins: its time runs from here. Not called if it could not be started."""

    def on_exceeded(self, what: Ceiling) -> None: ...

    def on_ended(self, end: End) -> None:
        """Called once, after the last output, when no process is left."""


class Sandbox(Protocol):
    """One place where trials run, one at a time. All calls come from the thread of its loop."""

    @property
    def isolation(self) -> Isolation: ...

    @property
    def keeper_pidfd(self) -> int:
        """A handle on the process with whose end nothing is left in it; -1 where there is none."""

    @property
    def steps_s(self) -> Mapping[str, float]:
        """How long each step of making it and taking it away took, where that is worth telling."""

    def start(self, launch: Launch, listener: Listener) -> None:
        """Run it; the listener hears the rest."""

    def terminate(self) -> None:
        """SIGTERM to every process: the co-operative half of a deadline."""

    def kill(self) -> None:
        """Empty the sandbox; `on_ended` is the proof."""

    def kill_hard(self) -> None:
        """The same, when `kill` was not answered: give up the sandbox itself."""

    def freeze(self) -> None: ...

    def thaw(self, paused_s: float) -> None:
        """Go on, after so many seconds in all that do not count."""

    def peak_memory_bytes(self) -> int | None:
        """The most that the trial has used so far; None where that is not known."""

    def read_file(self, path: str, limit: int) -> bytes | None:
        """A regular file that the trial left, such as "out/result.json"; None if there is none.

        Raises ValueError for what is no regular file, or larger. Follows no link.
        """

    def open_folder(self, name: str) -> int:
        """A handle on a folder that the trial wrote, such as "out". What is below it is hostile."""

    def give(self, name: str) -> None:
        """Make all that was put into a folder belong to who will run in here."""

    def close(self) -> None:
        """Release it; what still runs in it is killed."""


class Places(Protocol):
    """Where a worker's sandboxes come from, one at a time. All calls come from the thread of its loop."""

    def acquire(self, launch: Launch, on_ready: Callable[[Sandbox], None], on_failure: Callable[[End], None]) -> None:
        """Tell of a sandbox in which `launch` can be started, or with an `End` why there is none."""

    def release(self, sandbox: Sandbox, then: Callable[[], None]) -> None:
        """It has ended, and nobody needs what it left; tell when it is away, or can be lent again."""

    def close(self) -> None:
        """Take all away."""
