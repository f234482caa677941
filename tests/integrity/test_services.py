"""`services: keep`: an agent whose work is a running service is graded while it runs, over a network of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox_exec import run
from sandbox_exec.contracts import Rung, Status, TrialCompletion
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.errors import InvalidExperiment, SandboxUnavailable
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.store import read_completion

SERVE = """
import os, socket
server = socket.create_server(("127.0.0.1", 8080))
open(os.environ["SANDBOX_EXEC_TRACE"], "w").write('{"type": "serving"}\\n')
while True:
    connection, _ = server.accept()
    connection.sendall(b"hi")
    connection.close()
"""
ASK = """
import json, os, socket
try:
    said = socket.create_connection(("127.0.0.1", 8080), timeout=5).recv(16)
except OSError:
    said = b""
others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]
grade = {"score": float(said == b"hi"), "details": {"sees": others, "agent": json.load(open("/in/task.json"))["agent"]}}
json.dump(grade, open(os.environ["SANDBOX_EXEC_GRADE"], "w"))
"""


def completions(folder: Path) -> dict[str, TrialCompletion]:
    found = [read_completion(path.parent).value for path in sorted(folder.glob("trials/*/attempt-*/completion.json"))]
    return {one.slot.variant_id: one for one in found if one is not None}


def experiment(folder: Path, variants: dict[str, list[str]], **more: Any) -> Experiment:
    (folder / "serve.py").write_text(SERVE)
    (folder / "ask.py").write_text(ASK)
    grading = {"command": [sys.executable, "ask.py"], "services": "keep", "grade_on": "always", "timeout_s": 10}
    return Experiment(
        name="services",
        tasks=[{"id": "t", "input": 1}],
        variants=[{"id": name, "agent": {"command": command}} for name, command in variants.items()],
        grading={**grading, **more.pop("grading", {})},
        base=folder,
        **{"sandbox": {"timeout_s": 5}, **more},
    )


def test_a_service_is_graded_while_it_runs_and_ended_after_that(tmp_path: Path) -> None:
    says = 'echo \'{"type": "serving"}\' >$SANDBOX_EXEC_TRACE; '
    one = experiment(
        tmp_path,
        {
            "serves": [sys.executable, "serve.py"],
            "only says so": ["sh", "-c", f"{says} exit 3"],
            "never says so": ["sh", "-c", "exit 0"],
        },
    )
    if chosen().rung is not Rung.ROOT_NAMESPACES:
        with pytest.raises(SandboxUnavailable, match="needs root, or docker"):
            run(one, runs=tmp_path, run_id="r")
        return
    assert run(one, runs=tmp_path, run_id="r").status == "completed"
    found = completions(tmp_path / "r")
    served = found["serves"]
    assert served.status is Status.SUCCESS
    assert served.grade is not None
    assert served.grade.score == 1.0
    assert served.grade.details == {"sees": [], "agent": {"status": "serving", "exit_code": None, "signal": None}}
    assert served.kill is not None
    assert served.kill.reason == "sweep"
    for name, status in (("only says so", Status.AGENT_ERROR), ("never says so", Status.SUCCESS)):
        grade = found[name].grade
        assert (found[name].status, grade and grade.score) == (status, 0.0)


@pytest.mark.parametrize(
    ("grading", "why"),
    [
        ({"in": "same"}, "needs in: fresh"),
        ({"command": None, "python": "ask:grade"}, "needs a command"),
    ],
)
def test_what_cannot_be_kept_apart_is_refused(tmp_path: Path, grading: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidExperiment, match=why):
        experiment(tmp_path, {"v": ["true"]}, grading=grading)
