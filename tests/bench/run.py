"""`scripts/bench run`: durable runs beside `Pool`, and the coordinator alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from sandbox_exec.backends.local import LocalBackend
from sandbox_exec.contracts import Slot
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.coordinator import Coordinator, RunCallback
from sandbox_exec.dispatching import limits_of, unseen_runs
from sandbox_exec.experiment import freeze_functions
from sandbox_exec.graders import FUNCTIONS
from sandbox_exec.runs import RUNS
from sandbox_exec.store import RunStore
from sandbox_exec.testing import expand

from . import agents
from .field import Field, Part, Sprint, Target, median_or_none, percentile, sprint
from .host import Hosted
from .ours import PoolSide
from .process import Effort, Say

LEAST_OF_POOL = 0.4
DISPATCH_P99_MS = 20.0
MOST_US_PER_TRIAL = 1000.0
MOST_BYTES_PER_SLOT = 1024.0
MOST_STATUS_MS = 10.0
SIZES = (1_000, 10_000, 100_000)


class RunSide:
    """A durable run of trials that do nothing. Its rate is that of its trials, the start of its workers aside."""

    name = "ours: durable run"

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def start(self) -> None:
        # On the disk, where a user's runs are; removed at the end, as making files right after removing many is slow.
        Path(RUNS).mkdir(exist_ok=True)
        self._folders = tempfile.mkdtemp(prefix="sandbox-exec-bench-", dir=RUNS)

    def run(self, n: int, in_flight: int) -> list[float]:
        """The time from each decision to dispatch to the word that the worker has begun, in seconds."""
        folder = Path(tempfile.mkdtemp(dir=self._folders)).absolute()
        seen = _Latencies()
        experiment, functions = freeze_functions(
            Experiment(
                name="bench",
                tasks=[{"id": f"t{i}", "input": i} for i in range(n + in_flight)],
                variants=[{"id": "echo", "agent": {"function": agents.echo}}],
                design={"max_concurrency": in_flight},
                sandbox={"timeout_s": 30, "memory": "256MiB"},
            )
        )
        (folder / FUNCTIONS).mkdir()
        for digest, payload in functions.items():
            (folder / FUNCTIONS / f"{digest}.pkl").write_bytes(payload)
        backend = LocalBackend(
            in_flight, limits=limits_of(experiment, [unseen_runs(experiment, folder)]), preload=[agents.__name__]
        )
        try:
            with RunStore.create(folder, "bench", experiment.model_dump_json(), expand(experiment), {}) as store:
                end = Coordinator(store, experiment, backend, callbacks=[seen]).run()
                failed = store.progress().by_status
        finally:
            backend.close()
        if end.status != "completed" or len(failed) != 1:
            raise ValueError(f"the run did not succeed: {end}, {failed}")
        return [seen.elapsed_s(in_flight), *seen.took_s[in_flight:]]

    def stop(self) -> None:
        shutil.rmtree(self._folders)


class _Latencies(RunCallback):
    def __init__(self) -> None:
        self._selected: dict[int, float] = {}
        self._ended: list[float] = []
        self.took_s: list[float] = []

    def on_trial_selected(self, slot: Slot, attempt: int) -> None:
        self._selected[slot.schedule_idx] = time.perf_counter()

    def on_trial_start(self, slot: Slot, attempt: int) -> None:
        self.took_s.append(time.perf_counter() - self._selected.pop(slot.schedule_idx))

    def on_trial_end(self, completion: object) -> None:
        self._ended.append(time.perf_counter())

    def elapsed_s(self, warm_up: int) -> float:
        return self._ended[-1] - self._ended[warm_up - 1]


def durable(effort: Effort, workers: int, say: Say) -> Part:
    """Trials a second of a durable run beside those of `Pool`, in turns."""
    sides = {"pool": Hosted(partial(PoolSide, workers)), "run": Hosted(partial(RunSide, workers))}
    ratios, runs, pools, dispatch_ms = [], [], [], []
    calls = max(200, round(effort.round_s * 400))
    with Field(sides) as field:
        for i in range(effort.rounds):
            say(f"durable: round {i + 1} of {effort.rounds}")
            turn = field.turn(lambda _, side: sprint(side, calls, workers))
            if turn.keys() >= {"pool", "run"}:
                elapsed_s, *took_s = turn["run"].latencies_s
                run = Sprint(took_s, elapsed_s)
                runs.append(run.rate)
                pools.append(turn["pool"].rate)
                ratios.append(run.rate / turn["pool"].rate)
                dispatch_ms += [seconds * 1e3 for seconds in took_s]
    p99 = percentile(dispatch_ms, 99) if dispatch_ms else None
    return Part(
        name="durable",
        title=f"Trials that do nothing, {workers} at once",
        rows=[
            {"side": sides["pool"].name, "trials_per_s": median_or_none(pools)},
            {"side": sides["run"].name, "trials_per_s": median_or_none(runs), "dispatch_p99_ms": p99},
        ],
        targets=[
            Target("durable run / Pool, trials a second", median_or_none(ratios), LEAST_OF_POOL, "x", at_least=True),
            Target("dispatch to an idle worker, p99", p99, DISPATCH_P99_MS, "ms", at_least=False),
        ],
        failures=field.failures,
    )


def alone(effort: Effort, workers: int, say: Say) -> Part:
    """The coordinator with a backend that does nothing."""
    rows = []
    for slots in SIZES if effort.rounds > 3 else SIZES[:2]:
        say(f"alone: {slots} slots")
        command = [sys.executable, "-m", "tests.bench.alone", str(slots)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    last = rows[-1]
    growth = (last["us_per_trial"] / rows[0]["us_per_trial"]) if rows else None
    return Part(
        name="alone",
        title="The coordinator alone",
        rows=rows,
        targets=[
            Target(
                "microseconds a trial", max(r["us_per_trial"] for r in rows), MOST_US_PER_TRIAL, "us", at_least=False
            ),
            Target("growth of that from the least to the most slots", growth, 2.0, "x", at_least=False),
            Target("memory a slot", last["bytes_per_slot"], MOST_BYTES_PER_SLOT, "B", at_least=False),
            Target("status query", max(r["status_ms"] for r in rows), MOST_STATUS_MS, "ms", at_least=False),
        ],
        failures={},
    )


PARTS = {"durable": durable, "alone": alone}
