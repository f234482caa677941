"""The worker boundary: what a coordinator may ask of workers, and what it hears from them.

The message is only a bell: how an attempt ended is what `completion.json` in its folder says. A backend may deliver
an event late, twice or out of order; the coordinator drops what it has had. An event for a ticket that it never got
is a fault of the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from sandbox_exec.contracts import ActiveTrial, TrialDispatch


@dataclass(frozen=True)
class WorkerTicket:
    """One dispatched attempt. `worker` is a name that no later worker will have."""

    schedule_idx: int
    trial_id: str
    attempt: int
    worker: str
    folder: Path


@dataclass(frozen=True)
class Started:
    """The attempt's sandbox is there, and its agent begins."""

    ticket: WorkerTicket


@dataclass(frozen=True)
class Traced:
    """The attempt is alive: how far it is. `events` is how many it has traced."""

    ticket: WorkerTicket
    phase: str
    events: int
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Finished:
    """There is a completion in the attempt's folder."""

    ticket: WorkerTicket


@dataclass(frozen=True)
class Lost:
    """The worker ended, or was ended, without a completion. Its sandbox is gone with it."""

    ticket: WorkerTicket
    reason: str


WorkerEvent = Started | Traced | Finished | Lost


@dataclass(frozen=True)
class PauseAck:
    """Whether the attempt stands still, or has ended in the meantime; false after the time for it has passed."""

    ticket: WorkerTicket
    frozen: bool


@dataclass(frozen=True)
class Adoption:
    """What became of an attempt of a coordinator that died."""

    active: ActiveTrial
    state: Literal["alive", "finished", "lost"]
    ticket: WorkerTicket | None = None  # of one that is alive: its events will come


class WorkerBackend(Protocol):
    def submit(self, dispatch: TrialDispatch, folder: Path) -> WorkerTicket:
        """Reserve an idle worker for it, which will make `folder`; never more than `capacity()` at a time.

        The worker hears of it in `begin`: in between, the coordinator records who will run what, so that after a
        crash it knows whom to look for. Raises SandboxUnavailable if no worker can be had.
        """

    def begin(self, ticket: WorkerTicket) -> None:
        """Let the worker of a submitted attempt make its folder, keep the dispatch there, and run it."""

    def poll(self, timeout_s: float | None) -> list[WorkerEvent]:
        """Wait for what comes next; at most so long, for ever if None. `wake` ends it early."""

    def wake(self) -> None:
        """From any thread or signal handler: let `poll` return."""

    def pause(self, tickets: Sequence[WorkerTicket], timeout_s: float) -> list[PauseAck]:
        """Freeze them all at once, deadlines included; wait so long in all for those that do not say that they are."""

    def resume(self, ticket: WorkerTicket) -> None:
        """Let a frozen attempt go on, with the time that it had left. Nothing, if it has ended or is not frozen."""

    def stop(self, ticket: WorkerTicket, reason: str) -> None:
        """Kill the attempt, frozen or not; its completion says `cancelled`. Nothing, if it has ended."""

    def adopt(self, active: list[ActiveTrial]) -> list[Adoption]:
        """After a crash: which of these are alive, have finished, or are lost."""

    def capacity(self) -> int:
        """How many attempts can be under way at once, adopted ones among them."""

    def close(self) -> None:
        """Let all workers go. What still runs is killed. Nothing is left when this returns."""
