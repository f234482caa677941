"""What the tests of grading share: an experiment whose variants are attacks, an honest grader, a look at the loot."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from sandbox_exec import runs
from sandbox_exec.contracts import Experiment, TrialCompletion
from sandbox_exec.contracts.experiment import GradingSettings
from sandbox_exec.store import RunStore, attempt_folder, read_completion
from sandbox_exec.trial.grading import ANSWER

Kind = Literal["process", "docker"]
In = Literal["fresh", "same"]

SECRET = "the-secret-answer-7f3a9c"  # the text of an asset
ASSET = "asset-name-51d0e2"  # and its name
FORGED = '{"score": 1.0, "passed": true}'
# What planted Python code does, if it is ever run. Without an apostrophe, so that a shell can quote it.
EVIL = (
    'import _io, posix; _io.open("/grade/grade.json", "w").write(chr(123) + chr(34) + "score" + chr(34) + ": 1.0}"); '
    "posix._exit(0)"
)

# Right is who says the secret. It loads what graders load, and looks into what agents leave, as graders do.
PYTHON_GRADER = f"""
import json, os, subprocess, sys, tempfile
from pathlib import Path

assert os.getcwd() == "/grading" and "/workspace" not in os.environ["PATH"], "not where graders start"
due = Path(os.environ["SANDBOX_EXEC_GRADING"], "{ASSET}").read_text()
out = Path(os.environ["SANDBOX_EXEC_OUT"])
try:
    got = (out / "answer").read_text().strip()
except OSError:
    got = ""
subprocess.run(["sh", "-c", "true"], check=True)
grade = {{"score": float(got == due), "passed": got == due, "details": {{"got": got[:40], "path": sys.path}}}}
Path(os.environ["SANDBOX_EXEC_GRADE"]).write_text(json.dumps(grade))
"""
SHELL_GRADER = f"""
[ "$(pwd)" = /grading ] || exit 8
due=$(cat "$SANDBOX_EXEC_GRADING/{ASSET}") || exit 9
got=$(cat "$SANDBOX_EXEC_OUT/answer" 2>/dev/null)
if [ "$got" = "$due" ]; then score=1.0 passed=true; else score=0.0 passed=false; fi
echo "{{\\"score\\": $score, \\"passed\\": $passed}}" >"$SANDBOX_EXEC_GRADE"
"""


def make_base(base: Path) -> None:
    """The folder of an experiment: assets, with a grader of each kind among them."""
    assets = base / "grading"
    assets.mkdir(parents=True)
    (assets / ASSET).write_text(SECRET)
    (assets / "grade.py").write_text(PYTHON_GRADER)
    (assets / "grade.sh").write_text(SHELL_GRADER)


def experiment(
    base: Path,
    agents: Mapping[str, Any],
    kind: Kind = "process",
    image: str | None = None,
    grading: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Experiment:
    """A variant for each agent: a script for the shell, or the mapping that an agent is."""
    if not (base / "grading").exists():
        make_base(base)
    command = ["python3", "grade.py"] if kind == "process" else ["sh", "grade.sh"]
    given: dict[str, Any] = {"assets": "grading", "timeout_s": 60, **(grading or {})}
    if not {"command", "python", "function"} & set(given):
        given["command"] = command
    sandbox = {"kind": kind, "memory": "400MiB", "timeout_s": 20, **fields.pop("sandbox", {})}
    if kind == "docker":
        sandbox = {"image": image, **sandbox}
    return Experiment(
        name="attacks",
        seed=7,
        tasks=fields.pop("tasks", [{"id": "t", "input": {}}]),
        variants=[
            {"id": name, "agent": {"command": ["sh", "-c", agent]} if isinstance(agent, str) else agent}
            for name, agent in agents.items()
        ],
        sandbox=sandbox,
        design={"max_concurrency": 2, **fields.pop("design", {})},
        grading=GradingSettings.model_validate(given),
        base=base,
        **fields,
    )


def run(one: Experiment, folder: Path, **how: Any) -> dict[str, TrialCompletion]:
    """By variant, or variant/task where there are several tasks: how its last attempt ended."""
    summary = runs.run(one, runs=folder.parent, run_id=folder.name, **how)
    assert summary.status == "completed", summary
    return ended(folder)


def ended(folder: Path) -> dict[str, TrialCompletion]:
    with RunStore.open(folder, write=False) as store:
        slots, commits = list(store.slots()), list(store.commits())
    several = len({slot.task_id for slot in slots}) > 1
    found = {}
    for commit in commits:
        slot = slots[commit.schedule_idx]
        name = f"{slot.variant_id}/{slot.task_id}" if several else slot.variant_id
        completion = read_completion(last_attempt(folder, slot.variant_id, slot.task_id)).value
        assert completion is not None
        found[name] = completion
    return found


def last_attempt(folder: Path, variant: str, task: str = "t") -> Path:
    with RunStore.open(folder, write=False) as store:
        slots, commits = list(store.slots()), list(store.commits())
    for commit in commits:
        slot = slots[commit.schedule_idx]
        if (slot.variant_id, slot.task_id) == (variant, task):
            from sandbox_exec.contracts import derive_trial_id

            return attempt_folder(folder, derive_trial_id(slot), commit.attempt)
    raise KeyError(variant)


OURS = ("dispatch.json", "completion.json", "grade.json", "grader.log", "grade.rejected")


def loot(folder: Path) -> Iterator[tuple[str, bytes]]:
    """All that agents of a run left anywhere, by where: what they printed, traced, wrote, and what was graded."""
    for path in sorted((folder / "trials").rglob("*")):
        if path.is_symlink() or not path.is_file() or path.name in OURS:
            continue
        where = str(path.relative_to(folder))
        if path.name == ANSWER and path.parent.parent.parent == folder / "trials":
            with tarfile.open(path) as archive:
                for info in archive:
                    data = archive.extractfile(info) if info.isreg() else None
                    yield f"{where}:{info.name}", data.read() if data else b""
        else:
            yield where, path.read_bytes()


def leaks(folder: Path, *needles: str) -> list[str]:
    """Where something of the assets stands in what agents left."""
    wanted = [needle.encode() for needle in needles or (SECRET, ASSET)]
    return [
        f"{where} has {needle.decode()}"
        for where, data in loot(folder)
        for needle in wanted
        if needle in data or needle in os.fsencode(where)
    ]


def told(completion: TrialCompletion) -> str:
    """For a message: how it ended, and how its grading went."""
    fields = completion.model_dump(mode="json", include={"status", "error", "grade", "exit_code"})
    grading = completion.grading.model_dump(mode="json", include={"ok", "error"}) if completion.grading else None
    return json.dumps({**fields, "grading": grading})
