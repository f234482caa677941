"""`scripts/bench queue`: what the next trial costs, how tasks get in, and how many run at once.

A time is the median over rounds of the mean of a round. All sizes take turns within a round, and growth is the median
of the ratios within each: of a thousand waiting to the most, it may be as much as the logarithm grows, and 30 % more.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from sandbox_exec import submission
from sandbox_exec.contracts import Cell, Experiment, Phase, Slot, Status, TrialCompletion, Variant, derive_trial_id
from sandbox_exec.contracts.queue import LEVELS, WINDOW_S, LaneSettings
from sandbox_exec.control import ask
from sandbox_exec.errors import RunNotActive
from sandbox_exec.ledger import Submitted
from sandbox_exec.orders import make_queue
from sandbox_exec.runs import RUNS, make_run, run
from sandbox_exec.schedule.board import Board
from sandbox_exec.schedule.lanes import Lanes
from sandbox_exec.schedule.queues import Entry, number
from sandbox_exec.schedule.scheduler import decide, verdict_at_commit
from sandbox_exec.store import RunStore
from sandbox_exec.store.folders import TRIALS, read_json

from . import agents
from .field import Field, Part, Target, median_or_none
from .host import Hosted
from .process import Effort, Row, Say
from .run import RunSide

MOST_US = 50.0
MOST_SUBMIT_S = 1.0
LEAST_TRIALS_PER_MINUTE = 1000.0
LEAST_AT_ONCE = 100
LEAST_SHARE = 0.9  # of the middle of the run, with so many agents at once

SIZES: Final = (10, 1_000, 100_000)
ADAPTIVE_SIZES: Final = (10, 1_000, 10_000)
LANE_SIZES: Final = (10, 1_000, 10_000)
VARIANTS: Final = (1, 20)
OPERATIONS: Final = 1_000  # of each size in a round
BATCH_TASKS: Final = 10_000
TRIALS_IN_RUN: Final = 2_000
WORKERS: Final = 104  # a few more than must be seen at once: one is always between two trials
NAPS_S: Final = (1.0, 5.0)  # of an agent, from and to: spread, so that they do not all end at once
MEMORY_MIB: Final = 64
STEP_S: Final = 0.1  # of the queue's clock, from one start to the next
WAITED: Final = 0.4  # of the time in which all that wait can start: so long have the first waited at the beginning

Times = dict[str, float]  # microseconds each


# --- which next ---


class QueueLoad:
    """A queue in which so many wait all the time: for each that is taken, another one is put.

    With several variants, every other one is closed. In order of priority each of the four levels has a quarter; so
    much time passes that all are promoted as they wait, and every fourth comes near to its deadline.
    """

    def __init__(self, order: str, variants: int, waiting: int) -> None:
        self._experiment = _experiment(order, variants, waiting)
        self._queue = make_queue(self._experiment)
        self._closed = {f"v{i}" for i in range(1, variants, 2)}
        self._waiting, self._count, self._now_s = waiting, 0, 0.0
        begun = time.perf_counter()
        cells = self._queue.submit(self._experiment.tasks)
        self._submit_us = (time.perf_counter() - begun) / len(cells) * 1e6
        self._random = random.Random(6)
        self._cells = list(cells[:waiting])
        for _ in range(waiting):
            self._queue.put(self._next_entry(self._random.uniform(-waiting * STEP_S * WAITED, 0.0)))
        is_open = sum(cell.variant_id not in self._closed for cell in self._cells)
        self._at_once = max(1, min(OPERATIONS, is_open // 2))
        self._completion = _completion(Slot(schedule_idx=0, variant_id="v0", task_id="t0", repeat=0))
        for _ in range(math.ceil(waiting / OPERATIONS)):
            self.round()  # until each has been taken: by then as many are promoted at each take as will be

    def round(self) -> Times:
        took: Times = {"take": 0.0, "observe": 0.0, "put": 0.0}
        done = 0
        while done < OPERATIONS:
            taken = []
            begun = time.perf_counter()
            for _ in range(self._at_once):
                self._now_s += STEP_S
                taken.append(self._queue.take(self._now_s, self._closed))
            between = time.perf_counter()
            for _ in taken:
                self._queue.observe(self._completion)
            took["take"] += between - begun
            took["observe"] += time.perf_counter() - between
            self._cells += [self._cells[idx] for idx in taken if idx is not None]
            entries = [self._next_entry(self._now_s) for _ in taken]
            begun = time.perf_counter()
            for entry in entries:
                self._queue.put(entry)
            took["put"] += time.perf_counter() - begun
            done += len(taken)
        return {name: seconds / done * 1e6 for name, seconds in took.items()} | {"submit": self._submit_us}

    def _next_entry(self, submitted_s: float) -> Entry:
        idx = self._count
        self._count += 1
        due_s = submitted_s + self._waiting * STEP_S / 2 if _has_deadline(idx) else None
        return Entry(idx, self._cells[idx], _priority(idx), submitted_s, due_s)


class BoardLoad:
    """A board on which so many wait, as the coordinator asks it: one place is free, and what was started ends.

    With several variants, every other one is in a lane that is blocked; those stand last, or nothing could be
    committed. Made again when a fifth has been started.
    """

    def __init__(self, order: str, variants: int, waiting: int) -> None:
        self._experiment = _experiment(order, variants, waiting)
        self._waiting = waiting
        cells = make_queue(self._experiment).submit(self._experiment.tasks)[:waiting]
        lane_of = {variant.id: variant.lane for variant in self._experiment.variants}
        self._slots = number(sorted(cells, key=lambda cell: lane_of[cell.variant_id] == "shut"))
        self._open = sum(lane_of[slot.variant_id] != "shut" for slot in self._slots)
        self._completions = [_completion(slot) for slot in self._slots[: max(2, self._open)]]
        self._make()

    def round(self) -> Times:
        took: Times = {"take": 0.0, "decide": 0.0, "end": 0.0, "commit": 0.0}
        committed = 0
        for _ in range(OPERATIONS):
            if self._left == 0:
                self._make()
            self._left -= 1
            times = [time.perf_counter()]
            idx = self._decide()
            times.append(time.perf_counter())
            self._end(idx)
            times.append(time.perf_counter())
            for key, begun, ended in zip(("decide", "end"), times, times[1:], strict=False):
                took[key] += ended - begun
            took["take"] += self._take_s
            if self._board.committable:
                begun = time.perf_counter()
                committed += self._commit()
                took["commit"] += time.perf_counter() - begun
        each = {key: seconds / OPERATIONS * 1e6 for key, seconds in took.items()}
        return each | {"commit": took["commit"] / max(1, committed) * 1e6}

    def _make(self) -> None:
        experiment, waits_s = self._experiment, random.Random(6)
        self._now_s = 0.0
        self._queue = make_queue(experiment)
        self._queue.restore(None, experiment.tasks)
        self._lanes = Lanes(experiment.lanes, experiment.variants)
        self._lanes.turned_away("v1", 0.0, started_s=0.0, retry_after_s=3600.0, jitter_s=0.0)
        self._board = Board(
            self._slots,
            {task.id: task for task in experiment.tasks},
            {variant.id: variant for variant in experiment.variants},
            experiment.design,
            self._queue,
            memory_bytes=1,
            budget_bytes=1,
            submitted_s=[waits_s.uniform(-self._waiting * STEP_S * WAITED, 0.0) for _ in self._slots],
        )
        take = self._board.take

        def timed_take(now_s: float, closed: Collection[str]) -> int | None:
            begun = time.perf_counter()
            idx = take(now_s, closed)
            self._take_s = time.perf_counter() - begun
            return idx

        self._board.take = timed_take  # type: ignore[method-assign]
        self._end(self._decide())  # what is due to be promoted at once, is
        self._commit()
        self._left = max(1, self._open // 5)

    def _decide(self) -> int:
        self._now_s += STEP_S
        self._board.advance(self._now_s)
        (idx,) = decide(self._board, self._lanes, self._now_s, capacity=1).dispatch
        return idx

    def _end(self, idx: int) -> None:
        variant_id = self._slots[idx].variant_id
        self._lanes.end(variant_id, self._now_s, started_s=self._now_s, success=True, tokens=1_000)
        self._board.finish(idx)

    def _commit(self) -> int:
        board, before = self._board, self._board.next_to_commit
        while board.committable:
            idx = board.next_to_commit
            board.commit(idx, verdict_at_commit(board, idx, Status.SUCCESS).status)
            self._queue.observe(self._completions[idx])
            self._queue.should_continue()
        return board.next_to_commit - before


def orders(effort: Effort, workers: int, say: Say) -> Part:
    """take and observe, by order, variants and how many wait."""
    return _by_size("orders", "The queue alone, microseconds each", QueueLoad, ("take", "observe"), effort, say)


def board(effort: Effort, workers: int, say: Say) -> Part:
    """The same as the coordinator has it, with the board around the queue; `decide` is a take and all lanes asked."""
    return _by_size(
        "board", "Board, lanes and queue, microseconds each", BoardLoad, ("take", "end", "commit"), effort, say
    )


def _by_size(
    name: str,
    title: str,
    make: Callable[[str, int, int], QueueLoad | BoardLoad],
    judged: Sequence[str],
    effort: Effort,
    say: Say,
) -> Part:
    rows: list[Row] = []
    targets = []
    for order in ("sequential", "priority"):
        slowest: list[float] = []
        growths: list[float] = []
        for variants in VARIANTS:
            say(f"{name}: {order}, {variants} variants")
            loads = {size: make(order, variants, size) for size in SIZES}
            rounds = [{size: load.round() for size, load in loads.items()} for _ in range(effort.rounds)]
            growths.append(_growth(rounds, judged, *SIZES[1:]))
            for size in SIZES:
                times = {key: _median([each[size][key] for each in rounds]) for key in rounds[0][size]}
                slowest += [times[key] for key in judged]
                growth = growths[-1] if size == SIZES[-1] else None
                rows.append({"order": order, "variants": variants, "waiting": size, **times, "growth": growth})
        what = " or ".join(judged)
        targets += [
            Target(f"{order}: {what}, the slowest", max(slowest), MOST_US, "us", at_least=False),
            Target(f"{order}: {_grows(what, *SIZES[1:])}", max(growths), _allowed(*SIZES[1:]), "x", at_least=False),
        ]
    return Part(name=name, title=title, rows=rows, targets=targets)


def promotion(effort: Effort, workers: int, say: Say) -> Part:
    """One take at which all that wait are promoted: the worst there is. It has no target, as few takes are like it."""
    rows: list[Row] = []
    for size in SIZES:
        say(f"promotion: {size} waiting")
        took = []
        for _ in range(effort.rounds):
            queue = make_queue(_experiment("priority", 1, size))
            queue.restore(None, _experiment("priority", 1, 4).tasks)  # so that it knows all levels
            for idx in range(size):
                queue.put(Entry(idx, Cell("v0", f"t{idx}", 0), _priority(idx), 0.0))
            begun = time.perf_counter()
            queue.take(size * STEP_S, ())
            took.append(time.perf_counter() - begun)
        rows.append(
            {"waiting": size, "the_take_ms": _median(took) * 1e3, "us_per_promoted": _median(took) / size * 1e6}
        )
    return Part(name="promotion", title="All that wait are promoted at one take", rows=rows, targets=[])


def adaptive(effort: Effort, workers: int, say: Say) -> Part:
    """The adaptive order, where `observe` is catsim's arithmetic over all items: reported, without a target."""
    rows: list[Row] = []
    for variants in VARIANTS:
        for size in ADAPTIVE_SIZES:
            say(f"adaptive: {variants} variants, {size} items")
            rows.append({"variants": variants, "items": size, **_adaptive_times(variants, size)})
    return Part(name="adaptive", title="The adaptive order, microseconds each", rows=rows, targets=[])


def _adaptive_times(variants: int, size: int) -> Times:
    experiment = _experiment("adaptive", variants, size * variants)
    queue = make_queue(experiment)
    cells = list(queue.submit(experiment.tasks))
    taken: list[float] = []
    observed: list[float] = []
    for idx in range(min(size * variants, 100 + 20 * variants)):
        slot = number([cells[idx]], idx)[0]
        queue.put(Entry(idx, cells[idx]))
        completion = _completion(slot, status=Status.SUCCESS if idx % 3 else Status.AGENT_ERROR)
        begun = time.perf_counter()
        queue.take(0.0, ())
        between = time.perf_counter()
        cells += queue.observe(completion)
        taken.append(between - begun)
        observed.append(time.perf_counter() - between)
    mean_us = sum(observed) / len(observed) * 1e6
    return {"take": _median(taken) * 1e6, "observe": mean_us, "longest_observe": max(observed) * 1e6}


# --- how fast ---


def lanes(effort: Effort, workers: int, say: Say) -> Part:
    """What a lane costs with so many starts in its window; `snapshot` is once for all commits of a turn."""
    rounds: list[dict[int, Times]] = []
    for i in range(effort.rounds):
        say(f"lanes: round {i + 1} of {effort.rounds}")
        rounds.append({size: _lane_times(size) for size in LANE_SIZES})
    judged = ("opens", "start", "end")
    rows: list[Row] = [
        {"starts_in_window": size, **{key: _median([each[size][key] for each in rounds]) for key in rounds[0][size]}}
        for size in LANE_SIZES
    ]
    growth = _growth(rounds, judged, *LANE_SIZES[1:])
    slowest = max(row[key] for row in rows for key in judged)
    return Part(
        name="lanes",
        title="A lane, microseconds each",
        rows=rows,
        targets=[
            Target("lanes: opens, start or end, the slowest", slowest, MOST_US, "us", at_least=False),
            Target(
                f"lanes: {_grows('those', *LANE_SIZES[1:])}", growth, _allowed(*LANE_SIZES[1:]), "x", at_least=False
            ),
        ],
    )


def _lane_times(size: int) -> Times:
    # Half as much again is allowed: the window is full of starts, and none of them is held back for long.
    settings = LaneSettings(rpm=size * 1.5, tpm=size * 1500.0, max_concurrent=size, adaptive=True)
    variant = Variant.model_validate(
        {"id": "v", "agent": {"command": ["true"]}, "lane": "lane", "tokens_per_trial": 1_000}
    )
    lanes = Lanes({"lane": settings}, [variant])
    took: Times = {"opens": 0.0, "start": 0.0, "end": 0.0, "snapshot": 0.0}
    gap_s, now_s = WINDOW_S / size, 0.0
    for i in range(size + OPERATIONS):
        now_s += gap_s
        times = [time.perf_counter()]
        lanes.closed(now_s)
        times.append(time.perf_counter())
        lanes.start("v", now_s)
        times.append(time.perf_counter())
        lanes.end("v", now_s, started_s=now_s, success=True, tokens=900 + i % 100, requests=1)
        times.append(time.perf_counter())
        if i % 50 == 0:
            lanes.snapshot("lane", now_s, now_s)
            took["snapshot"] += 50 * (time.perf_counter() - times[-1]) if i >= size else 0.0
        if i >= size:
            for key, begun, ended in zip(took, times, times[1:], strict=False):
                took[key] += ended - begun
    return {key: seconds / OPERATIONS * 1e6 for key, seconds in took.items()}


# --- getting in ---


def submissions(effort: Effort, workers: int, say: Say) -> Part:
    """Many tasks in one batch, from the call to the answer: checked, and on the disk."""
    tasks = [
        {
            "id": f"t{i}",
            "input": {"question": f"What is {i} and {i}?", "number": i},
            "protocol": {"priority": list(LEVELS)[i % 4], "tags": [f"tag-{i % 5}"]},
        }
        for i in range(BATCH_TASKS)
    ]
    took: dict[str, list[float]] = {"to a run that nobody holds": [], "to its coordinator, by its socket": []}
    idle, live = took
    with _folders() as folders:
        for i in range(effort.rounds):
            say(f"submissions: round {i + 1} of {effort.rounds}")
            took[idle].append(_submit(_waiting_run(folders / f"idle-{i}"), tasks))
            with _coordinated(_waiting_run(folders / f"live-{i}")) as folder:
                took[live].append(_submit(folder, tasks))
    return Part(
        name="submissions",
        title=f"{BATCH_TASKS:,} tasks in one batch, seconds",
        rows=[{"side": side, "median_s": _median(each), "worst_s": max(each)} for side, each in took.items()],
        targets=[
            Target(f"{BATCH_TASKS:,} tasks {side}", _median(each), MOST_SUBMIT_S, "s", at_least=False)
            for side, each in took.items()
        ],
    )


def _waiting_run(folder: Path) -> Path:
    experiment = Experiment.model_validate(
        {
            "name": "bench",
            "tasks": [{"id": "first", "input": None}],
            "variants": [{"id": "v", "agent": {"command": ["sleep", "3600"]}}],
            "design": {"max_concurrency": 1, "order": "priority"},
            "sandbox": {"memory": f"{MEMORY_MIB}MiB"},
        }
    )
    make_run(experiment, folder)[0].close()
    return folder


@contextlib.contextmanager
def _coordinated(folder: Path) -> Iterator[Path]:
    """With a coordinator of its own process, whose only worker is busy."""
    command = [sys.executable, "-P", "-m", "sandbox_exec", "continue", str(folder), "--keep-open", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_busy(folder):
            if process.poll() is not None:
                raise RuntimeError(f"the coordinator ended with exit code {process.returncode}")
            time.sleep(0.05)
        yield folder
        ask(folder, do="stop", now=True)
        process.wait(60)
    finally:
        process.terminate()
        process.wait()


def _is_busy(folder: Path) -> bool:
    try:
        return bool(ask(folder, do="status").get("in_flight"))
    except RunNotActive:
        return False


def _submit(folder: Path, tasks: Sequence[Mapping[str, Any]]) -> float:
    begun = time.perf_counter()
    submitted: Submitted = submission.submit(folder, tasks)
    took_s = time.perf_counter() - begun
    with RunStore.open(folder, write=False) as store:
        slots = store.progress().slots
    if submitted.trials != len(tasks) or slots != len(tasks) + 1:
        raise RuntimeError(f"{submitted.trials} trials were answered for, and {slots} slots are there")
    return took_s


# --- getting through ---


def throughput(effort: Effort, workers: int, say: Say) -> Part:
    """Trials a minute of a durable run: from the call, with all that it starts, to its end."""
    trials = TRIALS_IN_RUN if effort.rounds > 3 else TRIALS_IN_RUN // 5
    say(f"throughput: {trials} trials")
    side = Hosted(partial(RunSide, workers))
    rate = None
    with Field({"run": side}) as field:
        begun = time.perf_counter()
        if field.turn(lambda _, side: side.run(trials, workers, within_s=300.0)):
            rate = (trials + workers) / (time.perf_counter() - begun) * 60
    return Part(
        name="throughput",
        title=f"A durable run of {trials:,} trials that do nothing, {workers} workers",
        rows=[{"side": side.name, "trials_per_minute": rate}],
        targets=[Target("trials a minute", rate, LEAST_TRIALS_PER_MINUTE, "", at_least=True)],
        failures=field.failures,
    )


class CrowdSide:
    """A durable run with many workers, whose agents sleep. Its result is when each agent began and ended."""

    name = f"ours: durable run, {WORKERS} workers"

    def start(self) -> None: ...

    def run(self, n: int, in_flight: int) -> list[tuple[float, float]]:
        random_s = random.Random(6)
        experiment = Experiment.model_validate(
            {
                "name": "bench",
                "tasks": [{"id": f"t{i}", "input": random_s.uniform(*NAPS_S)} for i in range(n)],
                "variants": [{"id": "nap", "agent": {"function": agents.nap}}],
                "design": {"max_concurrency": in_flight, "memory_budget": f"{in_flight * MEMORY_MIB}MiB"},
                "sandbox": {"timeout_s": 60, "memory": f"{MEMORY_MIB}MiB"},
            }
        )
        with _folders() as folders:
            summary = run(experiment, runs=folders)
            if summary.status != "completed" or summary.by_status != {Status.SUCCESS: n}:
                raise ValueError(f"the run did not succeed: {summary}")
            found = [read_json(attempt) for attempt in (summary.folder / TRIALS).glob("*/attempt-1")]
        return [(began, ended) for began, ended in (each.value for each in found if each.value)]

    def stop(self) -> None: ...


def crowd(effort: Effort, workers: int, say: Say) -> Part:
    """How many agents are alive at once, by their own clocks, in the middle three fifths of a run."""
    trials = WORKERS * (12 if effort.rounds > 3 else 5)
    say(f"crowd: {trials} trials, {WORKERS} workers")
    side = Hosted(CrowdSide)
    share = None
    row: Row = {"side": CrowdSide.name, "trials": trials}
    with Field({"crowd": side}) as field:
        found = field.turn(lambda _, side: side.run(trials, WORKERS, within_s=600.0))
    if found:
        spans = found["crowd"]
        began, ended = min(span[0] for span in spans), max(span[1] for span in spans)
        middle = began + (ended - began) * 0.2, began + (ended - began) * 0.8
        levels = _levels(spans, *middle)
        share = sum(seconds for count, seconds in levels if count >= LEAST_AT_ONCE) / (middle[1] - middle[0])
        mean = sum(count * seconds for count, seconds in levels) / (middle[1] - middle[0])
        least, most = min(count for count, _ in levels), max(count for count, _ in levels)
        row |= {"seconds": ended - began, "mean_at_once": mean, "least": least, "most": most, "share": share}
    what = f"share of the middle of the run with {LEAST_AT_ONCE} agents or more at once"
    return Part(
        name="crowd",
        title=f"Agents that sleep {NAPS_S[0]:g} to {NAPS_S[1]:g} s, {WORKERS} workers",
        rows=[row],
        targets=[Target(what, share, LEAST_SHARE, "", at_least=True)],
        failures=field.failures,
    )


def _levels(spans: Sequence[tuple[float, float]], first: float, last: float) -> list[tuple[int, float]]:
    """How many spans overlap, and for how long, from first to last."""
    changes = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    levels: list[tuple[int, float]] = []
    count, since = 0, first
    for at, change in [*changes, (math.inf, 0)]:
        until = min(max(at, first), last)
        if until > since:
            levels.append((count, until - since))
            since = until
        count += change
    return levels


# --- parts ---


def _experiment(order: str, variants: int, slots: int) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "bench",
            "tasks": [
                {
                    "id": f"t{i}",
                    "input": i,
                    "protocol": {
                        "priority": _priority(i),
                        "deadline_s": slots * STEP_S / 2 if _has_deadline(i) else None,
                    },
                    "item": {"difficulty": (i % 61 - 30) / 10},
                }
                for i in range(math.ceil(slots / variants))
            ],
            "variants": [
                {
                    "id": f"v{i}",
                    "agent": {"command": ["true"]},
                    "lane": "shut" if i % 2 else "open",
                    "tokens_per_trial": 1_000,
                }
                for i in range(variants)
            ],
            "lanes": {"open": {"rpm": 1e9, "tpm": 1e12}, "shut": {}},
            "grading": {"command": ["true"]},
            "design": {
                "order": order,
                "max_concurrency": 1,
                "queue": {
                    "promote_after_s": slots * STEP_S / 4,
                    "urgent_within_s": slots * STEP_S / 20,
                    "adaptive": {"standard_error": None},
                },
            },
        }
    )


def _completion(slot: Slot, status: Status = Status.SUCCESS) -> TrialCompletion:
    return TrialCompletion(slot=slot, trial_id=derive_trial_id(slot), attempt=1, status=status, phase=Phase.AGENT)


def _priority(i: int) -> int:
    return list(LEVELS.values())[i % len(LEVELS)]


def _has_deadline(i: int) -> bool:
    return i // len(LEVELS) % 4 == 0  # every fourth of each level


@contextlib.contextmanager
def _folders() -> Iterator[Path]:
    """A folder for runs on the disk, where a user's are."""
    Path(RUNS).mkdir(exist_ok=True)
    folder = Path(os.path.abspath(tempfile.mkdtemp(prefix="sandbox-exec-bench-", dir=RUNS)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _growth(rounds: Sequence[Mapping[int, Times]], keys: Sequence[str], few: int, many: int) -> float:
    return _median([sum(each[many][key] for key in keys) / sum(each[few][key] for key in keys) for each in rounds])


def _allowed(few: int, many: int) -> float:
    return 1.3 * math.log(many) / math.log(few)


def _grows(what: str, few: int, many: int) -> str:
    return f"{what}, growth from {few:,} to {many:,}"


def _median(values: Sequence[float]) -> float:
    found = median_or_none(values)
    assert found is not None
    return found


PARTS = {
    "orders": orders,
    "board": board,
    "promotion": promotion,
    "adaptive": adaptive,
    "lanes": lanes,
    "submissions": submissions,
    "throughput": throughput,
    "crowd": crowd,
}
