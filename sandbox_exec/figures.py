"""The statistics of a report: numbers in, numbers out. No I/O, no clock, no state; what is random has a seed.

An interval is of 95 % throughout. Where a task was tried more than once its trials are alike, so the task, not the
trial, is what is drawn (`paired_bootstrap`) or summed up first (`clustered_mean`); `wilson` cannot know of it.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sandbox_exec.errors import InvalidValue

Z: Final = 1.96  # 95 % of a normal distribution are within so many standard deviations
MAX_DRAWS: Final = 2_000_000  # of one bootstrap, about 0.4 s: with more than 200 pairs there are fewer rounds
MIN_ROUNDS: Final = 1000  # however many pairs: the ends of an interval then vary by a tenth of its half width
_TIE: Final = 1e-12  # of the largest difference: what rounding makes of a sum that is 0


class Interval(NamedTuple):
    low: float
    high: float


class ClusteredMean(NamedTuple):
    """A mean, and its standard error: None where one cluster alone cannot tell."""

    n: int
    mean: float
    stderr: float | None


class Difference(NamedTuple):
    """How much more the second of each pair is, in the mean. `above`: the share of rounds in which it is more."""

    mean: float
    low: float
    high: float
    above: float
    pairs: int
    rounds: int


def wilson(passed: int, n: int, z: float = Z) -> Interval:
    """Return Wilson's score interval of a rate. Of nothing, it is all from 0 to 1.

    It holds what it says for small samples and for rates near 0 and 1, where the rate +- z standard errors does not.
    It takes all n for independent: with several trials a task it is narrower than it should be.
    """
    if not 0 <= passed <= n:
        raise InvalidValue(f"{passed} of {n} cannot have passed")
    if n == 0:
        return Interval(0.0, 1.0)
    rate, square = passed / n, z * z
    middle = (rate + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * math.sqrt(rate * (1 - rate) / n + square / (4 * n * n))
    # At the ends it is 0 and 1 exactly, which rounding may miss.
    low = 0.0 if passed == 0 else max(0.0, middle - half)
    high = 1.0 if passed == n else min(1.0, middle + half)
    return Interval(low, high)


@functools.lru_cache(maxsize=4096)  # a run has few distinct (n, c, k), and many tasks
def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that at least one of k trials passes, estimated without bias from c of n that passed.

    It is 1 - C(n-c, k) / C(n, k) (Chen et al., 2021, "Evaluating Large Language Models Trained on Code"), in whole
    numbers up to the one division: nothing overflows, and nothing is lost where it is near 0 or 1.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise InvalidValue(f"pass@{k} of {c} in {n} trials: k is from 1 to the number of trials")
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def percentiles(values: Iterable[float], at: Sequence[float] = (50, 90, 99)) -> tuple[float, ...]:
    """Return these percentiles; between two values, on the straight line (type 7 of Hyndman and Fan, as numpy)."""
    ordered = sorted(values)
    if not ordered:
        raise InvalidValue("there are no percentiles of no values")
    return tuple(_quantile(ordered, one / 100) for one in at)


def clustered_mean(clusters: Iterable[Sequence[float]]) -> ClusteredMean:
    """Return the mean of all values, with a standard error that knows that those of one cluster are alike.

    Residuals are summed by cluster, and the sums are taken for independent (as in Miller, 2024, "Adding Error Bars
    to Evals"), times G / (G - 1) for G clusters. With clusters of one value it is the usual s / sqrt(n).
    """
    filled = [values for values in clusters if values]
    n = sum(map(len, filled))
    if n == 0:
        raise InvalidValue("there is no mean of no values")
    mean = math.fsum(value / n for values in filled for value in values)
    if len(filled) < 2:
        return ClusteredMean(n, mean, None)
    squares = math.fsum(math.fsum(value - mean for value in values) ** 2 for values in filled)
    return ClusteredMean(n, mean, math.sqrt(squares * len(filled) / (len(filled) - 1)) / n)


def paired_bootstrap(pairs: Iterable[tuple[float, float]], seed: int, rounds: int = 10_000) -> Difference:
    """Return the mean of second - first, with the interval of its percentiles when pairs are drawn again.

    The same pairs in the same order, and the same seed, give the same numbers. Of many pairs fewer rounds are made,
    down to `MIN_ROUNDS`, so that no more than `MAX_DRAWS` pairs are drawn; the result says how many. A round that is
    neither above nor below 0 is half above it. The interval is too narrow for very few pairs (below 10 or so), and
    of one pair it has no width at all.
    """
    differences = [second - first for first, second in pairs]
    n = len(differences)
    if n == 0 or rounds < 1:
        raise InvalidValue(f"a bootstrap of {n} pairs in {rounds} rounds: at least 1 of each is needed")
    rounds = max(min(rounds, MAX_DRAWS // n), min(rounds, MIN_ROUNDS))
    draw = random.Random(seed).choices
    means = sorted(sum(draw(differences, k=n)) / n for _ in range(rounds))
    zero = _TIE * max(map(abs, differences))
    above = sum(mean > zero for mean in means) + sum(abs(mean) <= zero for mean in means) / 2
    return Difference(
        mean=math.fsum(differences) / n,
        low=_quantile(means, 0.025),
        high=_quantile(means, 0.975),
        above=above / rounds,
        pairs=n,
        rounds=rounds,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not 0 <= share <= 1:
        raise InvalidValue(f"there is no percentile {share * 100:g}; allowed: from 0 to 100")
    place = share * (len(ordered) - 1)
    before = math.floor(place)
    after = min(before + 1, len(ordered) - 1)
    return ordered[before] + (ordered[after] - ordered[before]) * (place - before)
