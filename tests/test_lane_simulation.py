"""Ten thousand trials over five lanes, on a simulated clock: limits held, no lane waits for another, none idles."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import deque
from random import Random
from typing import NamedTuple

import pytest

from sandbox_exec.contracts.queue import WINDOW_S, LaneSettings
from sandbox_exec.contracts.words import AgentSpec, Variant
from sandbox_exec.schedule.lanes import Lanes

TRIALS = 2000  # in each lane
MAX_CONCURRENCY = 10_000  # never what holds a trial
SEED = 6


class Kind(NamedTuple):
    """What a variant's trials are like: each says what it used, unless the provider turns it away."""

    estimate: int
    tokens: tuple[int, int]  # used: from, to
    duration_s: tuple[float, float]
    refused: float = 0.0  # share of the first attempts


LANES = {
    "requests": LaneSettings(rpm=120),
    "tokens": LaneSettings(tpm=100_000),
    "guessed": LaneSettings(tpm=200_000),
    "adaptive": LaneSettings(max_concurrent=8, adaptive=True),
    "all": LaneSettings(rpm=300, tpm=400_000, max_concurrent=20, min_gap_s=0.15, adaptive=True),
}
KINDS = {
    "requests": {"r": Kind(0, (0, 0), (1, 60), refused=0.01)},
    "tokens": {"t-small": Kind(500, (500, 500), (1, 90)), "t-large": Kind(1500, (1500, 1500), (20, 300), 0.01)},
    "guessed": {"g": Kind(2000, (500, 1500), (5, 100), refused=0.01)},
    "adaptive": {"a": Kind(0, (0, 0), (1, 5), refused=0.01)},
    "all": {"x": Kind(1000, (1000, 1000), (0.2, 3), refused=0.01), "y": Kind(800, (800, 800), (1, 2))},
}


class Start(NamedTuple):
    at_s: float
    ended_s: float
    estimate: int
    tokens: int | None  # reported at the end
    blocked_until_s: float | None  # for one that was turned away


class Trial(NamedTuple):
    variant_id: str
    idx: int
    attempt: int = 0


class End(NamedTuple):
    at_s: float
    order: int
    lane: str
    trial: Trial
    started_s: float
    tokens: int | None
    refusal: tuple[float, float] | None  # retry_after_s, jitter_s


def simulate(names: tuple[str, ...]) -> dict[str, list[Start]]:
    """Run all trials of these lanes and return the starts of each. What a trial does follows from its name."""
    variants = [
        Variant(id=one, agent=AgentSpec(command=("true",)), lane=name, tokens_per_trial=kind.estimate)
        for name in names
        for one, kind in KINDS[name].items()
    ]
    lane_of = {variant.id: str(variant.lane) for variant in variants}
    lanes = Lanes({name: LANES[name] for name in names}, variants)
    waiting: dict[str, deque[Trial]] = {
        variant.id: deque(Trial(variant.id, i) for i in range(TRIALS // len(KINDS[lane_of[variant.id]])))
        for variant in variants
    }
    ends: list[End] = []
    order = itertools.count()
    found: dict[str, list[Start]] = {name: [] for name in names}
    now_s = 0.0
    while True:
        while ends and ends[0].at_s <= now_s:
            end = heapq.heappop(ends)
            variant_id = end.trial.variant_id
            if end.refusal is not None:
                lanes.turned_away(
                    variant_id,
                    now_s,
                    started_s=end.started_s,
                    retry_after_s=end.refusal[0],
                    jitter_s=end.refusal[1],
                )
                waiting[variant_id].append(end.trial._replace(attempt=end.trial.attempt + 1))
            lanes.end(variant_id, now_s, started_s=end.started_s, success=end.refusal is None, tokens=end.tokens)
        while len(ends) < MAX_CONCURRENCY:
            closed = lanes.closed(now_s)
            free = [one for one in waiting if waiting[one] and one not in closed]
            if not free:
                break
            variant_id = min(free, key=lambda one: waiting[one][0].idx)
            trial = waiting[variant_id].popleft()
            estimate = lanes.estimate(variant_id)
            lanes.start(variant_id, now_s)
            end = ending(trial, KINDS[lane_of[variant_id]][variant_id], now_s, next(order), lane_of[variant_id])
            heapq.heappush(ends, end)
            until_s = None if end.refusal is None else end.at_s + sum(end.refusal)
            found[end.lane].append(Start(now_s, end.at_s, estimate, end.tokens, until_s))
        opens_s = lanes.opens_s((one for one in waiting if waiting[one]), now_s)
        moments_s = [*([ends[0].at_s] if ends else []), *([opens_s] if opens_s is not None else [])]
        if not moments_s:
            return found
        now_s = min(moments_s)


def ending(trial: Trial, kind: Kind, now_s: float, order: int, lane: str) -> End:
    random = Random(f"{SEED} {trial}")
    lasts_s, tokens = random.uniform(*kind.duration_s), random.randint(*kind.tokens)
    if trial.attempt == 0 and random.random() < kind.refused:
        refusal = random.uniform(2, 20), random.uniform(0, 2)
        return End(now_s + random.uniform(0.1, 1), order, lane, trial, now_s, None, refusal)
    return End(now_s + lasts_s, order, lane, trial, now_s, tokens, None)


@functools.cache
def together() -> dict[str, list[Start]]:
    return simulate(tuple(LANES))


@pytest.fixture(params=LANES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_trial_runs_and_those_turned_away_run_again() -> None:
    for name, starts in together().items():
        refused = [start for start in starts if start.blocked_until_s is not None]
        assert len(starts) - len(refused) == TRIALS
        assert refused, f"lane {name} was never blocked: the simulation shows nothing"


def test_no_window_holds_more_starts_than_the_lane_allows(name: str) -> None:
    times_s = [start.at_s for start in together()[name]]
    rpm = LANES[name].rpm or math.inf
    first = 0
    for last, time_s in enumerate(times_s):
        while time_s - times_s[first] >= WINDOW_S:
            first += 1
        assert last - first + 1 <= rpm
    assert all(b - a >= LANES[name].min_gap_s - 1e-9 for a, b in itertools.pairwise(times_s))


def test_no_window_holds_more_tokens_than_the_lane_allows_by_what_is_known(name: str) -> None:
    """With exact estimates that is what is used. Otherwise what is in flight counts with its estimate."""
    starts = together()[name]
    tpm = LANES[name].tpm or math.inf
    first = 0
    for last, start in enumerate(starts):
        while start.at_s - starts[first].at_s >= WINDOW_S:
            first += 1
        known = 0
        for one in starts[first : last + 1]:
            known += one.estimate if one.tokens is None or one.ended_s > start.at_s else one.tokens
        assert known <= tpm


def test_guessed_estimates_hold_the_limit_in_the_long_run() -> None:
    starts = together()["guessed"]
    tpm = LANES["guessed"].tpm or math.inf
    used = sum(start.tokens or 0 for start in starts)
    assert used <= tpm * (1 + (starts[-1].at_s - starts[0].at_s) / WINDOW_S)


def test_nothing_starts_while_the_lane_is_blocked(name: str) -> None:
    starts = together()[name]
    times_s = [start.at_s for start in starts]
    for start in starts:
        if start.blocked_until_s is not None:
            assert not [time_s for time_s in times_s if start.ended_s <= time_s < start.blocked_until_s]


def test_a_lane_runs_as_if_it_were_alone(name: str) -> None:
    assert simulate((name,))[name] == together()[name]


def test_throughput_is_at_least_90_percent_of_what_the_limits_allow(name: str) -> None:
    starts, limits = together()[name], LANES[name]
    lasted_s = starts[-1].at_s - starts[0].at_s - blocked_s(starts)
    mean_s = sum(start.ended_s - start.at_s for start in starts) / len(starts)
    mean_tokens = sum(start.estimate if start.tokens is None else start.tokens for start in starts) / len(starts)
    a_second = min(
        (limits.rpm or math.inf) / WINDOW_S,
        (limits.tpm or math.inf) / WINDOW_S / mean_tokens if mean_tokens else math.inf,
        (limits.max_concurrent or math.inf) / mean_s,
        1 / limits.min_gap_s if limits.min_gap_s else math.inf,
    )
    share = len(starts) / lasted_s / a_second
    assert share >= 0.9, f"{share:.1%} of {a_second:.2f} a second"


def blocked_s(starts: list[Start]) -> float:
    """Return for how long the lane was blocked while there was something to start."""
    total_s, seen_s = 0.0, starts[0].at_s
    refused = sorted((start.ended_s, start.blocked_until_s) for start in starts if start.blocked_until_s is not None)
    for from_s, until_s in refused:
        until_s = min(until_s, starts[-1].at_s)
        total_s += max(0.0, until_s - max(from_s, seen_s))
        seen_s = max(seen_s, until_s)
    return total_s
