"""Queues and lanes in durable runs, from end to end: what starts when, what is committed, added, purged and retried.

Most runs are scripted, on a manual clock; where the agent's own part is asked for, trials are real.
"""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from runs_support import Script, completions, events, experiment, history_of, run_local, statuses
from support import Meeting, meetings, spin_until

from sandbox_exec import runs
from sandbox_exec.contracts import AgentError, Experiment, Grade, Phase, Slot, Status, TrialCompletion, TrialDispatch
from sandbox_exec.contracts.words import ProviderUse
from sandbox_exec.control import ask
from sandbox_exec.coordinator import Coordinator, RunCallback, RunEnd
from sandbox_exec.errors import InvalidExperiment, InvalidValue, QueueFull
from sandbox_exec.ledger import SlotFilter, Submitted
from sandbox_exec.regrade import grade_run
from sandbox_exec.report import report_of
from sandbox_exec.runs import RunStatus, continue_run, make_run, status_of
from sandbox_exec.store import RunStore
from sandbox_exec.submission import DeadLetter, dead_letters, drop_dead, purge, retry_dead, submit
from sandbox_exec.testing import HOLDS, ManualClock, Play, ScriptedBackend

COMPLETED = RunEnd("completed")
OK, FAILED, SKIPPED = Status.SUCCESS, Status.AGENT_ERROR, Status.SKIPPED
FAILS = Play(FAILED, "ValueError")
ONE_BY_ONE = {"max_concurrency": 1}
BLOCK = {"queue": {"failed_dependency": "block"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "base"


# --- runs ---


class Worked:
    """What came of a coordinator's work at a run."""

    def __init__(self, end: RunEnd, backend: ScriptedBackend, clock: ManualClock, folder: Path) -> None:
        self.end, self.clock = end, clock
        with RunStore.open(folder, write=False) as store:
            slots = list(store.slots())
        began = [idx for what, idx, _ in backend.asked if what == "begin"]
        self.started = [slots[idx].task_id for idx in began]  # in the order of their starts


def work(
    folder: Path,
    one: Experiment | None = None,
    script: Script = lambda dispatch: Play(),
    *,
    capacity: int = 4,
    clock: ManualClock | None = None,
    callbacks: Iterable[RunCallback] = (),
    **more: Any,
) -> Worked:
    """Work at the run in `folder` with scripted trials: a new one of `one`, or the one that is there."""
    clock = clock or ManualClock(1000.0)
    backend = ScriptedBackend(clock, capacity, script, patience_s=5.0)
    if one is not None:
        store, frozen = make_run(one, folder)
    else:
        store = RunStore.open(folder)
        frozen = Experiment.model_validate_json(store.run().experiment_json)
    try:
        with store:
            end = Coordinator(store, frozen, backend, callbacks=callbacks, clock=clock, **more).run()
    finally:
        backend.close()
    return Worked(end, backend, clock, folder)


def fates(**by_task: Play | Sequence[Play]) -> Script:
    """By task, how its attempts end; all others succeed. The last one is for those that follow."""

    def script(dispatch: TrialDispatch) -> Play:
        plays = by_task.get(dispatch.task.id, Play())
        plays = [plays] if isinstance(plays, Play) else plays
        return plays[min(dispatch.attempt, len(plays)) - 1]

    return script


def leave(folder: Path, dispatch: TrialDispatch, status: Status = OK, **fields: Any) -> Play:
    """A play that ends with a completion of these fields."""
    completion = TrialCompletion(
        slot=dispatch.slot,
        trial_id=dispatch.trial_id,
        attempt=dispatch.attempt,
        status=status,
        phase=Phase.AGENT,
        **fields,
    )
    place = folder / "trials" / dispatch.trial_id / f"attempt-{dispatch.attempt}"
    (place / "completion.json").write_text(completion.model_dump_json())
    return Play(None)


class On(RunCallback):
    """Does something at the nth start, or after the nth commit, or when the run begins; in the coordinator's thread."""

    def __init__(
        self,
        *,
        begin: Callable[[Coordinator], object] | None = None,
        start: Callable[[Coordinator], object] | None = None,
        end: Callable[[Coordinator], object] | None = None,
        nth: int = 1,
    ) -> None:
        self._begin, self._what, self._left = begin, {"start": start, "end": end}, {"start": nth, "end": nth}
        self.got: list[Any] = []

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run
        if self._begin is not None:
            self._do(self._begin)

    def on_trial_start(self, slot: Slot, attempt: int) -> None:
        self._count("start")

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self._count("end")

    def _count(self, when: str) -> None:
        self._left[when] -= 1
        what = self._what[when]
        if self._left[when] == 0 and what is not None:
            self._do(what)

    def _do(self, what: Callable[[Coordinator], object]) -> None:
        try:
            self.got.append(what(self._run))
        except Exception as error:
            self.got.append(error)


def row(task_id: str, **protocol: Any) -> dict[str, Any]:
    """A task like no other: the same content would be merged."""
    return {"id": task_id, "input": {"of": task_id}, **({"protocol": protocol} if protocol else {})}


def history_tasks(folder: Path) -> list[str]:
    with RunStore.open(folder, write=False) as store:
        slots = list(store.slots())
    return [slots[json.loads(line)["slot"]].task_id for line in history_of(folder)]


def kinds(folder: Path, trial: str) -> list[str]:
    """The kinds of the events of one task's trials, in order."""
    with RunStore.open(folder, write=False) as store:
        found = list(store.events())
    return [one.kind for one in found if f".{trial}." in str(one.data.get("trial_id", ""))]


def reasons(folder: Path) -> dict[str, str]:
    """By task, why it was skipped."""
    with RunStore.open(folder, write=False) as store:
        rows = list(
            store.query(
                """SELECT s.task_id, a.completion FROM commits c JOIN schedule s USING (schedule_idx)
                   LEFT JOIN attempts a ON a.schedule_idx = c.schedule_idx AND a.attempt = c.attempt
                   WHERE c.status = 'skipped'"""
            )
        )
    return {task_id: json.loads(text)["error"]["message"] if text else "" for task_id, text in rows}


def by_task(folder: Path) -> dict[str, str]:
    """By task, what it was last committed as."""
    with RunStore.open(folder, write=False) as store:
        slots = list(store.slots())
        return {slots[one.schedule_idx].task_id: one.status.value for one in store.commits()}


# --- probes ---


def test_probe_drop_dead(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", {"id": "b", "depends_on": ["a"]}], design=BLOCK)
    assert work(folder, one, fates(a=FAILS)).end.status == "interrupted"
    (dead,) = dead_letters(folder)
    drop_dead(folder, dead.trial_id)
    again = work(folder)
    assert (again.end, again.started, statuses(folder)) == (COMPLETED, [], [FAILED, SKIPPED])


def test_probe_drop_dead_live(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", {"id": "b", "depends_on": ["a"]}], design=BLOCK)
    assert work(folder, one, fates(a=FAILS)).end.status == "interrupted"
    (dead,) = dead_letters(folder)
    on = On(begin=lambda run: run._change({"do": "give_up", "trials": [dead.trial_id]}))
    again = work(folder, callbacks=[on])
    assert (again.end, again.started, statuses(folder)) == (COMPLETED, [], [FAILED, SKIPPED])


def test_probe_lane_state_at_drain(base: Path, folder: Path) -> None:
    one = experiment(base, ["a"], [{"id": "v", "agent": {"python": "agents:play"}, "lane": "x"}], lanes={"x": {}})
    away = Play(Status.RATE_LIMITED, retry_after_s=1000.0)
    work(folder, one, fates(a=away), callbacks=[On(start=lambda run: run.drain("test"))])
    assert status_of(folder).lanes["x"]["blocked_s"] >= 1000  # type: ignore[index]
    again = work(folder)
    assert again.clock.now_s() == 1900


def test_probe_purge_then_submit(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b"], design={"queue": {"max_waiting": 2}})
    work(folder, one, callbacks=[On(begin=lambda run: run.drain("test"))])
    assert len(purge(folder, SlotFilter())) == 2
    submit(folder, [row("c"), row("d")])


def test_probe_on_ready(base: Path, tmp_path: Path) -> None:
    one = experiment(base, ["a"])
    got: list[Submitted] = []
    runs.run(
        one,
        runs=tmp_path,
        run_id="run",
        backend=ScriptedBackend(ManualClock()),
        on_ready=lambda run: got.append(run.submit([row("b")])),
    )
    assert got[0].tasks == ("b",)


def adaptive(base: Path, tasks: int = 12, *, variants: Sequence[str] = ("v",), **settings: Any) -> Experiment:
    rows = [{**row(f"t{n:02}"), "item": {"difficulty": n / 2 - 3}} for n in range(tasks)]
    design = {"order": "adaptive", "max_concurrency": 4, "queue": {"adaptive": settings}}
    return experiment(base, rows, variants, design=design, grading={"command": ["true"]})


def solves(folder: Path, ability: float = 0.3) -> Script:
    def script(dispatch: TrialDispatch) -> Play:
        item = dispatch.task.item
        solved = (item.difficulty if item else 0.0) < ability
        return leave(folder, dispatch, grade=Grade(score=float(solved), passed=solved))

    return script


def test_probe_adaptive_submit_when_done(base: Path, folder: Path) -> None:
    work(folder, adaptive(base, 4), solves(folder))
    assert statuses(folder) == [OK] * 4
    more = submit(folder, [{**row(f"n{n}"), "item": {"difficulty": 0.1 * n}} for n in range(3)])
    assert more.trials == more.waiting == 3
    work(folder, None, solves(folder))
    assert statuses(folder) == [OK] * 7


def test_probe_adaptive_submit_live(base: Path, folder: Path) -> None:
    on = On(end=lambda run: run.submit([row("new")]), nth=4)
    work(folder, adaptive(base, 4), solves(folder), callbacks=[on])
    assert by_task(folder)["new"] == "success"


def test_probe_adaptive_retry(base: Path, folder: Path) -> None:
    def script(dispatch: TrialDispatch) -> Play:
        return FAILS if dispatch.task.id == "t01" else solves(folder)(dispatch)

    work(folder, adaptive(base, 4), script)
    (dead,) = dead_letters(folder)
    retry_dead(folder, [dead.trial_id])
    work(folder, None, solves(folder))
    assert statuses(folder) == [1], (statuses(folder), status_of(folder))


def test_probe_adaptive_depends(base: Path, folder: Path) -> None:
    on = On(start=lambda run: run.submit([{**row("new"), "depends_on": ["t11"], "item": {"difficulty": 0.0}}]))
    got = work(folder, adaptive(base, 12, max_tasks=6), solves(folder), callbacks=[on])
    assert got.end == COMPLETED
    assert isinstance(on.got[0], InvalidExperiment)
    assert len(statuses(folder)) == 6


def test_probe_first_retry_chain(base: Path, folder: Path) -> None:
    tasks = [{**row("f", serial="first"), "chain": "x"}, {**row("c"), "chain": "x"}, row("d")]
    one = experiment(base, tasks, design=ONE_BY_ONE)
    work(folder, one, fates(f=FAILS), callbacks=[On(start=lambda run: run.drain("test"))])
    (dead,) = dead_letters(folder)
    retry_dead(folder, [dead.trial_id])
    assert work(folder).end == COMPLETED


def test_probe_retry_then_dependants(base: Path, folder: Path) -> None:
    one = experiment(base, [row("a")])
    work(folder, one, fates(a=FAILS))
    (dead,) = dead_letters(folder)
    retry_dead(folder, [dead.trial_id])
    work(folder)
    submit(folder, [{**row("b"), "depends_on": ["a"]}])
    work(folder)
    assert by_task(folder)["b"] == "success"


def test_probe_workspace_grading(base: Path, folder: Path) -> None:
    one = experiment(base, [row("a")], grading={"command": ["true"]})
    (base / "w" / "secret").mkdir(parents=True)
    (base / "w" / "secret" / "s").write_text("x")
    work(folder, one)
    with pytest.raises(InvalidExperiment, match="grading"):
        submit(folder, [{**row("b"), "workspace": "w", "grading": {"assets": "w/secret"}}])


def test_probe_rubbish_text(base: Path, folder: Path) -> None:
    base.mkdir()
    (base / "rubbish_text.py").write_text(
        "from sandbox_exec import SequentialQueue\nclass Mine(SequentialQueue):\n"
        "    def take(self, now_s, closed=()):\n        return 'a'\n"
    )
    got = work(folder, experiment(base, [row("a")], design={"order": "rubbish_text:Mine"}))
    assert got.end.status == "failed"
    assert "take" in got.end.reason


def test_probe_two_bases(base: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        place = tmp_path / name
        place.mkdir()
        (place / "same_name.py").write_text(
            "from sandbox_exec import SequentialQueue\nclass Mine(SequentialQueue):\n"
            f"    def report(self):\n        return '{name}'\n"
        )
        work(tmp_path / f"run-{name}", experiment(place, [row("a")], design={"order": "same_name:Mine"}))
        assert status_of(tmp_path / f"run-{name}").queue == name


def test_probe_workers(base: Path, tmp_path: Path) -> None:
    pass


def test_probe_selected_submit(base: Path, folder: Path) -> None:
    class Adds(RunCallback):
        def on_run_start(self, run: Coordinator) -> None:
            self.run, self.seen = run, []

        def on_trial_selected(self, slot: Slot, attempt: int) -> None:
            if slot.task_id == "a":
                self.run.submit([row("b")])
                with RunStore.open(folder, write=False) as store:
                    self.seen.append(len(list(store.slots())))

    adds = Adds()
    work(folder, experiment(base, [row("a")]), callbacks=[adds])
    assert by_task(folder) == {"a": "success", "b": "success"}
    assert adds.seen == [2]
