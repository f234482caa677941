"""`scripts/bench docker`: a trial in a container beside what the engine itself takes for one.

Sides take turns at 1, 2 and 4 in flight. Ours is a durable run with staging, a trace and collection; the bare one is
create, start, wait and remove through the engine's API, with the same image and command; the naive one is the SDK's
`containers.run(remove=True)`. Needs an engine: `eval "$(scripts/docker-engine env)"`, which `scripts/bench` does.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import docker

from sandbox_exec import images, run
from sandbox_exec.contracts import TrialCompletion
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.coordinator import RunCallback
from sandbox_exec.runs import RUNS
from sandbox_exec.sandbox.engine import connect

from .field import Field, Part, Target, median_or_none, percentile
from .host import Hosted
from .process import Effort, Say

IN_FLIGHT = (1, 2, 4)
MOST_OF_BARE = 1.35
KILL_P99_MS = 300.0
KILLS = 30
SMALL_FILES = 1000
LARGE_BYTES = 100 << 20

# Reads its task, traces an event, leaves a result and a file.
TRIVIAL = [
    "sh",
    "-c",
    'echo "{\\"n\\":1}" >$SANDBOX_EXEC_TRACE; cat /in/task.json >/out/f; echo "{}" >/out/result.json',
]
ENDLESS = ["sh", "-c", "trap '' TERM; while :; do :; done"]
COPIES = ["sh", "-c", "cp -r /workspace /out/copy"]


class _Ends(RunCallback):
    def __init__(self) -> None:
        self.at: list[float] = []
        self.completions: list[TrialCompletion] = []

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self.at.append(time.perf_counter())
        self.completions.append(completion)


class OursSide:
    """Trials of a durable run; the first few, until all workers are warm, aside."""

    name = "ours: durable run, staging, trace, collection"

    def start(self) -> None:
        self._image = images.build("busybox").name
        Path(RUNS).mkdir(exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="sandbox-exec-bench-", dir=RUNS)

    def run(self, n: int, in_flight: int) -> list[float]:
        ends = durable(self._image, TRIVIAL, n + 2 * in_flight, in_flight, self._folder)
        return [ends.at[-1] - ends.at[2 * in_flight - 1]]

    def stop(self) -> None:
        shutil.rmtree(self._folder)


class BareSide:
    """Four calls of the engine's API, from as many threads as there are in flight."""

    name = "create, start, wait, remove"

    def start(self) -> None:
        self._image = images.build("busybox").name
        self._client: Any = connect()

    def run(self, n: int, in_flight: int) -> list[float]:
        with ThreadPoolExecutor(in_flight) as threads:
            list(threads.map(self._one, range(in_flight)))
            begun = time.perf_counter()
            list(threads.map(self._one, range(n)))
            return [time.perf_counter() - begun]

    def _one(self, _: int) -> None:
        config = self._client.create_host_config(network_mode="none")
        container = self._client.create_container(self._image, ["sh", "-c", "true"], host_config=config)["Id"]
        self._client.start(container)
        self._client.wait(container)
        self._client.remove_container(container)

    def stop(self) -> None:
        self._client.close()


class NaiveSide(BareSide):
    """What most people write."""

    name = "containers.run(remove=True)"

    def start(self) -> None:
        super().start()
        self._docker = docker.from_env()

    def _one(self, _: int) -> None:
        self._docker.containers.run(self._image, ["sh", "-c", "true"], network_mode="none", remove=True)

    def stop(self) -> None:
        super().stop()
        self._docker.close()


def durable(image: str, command: list[str], n: int, in_flight: int, folder: str, **more: Any) -> _Ends:
    ends = _Ends()
    workspace = more.pop("workspace", None)
    extra = {"workspace": workspace} if workspace else {}
    experiment = Experiment(
        name="bench",
        tasks=[{"id": f"t{i}", "input": i, **extra} for i in range(n)],
        variants=[{"id": "v", "agent": {"command": command}}],
        design={"max_concurrency": in_flight},
        sandbox={"kind": "docker", "image": image, **({"timeout_s": 30} | more)},
    )
    summary = run(experiment, runs=folder, callbacks=[ends])
    if summary.status != "completed" or len(summary.by_status) != 1:
        raise ValueError(f"the run did not do what it should: {summary}")
    return ends


def trials(effort: Effort, workers: int, say: Say) -> Part:
    """Seconds a trial at each concurrency."""
    sides: dict[str, Hosted[float]] = {"ours": Hosted(OursSide), "bare": Hosted(BareSide), "naive": Hosted(NaiveSide)}
    took: dict[tuple[str, int], list[float]] = {}
    ratios: dict[int, list[float]] = {k: [] for k in IN_FLIGHT}
    calls = max(6, round(effort.round_s * 8))
    with Field(sides) as field:
        for i in range(effort.rounds):
            for k in IN_FLIGHT:
                say(f"trials: round {i + 1} of {effort.rounds}, {k} in flight")
                n = calls * min(k, 2)
                turn = field.turn(partial(_seconds_each, n, k))
                for key, seconds in turn.items():
                    took.setdefault((key, k), []).append(seconds)
                if turn.keys() >= {"ours", "bare"}:
                    ratios[k].append(turn["ours"] / turn["bare"])
    rows = [
        {"side": side.name, **{f"s_at_{k}": median_or_none(took.get((key, k), [])) for k in IN_FLIGHT}}
        for key, side in sides.items()
    ]
    targets = [
        Target(
            f"ours / bare, seconds a trial, {k} in flight", median_or_none(ratios[k]), MOST_OF_BARE, "x", at_least=False
        )
        for k in IN_FLIGHT
    ]
    return Part("trials", "A trivial trial in a container, seconds each", rows, targets, field.failures)


def _seconds_each(n: int, in_flight: int, _: str, side: Hosted[float]) -> float:
    return side.run(n, in_flight, within_s=300)[0] / n


def kill(effort: Effort, workers: int, say: Say) -> Part:
    """From the decision to kill to the proof, of an agent that ignores SIGTERM."""
    say("kill")
    with tempfile.TemporaryDirectory(prefix="sandbox-exec-bench-") as folder:
        image = images.build("busybox").name
        n = KILLS if effort.rounds > 3 else 6
        ends = durable(image, ENDLESS, n, workers, folder, timeout_s=0.3)
    kills_ms = [one.kill.latency_s * 1e3 for one in ends.completions if one.kill is not None]
    p99 = percentile(kills_ms, 99) if kills_ms else None
    row = {"kills": len(kills_ms), "p50_ms": median_or_none(kills_ms), "p99_ms": p99}
    return Part(
        "kill",
        "Killing a container at its deadline, after the grace",
        [row],
        [Target("kill, p99", p99, KILL_P99_MS, "ms", at_least=False)],
    )


def files(effort: Effort, workers: int, say: Say) -> Part:
    """Staging a workspace, and collecting a copy of it."""
    say("files")
    rows = []
    with tempfile.TemporaryDirectory(prefix="sandbox-exec-bench-") as folder:
        many, one = Path(folder, "many"), Path(folder, "one")
        many.mkdir()
        one.mkdir()
        for i in range(SMALL_FILES):
            (many / f"{i}.json").write_text(json.dumps({"i": i}))
        with open(one / "large", "wb") as file:
            for _ in range(LARGE_BYTES >> 20):
                file.write(b"x" * (1 << 20))
        image = images.build("busybox").name
        for what, workspace in ((f"{SMALL_FILES} small files", many), (f"{LARGE_BYTES >> 20} MiB", one)):
            more = {"workspace": str(workspace), "memory": "1GiB", "out_limit": "512MiB"}
            ends = durable(image, COPIES, 3 if effort.rounds <= 3 else 9, 1, folder, **more)
            steps = [done.steps_s for done in ends.completions]
            rows.append(
                {"what": what, **{f"{s}_s": median_or_none([step[s] for step in steps]) for s in ("stage", "collect")}}
            )
    return Part("files", "Into and out of a container, seconds", rows, [])


PARTS = {"trials": trials, "kill": kill, "files": files}
