"""`services: keep` in containers: the grader's shares the network of the agent's, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandbox_exec import run
from sandbox_exec.contracts import Status
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.store import read_completion

SERVE = """echo hi >/workspace/hello
nc -l -p 8080 -e cat /workspace/hello &
until cat /proc/net/tcp /proc/net/tcp6 | grep -q :1F90; do :; done
echo '{"type": "serving"}' >$SANDBOX_EXEC_TRACE
sleep 1000"""
ASK = """said=$(nc 127.0.0.1 8080 </dev/null)
ls /proc | grep -c '^[0-9]*$' >&2
[ "$said" = hi ] && score=1 || score=0
echo "{\\"score\\": $score}" >$SANDBOX_EXEC_GRADE"""


def test_a_service_in_a_container_is_reached_by_its_grader_and_by_nobody_else(
    engine: Any, busybox_image: str, tmp_path: Path
) -> None:
    one = Experiment(
        name="services",
        tasks=[{"id": "t", "input": 1}],
        variants=[{"id": "serves", "agent": {"command": ["sh", "-c", SERVE]}}],
        sandbox={"kind": "docker", "image": busybox_image, "timeout_s": 10},
        grading={"command": ["sh", "-c", ASK], "services": "keep", "timeout_s": 10},
        base=tmp_path,
    )
    assert run(one, runs=tmp_path, run_id="r").status == "completed"
    (folder,) = tmp_path.glob("r/trials/*/attempt-1")
    found = read_completion(folder).value
    assert found is not None
    assert found.status is Status.SUCCESS
    assert found.grade is not None
    assert found.grade.score == 1.0
    assert found.kill is not None
    assert found.kill.reason == "sweep"
    assert engine.containers(all=True, filters={"label": "sandbox-exec.run=r"}) == []
