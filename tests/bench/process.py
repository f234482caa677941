"""`scripts/bench process`: the process sandbox beside its peers and beside the floor.

The sides take turns in short rounds, because a machine is shared and noisy: a rate is the median over its
rounds, and a ratio the median of the ratios within each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

from . import agents
from .ceiling import CeilingSide
from .field import Field, Part, Sprint, Target, median_or_none, percentile, sprint
from .floor import FloorSide
from .host import Hosted
from .ours import GRACE_S, TIMEOUT_S, Kill, KillSide, PoolSide, TraceSide
from .peers import ForkServerSide, FuturesSide, PebbleSide
from .side import Traced

R = TypeVar("R")
Say = Callable[[str], None]
Row = dict[str, Any]

WARM_UP_CALLS = 16
KILLS_PER_ROUND = 30

# What ours is to reach, as a multiple of each of the others.
LEAST_RATIOS = {"pebble": 15.0, "futures": 8.0, "forkserver": 2.0, "floor": 0.5}
KILL_P95_MS = 10.0
KILL_P99_MS = 60.0
TRACE_EVENTS_PER_S = 120_000.0


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    round_s: float
    kill_rounds: int
    trace_rounds: int
    events: int


FULL = Effort(rounds=7, round_s=1.5, kill_rounds=8, trace_rounds=3, events=200_000)
QUICK = Effort(rounds=3, round_s=0.5, kill_rounds=1, trace_rounds=1, events=20_000)


def throughput(effort: Effort, workers: int, say: Say) -> Part:
    """Trials a second and latency of a function that does nothing, in a fresh process each."""
    sides: dict[str, Hosted[float]] = {
        "ours": Hosted(partial(PoolSide, workers)),
        "pebble": Hosted(partial(PebbleSide, workers)),
        "futures": Hosted(partial(FuturesSide, workers)),
        "forkserver": Hosted(ForkServerSide),
        "floor": Hosted(FloorSide),
    }
    rounds: list[dict[str, Sprint]] = []
    with Field(sides) as field:
        warm = field.turn(lambda _, side: sprint(side, WARM_UP_CALLS, workers))
        calls = {key: max(WARM_UP_CALLS, round(run.rate * effort.round_s)) for key, run in warm.items()}
        for i in range(effort.rounds):
            say(f"throughput: round {i + 1} of {effort.rounds}")
            rounds.append(field.turn(lambda key, side: sprint(side, calls[key], workers)))
    ratios = {key: median_or_none(_ratios(rounds, key)) for key in LEAST_RATIOS}
    return Part(
        name="throughput",
        title=f"A function that does nothing, a process a trial, {workers} at once",
        rows=[_throughput_row(sides[key].name, _of(rounds, key), ratios.get(key)) for key in _seen(rounds)],
        targets=[
            Target(f"ours / {key}, trials a second", ratios[key], least, "x", at_least=True)
            for key, least in LEAST_RATIOS.items()
        ],
        failures=field.failures,
    )


def kill(effort: Effort, workers: int, say: Say) -> Part:
    """How long after the deadline's grace an agent that ignores SIGTERM is gone, with all its processes."""
    kills: list[Kill] = []
    with Field({"ours": Hosted(partial(KillSide, workers))}) as field:
        for i in range(effort.kill_rounds):
            say(f"kill: round {i + 1} of {effort.kill_rounds}")
            for some in field.turn(lambda _, side: side.run(KILLS_PER_ROUND, workers)).values():
                kills += some
    by_agent = [[kill for kill in kills if kill.agent == agent.__name__] for agent in agents.STUBBORN]
    rows = [_kill_row(some[0].agent, some) for some in by_agent if some]
    total = [_kill_row("all", kills)] if kills else []
    judged = total[0] if total else {}
    return Part(
        name="kill",
        title=f"Kills after a deadline of {TIMEOUT_S:g} s and a grace of {GRACE_S:g} s, {workers} at once",
        rows=rows + total,
        targets=[
            Target("kill after the grace, p95", judged.get("p95_ms"), KILL_P95_MS, "ms", at_least=False),
            Target("kill after the grace, p99", judged.get("p99_ms"), KILL_P99_MS, "ms", at_least=False),
            Target("processes left behind", field.left_behind if kills else None, 1, "", at_least=False),
        ],
        failures=field.failures,
    )


def trace(effort: Effort, workers: int, say: Say) -> Part:
    """Trace events a second from one guest, beside the least that any trace must do."""
    sides: dict[str, Hosted[Traced]] = {"ours": Hosted(TraceSide), "ceiling": Hosted(CeilingSide)}
    rounds: list[dict[str, Traced]] = []
    with Field(sides) as field:
        for i in range(effort.trace_rounds):
            say(f"trace: round {i + 1} of {effort.trace_rounds}")
            rounds.append(field.turn(lambda _, side: side.run(effort.events, 1)[0]))
    traced = _of(rounds, "ours")
    lost = float(sum(one.lost for one in traced)) if traced else None
    rate = median_or_none([one.guest_rate for one in traced])
    return Part(
        name="trace",
        title=f"{effort.events} trace events of about 214 bytes from one guest",
        rows=[_trace_row(sides[key].name, _of(rounds, key)) for key in _seen(rounds)],
        targets=[
            Target("trace events a second, in the guest", rate, TRACE_EVENTS_PER_S, "/s", at_least=True),
            Target("trace events lost", lost, 1, "", at_least=False),
        ],
        failures=field.failures,
    )


PARTS = {"throughput": throughput, "kill": kill, "trace": trace}


def _ratios(rounds: Sequence[dict[str, Sprint]], key: str) -> list[float]:
    return [runs["ours"].rate / runs[key].rate for runs in rounds if runs.keys() >= {"ours", key}]


def _of(rounds: Sequence[dict[str, R]], key: str) -> list[R]:
    return [runs[key] for runs in rounds if key in runs]


def _seen(rounds: Sequence[dict[str, R]]) -> list[str]:
    return list(rounds[0])  # a side that drops out later is still in the first round, or has nothing to show


def _throughput_row(name: str, runs: Sequence[Sprint], ratio: float | None) -> Row:
    latencies_ms = [seconds * 1e3 for run in runs for seconds in run.latencies_s]
    return {
        "side": name,
        "trials_per_s": median(run.rate for run in runs),
        "rounds_per_s": [run.rate for run in runs],
        "p50_ms": percentile(latencies_ms, 50),
        "p95_ms": percentile(latencies_ms, 95),
        "ours_is": ratio,
    }


def _kill_row(agent: str, kills: Sequence[Kill]) -> Row:
    after_ms = [kill.after_grace_s * 1e3 for kill in kills]
    return {
        "agent": agent,
        "kills": len(kills),
        "p50_ms": percentile(after_ms, 50),
        "p95_ms": percentile(after_ms, 95),
        "p99_ms": percentile(after_ms, 99),
        "kill_call_p95_ms": percentile([kill.call_s * 1e3 for kill in kills], 95),
        "caller_p95_ms": percentile([kill.caller_s * 1e3 for kill in kills], 95),
    }


def _trace_row(name: str, traced: Sequence[Traced]) -> Row:
    return {
        "side": name,
        "events_per_s": median(one.guest_rate for one in traced),
        "until_outcome_per_s": median(one.caller_rate for one in traced),
        "lost": sum(one.lost for one in traced),
    }
