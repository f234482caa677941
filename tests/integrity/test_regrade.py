"""Grading again: what a run left, or answers made elsewhere; killed and continued, filtered, by another grader."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs_support import children, fork, history_of, reap_orphans, run_scripted
from support import wait_readable

from integrity.trials import ASSET, ended, experiment, last_attempt, make_base, run, told
from sandbox_exec import runs
from sandbox_exec.contracts import Experiment, Grade, Status, TrialCompletion, derive_trial_id
from sandbox_exec.contracts.experiment import GradingSettings
from sandbox_exec.coordinator import RunCallback
from sandbox_exec.errors import InvalidExperiment, InvalidValue
from sandbox_exec.regrade import GRADINGS, changes_of, grade_predictions, grade_run, lines_of, read_predictions
from sandbox_exec.store import attempt_folder
from sandbox_exec.testing import expand
from sandbox_exec.trial.grading import ANSWER

MANY = 200
GRADER = """
import json
import os


def grade(task):
    with open(os.environ["SANDBOX_EXEC_OUT"] + "/result.json") as file:
        answer = json.load(file)["answer"]
    return {"score": answer / 1000, "passed": answer % 3 == 0, "metrics": {"seed": task["seed"]}}


def strict(task):
    return {"score": 0.0, "passed": False}
"""


def archive(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def many(base: Path) -> Experiment:
    base.mkdir(exist_ok=True)
    (base / "graders.py").write_text(GRADER)
    tasks = [{"id": f"t{number:03}", "input": number} for number in range(MANY)]
    grading = {"python": "graders:grade", "assets": None}
    return experiment(base, {"a": "true"}, grading=grading, tasks=tasks, sandbox={"memory": "64MiB"})


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of many trials, without a sandbox: what its agents are said to have left is written beside it."""
    place = tmp_path_factory.mktemp("large")
    make_base(place / "base")
    one = many(place / "base")
    end, _ = run_scripted(place / "run", one, capacity=8)
    assert end.status == "completed"
    for slot in expand(one):
        target = attempt_folder(place / "run", derive_trial_id(slot), 1) / ANSWER
        target.write_bytes(archive({"out/result.json": json.dumps({"answer": slot.schedule_idx}).encode()}))
    return place / "run"


class TellsOfCommits(RunCallback):
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def on_trial_end(self, completion: TrialCompletion) -> None:
        os.write(self._fd, b".")


@pytest.fixture
def orphans() -> Iterator[None]:
    known = children()
    yield
    reap_orphans(known)


def test_a_large_grading_that_is_killed_midway_and_continued_equals_an_undisturbed_one(
    large: Path, orphans: None
) -> None:
    before = history_of(large)
    hear, tell = os.pipe()
    pid = fork(lambda: grade_run(large, workers=2, callbacks=[TellsOfCommits(tell)]))
    os.close(tell)
    heard = 0
    while heard < MANY // 2:
        wait_readable(hear)
        got = len(os.read(hear, MANY // 2 - heard))
        assert got, "it ended before it could be killed"
        heard += got
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    os.close(hear)
    killed = large / GRADINGS / "1"
    assert MANY // 2 <= runs.status_of(killed).committed < MANY
    assert runs.continue_run(killed, workers=2).status == "completed"
    calm = grade_run(large, workers=2)
    assert calm.folder == large / GRADINGS / "2"
    assert calm.by_status == {Status.SUCCESS: MANY}
    assert history_of(killed) == history_of(calm.folder)
    assert history_of(large) == before
    assert changes_of(calm.folder, killed) == []
    grades = [end.grade for end in ended(calm.folder).values()]
    assert [grade.score for grade in grades if grade is not None] == [number / 1000 for number in range(MANY)]


# --- small runs ---


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two agents on three tasks with assets of their own."""
    place = tmp_path_factory.mktemp("small")
    base = place / "base"
    make_base(base)
    (base / "graders.py").write_text(GRADER)
    for name in "xyz":
        (base / f"assets-{name}").mkdir()
        (base / f"assets-{name}" / ASSET).write_text(name)
        (base / f"assets-{name}" / "grade.py").write_bytes((base / "grading" / "grade.py").read_bytes())
    tasks: list[dict[str, Any]] = [
        {"id": name, "input": name, "grading": {"assets": f"assets-{name}"}, "protocol": {"tags": [f"tag-{name}"]}}
        for name in "xyz"
    ]
    right = """sed 's/.*"input": "\\(.\\)".*/\\1/' /in/task.json >/out/answer"""
    agents = {
        "right": right,
        "wrong": "echo x >/out/answer; mkdir /workspace/d; ln -s d /workspace/l; touch /workspace/d/f",
    }
    run(experiment(base, agents, tasks=tasks), place / "run")
    return place / "run"


def scores(folder: Path) -> dict[str, float | None]:
    return {name: end.grade.score if end.grade else None for name, end in ended(folder).items()}


ALL = {"right/x": 1.0, "wrong/x": 1.0, "right/y": 1.0, "wrong/y": 0.0, "right/z": 1.0, "wrong/z": 0.0}


def test_the_same_grader_gives_the_same_grades_and_digest(small: Path) -> None:
    before = {
        name: path.read_bytes() for name in ALL for path in [last_attempt(small, *name.split("/")) / "grade.json"]
    }
    again = grade_run(small).folder
    assert scores(small) == scores(again) == ALL
    digests = [{end.grading.grader_digest for end in ended(one).values() if end.grading} for one in (small, again)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 3
    assert "no grade is another than before" in lines_of(again, small)
    assert {name: (last_attempt(small, *name.split("/")) / "grade.json").read_bytes() for name in ALL} == before


@pytest.mark.parametrize(
    ("only", "due"),
    [
        (["variant=wrong"], {"wrong/x", "wrong/y", "wrong/z"}),
        (["task=x"], {"right", "wrong"}),
        (["tag=tag-x", "tag=tag-y", "variant=right"], {"right/x", "right/y"}),
        (["status=success", "task=z", "variant=wrong"], {"wrong"}),
    ],
)
def test_only_what_was_asked_for_is_graded(small: Path, only: list[str], due: set[str]) -> None:
    summary = grade_run(small, only=only)
    assert summary.committed == len(due)
    assert set(ended(summary.folder)) == due


def test_nothing_to_grade_is_said_before_there_is_a_grading(small: Path) -> None:
    before = sorted(os.listdir(small / GRADINGS)) if (small / GRADINGS).exists() else []
    with pytest.raises(InvalidValue, match="nothing to grade"):
        grade_run(small, only=["status=grade_error"])
    with pytest.raises(InvalidValue, match="no filter"):
        grade_run(small, only=["color=red"])
    assert (sorted(os.listdir(small / GRADINGS)) if (small / GRADINGS).exists() else []) == before


def test_another_grader_keeps_the_assets_of_the_tasks_unless_it_names_some(small: Path, tmp_path: Path) -> None:
    tells = f'echo "{{\\"score\\": 0, \\"details\\": \\"$(cat $SANDBOX_EXEC_GRADING/{ASSET})\\"}}" >$SANDBOX_EXEC_GRADE'
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / ASSET).write_text("new")
    for assets, due in (({}, "x"), ({"assets": "own"}, "new")):
        file = tmp_path / "grading.yaml"
        file.write_text(json.dumps({"grading": {"command": ["sh", "-c", tells], **assets}}))
        found = ended(grade_run(small, grading=file, only=["task=x", "variant=right"]).folder)["right"]
        assert found.grade == Grade(score=0.0, details=due), told(found)
    assert scores(small) == ALL


def test_what_changed_is_told(small: Path, tmp_path: Path) -> None:
    base = small.parent / "base"
    strict = GradingSettings(python="graders:strict")
    again = grade_run(small, grading=strict).folder
    assert base.exists()
    assert [change.trial_id.split("-")[0] for change in changes_of(again, small)] == [
        f"{variant}.{task}.0" for task in "xyz" for variant in ("right", "wrong")
    ]
    assert "6 grades are others than before:" in lines_of(again, small)


@pytest.mark.parametrize("how", ["cut off", "no archive", "leads out", "a device", "a link that leads out", "twice"])
def test_what_is_no_answer_is_told_of_and_no_worker_is_lost(small: Path, tmp_path: Path, how: str) -> None:
    place = last_attempt(small, "right", "x") / ANSWER
    before = place.read_bytes()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        info = tarfile.TarInfo("out/x")
        match how:
            case "leads out":
                info.name = "out/../../x"
            case "a device":
                info.type = tarfile.CHRTYPE
            case "a link that leads out":
                info.type, info.linkname = tarfile.SYMTYPE, "../../x"
        tar.addfile(info)
        if how == "twice":
            tar.addfile(info)
    bad = {"cut off": before[:300], "no archive": b"x" * 5000}.get(how, data.getvalue())
    try:
        place.write_bytes(bad)
        found = ended(grade_run(small, only=["task=x"]).folder)
    finally:
        place.write_bytes(before)
    assert found["right"].status is Status.GRADE_ERROR, told(found["right"])
    assert found["right"].error is not None
    assert found["right"].error.type == "GraderSetupFailed"
    assert found["wrong"].status is Status.SUCCESS, told(found["wrong"])


# --- answers made elsewhere ---

TELL = """
import json, os
found = {}
for top in ("/out", "/workspace"):
    for folder, _, files in os.walk(top):
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                found[os.path.join(folder, name)] = file.read().decode("latin-1")
with open(os.environ["SANDBOX_EXEC_GRADE"], "w") as file:
    json.dump({"score": len(found), "details": found}, file)
"""


def make_teller(base: Path) -> None:
    make_base(base)
    (base / "tell.py").write_text(TELL)


def predict(place: Path, *rows: dict[str, Any], **how: Any) -> dict[str, TrialCompletion]:
    base = place / "base"
    if not base.exists():
        make_teller(base)
    tasks = [{"id": name, "input": {}} for name in "xyz"]
    one = experiment(base, {"unused": "exit 1"}, grading={"command": ["python3", "tell.py"]}, tasks=tasks)
    file = place / "predictions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    summary = grade_predictions(file, one, runs=place / "runs", **how)
    assert summary.status == "completed"
    return ended(summary.folder)


def details(one: TrialCompletion) -> Any:
    assert one.grade is not None, told(one)
    return one.grade.details


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_answers_and_files_are_graded_as_if_an_agent_had_left_them(tmp_path: Path, umask: int) -> None:
    make_teller(tmp_path / "base")
    before = os.umask(umask)
    try:
        found = predict(
            tmp_path,
            {
                "task_id": "y",
                "files": {"a/b/c": "text", "workspace/d/e": {"base64": base64.b64encode(b"\xff").decode()}},
            },
            {"task_id": "x", "answer": {"a": [1, None]}},
            {"id": "z", "answer": "yes", "variant": "other", "repeat": 3},
        )
    finally:
        os.umask(before)
    assert list(found) == ["predictions/x", "predictions/y", "other/z"]
    assert details(found["predictions/x"]) == {"/out/result.json": '{"a": [1, null]}\n'}
    assert details(found["predictions/y"]) == {"/out/a/b/c": "text", "/workspace/d/e": "\xff"}
    assert details(found["other/z"]) == {"/out/result.json": '{"answer": "yes"}\n'}
    assert found["other/z"].slot.repeat == 3


REFUSED: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "Expecting"),
    "no object": ("[]", "not a JSON object"),
    "no such task": ('{"task_id": "q", "answer": 1}', "no task of the experiment"),
    "no task": ('{"answer": 1}', "no task of the experiment"),
    "an unknown field": ('{"task_id": "x", "answer": 1, "more": 2}', "unknown: more"),
    "neither answer nor files": ('{"task_id": "x"}', "either answer"),
    "both": ('{"task_id": "x", "answer": 1, "files": {"a": "b"}}', "either answer"),
    "a key twice": ('{"task_id": "x", "answer": 1, "answer": 2}', "'answer' stands there twice"),
    "NaN": ('{"task_id": "x", "answer": NaN}', "JSON"),
    "deep nesting": ('{"task_id": "x", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}", ""),
    "a path that leads out": ('{"task_id": "x", "files": {"out/../../x": "a"}}', "not a path below"),
    "an absolute path": ('{"task_id": "x", "files": {"/etc/passwd": "a"}}', "not a path below"),
    "an empty path": ('{"task_id": "x", "files": {"": "a"}}', "not a path below"),
    "a path with NUL": ('{"task_id": "x", "files": {"a\\u0000b": "a"}}', "not a path below"),
    "a deep path": ('{"task_id": "x", "files": {"' + "a/" * 1000 + 'b": "a"}}', "deeper than"),
    "a long name": ('{"task_id": "x", "files": {"' + "a" * 300 + '": "a"}}', "over 255 bytes"),
    "one file by two names": ('{"task_id": "x", "files": {"a": "1", "out/a": "2"}}', "named twice"),
    "a file that is a folder": ('{"task_id": "x", "files": {"a": "1", "a/b": "2"}}', "both a file and a folder"),
    "no base64": ('{"task_id": "x", "files": {"a": {"base64": "%%%"}}}', "files: 'a'"),
    "no text": ('{"task_id": "x", "files": {"a": 1}}', "neither text nor"),
    "no files": ('{"task_id": "x", "files": {}}', "no object of paths"),
    "half a character": ('{"task_id": "x", "files": {"a": "\\ud800"}}', "surrogates"),
    "half a character in a variant": ('{"task_id": "x", "answer": 1, "variant": "\\ud800"}', "surrogates"),
    "a variant that is a number": ('{"task_id": "x", "answer": 1, "variant": 1}', "variant is 1"),
    "a negative repeat": ('{"task_id": "x", "answer": 1, "repeat": -1}', "repeat is -1"),
    "a repeat that is a verdict": ('{"task_id": "x", "answer": 1, "repeat": true}', "repeat is True"),
    "a repeat without end": ('{"task_id": "x", "answer": 1, "repeat": ' + "9" * 400 + "}", "repeat is"),
    "an answer twice": ('{"task_id": "y", "answer": 2}', "there is an answer to task 'y'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_prediction_that_is_none_is_refused_with_its_line(tmp_path: Path, what: str) -> None:
    line, reason = REFUSED[what]
    file = tmp_path / "predictions.jsonl"
    file.write_text(f'{{"task_id": "y", "answer": 1}}\n\n{line}\n')
    with pytest.raises(InvalidExperiment) as refused:
        read_predictions(file, {"x", "y"})
    assert f"{file}:3: " in str(refused.value)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
def test_a_file_without_predictions_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_bytes(data)
    with pytest.raises(InvalidExperiment, match="is empty"):
        read_predictions(file, {"x"})
    with pytest.raises(InvalidExperiment, match="cannot read"):
        read_predictions(tmp_path / "missing", {"x"})


def test_the_answers_of_a_run_are_not_written_over_by_another_of_its_name(tmp_path: Path) -> None:
    predict(tmp_path, {"task_id": "x", "answer": 1}, run_id="one")
    kept = {path: path.read_bytes() for path in (tmp_path / "runs" / "one" / "answers").iterdir()}
    with pytest.raises(InvalidValue, match="there is a run"):
        predict(tmp_path, {"task_id": "x", "answer": 2}, run_id="one")
    assert {path: path.read_bytes() for path in kept} == kept


def test_predictions_can_be_graded_again(tmp_path: Path) -> None:
    predict(tmp_path, {"task_id": "x", "answer": 1}, run_id="one")
    assert grade_run(tmp_path / "runs" / "one").committed == 1


def test_a_grader_is_told_how_the_agent_ended_when_it_grades_again(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_base(base)
    (base / "tells.py").write_text("def grade(task):\n    return {'score': 0, 'details': task['agent']}\n")
    run(experiment(base, {"a": "exit 3"}, grading={"python": "tells:grade", "grade_on": "always"}), tmp_path / "run")
    assert ended(grade_run(tmp_path / "run").folder)["a"].grade == ended(tmp_path / "run")["a"].grade


def test_what_was_graded_in_same_is_graded_again_with_all_that_was_seen(tmp_path: Path) -> None:
    looks = """echo "{\\"score\\": $(cat /tmp/x 2>/dev/null | wc -c)}" >$SANDBOX_EXEC_GRADE"""
    grading = {"in": "same", "command": ["sh", "-c", looks]}
    run(experiment(tmp_path / "base", {"a": "printf abc >/tmp/x"}, grading=grading), tmp_path / "run")
    assert scores(tmp_path / "run") == {"a": 3.0}
    assert scores(grade_run(tmp_path / "run").folder) == {"a": 3.0}
