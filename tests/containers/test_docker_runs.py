"""An experiment in which each task has its own image and the agent is an artifact: killed at any moment, continued, and
the same as if nothing had happened; and what pause, stop and Ctrl-C do to containers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import leftovers
import pytest
from engine import client
from runs_support import (
    KillAt,
    assert_nothing_ran_twice,
    children,
    completions,
    events,
    fork,
    history_of,
    in_child,
    reap_orphans,
    statuses,
)
from support import spin_until, wait_readable
from test_crashes import KillsWorkers, Tells

from containers.runs_in_docker import READY, OnTrace, assert_nothing_left, at, experiment, of_run
from sandbox_exec import artifacts, images, runs
from sandbox_exec.contracts import Experiment, Status
from sandbox_exec.control import ask
from sandbox_exec.coordinator import Coordinator, RunCallback
from sandbox_exec.errors import InvalidExperiment
from sandbox_exec.sandbox import reaper
from sandbox_exec.schedule import retries

KILLED = -signal.SIGKILL
FRUITS = ("apple", "banana", "cherry", "damson")
SOLVE = """#!/bin/sh
# Does what the task's input says, and tells which image it is in.
. /agent/lib/task.sh
case $what in
    fails) exit 3 ;;
    hangs) sleep 1000 ;;
    naps) sleep 0.2 ;;
esac
echo "{\\"image\\": \\"$(cat /fruit)\\", \\"seed\\": $seed}" >"$SANDBOX_EXEC_OUT/result.json"
"""
TASK = """
what=$(sed 's/.*"input": "\\([a-z]*\\)".*/\\1/' "$SANDBOX_EXEC_IN/task.json")
seed=$(sed 's/.*"seed": \\([0-9]*\\).*/\\1/' "$SANDBOX_EXEC_IN/task.json")
"""


def name_of(fruit: str) -> str:
    return f"sandbox-exec-tests/{fruit}:1"


@pytest.fixture(scope="module")
def fruits(busybox_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The ids of images that differ in one file, by their names."""
    built = {}
    for fruit in FRUITS:
        folder = tmp_path_factory.mktemp(fruit)
        (folder / "Dockerfile").write_text(f"FROM {busybox_image}\nCOPY fruit /fruit\n")
        (folder / "fruit").write_text(f"{fruit}\n")
        built[name_of(fruit)] = images.build(folder, tag=name_of(fruit)).id
    yield built
    with contextlib.closing(client()) as engine:
        for name in built:
            engine.remove_image(name)


class Calm(NamedTuple):
    experiment: Experiment
    history: list[bytes]
    folder: Path


@pytest.fixture(scope="module")
def calm(fruits: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The experiment, and its history when nothing disturbs it."""
    top = tmp_path_factory.mktemp("calm")
    for path, text in {"bin/solve": SOLVE, "lib/task.sh": TASK}.items():
        (top / "agent" / path).parent.mkdir(parents=True, exist_ok=True)
        (top / "agent" / path).write_text(text)
        (top / "agent" / path).chmod(0o755)
    (top / "base").mkdir()
    artifacts.freeze(top / "agent", top / "base" / "agent.tar.gz", entrypoint="bin/solve")
    fate = random.Random(5)
    tasks: list[dict[str, Any]] = []
    for number, what in enumerate(["naps", "fails", "answers", "hangs", "fails", "naps", "answers"]):
        row: dict[str, Any] = {"id": f"t{number}", "input": what, "image": name_of(FRUITS[number % len(FRUITS)])}
        if what == "fails":
            row["protocol"] = {"max_retries": fate.randrange(1, 3)}
        if what == "hangs":
            row["protocol"] = {"timeout_s": 0.3, "timeout_action": "retry", "max_retries": 1}
        tasks.append(row)
    variants = [{"id": "solver", "agent": {"artifact": "agent.tar.gz"}}]
    one = experiment(top / "base", tasks, variants=variants, design={"max_concurrency": 4})
    assert runs.run(one, runs=top, run_id="calm").status == "completed"
    assert Counter(statuses(top / "calm")) == {Status.SUCCESS: 4, Status.AGENT_ERROR: 2, Status.TASK_TIMEOUT: 1}
    assert_nothing_left("calm")
    return Calm(one, history_of(top / "calm"), top / "calm")


@pytest.fixture
def orphans() -> Iterator[None]:
    known = children()
    yield
    reap_orphans(known)


def work(folder: Path, one: Experiment, point: Callable[[str], None] | None = None, **more: Any) -> runs.RunSummary:
    """Run, or continue."""

    def on_ready(coordinator: Coordinator) -> None:
        if point is not None:
            at(coordinator, point)

    if (folder / "run.db").exists():
        return runs.continue_run(folder, on_ready=on_ready, **more)
    return runs.run(one, runs=folder.parent, run_id=folder.name, on_ready=on_ready, **more)


def live(folder: Path, one: Experiment, point: Callable[[str], None] | None = None) -> int:
    """One coordinator's life, in a process of its own; how it ended."""

    def alive() -> None:
        assert work(folder, one, point).status == "completed"

    return in_child(alive)


def assert_undisturbed(folder: Path, calm: Calm, known: set[int]) -> None:
    reap_orphans(known)  # hosts of coordinators that were killed
    assert history_of(folder) == calm.history
    assert_nothing_ran_twice(folder)
    assert_nothing_left(folder.name)


# --- determinism ---


def test_each_task_ran_in_its_own_image_which_is_in_its_completion(calm: Calm, fruits: dict[str, str]) -> None:
    tasks = {task.id: task for task in calm.experiment.tasks}
    results = 0
    for attempts in completions(calm.folder).values():
        for one in attempts:
            image = tasks[one.slot.task_id].image
            assert image is not None
            assert one.image_id == fruits[image]
            result = calm.folder / "trials" / one.trial_id / f"attempt-{one.attempt}" / "result.json"
            if one.status is Status.SUCCESS:
                assert name_of(json.loads(result.read_text())["image"]) == image
                results += 1
    assert results == 4


def test_the_history_is_the_same_one_at_a_time(calm: Calm, tmp_path: Path) -> None:
    assert runs.run(calm.experiment, runs=tmp_path, run_id="one", workers=1).status == "completed"
    assert history_of(tmp_path / "one") == calm.history
    assert_nothing_left("one")


# --- crashes ---


def test_a_coordinator_that_is_killed_at_one_point_after_the_other_is_continued(calm: Calm, tmp_path: Path) -> None:
    folder, known = tmp_path / "points", children()
    lives = ["dispatched", "begun", "adopting", "finished", "requeued", "committed", "batch:before-commit"]
    for point in lives:
        assert live(folder, calm.experiment, KillAt(point)) == KILLED, point
    assert live(folder, calm.experiment) == 0
    assert_undisturbed(folder, calm, known)


def kill_at_callback(folder: Path, one: Experiment, nth: int, *, all_of_it: bool) -> None:
    """A life that is ended from outside, right after its nth callback; `all_of_it`: with its host and workers."""
    hear, tell = os.pipe()
    pid = fork(lambda: work(folder, one, callbacks=[Tells(tell)]))
    os.close(tell)
    for _ in range(nth):
        wait_readable(hear)
        if not os.read(hear, 1):
            break
    started = leftovers.descendants(pid) if all_of_it else set()
    for one_pid in (pid, *started):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one_pid, signal.SIGKILL)
    os.close(hear)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("seed", [1])
def test_coordinator_host_and_workers_are_killed_at_random_moments(calm: Calm, tmp_path: Path, seed: int) -> None:
    folder, known, fate = tmp_path / f"random-{seed}", children(), random.Random(seed)
    for all_of_it in (True, False, True):
        kill_at_callback(folder, calm.experiment, fate.randrange(6, 22), all_of_it=all_of_it)
    assert live(folder, calm.experiment) == 0
    assert_undisturbed(folder, calm, known)


def test_when_workers_are_killed_their_containers_go_and_the_run_goes_on(
    calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    folder, known, killer = tmp_path / "workers", children(), KillsWorkers(2)
    assert work(folder, calm.experiment, callbacks=[killer]).status == "completed"
    assert 0 < len(events(folder, "attempt_lost")) <= killer.killed
    assert_undisturbed(folder, calm, known)


# --- steering ---


class Steered:
    """A run in a process of its own. Its agents wait until the flag is there."""

    def __init__(self, folder: Path, image: str) -> None:
        self.folder, self.flag = folder / "steered", folder / "base" / "flags" / "go"
        self.flag.parent.mkdir(parents=True)
        waits = f"until [ -e {self.flag} ]; do sleep 0.05; done"
        self.experiment = experiment(
            folder / "base",
            [{"id": name, "input": READY + waits} for name in "ab"],
            image,
            design={"max_concurrency": 2},
            sandbox={"readable": [str(self.flag.parent)]},
        )
        (folder / "base" / "flags").chmod(0o755)

    def start(self) -> None:
        """Return when both agents run."""
        hear, tell = os.pipe()
        callback = OnTrace(2, lambda: os.write(tell, b"."))
        self.pid = fork(lambda: self._work(callback))
        os.close(tell)
        wait_readable(hear)
        assert os.read(hear, 1) == b"."
        os.close(hear)

    def _work(self, callback: RunCallback) -> None:
        summary = work(self.folder, self.experiment, callbacks=[callback])
        os._exit(0 if summary.status == "completed" else 4)

    def end(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def steered(tmp_path: Path, fruits: dict[str, str], orphans: None) -> Steered:
    return Steered(tmp_path, name_of("apple"))


def states(run_id: str) -> list[str]:
    return [one["State"] for one in of_run(run_id)]


def test_a_paused_run_has_its_containers_frozen_and_a_sweep_leaves_them(steered: Steered) -> None:
    steered.start()
    assert ask(steered.folder, do="pause") == {"status": "paused", "frozen": 2}
    assert states("steered") == ["paused", "paused"]
    with contextlib.closing(client()) as engine:
        reaped = reaper.reap(engine)
    frozen = {one["Names"][0].lstrip("/") for one in of_run("steered")}
    assert frozen <= {left.name for left in reaped.kept}
    assert states("steered") == ["paused", "paused"]
    steered.flag.touch()
    assert ask(steered.folder, do="resume") == {"status": "running"}
    assert steered.end() == 0
    assert statuses(steered.folder) == [Status.SUCCESS] * 2
    assert_nothing_left("steered")


def test_a_run_that_is_stopped_leaves_nothing_and_goes_on_unless_a_tag_has_moved(
    steered: Steered, fruits: dict[str, str]
) -> None:
    steered.start()
    assert ask(steered.folder, do="stop", now=True) == {"status": "stopping"}
    assert steered.end() == 4
    assert_nothing_left("steered")
    steered.flag.touch()
    name = name_of("apple")
    with contextlib.closing(client()) as engine:
        engine.tag(fruits[name_of("banana")], *name.rsplit(":", 1))
        try:
            with pytest.raises(InvalidExperiment, match=f"image {name}"):
                runs.continue_run(steered.folder)
        finally:
            engine.tag(fruits[name], *name.rsplit(":", 1))
    assert runs.continue_run(steered.folder).status == "completed"
    assert statuses(steered.folder) == [Status.SUCCESS] * 2
    assert_nothing_left("steered")


def test_the_second_ctrl_c_kills_the_containers_and_the_run_can_be_continued(steered: Steered) -> None:
    one = json.loads(steered.experiment.model_dump_json(exclude={"base", "sources"}, exclude_none=True))
    file = steered.folder.parent / "base" / "experiment.yaml"
    file.write_text(json.dumps(one))  # which is YAML too
    words = ["run", str(file), "--runs", str(steered.folder.parent), "--run-id", "steered"]
    command = [sys.executable, "-m", "sandbox_exec", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

        def both_run() -> bool:
            assert process.poll() is None, process.stdout and process.stdout.read()
            if not (steered.folder / "control.sock").exists():
                return False
            return [one.events for one in runs.status_of(steered.folder).in_flight] == [1, 1]

        spin_until(both_run, "both agents run")
        process.send_signal(signal.SIGINT)
        spin_until(lambda: runs.status_of(steered.folder).status == "draining", "it drains")
        assert states("steered") == ["running", "running"]
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert process.returncode == 4, said
    assert "to go on: sandbox-exec continue" in said
    assert_nothing_left("steered")
    steered.flag.touch()
    assert runs.continue_run(steered.folder).status == "completed"
