"""The statistics of reports: against published values, against enumeration, and for all inputs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.errors import InvalidValue
from sandbox_exec.figures import (
    MAX_DRAWS,
    MIN_ROUNDS,
    clustered_mean,
    paired_bootstrap,
    pass_at_k,
    percentiles,
    wilson,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)
SHARES = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


# --- wilson ---


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    [
        # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (3, 5, 0.2307, 0.8824),
        (20, 20, 0.8389, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_is_as_published(passed: int, n: int, low: float, high: float) -> None:
    assert wilson(passed, n) == pytest.approx((low, high), abs=6e-5)


@given(SHARES)
def test_wilson_contains_the_rate_and_stays_between_0_and_1(share: tuple[int, int]) -> None:
    passed, n = share
    low, high = wilson(passed, n)
    assert 0 <= low <= passed / n <= high <= 1
    assert low < high


@given(SHARES)
def test_wilson_is_the_same_from_the_other_side_and_narrower_with_more_trials(share: tuple[int, int]) -> None:
    passed, n = share
    low, high = wilson(passed, n)
    assert wilson(n - passed, n) == pytest.approx((1 - high, 1 - low))
    more = wilson(passed * 10, n * 10)
    assert more.high - more.low < high - low


@pytest.mark.parametrize(("passed", "n"), [(-1, 3), (4, 3), (0, -1)])
def test_a_share_that_cannot_be_is_refused(passed: int, n: int) -> None:
    with pytest.raises(InvalidValue, match="cannot have passed"):
        wilson(passed, n)


# --- pass@k ---


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_with_a_pass(case: tuple[int, int, int]) -> None:
    n, c, k = case
    trials = [True] * c + [False] * (n - c)
    choices = [*itertools.combinations(trials, k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("n", "c", "k", "chance"),
    [(5, 2, 1, 0.4), (5, 2, 2, 0.7), (5, 2, 4, 1.0), (5, 0, 5, 0.0), (200, 13, 1, 0.065), (10, 10, 1, 1.0)],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, chance: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(chance, abs=1e-15)


def test_pass_at_k_is_as_the_product_that_others_use_and_does_not_overflow() -> None:
    n, c, k = 2000, 3, 100
    product = 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(product)
    assert pass_at_k(100_000, 1, 1) == 1e-5


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_pass_at_more_than_there_are_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(InvalidValue, match="k is from 1 to the number of trials"):
        pass_at_k(n, c, k)


# --- percentiles and means ---


@pytest.mark.parametrize(
    ("values", "at", "found"),
    [
        ([4, 1, 3, 2], (0, 25, 50, 90, 100), (1, 1.75, 2.5, 3.7, 4)),
        ([7], (50, 90, 99), (7, 7, 7)),
        (range(101), (50, 90, 99), (50, 90, 99)),
    ],
)
def test_percentiles_by_hand(values: Sequence[float], at: Sequence[float], found: Sequence[float]) -> None:
    assert percentiles(values, at) == pytest.approx(tuple(found))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentiles(values) == pytest.approx((cuts[49], cuts[89], cuts[98]))


def test_there_are_no_figures_of_nothing() -> None:
    with pytest.raises(InvalidValue, match="no percentiles of no values"):
        percentiles([])
    with pytest.raises(InvalidValue, match="no mean of no values"):
        clustered_mean([[], []])
    with pytest.raises(InvalidValue, match="a bootstrap of 0 pairs"):
        paired_bootstrap([], seed=1)
    with pytest.raises(InvalidValue, match="no percentile 101"):
        percentiles([1], (101,))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_clusters_of_one_have_the_usual_standard_error(values: list[float]) -> None:
    found = clustered_mean([[value] for value in values])
    usual = statistics.stdev(values) / math.sqrt(len(values))
    assert found == pytest.approx((len(values), statistics.fmean(values), usual), rel=1e-6, abs=1e-6)


@given(VALUES.filter(lambda values: len(values) > 1), st.integers(1, 5))
def test_repeating_what_is_the_same_makes_nothing_more_certain(values: list[float], repeats: int) -> None:
    once = clustered_mean([[value] for value in values])
    often = clustered_mean([[value] * repeats for value in values])
    assert often.mean == pytest.approx(once.mean)
    assert often.stderr == pytest.approx(once.stderr, abs=1e-9)


def test_a_clustered_mean_by_hand() -> None:
    # The residuals' sums are 0.6, 0.1 and -0.7; their squares 0.86, times 3 / 2 for three clusters.
    found = clustered_mean([[1, 1], [1, 0.5], [0], []])
    assert found == pytest.approx((5, 0.7, math.sqrt(0.86 * 1.5) / 5))


def test_one_cluster_has_no_standard_error() -> None:
    assert clustered_mean([[1, 0, 1, 0]]) == (4, 0.5, None)


# --- bootstrap ---


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=10), st.integers(0, 2**32))
@settings(max_examples=30)
def test_a_bootstrap_is_the_same_every_time_and_holds_its_mean(pairs: list[tuple[float, float]], seed: int) -> None:
    found = paired_bootstrap(pairs, seed, rounds=200)
    assert found == paired_bootstrap(iter(pairs), seed, rounds=200)
    differences = [second - first for first, second in pairs]
    assert found.mean == pytest.approx(statistics.fmean(differences), abs=1e-9)
    assert min(differences) - 1e-9 <= found.low <= found.high <= max(differences) + 1e-9
    assert (found.pairs, found.rounds) == (len(pairs), 200)


def test_another_seed_gives_other_numbers_that_say_the_same() -> None:
    pairs = [(0.0, float(n % 7)) for n in range(50)]
    one, other = (paired_bootstrap(pairs, seed) for seed in (1, 2))
    assert one != other
    assert one[:3] == pytest.approx(other[:3], abs=0.1)


def test_a_bootstrap_of_three_pairs_is_the_distribution_that_can_be_counted() -> None:
    # The mean is -k/6 with k of 3 draws at 1/3 each: P(k = 3) = 1/27 > 2.5 %, P(k = 0) = 8/27, half of it is above.
    found = paired_bootstrap([(1, 1), (0.5, 0), (0, 0)], seed=7)
    assert (found.mean, found.low, found.high) == pytest.approx((-1 / 6, -0.5, 0.0))
    assert found.above == pytest.approx(4 / 27, abs=0.02)


def test_the_interval_of_many_pairs_is_that_of_the_normal_distribution() -> None:
    pairs = [(0.0, float(n % 2)) for n in range(100)]
    found = paired_bootstrap(pairs, seed=3)
    assert (found.low, found.high) == pytest.approx((0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05), abs=0.011)
    assert found.above == 1.0


def test_of_two_that_are_the_same_neither_is_above() -> None:
    assert paired_bootstrap([(0.1, 0.1)] * 5, seed=1, rounds=100)[:4] == (0, 0, 0, 0.5)
    mirrored = paired_bootstrap([(0.1 + 0.2, 0.3), (0.3, 0.1 + 0.2)], seed=1, rounds=4000)
    assert mirrored.above == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("pairs", "asked", "made"),
    [(10, 10_000, 10_000), (1000, 10_000, MAX_DRAWS // 1000), (4000, 10_000, MIN_ROUNDS), (4000, 50, 50)],
)
def test_of_many_pairs_fewer_rounds_are_made(
    monkeypatch: pytest.MonkeyPatch, pairs: int, asked: int, made: int
) -> None:
    class Cheap:
        def __init__(self, seed: int) -> None: ...

        def choices(self, values: list[float], k: int) -> list[float]:
            return values[:1] * k

    monkeypatch.setattr("sandbox_exec.figures.random.Random", Cheap)
    assert paired_bootstrap([(0.0, 1.0)] * pairs, seed=1, rounds=asked).rounds == made
