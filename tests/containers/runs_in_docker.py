"""What the tests of Docker runs share: an experiment of small shells, and what is left of it in the engine."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import leftovers
from engine import client

from sandbox_exec.contracts import Experiment, Slot
from sandbox_exec.coordinator import Coordinator, RunCallback
from sandbox_exec.sandbox import owners
from sandbox_exec.sandbox.reaper import LABEL

READY = """echo '{"kind": "ready"}' >"$SANDBOX_EXEC_TRACE"; """
SLEEPS = READY + "sleep 1000"  # until it is killed
_OBEYS = r"""eval "$(sed 's/.*"input": "\(.*\)", "seed".*/\1/; s/\\"/"/g' /in/task.json)" """


def experiment(base: Path, tasks: Sequence[dict[str, Any]], image: str | None = None, **fields: Any) -> Experiment:
    """Each task's input is a script for the shell; `sandbox` and `design` can be given as fields."""
    base.mkdir(parents=True, exist_ok=True)
    sandbox = {"kind": "docker", "image": image, "memory": "64MiB", "timeout_s": 60, **fields.pop("sandbox", {})}
    variants = fields.pop("variants", [{"id": "v", "agent": {"command": ["sh", "-c", _OBEYS]}}])
    return Experiment(name="test", seed=7, tasks=tasks, variants=variants, sandbox=sandbox, base=base, **fields)


class OnTrace(RunCallback):
    """Calls back once, when so many trials have traced, and a beat later: their agents run, and their workers know."""

    def __init__(self, trials: int, call: Callable[[], object]) -> None:
        self._left, self._call = trials, call
        self._beats: Counter[int] = Counter()
        self.failure: BaseException | None = None

    def on_trace(self, slot: Slot, phase: str, events: int) -> None:
        if events:
            self._beats[slot.schedule_idx] += 1
        if events and self._beats[slot.schedule_idx] == 2:
            self._left -= 1
            if self._left == 0:
                try:
                    self._call()
                except BaseException as error:  # the coordinator would note it, and go on
                    self.failure = error


def containers(**labels: str) -> list[dict[str, Any]]:
    """All of ours, in any state, by label."""
    wanted = [f"{LABEL}{name}={value}" for name, value in labels.items()] or [f"{LABEL}owner"]
    found = client()
    try:
        listed: list[dict[str, Any]] = found.containers(all=True, filters={"label": wanted})
        return listed
    finally:
        found.close()


def of_run(run_id: str) -> list[dict[str, Any]]:
    return containers(run=run_id)


def assert_nothing_left(run_id: str) -> None:
    """No container of the run, no scratch folder of anybody, and no mount in one."""
    assert of_run(run_id) == []
    assert [name for name in leftovers.folders() if owners.owner_of(os.path.basename(name))] == []
    assert [line for line in leftovers.mounts() if f"{tempfile.gettempdir()}/{owners.DOCKER_SCRATCH}" in line] == []


def first_processes(run_id: str) -> list[int]:
    """The first process of each container of the run that runs."""
    found = client()
    try:
        states = [found.inspect_container(one["Id"])["State"] for one in of_run(run_id)]
        return [state["Pid"] for state in states if state["Pid"]]
    finally:
        found.close()


def at(coordinator: Coordinator, point: Callable[[str], None]) -> None:
    """Tell `point` of each step that a crash could follow, of the store's too."""
    coordinator._at = point
    coordinator.store._at = point
