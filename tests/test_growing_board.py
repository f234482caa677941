"""The board while a run goes on: slots join, are withdrawn and blocked; the queue says what next, and when to stop."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from boards import task

from sandbox_exec.contracts.status import Status
from sandbox_exec.contracts.words import Task
from sandbox_exec.schedule.queues import Entry, SequentialQueue
from sandbox_exec.schedule.scheduler import Verdict

OK, FAILED = Status.SUCCESS, Status.AGENT_ERROR
NEEDS_T0 = task("late", depends_on=("t0",))
T0_FAILED = "it depends on task t0, which ended as agent_error"


def skipped(reason: str) -> Verdict:
    return Verdict(Status.SKIPPED, reason)


class Noting(SequentialQueue):
    """Notes what it is given."""

    def __init__(self, *tasks: Task) -> None:
        super().__init__(experiment_of(tasks))
        self.entries: list[Entry] = []

    def put(self, entry: Entry) -> None:
        self.entries.append(entry)
        super().put(entry)


class Scripted(Noting):
    """Gives what it was told to give."""

    gives: Sequence[int | None] = ()

    def take(self, now_s: float, closed: Collection[str] = ()) -> int | None:
        given, *self.gives = self.gives
        return given
