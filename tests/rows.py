"""Slots and completions for the tests of the store, small and the same every time."""

from __future__ import annotations

from pathlib import Path

from sandbox_exec.contracts import (
    ActiveTrial,
    AgentError,
    Grade,
    Phase,
    Slot,
    Status,
    TrialCompletion,
    Usage,
    derive_trial_id,
)
from sandbox_exec.store.db import CommitRow, RunStore


def slot(idx: int) -> Slot:
    return Slot(schedule_idx=idx, variant_id="careful", task_id=f"task-{idx // 2}", repeat=idx % 2)


def completion(
    idx: int,
    status: Status = Status.SUCCESS,
    *,
    attempt: int = 1,
    error_type: str | None = None,
    grade: Grade | None = None,
    traceback: str = "",
    wall_s: float = 0.5,
) -> TrialCompletion:
    error = AgentError(type=error_type, message="it broke", traceback=traceback) if error_type else None
    return TrialCompletion(
        slot=slot(idx),
        trial_id=derive_trial_id(slot(idx)),
        attempt=attempt,
        status=status,
        phase=Phase.AGENT,
        result_sha256=f"{idx:064x}" if status is Status.SUCCESS else None,
        error=error,
        grade=grade,
        usage=Usage(wall_s=wall_s),
    )


def row(idx: int, status: Status = Status.SUCCESS, *, attempt: int = 1, error_type: str | None = None) -> CommitRow:
    return CommitRow(completion(idx, status, attempt=attempt, error_type=error_type), counted=True)


def active(run: Path, idx: int, attempt: int = 1, worker: str = "w1") -> ActiveTrial:
    trial_id = derive_trial_id(slot(idx))
    folder = run / "trials" / trial_id / f"attempt-{attempt}"
    return ActiveTrial(slot=slot(idx), trial_id=trial_id, attempt=attempt, folder=folder, worker=worker)


def make_run(folder: Path, slots: int = 8) -> RunStore:
    """A run whose times are all 0, so that two of them can be compared as a whole."""
    return RunStore.create(folder, "run-1", '{"name":"x"}', map(slot, range(slots)), {"a": "1"}, now=lambda: 0.0)
