"""What the tests of runs share: small experiments, a coordinator in one call, and processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import leftovers

from sandbox_exec.backends.base import WorkerBackend
from sandbox_exec.backends.local import LocalBackend
from sandbox_exec.contracts import Slot, Status, TrialCompletion, TrialDispatch
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.coordinator import Coordinator, RunCallback, RunEnd
from sandbox_exec.dispatching import limits_of, unseen_runs
from sandbox_exec.ledger import QUEUE
from sandbox_exec.orders import first_schedule, make_queue
from sandbox_exec.store import RunStore, history, read_completion
from sandbox_exec.testing import ManualClock, Play, ScriptedBackend

At = Callable[[str], None]
Script = Callable[[TrialDispatch], Play]

AGENTS = '''
import os
import signal
import time

from sandbox_exec.guest import context


def play(task):
    """Do what the task's input says."""
    what = task["input"]
    context().trace("ran")
    time.sleep(what.get("nap_s", 0))
    if "meet" in what:
        announce, wait = what["meet"]
        with open(announce, "wb", buffering=0) as pipe:
            pipe.write(task["id"].encode() + b"\\n")
        with open(wait, "rb", buffering=0) as pipe:
            pipe.read(1)
    if "writes_mib" in what:
        with open(os.environ["SANDBOX_EXEC_OUT"] + "/large", "wb") as file:
            file.write(bytes(what["writes_mib"] << 20))
    if "raise" in what:
        raise {"KeyError": KeyError, "ValueError": ValueError}[what["raise"]](task["id"])
    if "exit" in what:
        os._exit(what["exit"])
    if float(os.environ["SANDBOX_EXEC_DEADLINE_S"]) < what.get("needs_s", 0):
        while True:
            signal.pause()
    return {"id": task["id"], "seed": task["seed"], "repeat": task["repeat"]}


def weak(task):
    raise RuntimeError(task["id"])


def not_a_number(task):
    return {"score": float("nan")}
'''
NEVER_S = 1e9  # no attempt has that much: an agent that needs it hangs


# --- experiments ---


def experiment(base: Path, tasks: Sequence[Any], variants: Sequence[Any] = ("v",), **fields: Any) -> Experiment:
    """Tasks are ids or rows; variants are ids, which play, or rows. `base` gets their agents."""
    base.mkdir(exist_ok=True)
    (base / "agents.py").write_text(AGENTS)
    rows = [row if isinstance(row, dict) else {"id": row} for row in tasks]
    return Experiment(
        name="test",
        seed=7,
        tasks=[{"input": {}, **row} for row in rows],
        variants=[
            one if isinstance(one, dict) else {"id": one, "agent": {"python": "agents:play"}} for one in variants
        ],
        base=base,
        **fields,
    )


def varied(base: Path, seed: int, tasks: int, **design: Any) -> Experiment:
    """Seeded naps, failures, timeouts, retries, prunings, chains and dependencies; what happens is the tasks' own."""
    fate = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(tasks):
        what: dict[str, Any] = {"nap_s": fate.choice([0, 0, 0.005, 0.02])}
        protocol: dict[str, Any] = {"timeout_s": 60.0}
        row: dict[str, Any] = {"id": f"t{number:02}", "input": what, "protocol": protocol}
        match number % 6:
            case 1:
                what |= {"raise": fate.choice(["KeyError", "ValueError"])}
                protocol |= {"max_retries": fate.randrange(3)}
            case 2:
                what |= {"exit": fate.randrange(1, 100)}
            case 3:
                what |= {"needs_s": NEVER_S}
                protocol |= {"timeout_s": 0.2, "timeout_action": fate.choice(["skip", "retry"])}
        if number == 5:  # once: it takes its time
            what |= {"needs_s": 3.0}
            protocol |= {"timeout_s": 1.5, "timeout_action": "extend", "max_retries": 1}
        if fate.random() < 0.4:
            row["chain"] = fate.choice("xy")
        if number > 1 and fate.random() < 0.3:
            row["depends_on"] = [f"t{fate.randrange(number):02}"]
        rows.append(row)
    variants = ["plays", {"id": "weak", "agent": {"python": "agents:weak"}, "max_parallel_trials": 3}]
    design = {"prune_after_failures": 3, **design}
    return experiment(base, rows, variants, design=design, sandbox={"memory": "64MiB"})  # so that 32 fit anywhere


def open_run(folder: Path, one: Experiment, at: At | None = None, now: Callable[[], float] = time.time) -> RunStore:
    """The run in `folder`, made if there is none. `now`: the clock on the wall."""
    if (folder / "run.db").exists():
        try:
            return RunStore.open(folder, at=at, now=now)
        except Exception as error:
            if "is not made yet" not in str(error):
                raise
    queue = make_queue(one)
    slots = first_schedule(queue, one.tasks)
    return RunStore.create(
        folder, "run", one.model_dump_json(), slots, {}, state={QUEUE: queue.snapshot()}, at=at, now=now
    )


def work_at(
    folder: Path,
    one: Experiment,
    backend: WorkerBackend,
    *,
    at: At | None = None,
    callbacks: Iterable[RunCallback] = (),
    clock: ManualClock | None = None,
    now: Callable[[], float] = time.time,
) -> RunEnd:
    """Run, or continue, until it ends; the backend is closed then."""
    try:
        with open_run(folder, one, at, now) as store:
            more: dict[str, Any] = {"at": at} if at else {}
            return Coordinator(store, one, backend, callbacks=callbacks, clock=clock, **more).run()
    finally:
        backend.close()


def run_scripted(
    folder: Path,
    one: Experiment,
    script: Script = lambda dispatch: Play(),
    *,
    capacity: int = 4,
    at: At | None = None,
    callbacks: Iterable[RunCallback] = (),
    clock: ManualClock | None = None,
    **more: Any,
) -> tuple[RunEnd, ScriptedBackend]:
    clock = clock or ManualClock(1000.0)
    backend = ScriptedBackend(clock, capacity, script, **more)
    return work_at(folder, one, backend, at=at, callbacks=callbacks, clock=clock), backend


def run_local(folder: Path, one: Experiment, *, hung_s: float = 30.0, containment: str = "auto", **more: Any) -> RunEnd:
    workers = one.design.max_concurrency
    backend = LocalBackend(
        workers, limits=limits_of(one, [unseen_runs(one, folder)]), hung_s=hung_s, containment=containment
    )
    return work_at(folder, one, backend, **more)


# --- what is left of a run ---


def history_of(folder: Path) -> list[bytes]:
    with RunStore.open(folder, write=False) as store:
        return list(history(store))


def statuses(folder: Path) -> list[Status]:
    with RunStore.open(folder, write=False) as store:
        return [commit.status for commit in store.commits()]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    with RunStore.open(folder, write=False) as store:
        return [event.data for event in store.events() if event.kind == kind]


def completions(folder: Path) -> dict[str, list[TrialCompletion]]:
    """By trial, what its attempts' folders hold, in their order."""
    found: dict[str, list[TrialCompletion]] = {}
    for trial in sorted((folder / "trials").iterdir()):
        numbers = sorted(int(path.name.removeprefix("attempt-")) for path in trial.iterdir())
        read = [read_completion(trial / f"attempt-{number}").value for number in numbers]
        found[trial.name] = [one for one in read if one is not None]
    return found


def assert_nothing_ran_twice(folder: Path) -> None:
    """Each attempt that left a completion of the agent's own is in the history, and none was made again."""
    with RunStore.open(folder, write=False) as store:
        counted = {
            trial_id: [status for (status,) in list(rows)]
            for trial_id, rows in (
                (
                    trial_id,
                    store.query("SELECT status FROM attempts WHERE schedule_idx = ? AND counted ORDER BY attempt", idx),
                )
                for idx, trial_id in list(store.query("SELECT schedule_idx, trial_id FROM schedule"))
            )
        }
        skipped = {
            trial_id
            for (trial_id,) in store.query(
                """SELECT trial_id FROM schedule s JOIN commits c ON c.schedule_idx = s.schedule_idx
                   WHERE c.status = 'skipped'"""
            )
        }
    for trial_id, ended in completions(folder).items():
        if trial_id not in skipped:
            assert [one.status for one in ended if one.status not in NOT_ITS_OWN] == counted[trial_id], trial_id


NOT_ITS_OWN = (Status.CANCELLED, Status.ENVIRONMENT_ERROR, Status.WORKER_LOST, Status.RATE_LIMITED)


class Heard(RunCallback):
    """Notes all callbacks, as (name, what tells it from others)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_run_start(self, run: Coordinator) -> None:
        self.calls.append(("on_run_start", None))

    def on_trial_selected(self, slot: Slot, attempt: int) -> None:
        self.calls.append(("on_trial_selected", (slot.schedule_idx, attempt)))

    def on_trial_start(self, slot: Slot, attempt: int) -> None:
        self.calls.append(("on_trial_start", (slot.schedule_idx, attempt)))

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self.calls.append(("on_trial_end", completion.slot.schedule_idx))

    def on_task_end(self, task_id: str, completions: Sequence[TrialCompletion]) -> None:
        self.calls.append(("on_task_end", (task_id, len(completions))))

    def on_queue_decision(self, kind: str, slot: Slot, reason: str) -> None:
        self.calls.append(("on_queue_decision", (kind, slot.schedule_idx)))

    def on_run_end(self, end: RunEnd) -> None:
        self.calls.append(("on_run_end", end.status))

    def of(self, name: str) -> list[Any]:
        return [what for called, what in self.calls if called == name]


# --- processes ---


def fork(work: Callable[[], object]) -> int:
    """Start `work` in a process of its own, which never returns into the test."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a process of its own; its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


def in_children(works: Iterable[Callable[[], object]]) -> list[int]:
    """Run each in a process of its own, beside each other; their exit codes. What fails is said on stderr."""
    pids = [fork(work) for work in works]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


class KillAt:
    """Ends this process, as `kill -9` does, when a point is reached for the nth time; "*" is any point."""

    def __init__(self, point: str, nth: int = 1) -> None:
        self._point, self._left = point, nth

    def __call__(self, point: str) -> None:
        if self._point in ("*", point):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def reap_orphans(known: set[int]) -> None:
    """Wait until all processes below this one have ended but those `known`: what a killed one left comes to us."""
    while new := set(leftovers.children(os.getpid())) - known:
        for pid in new:
            os.waitpid(pid, 0)


def children() -> set[int]:
    return set(leftovers.children(os.getpid()))
