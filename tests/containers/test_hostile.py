"""Every hostile agent in a container: the attack took place, nothing survives, nobody is harmed, nothing escaped.

The agents need Python, which the image does not have: the interpreter that runs the tests is shown to them where it is,
read-only. What hangs is ended shortly after it said that it is ready, by the deadline like any other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leftovers
import pytest
from engine import client
from hostile import runner
from hostile.catalog import CATALOG, HostileAgent, Situation
from runs_support import experiment, statuses, work_at
from support import spin_until

from containers.boxes import LABEL, Trial, a_box
from containers.interpreter import Python
from sandbox_exec.backends.local import LocalBackend
from sandbox_exec.clock import MonotonicClock
from sandbox_exec.contracts import Limits, Slot, TrialCompletion
from sandbox_exec.coordinator import Coordinator, RunCallback, RunEnd
from sandbox_exec.sandbox.docker import DockerSandbox

LANES = 6  # at a time: many of them wait most of the time
AFTER_READY_S = 0.15
KILLED = ("task_timeout", "memory_exceeded", "pids_exceeded", "output_exceeded")
ROWS = [row for row in CATALOG.values() if "command" in row.runs_as]
IN_A_CONTAINER = Situation(rung="root-namespaces", as_root=True, shares_uid=False, ceilings="cgroup")

Details = Sequence[Any]  # what an agent says of its doings, as far as it says "escaped"


def _only_init(details: Details) -> bool:
    """All that it reached are processes of its own container, of which process 1 is not its child."""
    words = [word for detail in details for word in (detail if isinstance(detail, list) else [detail])]
    return all(re.match(r"1( r|:)", str(word)) for word in words)


@functools.cache
def _version() -> tuple[int, ...]:
    with contextlib.closing(client()) as asked:
        return tuple(int(number) for number in re.findall(r"\d+", asked.version()["Version"])[:2])


# What an agent can do in a container and not in a process sandbox, and why that is no escape. An engine's init, process
# 1, runs as the agent's user: to hold it still, to read it or to starve it gains nothing, since a kill and a proof
# come from outside. With another engine, or under Yama, some of it is refused: then the catalog's own promise holds.
OTHERWISE: Mapping[str, Callable[[Details], bool]] = {
    "starves_its_parent": lambda details: True,
    "ptraces_everyone": lambda details: all(set(detail) <= set(range(1, 64)) for detail in details),
    "spares_itself_from_oom": lambda details: all(detail == ["its parent's"] for detail in details),
    "reads_memory_of_others": _only_init,
    "opens_descriptors_of_others": lambda details: all(
        _only_init(detail["seen"]) and detail["taken"] == [] for detail in details
    ),
    "snoops_environment": lambda details: all(
        detail["leaks"] == ["1/cmdline"] and detail["environments"] == [1] for detail in details
    ),  # the secret is an argument of its own command
    "leaves_its_root": lambda details: all(
        detail["reached"] == [] and all(path.startswith("/proc/1/") for path in detail["opened"]) for detail in details
    ),
    # The engine's filter of system calls is the engine's: before version 25 it let io_uring through, and before 23
    # sockets to the hypervisor, which are in no network namespace. Both hold with `runtime: runsc`, or a newer engine.
    "io_uring": lambda details: _version() < (25,),
    "opens_vsock": lambda details: _version() < (23,),
}


@dataclass
class Found:
    """What became of one."""

    report: runner.Report | None = None
    refused: str = ""
    details: list[Any] = field(default_factory=list)  # of what it says that it gained
    survivors: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def python(busybox_image: str) -> Iterator[Python]:
    made = Python(busybox_image)
    yield made
    made.close()


def limits_of(row: HostileAgent, python: Python) -> Limits:
    more = {"timeout_s": 20.0} if row.kind != "finishes" else {}
    return Limits(**{**row.limits, **more, "readable": python.readable})


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, python: Python) -> dict[str, Found]:
    """Of all rows that this session asks for."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [item.callspec.params.get("name") for item in items if item.module is request.module and _has_params(item)]
    rows = [CATALOG[name] for name in names if isinstance(name, str) and name in CATALOG]
    found = {row.name: Found() for row in rows}
    with runner.Surroundings() as around, a_box("docker", python.name, LANES, MonotonicClock()) as box:
        launches = {}
        for row in rows:
            words = (f"{name}={value}" for name, value in around.arguments(row).items())
            argv = (python.executable, "-S", "-E", f"/agent/{row.module}.py", *words)
            launches[row.name] = box.launch(argv, limits=limits_of(row, python), agent=runner.AGENTS)
        soon = {row.name: AFTER_READY_S + row.limits["grace_s"] for row in rows if row.kind == "hangs"}

        def at_end(name: str, trial: Trial) -> None:
            found[name].survivors += processes_of(trial)

        for name, trial in box.run_all(launches, at_end, soon):
            if trial.ended is None:
                found[name].refused = str(trial.refused)
            else:
                found[name].report = runner.report(CATALOG[name], "command", trial.ended, (), True)
                events = (event.get("result", event) for event in trial.ended.trace)
                found[name].details += [one["detail"] for one in events if isinstance(one, dict) and one.get("escaped")]
    return found


def _has_params(item: pytest.Function) -> bool:
    return hasattr(item, "callspec")


def processes_of(trial: Trial) -> list[str]:
    """All on this machine that are in the trial's container, or of its user."""
    assert isinstance(trial.sandbox, DockerSandbox)
    return in_container(trial.sandbox.made.container, trial.sandbox.isolation.uid)


def in_container(container: str, uid: int | None = None) -> list[str]:
    """By what the kernel says of each process: the agent has no say in that."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cgroup") as file:
                inside = container in file.read()
            if inside or leftovers.fields(pid)["Uid"].split()[0] == str(uid):
                found.append(leftovers.describe(pid))
    return found


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_a_hostile_agent_is_held_by_a_container(name: str, found: dict[str, Found]) -> None:
    row, report = CATALOG[name], found[name].report
    assert report is not None, found[name].refused
    assert report.is_ready, f"the attack did not take place: {report}"
    assert found[name].survivors == []
    assert report.status in row.allowed(IN_A_CONTAINER), report.account
    is_excepted = report.has_escaped and name in OTHERWISE and OTHERWISE[name](found[name].details)
    assert report.has_escaped == row.escapes_where(IN_A_CONTAINER) or is_excepted, report.account
    assert report.isolation["rung"] == "container"
    if report.status in KILLED:
        assert "pid namespace" in report.proof


# --- a worker that is killed -----------------------------------------------------------------------


class KillsWorkers(RunCallback):
    """Kills each worker as soon as its agent is ready; and looks for what is left when the run has heard of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._containers: dict[int, str] = {}
        self.left: dict[int, list[str]] = {}
        self.were_there: dict[int, int] = {}

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run

    def on_trial_start(self, slot: Slot, attempt: int) -> None:
        ticket = self._run._trials[slot.schedule_idx].ticket
        assert ticket is not None
        trace = ticket.folder / "trace.jsonl"
        spin_until(lambda: trace.exists() and '"ready"' in trace.read_text(), f"{slot.variant_id} is ready")
        with contextlib.closing(client()) as asked:
            (one,) = asked.containers(filters={"label": f"{LABEL}trial={ticket.trial_id}"})
        self._containers[slot.schedule_idx] = one["Id"]
        self.were_there[slot.schedule_idx] = len(in_container(one["Id"]))
        os.kill(int(ticket.worker.partition("-")[0]), signal.SIGKILL)

    def on_trial_end(self, completion: TrialCompletion) -> None:
        container = self._containers[completion.slot.schedule_idx]
        with contextlib.closing(client()) as asked:
            found = [one["Id"] for one in asked.containers(all=True, filters={"id": container})]
        self.left[completion.slot.schedule_idx] = in_container(container) + found


def test_nothing_is_left_of_containers_whose_workers_are_killed_once_the_run_has_gone_on(
    python: Python, tmp_path: Path
) -> None:
    names = ["daemon_heartbeats", "pid_hopper", "daemon_parent_hangs", "ignores_every_signal"]
    agents = runner.AGENTS
    variants = [
        {"id": name, "agent": {"command": [python.executable, "-S", "-E", str(agents / f"{name}.py")]}}
        for name in names
    ]
    settings = {"kind": "docker", "image": python.name, "readable": [*python.readable, str(agents)], "timeout_s": 100}
    design = {"max_concurrency": len(names), "infra_retries": 0}
    one = experiment(tmp_path / "base", ["t"], variants, sandbox=settings, design=design)
    killer = KillsWorkers(tmp_path / "run")
    backend = LocalBackend(len(names), docker=True)
    assert work_at(tmp_path / "run", one, backend, callbacks=[killer]) == RunEnd("completed")
    assert [str(status) for status in statuses(tmp_path / "run")] == ["worker_lost"] * len(names)
    assert min(killer.were_there.values()) >= 2  # its init, and what it forked
    assert killer.left == {number: [] for number in range(len(names))}
