"""Kill -9 at every point and at any moment: the run continues, and comes out as if nothing had happened."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import leftovers
import pytest
from runs_support import (
    NOT_ITS_OWN,
    KillAt,
    Script,
    assert_nothing_ran_twice,
    children,
    events,
    experiment,
    fork,
    history_of,
    in_child,
    in_children,
    reap_orphans,
    run_local,
    run_scripted,
    statuses,
    varied,
)
from support import wait_readable

from sandbox_exec.contracts import Slot, Status, TrialDispatch
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.coordinator import Coordinator, RunCallback, RunEnd
from sandbox_exec.schedule import retries
from sandbox_exec.store import POINTS, read_completion
from sandbox_exec.testing import Bells, Play

COMPLETED = RunEnd("completed")
KILLED = -signal.SIGKILL
COORDINATOR_POINTS = ("adopting", "dispatched", "begun", "requeued", "finished", "committing", "committed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def orphans() -> Iterator[None]:
    known = children()
    yield
    reap_orphans(known)


# --- the coordinator alone, at every point of all ---


def own_attempts(folder: Path, dispatch: TrialDispatch) -> int:
    """How often this trial's agent has ended: all that an agent's doings may depend on."""
    trial = folder / "trials" / dispatch.trial_id
    found = [read_completion(trial / f"attempt-{number}").value for number in range(1, dispatch.attempt)]
    return sum(one is not None and one.status not in NOT_ITS_OWN for one in found)


def fates(folder: Path) -> Script:
    """Some of everything: retries, timeouts, losses, turned away, late and early completions."""

    def script(dispatch: TrialDispatch) -> Play:
        before = own_attempts(folder, dispatch)
        bells: Bells = (("started", 0), ("finished", dispatch.slot.schedule_idx % 3))
        early = dispatch.slot.schedule_idx % 2 == 0
        if dispatch.variant.id == "weak":
            return Play(Status.AGENT_ERROR, "RuntimeError", bells=bells, early=early)
        match dispatch.task.id:
            case "fails twice" if before < 2:
                return Play(Status.AGENT_ERROR, "ValueError", bells=bells, early=early)
            case "times out":
                return Play(Status.TASK_TIMEOUT, result_sha256=f"{dispatch.limits.timeout_s}", bells=bells, early=early)
            case "is lost" if dispatch.attempt == 1:
                return Play(None, bells=(("lost", 1),))
            case "is turned away" if dispatch.attempt == 1:
                return Play(Status.RATE_LIMITED, retry_after_s=5.0, bells=bells)
        return Play(result_sha256=f"{dispatch.seed}", bells=bells, early=early)

    return script


def eventful(base: Path) -> Experiment:
    tasks: list[Any] = [
        "is quick",
        {"id": "fails twice", "protocol": {"max_retries": 2}},
        {"id": "times out", "protocol": {"timeout_s": 2.0, "timeout_action": "extend", "max_retries": 2}},
        {"id": "follows a failure", "depends_on": ["times out"]},
        "is lost",
        {"id": "is turned away", "chain": "c"},
        {"id": "follows in a chain", "chain": "c"},
    ]
    return experiment(base, tasks, ["good", "weak"], design={"max_concurrency": 3, "prune_after_failures": 3})


def live(folder: Path, one: Experiment, at: Any = None) -> int:
    """One coordinator's life, in a process of its own; how it ended."""

    def work() -> None:
        assert run_scripted(folder, one, fates(folder), capacity=3, at=at)[0] == COMPLETED

    return in_child(work)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, list[bytes], list[str]]:
    """The experiment, its history when nothing disturbs it, and all points on the way, in order."""
    folder = tmp_path_factory.mktemp("calm")
    one = eventful(folder / "base")
    points: list[str] = []
    assert run_scripted(folder / "run", one, fates(folder / "run"), capacity=3, at=points.append)[0] == COMPLETED
    return one, history_of(folder / "run"), points


def test_the_experiment_passes_every_point(calm: tuple[Experiment, list[bytes], list[str]]) -> None:
    _, _, points = calm
    assert set(COORDINATOR_POINTS) <= set(points)
    assert {f"batch:{point}" for point in POINTS} <= set(points)


def test_a_coordinator_that_is_killed_at_any_point_is_continued_as_if_it_had_not_been(
    calm: tuple[Experiment, list[bytes], list[str]], tmp_path: Path
) -> None:
    one, due, points = calm

    def kill_and_continue(cases: list[tuple[str, int]]) -> None:
        for point, nth in cases:
            folder = tmp_path / f"{point}-{nth}"
            assert live(folder, one, KillAt(point, nth)) == KILLED, folder.name
            end, _ = run_scripted(folder, one, fates(folder), capacity=3)
            assert end == COMPLETED, folder.name
            assert history_of(folder) == due, folder.name
            assert_nothing_ran_twice(folder)
            assert not (folder / "control.sock").exists()

    cases = [(point, nth) for point, count in Counter(points).items() for nth in sorted({1, (count + 1) // 2, count})]
    assert in_children([lambda: kill_and_continue(cases[::2]), lambda: kill_and_continue(cases[1::2])]) == [0, 0]


def test_a_coordinator_that_is_killed_again_and_again_gets_there_all_the_same(
    calm: tuple[Experiment, list[bytes], list[str]], tmp_path: Path
) -> None:
    one, due, points = calm

    def kill_again_and_again(seed: int) -> None:
        folder, fate = tmp_path / f"seed {seed}", random.Random(seed)
        longest = fate.choice([6, 20, len(points) // 2])
        for life in itertools.count():
            ended = live(folder, one, KillAt("*", fate.randrange(5, longest)))
            if ended != KILLED:
                break
            longest += life // 20  # so that it ends: in five steps, not even adopting is done
        assert ended == 0
        assert life > 1
        assert history_of(folder) == due
        assert_nothing_ran_twice(folder)

    assert in_children([partial(kill_again_and_again, seed) for seed in range(4)]) == [0] * 4


def test_a_coordinator_that_is_killed_as_often_as_it_dispatches_does_not_use_up_a_trials_budget(
    folder: Path, tmp_path: Path
) -> None:
    one = experiment(tmp_path / "base", ["a"], design={"infra_retries": 0})
    for _ in range(5):
        assert live(folder, one, KillAt("dispatched")) == KILLED
    assert live(folder, one) == 0
    assert statuses(folder) == [Status.SUCCESS]
    assert len(events(folder, "attempt_lost")) == 5


# --- with real workers ---


def live_for_real(folder: Path, one: Experiment, at: Any = None) -> int:
    def work() -> None:
        assert run_local(folder, one, at=at) == COMPLETED

    return in_child(work)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, list[bytes]]:
    folder = tmp_path_factory.mktemp("real")
    one = varied(folder / "base", 3, 5, max_concurrency=3)
    known = children()
    assert live_for_real(folder / "run", one) == 0
    reap_orphans(known)
    history = history_of(folder / "run")
    assert len({line.partition(b'"status"')[2][:20] for line in history}) >= 3  # it is as varied as it says
    return one, history


def test_with_real_workers_a_coordinator_is_killed_at_one_point_after_the_other(
    real: tuple[Experiment, list[bytes]], folder: Path, orphans: None
) -> None:
    one, due = real
    lives = ["dispatched", "adopting", "begun", "adopting", "finished", "committed", "requeued", "batch:before-commit"]
    for point in lives:
        assert live_for_real(folder, one, KillAt(point)) == KILLED, point
    assert live_for_real(folder, one) == 0
    assert history_of(folder) == due
    assert_nothing_ran_twice(folder)
    assert not (folder / "control.sock").exists()


class Tells(RunCallback):
    """A byte into a pipe for every callback."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_: os.write(self._fd, b".")
        return super().__getattribute__(name)


def kill_at_callback(folder: Path, one: Experiment, nth: int, *, all_of_it: bool = False) -> int:
    """A life that is ended from outside, right after its nth callback; `all_of_it`: with whatever it started."""
    hear, tell = os.pipe()
    pid = fork(lambda: run_local(folder, one, callbacks=[Tells(tell)]))
    os.close(tell)
    heard = b""
    while len(heard) < nth:
        wait_readable(hear)
        more = os.read(hear, nth - len(heard))
        if not more:
            break
        heard += more
    started = leftovers.descendants(pid) if all_of_it else set()
    for one_pid in (pid, *started):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one_pid, signal.SIGKILL)
    os.close(hear)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_with_real_workers_a_coordinator_is_killed_at_random_moments(
    real: tuple[Experiment, list[bytes]], tmp_path: Path, orphans: None
) -> None:
    one, due = real

    def kill_at_random(seed: int) -> None:
        folder, fate = tmp_path / f"seed {seed}", random.Random(seed)
        for _ in range(2):
            kill_at_callback(folder, one, fate.randrange(1, 30))
        assert live_for_real(folder, one) == 0
        assert history_of(folder) == due
        assert_nothing_ran_twice(folder)

    assert in_children([partial(kill_at_random, seed) for seed in range(3)]) == [0] * 3


def test_with_real_workers_everything_is_killed_at_once(
    real: tuple[Experiment, list[bytes]], folder: Path, orphans: None
) -> None:
    one, due = real
    for nth in (9, 14):
        assert kill_at_callback(folder, one, nth, all_of_it=True) == KILLED
    assert live_for_real(folder, one) == 0
    assert history_of(folder) == due
    assert_nothing_ran_twice(folder)


class KillsWorkers(RunCallback):
    """Kills some workers: when an attempt of theirs is chosen, or as soon as it has begun."""

    def __init__(self, seed: int) -> None:
        self._fate = random.Random(seed)
        self.killed = 0

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run

    def on_trial_selected(self, slot: Slot, attempt: int) -> None:
        self._kill(slot, attempt, 0.3)

    def on_trial_start(self, slot: Slot, attempt: int) -> None:
        self._kill(slot, attempt, 0.3)

    def _kill(self, slot: Slot, attempt: int, chance: float) -> None:
        if self._fate.random() < chance and attempt < 4:
            ticket = self._run._trials[slot.schedule_idx].ticket
            assert ticket is not None
            os.kill(int(ticket.worker.partition("-")[0]), signal.SIGKILL)
            self.killed += 1


@pytest.mark.parametrize(("seed", "containment"), [(0, "auto"), (1, "user-namespaces"), (2, "subreaper")])
def test_workers_are_killed_at_random_moments_on_any_rung(
    real: tuple[Experiment, list[bytes]],
    folder: Path,
    orphans: None,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    containment: str,
) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    one, due = real
    killer = KillsWorkers(seed)
    one = one.model_copy(update={"design": one.design.model_copy(update={"infra_retries": 20})})
    end = run_local(folder, one, callbacks=[killer], containment=containment)
    if "no worker can be had" in end.reason:
        pytest.skip(end.reason)
    assert end == COMPLETED
    lost = events(folder, "attempt_lost")
    assert 0 < len(lost) <= killer.killed  # one that had left its completion is not lost
    assert len({(event["trial_id"], event["attempt"]) for event in lost}) == len(lost)
    assert history_of(folder) == due
    assert_nothing_ran_twice(folder)
