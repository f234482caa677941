"""Reports: every number by hand on small runs, what counts and what does not, the same bytes, and what is printed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from shell import Done

from sandbox_exec.cli_report import WIDTH, markdown, plain
from sandbox_exec.contracts import (
    AgentError,
    Experiment,
    Grade,
    GradingReport,
    Isolation,
    Phase,
    Rung,
    Slot,
    Status,
    TrialCompletion,
    Usage,
    derive_trial_id,
)
from sandbox_exec.report import MAX_GROUPS, Report, normalised, report_of
from sandbox_exec.store.db import CommitRow, RunStore
from sandbox_exec.testing import expand
from sandbox_exec.units import MIB

AROUND = Isolation(
    rung=Rung.ROOT_NAMESPACES, memory="cgroup-v2", pids="cgroup-v2", cpu="none", freeze="signals", filesystem="private",
    network="none", uid=1234,
)  # fmt: skip


class End(NamedTuple):
    """How a trial ended."""

    status: Status = Status.SUCCESS
    score: float | None = None
    passed: bool | None = None
    metrics: Mapping[str, float] = {}
    error: tuple[str, str] | None = None
    wall_s: float | None = 1.0
    exit_code: int | None = None


PASS = End(score=1.0, passed=True)
FAIL = End(score=0.0, passed=False)
DIED = End(Status.AGENT_ERROR, error=("KeyError", "'x'"))
LOST = End(Status.WORKER_LOST, error=("WorkerLost", "no completion"), wall_s=None)
Ends = Callable[[Slot], End]


def experiment(
    tasks: int = 3, variants: tuple[str, ...] = ("a", "b"), repeats: int = 1, tags: Mapping[str, tuple[str, ...]] = {}
) -> Experiment:
    names = [f"task-{number}" for number in range(1, tasks + 1)]
    return Experiment(
        name="small",
        seed=7,
        tasks=[{"id": name, "input": {}, "protocol": {"tags": tags.get(name, ())}} for name in names],
        variants=[{"id": name, "agent": {"command": ["true"]}} for name in variants],
        design={"repeats": repeats},
        base="/base",
    )


def completion(slot: Slot, end: End) -> TrialCompletion:
    graded = end.score is not None
    return TrialCompletion(
        slot=slot,
        trial_id=derive_trial_id(slot),
        attempt=1,
        status=end.status,
        phase=Phase.AGENT,
        error=AgentError(type=end.error[0], message=end.error[1]) if end.error else None,
        exit_code=end.exit_code,
        grade=None if end.score is None else Grade(score=end.score, passed=end.passed, metrics=end.metrics),
        grading=GradingReport(ok=True, isolation=AROUND, grader_digest="sha256:9f") if graded else None,
        usage=None if end.wall_s is None else Usage(wall_s=end.wall_s, peak_memory_bytes=round(end.wall_s * MIB)),
        isolation=None if end.wall_s is None else AROUND.model_copy(update={"uid": slot.schedule_idx}),
        image_id="sha256:1a" if end.wall_s is not None else None,
    )


def make(folder: Path, one: Experiment, ends: Ends, commits: int | None = None) -> Report:
    """A run whose first trials are committed, as they end; by default all."""
    slots = list(expand(one))
    digests = {"image small:1": "sha256:1a", "the experiment's name": "sha256:00"}
    with RunStore.create(folder, "night-1", one.model_dump_json(), slots, digests, now=lambda: 0.0) as store:
        store.commit([CommitRow(completion(slot, ends(slot)), counted=True) for slot in slots[:commits]])
    return report_of(folder)


# Task 3 is where the variants die. By (variant, task): the ends of its two repeats.
SMALL: dict[tuple[str, str], tuple[End, End]] = {
    ("a", "task-1"): (PASS._replace(metrics={"cost": 1.0}), PASS._replace(metrics={"cost": 2.0, "turns": 5.0})),
    ("a", "task-2"): (PASS, End(score=0.5, passed=False)),
    ("a", "task-3"): (DIED, LOST),
    ("b", "task-1"): (PASS._replace(wall_s=2.0), PASS._replace(wall_s=4.0)),
    ("b", "task-2"): (FAIL, FAIL),
    ("b", "task-3"): (
        End(Status.TASK_TIMEOUT, score=0.0, passed=False, error=("Timeout", "the agent was killed"), wall_s=10.0),
        DIED,
    ),
}
TAGS = {"task-1": ("easy",), "task-2": ("hard", "odd"), "task-3": ("hard",)}


def small(slot: Slot) -> End:
    return SMALL[slot.variant_id, slot.task_id][slot.repeat]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "night-1"
    make(folder, experiment(repeats=2, tags=TAGS), small)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return report_of(folder)


# --- numbers by hand ---


def test_a_report_says_which_run_and_how_far(report: Report) -> None:
    assert (report.run_id, report.finished, report.slots, report.committed) == ("night-1", True, 12, 12)


def test_statuses_are_counted_and_who_is_not_to_blame_does_not_count(report: Report) -> None:
    a, b = report.variants
    assert (a.variant_id, a.slots, a.trials, a.graded, a.counted) == ("a", 6, 6, 4, 5)
    assert a.by_status == {Status.SUCCESS: 4, Status.AGENT_ERROR: 1, Status.WORKER_LOST: 1}
    assert a.not_counted == {Status.WORKER_LOST: 1}
    assert (b.variant_id, b.trials, b.graded, b.counted, b.not_counted) == ("b", 6, 5, 6, {})


def test_a_pass_rate_has_the_failed_in_its_denominator(report: Report) -> None:
    a, b = (variant.pass_rate for variant in report.variants)
    assert a is not None
    assert b is not None
    assert (a.passed, a.n, a.rate) == (3, 5, 0.6)
    assert (a.low, a.high) == pytest.approx((0.2307, 0.8824), abs=1e-4)
    # residuals by task: 0.8, -0.2, -0.6; squares 1.04, times 3 / 2
    assert a.stderr == pytest.approx((1.04 * 1.5) ** 0.5 / 5)
    assert (b.passed, b.n, b.rate) == (2, 6, 0.333333333)


def test_a_mean_score_takes_a_failed_trial_as_0(report: Report) -> None:
    a, b = (variant.score for variant in report.variants)
    assert a is not None
    assert b is not None
    stderr = (0.86 * 1.5) ** 0.5 / 5
    assert (a.n, a.mean) == (5, 0.7)
    assert (a.stderr, a.low, a.high) == pytest.approx((stderr, 0.7 - 1.96 * stderr, 0.7 + 1.96 * stderr))
    assert (b.n, b.mean) == (6, 0.333333333)


def test_pass_at_k_is_over_the_tasks_that_have_k_trials(report: Report) -> None:
    a, b = (variant.pass_at_k for variant in report.variants)
    assert [(one.k, one.tasks, one.value) for one in a] == [(1, 3, 0.5), (2, 2, 1.0)]
    assert [(one.k, one.tasks, one.value) for one in b] == [(1, 3, 0.333333333), (2, 3, 0.333333333)]


def test_time_and_memory_are_of_the_trials_that_were_measured(report: Report) -> None:
    a, b = report.variants
    assert a.wall_s is not None
    assert (a.wall_s.n, a.wall_s.p50, a.wall_s.p99) == (5, 1.0, 1.0)
    assert b.wall_s is not None  # 1, 1, 1, 2, 4, 10
    assert (b.wall_s.n, b.wall_s.p50, b.wall_s.p90, b.wall_s.p99) == (6, 1.5, 7.0, 9.7)
    assert b.peak_memory_bytes is not None
    assert b.peak_memory_bytes.p50 == 1.5 * MIB


def test_metrics_are_means_over_the_trials_that_have_them(report: Report) -> None:
    a, b = report.variants
    assert {name: (one.n, one.mean) for name, one in a.metrics.items()} == {"cost": (2, 1.5), "turns": (1, 5.0)}
    assert b.metrics == {}


def test_tags_have_the_trials_of_their_tasks(report: Report) -> None:
    found = {(one.tag, one.variant_id): one for one in report.tags}
    assert [*found] == [(tag, variant) for tag in ("easy", "hard", "odd") for variant in "ab"]
    hard = found["hard", "a"]
    assert (hard.tasks, hard.trials, hard.counted) == (2, 4, 3)
    assert hard.pass_rate is not None
    assert hard.score is not None
    assert (hard.pass_rate.passed, hard.pass_rate.n, hard.score.mean) == (1, 3, 0.5)
    odd = found["odd", "b"]
    assert odd.score is not None
    assert (odd.score.mean, odd.score.stderr, odd.score.low) == (0.0, None, None)  # one task


def test_variants_are_compared_by_the_means_of_the_tasks_that_both_have(report: Report) -> None:
    (one,) = report.comparisons
    assert (one.variant_id, one.against) == ("b", "a")
    assert one.pass_rate is not None
    assert one.score is not None
    # by task, a: 1, 0.5, 0 and b: 1, 0, 0; see the same three pairs in test_figures
    assert (one.pass_rate.tasks, one.pass_rate.difference) == (3, -0.166666667)
    assert (one.pass_rate.low, one.pass_rate.high) == (-0.5, 0.0)
    assert one.pass_rate.above == pytest.approx(4 / 27, abs=0.02)
    assert (one.score.difference, one.score.low, one.score.high) == (-0.25, -0.75, 0.0)


def test_failures_that_are_alike_fall_together(report: Report) -> None:
    found = [(one.status, one.error_type, one.message, one.count, dict(one.by_variant)) for one in report.failures]
    assert found == [
        (Status.AGENT_ERROR, "KeyError", "'x'", 2, {"a": 1, "b": 1}),
        (Status.WORKER_LOST, "WorkerLost", "no completion", 1, {"a": 1}),
        (Status.TASK_TIMEOUT, "Timeout", "the agent was killed", 1, {"b": 1}),
    ]
    slots = [Slot(schedule_idx=0, variant_id=name, task_id="task-3", repeat=n) for name, n in (("a", 0), ("b", 1))]
    assert report.failures[0].examples == tuple(map(derive_trial_id, slots))


def test_conditions_say_what_was_seen(report: Report) -> None:
    conditions = report.conditions
    assert (conditions.experiment, conditions.created_at) == ("small", "1970-01-01T00:00:00Z")
    assert (conditions.seed, conditions.tasks, conditions.repeats, conditions.sandbox) == (7, 3, 2, "process")
    assert conditions.images == {"small:1": "sha256:1a"}
    assert conditions.image_ids == {"sha256:1a": 11}
    assert conditions.grader_digests == {"sha256:9f": 9}
    seen = [(one.phase, one.trials, one.isolation.rung, one.isolation.uid) for one in conditions.isolation]
    assert seen == [("agent", 11, Rung.ROOT_NAMESPACES, None), ("grade", 9, Rung.ROOT_NAMESPACES, None)]


def test_the_digest_of_the_experiment_is_of_what_it_is_and_not_of_where_or_how_fast(
    tmp_path: Path, report: Report
) -> None:
    one = experiment(repeats=2, tags=TAGS)
    digest = report.conditions.experiment_digest
    design = one.design.model_copy(update={"max_concurrency": 99})
    moved = one.model_copy(update={"base": Path("/elsewhere"), "design": design})
    other = one.model_copy(update={"seed": 8})
    assert make(tmp_path / "moved", moved, small).conditions.experiment_digest == digest
    assert make(tmp_path / "other", other, small).conditions.experiment_digest != digest


def test_notes_say_what_to_know_before_citing(report: Report) -> None:
    assert report.notes == (
        "Trials that failed by their agent and have no grade count as not passed, and as score 0: 2.",
        "Trials that do not count, as they say nothing about the agent or were not graded: 1.",
        "Wilson intervals take repeats of a task for independent; the standard errors do not.",
    )


def test_the_same_commits_give_the_same_bytes(folder: Path, report: Report) -> None:
    again = report_of(folder)
    assert again.model_dump_json() == report.model_dump_json()
    assert (markdown(again), plain(again)) == (markdown(report), plain(report))
    assert Report.model_validate_json(again.model_dump_json()) == report


# --- other runs ---


def test_a_run_that_is_not_finished_says_so_first(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(repeats=2), small, commits=7)
    assert (report.finished, report.slots, report.committed) == (False, 12, 7)
    assert report.notes[0].startswith("The run is not finished: 7 of 12 trials are committed")
    assert plain(report).splitlines()[1] == "NOT FINISHED: 7 of 12 trials committed"
    assert "**NOT FINISHED: 7 of 12 trials committed**" in markdown(report)


def test_nothing_committed_is_a_report_too(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(), small, commits=0)
    assert [(one.variant_id, one.trials, one.pass_rate, one.wall_s) for one in report.variants] == [
        ("a", 0, None, None),
        ("b", 0, None, None),
    ]
    assert (report.comparisons, report.failures, report.conditions.isolation) == ((), (), ())
    assert "0/3" in plain(report)
    assert "0/3" in markdown(report)


def test_a_variant_without_trials_is_listed_and_not_compared(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(variants=("a", "b")), lambda slot: PASS, commits=1)
    (a, b) = report.variants
    assert (a.trials, b.trials, b.slots, b.counted) == (1, 0, 3, 0)
    assert (b.pass_rate, b.score, b.pass_at_k, b.by_status) == (None, None, (), {})
    assert report.comparisons == ()


def test_one_variant_alone_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(variants=("a",)), lambda slot: PASS)
    assert (len(report.variants), report.comparisons, report.tags, report.failures) == (1, (), (), ())
    assert "Compared" not in plain(report)
    assert report.notes == ()


def test_without_grades_there_is_no_rate_and_failures_fail_nothing(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(), lambda slot: DIED if slot.task_id == "task-1" else End())
    for variant in report.variants:
        assert (variant.graded, variant.counted, variant.pass_rate, variant.score) == (0, 0, None, None)
        assert variant.not_counted == {Status.SUCCESS: 2, Status.AGENT_ERROR: 1}
        assert variant.wall_s is not None
    assert report.notes == ("No trial has a grade: there is no pass rate and no score.",)
    assert report.comparisons == ()


def test_a_score_is_never_turned_into_a_pass(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(), lambda slot: DIED if slot.task_id == "task-1" else End(score=1.0))
    for variant in report.variants:
        assert variant.pass_rate is None
        assert variant.score is not None
        assert (variant.score.n, variant.score.mean) == (3, 0.666666667)
    assert report.notes[0] == "No grade says whether it passed: there is no pass rate."
    assert report.comparisons[0].pass_rate is None


@pytest.mark.parametrize(
    ("first", "second", "passes", "scored"),
    [
        # What else is known of the task on which an agent died decides as what that counts; task 3 passes.
        (DIED, PASS, (2, 3), 3),
        (DIED, End(score=1.0), (1, 1), 3),  # its grades never say passed
        (DIED, End(), (1, 1), 1),  # it is not graded
        (DIED, DIED, (1, 3), 3),  # nothing: like the others
        (DIED, LOST, (1, 2), 2),
        (DIED._replace(score=1.0, passed=True), FAIL, (2, 3), 3),  # graded all the same
        (LOST._replace(score=1.0, passed=True), PASS, (2, 2), 2),  # not the agent's doing, whatever was graded
        (End(Status.GRADE_ERROR), PASS, (2, 2), 2),
        (End(Status.SKIPPED, error=("Skipped", "")), PASS, (2, 2), 2),
    ],
)
def test_what_a_trial_counts_as(tmp_path: Path, first: End, second: End, passes: tuple[int, int], scored: int) -> None:
    ends = {"task-1": (first, second), "task-2": (PASS, LOST)}
    one = experiment(tasks=2, variants=("a",), repeats=2)
    (a,) = make(tmp_path / "run", one, lambda slot: ends[slot.task_id][slot.repeat]).variants
    assert a.pass_rate is not None
    assert a.score is not None
    assert ((a.pass_rate.passed, a.pass_rate.n), a.score.n) == (passes, scored)


@pytest.mark.parametrize("status", list(Status))
def test_blame_decides_what_counts(tmp_path: Path, status: Status) -> None:
    end = PASS if status is Status.SUCCESS else End(status, error=("T", "m"))
    one = experiment(tasks=2, variants=("a",))
    (a,) = make(tmp_path / "run", one, lambda slot: end if slot.task_id == "task-1" else PASS).variants
    assert a.counted == (2 if status.blame in (None, "agent") else 1)
    assert a.not_counted == ({} if a.counted == 2 else {status: 1})


def test_a_difference_on_one_task_has_no_interval(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(tasks=1), lambda slot: PASS if slot.variant_id == "b" else FAIL)
    (one,) = report.comparisons
    assert one.pass_rate is not None
    assert (one.pass_rate.difference, one.pass_rate.low, one.pass_rate.above) == (1.0, None, None)


def test_with_many_variants_each_is_compared_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_exec.report.MAX_ALL_PAIRS", 3)
    names = ("a", "b", "c", "d")
    report = make(tmp_path / "run", experiment(tasks=2, variants=names), lambda slot: PASS)
    assert [(one.against, one.variant_id) for one in report.comparisons] == [("a", "b"), ("a", "c"), ("a", "d")]
    assert report.notes[-2:] == (
        "Intervals of differences are not corrected for there being 3 comparisons.",
        "With more than 3 variants, each is compared with the first only.",
    )


def test_scores_beyond_what_can_be_summed_break_nothing(tmp_path: Path) -> None:
    huge = End(score=1.7e308, passed=True, metrics={"m": 1.7e308})
    report = make(tmp_path / "run", experiment(), lambda slot: huge)
    (a, _) = report.variants
    assert a.score is None
    assert a.metrics["m"].mean == pytest.approx(1.7e308)
    assert "Some scores are beyond 1e+100: where they are, there is no mean score." in report.notes
    assert plain(report)


def test_a_failed_trial_beside_negative_scores_is_warned_about(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(), lambda slot: DIED if slot.task_id == "task-1" else End(score=-1.0))
    assert "Some scores are below 0, and a failed trial counts as 0: compare scores with care." in report.notes


def test_what_was_skipped_is_not_explained_by_an_attempt_that_was_not_committed(tmp_path: Path) -> None:
    one, folder = experiment(tasks=1, variants=("a",)), tmp_path / "run"
    (slot,) = expand(one)
    with RunStore.create(folder, "r", one.model_dump_json(), [slot], {}, now=lambda: 0.0) as store:
        store.record_attempt(completion(slot, PASS), counted=True)
        store.event("pruned", variant="a", after_slot=0)
        store.commit([CommitRow(completion(slot, End(Status.SKIPPED, error=("Skipped", "pruned"))), counted=False)])
    report = report_of(folder)
    (group,) = report.failures
    assert (group.status, group.error_type, group.message) == (Status.SKIPPED, "Skipped", "")
    assert report.variants[0].wall_s is None


def test_a_variant_that_was_pruned_is_named(tmp_path: Path) -> None:
    make(tmp_path / "run", experiment(), lambda slot: PASS)
    with RunStore.open(tmp_path / "run") as store:
        for _ in range(2):  # again after a crash
            store.event("pruned", variant="b", after_slot=3)
    assert "Pruned after failures in a row, so that the rest was skipped: b." in report_of(tmp_path / "run").notes


def test_agents_that_say_something_else_each_time_do_not_make_the_report_endless(tmp_path: Path) -> None:
    def says(slot: Slot) -> End:
        letters = "".join("gjkmpqrtvw"[int(digit)] for digit in str(slot.schedule_idx))
        return End(Status.AGENT_ERROR, error=("E", letters))

    report = make(tmp_path / "run", experiment(tasks=MAX_GROUPS), says)
    assert len(report.failures) == MAX_GROUPS
    assert report.notes[-1] == f"There are {2 * MAX_GROUPS} kinds of failures: the rarest are not listed."
    assert plain(report).count("for example") == 20
    assert "... and 80 more: --md and --json have all" in plain(report)


def test_a_large_run_is_reported_quickly(tmp_path: Path) -> None:
    """How quickly is printed, not held: 2000 trials, as many of them failed as not."""
    folder = tmp_path / "run"
    make(folder, experiment(tasks=100, repeats=10), lambda slot: PASS if slot.schedule_idx % 2 else DIED)
    began_s = time.perf_counter()
    report = report_of(folder)
    print(f"{report.committed} commits in {time.perf_counter() - began_s:.2f} s")
    assert report.finished


# --- messages ---


@pytest.mark.parametrize(
    ("message", "alike"),
    [
        ("took 12.5 s, limit 10", "took <n> s, limit <n>"),
        ("at 0x7f3a9c: bad", "at <hex>: bad"),
        ("commit 9fceb02d0ae598e9 is gone", "commit <hex> is gone"),
        ("deadbeef and decade are words", "deadbeef and decade are words"),
        ("[Errno 2] No such file: '/tmp/run-1/x.py'", "[Errno <n>] No such file: '<path>'"),
        ("in ./a/b.txt and ~/c or either/or", "in <path> and <path> or either/or"),
        ("GET https://api.example.org/v1?k=3 gave status 500", "GET <url> gave status 500"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id <id>"),
        ("exit code 137", "exit code 137"),
        ("exit code 1 after 20 s", "exit code 1 after <n> s"),
        ("no answer to task-17!", "no answer to <task>!"),
        ("task-171 is another", "task-<n> is another"),
        ("two\n  lines\t", "two lines"),
        ("1e-05 is less than -3", "<n> is less than <n>"),
        ("", ""),
    ],
)
def test_messages_lose_what_differs_between_like_failures(message: str, alike: str) -> None:
    assert normalised(message, "task-17") == alike


def test_short_and_numeric_ids_are_not_looked_for_in_messages() -> None:
    assert normalised("a 12 x", "a") == "a <n> x"
    assert normalised("a 1234 x", "1234") == "a <n> x"


@pytest.mark.parametrize("message", ["x" * 10**6, "/" * 10**6, "a." * 10**6, "0" * 10**6, "1," * 10**6, "\x1b[2J" * 99])
def test_a_message_of_any_length_is_short_and_takes_no_time(message: str) -> None:
    assert len(normalised(message, "task-17")) <= 200


def test_without_a_message_the_exit_code_says_why(tmp_path: Path) -> None:
    report = make(tmp_path / "run", experiment(), lambda slot: End(Status.AGENT_ERROR, exit_code=3))
    (group,) = report.failures
    assert (group.error_type, group.message, group.count) == (None, "exit code 3", 6)


# --- the shell ---


def test_people_get_tables_that_fit_100_columns(call: Callable[..., Done], folder: Path) -> None:
    done = call("report", folder)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:2] == ["run night-1, experiment small", "finished: 12 of 12 trials committed"]
    assert lines[2] == "3 tasks x 2, seed 7, sandbox process (root-namespaces); --md has all conditions"
    assert max(map(len, lines)) <= WIDTH
    table = [line.split() for line in lines[lines.index("Results") + 1 :][:3]]
    assert table[1] == ["a", "6/6", "5", "3/5", "60.0", "%", "[23.1,", "88.2]", "0.700", "[0.255,", "1.145]"]
    assert "b        a        pass rate      3    -16.7 pp     [-50.0, +0.0]   " in done.out
    assert "    2  agent_error  KeyError: 'x'" in done.out


@pytest.mark.parametrize("length", [100, 250])
def test_long_names_still_fit(tmp_path: Path, length: int) -> None:
    names = ("v" * length, "w" * length)
    tags = {"task-1": ("t" * length,)}
    end = PASS._replace(metrics={"m" * length: 12345.678})
    report = make(tmp_path / "run", experiment(variants=names, repeats=2, tags=tags), lambda slot: end)
    assert max(map(len, plain(report).splitlines())) <= WIDTH
    assert "100.0 %" in plain(report)


def test_json_is_the_contract(call: Callable[..., Done], folder: Path, report: Report) -> None:
    done = call("report", "--json", "night-1", "--runs", folder.parent)
    assert (done.code, done.err) == (0, "")
    assert Report.model_validate_json(done.out) == report
    assert json.loads(done.out)["variants"][0]["by_status"] == {"success": 4, "agent_error": 1, "worker_lost": 1}


def test_markdown_is_a_document_with_the_conditions(call: Callable[..., Done], folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.md"
    assert call("report", folder, "--md", "-o", file) == Done(0, "", "")
    text = file.read_text()
    assert text == call("report", folder, "--md").out
    assert "| a | 6/6 | 5 | 3/5 | 60.0 % [23.1, 88.2] | 0.700 | [0.255, 1.145] |" in text
    assert "| 2 | agent_error | `KeyError: 'x'` | a 1, b 1 |" in text
    for words in (
        "`night-1`",
        "`sha256:9f (9 trials)`",
        "`small:1 = sha256:1a`",
        "| isolation | `agent, 11 trials: root-namespaces, ",
    ):
        assert words in text
    assert str(folder.parent) not in text
    assert "/base" not in text


def test_what_agents_and_people_wrote_is_no_markup_and_steers_no_terminal(tmp_path: Path) -> None:
    evil = "<img src=x>`|[a](b)\x1b[2J\u202e"
    names = ("*a*_b_", "a|b<b>")
    end = End(Status.AGENT_ERROR, error=(evil, evil))
    report = make(tmp_path / "run", experiment(variants=names), lambda slot: end)
    for text in (plain(report), markdown(report)):
        assert "\x1b" not in text
        assert "\u202e" not in text
    rows = [line for line in markdown(report).splitlines() if line.startswith("|")]
    assert "\\*a\\*\\_b\\_" in markdown(report)
    assert "a\\|b\\<b\\>" in markdown(report)
    (row,) = [row for row in rows if "agent_error" in row and "<img" in row]
    why = row.split(" | ")[2]
    assert why.startswith("`<img src=x>'\\|[a](b)?[2J?: <img src=x>'\\|[a](b)?[<n>J?")
    assert why.endswith("`")
    assert why.count("`") == 2


def test_text_can_go_to_a_file_too(call: Callable[..., Done], folder: Path, tmp_path: Path, report: Report) -> None:
    assert call("report", folder, "-o", tmp_path / "r.txt") == Done(0, "", "")
    assert (tmp_path / "r.txt").read_text() == plain(report)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere"], "there is no run in nowhere"),
        (["report", "RUN", "--json", "--md"], "both --json and --md are given"),
        (["report", "RUN", "--md", "-o", "no/such/folder.md"], "cannot write no/such/folder.md: No such file"),
    ],
)
def test_bad_usage_is_exit_code_2(
    call: Callable[..., Done],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*(str(folder) if word == "RUN" else word for word in arguments))
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err


def test_help_has_examples(call: Callable[..., Done]) -> None:
    done = call("report", "--help")
    assert done.code == 0
    assert "  sandbox-exec report night-1 --md -o results.md" in done.out
