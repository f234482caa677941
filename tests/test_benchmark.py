"""Benchmarks in Python: real runs of a few trials, and what each report says of them."""

from __future__ import annotations

import functools
import json
import os
import runpy
import secrets
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import pytest
from benchmark_parts import Fates, Marking, Part, Searching, Task, Variants, Waiting
from support import Meeting

import __main__
from sandbox_exec import (
    Benchmark,
    Entry,
    InvalidExperiment,
    InvalidValue,
    RunCallback,
    SandboxExecError,
    SequentialQueue,
    TrialReport,
    reports_of,
)
from sandbox_exec.benchmark import InGrading, InSandbox, component_of, grade_of
from sandbox_exec.contracts import Experiment, Rung, Status, TrialCompletion
from sandbox_exec.coordinator import Coordinator
from sandbox_exec.guest import ComponentRegistry
from sandbox_exec.guest.context import TrialContext, set_context
from sandbox_exec.guest.registry import CONFIG, TRACES
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.store import RunStore
from sandbox_exec.store.folders import MAX_GRADE_BYTES
from sandbox_exec.trial.grading import parse_grade
from sandbox_exec.trial_reports import Streamed, TrialFault, _judged

ROOT = Path(__file__).parent.parent
SMALL = {"memory": "96MiB", "timeout_s": 60}
NAMESPACES = chosen("auto").rung in (Rung.ROOT_NAMESPACES, Rung.USER_NAMESPACES)

FATES = {  # by the task's input: the report's status, the component, and the run's own status
    "well": ("success", None, Status.SUCCESS),
    "setup_environment": ("environment_error", "environment", Status.AGENT_ERROR),
    "setup_user": ("user_error", "user", Status.AGENT_ERROR),
    "setup_agents": ("agent_error", "agent", Status.AGENT_ERROR),
    "agent": ("agent_error", "agent", Status.AGENT_ERROR),
    "environment": ("environment_error", "environment", Status.AGENT_ERROR),
    "by hand": ("environment_error", "environment", Status.AGENT_ERROR),
    "user": ("user_error", "user", Status.AGENT_ERROR),
    "function": ("agent_error", "agent", Status.AGENT_ERROR),
    "lambda on a dict": ("agent_error", "agent", Status.AGENT_ERROR),
    "two names": ("agent_error", "agent", Status.AGENT_ERROR),
    "agent below environment": ("agent_error", "agent", Status.AGENT_ERROR),
    "environment fault": ("environment_error", "environment", Status.AGENT_ERROR),
    "user fault": ("user_error", "user", Status.AGENT_ERROR),
    "agent fault": ("agent_error", "agent", Status.AGENT_ERROR),
    "exit": ("agent_error", "agent", Status.AGENT_ERROR),
    "killed": ("agent_error", "agent", Status.AGENT_ERROR),
    "killed in setup_agents": ("agent_error", "agent", Status.AGENT_ERROR),
    "killed at once": ("agent_error", "agent", Status.AGENT_ERROR),
    "killed after a step": ("agent_error", "agent", Status.AGENT_ERROR),
    "no json": ("agent_error", "agent", Status.AGENT_ERROR),
    "large answer": ("agent_error", "agent", Status.AGENT_ERROR),
    "forges": ("agent_error", "agent", Status.AGENT_ERROR),
    "lies": ("agent_error", "agent", Status.AGENT_ERROR),
    "late": ("task_timeout", "agent", Status.TASK_TIMEOUT),
    "late environment": ("task_timeout", "environment", Status.TASK_TIMEOUT),
    "late and deaf": ("task_timeout", None, Status.TASK_TIMEOUT),
    "setup_evaluators": ("evaluation_failed", "evaluator", Status.GRADE_ERROR),
    "evaluate": ("evaluation_failed", "evaluator", Status.GRADE_ERROR),
    "no score": ("evaluation_failed", "evaluator", Status.GRADE_ERROR),
    "not a number": ("evaluation_failed", "evaluator", Status.GRADE_ERROR),
    "skipped": ("skipped", None, Status.SKIPPED),
}


class Interrupted(RunCallback):
    """An object that is no queue."""


def rows(*inputs: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": f"t{number}", "input": one, **fields} for number, one in enumerate(inputs)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def fates(folder: Path) -> dict[str, TrialReport]:
    """One trial of each."""
    tasks = rows(*FATES, evaluation={"reference": 7})
    for task in tasks:
        match task["input"]:
            case "late" | "late environment" | "late and deaf":
                task["protocol"] = {"timeout_s": 2}
            case "agent":
                task["protocol"] = {"max_retries": 1}
            case "skipped":
                task["depends_on"] = [tasks[0]["id"], tasks[[*FATES].index("agent")]["id"]]
    reports = Fates().run(tasks, runs=folder, run_id="fates", max_workers=6, sandbox=SMALL)
    assert [report.task_id for report in reports] == [task["id"] for task in tasks]
    return dict(zip(FATES, reports, strict=True))


# --- how a trial ended, and whose doing it was ---


@pytest.mark.parametrize("fate", FATES)
def test_errors_of_agent_environment_user_and_evaluator_are_told_apart(
    fates: dict[str, TrialReport], fate: str
) -> None:
    report = fates[fate]
    status, component, _ = FATES[fate]
    assert (report.status, report.error and report.error.component) == (status, component), report.error


def test_the_status_of_the_run_is_not_moved_by_what_a_trial_says_of_itself(
    fates: dict[str, TrialReport], folder: Path
) -> None:
    with RunStore.open(folder / "fates", write=False) as store:
        assert [commit.status for commit in store.commits()] == [own for _, _, own in FATES.values()]


@pytest.mark.parametrize(
    ("fate", "type_", "message"),
    [
        ("environment", "LookupError", "deep down"),
        ("environment fault", "sandbox_exec.benchmark.EnvironmentFault", "the world stands still"),
        ("killed", "Ended", "the process ended with signal 9"),
        ("no json", "sandbox_exec.benchmark.AgentFault", "what run_agents returned is not JSON"),
        ("large answer", "sandbox_exec.benchmark.AgentFault", "the answer has 4194306 bytes; 4194304 are allowed"),
        ("two names", "ValueError", "agents/helper is registered already, as agents/solver"),
        ("evaluate", "GraderFailed", "KeyError: 'what is this'"),
        ("no score", "GraderFailed", "return a finite number, or a dict with"),
        ("late", "TrialTimeout", ""),
    ],
)
def test_an_error_says_what_went_wrong(fates: dict[str, TrialReport], fate: str, type_: str, message: str) -> None:
    error = fates[fate].error
    assert isinstance(error, TrialFault)
    assert error.type == type_
    assert message in error.message


def test_an_error_in_python_has_its_traceback(fates: dict[str, TrialReport]) -> None:
    for fate, line in (("environment", "in fail"), ("evaluate", "in evaluate")):
        error = fates[fate].error
        assert line in ((error and error.traceback) or ""), fate
    killed = fates["killed"].error
    assert killed is not None
    assert killed.traceback is None


def test_an_evaluation_that_failed_says_why(fates: dict[str, TrialReport]) -> None:
    assert fates["evaluate"].eval_error == fates["evaluate"].error
    assert fates["well"].eval_error is None


def test_a_fault_of_the_machine_is_not_called_one_of_the_environment(folder: Path, fates: Any) -> None:
    with RunStore.open(folder / "fates", write=False) as store:
        completion = TrialCompletion.model_validate_json(next(store.attempts()).completion_json)
    lost = completion.model_copy(update={"status": Status.ENVIRONMENT_ERROR})
    status, error = _judged(lost, "environment")
    assert (status, error and error.component) == ("infra_error", None)


def test_a_trial_that_went_well_has_all_there_is_to_say(fates: dict[str, TrialReport]) -> None:
    report = fates["well"]
    assert (report.variant_id, report.repeat, report.attempts, report.error) == ("Fates", 0, 1, None)
    assert report.trial_id.startswith("Fates.t0.0-")
    assert report.answer == {"of": "t0"}
    assert report.traces == {
        "environment": {"environment": {"calls": 1}},
        "user": {"user": {"calls": 1}},
        "agents": {"solver": {"calls": 1}, "helper": {"calls": 0}},
    }
    assert report.config == {
        "environment": {"environment": {"name": "world"}},
        "user": {"user": {"name": "customer"}},
        "agents": {"solver": {"name": "solver"}, "helper": {"name": "helper"}},
    }
    assert report.usage is not None
    assert report.usage.wall_s > 0
    assert (report.usage.tokens, report.usage.requests) == (120, 2)
    assert TrialReport.model_validate_json(report.model_dump_json()) == report


def test_attempts_are_counted_and_the_last_one_is_reported(fates: dict[str, TrialReport]) -> None:
    retried, skipped = fates["agent"], fates["skipped"]
    assert (retried.attempts, retried.traces["agents"]["solver"]) == (2, {"calls": 2})
    assert (skipped.attempts, skipped.usage, skipped.eval, skipped.traces) == (0, None, None, {})


def test_what_evaluate_returns_is_the_grade(fates: dict[str, TrialReport]) -> None:
    assert fates["well"].eval == {
        "score": 0.5,
        "passed": True,
        "metrics": {"calls": 1.0, "judges": 1.0},
        "details": {
            "seen": {"answer": {"of": "t0"}, "evaluation": {"reference": 7}, "agent": "success"},
            "odd": "{1}",
        },
    }
    assert [fate for fate, report in fates.items() if report.eval] == ["well"]


@pytest.mark.parametrize(
    ("said", "grade"),
    [
        (1, {"score": 1.0}),
        (True, {"score": 1.0, "passed": True}),
        (Fraction(1, 4), {"score": 0.25}),
        (Decimal("0.25"), {"score": 0.25}),
        ({"score": 1}, {"score": 1.0, "passed": None, "metrics": {}, "details": None}),
        (
            {"score": 0.5, "passed": 0, "metrics": {"a": 1}, "b": 2, "why": "x", "details": "y"},
            {
                "score": 0.5,
                "passed": False,
                "metrics": {"a": 1.0, "b": 2.0},
                "details": {"details": "y", "why": "x"},
            },
        ),
    ],
)
def test_a_grade_is_a_number_or_a_dict_with_a_score(said: Any, grade: dict[str, Any]) -> None:
    assert grade_of(said) == grade


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("good", "return a finite number"),
        ({"passed": True}, "return a finite number"),
        ({"score": "1"}, "return a finite number"),
        ({"score": float("inf")}, "return a finite number"),
        (10**400, "return a finite number"),
        ({"score": 1, "metrics": [1, 2]}, r"metrics that are \[1, 2\]; they are a dict of numbers"),
    ],
    ids=["text", "no score", "text as score", "infinite", "too large", "metrics"],
)
def test_what_is_no_grade_is_told(said: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        grade_of(said)


def tangle() -> Any:
    knot: list[Any] = [1]
    for _ in range(60):
        knot = [knot, knot]
    return knot


@pytest.mark.parametrize(
    ("echoed", "details"),
    [
        (float("nan"), {"it": "nan"}),
        (float("-inf"), {"it": "-inf"}),
        (10**400, {"it": repr(10**400)}),
        ("\ud800", {"it": "\ufffd" * 3}),
        ("x" * (2 << 20), {"error": "details left out: the grade has 2097220 bytes, and 1048576 are allowed"}),
        (tangle(), {"error": "the details are left out: more than 500000 values"}),
    ],
    ids=["nan", "infinite", "huge", "half a pair", "large", "tangled"],
)
@pytest.mark.parametrize("where", ["beside", "metrics"])
def test_no_agent_escapes_a_bad_grade_by_what_is_echoed_of_it(echoed: Any, details: Any, where: str) -> None:
    said = {"score": 0, **({"it": echoed} if where == "beside" else {where: {"it": echoed}})}
    grade, why = parse_grade(json.dumps(grade_of(said)).encode())
    assert grade is not None, why
    assert (grade.score, grade.details) == (0, details)


def test_metrics_that_are_too_many_cost_no_grade() -> None:
    grade = grade_of({"score": 0, "metrics": {"x" * MAX_GRADE_BYTES: 1}, "details": "why"})
    assert "metrics left out" in grade["details"]["error"]
    assert len(json.dumps(grade)) < MAX_GRADE_BYTES
    just = {"score": 0, "details": "x" * (MAX_GRADE_BYTES - len(json.dumps(grade_of({"score": 0, "details": ""}))))}
    assert grade_of(just)["details"] == just["details"]
    assert parse_grade(json.dumps(grade_of(just)).encode())[0] is not None


# --- whose doing an error is ---


def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*arguments: Any) -> Any:
        return method(*arguments)

    return wrapper


class World(Part):
    @wrapped
    def turn(self) -> NoReturn:
        raise LookupError

    @property
    def sky(self) -> NoReturn:
        raise LookupError


def put(world: World) -> NoReturn:
    raise LookupError


def act(world: World) -> NoReturn:
    raise LookupError


World.put = put  # type: ignore[attr-defined]  # from elsewhere, but the class has it


@pytest.mark.parametrize(
    ("how", "whose"),
    [
        (lambda world: world.act(lambda: act(world)), "environment"),  # in the end it called
        (lambda world: world.turn(), "environment"),
        (lambda world: world.sky, "environment"),
        (lambda world: world.put(), "environment"),
        (lambda world: act(world), "agent"),  # has the name of a method, and is none
        (lambda world: world.missing, "agent"),
    ],
    ids=["called", "decorated", "property", "given to the class", "function", "not in it"],
)
def test_only_methods_of_a_component_are_its_own_doing(how: Callable[[World], Any], whose: str) -> None:
    benchmark, world = Fates(), World("world")
    benchmark.registry = ComponentRegistry()
    benchmark.registry.register("environment", "environment", world)
    with pytest.raises((LookupError, AttributeError)) as caught:
        how(world)
    assert component_of(caught.value, benchmark) == whose


# --- traces and configs of trials that were killed ---


@pytest.mark.parametrize("fate", ["killed", "late and deaf"])
def test_a_killed_trial_has_the_traces_and_configs_up_to_its_last_snapshot(
    fates: dict[str, TrialReport], fate: str
) -> None:
    report = fates[fate]
    assert report.traces == fates["well"].traces
    assert report.config == fates["well"].config


@pytest.mark.parametrize(("fate", "calls"), [("late", 2), ("agent", 2), ("environment", 2), ("exit", 1)])
def test_a_trial_that_raised_or_was_late_has_the_traces_up_to_its_end(
    fates: dict[str, TrialReport], fate: str, calls: int
) -> None:
    report = fates[fate]
    assert report.traces["agents"]["solver"] == {"calls": calls}
    assert report.config == fates["well"].config


def test_a_trial_whose_set_up_failed_has_what_was_there(fates: dict[str, TrialReport]) -> None:
    assert fates["setup_environment"].config == {}
    assert fates["setup_user"].config == {"environment": {"environment": {"name": "world"}}}
    assert set(fates["setup_agents"].config) == {"environment", "user"}


def test_a_trial_that_was_killed_has_the_configs_of_what_was_set_up(fates: dict[str, TrialReport]) -> None:
    assert set(fates["killed in setup_agents"].config) == {"environment", "user"}
    assert fates["killed at once"].config == fates["well"].config


def test_a_killed_trial_has_what_its_own_events_took_along(fates: dict[str, TrialReport]) -> None:
    assert fates["killed after a step"].traces["agents"]["solver"] == {"calls": 2}


def test_what_was_registered_by_hand_keeps_its_name(fates: dict[str, TrialReport]) -> None:
    assert {category: set(of) for category, of in fates["by hand"].traces.items()} == {
        "environment": {"shop"},
        "tools": {"till"},
        "user": {"user"},
        "agents": {"solver", "helper"},
    }


# --- trials that the run skipped ---


@pytest.fixture
def altered(fates: dict[str, TrialReport], folder: Path, tmp_path: Path) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """A copy of the run of all fates, and its database."""
    shutil.copytree(folder / "fates", tmp_path / "fates")
    with closing(sqlite3.connect(tmp_path / "fates" / "run.db", isolation_level=None)) as db:
        yield tmp_path / "fates", db


def report_of(folder: Path, fate: str) -> TrialReport:
    return reports_of(folder)[[*FATES].index(fate)]


def test_a_trial_that_was_killed_when_the_time_of_the_run_was_over_has_what_it_left(
    altered: tuple[Path, sqlite3.Connection], fates: dict[str, TrialReport]
) -> None:
    folder, db = altered
    idx = [*FATES].index("late and deaf")
    db.execute("UPDATE commits SET status = 'skipped', error_type = 'Skipped' WHERE schedule_idx = ?", (idx,))
    db.execute("DELETE FROM attempts WHERE schedule_idx = ?", (idx,))  # of those no attempt is recorded
    before, report = fates["late and deaf"], report_of(folder, "late and deaf")
    assert (report.status, report.attempts) == ("skipped", 1)
    assert (report.traces, report.config, report.usage) == (before.traces, before.config, before.usage)
    assert report.traces
    assert report.usage


def test_a_skipped_trial_says_why(altered: tuple[Path, sqlite3.Connection], fates: dict[str, TrialReport]) -> None:
    folder, db = altered
    trial_id = fates["skipped"].trial_id
    db.execute("DELETE FROM events WHERE kind = 'skipped'")
    error = report_of(folder, "skipped").error
    assert error is not None
    assert error.message == "the run decided not to run it"
    data = json.dumps({"trial_id": trial_id, "reason": "it needs t4"})
    db.execute("INSERT INTO events (at, kind, data) VALUES (0, 'skipped', ?)", (data,))
    error = report_of(folder, "skipped").error
    assert error is not None
    assert error.message == "it needs t4"


# --- reading a trace ---


def streamed(folder: Path, *events: dict[str, Any] | bytes) -> Streamed:
    lines = (event if isinstance(event, bytes) else json.dumps(event).encode() for event in events)
    (folder / "trace.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return Streamed(folder / "trace.jsonl")


def of_a(**fields: Any) -> dict[str, Any]:
    return {"type": TRACES, "category": "agents", "name": "a", **fields}


def test_the_last_whole_snapshot_counts(tmp_path: Path) -> None:
    parts = [of_a(part=n, parts=2, text=text) for n, text in enumerate(['{"n":', "2}"])]
    assert streamed(tmp_path, of_a(data=1), *parts).of(TRACES) == {"agents": {"a": {"n": 2}}}
    assert streamed(tmp_path, *parts, of_a(data=3)).of(TRACES) == {"agents": {"a": 3}}
    assert streamed(tmp_path, of_a(data=1), parts[0]).of(TRACES) == {"agents": {"a": 1}}  # killed in between
    assert streamed(tmp_path, parts[0], of_a(data=1), parts[1]).of(TRACES) == {"agents": {"a": 1}}
    assert streamed(tmp_path, parts[0], *parts).of(TRACES) == {"agents": {"a": {"n": 2}}}
    assert streamed(tmp_path, of_a(data=1), {**of_a(data=5), "type": CONFIG}).of(CONFIG) == {"agents": {"a": 5}}


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "component_traces", "category": "agents", "name": ["a"], "data": 2}',
        b'{"type": "component_traces", "category": "agents", "data": 2}',
        b'{"type": "component_traces", "category": "agents", "name": "a", "part": 0, "parts": 1, "text": "NaN"}',
        b'{"type": "component_traces", "category": "agents", "name": "a", "part": 0, "parts": 1, "text": 7}',
        b'{"type": "component_traces", "category": "agents", "name": "a", "part": [], "parts": {}, "text": "1"}',
        b'{"type": "component_traces", "category": "agents", "name": "a", "part": false, "parts": 1, "text": "2"}',
        b'{"type": "component_traces", "category": "agents", "name": "a", "part": 0, "parts": true, "text": "2"}',
        b'{"type": "component_traces", "category": "agents", "name": "a", "part": 0, "parts": 1.0, "text": "2"}',
        b'{"type": "component_traces", "category": "agents", "name": "a", "part": 1, "parts": 1, "text": "2"}',
        b'{"type": ["component_traces"], "category": "agents", "name": "a", "data": 2}',
        b'{"type": "component_traces", "category": "agents", "name": "a", "data": NaN}',
        b'"component_traces"',
        b'{"component_',
        b"[" * 100_000 + b'"component_"',
    ],
)
def test_no_line_of_a_trace_spoils_the_others(tmp_path: Path, line: bytes) -> None:
    assert streamed(tmp_path, of_a(data=1), line).of(TRACES) == {"agents": {"a": 1}}


def test_what_is_kept_of_a_trace_is_bounded(tmp_path: Path) -> None:
    many = (of_a(data=1) | {"name": f"a{number}"} for number in range(5000))
    assert len(streamed(tmp_path, *many).of(TRACES)["agents"]) == 1000
    configs = [of_a(data=1) | {"name": f"a{number}", "type": CONFIG} for number in range(1000)]
    both = streamed(tmp_path, *(one | {"type": TRACES} for one in configs), *configs)
    assert [len(both.of(kind)["agents"]) for kind in (TRACES, CONFIG)] == [1000, 1000]
    large = (of_a(data="x" * 900_000) | {"name": f"a{number}"} for number in range(60))
    assert 30 < len(streamed(tmp_path, *large).of(TRACES)["agents"]) < 40


def test_a_snapshot_has_no_more_parts_than_one_could_have(tmp_path: Path) -> None:
    def parts(count: int) -> list[Any]:
        return [of_a(part=number, parts=count, text="1") for number in range(count)]

    assert streamed(tmp_path, *parts(17)).of(TRACES) == {"agents": {"a": int("1" * 17)}}
    assert streamed(tmp_path, *parts(18)).of(TRACES) == {}
    spaces = " " * 900_000
    long = [of_a(part=number, parts=5, text=spaces if number else "1") for number in range(5)]
    assert streamed(tmp_path, *long).of(TRACES) == {"agents": {"a": 1}}
    assert streamed(tmp_path, {**long[0], "text": "1" + spaces}, *long[1:]).of(TRACES) == {}


@pytest.mark.parametrize("count", [-1, 10**9, None])
def test_nothing_is_held_of_a_snapshot_that_never_ends(tmp_path: Path, count: int | None) -> None:
    endless = (of_a(part=number, parts=count, text="") for number in range(100))
    assert streamed(tmp_path, *endless)._parts == {}


def test_a_trial_that_traced_nothing_said_nothing(tmp_path: Path) -> None:
    nothing = Streamed(tmp_path / "trace.jsonl")
    assert (nothing.of(TRACES), nothing.component) == ({}, "")


# --- evaluation: another process, and data that no agent sees ---


def test_evaluation_runs_in_a_process_that_never_ran_the_agent(tmp_path: Path) -> None:
    (report,) = Marking().run(rows(1), runs=tmp_path, sandbox=SMALL)
    assert report.eval is not None
    details = report.eval["details"]
    assert set(details["marks"].values()) == {False}
    if NAMESPACES:
        assert details["me"]["pids"] != details["agent"]["pids"]


@pytest.mark.skipif(not NAMESPACES, reason="agents see the files of the host")
def test_an_agent_finds_no_evaluation_data_in_its_memory_files_or_environment(tmp_path: Path) -> None:
    secret, known = (f"canary-{secrets.token_hex(16)}" for _ in range(2))
    since = time.time() - 60
    task = {"id": "t", "input": {"known": known, "since": since}, "evaluation": {"reference": secret}}
    (report,) = Searching().run([task], runs=tmp_path, sandbox=SMALL | {"memory": "512MiB"})
    assert report.eval is not None, report.error
    assert report.eval["details"] == {"reference": secret}
    assert report.answer == [known]  # that one it must find, or it has not searched


def test_an_agent_can_make_no_evaluation_fail_by_what_it_leaves(tmp_path: Path) -> None:
    class Broken(Benchmark):
        def setup_agents(self, task: Task, environment: Any, user: Any) -> Any:
            return None

        def run_agents(self, task: Task, agents: Any, environment: Any, user: Any) -> Any:
            import os

            if task["input"] is None:
                raise ValueError
            for name, text in task["input"].items():
                with open(os.path.join(os.environ["SANDBOX_EXEC_OUT"], name), "w") as file:
                    file.write(text)
            os.kill(os.getpid(), 9)

        def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: Any) -> Any:
            if answer == "what is this":
                raise KeyError(answer)
            return {"score": 1, "left": [answer, traces, task["agent"]["status"]]}

    deep = "[" * 100_000
    left: list[Any] = [
        None,
        {"answer.json": deep, "traces.json": deep},
        {"answer.json": "1", "traces.json": '{"a": 1, "b": {"c": 2}}'},
        {"answer.json": "1" + " " * (5 << 20), "traces.json": "[]"},
        {"answer.json": '"what is this"'},
    ]
    *reports, failed = Broken().run(
        rows(*left), runs=tmp_path, max_workers=4, sandbox=SMALL, grading={"grade_on": "always"}
    )
    assert [(report.status, (report.eval or {})["details"]["left"]) for report in reports] == [
        ("agent_error", [None, {}, "agent_error"]),
        ("agent_error", [None, {}, "agent_error"]),
        ("agent_error", [1, {"b": {"c": 2}}, "agent_error"]),
        ("agent_error", [None, {}, "agent_error"]),
    ]
    assert [report.answer for report in reports] == [None, None, 1, None]
    assert [report.eval_error for report in reports] == [None] * 4
    assert failed.eval_error is not None
    assert (failed.status, failed.eval, failed.eval_error.type) == ("agent_error", None, "GraderFailed")
    assert (failed.eval_error.component, failed.eval_error.message) == ("evaluator", "KeyError: 'what is this'")


class InBoth(Benchmark):
    """For both sides of a trial in this process."""

    def __init__(self, made: dict[str, Any], fails: bool = False) -> None:
        self.made, self.fails = made, fails

    def setup_environment(self, task: Task) -> Any:
        return self.made.get("environment")

    def setup_user(self, task: Task, environment: Any) -> Any:
        return self.made.get("user")

    def setup_agents(self, task: Task, environment: Any, user: Any) -> Any:
        if "by hand" in self.made:
            self.registry.register("tools", "by hand", self.made["by hand"])
        return self.made.get("agents")

    def run_agents(self, task: Task, agents: Any, environment: Any, user: Any) -> Any:
        if self.fails:
            raise LookupError("the agent's own")

    def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: Any) -> Any:
        return {"score": 0, "details": {"answer": answer, "traces": traces}}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A trial in this process: what it leaves goes there, and its trace beside."""
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("SANDBOX_EXEC_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(sys.modules[TrialContext.__module__], "_current", None)
    with open(tmp_path / "trace.jsonl", "wb") as trace:
        set_context(TrialContext(seed=0, deadline_s=None, trace_fd=trace.fileno()))
        yield tmp_path / "out"


def left_for_evaluation(benchmark: Benchmark = InBoth({})) -> Any:  # noqa: B008  # nobody changes it
    return InGrading(benchmark, {})({"id": "t"})["details"]


@pytest.mark.parametrize("answer", ["NaN", "[-Infinity]", "[1e999]", "1" * 301, "1" * 5000, "[", "\xff"])
def test_what_is_no_json_is_no_answer(out: Path, answer: str) -> None:
    (out / "answer.json").write_text(answer, "latin-1")
    (out / "traces.json").write_text(f'{{"a": {{"b": {answer}}}}}', "latin-1")
    assert left_for_evaluation() == {"answer": None, "traces": {}}


def test_what_is_json_is_an_answer(out: Path) -> None:
    (out / "answer.json").write_text(f"[-1.5e3, {10**299}, null]")
    assert left_for_evaluation()["answer"] == [-1500.0, 10**299, None]


class Verbose(Part):
    def gather_traces(self) -> Any:
        return self.name


def test_an_evaluation_has_all_traces_but_those_that_are_too_large(out: Path) -> None:
    agents = {f"a{size}": Verbose("x" * size) for size in (100, 900_000, 1_500_000, 2_600_000)}
    InSandbox(InBoth({"agents": agents}), None)({"id": "t"})
    traces = json.loads((out / "traces.json").read_text())["agents"]
    assert [name for name, said in traces.items() if isinstance(said, str)] == ["a100", "a900000", "a1500000"]
    assert "too large: 2600002 characters" in traces["a2600000"]["error"]


def test_a_full_disk_is_not_what_went_wrong(out: Path) -> None:
    (out / "traces.json").symlink_to("/dev/full")
    with pytest.raises(LookupError, match="the agent's own"):
        InSandbox(InBoth({}, fails=True), None)({"id": "t"})
    with pytest.raises(OSError, match="No space left"):
        InSandbox(InBoth({"agents": Part("x")}), None)({"id": "t"})


def test_one_component_in_two_places_is_an_error_unless_it_has_its_name_by_hand(out: Path) -> None:
    one = Part("one")
    for made in ({"agents": {"a": one, "b": one}}, {"environment": one, "user": one}, {"user": one, "agents": one}):
        with pytest.raises(ValueError, match="is registered already"):
            InSandbox(InBoth(made), None)({"id": "t"})
    InSandbox(InBoth({"by hand": one, "agents": {"a": one, "b": Part("b")}}), None)({"id": "t"})
    assert set(json.loads((out / "traces.json").read_text())) == {"tools", "agents"}


EXAMPLE_FILE = ROOT / "examples" / "benchmark.py"


@pytest.mark.parametrize("traces", [{}, {"user": {}}, {"user": {"user": "x"}}, {"user": {"user": {"asked": "x"}}}])
def test_no_agent_escapes_the_example_by_what_it_traces(traces: Any) -> None:
    shopping = runpy.run_path(str(EXAMPLE_FILE))["Shopping"]()
    assert grade_of(shopping.evaluate({"evaluation": "tea"}, None, "cup", traces))["score"] == 0


# --- the order of reports, repeats, variants, queues ---


def test_reports_are_in_the_order_of_the_schedule_whichever_trial_ended_first(tmp_path: Path, meeting: Meeting) -> None:
    pipe = f"{meeting.folder}/down"
    tasks = rows(*({"first": number == 0, "others": 2, "pipe": pipe} for number in range(3)))
    sandbox = SMALL | {"readable": [meeting.folder]}
    reports = Waiting().run(tasks, runs=tmp_path / "runs", max_workers=3, sandbox=sandbox)
    assert [(report.task_id, report.status) for report in reports] == [(f"t{n}", "success") for n in range(3)]
    assert [report.eval and report.eval["passed"] for report in reports] == [True] * 3


def test_each_task_is_run_with_each_variant_as_often_as_was_said(tmp_path: Path) -> None:
    variants: Mapping[str, Any] = {
        "plain": {},
        "careful": {"data": {"model": "m", "retries": 3}, "env": {"MODE": "careful"}},
    }
    queue = {"order": "sequential", "max_waiting": 100}
    how: dict[str, Any] = {"n_task_repeats": 2, "variants": variants, "queue": queue, "max_workers": 4}
    how |= {"runs": tmp_path, "run_id": "mine", "sandbox": SMALL}
    reports = Variants("s3cret").run(rows(1, 2), **how)
    assert [(report.task_id, report.variant_id, report.repeat) for report in reports] == [
        (task, variant, repeat) for task in ("t0", "t1") for variant in ("plain", "careful") for repeat in (0, 1)
    ]
    plain, careful = reports[0], reports[3]
    assert plain.answer["data"] is plain.answer["mode"] is None
    assert careful.answer == {
        "data": {"model": "m", "retries": 3},
        "mode": "careful",
        "agents": ["agent"],
        "attributes": ["agent_data", "registry"],  # and none that is for the evaluation only
        "repeat": 1,
    }
    assert (careful.eval or {})["details"] == {"data": None, "secret": "s3cret"}
    with pytest.raises(InvalidExperiment, match=r"was made with other Variants\.secret"):
        Variants("another").run(rows(1, 2), **how)


def test_queue_settings_are_those_of_the_design(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="no order"):
        Fates().run(rows("well"), runs=tmp_path, queue="random")
    with pytest.raises(InvalidValue, match="design has order, repeats: say it with queue and n_task_repeats"):
        Fates().run(rows("well"), runs=tmp_path, design={"order": "priority", "repeats": 2, "prune_after_failures": 3})
    with pytest.raises(InvalidExperiment, match="promote_after_s"):
        Fates().run(rows("well"), runs=tmp_path, queue={"order": "priority", "promote_after_s": -1})


def test_what_is_not_json_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match=r"task 't0': evaluation is not JSON"):
        Fates().run(rows("well", evaluation={1, 2}), runs=tmp_path / "runs")
    with pytest.raises(InvalidExperiment, match="data of a variant is not JSON"):
        Fates().run(rows("well"), runs=tmp_path / "runs", variants={"v": {"data": object()}})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"queue": None}, "queue is None; it is the name of an order"),
        ({"queue": ["priority"]}, r"queue is \['priority'\]; it is"),
        ({"queue": {"order": 7}}, "queue is 7; it is"),
        ({"queue": Interrupted()}, "queue is .*Interrupted"),
        ({"variants": ["a"]}, r"variants is \['a'\]; it is a dict"),
        ({"variants": {"a": "b"}}, "variants is {'a': 'b'}; it is a dict"),
        ({"variants": {"a": {"agent": {"command": ["true"]}}}}, r"variants\['a'\] has agent: .*setup_agents"),
        ({"workers": 2}, "workers is given: say it with max_workers"),
        ({"tasks": []}, "there are no tasks"),
        ({"tasks": rows(1, grading={"command": ["true"]})}, "task 't0' has a grader of its own"),
        ({"tasks": rows(1, grading={"python": "a:b"})}, "task 't0' has a grader of its own"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_there_is_a_run(tmp_path: Path, how: Any, why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        Fates().run(**{"tasks": rows("well"), "runs": tmp_path / "runs", **how})
    assert not (tmp_path / "runs").exists()


def test_what_is_for_the_evaluation_only_must_be_of_the_object(tmp_path: Path) -> None:
    class Judging(Variants):
        shared = "of the class"

        def judge(self) -> None:
            pass

    benchmark = Judging("s3cret")
    for names in (("secrets",), ("secret", "shared"), "secret"):
        benchmark.evaluation_only = names  # type: ignore[assignment]  # one is none
        with pytest.raises(InvalidValue, match=r"Judging\.evaluation_only is .*own attributes, which are: secret"):
            benchmark.run(rows(1), runs=tmp_path / "runs")
    del benchmark.evaluation_only
    benchmark.own_judge = benchmark.judge  # type: ignore[attr-defined]
    with pytest.raises(InvalidValue, match=r"Judging\.own_judge is a method of the object"):
        benchmark.run(rows(1), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_state_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    benchmark = Variants("s3cret")
    benchmark.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(InvalidExperiment, match=r"Variants\.lock cannot be pickled: .*lock"):
        benchmark.run(rows(1), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_benchmark_without_its_parts_cannot_be_made() -> None:
    class Empty(Benchmark):
        pass

    with pytest.raises(TypeError, match="evaluate"):
        Empty()  # type: ignore[abstract]


# --- interrupted, and continued ---


class Interrupter(RunCallback):
    def on_run_start(self, run: Coordinator) -> None:
        self.run = run

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self.run.drain("seen enough")


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    def interrupt(run: Coordinator) -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        Fates().run(rows("well"), runs=tmp_path, sandbox=SMALL, on_ready=interrupt)
    (folder,) = tmp_path.iterdir()
    (note,) = caught.value.__notes__
    assert note == f"the run is in {folder}; the same call with run_id={folder.name!r} goes on"


def test_an_interrupted_run_is_continued_by_the_same_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = rows("well", "environment", "well", evaluation="x")
    how: dict[str, Any] = {"runs": tmp_path, "run_id": "mine", "max_workers": 1, "sandbox": SMALL}
    with pytest.raises(SandboxExecError, match=r"interrupted \(seen enough\), [12] of 3 trials.*run_id='mine'"):
        Fates().run(tasks, callbacks=[Interrupter()], **how)
    before = reports_of(tmp_path / "mine")

    with pytest.raises(InvalidExperiment, match="made with other tasks"):
        Fates().run(tasks[:2], **how)
    with pytest.raises(InvalidExperiment, match="made with other evaluation data"):
        Fates().run([{**task, "evaluation": "y"} for task in tasks], **how)
    with pytest.raises(InvalidExperiment, match="made with other design"):
        Fates().run(tasks, n_task_repeats=2, **how)

    monkeypatch.setattr(__main__, "__file__", __file__)  # from another script
    reports = Fates().run(tasks, **how | {"max_workers": 2})
    assert reports[: len(before)] == before
    assert [report.status for report in reports] == ["success", "environment_error", "success"]
    assert [report.attempts for report in reports] == [1, 1, 1]
    assert Fates().run(tasks, **how) == reports  # nothing is left to do


# --- where the class is from ---


class OfThisModule(Benchmark):
    def setup_agents(self, task: Task, environment: Any, user: Any) -> Any:
        return str.upper

    def run_agents(self, task: Task, agents: Any, environment: Any, user: Any) -> Any:
        return agents["agent"](task["input"])

    def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: Any) -> Any:
        return answer == "WORD"


class Noting(SequentialQueue):
    noted: list[int] = []  # noqa: RUF012  # a new one for each test

    def put(self, entry: Entry) -> None:
        self.noted.append(entry.idx)
        super().put(entry)


def test_a_class_and_a_queue_of_a_test_module_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "noted", [])
    (report,) = OfThisModule().run(rows("word"), queue=Noting, runs=tmp_path, sandbox=SMALL)
    assert (report.eval or {})["passed"] is True, report.error
    assert Noting.noted == [0]


SCRIPT = """
import sys
from sandbox_exec import Benchmark

class Peeking(Benchmark):
    def setup_agents(self, task, environment, user):
        return lambda: open(task["input"]).read()

    def run_agents(self, task, agents, environment, user):
        return agents["agent"]()

    def evaluate(self, task, evaluators, answer, traces):
        return "the reference" in answer

if __name__ == "__main__":
    tasks = [{"id": "own", "input": __file__}, {"id": "other", "input": sys.argv[2]}]
    for report in Peeking().run(tasks, runs=sys.argv[1], max_workers=2):
        print(report.model_dump_json())
"""


@pytest.mark.skipif(not NAMESPACES, reason="agents see the files of the host")
def test_a_script_runs_its_class_and_its_agents_cannot_read_the_script(tmp_path: Path) -> None:
    script, other = tmp_path / "script" / "peeking.py", tmp_path / "script" / "other.txt"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    other.write_text("the reference")
    tmp_path.chmod(0o755)
    lines = in_python(script, tmp_path / "runs", other).splitlines()
    own, beside = map(TrialReport.model_validate_json, lines)
    assert "the reference" not in str(own.answer)
    assert (beside.status, (beside.eval or {}).get("passed")) == ("success", True), beside.error


def test_the_script_is_hidden_from_agents_though_their_class_is_of_a_module(folder: Path, fates: Any) -> None:
    with RunStore.open(folder / "fates", write=False) as store:
        made = Experiment.model_validate_json(store.run().experiment_json)
    assert made.sandbox.hidden == (Path(os.path.abspath(__main__.__file__)),)


def test_the_example_shows_who_failed_and_who_solved_what(tmp_path: Path) -> None:
    output = in_python(EXAMPLE_FILE, tmp_path)
    table = [line.split()[:3] for line in output.splitlines() if line.startswith("  ")]
    assert table == EXAMPLE
    (run,) = tmp_path.iterdir()
    assert len(reports_of(run)) == len(EXAMPLE)


EXAMPLE = [
    ["tea", "asking", "success"],
    ["tea", "guessing", "success"],
    ["lamp", "asking", "success"],
    ["lamp", "guessing", "success"],
    ["ghost", "asking", "environment_error"],
    ["ghost", "guessing", "success"],
]


def in_python(script: Path, *arguments: object) -> str:
    command = [sys.executable, "-W", "error", str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
