"""The adaptive order: simulated variants of a known ability on tasks of a known difficulty."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.contracts import Experiment, Grade, Phase, Slot, Status, Task, TrialCompletion, derive_trial_id
from sandbox_exec.contracts.queue import ItemParameters
from sandbox_exec.contracts.words import Cell
from sandbox_exec.errors import InvalidExperiment
from sandbox_exec.figures import Z
from sandbox_exec.schedule.adaptive import AdaptiveQueue
from sandbox_exec.schedule.queues import Entry

Answers = Callable[[Cell], TrialCompletion]


def task(name: str, difficulty: float = 0.0, discrimination: float = 1.0, **item: float) -> Task:
    return Task(id=name, input=None, item=ItemParameters(difficulty=difficulty, discrimination=discrimination, **item))


def bank(rng: random.Random, count: int) -> list[Task]:
    return [task(f"t{number}", rng.uniform(-3, 3), rng.uniform(1, 2)) for number in range(count)]


def experiment(tasks: Sequence[Task], variants: int = 1, repeats: int = 1, **adaptive: Any) -> Experiment:
    return Experiment(
        name="e",
        tasks=tasks,
        variants=[{"id": f"v{number}", "agent": {"command": ["true"]}} for number in range(variants)],
        grading={"python": "m:f"},
        design={"order": "adaptive", "repeats": repeats, "queue": {"adaptive": adaptive}},
    )


def done(cell: Cell, status: Status = Status.SUCCESS, grade: Grade | None = None) -> TrialCompletion:
    slot = Slot(schedule_idx=0, variant_id=cell.variant_id, task_id=cell.task_id, repeat=cell.repeat)
    return TrialCompletion(
        slot=slot, trial_id=derive_trial_id(slot), attempt=1, status=status, phase=Phase.GRADE, grade=grade
    )


def graded(cell: Cell, *, solved: bool) -> TrialCompletion:
    return done(cell, grade=Grade(score=float(solved), passed=solved))


def answers_of(tasks: Iterable[Task], ability: float, seed: int = 0) -> Answers:
    """Who has this ability solves each task as often as the theory says; the same cell always alike."""
    items = {task.id: task.item or ItemParameters() for task in tasks}

    def answer(cell: Cell) -> TrialCompletion:
        item = items[cell.task_id]
        likely = 1 / (1 + math.exp(-item.discrimination * (ability - item.difficulty)))
        likely = item.guessing + (item.upper - item.guessing) * likely
        return graded(cell, solved=random.Random(f"{seed} {cell}").random() < likely)

    return answer


def drain(queue: AdaptiveQueue, cells: Sequence[Cell], answer: Answers) -> list[Cell]:
    """Commit all that there is and all that follows, and return it in its order."""
    schedule = list(cells)
    for cell in schedule:  # grows meanwhile
        schedule += queue.observe(answer(cell))
    return schedule


def started(tasks: Sequence[Task], **settings: Any) -> tuple[AdaptiveQueue, list[Cell]]:
    of = experiment(tasks, **settings)
    queue = AdaptiveQueue(of)
    return queue, list(queue.submit(of.tasks))


def test_the_true_ability_is_within_the_stated_error_with_at_most_half_of_the_tasks_95_times_of_100() -> None:
    # 200 series and not 100: the interval holds 96 to 97 of 100, and one hundred can have fewer than 95 by chance.
    series, held, used = 200, 0, 0
    for seed in range(series):
        rng = random.Random(seed)
        ability = rng.gauss(0, 1)
        tasks = bank(rng, 250)
        queue, cells = started(tasks)
        used += len(drain(queue, cells, answers_of(tasks, ability, seed)))
        (said,) = queue.report()
        within = abs(said["ability"] - ability) <= Z * said["standard_error"]
        held += within and said["tasks"] <= len(tasks) / 2 and said["standard_error"] <= 0.3
    assert held / series >= 0.95
    assert used / series < 40


@pytest.mark.parametrize("ability", [-2.5, 2.5])
def test_an_ability_far_from_the_middle_is_not_pulled_towards_it(ability: float) -> None:
    estimates = []
    for seed in range(40):
        tasks = bank(random.Random(seed), 250)
        queue, cells = started(tasks)
        drain(queue, cells, answers_of(tasks, ability, seed))
        estimates.append(queue.report()[0]["ability"])
    assert sum(estimates) / len(estimates) == pytest.approx(ability, abs=0.15)


def test_the_next_task_is_the_most_informative_one_at_the_estimate() -> None:
    tasks = [task(f"{difficulty}", float(difficulty)) for difficulty in (-4, -2, 0, 1, 2, 4)]
    queue, cells = started(tasks, look_ahead=1)
    assert [cell.task_id for cell in cells] == ["0"]
    (cell,) = queue.observe(graded(cells[0], solved=True))
    assert cell.task_id == "1"
    (cell,) = queue.observe(graded(cell, solved=False))
    assert 0 < queue.report()[0]["ability"] < 1
    assert cell.task_id == "2"
    (cell,) = queue.observe(graded(cell, solved=False))
    assert cell.task_id == "-2"


def test_discrimination_guessing_and_the_upper_end_count_too() -> None:
    tasks = [task("plain"), task("guessed", guessing=0.5), task("slips", upper=0.6), task("sharp", discrimination=3.0)]
    _, cells = started(tasks, look_ahead=4)
    assert [cell.task_id for cell in cells] == ["sharp", "plain", "slips", "guessed"]


def test_equal_tasks_are_chosen_in_their_order_and_without_parameters_all_are_equal() -> None:
    tasks = [Task(id=f"t{number}", input=None) for number in range(50)]
    queue, cells = started(tasks, standard_error=None)
    schedule = drain(queue, cells, answers_of(tasks, 0.3))
    assert [cell.task_id for cell in schedule] == [one.id for one in tasks]


def test_a_task_that_is_certainly_solved_says_nothing() -> None:
    _, cells = started([task("certain", -20.0, 20.0), task("open")])
    assert [cell.task_id for cell in cells] == ["open", "certain"]


def test_of_tasks_that_say_next_to_nothing_the_best_is_chosen_too() -> None:
    tasks = [task("6", 6.0, 5.0), task("-5", -5.0, 5.0), task("7", 7.0, 5.0)]
    _, cells = started(tasks)
    assert [cell.task_id for cell in cells] == ["-5", "6", "7"]


@pytest.mark.parametrize("solved", [True, False])
def test_all_solved_and_none_solved_have_an_estimate_and_an_error_that_admits_to_knowing_little(solved: bool) -> None:
    tasks = bank(random.Random(1), 30)
    queue, cells = started(tasks)
    drain(queue, cells, lambda cell: graded(cell, solved=solved))
    (said,) = queue.report()
    assert said["tasks"] == 30
    assert said["ended"] == "no tasks left"
    assert 2 < (said["ability"] if solved else -said["ability"]) < 8
    assert 0.5 < said["standard_error"] <= 2


def test_tasks_that_leave_no_doubt_are_no_numerical_trouble() -> None:
    tasks = [task(f"{at}", float(at), 20.0) for at in range(-20, 21)]
    queue, cells = started(tasks, standard_error=None)
    schedule = drain(queue, cells, lambda cell: graded(cell, solved=int(cell.task_id) <= 2))
    assert len(schedule) == 41
    (said,) = queue.report()
    assert 2 < said["ability"] < 3
    assert 0 < said["standard_error"] < 0.5
    # Against all sense: the easy ones not, the hard ones yes.
    queue, cells = started(tasks, standard_error=None)
    drain(queue, cells, lambda cell: graded(cell, solved=int(cell.task_id) > 2))
    assert all(math.isfinite(queue.report()[0][name]) for name in ("ability", "standard_error"))


def test_the_rounds_go_by_variant_and_repeat_and_the_next_follows_a_whole_one() -> None:
    queue, cells = started(bank(random.Random(2), 40), variants=2, repeats=2, look_ahead=2)
    order = [("v0", 0), ("v0", 1), ("v1", 0), ("v1", 1)]
    assert [(cell.variant_id, cell.repeat) for cell in cells] == order * 2
    for cell in cells[:3]:
        assert queue.observe(graded(cell, solved=True)) == ()
    following = queue.observe(graded(cells[3], solved=True))
    assert [(cell.variant_id, cell.repeat) for cell in following] == order


def test_a_choice_follows_from_the_rounds_that_are_committed_and_no_later_ones() -> None:
    tasks = bank(random.Random(3), 60)
    queue, cells = started(tasks, look_ahead=3, max_tasks=12, standard_error=None)
    schedule = drain(queue, cells, answers_of(tasks, 1.0))
    for cut in range(len(schedule) - 3):
        # All answers after the first `cut` are turned round: the choices up to `cut` + 3 cannot know.
        plain = answers_of(tasks, 1.0)
        before = set(schedule[:cut])

        def turned(cell: Cell, plain: Answers = plain, before: set[Cell] = before) -> TrialCompletion:
            grade = plain(cell).grade
            assert grade is not None
            return graded(cell, solved=bool(grade.passed) == (cell in before))

        other, cells = started(tasks, look_ahead=3, max_tasks=12, standard_error=None)
        assert drain(other, cells, turned)[: cut + 3] == schedule[: cut + 3]


def at_random(queue: AdaptiveQueue, cells: Sequence[Cell], answer: Answers, workers: int, rng: random.Random) -> Any:
    """Run it as a coordinator does, with workers that end in any order; return the schedule and who ran together."""
    schedule: list[Cell] = []
    running: list[int] = []
    finished: set[int] = set()
    together: list[list[Cell]] = []
    committed = 0

    def join(cells: Sequence[Cell]) -> None:
        for cell in cells:
            queue.put(Entry(len(schedule), cell))
            schedule.append(cell)

    join(cells)
    while committed < len(schedule):
        while len(running) < workers and rng.random() < 0.7 and (idx := queue.take(0.0)) is not None:
            running.append(idx)
            together.append([schedule[one] for one in running])
        if running and rng.random() < 0.6:
            finished.add(running.pop(rng.randrange(len(running))))
        while committed in finished and rng.random() < 0.8:
            assert queue.should_continue()
            join(queue.observe(answer(schedule[committed])))
            committed += 1
    assert queue.take(0.0) is None
    return schedule, together


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    variants=st.integers(1, 3),
    repeats=st.integers(1, 2),
    workers=st.integers(1, 6),
    ability=st.floats(-3, 3),
)
def test_at_any_concurrency_the_schedule_is_the_same_and_no_two_workers_have_the_same_task(
    seed: int, variants: int, repeats: int, workers: int, ability: float
) -> None:
    tasks = bank(random.Random(seed), 30)
    of: dict[str, Any] = {"variants": variants, "repeats": repeats, "standard_error": 0.5}
    answer = answers_of(tasks, ability, seed)
    queue, cells = started(tasks, **of)
    one_by_one = drain(queue, cells, answer)
    assert not queue.should_continue()
    other, cells = started(tasks, **of)
    schedule, together = at_random(other, cells, answer, workers, random.Random(seed))
    assert schedule == one_by_one
    assert len(set(schedule)) == len(schedule)
    assert all(len(set(group)) == len(group) for group in together)
    assert other.report() == queue.report()
    assert other.snapshot() == queue.snapshot()


def test_four_workers_of_one_variant_are_kept_busy_with_four_tasks() -> None:
    tasks = bank(random.Random(4), 60)
    queue, cells = started(tasks, look_ahead=4)
    _, together = at_random(queue, cells, answers_of(tasks, 0.0), 4, random.Random(4))
    assert max(len({cell.task_id for cell in group}) for group in together) == 4


def test_restored_at_any_point_it_goes_on_as_if_nothing_had_happened() -> None:
    tasks, late = bank(random.Random(5), 25), [task(f"late{number}", number / 4) for number in range(6)]
    of = experiment(tasks, variants=2, repeats=2, standard_error=0.6, max_tasks=20)
    answer = answers_of([*tasks, *late], 0.5)

    def run(restored_after: int | None) -> tuple[list[Cell], list[dict[str, Any]]]:
        queue = AdaptiveQueue(of)
        schedule = list(queue.submit(of.tasks))
        submitted = list(of.tasks)
        for count, cell in enumerate(schedule):
            if count == 15:
                submitted += late
                schedule += queue.submit(late)
            if count == restored_after:
                state = json.loads(json.dumps(queue.snapshot()))
                queue = AdaptiveQueue(of)
                queue.restore(state, submitted)
                assert queue.snapshot() == state
            schedule += queue.observe(answer(cell))
        assert not queue.should_continue()
        return schedule, queue.report()

    whole = run(None)
    assert 40 < len(whole[0]) <= 80
    for count in range(len(whole[0])):
        assert run(count) == whole


def test_a_snapshot_is_small_and_what_was_taken_before_stays_as_it_was() -> None:
    tasks = bank(random.Random(6), 1000)
    queue, cells = started(tasks, max_tasks=100, standard_error=None)
    first = queue.snapshot()
    as_text = json.dumps(first)
    drain(queue, cells, answers_of(tasks, 0.0))
    assert json.dumps(first) == as_text
    assert len(json.dumps(queue.snapshot())) < 1000


@pytest.mark.parametrize(
    ("status", "grade", "solved"),
    [
        (Status.SUCCESS, Grade(score=0.0, passed=True), True),
        (Status.SUCCESS, Grade(score=1.0, passed=False), False),
        (Status.SUCCESS, Grade(score=0.7), True),
        (Status.SUCCESS, Grade(score=0.69), False),
        (Status.TASK_TIMEOUT, Grade(score=1.0, passed=True), True),  # graded although it was late: `grade_on: always`
        *((status, None, False) for status in Status if status.blame == "agent"),
        *((status, None, None) for status in Status if status.blame not in (None, "agent")),
    ],
)
def test_what_counts_as_solved_as_not_solved_and_not_at_all(
    status: Status, grade: Grade | None, solved: bool | None
) -> None:
    tasks = [task("a"), task("b")]
    queue, cells = started(tasks, pass_score=0.7, look_ahead=1)
    (following,) = queue.observe(done(cells[0], status, grade))
    assert following.task_id == "b"
    (said,) = queue.report()
    assert (said["chosen"], said["tasks"], said["solved"]) == (2, int(solved is not None), int(solved is True))
    if solved is None:
        assert (said["ability"], said["standard_error"]) == (0.0, None)
    else:
        assert (said["ability"] > 0) is solved
        assert 0 < said["standard_error"] < 2


def test_it_ends_at_the_error_but_not_before_min_tasks_and_what_was_chosen_ahead_is_run() -> None:
    tasks = [task(f"t{number}", (number % 5 - 2) / 5, 4.0) for number in range(40)]
    answer = answers_of(tasks, 0.0)
    for min_tasks, look_ahead in [(1, 1), (1, 4), (20, 1), (20, 4)]:
        queue, cells = started(tasks, standard_error=0.35, min_tasks=min_tasks, look_ahead=look_ahead)
        schedule, known = list(cells), None
        for count, cell in enumerate(schedule, 1):
            schedule += queue.observe(answer(cell))
            if known is None and queue.report()[0]["ended"]:
                known = count
        assert known is not None
        assert known == 20 if min_tasks == 20 else 4 < known < 20
        assert len(schedule) == known + look_ahead - 1
        (said,) = queue.report()
        assert (said["ended"], said["tasks"]) == ("standard_error", len(schedule))
        assert not queue.should_continue()


def test_a_session_that_knew_enough_stays_ended_although_what_was_chosen_ahead_is_a_surprise() -> None:
    tasks = [task("0", 0.0, 6.0), task("1", 1.0, 6.0), task("3", 3.0, 6.0)]
    queue, cells = started(tasks, look_ahead=3, min_tasks=2, standard_error=0.5)
    errors = []
    for cell, solved in zip(cells, [True, False, True], strict=True):
        assert queue.observe(graded(cell, solved=solved)) == []
        errors.append(queue.report()[0]["standard_error"])
    assert errors[1] <= 0.5 < errors[2]
    assert queue.submit([task("late")]) == []
    assert queue.report()[0]["ended"] == "standard_error"


def test_max_tasks_are_those_chosen_whatever_came_of_them() -> None:
    tasks = bank(random.Random(7), 40)
    queue, cells = started(tasks, max_tasks=7, standard_error=None)
    schedule = drain(queue, cells, lambda cell: done(cell, Status.WORKER_LOST))
    assert len(schedule) == 7
    (said,) = queue.report()
    assert (said["ended"], said["chosen"], said["tasks"]) == ("max_tasks", 7, 0)
    queue, cells = started(tasks, max_tasks=2, look_ahead=4)
    assert len(cells) == 2


def test_each_session_ends_on_its_own() -> None:
    tasks = [task(f"t{number}", 0.0, 3.0) for number in range(60)]
    plain = answers_of(tasks, 0.0)
    queue, cells = started(tasks, variants=2, standard_error=0.3)
    schedule = drain(
        queue, cells, lambda cell: plain(cell) if cell.variant_id == "v0" else done(cell, Status.GRADE_ERROR)
    )
    quick, never = queue.report()
    assert quick["ended"] == "standard_error"
    assert (never["ended"], never["chosen"], never["tasks"]) == ("no tasks left", 60, 0)
    assert len(schedule) == quick["chosen"] + 60


def test_a_late_task_is_chosen_where_it_says_most() -> None:
    tasks = [task(f"t{number}", 2.0 + number) for number in range(8)]
    queue, cells = started(tasks, look_ahead=2)
    assert queue.submit([task("late", 0.0, 2.0)]) == []
    (following,) = queue.observe(graded(cells[0], solved=False))
    assert following.task_id == "late"


def test_late_tasks_go_on_where_there_were_too_few_and_not_where_enough_was_known() -> None:
    few = [task(f"t{number}", 0.0, 3.0) for number in range(25)]
    plain = answers_of(few, 0.0)
    queue, cells = started(few, variants=2, standard_error=0.3)
    drain(queue, cells, lambda cell: plain(cell) if cell.variant_id == "v0" else done(cell, Status.SETUP_FAILED))
    assert [said["ended"] for said in queue.report()] == ["standard_error", "no tasks left"]
    assert not queue.should_continue()
    late = [task(f"late{number}") for number in range(6)]
    cells = list(queue.submit(late))
    assert cells == [Cell("v1", f"late{number}", 0) for number in range(4)]
    assert queue.should_continue()
    schedule = drain(queue, cells, lambda cell: graded(cell, solved=True))
    assert schedule == [Cell("v1", one.id, 0) for one in late]
    assert queue.report()[1]["solved"] == 6


def test_late_tasks_fill_the_rounds_that_are_missing() -> None:
    tasks = [task("a"), task("b")]
    queue, cells = started(tasks, look_ahead=4)
    assert len(cells) == 2
    assert queue.observe(graded(cells[0], solved=True)) == []
    late = [task(f"late{number}") for number in range(9)]
    assert len(queue.submit(late)) == 3
    assert len(queue.observe(graded(cells[1], solved=True))) == 1


def test_the_report_is_json_for_each_session() -> None:
    queue, cells = started([task("a"), task("b")], repeats=2)
    queue.observe(graded(cells[0], solved=True))
    first, second = json.loads(json.dumps(queue.report()))
    assert first.pop("ability") > 0
    assert 0 < first.pop("standard_error") < 2
    counts = {"chosen": 2, "ended": "no tasks left"}
    assert first == {"variant_id": "v0", "repeat": 0, "tasks": 1, "solved": 1, **counts}
    assert second == {
        "variant_id": "v0",
        "repeat": 1,
        "ability": 0.0,
        "standard_error": None,
        "tasks": 0,
        "solved": 0,
        **counts,
    }


def test_choosing_among_ten_thousand_takes_milliseconds() -> None:
    tasks = bank(random.Random(8), 10_000)
    queue, cells = started(tasks, standard_error=None, look_ahead=20)
    took_s = []
    for cell in cells[:20]:
        began_s = time.process_time()
        (_,) = queue.observe(graded(cell, solved=True))
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < 0.01


@pytest.mark.parametrize("missing", ["catsim", "numpy"])
def test_without_catsim_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InvalidExperiment) as raised:
        AdaptiveQueue(experiment([task("a")]))
    assert str(raised.value) == "order: adaptive needs catsim: pip install 'sandbox-exec[adaptive]'"


def test_the_module_alone_loads_neither_catsim_nor_numpy() -> None:
    script = "import sys, sandbox_exec.schedule.adaptive; print({'catsim', 'numpy'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "set()\n"
    )
