"""Queues and lanes in durable runs, from end to end: what starts when, what is committed, added, purged and retried.

Most runs are scripted, on a manual clock; where the agent's own part is asked for, trials are real.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from runs_support import Script, events, experiment, history_of, statuses
from support import spin_until

from sandbox_exec import runs
from sandbox_exec.contracts import AgentError, Experiment, Grade, Phase, Slot, Status, TrialCompletion, TrialDispatch
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
    backend: ScriptedBackend | None = None,
    **more: Any,
) -> Worked:
    """Work at the run in `folder` with scripted trials: a new one of `one`, or the one that is there."""
    clock = clock or ManualClock(1000.0)
    backend = backend or ScriptedBackend(clock, capacity, script, patience_s=5.0)
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


# --- which one next ---


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_by_priority_what_is_higher_starts_first_and_history_has_the_order_of_the_schedule(
    base: Path, folder: Path, at_once: int
) -> None:
    tasks = [row("low", priority="low"), row("normal"), row("critical", priority="critical"), row("four", priority=4)]
    one = experiment(base, tasks, design={"order": "priority", "max_concurrency": at_once})
    on = On(end=lambda run: run.submit([row("late", priority="critical")]))
    done = work(folder, one, capacity=at_once, callbacks=[on])
    assert done.end == COMPLETED
    assert history_tasks(folder) == ["critical", "four", "normal", "low", "late"]
    if at_once == 1:  # when it was submitted, the second one had been started
        assert done.started == ["critical", "four", "late", "normal", "low"]


def test_the_history_by_priority_is_the_same_at_any_concurrency(base: Path, tmp_path: Path) -> None:
    fate = random.Random(5)
    tasks = [row(f"t{n:02}", priority=fate.randrange(-2, 3), max_retries=1) for n in range(12)]
    tasks[7]["depends_on"] = ["t11", "t03"]

    def script(dispatch: TrialDispatch) -> Play:
        its = random.Random(f"{dispatch.trial_id} {dispatch.attempt}")
        return Play(its.choice([OK, OK, FAILED]), result_sha256=f"{its.random()}")

    histories = []
    for at_once in (1, 2, 8):
        design = {"order": "priority", "max_concurrency": at_once, "prune_after_failures": 3}
        one = experiment(base, tasks, ["v", "w"], design=design)
        assert work(tmp_path / f"run-{at_once}", one, script, capacity=at_once).end == COMPLETED
        histories.append(history_of(tmp_path / f"run-{at_once}"))
    assert histories[0] == histories[1] == histories[2]
    assert len(histories[0]) == 24


def test_a_task_goes_before_all_others_when_its_deadline_is_near(base: Path, folder: Path) -> None:
    clock = ManualClock(1000.0)
    tasks = [row("soon", priority="low", deadline_s=100.0), *(row(f"h{n}", priority="high") for n in range(8))]
    one = experiment(base, tasks, design={"order": "priority", **ONE_BY_ONE, "queue": {"urgent_within_s": 60.0}})

    def slow(dispatch: TrialDispatch) -> Play:
        clock.advance(10.0)
        return Play()

    done = work(folder, one, slow, clock=clock)
    assert done.started.index("soon") == 4  # 40 seconds of 100 are gone, and 60 are left
    assert history_tasks(folder)[-1] == "soon"


@pytest.mark.parametrize(("promote_after_s", "place"), [(100.0, 4), (None, -1)])
def test_what_waits_long_enough_is_promoted_and_does_not_starve(
    base: Path, folder: Path, promote_after_s: float | None, place: int
) -> None:
    clock = ManualClock(1000.0)
    queue = {"promote_after_s": promote_after_s}
    tasks = [row("low", priority="low"), row("h", priority="high")]
    one = experiment(base, tasks, design={"order": "priority", **ONE_BY_ONE, "queue": queue})

    class Greedy(RunCallback):
        """Sees to it that a high one always waits."""

        left = 10

        def on_run_start(self, run: Coordinator) -> None:
            self.run = run
            self.submit()

        def on_trial_selected(self, slot: Slot, attempt: int) -> None:
            clock.advance(30.0)

        def on_trial_start(self, slot: Slot, attempt: int) -> None:
            self.submit()

        def submit(self) -> None:
            if self.left:
                self.left -= 1
                self.run.submit([row(f"more{self.left}", priority="high")])

    done = work(folder, one, clock=clock, callbacks=[Greedy()])
    assert len(done.started) == 12
    assert done.started[place] == "low"


def own_order(base: Path, name: str, text: str) -> str:
    """A module of the user's beside the experiment."""
    base.mkdir(exist_ok=True)
    (base / f"{name}.py").write_text(f"from sandbox_exec import SequentialQueue\n{text}")
    return f"{name}:Mine"


def test_an_order_of_ones_own_is_a_class_beside_the_experiment(base: Path, folder: Path) -> None:
    order = own_order(
        base,
        "order_backwards",
        """
class Mine(SequentialQueue):
    def take(self, now_s, closed=()):
        idx = max(self._held, default=None)
        if idx is not None:
            self.discard(idx)
        return idx

    def report(self):
        return {"held": len(self._held)}
""",
    )
    one = experiment(base, [row("a"), row("b"), row("c")], design={"order": order, **ONE_BY_ONE})
    done = work(folder, one)
    assert (done.end, done.started, history_tasks(folder)) == (COMPLETED, ["c", "b", "a"], ["a", "b", "c"])
    assert status_of(folder).queue == {"held": 0}


@pytest.mark.parametrize("at_once", [1, 4])
def test_an_order_of_ones_own_may_add_to_the_schedule_and_end_it(base: Path, folder: Path, at_once: int) -> None:
    order = own_order(
        base,
        "order_growing",
        """
class Mine(SequentialQueue):
    # Two at first, one more for each success; the fourth is the last.
    def submit(self, tasks):
        self.left, self.seen = list(super().submit(tasks)), 0
        return [self.left.pop(0), self.left.pop(0)]

    def observe(self, completion):
        self.seen += 1
        return [self.left.pop(0)] if completion.ok and self.left else []

    def should_continue(self):
        return self.seen < 4

    def snapshot(self):
        return {"left": self.left, "seen": self.seen}

    def restore(self, state, tasks):
        from sandbox_exec.contracts import Cell
        self.left, self.seen = [Cell(*one) for one in state["left"]], state["seen"]
""",
    )
    design = {"order": order, "max_concurrency": at_once}
    one = experiment(base, [row(f"t{n}") for n in range(9)], design=design)
    work(folder, one, capacity=at_once, callbacks=[On(end=lambda run: run.drain("test"), nth=2)])
    assert work(folder, capacity=at_once).end == COMPLETED
    assert statuses(folder) == [OK, OK, OK, OK, SKIPPED, SKIPPED]
    assert history_tasks(folder) == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert set(reasons(folder).values()) <= {"the queue has seen enough", ""}


@pytest.mark.parametrize("at_once", [1, 4])
def test_an_order_that_had_seen_enough_goes_on_with_what_is_added_and_leaves_the_rest(
    base: Path, folder: Path, at_once: int
) -> None:
    order = own_order(
        base,
        "order_resuming",
        """
class Mine(SequentialQueue):
    # Two successes for each submission.
    seen = goal = 0

    def submit(self, tasks):
        self.goal += 2
        return super().submit(tasks)

    def observe(self, completion):
        self.seen += completion.ok
        return ()

    def should_continue(self):
        return self.seen < self.goal

    def snapshot(self):
        return [self.seen, self.goal]

    def restore(self, state, tasks):
        self.seen, self.goal = state
""",
    )

    def add(run: Coordinator) -> None:
        run.submit([row("x"), row("y"), row("z")])
        run.drain("test")

    one = experiment(base, [row(name) for name in "abcdef"], design={"order": order, "max_concurrency": at_once})
    on = On(end=add, nth=2)
    assert work(folder, one, capacity=at_once, callbacks=[on]).end.status == "interrupted"
    assert on.got == [None]
    assert work(folder, capacity=at_once).end == COMPLETED  # what ran ahead and was not committed is skipped too
    assert by_task(folder) == dict.fromkeys("abxy", "success") | dict.fromkeys("cdefz", "skipped")
    assert history_tasks(folder) == list("abcdefxyz")


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("no_such_module_at_all:Mine", "'no_such_module_at_all:Mine' cannot be loaded: No module named"),
        ("order_wrong:Nobody", "'order_wrong:Nobody' cannot be loaded: .* has no attribute 'Nobody'"),
        ("order_wrong:Mine", "'order_wrong:Mine' is no queue, it lacks submit, put, take"),
        ("order_wrong:function", "'order_wrong:function' is no queue"),
        ("order_broken:Mine", "'order_broken:Mine' cannot be loaded: invalid syntax"),
    ],
)
def test_an_order_that_is_none_is_refused_before_there_is_a_run(
    base: Path, folder: Path, order: str, message: str
) -> None:
    own_order(base, "order_wrong", "class Mine: pass\ndef function(): pass\n")
    own_order(base, "order_broken", "class class\n")
    with pytest.raises(InvalidExperiment, match=f"design.order: {message}"):
        make_run(experiment(base, [row("a")], design={"order": order}), folder)
    assert not folder.exists()


@pytest.mark.parametrize(("number", "rubbish"), [(0, "99"), (1, "-1"), (2, "0 if self.gone else self.go()")])
def test_a_run_whose_order_takes_what_cannot_start_fails_and_says_so(
    base: Path, folder: Path, number: int, rubbish: str
) -> None:
    text = f"""
class Mine(SequentialQueue):
    gone = False
    def go(self):
        self.gone = True
        return 0
    def take(self, now_s, closed=()):
        return {rubbish}
"""
    order = own_order(base, f"order_rubbish_{number}", text)
    done = work(folder, experiment(base, [row("a"), row("b")], design={"order": order, "max_concurrency": 2}))
    assert done.end.status == "failed"
    assert re.fullmatch(r"Mine.take gave slot (99|-1|0), which cannot start now", done.end.reason)
    assert status_of(folder).reason == done.end.reason


# --- by what is known of the variants ---


def adaptive(
    base: Path, tasks: int = 12, *, variants: Sequence[str] = ("v",), at_once: int = 4, **how: Any
) -> Experiment:
    rows = [{**row(f"t{n:02}"), "item": {"difficulty": n / 2 - 3, "discrimination": 2.0}} for n in range(tasks)]
    design = {"order": "adaptive", "max_concurrency": at_once, "queue": {"adaptive": how}}
    return experiment(base, rows, variants, design=design, grading={"command": ["true"]})


def solves(folder: Path, **abilities: float) -> Script:
    """Each variant solves what is below its ability: it is 0.3 where nothing is said."""

    def script(dispatch: TrialDispatch) -> Play:
        item = dispatch.task.item
        solved = (item.difficulty if item else 0.0) < abilities.get(dispatch.variant.id, 0.3)
        return leave(folder, dispatch, grade=Grade(score=float(solved), passed=solved))

    return script


def test_the_adaptive_order_finds_who_is_able_and_is_the_same_at_any_concurrency(base: Path, tmp_path: Path) -> None:
    histories = []
    for at_once in (1, 4):
        folder = tmp_path / f"run-{at_once}"
        one = adaptive(base, 20, variants=("able", "weak"), at_once=at_once, max_tasks=8, standard_error=None)
        done = work(folder, one, solves(folder, able=3.0, weak=-2.0), capacity=at_once)
        assert (done.end, statuses(folder)) == (COMPLETED, [OK] * 16)
        histories.append(history_of(folder))
        able, weak = status_of(folder).queue
        assert (able["variant_id"], able["tasks"], able["ended"]) == ("able", 8, "max_tasks")
        assert able["ability"] - able["standard_error"] > weak["ability"] + weak["standard_error"]
    assert histories[0] == histories[1]


def test_the_adaptive_order_goes_on_where_it_was_after_a_stop(base: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    work(whole, adaptive(base, 16, max_tasks=9, standard_error=None), solves(whole))
    work(parts, adaptive(base, 16, max_tasks=9, standard_error=None), solves(parts), callbacks=[stop_after(2)])
    work(parts, None, solves(parts), callbacks=[stop_after(3)])
    assert work(parts, None, solves(parts)).end == COMPLETED
    assert history_of(parts) == history_of(whole)
    assert status_of(parts).queue == status_of(whole).queue


def stop_after(commits: int) -> On:
    return On(end=lambda run: run.drain("test"), nth=commits)


def test_tasks_that_are_added_are_chosen_from_too(base: Path, folder: Path) -> None:
    one = adaptive(base, 4, standard_error=None, at_once=1)
    more = [{**row(f"n{n}"), "item": {"difficulty": 0.0}} for n in range(3)]
    on = On(end=lambda run: run.submit(more))
    assert work(folder, one, solves(folder), callbacks=[on]).end == COMPLETED
    assert sorted(by_task(folder)) == ["n0", "n1", "n2", "t00", "t01", "t02", "t03"]
    assert set(by_task(folder).values()) == {"success"}


def test_a_dead_letter_of_an_adaptive_run_is_tried_again_and_changes_no_estimate(base: Path, folder: Path) -> None:
    def script(dispatch: TrialDispatch) -> Play:
        return FAILS if dispatch.task.id == "t01" else solves(folder)(dispatch)

    work(folder, adaptive(base, 4), script)
    learnt = status_of(folder).queue
    (dead,) = dead_letters(folder)
    retry_dead(folder, [dead.trial_id])
    assert work(folder, None, solves(folder)).end == COMPLETED
    assert sorted(statuses(folder)) == sorted([OK] * 4 + [FAILED])
    assert status_of(folder).queue == learnt


@pytest.mark.parametrize("order", ["adaptive", "priority"])
def test_a_run_in_any_order_is_graded_and_graded_again(base: Path, tmp_path: Path, order: str) -> None:
    queue = {"adaptive": {"max_tasks": 3, "standard_error": None, "look_ahead": 1}}
    tasks = [{**row(f"t{n}", priority=n), "item": {"difficulty": n - 2.0}} for n in range(4)]
    (base / "grading").mkdir(parents=True)
    (base / "grading" / "grade.sh").write_text(
        """case "$(cat "$SANDBOX_EXEC_OUT/result.json")" in *t3*) score=0;; *) score=1;; esac
           echo "{\\"score\\": $score}" >"$SANDBOX_EXEC_GRADE"\n"""
    )
    one = experiment(
        base,
        tasks,
        design={"order": order, "max_concurrency": 2, "queue": queue},
        sandbox={"memory": "128MiB"},
        grading={"command": ["sh", "grade.sh"], "assets": "grading"},
    )
    first = runs.run(one, runs=tmp_path, run_id="first")
    assert first.by_status == {OK: 3 if order == "adaptive" else 4}
    if order == "adaptive":
        (found,) = status_of(first.folder).queue
        assert (found["tasks"], found["ended"]) == (3, "max_tasks")
        assert found["standard_error"] > 0
    again = grade_run(first.folder, runs=tmp_path, run_id="again")
    assert (again.status, again.by_status) == ("completed", first.by_status)
    assert report_of(again.folder).variants[0].score == report_of(first.folder).variants[0].score


# --- dependencies ---


def test_what_needs_a_failed_task_is_skipped_with_the_reason(base: Path, folder: Path) -> None:
    tasks = [row("a"), {**row("b"), "depends_on": ["a"]}, {**row("c"), "depends_on": ["b"]}, row("d")]
    heard: list[TrialCompletion] = []

    class Ends(RunCallback):
        def on_trial_end(self, completion: TrialCompletion) -> None:
            heard.append(completion)

    done = work(folder, experiment(base, tasks), fates(a=FAILS), callbacks=[Ends()])
    assert (done.end, statuses(folder)) == (COMPLETED, [FAILED, SKIPPED, SKIPPED, OK])
    assert [one.error and one.error.message for one in heard[1:3]] == [
        "it depends on task a, which ended as agent_error",
        "it depends on task b, which ended as skipped",
    ]


def test_a_circle_of_dependencies_is_refused_and_printed(base: Path) -> None:
    tasks = [{**row(name), "depends_on": [need]} for name, need in (("a", "b"), ("b", "c"), ("c", "a"))]
    with pytest.raises(InvalidExperiment, match="depends on itself: 'a' -> 'b' -> 'c' -> 'a'"):
        experiment(base, tasks)


def blocked_run(base: Path, folder: Path, *, at_once: int = 4) -> DeadLetter:
    """A run that stands still for a task that failed twice; what it needs is done, and nobody needs `free`."""
    tasks = [row("before"), row("a", max_retries=1), {**row("b"), "depends_on": ["a"]}, row("free")]
    one = experiment(base, tasks, design={**BLOCK, "max_concurrency": at_once})
    done = work(folder, one, fates(a=FAILS), capacity=at_once)
    assert done.end.status == "interrupted"
    assert (done.started, statuses(folder)) == (["before", "a", "free", "a"] if at_once > 1 else done.started, [OK])
    (dead,) = dead_letters(folder)
    return dead


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_failed_task_that_others_need_can_block_the_run_which_says_what_to_do(
    base: Path, folder: Path, at_once: int
) -> None:
    dead = blocked_run(base, folder, at_once=at_once)
    assert (dead.task_id, dead.status, dead.blocks, dead.retried_as) == ("a", FAILED, True, None)
    assert [(one.attempt, one.status, one.counted) for one in dead.attempts] == [(1, FAILED, True), (2, FAILED, True)]
    status = status_of(folder)
    assert (status.status, status.committed) == ("interrupted", 1)
    retry = f"sandbox-exec dead retry {folder} {dead.trial_id}"
    assert status.reason == (
        f"blocked: {dead.trial_id} failed, and others need it. `{retry}` tries it again, "
        "`dead drop` in its place gives it up; the run can go on then"
    )
    assert [event["trial_id"] for event in events(folder, "blocked")] == [dead.trial_id]
    again = work(folder)
    assert (again.end, again.started) == (RunEnd("interrupted", status.reason), [])


def test_what_blocks_a_run_can_be_tried_again_with_all_its_attempts(base: Path, folder: Path) -> None:
    dead = blocked_run(base, folder)
    assert retry_dead(folder, [dead.trial_id]) == {dead.trial_id: dead.trial_id}
    assert dead_letters(folder) == []
    done = work(folder, None, fates(a=[FAILS, FAILS, FAILS, Play()]))
    assert (done.end, done.started) == (COMPLETED, ["a", "a", "b"])  # `free` has run, and is not run again
    assert statuses(folder) == [OK] * 4
    assert [one["status"] for one in json.loads(history_of(folder)[1])["attempts"]] == ["agent_error"] * 3 + ["success"]


def test_what_blocks_a_run_blocks_it_again_if_it_fails_again(base: Path, folder: Path) -> None:
    dead = blocked_run(base, folder)
    retry_dead(folder, [dead.trial_id])
    assert work(folder, None, fates(a=FAILS)).end.status == "interrupted"
    (again,) = dead_letters(folder)
    assert (again.trial_id, again.blocks, len(again.attempts)) == (dead.trial_id, True, 4)


def test_what_blocks_a_run_can_be_retried_and_dropped_while_it_waits_for_more(base: Path, folder: Path) -> None:
    tasks = [row("a"), {**row("b"), "depends_on": ["a"]}, row("x"), {**row("y"), "depends_on": ["x"]}]
    one = experiment(base, tasks, design=BLOCK)
    with Held(folder, one, fates(a=[FAILS, Play()], x=FAILS), keep_open=True) as run:
        spin_until(lambda: len(events(folder, "blocked")) == 1, "a blocks")
        (dead,) = dead_letters(folder)
        assert retry_dead(folder, [dead.trial_id]) == {dead.trial_id: dead.trial_id}
        spin_until(lambda: len(events(folder, "blocked")) == 2, "x blocks")
        (dead,) = dead_letters(folder)
        drop_dead(folder, dead.trial_id)
        spin_until(lambda: status_of(folder).committed == 4, "all is committed")
        run.coordinator.drain("test")
    assert run.end == COMPLETED
    assert by_task(folder) == {"a": "success", "b": "success", "x": "agent_error", "y": "skipped"}


def test_what_blocks_no_run_cannot_be_dropped(base: Path, folder: Path) -> None:
    work(folder, experiment(base, [row("a")]), fates(a=FAILS))
    (dead,) = dead_letters(folder)
    with pytest.raises(InvalidValue, match="does not block the run: nothing to drop"):
        drop_dead(folder, dead.trial_id)


class Held:
    """A scripted run in a thread of its own, on a clock that stands still unless it is moved."""

    coordinator: Coordinator

    def __init__(self, folder: Path, one: Experiment | None, script: Script, *, capacity: int = 4, **more: Any) -> None:
        self.folder, self.clock = folder, ManualClock(1000.0)
        self.backend = ScriptedBackend(self.clock, capacity, script, waits=True)
        self.end: RunEnd | BaseException | None = None
        self._ready = threading.Event()
        self._arguments = (folder, one, script)
        self._more = more
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        class Ready(RunCallback):
            def on_run_start(_, run: Coordinator) -> None:
                self.coordinator = run
                self._ready.set()

        callbacks = [Ready(), *self._more.pop("callbacks", ())]
        try:
            done = work(*self._arguments, backend=self.backend, clock=self.clock, callbacks=callbacks, **self._more)
            self.end = done.end
        except BaseException as error:
            self.end = error
        self._ready.set()

    def finish(self, task_id: str, status: Status = OK) -> None:
        """End the attempt of a task that holds."""
        spin_until(lambda: self.running(task_id), f"{task_id} runs")
        (ticket,) = self.running(task_id)
        self.backend.finish(ticket, status)
        self.backend.wake()

    def running(self, task_id: str = "") -> list[Any]:
        return [one for one in list(self.backend.running) if f".{task_id}." in one.trial_id or not task_id]

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.backend.wake()

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Let a second pass at a time."""

        def is_so() -> bool:
            self.wait(1.0)
            return bool(condition())

        spin_until(is_so, "what is waited for")

    def status(self) -> RunStatus:
        return status_of(self.folder)

    def __enter__(self) -> Held:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.end is None:
            self.coordinator.kill("the test failed")
        self._thread.join(30)
        assert not self._thread.is_alive()


# --- how much may wait ---


def stopped(base: Path, folder: Path, tasks: Sequence[Any], **fields: Any) -> None:
    """A run of which nothing has been started."""
    done = work(folder, experiment(base, tasks, **fields), callbacks=[On(begin=lambda run: run.drain("test"))])
    assert done.started == []


def scheduled(folder: Path) -> list[str]:
    with RunStore.open(folder, write=False) as store:
        return [slot.task_id for slot in store.slots()]


@pytest.mark.parametrize(
    ("queue", "rows", "message"),
    [
        ({"max_waiting": 3}, [row("c"), row("d")], "max_waiting is 3: 2 trials wait, so there is room for 1"),
        (
            {"quotas": {"high": 1}},
            [row("c", priority="high"), row("d", priority=10)],
            r"the quota of priority 10 \(high\)",
        ),
        (
            {"max_waiting": 3, "when_full": "displace"},
            [row("c"), row("d", priority="high")],
            "Only 0 of a lower priority could make room; 1 must",
        ),
    ],
)
def test_what_has_no_room_is_refused_as_a_whole(
    base: Path, folder: Path, queue: Any, rows: list[Any], message: str
) -> None:
    high = row("b", priority="critical")
    stopped(base, folder, [row("a", priority="high"), high], design={"queue": queue})
    if "quotas" in queue:
        rows = rows[:1]  # one waits already
    with pytest.raises(QueueFull, match=message):
        submit(folder, rows)
    assert scheduled(folder) == ["a", "b"]
    assert events(folder, "submitted") == []
    on = On(begin=lambda run: run.submit(rows))
    assert work(folder, callbacks=[on]).end == COMPLETED
    assert isinstance(on.got[0], QueueFull)
    assert sorted(by_task(folder)) == ["a", "b"]


def test_a_submitter_that_waits_gets_in_when_there_is_room(base: Path, folder: Path) -> None:
    design = {**ONE_BY_ONE, "queue": {"max_waiting": 2}}
    got: list[Submitted] = []
    with Held(folder, experiment(base, [row("a"), row("b"), row("c")], design=design), lambda _: HOLDS) as run:
        spin_until(lambda: run.running("a"), "a runs")
        with pytest.raises(QueueFull):
            submit(folder, [row("d")])
        waits = threading.Thread(target=lambda: got.append(submit(folder, [row("d")], wait_s=None)))
        waits.start()
        run.finish("a")
        waits.join(30)
        assert got[0].tasks == ("d",)
        for task_id in "bcd":
            run.finish(task_id)
    assert (run.end, history_tasks(folder)) == (COMPLETED, ["a", "b", "c", "d"])


def test_what_is_displaced_is_told_and_is_a_dead_letter_that_can_be_retried(base: Path, folder: Path) -> None:
    tasks = [row("old", priority="low"), row("new", priority="low"), row("normal")]
    stopped(base, folder, tasks, design={"queue": {"max_waiting": 3, "when_full": "displace"}})
    got = submit(folder, [row("h1", priority="high"), row("h2", priority="high")])
    assert [name.split(".")[1] for name in got.displaced] == ["old", "new"]
    assert [event["trial_id"] for event in events(folder, "displaced")] == list(got.displaced)
    assert got.waiting == 3
    done = work(folder)
    assert (done.end, done.started) == (COMPLETED, ["normal", "h1", "h2"])
    assert statuses(folder) == [SKIPPED, SKIPPED, OK, OK, OK]
    dead = dead_letters(folder)
    assert [(one.task_id, one.status, one.error_type, one.attempts) for one in dead] == [
        ("old", SKIPPED, "Displaced", ()),
        ("new", SKIPPED, "Displaced", ()),
    ]
    assert {one.message for one in dead} == {"it was displaced by tasks of a higher priority"}
    retry_dead(folder, [dead[1].trial_id])
    assert work(folder).started == ["new"]
    assert by_task(folder)["new"] == "success"


def test_it_is_told_once_when_the_queue_fills(base: Path, folder: Path) -> None:
    one = experiment(base, [row("a")], design={**ONE_BY_ONE, "queue": {"max_waiting": 10}})
    rows = [row(f"t{n}") for n in range(11)]
    callbacks = [
        On(begin=lambda run: run.submit(rows[:8])),
        On(end=lambda run: run.submit(rows[8:])),  # one is committed, and another one has started
    ]
    assert work(folder, one, callbacks=callbacks).end == COMPLETED
    assert [(one["percent"], one["waiting"]) for one in events(folder, "queue_filling")] == [(80, 9), (95, 10)]
    assert {one["what"] for one in events(folder, "queue_filling")} == {"max_waiting"}


# --- what is added ---


def test_tasks_are_added_to_a_run_from_a_callback_another_thread_and_outside(base: Path, folder: Path) -> None:
    with Held(folder, experiment(base, [row("a")], design=ONE_BY_ONE), lambda _: HOLDS) as run:
        spin_until(lambda: run.running("a"), "a runs")
        by_thread = run.coordinator.submit([row("b")])
        assert scheduled(folder) == ["a", "b"]  # on the disk when it returns
        outside = submit(folder, [row("c"), row("d")])
        assert scheduled(folder) == ["a", "b", "c", "d"]
        for task_id in "abcd":
            run.finish(task_id)
    assert run.end == COMPLETED
    assert (by_thread.tasks, by_thread.trials, by_thread.waiting) == (("b",), 1, 1)
    assert (outside.tasks, outside.trials, outside.waiting) == (("c", "d"), 2, 3)
    assert [one["trials"] for one in events(folder, "submitted")] == [1, 2]


@pytest.mark.parametrize("when", ["on_run_start", "on_trial_selected", "on_trial_start", "on_trial_end", "on_task_end"])
def test_tasks_that_a_callback_adds_are_run_even_if_all_else_is_done(base: Path, folder: Path, when: str) -> None:
    class Adds(RunCallback):
        added = 0

        def on_run_start(self, run: Coordinator) -> None:
            self.run = run

    def add(*arguments: Any) -> None:
        if isinstance(arguments[0], Coordinator):
            adds.run = arguments[0]
        if adds.added < 2:
            adds.added += 1
            adds.run.submit([row(f"more{adds.added}")])
            assert not adds.run.store._in_transaction, "it is on the disk"

    adds = Adds()
    setattr(adds, when, add)
    done = work(folder, experiment(base, [row("a")], design=ONE_BY_ONE), callbacks=[adds])
    assert done.end == COMPLETED
    assert by_task(folder).keys() == {"a", "more1"} | ({"more2"} if when != "on_run_start" else set())
    assert events(folder, "callback_failed") == []


def test_tasks_that_are_added_to_a_completed_run_are_run_when_it_is_continued(base: Path, folder: Path) -> None:
    work(folder, experiment(base, [row("a")], ["v", "w"], design={"repeats": 2}))
    got = submit(folder, [row("b"), row("c")])
    assert (got.trials, got.waiting) == (8, 8)
    status = status_of(folder)
    assert (status.status, status.slots, status.committed) == ("interrupted", 12, 4)
    assert status.reason == "there is more to do: continue the run"
    assert status.lifecycle["pending"] == 8
    done = work(folder)
    assert (done.end, statuses(folder)) == (COMPLETED, [OK] * 12)
    assert status_of(folder).status == "completed"
    assert history_tasks(folder) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def test_a_file_of_tasks_is_added(base: Path, folder: Path, tmp_path: Path) -> None:
    work(folder, experiment(base, [row("a")]))
    file = tmp_path / "more.jsonl"
    file.write_text("".join(json.dumps(row(name)) + "\n" for name in "bc"))
    assert submit(folder, file).tasks == ("b", "c")
    file.write_text('{"id": "d"}\n')
    with pytest.raises(InvalidExperiment, match=r"more.jsonl:1: .*input: is missing"):
        submit(folder, file)
    assert scheduled(folder) == ["a", "b", "c"]


def test_what_is_added_may_need_what_is_committed_or_waits(base: Path, folder: Path) -> None:
    rows = [{**row(f"needs-{name}"), "depends_on": [name]} for name in ("good", "bad", "last")]
    rows += [{**row("needs-new"), "depends_on": ["needs-last", "good"]}]
    on = On(end=lambda run: run.submit(rows), nth=2)
    tasks = [row("good"), row("bad"), row("last")]
    done = work(folder, experiment(base, tasks, design=ONE_BY_ONE), fates(bad=FAILS), callbacks=[on])
    assert done.end == COMPLETED
    assert by_task(folder) == {
        "good": "success",
        "bad": "agent_error",
        "last": "success",
        "needs-good": "success",
        "needs-bad": "skipped",
        "needs-last": "success",
        "needs-new": "success",
    }


def test_what_is_added_joins_its_chain_and_its_gate(base: Path, folder: Path) -> None:
    tasks = [{**row("x1"), "chain": "x"}, row("a")]
    rows = [{**row("x2"), "chain": "x"}, row("alone", serial="global"), row("b")]
    with Held(folder, experiment(base, tasks, design={"max_concurrency": 4}), lambda _: HOLDS) as run:
        spin_until(lambda: len(run.running()) == 2, "both run")
        submit(folder, rows)
        run.finish("a")  # the chain holds x2, the gate holds alone, and alone holds b
        spin_until(lambda: len(run.running()) == 1, "a has ended")
        run.finish("x1")
        spin_until(lambda: run.running("alone"), "alone runs: its turn had come before x1 let go of x2")
        assert len(run.running()) == 1
        run.finish("alone")
        spin_until(lambda: len(run.running()) == 2, "both of the rest run")
        run.finish("x2")
        run.finish("b")
    assert run.end == COMPLETED
    assert history_tasks(folder) == ["x1", "a", "x2", "alone", "b"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("b"), {**row("c"), "depends_on": ["nobody"]}], "there is no task 'nobody' in the run"),
        ([row("b"), row("c", serial="first")], "'first' is for the tasks that a run begins with"),
        ([row("b"), {**row("c"), "depends_on": ["d"]}, {**row("d"), "depends_on": ["c"]}], "'c' -> 'd' -> 'c'"),
        ([row("b"), {**row("a"), "input": "another"}], "'a' is the id of another task of the run"),
        ([row("b"), {**row("c"), "workspace": "nowhere"}], "nowhere"),
    ],
)
def test_what_cannot_be_added_is_refused_as_a_whole(base: Path, folder: Path, rows: list[Any], message: str) -> None:
    work(folder, experiment(base, [row("a")], design=ONE_BY_ONE))
    with pytest.raises((InvalidExperiment, InvalidValue), match=message):
        submit(folder, rows)
    with Held(folder, None, lambda _: HOLDS, keep_open=True) as run:
        for add in (run.coordinator.submit, lambda rows: submit(folder, rows)):
            with pytest.raises((InvalidExperiment, InvalidValue), match=message):
                add(rows)
        assert submit(folder, [row("b")]).tasks == ("b",)  # it has not been spoilt
        run.finish("b")
        run.coordinator.drain("test")
    assert (run.end, scheduled(folder)) == (COMPLETED, ["a", "b"])


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(("policy", "added"), [("merge", []), ("reject", None), ("keep", ["copy"])])
def test_tasks_that_say_the_same_are_merged_refused_or_kept(
    base: Path, folder: Path, policy: str, added: list[str] | None, live: bool
) -> None:
    one = experiment(base, [row("a")], design={**ONE_BY_ONE, "queue": {"duplicates": policy}})
    rows = [row("a"), {**row("a"), "id": "copy"}, {**row("b"), "depends_on": ["copy"]}]
    got: list[Any] = []

    def add() -> None:
        for _ in range(2):  # the second time, all of it is there
            try:
                got.append(submit(folder, rows))
            except InvalidValue as error:
                got.append(error)

    if live:
        with Held(folder, one, fates(), keep_open=True) as run:
            add()
            run.coordinator.drain("test")
        assert run.end == COMPLETED or added is not None
    else:
        work(folder, one)
        add()
    if live or added is not None:
        work(folder)
    if added is None:
        assert all("'copy' says the same as 'a': leave it out" in str(error) for error in got)
        assert by_task(folder) == {"a": "success"}
    else:
        assert got[0].tasks == (*added, "b")
        assert got[1].tasks == ()
        assert by_task(folder) == dict.fromkeys(["a", *added, "b"], "success")


def test_the_files_of_added_tasks_must_stay_as_they_were(base: Path, folder: Path) -> None:
    work(folder, experiment(base, [row("a")]))
    (base / "files").mkdir()
    (base / "files" / "one").write_text("1")
    (base / "answers").mkdir()
    (base / "answers" / "one").write_text("1")
    grading = {"command": ["true"], "assets": "answers"}
    submit(folder, [{**row("b"), "workspace": "files", "grading": grading}])
    for name in ("files", "answers"):
        (base / name / "one").write_text("2")
        with pytest.raises(InvalidExperiment, match=f"{name} has changed"):
            continue_run(folder, backend=ScriptedBackend(ManualClock()))
        (base / name / "one").write_text("1")
    assert continue_run(folder, backend=ScriptedBackend(ManualClock())).by_status == {OK: 2}


def test_no_agent_sees_what_belongs_to_the_grading_of_a_task_that_is_added(base: Path, tmp_path: Path) -> None:
    (base / "shown" / "secret").mkdir(parents=True)
    (base / "shown" / "secret" / "answer").write_text("42")
    (base / "shown" / "hello").write_text("hello")
    looks = f"cat {base}/shown/hello; cat {base}/shown/secret/answer; true"
    one = experiment(
        base,
        [row("before"), row("after")],
        [{"id": "v", "agent": {"command": ["sh", "-c", looks]}}],
        design=ONE_BY_ONE,
        sandbox={"readable": ["shown"], "memory": "128MiB"},
    )
    grades = 'cp "$SANDBOX_EXEC_GRADING/answer" /tmp/x && echo \'{"score": 1}\' >"$SANDBOX_EXEC_GRADE"'
    grading = {"command": ["sh", "-c", grades], "assets": "shown/secret"}
    on = On(begin=lambda run: run.submit([{**row("new"), "grading": grading}]))
    summary = runs.run(one, runs=tmp_path, run_id="run", callbacks=[on])
    assert summary.by_status == {OK: 3}, (on.got, summary)
    for trial in (summary.folder / "trials").iterdir():
        said = (trial / "attempt-1" / "stdout.log").read_text()
        assert said == "hello", trial.name


# --- what is taken out, and what failed ---


@pytest.mark.parametrize(
    ("which", "left"),
    [
        ({"variant": "w"}, ["a v", "b v", "c v"]),
        ({"task": "[ab]"}, ["c v", "c w"]),
        ({"tag": "ha*"}, ["a v", "a w", "b v", "b w"]),
        ({"priority": 10}, ["a v", "a w", "c v", "c w"]),
        ({"variant": "v", "task": "c"}, ["a v", "a w", "b v", "b w", "c w"]),
        ({}, []),
        ({"task": "nobody"}, ["a v", "a w", "b v", "b w", "c v", "c w"]),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_what_waits_is_purged_by_what_it_is(base: Path, folder: Path, which: Any, left: list[str], live: bool) -> None:
    tasks = [row("a"), row("b", priority=10), row("c", tags=["hard", "odd"])]
    one = experiment(base, tasks, ["v", "w"])
    if live:
        on = On(begin=lambda run: run._change({"do": "purge", "filter": which}))
        work(folder, one, callbacks=[on])
        purged = on.got[0]["trials"]
    else:
        stopped(base, folder, tasks, variants=["v", "w"])
        purged = purge(folder, SlotFilter(**which))
        assert work(folder).end == COMPLETED
    with RunStore.open(folder, write=False) as store:
        slots = list(store.slots())
        ran = [slots[commit.schedule_idx] for commit in store.commits() if commit.status is OK]
        kinds_of = {commit.error_type for commit in store.commits() if commit.status is SKIPPED}
    assert [f"{slot.task_id} {slot.variant_id}" for slot in ran] == left
    assert kinds_of == ({"Purged"} if purged else set())
    assert [event["trials"] for event in events(folder, "purged")] == [6 - len(left)] == [len(purged)]
    assert dead_letters(folder) == []


def test_what_runs_is_not_purged(base: Path, folder: Path) -> None:
    with Held(folder, experiment(base, [row("a"), row("b")], design=ONE_BY_ONE), lambda _: HOLDS) as run:
        spin_until(lambda: run.running("a"), "a runs")
        assert [name.split(".")[1] for name in purge(folder, SlotFilter())] == ["b"]
        run.finish("a")
    assert (run.end, statuses(folder)) == (COMPLETED, [OK, SKIPPED])


def test_every_trial_that_failed_for_good_is_a_dead_letter_with_all_its_attempts(base: Path, folder: Path) -> None:
    failing = [one for one in Status if one not in (OK, SKIPPED, Status.CANCELLED, Status.RATE_LIMITED)]
    retried = (FAILED, Status.SETUP_FAILED, Status.GRADE_ERROR)

    def script(dispatch: TrialDispatch) -> Play:
        if dispatch.task.id == "fine":
            return Play()
        return leave(folder, dispatch, Status(dispatch.task.id), error=AgentError(type="Its", message="why"))

    tasks = [row(status.value, max_retries=1) for status in failing]
    one = experiment(base, [row("fine"), *tasks], design={"infra_retries": 2})
    assert work(folder, one, script).end == COMPLETED
    dead = dead_letters(folder)
    assert [(one.task_id, one.status, one.error_type, one.message) for one in dead] == [
        (status.value, status, "Its", "why") for status in failing
    ]
    for letter in dead:
        infra = letter.status in (Status.ENVIRONMENT_ERROR, Status.WORKER_LOST)
        assert len(letter.attempts) == (3 if infra else 2 if letter.status in retried else 1), letter
        assert [one.attempt for one in letter.attempts] == list(range(1, len(letter.attempts) + 1))
        said = {(one.status, one.counted, one.message) for one in letter.attempts}
        assert said == {(letter.status, not infra, "why")}
        assert all((one.folder / "completion.json").exists() for one in letter.attempts)


def test_a_provider_that_is_never_free_is_a_dead_letter_too(base: Path, folder: Path) -> None:
    assert work(folder, experiment(base, [row("a")]), fates(a=Play(Status.RATE_LIMITED))).end == COMPLETED
    (dead,) = dead_letters(folder)
    assert (dead.status, len(dead.attempts)) == (Status.RATE_LIMITED, 100)


def test_a_dead_letter_is_tried_again_as_a_further_repeat_and_the_last_try_counts(base: Path, folder: Path) -> None:
    one = experiment(base, [row("a"), row("b")], design={"repeats": 2})

    def script(dispatch: TrialDispatch) -> Play:
        return FAILS if dispatch.task.id == "b" and dispatch.slot.repeat < 3 else Play()

    work(folder, one, script)
    first, second = dead_letters(folder)
    again = retry_dead(folder, [first.trial_id, second.trial_id])
    assert list(again) == [first.trial_id, second.trial_id]
    assert [name.split(".")[2].partition("-")[0] for name in again.values()] == ["2", "3"]
    with pytest.raises(InvalidValue, match=r"is tried again already, as .*: retry that one"):
        retry_dead(folder, [first.trial_id])
    assert status_of(folder).status == "interrupted"
    assert work(folder, None, script).end == COMPLETED
    assert statuses(folder) == [OK, OK, FAILED, FAILED, FAILED, OK]
    one_of = {letter.trial_id: letter for letter in dead_letters(folder)}
    assert one_of[second.trial_id].retried_as == again[second.trial_id]
    (variant,) = report_of(folder).variants
    assert (variant.slots, variant.trials, variant.by_status) == (4, 4, {OK: 3, FAILED: 1})
    third = retry_dead(folder, [again[first.trial_id]])  # a try at a try
    assert work(folder, None, lambda _: Play()).end == COMPLETED
    assert len(third) == 1
    (variant,) = report_of(folder).variants
    assert (variant.slots, variant.trials, variant.by_status) == (4, 4, {OK: 4})


def test_what_is_no_dead_letter_is_not_tried_again(base: Path, folder: Path) -> None:
    work(folder, experiment(base, [row("a"), {**row("b"), "depends_on": ["a"]}]), fates(a=FAILS))
    names = [path.name for path in sorted((folder / "trials").iterdir())]
    with RunStore.open(folder, write=False) as store:
        names = [name for (name,) in store.query("SELECT trial_id FROM schedule ORDER BY schedule_idx")]
    for name in (names[1], "nobody"):
        with pytest.raises(InvalidValue, match="is no dead letter of this run"):
            retry_dead(folder, [names[0], name])
    assert len(scheduled(folder)) == 2
    assert retry_dead(folder, []) == {}
