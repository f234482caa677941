"""Benchmarks in Python: real runs of a few trials, and what each report says of them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmark_parts import Fates, Marking, Searching, Task, Variants, Waiting
from support import Meeting

from sandbox_exec import (
    Benchmark,
    InvalidExperiment,
    InvalidValue,
    RunCallback,
    SandboxExecError,
    TrialReport,
    reports_of,
)
from sandbox_exec.benchmark import grade_of
from sandbox_exec.contracts import Rung, Status, TrialCompletion
from sandbox_exec.coordinator import Coordinator
from sandbox_exec.guest.registry import CONFIG, TRACES
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.store import RunStore
from sandbox_exec.trial_reports import Streamed, TrialFault

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
    "agent below environment": ("agent_error", "agent", Status.AGENT_ERROR),
    "environment fault": ("environment_error", "environment", Status.AGENT_ERROR),
    "user fault": ("user_error", "user", Status.AGENT_ERROR),
    "agent fault": ("agent_error", "agent", Status.AGENT_ERROR),
    "exit": ("agent_error", "agent", Status.AGENT_ERROR),
    "killed": ("agent_error", "agent", Status.AGENT_ERROR),
    "no json": ("agent_error", "agent", Status.AGENT_ERROR),
    "forges": ("agent_error", "agent", Status.AGENT_ERROR),
    "lies": ("agent_error", "agent", Status.AGENT_ERROR),
    "late": ("task_timeout", None, Status.TASK_TIMEOUT),
    "late and deaf": ("task_timeout", None, Status.TASK_TIMEOUT),
    "setup_evaluators": ("evaluation_failed", "evaluator", Status.GRADE_ERROR),
    "evaluate": ("evaluation_failed", "evaluator", Status.GRADE_ERROR),
    "no score": ("evaluation_failed", "evaluator", Status.GRADE_ERROR),
    "not a number": ("evaluation_failed", "evaluator", Status.GRADE_ERROR),
    "skipped": ("skipped", None, Status.SKIPPED),
}


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
            case "late" | "late and deaf":
                task["protocol"] = {"timeout_s": 2}
            case "agent":
                task["protocol"] = {"max_retries": 1}
            case "skipped":
                task["depends_on"] = [tasks[0]["id"], tasks[[*FATES].index("agent")]["id"]]
    reports = Fates().run(tasks, runs=folder, run_id="fates", max_workers=4, sandbox=SMALL)
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
        ("evaluate", "GraderFailed", "KeyError: 'what is this'"),
        ("no score", "GraderFailed", "return a number, or a dict with"),
        ("late", "TrialTimeout", ""),
    ],
)
def test_an_error_says_what_went_wrong(fates: dict[str, TrialReport], fate: str, type_: str, message: str) -> None:
    error = fates[fate].error
    assert isinstance(error, TrialFault)
    assert error.type == type_
    assert message in error.message


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
    assert report.usage.tokens == 120
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


def test_what_was_registered_by_hand_keeps_its_name(fates: dict[str, TrialReport]) -> None:
    assert {category: set(of) for category, of in fates["by hand"].traces.items()} == {
        "environment": {"shop"},
        "tools": {"till"},
        "user": {"user"},
        "agents": {"solver", "helper"},
    }


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
    large = (of_a(data="x" * 900_000) | {"name": f"a{number}"} for number in range(60))
    assert 30 < len(streamed(tmp_path, *large).of(TRACES)["agents"]) < 40


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
            return {"score": 1, "left": [answer, traces, task["agent"]["status"]]}

    deep = "[" * 100_000
    left: list[Any] = [
        None,
        {"answer.json": deep, "traces.json": deep},
        {"answer.json": "1", "traces.json": '{"a": 1, "b": {"c": 2}}'},
        {"answer.json": "1" + " " * (5 << 20), "traces.json": "[]"},
    ]
    reports = Broken().run(rows(*left), runs=tmp_path, max_workers=4, sandbox=SMALL, grading={"grade_on": "always"})
    assert [(report.status, (report.eval or {})["details"]["left"]) for report in reports] == [
        ("agent_error", [None, {}, "agent_error"]),
        ("agent_error", [None, {}, "agent_error"]),
        ("agent_error", [1, {"b": {"c": 2}}, "agent_error"]),
        ("agent_error", [None, {}, "agent_error"]),
    ]
    assert [report.answer for report in reports] == [None, None, 1, None]


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
    reports = Variants("s3cret").run(rows(1, 2), runs=tmp_path, sandbox=SMALL, **how)
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


def test_an_interrupted_run_is_continued_by_the_same_call(tmp_path: Path) -> None:
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


def test_a_class_of_a_test_module_can_be_run(tmp_path: Path) -> None:
    (report,) = OfThisModule().run(rows("word"), runs=tmp_path, sandbox=SMALL)
    assert (report.eval or {})["passed"] is True, report.error


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


def test_the_example_shows_who_failed_and_who_solved_what(tmp_path: Path) -> None:
    output = in_python(ROOT / "examples" / "benchmark.py", tmp_path)
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
