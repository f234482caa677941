"""Changing what a run has to do, by its folder: add tasks, purge what waits, look at dead letters and retry them.

Who holds the run does it: its coordinator is asked, or, where nobody works at the run, its files are changed here, and
the next `continue` goes on with them. Either way it is on the disk when the call returns.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from sandbox_exec.contracts import Contract, Experiment, Status, Task
from sandbox_exec.control import ask
from sandbox_exec.coordinator import refusal, submitted_by
from sandbox_exec.errors import InvalidValue, QueueFull, RunLocked, RunNotActive
from sandbox_exec.experiment import load_tasks
from sandbox_exec.ledger import (
    BLOCKED,
    DISPLACED,
    Ledger,
    SlotFilter,
    Submitted,
    experiment_of,
    request_to_submit,
)
from sandbox_exec.runs import PathLike
from sandbox_exec.store import RunStore, attempt_folder, holder

_BETWEEN_S: Final = 10.0  # for a coordinator that begins or ends: it holds the run, and does not listen
_LOOK_S: Final = 0.05
_ROOM_S: Final = 0.25  # between two tries at a queue that is full
_DEAD: Final = """
    SELECT s.schedule_idx, s.trial_id, s.variant_id, s.task_id, s.repeat, c.status, c.error_type,
           (SELECT t.trial_id FROM schedule t WHERE t.retry_of = s.schedule_idx)
    FROM schedule s LEFT JOIN commits c ON c.schedule_idx = s.schedule_idx
    LEFT JOIN withdrawn w ON w.schedule_idx = s.schedule_idx
    WHERE c.status NOT IN (?, ?) OR w.kind = ? OR s.schedule_idx = ?
       OR (s.retry_of IS NOT NULL AND c.status = 'skipped')
    ORDER BY s.schedule_idx"""


class DeadAttempt(Contract):
    """One attempt at a trial that failed for good."""

    attempt: int
    status: Status
    error_type: str | None
    message: str
    exit_code: int | None
    counted: bool = Field(description="Whether it was the agent's own; not one lost to something else.")
    folder: Path


class DeadLetter(Contract):
    """A trial that failed for good, or was displaced before it began."""

    schedule_idx: int
    trial_id: str
    variant_id: str
    task_id: str
    repeat: int
    status: Status
    error_type: str | None
    message: str
    blocks: bool = Field(description="Whether it is not committed, as others need it, and the run stands still for it.")
    retried_as: str | None = Field(description="The trial that tries it again.")
    attempts: tuple[DeadAttempt, ...]


def submit(
    folder: PathLike, tasks: PathLike | Iterable[Task | Mapping[str, Any]], *, wait_s: float | None = 0.0
) -> Submitted:
    """Add tasks to the run in `folder`: all or none. They are on the disk when this returns.

    tasks: a JSONL file, or tasks. Their paths are relative to the experiment.
    wait_s: how long to wait for room if the queue is full; None: for ever.

    The same tasks again are merged with those that are there: after an error on the way, submit them again.
    Raises `InvalidExperiment` or `InvalidValue` with what is wrong with them, `QueueFull`.
    """
    folder = Path(os.path.abspath(folder))
    given = load_tasks(tasks) if isinstance(tasks, str | os.PathLike) else tasks
    with RunStore.open(folder, write=False) as store:
        experiment = experiment_of(store)
    request = request_to_submit(experiment, {one.id: one for one in experiment.tasks}, given)
    until_s = None if wait_s is None else time.monotonic() + wait_s
    while True:
        last = _last_event(folder)
        try:
            return submitted_by(_change(folder, request))
        except QueueFull:
            if until_s is not None and time.monotonic() >= until_s:
                raise
            time.sleep(_ROOM_S)
            # A try at a run that nobody works at holds it, and would keep out who wants to continue it.
            while holder(folder) is None and _last_event(folder) == last:
                if until_s is not None and time.monotonic() >= until_s:
                    raise
                time.sleep(_ROOM_S)


def purge(folder: PathLike, which: SlotFilter) -> list[str]:
    """Take out of the schedule what waits and is meant; it is committed as skipped. Return the trials' names."""
    answer = _change(Path(os.path.abspath(folder)), {"do": "purge", "filter": which.model_dump(exclude_none=True)})
    return list(answer["trials"])


def dead_letters(folder: PathLike) -> list[DeadLetter]:
    """What of the run failed for good, or was displaced, in the order of the schedule, with all its attempts."""
    folder = Path(os.path.abspath(folder))
    with RunStore.open(folder, write=False) as store:
        blocked = store.state().get(BLOCKED)
        rows = list(store.query(_DEAD, Status.SUCCESS.value, Status.SKIPPED.value, DISPLACED, blocked))
        reasons = {idx: reason for idx, (_, reason) in store.withdrawn().items()}
        return [_letter(store, row, blocked, reasons) for row in rows]


def retry_dead(folder: PathLike, trial_ids: Iterable[str]) -> dict[str, str]:
    """Schedule dead letters again. Return, by their names, those of the trials that try them again.

    One that is committed stays so, and is tried again as a further repeat, after all that is scheduled, with what was
    skipped because it failed; in reports, and for tasks that are added later, the later one stands for it. One that
    blocks the run gets further attempts.
    """
    dead = {letter.trial_id: letter for letter in dead_letters(folder)}
    names = list(dict.fromkeys(trial_ids))
    for name in names:
        if name not in dead:
            raise InvalidValue(f"{name!r} is no dead letter of this run; `sandbox-exec dead list` shows them")
        if dead[name].retried_as is not None:
            raise InvalidValue(f"{name!r} is tried again already, as {dead[name].retried_as!r}: retry that one")
    return dict(_change(Path(os.path.abspath(folder)), {"do": "retry", "trials": names})["trials"]) if names else {}


def drop_dead(folder: PathLike, trial_id: str) -> None:
    """Let a trial that blocks the run be committed as it ended: what needs it is skipped."""
    _change(Path(os.path.abspath(folder)), {"do": "give_up", "trials": [trial_id]})


# --- parts ---


def _last_event(folder: Path) -> int:
    with RunStore.open(folder, write=False) as store:
        ((last,),) = store.query("SELECT coalesce(max(id), 0) FROM events")
    return int(last)


def _change(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the coordinator; where there is none, do it."""
    until_s = time.monotonic() + _BETWEEN_S
    while True:
        try:
            answer = ask(folder, **request)
        except RunNotActive:
            try:
                return _change_here(folder, request)
            except RunLocked:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_LOOK_S)
        else:
            if "error" in answer:
                raise refusal(answer)
            return answer


def _change_here(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    with RunStore.open(folder) as store:
        experiment = Experiment.model_validate_json(store.run().experiment_json)
        answer = Ledger(store, experiment, time.monotonic).obey(request)
        control, progress = store.control(), store.progress()
        goes_on = control.status == "interrupted" and request["do"] in ("retry", "give_up")
        if goes_on or (control.status == "completed" and progress.committed < progress.slots):
            kept = {**control.metadata, "reason": "there is more to do: continue the run"}
            store.set_control("interrupted", **kept)
    return answer


def _letter(store: RunStore, row: tuple[Any, ...], blocked: int | None, reasons: Mapping[int, str]) -> DeadLetter:
    idx, trial_id, variant_id, task_id, repeat, status, error_type, retried_as = row
    attempts = []
    rows = store.query(
        "SELECT attempt, status, error_type, counted, completion FROM attempts WHERE schedule_idx = ? ORDER BY attempt",
        idx,
    )
    for number, its_status, its_error, counted, completion in rows:
        its = json.loads(completion)
        attempts.append(
            DeadAttempt(
                attempt=number,
                status=Status(its_status),
                error_type=its_error,
                message=(its.get("error") or {}).get("message", ""),
                exit_code=its.get("exit_code"),
                counted=bool(counted),
                folder=attempt_folder(store.folder, trial_id, number),
            )
        )
    last = attempts[-1] if attempts else None
    return DeadLetter(
        schedule_idx=idx,
        trial_id=trial_id,
        variant_id=variant_id,
        task_id=task_id,
        repeat=repeat,
        status=Status(status) if status is not None else last.status if last else Status.SKIPPED,
        error_type=error_type if status is not None else last.error_type if last else None,
        message=reasons.get(idx) or (last.message if last else ""),
        blocks=idx == blocked,
        retried_as=retried_as,
        attempts=tuple(attempts),
    )
