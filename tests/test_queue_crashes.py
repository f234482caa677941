"""Kill -9 with queues, lanes, submissions and dead letters in play: nothing lost, nothing twice, the same history."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    children,
    events,
    experiment,
    fork,
    history_of,
    in_child,
    in_children,
    open_run,
    reap_orphans,
    run_local,
    work_at,
)
from test_crashes import COORDINATOR_POINTS, KILLED, own_attempts

from sandbox_exec import submission
from sandbox_exec.backends.base import WorkerTicket
from sandbox_exec.contracts import Cell, Grade, Status, TrialCompletion, TrialDispatch
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.coordinator import Coordinator, RunCallback, RunEnd
from sandbox_exec.errors import InvalidValue, RunNotActive
from sandbox_exec.ledger import DISPLACED, PURGED, SlotFilter
from sandbox_exec.schedule.queues import SequentialQueue
from sandbox_exec.store import POINTS, RunStore
from sandbox_exec.testing import HOLDS, Bells, ManualClock, Play, ScriptedBackend

Row = dict[str, Any]
Step = Callable[[Path, At | None], None]  # the second time, it does what the first time did not do


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
    backend: Callable[..., ScriptedBackend] = Graded,
) -> Step:
    """A coordinator's life. `batches`: tasks that join after so many commits."""

    def step(folder: Path, at: At | None) -> None:
        clock = ManualClock(1000.0)
        workers = backend(clock, one.design.max_concurrency, script(folder))
        ended = work_at(folder, one, workers, at=at, callbacks=[Submits(folder, batches)], clock=clock)
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
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Told]]:
    """A story of each order, told once for each concurrency."""
    known: dict[tuple[str, int], Told] = {}

    def get(order: str, at_once: int) -> Told:
        if (order, at_once) not in known:
            place = tmp_path_factory.mktemp("calm")
            base = place / "base"
            story = adaptive(base, at_once) if order == "adaptive" else eventful(base, order, at_once)
            known[order, at_once] = Told(story, place / "run")
        return known[order, at_once]

    yield get


@pytest.mark.parametrize("order", ORDERS)
def test_the_stories_are_as_varied_as_they_say(told: Callable[[str, int], Told], order: str) -> None:
    one, four = told(order, 1), told(order, 4)
    print(len(one.points), len(four.points), Counter(four.points), len(one.history))
    for line in four.history: print(line)
    assert {*COORDINATOR_POINTS, "changed"} <= {*one.points, *four.points}
    assert {f"batch:{point}" for point in POINTS} <= set(one.points)
    if order != "adaptive":
        assert one.history == four.history


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_killed_at_any_point_the_story_comes_out_the_same(
    told: Callable[[str, int], Told], tmp_path: Path, order: str, at_once: int
) -> None:
    told(order, at_once).kill_everywhere(tmp_path / "runs", seed=at_once, more=8)
