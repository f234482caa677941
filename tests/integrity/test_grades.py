"""The contract of grade.json, and graders that break it or misbehave: a reason, a commit, and a next trial."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integrity.trials import Kind, experiment, last_attempt, run, told
from sandbox_exec import runs
from sandbox_exec.contracts import Grade, Status, TrialCompletion
from sandbox_exec.errors import InvalidExperiment
from sandbox_exec.guest import kernel
from sandbox_exec.regrade import read_predictions
from sandbox_exec.sandbox.scratch import read_file
from sandbox_exec.trial.grading import MAX_GRADE_BYTES, REJECTED, parse_grade
from sandbox_exec.trial.trace import parse_object

# --- what is written ---

GOOD: dict[str, tuple[bytes, Grade]] = {
    "only a score": (b'{"score": 0.5}', Grade(score=0.5)),
    "a whole number": (b'{"score": 1}', Grade(score=1.0)),
    "a negative score": (b'{"score": -3.5e2}', Grade(score=-350.0)),
    "all of it": (
        b' {"score": 1.0, "passed": true, "metrics": {"a": 1, "b": 0.5}, "details": [1, {"x": null}]}\n',
        Grade(score=1.0, passed=True, metrics={"a": 1.0, "b": 0.5}, details=[1, {"x": None}]),
    ),
    "an unknown verdict": (b'{"score": 0, "passed": null}', Grade(score=0.0)),
    "large details": (
        json.dumps({"score": 0, "details": "x" * 900_000}).encode(),
        Grade(score=0.0, details="x" * 900_000),
    ),
    "details that are not ASCII": ('{"score": 0, "details": "ä€😀"}'.encode(), Grade(score=0.0, details="ä€😀")),
}
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "malformed"),
    "no score": (b'{"passed": true}', "score: Field required"),
    "a score of NaN": (b'{"score": NaN}', "NaN is not JSON"),
    "an infinite score": (b'{"score": Infinity}', "Infinity is not JSON"),
    "a score that overflows": (b'{"score": 1e999}', "score"),
    "a score that is text": (b'{"score": "1.0"}', "score"),
    "a score that is a verdict": (b'{"score": true}', "score"),
    "no number": (b'{"score": null}', "score"),
    "a verdict that is a number": (b'{"score": 1, "passed": 1}', "passed"),
    "a verdict that is text": (b'{"score": 1, "passed": "true"}', "passed"),
    "an unknown field": (b'{"score": 1, "scores": 2}', "scores"),
    "a key twice": (b'{"score": 0, "score": 1}', "'score' stands there twice"),
    "a key twice, further in": (b'{"score": 0, "details": [{"a": 1, "a": 2}]}', "'a' stands there twice"),
    "a key twice, once in other letters": (b'{"score": 0, "\\u0073core": 1}', "'score' stands there twice"),
    "metrics that are a list": (b'{"score": 0, "metrics": [1]}', "metrics"),
    "a metric that is text": (b'{"score": 0, "metrics": {"a": "1"}}', "metrics.a"),
    "a metric that is NaN": (b'{"score": 0, "metrics": {"a": NaN}}', "NaN"),
    "a metric that overflows": (b'{"score": 0, "metrics": {"a": -1e999}}', "metrics.a"),
    "details that overflow": (b'{"score": 0, "details": [1e999]}', "details"),
    "a number of a thousand digits": (b'{"score": 0, "details": ' + b"9" * 1000 + b"}", "details"),
    "a number of a million digits": (b'{"score": ' + b"9" * 1_000_000 + b"}", "malformed"),
    "deep nesting": (b'{"score": 0, "details": ' + b"[" * 5000 + b"]" * 5000 + b"}", "malformed"),
    "nesting that is just too deep": (b'{"score": 0, "details": ' + b"[" * 150 + b"]" * 150 + b"}", "deep"),
    "no UTF-8": (b'{"score": 0, "details": "\xff"}', "malformed"),
    "another encoding": ('{"score": 0}'.encode("utf-16"), "malformed"),
    "a byte order mark": (b'\xef\xbb\xbf{"score": 0}', "malformed"),
    "a list": (b'[{"score": 0}]', "malformed"),
    "a number": (b"1.0", "malformed"),
    "text": (b'"score"', "malformed"),
    "two objects": (b'{"score": 0}{"score": 1}', "malformed"),
    "a comment": (b'{"score": 0} // passed', "malformed"),
    "half of it": (b'{"score": 0', "malformed"),
    "zeros": (bytes(100), "malformed"),
}


@pytest.mark.parametrize("what", GOOD)
def test_a_grade_is_read_as_it_was_written(what: str) -> None:
    data, due = GOOD[what]
    assert parse_grade(data) == (due, "")


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_grade_has_a_reason(what: str) -> None:
    data, due = BAD[what]
    grade, reason = parse_grade(data)
    assert grade is None
    assert due in reason
    assert len(reason) < 400
    reason.encode()


@pytest.mark.parametrize("what", ["link", "folder", "fifo", "socket", "giant", "closed"])
def test_what_is_no_file_of_a_grades_size_is_not_read(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "grade"
    folder.mkdir()
    place = folder / "grade.json"
    (tmp_path / "real").write_text('{"score": 1}')
    match what:
        case "link":
            place.symlink_to(tmp_path / "real")
        case "folder":
            place.mkdir()
        case "fifo":
            os.mkfifo(place)
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(place))
        case "giant":
            place.touch()
            os.truncate(place, 200 << 20)
        case "closed":
            place.write_text("{}")
            place.chmod(0)
    scratch = os.open(tmp_path, os.O_RDONLY)
    try:
        if what == "closed" and os.geteuid() == 0:
            assert read_file(scratch, "grade/grade.json", MAX_GRADE_BYTES) == b"{}"
        else:
            with pytest.raises(ValueError, match=r"^grade\.json "):
                read_file(scratch, "grade/grade.json", MAX_GRADE_BYTES)
    finally:
        os.close(scratch)


# --- anything at all ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
FIELDS = st.sampled_from(["score", "passed", "metrics", "details", "task_id", "answer", "files", "variant", "repeat"])
LIKELY = st.dictionaries(FIELDS, JSON)
ANY = (
    st.binary()
    | st.builds(lambda value: json.dumps(value).encode(), JSON | LIKELY)
    | st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))
)


@settings(max_examples=300, deadline=None)
@given(ANY)
def test_any_bytes_give_a_grade_that_can_be_stored_or_a_reason(data: bytes) -> None:
    grade, reason = parse_grade(data)
    assert (grade is None) == bool(reason)
    reason.encode()
    if grade is not None:
        assert Grade.model_validate_json(grade.model_dump_json()) == grade


@settings(max_examples=300, deadline=None)
@given(ANY)
def test_any_bytes_give_a_result_that_can_be_stored_or_none(data: bytes) -> None:
    value = parse_object(data)
    assert value is None or isinstance(value, dict)
    if value is not None:
        json.dumps(value).encode()


@settings(max_examples=300, deadline=None)
@given(st.lists(ANY, max_size=3))
def test_any_bytes_give_predictions_or_the_lines_that_are_none(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    file = tmp_path_factory.getbasetemp() / "predictions.jsonl"
    file.write_bytes(b"\n".join(lines))
    problems = ""
    try:
        rows = read_predictions(file, {"a", "0"})
    except InvalidExperiment as error:
        rows, problems = [], str(error)
    assert bool(rows) != bool(problems)
    assert not problems or str(file) in problems


# --- graders that misbehave, in sandboxes ---

VALID = """echo '{"score": 0.5}' >"$SANDBOX_EXEC_GRADE"; """
GRADERS: dict[str, tuple[str, str]] = {  # a script, and the type of the error, if it gives no grade
    "exits 3 with a grade": (VALID + "exit 3", ""),
    "is killed after its grade": (VALID + "kill -9 $$", ""),
    "exits 0 without one": ("true", "NoGrade"),
    "only says so": ("""echo '{"score": 1.0}'; echo '{"score": 1.0}' >"$SANDBOX_EXEC_TRACE" """, "NoGrade"),
    "is killed by a signal": ("kill -9 $$", "NoGrade"),
    "writes half of it": ("""printf '{"score": ' >"$SANDBOX_EXEC_GRADE" """, "MalformedGrade"),
    "leaves a link": ("""echo '{"score": 1}' >/tmp/g; ln -s /tmp/g "$SANDBOX_EXEC_GRADE" """, "NoGrade"),
    "leaves a folder": ("""mkdir "$SANDBOX_EXEC_GRADE" """, "NoGrade"),
    "leaves a FIFO": ("""mkfifo "$SANDBOX_EXEC_GRADE" """, "NoGrade"),
    "leaves a giant": ("""truncate -s 200M "$SANDBOX_EXEC_GRADE" """, "NoGrade"),
    "hangs": (VALID + "trap '' TERM; while :; do sleep 1000; done", "GraderTimeout"),
    "forks a bomb": (
        VALID + "bomb() { bomb & bomb & wait; }; bomb & while :; do :; done",
        "GraderPidsExceeded",
    ),
    "leaves a daemon": (VALID + "setsid sleep 1000 >/dev/null 2>&1 &", ""),
    "eats memory": (VALID + "cat /dev/zero >/tmp/large; sleep 1000", "GraderMemoryExceeded"),
    "floods": (VALID + "yes | head -c 20000000", ""),
    "is not there": ("", "GraderFailed"),
    "is fine": (VALID, ""),
}
KINDS: tuple[Kind, ...] = ("process", "docker")


@pytest.fixture(scope="module", params=KINDS)
def graded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, TrialCompletion]]:
    """One run: a task for each grader."""
    kind: Kind = request.param
    image = request.getfixturevalue("busybox_image") if kind == "docker" else None
    place = tmp_path_factory.mktemp(f"graders-{kind}")
    tasks = [
        {
            "id": name,
            "input": {},
            "grading": {"command": ["sh", "-c", script] if script else ["/no/such/grader"]},
        }
        for name, (script, _) in GRADERS.items()
    ]
    grading = {"command": ["true"], "timeout_s": 3, "memory": "48MiB", "pids": 24}
    one = experiment(place / "base", {"a": "echo x >/out/answer"}, kind, image, grading, tasks=tasks)
    ended = run(one, place / "run")
    return place / "run", {name.removeprefix("a/"): end for name, end in ended.items()}


@pytest.mark.parametrize("grader", GRADERS)
def test_a_grader_that_misbehaves_is_told_of_and_the_next_trial_is_fine(
    graded: tuple[Path, dict[str, TrialCompletion]], grader: str
) -> None:
    folder, ended = graded
    one, due = ended[grader], GRADERS[grader][1]
    assert one.grading is not None, told(one)
    if due:
        assert one.status is Status.GRADE_ERROR, told(one)
        assert one.grade is None
        assert one.error is not None
        assert one.error.type == due, told(one)
        assert one.error == one.grading.error
    else:
        assert one.status is Status.SUCCESS, told(one)
        assert one.grade == Grade(score=0.5)
    attempt = last_attempt(folder, "a", grader)
    assert (attempt / "grade.json").exists() == (not due)
    assert (attempt / REJECTED).exists() == (due == "MalformedGrade")


def test_how_a_grader_ended_is_kept_and_is_no_verdict(graded: tuple[Path, dict[str, TrialCompletion]]) -> None:
    folder, ended = graded
    reports = {name: end.grading for name, end in ended.items()}
    three, killed, hung = (reports[name] for name in ("exits 3 with a grade", "is killed after its grade", "hangs"))
    assert three is not None
    assert three.exit_code == 3
    assert killed is not None
    assert killed.signal == 9
    assert hung is not None
    assert hung.kill is not None
    assert hung.kill.reason == "deadline"
    assert '{"score": 1.0}' in (last_attempt(folder, "a", "only says so") / "grader.log").read_text()
    assert (last_attempt(folder, "a", "floods") / "grader.log").stat().st_size <= 2 << 20


FUNCTIONS = """
def raises(task):
    raise KeyError(task["id"])

def returns_text(task):
    return "1.0"

def returns_nothing(task):
    pass

def returns_nan(task):
    return {"score": float("nan")}

def returns_an_object(task):
    return {"score": object()}

def returns_a_giant(task):
    return {"score": 1.0, "details": "x" * (2 << 20)}

def exits(task):
    raise SystemExit(0)

def returns_a_set(task):
    return {"score": 1.0, "details": {1, 2}}

def is_fine(task):
    assert task["agent"]["status"] == "success", task
    with open("/out/answer") as file:
        return {"score": 0.25, "passed": False, "details": file.read()}
"""
RETURNS = {
    "raises": "GraderFailed",
    "returns_text": "MalformedGrade",
    "returns_nothing": "MalformedGrade",
    "returns_nan": "MalformedGrade",
    "returns_an_object": "GraderFailed",
    "returns_a_giant": "NoGrade",
    "exits": "GraderFailed",
    "returns_a_set": "GraderFailed",
    "is_fine": "",
}


def test_a_function_that_returns_no_grade_is_told_of(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "graders.py").write_text(FUNCTIONS)
    tasks = [{"id": name, "input": {}, "grading": {"python": f"graders:{name}"}} for name in RETURNS]
    ended = run(experiment(base, {"a": "echo x >/out/answer"}, tasks=tasks), tmp_path / "run")
    found = {name.removeprefix("a/"): end.error.type if end.error else "" for name, end in ended.items()}
    assert found == RETURNS, [told(end) for end in ended.values()]
    assert ended["a/is_fine"].grade == Grade(score=0.25, passed=False, details="x\n")
    error = ended["a/raises"].error
    assert error is not None
    assert "KeyError: 'raises'" in error.message


def test_a_callable_can_be_a_grader(tmp_path: Path) -> None:
    def grade(task: dict[str, Any]) -> dict[str, Any]:
        return {"score": len(task["id"]), "passed": True}

    ended = run(experiment(tmp_path / "base", {"a": "true"}, grading={"function": grade}), tmp_path / "run")
    assert ended["a"].grade == Grade(score=1.0, passed=True), told(ended["a"])


@pytest.mark.parametrize("kind", KINDS)
def test_with_grade_on_always_both_statuses_are_told(
    tmp_path: Path, kind: Kind, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue("busybox_image") if kind == "docker" else None
    tells = """echo "{\\"score\\": 0.5, \\"details\\": $(cat $SANDBOX_EXEC_IN/task.json)}" >$SANDBOX_EXEC_GRADE"""
    tasks = [
        {"id": "late", "input": {}, "protocol": {"timeout_s": 0.5}, "grading": {"command": ["sh", "-c", tells]}},
        {"id": "lost", "input": {}, "protocol": {"timeout_s": 0.5}, "grading": {"command": ["true"]}},
    ]
    agents = {"a": "echo half >/out/answer; sleep 1000"}
    for grade_on in ("always", "completed"):
        one = experiment(tmp_path / grade_on, agents, kind, image, {"grade_on": grade_on}, tasks=tasks)
        ended = run(one, tmp_path / f"run-{grade_on}")
        late, lost = ended["a/late"], ended["a/lost"]
        assert late.status is lost.status is Status.TASK_TIMEOUT, told(late)
        if grade_on == "completed":
            assert late.grading is None
            assert late.grade is None
            continue
        assert late.grade is not None, told(late)
        assert late.grading is not None
        assert late.grading.ok
        assert isinstance(late.grade.details, dict)
        assert late.grade.details["agent"] == {"status": "task_timeout", "exit_code": None, "signal": late.signal}
        assert late.error is not None
        assert late.error.type == "TrialTimeout"
        assert lost.grade is None
        assert lost.grading is not None
        assert lost.grading.error is not None
        assert lost.grading.error.type == "NoGrade"


def test_a_full_disk_of_the_runs_is_the_machines_doing_and_no_grade_error(tmp_path: Path) -> None:
    """What was graded is kept beside the trial, and there is no room for it."""
    if os.geteuid() != 0:
        pytest.skip("needs a small file system, which only root can mount")
    place = tmp_path / "runs"
    place.mkdir()
    kernel.mount("tmpfs", str(place), "tmpfs", 0, "size=4m")
    try:
        agents = {"a": "head -c 8000000 /dev/zero >/workspace/large"}
        one = experiment(tmp_path / "base", agents, design={"infra_retries": 0, "max_concurrency": 1})
        summary = runs.run(one, runs=place, run_id="run")
        told_of = summary.model_dump_json()
        assert Status.GRADE_ERROR not in summary.by_status, told_of
        assert Status.SUCCESS not in summary.by_status, told_of
    finally:
        kernel.umount(str(place))
