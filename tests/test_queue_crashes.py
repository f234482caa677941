"""Kill -9 with queues, lanes, submissions and dead letters in play: nothing lost, nothing twice, the same history."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest
from runs_support import (
    At,
    KillAt,
    Script,
    assert_nothing_ran_twice,
    events,
    experiment,
    history_of,
    in_child,
    in_children,
    open_run,
    work_at,
)
from test_crashes import COORDINATOR_POINTS, KILLED, own_attempts

from sandbox_exec import submission
from sandbox_exec.backends.base import WorkerTicket
from sandbox_exec.contracts import Cell, Grade, Slot, Status, TrialCompletion, TrialDispatch
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.coordinator import Coordinator, RunCallback, RunEnd
from sandbox_exec.errors import InvalidValue
from sandbox_exec.ledger import DISPLACED, PURGED, SlotFilter
from sandbox_exec.schedule.queues import SequentialQueue
from sandbox_exec.store import POINTS, RunStore, db
from sandbox_exec.testing import HOLDS, Bells, ManualClock, Play, ScriptedBackend

Row = dict[str, Any]
Step = Callable[[Path, At | None], None]  # the second time, it does what the first time did not do


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process wrote is in the kernel's hands, on the disk or not."""
    connect = db._connect

    def connect_fast(path: Path, mode: str) -> sqlite3.Connection:
        connection = connect(path, mode)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    monkeypatch.setattr(db, "_connect", connect_fast)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# --- stories: what is done at a run, one step after the other ---


@dataclass(frozen=True)
class Story:
    """Steps that somebody does at a run. Who is killed on the way begins again with the step that was not done."""

    one: Experiment
    steps: Sequence[Step]

    def tell(self, folder: Path, at: At | None = None) -> None:
        for number, step in enumerate(self.steps):
            done = folder.with_name(f"{folder.name}.step-{number}")
            if not done.exists():
                step(folder, at)
                done.touch()


class Told:
    """What a story comes to when nothing disturbs it, and all points on the way, in order."""

    def __init__(self, story: Story, folder: Path) -> None:
        self.story, self.points = story, list[str]()
        story.tell(folder, self.points.append)
        self.history = history_of(folder)
        self.check(folder)

    def check(self, folder: Path) -> None:
        assert history_of(folder) == self.history, folder.name
        assert [json.loads(line)["slot"] for line in self.history] == list(range(len(self.history)))
        with RunStore.open(folder, write=False) as store:
            assert store.progress().committed == store.progress().slots
        assert_nothing_ran_twice(folder)
        assert not events(folder, "callback_failed"), folder.name

    def cases(self, seed: int, more: int) -> list[tuple[str, int]]:
        """Every name of a point once, somewhere, and some more."""
        fate = random.Random(seed)
        counts = Counter(self.points)
        once = {(point, fate.randint(1, count)) for point, count in counts.items()}
        all_of_them = [(point, nth) for point, count in counts.items() for nth in range(1, count + 1)]
        return sorted(once | set(fate.sample(all_of_them, min(more, len(all_of_them)))))

    def kill(self, folder: Path, point: str, nth: int) -> bool:
        """Tell it until that point; False if it was over before."""
        ended = in_child(partial(self.story.tell, folder, KillAt(point, nth)))
        assert ended in (KILLED, 0), (folder.name, ended)
        assert_acknowledged(folder)
        return ended == KILLED

    def kill_everywhere(self, place: Path, seed: int, more: int) -> None:
        """Kill at each of the `cases`, and half of the time once more on the way to the end."""

        def work(part: int) -> None:
            fate = random.Random(f"{seed} {part}")
            for point, nth in self.cases(seed, more)[part::2]:
                folder = place / f"{point}-{nth}"
                assert self.kill(folder, point, nth), folder.name
                if fate.random() < 0.5:
                    self.kill(folder, "*", fate.randint(1, len(self.points)))
                self.story.tell(folder)
                self.check(folder)

        place.mkdir(exist_ok=True)
        assert in_children([partial(work, 0), partial(work, 1)]) == [0, 0]

    def kill_again_and_again(self, folder: Path, seed: int) -> int:
        """Return how often it was killed."""
        fate, longest, kills = random.Random(seed), 12, 0
        while self.kill(folder, "*", fate.randrange(5, longest)):
            longest += 2
            kills += 1
        self.check(folder)
        return kills


def assert_acknowledged(folder: Path) -> None:
    """What somebody was told that it is there is there; and of what is there, all tasks of one batch."""
    if not (folder / "run.db").exists():
        return
    with contextlib.suppress(InvalidValue), RunStore.open(folder, write=False) as store:  # it is not made yet
        there = {task.id for task in store.submitted()}
        for note in folder.parent.glob(f"{folder.name}.acknowledged-*"):
            assert set(json.loads(note.read_text())) <= there, folder.name
        scheduled = {slot.task_id for slot in store.slots()}
        made_with = {task.id for task in Experiment.model_validate_json(store.run().experiment_json).tasks}
        assert scheduled <= there | made_with


class Submits(RunCallback):
    """Adds tasks once so many slots are committed, in the coordinator's own thread; again, if nobody answered."""

    def __init__(self, folder: Path, batches: Sequence[tuple[int, list[Row]]]) -> None:
        self._folder, self._batches = folder, batches

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run
        self._submit()

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self._submit()

    def _submit(self) -> None:
        for after, rows in self._batches:
            note = self._folder.with_name(f"{self._folder.name}.acknowledged-{rows[0]['id']}")
            if self._run.board.next_to_commit >= after and not note.exists():
                told = self._run.submit(rows)
                assert {*told.tasks, *told.merged} == {row["id"] for row in rows}
                note.write_text(json.dumps([row["id"] for row in rows]))


class Graded(ScriptedBackend):
    """Each trial that is there at once has a grade, which follows from its name."""

    def begin(self, ticket: WorkerTicket) -> None:
        super().begin(ticket)
        path = ticket.folder / "completion.json"
        if path.exists():
            completion = TrialCompletion.model_validate_json(path.read_text())
            grade = Grade(score=random.Random(ticket.trial_id).random())
            if completion.ok:
                path.write_text(completion.model_copy(update={"grade": grade}).model_dump_json())


def works(
    one: Experiment,
    script: Callable[[Path], Script],
    *batches: tuple[int, list[Row]],
    end: str = "completed",
    callbacks: Sequence[RunCallback] = (),
) -> Step:
    """A coordinator's life. `batches`: tasks that join after so many commits."""

    def step(folder: Path, at: At | None) -> None:
        clock = ManualClock(1000.0)
        backend = Graded(clock, one.design.max_concurrency, script(folder))
        called = [Submits(folder, batches), *callbacks]
        ended = work_at(folder, one, backend, at=at, callbacks=called, clock=clock)
        assert ended.status == end, ended

    return step


def outside(act: Callable[[Path], object]) -> Step:
    """Somebody else changes the run, which nobody holds. An error says that it was done before."""

    def step(folder: Path, at: At | None) -> None:
        class Watched(RunStore):
            @classmethod
            def open(cls, folder: Path, write: bool = True, **more: Any) -> Self:
                return super().open(folder, write, at=at, **more)

        with patch.object(submission, "RunStore", Watched):
            act(folder)

    return step


def submits(*rows: Row) -> Step:
    def act(folder: Path) -> None:
        told = submission.submit(folder, rows)
        assert {*told.tasks, *told.merged} == {row["id"] for row in rows}
        note = folder.with_name(f"{folder.name}.acknowledged-{rows[0]['id']}")
        note.write_text(json.dumps([row["id"] for row in rows]))

    return outside(act)


def retries(*task_ids: str) -> Step:
    """Try the dead letters of these tasks again, unless that is under way."""

    def act(folder: Path) -> None:
        dead = [one for one in submission.dead_letters(folder) if one.task_id in task_ids and one.retried_as is None]
        origins = [one for one in dead if one.repeat == 0]
        submission.retry_dead(folder, [one.trial_id for one in origins])

    return outside(act)


# --- each order ---


class Doubts(SequentialQueue):
    """Takes the last one first, asks once for another repeat of what failed, and has seen enough after 11 commits."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._asked = self._seen = 0

    def take(self, now_s: float, closed: Any = ()) -> int | None:
        found = max((idx for idx, variant in self._held.items() if variant not in closed), default=None)
        if found is not None:
            self.discard(found)
        return found

    def observe(self, completion: TrialCompletion) -> Sequence[Cell]:
        self._seen += 1
        if completion.status is not Status.AGENT_ERROR or completion.slot.repeat:
            return ()
        self._asked += 1
        return [Cell(completion.slot.variant_id, completion.slot.task_id, 10 + self._asked)]

    def should_continue(self) -> bool:
        return self._seen < 11

    def snapshot(self) -> Any:
        return [self._asked, self._seen]

    def restore(self, state: Any, tasks: Sequence[Any]) -> None:
        self._asked, self._seen = state


def fates(folder: Path) -> Script:
    """What happens follows from the task, and from how often its own agent has ended."""

    def script(dispatch: TrialDispatch) -> Play:
        before, idx = own_attempts(folder, dispatch), dispatch.slot.schedule_idx
        bells: Bells = (("started", 0), ("finished", idx % 3))
        match dispatch.task.id:
            case "fails":
                return Play(Status.AGENT_ERROR, "KeyError", bells=bells)
            case "fails once" if before < 1:
                return Play(Status.AGENT_ERROR, "ValueError", bells=bells, early=False)
            case "is lost" if dispatch.attempt == 1:
                return Play(None, bells=(("lost", 1),))
            case "is turned away" if dispatch.attempt == 1:
                return Play(Status.RATE_LIMITED, retry_after_s=5.0, bells=bells)
        return Play(result_sha256=f"{dispatch.seed}", bells=bells, early=idx % 2 == 0)

    return script


LANE = {"max_concurrent": 4, "adaptive": True}


def variant(**fields: Any) -> Row:
    return {"id": "v", "agent": {"python": "agents:play"}, **fields}


def eventful(base: Path, order: str, at_once: int) -> Story:
    """Everything there is for an order that takes any task."""
    tasks: list[Row] = [
        {"id": "begins", "protocol": {"serial": "first"}},
        {"id": "fails once", "protocol": {"max_retries": 1, "priority": "low"}},
        {"id": "fails", "protocol": {"priority": "high"}},
        {"id": "needs what fails", "depends_on": ["fails"]},
        {"id": "is turned away", "chain": "c"},
        {"id": "is lost", "chain": "c", "protocol": {"deadline_s": 100.0}},
    ]
    one = experiment(
        base,
        tasks,
        [variant(lane="x")],
        design={"order": order, "max_concurrency": at_once},
        lanes={"x": LANE},
    )
    early: list[Row] = [
        {"id": "early", "input": 1, "depends_on": ["begins"], "protocol": {"priority": "critical"}},
        {"id": "alone", "input": 2, "protocol": {"serial": "global"}},
    ]
    late: list[Row] = [{"id": "needs early", "input": 3, "depends_on": ["early"]}]
    return Story(
        one,
        [
            works(one, fates, (1, early), (4, late)),
            submits({"id": "later", "input": 4, "protocol": {"max_retries": 1}}, {"id": "last", "input": 5}),
            retries("fails"),
            works(one, fates),
        ],
    )


def adaptive(base: Path, at_once: int) -> Story:
    tasks = [{"id": f"t{n}", "item": {"difficulty": n / 2 - 2}} for n in range(8)]
    settings = {"look_ahead": 2, "max_tasks": 5, "standard_error": None}
    one = experiment(
        base,
        [{"input": n, **row} for n, row in enumerate(tasks)],
        [variant(lane="x"), variant(id="w")],
        design={"order": "adaptive", "max_concurrency": at_once, "queue": {"adaptive": settings}},
        grading={"python": "agents:not_a_number"},
        lanes={"x": LANE},
    )
    easy: list[Row] = [{"id": "easy", "input": 100, "item": {"difficulty": -0.6, "discrimination": 2.0}}]
    # At a place in the schedule that is the same at any concurrency: before all, or where commits go one by one.
    after = 0 if at_once > 1 else 3
    hard: list[Row] = [{"id": "hard", "input": 101, "item": {"difficulty": 1.1, "discrimination": 2.0}}]
    return Story(one, [works(one, graded_fates, (after, easy)), submits(*hard), works(one, graded_fates)])


def graded_fates(folder: Path) -> Script:
    def script(dispatch: TrialDispatch) -> Play:
        fate = random.Random(dispatch.trial_id).random()
        bells: Bells = (("started", 0), ("finished", dispatch.slot.schedule_idx % 3))
        if dispatch.slot.schedule_idx in (3, 5) and dispatch.attempt == 1:
            return Play(Status.RATE_LIMITED, retry_after_s=5.0, bells=bells)
        return Play(Status.AGENT_ERROR if fate > 0.8 else Status.SUCCESS, bells=bells)

    return script


ORDERS = ("sequential", "priority", "adaptive", f"{__name__}:Doubts")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Told]:
    """A story of each order, told once for each concurrency."""
    known: dict[tuple[str, int], Told] = {}

    def get(order: str, at_once: int) -> Told:
        if (order, at_once) not in known:
            place = tmp_path_factory.mktemp("calm")
            base = place / "base"
            story = adaptive(base, at_once) if order == "adaptive" else eventful(base, order, at_once)
            known[order, at_once] = Told(story, place / "run")
        return known[order, at_once]

    return get


@pytest.mark.parametrize("order", ORDERS)
def test_the_stories_are_as_varied_as_they_say(told: Callable[[str, int], Told], order: str) -> None:
    one, four = told(order, 1), told(order, 4)
    assert {*COORDINATOR_POINTS, "changed"} <= {*one.points, *four.points}
    assert {f"batch:{point}" for point in POINTS} <= set(one.points)
    if order != "adaptive":
        assert one.history == four.history


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_killed_at_any_point_the_story_comes_out_the_same(
    told: Callable[[str, int], Told], tmp_path: Path, order: str, at_once: int
) -> None:
    told(order, at_once).kill_everywhere(tmp_path / "runs", seed=at_once, more=3)


@pytest.mark.parametrize("order", ORDERS)
def test_killed_again_and_again_the_story_comes_to_its_end(
    told: Callable[[str, int], Told], tmp_path: Path, order: str
) -> None:
    def work(seed: int) -> None:
        assert told(order, 4).kill_again_and_again(tmp_path / f"run-{seed}", seed) > 3

    told(order, 4)
    assert in_children([partial(work, seed) for seed in range(2)]) == [0] * 2


# --- dead letters that block the run ---


def blocking(base: Path, at_once: int) -> Story:
    """`a` fails until its second budget, `b` for good; others need them, and one has more attempts than both."""
    one = experiment(
        base,
        [
            {"id": "a", "protocol": {"max_retries": 1}},
            {"id": "b", "protocol": {"max_retries": 1}},
            {"id": "has many attempts", "protocol": {"max_retries": 5}},
            {"id": "needs a", "depends_on": ["a"]},
            {"id": "needs b", "depends_on": ["b"]},
        ],
        design={"max_concurrency": at_once, "queue": {"failed_dependency": "block"}},
    )

    def script(folder: Path) -> Script:
        def play(dispatch: TrialDispatch) -> Play:
            fails = own_attempts(folder, dispatch) < {"a": 3, "b": 1000, "has many attempts": 5}.get(
                dispatch.task.id, 0
            )
            return Play(Status.AGENT_ERROR, "KeyError") if fails else Play(result_sha256=f"{dispatch.seed}")

        return play

    stands = works(one, script, end="interrupted")
    again = works(one, script, (0, [{"id": "joins", "input": 1, "depends_on": ["b"]}]), end="interrupted")
    return Story(one, [stands, retries("a"), stands, retries("b"), again, outside(drop), works(one, script)])


def drop(folder: Path) -> None:
    for one in submission.dead_letters(folder):
        if one.blocks:
            submission.drop_dead(folder, one.trial_id)


@pytest.mark.parametrize("at_once", [1, 4])
def test_what_blocks_the_run_is_retried_and_given_up_once(tmp_path: Path, at_once: int) -> None:
    told = Told(blocking(tmp_path / "base", at_once), tmp_path / "calm")
    lines = {line["task"]: line for line in map(json.loads, told.history)}
    assert [len(lines[task]["attempts"]) for task in ("a", "b", "has many attempts")] == [4, 4, 6]
    assert {task for task, line in lines.items() if line["status"] == "success"} == {
        "a",
        "needs a",
        "has many attempts",
    }
    assert {lines[task]["error_type"] for task in ("needs b", "joins")} == {"Skipped"}
    told.kill_everywhere(tmp_path / "runs", seed=at_once, more=12)


# --- purged and displaced ---


class Purges(RunCallback):
    """Purges by name, in the coordinator's own thread, once the first slot is committed."""

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run
        self._purge()

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self._purge()

    def _purge(self) -> None:
        if self._run.board.next_to_commit >= 1:
            self._run._change({"do": "purge", "filter": {"task": "not any more *"}})


def crowded(base: Path, at_once: int) -> Story:
    tasks: list[Row] = [
        {"id": "begins", "protocol": {"serial": "first"}},
        {"id": "low 1", "protocol": {"priority": "low"}},
        {"id": "low 2", "protocol": {"priority": "low"}},
        {"id": "low 3", "protocol": {"priority": "low"}},
        {"id": "old 1", "protocol": {"tags": ["old"]}},
        {"id": "old 2", "protocol": {"tags": ["old"]}},
        *({"id": f"t{number}"} for number in range(4)),
        {"id": "not any more 1"},
        {"id": "not any more 2"},
    ]
    one = experiment(
        base,
        [{"input": number, **row} for number, row in enumerate(tasks)],
        design={"max_concurrency": at_once, "queue": {"max_waiting": len(tasks) - 2, "when_full": "displace"}},
    )

    def high(name: str, number: int) -> Row:
        return {"id": name, "input": number, "protocol": {"priority": "high"}}

    return Story(
        one,
        [
            lambda folder, at: open_run(folder, one, at).close(),
            outside(lambda folder: submission.purge(folder, SlotFilter(tag="old"))),
            submits(high("comes", 100)),
            works(one, fates, (0, [high("comes late", 101)]), callbacks=[Purges()]),
            retries("low 2"),
            works(one, fates),
        ],
    )


@pytest.mark.parametrize("at_once", [1, 4])
def test_what_was_purged_or_displaced_stays_so(tmp_path: Path, at_once: int) -> None:
    told = Told(crowded(tmp_path / "base", at_once), tmp_path / "calm")
    lines = [json.loads(line) for line in told.history]
    by_type = {
        kind: [line["task"] for line in lines if line["error_type"] == kind and line["status"] == "skipped"]
        for kind in (PURGED, DISPLACED)
    }
    assert by_type[PURGED] == ["old 1", "old 2", "not any more 1", "not any more 2"]
    assert by_type[DISPLACED] == ["low 1", "low 2"]
    assert [(line["task"], line["repeat"], line["status"]) for line in lines[-1:]] == [("low 2", 1, "success")]
    told.kill_everywhere(tmp_path / "runs", seed=at_once, more=4)


# --- lanes ---


class Watches(RunCallback):
    """What the lanes are like when a coordinator begins, and when the trials of each variant begin."""

    def __init__(self) -> None:
        self.lanes: Row = {}
        self.began_s: dict[str, list[float]] = {"v": [], "w": []}

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run
        self.lanes = run.figures()["lanes"]

    def on_trial_selected(self, slot: Slot, attempt: int) -> None:
        self.began_s[slot.variant_id].append(self._run._clock.now_s())


TURNED_AWAY_S = 3000.0


def test_a_lane_that_is_blocked_is_so_after_a_crash_and_no_other_one(tmp_path: Path) -> None:
    one = experiment(
        tmp_path / "base",
        ["a", "b", "c"],
        [variant(lane="x"), variant(id="w", lane="y")],
        design={"max_concurrency": 2},
        lanes={"x": {"max_concurrent": 8, "rpm": 6000, "adaptive": True}, "y": {"rpm": 6000}},
    )

    def script(folder: Path) -> Script:
        def play(dispatch: TrialDispatch) -> Play:
            turned_away = dispatch.variant.id == "v" and dispatch.task.id == "b" and dispatch.attempt == 1
            return Play(Status.RATE_LIMITED, retry_after_s=TURNED_AWAY_S) if turned_away else Play()

        return play

    def live(folder: Path, at: At | None = None) -> Watches:
        watches = Watches()
        works(one, script, callbacks=[watches])(folder, at)
        return watches

    points: list[str] = []
    noted: list[int] = []  # how many points there were when a trial of v was chosen

    class Notes(RunCallback):
        def on_trial_selected(self, slot: Slot, attempt: int) -> None:
            if slot.variant_id == "v":
                noted.append(len(points))

    works(one, script, callbacks=[Notes()])(tmp_path / "calm", points.append)
    due = history_of(tmp_path / "calm")
    assert len(noted) == 4
    begun = noted[1] + points[noted[1] :].index("begun") + 1
    assert {"requeued", "batch:before-commit", "batch:after-commit"} <= set(points[begun : noted[2]])

    # A callback hears of a choice when its transaction is over.
    last = noted[2] - points[noted[2] - 1 :: -1].index("batch:in-transaction")

    def work(part: int) -> None:
        for nth in range(begun, last + 1)[part::2]:
            folder = tmp_path / f"{nth}-{points[nth - 1]}"
            assert in_child(partial(live, folder, KillAt("*", nth))) == KILLED
            with RunStore.open(folder, write=False) as store:
                ((starts,),) = store.query(
                    """SELECT sum(attempt) FROM (SELECT schedule_idx, max(attempt) AS attempt FROM
                       (SELECT schedule_idx, attempt FROM attempts UNION SELECT schedule_idx, attempt FROM active)
                       GROUP BY schedule_idx) JOIN schedule USING (schedule_idx) WHERE variant_id = 'v'"""
                )
            seen = live(folder)
            assert seen.lanes["x"]["blocked_s"] > TURNED_AWAY_S - 100, folder.name
            assert seen.lanes["x"]["limit"] == 4, folder.name
            assert seen.lanes["x"]["starts_in_window"] == starts, folder.name
            assert seen.lanes["y"]["blocked_s"] == 0, folder.name
            assert seen.began_s["v"][0] > 1000 + TURNED_AWAY_S - 100, folder.name
            assert history_of(folder) == due, folder.name
            assert_nothing_ran_twice(folder)

    assert in_children([partial(work, 0), partial(work, 1)]) == [0, 0]
    assert all(len(json.loads(line)["attempts"]) == 1 for line in due)


# --- the end of a run's time ---


def test_what_the_end_of_the_runs_time_skipped_stays_so(tmp_path: Path) -> None:
    one = experiment(
        tmp_path / "base",
        ["a", "b", "holds", "holds too", "waits", {"id": "needs", "depends_on": ["waits"]}],
        design={"max_concurrency": 2, "max_duration_s": 100.0},
    )
    began: list[str] = []

    def script(folder: Path) -> Script:
        def play(dispatch: TrialDispatch) -> Play:
            began.append(dispatch.task.id)
            return HOLDS if dispatch.task.id.startswith("holds") else Play()

        return play

    def step(folder: Path, at: At | None) -> None:
        clock = ManualClock(1000.0)
        backend = ScriptedBackend(clock, 2, script(folder))
        assert work_at(folder, one, backend, at=at, clock=clock, now=clock.now_s) == RunEnd("completed")

    told = Told(Story(one, [step]), tmp_path / "calm")
    assert [json.loads(line)["status"] for line in told.history] == ["success"] * 2 + ["skipped"] * 4
    assert began == ["a", "b", "holds", "holds too"]
    last = len(told.points) - told.points[::-1].index(
        "committed"
    )  # what was skipped is committed: the run's time is over

    def work(part: int) -> None:
        for nth in range(1, len(told.points) + 1)[part::3]:
            folder = tmp_path / f"{nth}-{told.points[nth - 1]}"
            assert told.kill(folder, "*", nth)
            began.clear()
            told.story.tell(folder)
            assert nth < last or not began, folder.name
            told.check(folder)

    assert in_children([partial(work, part) for part in range(3)]) == [0] * 3
