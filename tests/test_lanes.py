from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.contracts.queue import WINDOW_S, LaneSettings
from sandbox_exec.contracts.words import AgentSpec, Variant
from sandbox_exec.schedule.lanes import Lane, Lanes

unhurried = settings(deadline=None, max_examples=60)  # a busy machine is no fault of the code

WALL_S = 1_800_000_000.0


def lane_of(**limits: Any) -> Lane:
    return Lane(LaneSettings(**limits))


def variant(name: str, lane: str | None = "p", tokens: int = 0) -> Variant:
    return Variant(id=name, agent=AgentSpec(command=("true",)), lane=lane, tokens_per_trial=tokens)


def opens(lane: Lane, now_s: float, tokens: int = 0) -> float:
    opens_s = lane.opens_s(now_s, tokens)
    assert opens_s is not None
    return opens_s


def starts(lane: Lane, count: int, tokens: int = 0, now_s: float = 0.0) -> list[float]:
    """Start so many, each as early as it may be, and return when."""
    found = []
    for _ in range(count):
        now_s = opens(lane, now_s, tokens)
        assert opens(lane, now_s, tokens) == now_s, "what may start then may not start then"
        lane.start(now_s, tokens)
        found.append(now_s)
    return found


def most_in_a_window(used: list[tuple[float, int]]) -> int:
    """The most of any window that begins with a start, which is the most of any."""
    return max(sum(amount for at_s, amount in used if 0 <= at_s - from_s < WINDOW_S) for from_s, _ in used)


def test_a_lane_without_limits_holds_nothing() -> None:
    assert starts(lane_of(), 100, tokens=10**9, now_s=5.0) == [5.0] * 100


@pytest.mark.parametrize(
    ("limits", "tokens", "expected"),
    [
        ({"rpm": 4}, 0, [0, 15, 30, 45, 60]),
        ({"rpm": 2.5}, 0, [0, 24, 60, 84, 120]),  # 24 seconds apart there would be three in 60
        ({"rpm": 0.5}, 0, [0, 120, 240]),
        ({"tpm": 1000}, 250, [0, 15, 30, 45, 60]),
        ({"tpm": 1000}, 600, [0, 60, 120]),  # 36 seconds apart there would be 1200 in a minute
        ({"tpm": 1000}, 400, [0, 24, 60, 84, 120]),
        ({"tpm": 1000}, 3000, [0, 180, 360]),  # more than a minute has: alone in its window
        ({"tpm": 1000}, 0, [0, 0, 0]),
        ({"min_gap_s": 2.5}, 0, [0, 2.5, 5]),
        ({"rpm": 60, "tpm": 1000, "min_gap_s": 2}, 100, [0, 6, 12]),
        ({"rpm": 4, "tpm": 1000, "min_gap_s": 20}, 100, [0, 20, 40]),
    ],
)
def test_starts_are_as_far_apart_as_the_tightest_limit_says(
    limits: dict[str, Any], tokens: int, expected: list[float]
) -> None:
    assert starts(lane_of(**limits), len(expected), tokens) == expected


def test_time_that_nobody_wanted_cannot_be_had_later() -> None:
    lane = lane_of(rpm=4)
    starts(lane, 1)
    assert starts(lane, 3, now_s=1000.0) == [1000, 1015, 1030]


def test_a_trial_waits_for_its_own_size() -> None:
    lane = lane_of(tpm=1000)
    assert starts(lane, 4, tokens=200) == [0, 12, 24, 36]
    assert [opens(lane, 36, tokens) for tokens in (200, 201, 400, 401, 1000, 5000)] == [48, 60, 60, 72, 96, 96]


def test_at_the_limit_only_an_end_opens_the_lane() -> None:
    lane = lane_of(max_concurrent=2, rpm=60)
    starts(lane, 2)
    assert lane.opens_s(100.0) is None
    lane.end(100.0, estimate=0, started_s=0.0, success=True)
    assert (lane.in_flight, lane.opens_s(100.0)) == (1, 100.0)


def test_what_was_adopted_counts_as_in_flight_and_reserves_nothing() -> None:
    lane = lane_of(max_concurrent=2, rpm=1)
    lane.adopt()
    assert lane.opens_s(0.0) == 0.0
    lane.adopt()
    assert lane.opens_s(0.0) is None


@pytest.mark.parametrize("rpm", [7, 11, 90, 777])
def test_ten_thousand_starts_neither_exceed_the_limit_nor_fall_behind(rpm: int) -> None:
    times_s = starts(lane_of(rpm=rpm), 10_000, now_s=86_400.1)
    assert all(times_s[i + rpm] - times_s[i] >= WINDOW_S for i in range(10_000 - rpm))
    assert times_s[-1] - times_s[0] <= 9_999 * WINDOW_S / rpm * (1 + 1e-9)


@unhurried
@given(
    rpm=st.none() | st.floats(1, 200),
    tpm=st.none() | st.floats(100, 10_000),
    gap_s=st.floats(0, 3),
    begin_s=st.floats(0, 1e6),
    trials=st.lists(st.tuples(st.integers(0, 100), st.floats(0, 3)), min_size=1, max_size=60),
)
def test_no_window_ever_holds_more_than_the_limits(
    rpm: float | None, tpm: float | None, gap_s: float, begin_s: float, trials: list[tuple[int, float]]
) -> None:
    lane = lane_of(rpm=rpm, tpm=tpm, min_gap_s=gap_s)
    now_s = begin_s
    used = []
    for tokens, late_s in trials:
        now_s = opens(lane, now_s, tokens) + max(0.0, late_s - 2)  # most are on time
        lane.start(now_s, tokens)
        used.append((now_s, tokens))
    assert most_in_a_window([(at_s, 1) for at_s, _ in used]) <= (rpm or math.inf)
    assert most_in_a_window(used) <= (tpm or math.inf)


@unhurried
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.none() | st.integers(-100, 3000), st.integers(0, 10), st.floats(0, 30)),
        min_size=1,
        max_size=60,
    )
)
def test_a_trial_starts_only_if_it_fits_with_what_is_known_of_the_window(
    trials: list[tuple[int, int | None, int, float]],
) -> None:
    """Against the plainest log there is."""
    lane = lane_of(tpm=1000)
    log: list[list[Any]] = []  # start, estimate, known use
    now_s = 0.0
    for estimate, claim, of, later_s in trials:
        now_s = opens(lane, now_s, estimate)
        window = [known for at_s, _, known in log if now_s - at_s < WINDOW_S]
        assert sum(window) + estimate <= 1000 or sum(window) == 0
        lane.start(now_s, estimate)
        log.append([now_s, estimate, estimate])
        now_s += later_s
        ended = log[-1 - of % len(log)]
        if claim is not None and ended[1] is not None:
            lane.end(now_s, estimate=ended[1], started_s=ended[0], success=True, tokens=claim)
            ended[1:] = None, max(0, claim)
    quiet_s = max(now_s, log[-1][0] + WINDOW_S) + 600
    assert opens(lane, quiet_s, 1000) == quiet_s


def test_a_use_above_the_estimate_delays_the_next_start() -> None:
    lane = lane_of(tpm=1000)
    starts(lane, 1, tokens=100)
    lane.end(3, estimate=100, started_s=0, success=True, tokens=400)
    assert opens(lane, 3, 100) == 24


def test_a_use_below_the_estimate_gives_back_what_was_reserved() -> None:
    lane = lane_of(tpm=1000)
    assert starts(lane, 2, tokens=500) == [0, 30]
    assert opens(lane, 30, 100) == 60
    lane.end(31, estimate=500, started_s=0, success=True, tokens=100)
    assert opens(lane, 31, 100) == 36


def test_a_use_below_the_estimate_gives_nothing_back_that_held_nobody() -> None:
    lane = lane_of(tpm=1000)
    starts(lane, 1, tokens=500)
    starts(lane, 1, tokens=500, now_s=100)
    lane.end(101, estimate=500, started_s=0, success=True, tokens=0)
    assert opens(lane, 101, 100) == 130


def test_a_trial_counts_as_the_requests_that_it_made() -> None:
    lane = lane_of(rpm=60)
    starts(lane, 1)
    lane.end(0.5, estimate=0, started_s=0, success=True, requests=30)
    assert opens(lane, 0.5) == 30
    lane.start(30)
    lane.end(30, estimate=0, started_s=30, success=True, requests=31)
    assert opens(lane, 30) == 61  # 61 of which 30 leave at 60; and the virtual time is a second later


def test_a_use_above_the_limit_is_alone_in_its_window_and_the_lane_goes_on() -> None:
    lane = lane_of(tpm=1000)
    starts(lane, 1, tokens=100)
    lane.end(1, estimate=100, started_s=0, success=True, tokens=2000)
    assert starts(lane, 2, tokens=100, now_s=1) == [120, 126]


@pytest.mark.parametrize("claim", [10**6, 2**53, 10**400])
def test_a_lie_delays_the_lane_by_ten_minutes_at_most(claim: int) -> None:
    lane = lane_of(tpm=1000, rpm=100)
    for now_s in (0.0, 1.0, 2.0):
        lane.start(now_s, 10)
    for started_s in (0.0, 1.0, 2.0):
        lane.end(5.0, estimate=10, started_s=started_s, success=True, tokens=claim, requests=claim)
    assert 500 < opens(lane, 5.0, 10) <= 605
    json.dumps(lane.snapshot(5.0, WALL_S), allow_nan=False)


def test_a_claim_of_less_than_nothing_is_nothing() -> None:
    lane = lane_of(tpm=1000, rpm=10)
    starts(lane, 1, tokens=500)
    lane.end(1, estimate=500, started_s=0, success=True, tokens=-(10**300), requests=-5)
    assert starts(lane, 3, tokens=1000, now_s=1) == [1, 61, 121]


def test_a_claim_of_less_than_nothing_makes_up_for_no_other() -> None:
    lane = lane_of(tpm=1000)
    assert starts(lane, 2, tokens=100) == [0, 6]
    lane.end(7, estimate=100, started_s=6, success=True, tokens=5100)
    assert opens(lane, 7) == 312
    lane.end(8, estimate=100, started_s=0, success=True, tokens=-(10**6))
    assert opens(lane, 8) == 306


def test_more_given_back_than_can_be_used_now_does_not_make_the_lane_an_idle_one() -> None:
    lane = lane_of(tpm=1000)
    assert starts(lane, 2, tokens=500) == [0, 30]
    lane.end(59, estimate=500, started_s=30, success=True, tokens=0)
    lane.start(59, 500)
    lane.end(60, estimate=500, started_s=0, success=True, tokens=0)
    assert opens(lane, 60, 100) == 60


def test_starts_that_left_the_window_are_forgotten() -> None:
    lane = lane_of(rpm=60, tpm=60_000)
    starts(lane, 5000, tokens=1000)
    assert len(pickle.dumps(lane)) < 20_000


@unhurried
@given(
    estimate=st.integers(0, 1000),
    claim=st.integers(-10, 0),
    ended_after=st.integers(0, 10),
    rest=st.lists(st.integers(0, 1000), min_size=1, max_size=15),
)
def test_a_claim_allows_no_more_than_if_nothing_had_been_reserved(
    estimate: int, claim: int, ended_after: int, rest: list[int]
) -> None:
    def run(reserved: int) -> list[float]:
        lane = lane_of(tpm=1000)
        lane.start(0.0, reserved)
        now_s, found = 0.0, []
        for i, tokens in enumerate(rest):
            now_s = opens(lane, now_s, tokens)
            lane.start(now_s, tokens)
            found.append(now_s)
            if i == ended_after:
                lane.end(now_s, estimate=reserved, started_s=0.0, success=True, tokens=claim)
        return found

    assert all(held >= free - 1e-6 for held, free in zip(run(estimate), run(0), strict=True))


@pytest.mark.parametrize(
    ("retry_after_s", "until_s"), [(30.0, 41.0), (0.0, 11.0), (1e9, 3611.0), (math.inf, 3611.0), (-5.0, 11.0)]
)
def test_a_refusal_blocks_until_the_time_it_names_plus_jitter(retry_after_s: float, until_s: float) -> None:
    lane = lane_of()
    lane.start(5.0)
    lane.turned_away(10.0, started_s=5.0, retry_after_s=retry_after_s, jitter_s=1.0)
    assert lane.opens_s(10.0) == until_s
    assert lane.opens_s(until_s) == until_s


def test_a_later_refusal_never_shortens_a_block() -> None:
    lane = lane_of()
    lane.turned_away(0.0, started_s=0.0, retry_after_s=100)
    lane.turned_away(50.0, started_s=0.0, retry_after_s=5)
    assert lane.opens_s(50.0) == 100


def test_a_burst_of_refusals_halves_once_and_a_later_one_again() -> None:
    lane = lane_of(max_concurrent=20, adaptive=True)
    starts(lane, 20)
    for now_s in range(1, 21):
        lane.turned_away(now_s, started_s=0.0, retry_after_s=0)
    assert lane.limit == 10
    for now_s, expected in ((100, 5), (200, 2), (300, 1), (400, 1)):
        lane.turned_away(now_s, started_s=now_s - 50, retry_after_s=0)
        assert lane.limit == expected


def test_without_adaptive_a_refusal_changes_no_limit() -> None:
    lane = lane_of(max_concurrent=20)
    lane.turned_away(1.0, started_s=0.0, retry_after_s=0)
    assert lane.limit == 20


@pytest.mark.parametrize(
    ("events", "limit"),  # from 8, halved to 4: s success, f failure, r refused (of one that began before)
    [
        ("sss", 4),
        ("ssss", 5),
        ("sssssssss", 6),
        ("sssssssssssssssssssssssssssssssssssssss", 8),
        ("ssfsfs", 5),  # a failure of its own neither counts nor breaks the run
        ("sssrs", 4),
        ("sssrssss", 5),
        ("ffff", 4),
    ],
)
def test_a_round_of_successes_adds_one(events: str, limit: int) -> None:
    lane = lane_of(max_concurrent=8, adaptive=True)
    lane.turned_away(10.0, started_s=1.0, retry_after_s=0)
    for event in events:
        if event == "r":
            lane.turned_away(20.0, started_s=5.0, retry_after_s=0)
        lane.end(20.0, estimate=0, started_s=5.0, success=event == "s")
    assert lane.limit == limit


@unhurried
@given(st.integers(1, 50), st.lists(st.tuples(st.booleans(), st.floats(0, 10)), max_size=200))
def test_the_limit_stays_between_one_and_the_maximum(most: int, events: list[tuple[bool, float]]) -> None:
    lane = lane_of(max_concurrent=most, adaptive=True)
    for i, (refused, before_s) in enumerate(events):
        if refused:
            lane.turned_away(i, started_s=i - before_s, retry_after_s=0)
        lane.end(i, estimate=0, started_s=i - before_s, success=not refused)
        assert lane.limit is not None
        assert 1 <= lane.limit <= most


@unhurried
@given(
    gone_s=st.floats(0, 200),
    trials=st.lists(
        st.tuples(st.integers(0, 400), st.none() | st.integers(0, 2000), st.booleans(), st.floats(0, 20)), max_size=30
    ),
)
def test_a_restored_lane_goes_on_as_the_one_before(
    gone_s: float, trials: list[tuple[int, int | None, bool, float]]
) -> None:
    limits = LaneSettings(rpm=20, tpm=1000, min_gap_s=1, max_concurrent=8, adaptive=True)
    lane = Lane(limits)
    now_s = 1000.0
    for tokens, claim, refused, later_s in trials:
        now_s = opens(lane, now_s, tokens)
        lane.start(now_s, tokens)
        started_s, now_s = now_s, now_s + later_s
        if refused:
            lane.turned_away(now_s, started_s=started_s, retry_after_s=later_s, jitter_s=0.5)
        lane.end(now_s, estimate=tokens, started_s=started_s, success=not refused, tokens=claim)
    other = Lane(limits)
    state = json.loads(json.dumps(lane.snapshot(now_s, WALL_S), allow_nan=False))
    other.restore(state, 7.0, WALL_S + gone_s)
    now_s += gone_s
    assert other.limit == lane.limit
    clock_s, other_clock_s = now_s, 7.0
    for tokens in (0, 300, 1000, 10, 500)[: lane.limit]:
        clock_s = opens(lane, clock_s, tokens)
        other_clock_s = opens(other, other_clock_s, tokens)
        assert other_clock_s - 7.0 == pytest.approx(clock_s - now_s, abs=1e-5)
        lane.start(clock_s, tokens)
        other.start(other_clock_s, tokens)


def test_the_run_of_successes_and_the_last_halving_outlive_a_crash() -> None:
    limits = LaneSettings(max_concurrent=8, adaptive=True)
    lane, other = Lane(limits), Lane(limits)
    lane.turned_away(10.0, started_s=0.0, retry_after_s=0)
    for _ in range(3):
        lane.end(11.0, estimate=0, started_s=10.0, success=True)
    other.restore(lane.snapshot(12.0, WALL_S), 100.0, WALL_S)
    other.end(100.0, estimate=0, started_s=99.0, success=True)
    assert other.limit == 5
    other.turned_away(101.0, started_s=97.0, retry_after_s=0)  # began before that halving, at 98
    assert other.limit == 5


def test_a_wall_clock_that_was_set_back_makes_no_block_longer() -> None:
    lane, other = lane_of(), lane_of()
    lane.turned_away(0.0, started_s=0.0, retry_after_s=50)
    other.restore(lane.snapshot(10.0, WALL_S), 0.0, WALL_S - 86_400)
    assert other.opens_s(0.0) == 40


def test_a_snapshot_of_many_starts_is_small_and_opens_nothing_early() -> None:
    lane, other = lane_of(tpm=100_000), lane_of(tpm=100_000)
    last_s = starts(lane, 7000, tokens=20)[-1]
    state = json.dumps(lane.snapshot(last_s, WALL_S))
    assert len(state) < 5000
    other.restore(json.loads(state), last_s, WALL_S)
    assert other.status(last_s)["tokens_in_window"] == lane.status(last_s)["tokens_in_window"] == 100_000
    for tokens in (20, 1000, 50_000, 100_000):
        assert -1e-6 < opens(other, last_s, tokens) - opens(lane, last_s, tokens) < 1  # by the wall clock's digits


def test_variants_of_a_lane_share_it_and_the_others_do_not_notice() -> None:
    lanes = Lanes(
        {"p": LaneSettings(max_concurrent=1)}, [variant("a"), variant("b"), variant("c", "q"), variant("d", None)]
    )
    assert (lanes.lane_of("a"), lanes.lane_of("d")) == (lanes.lane_of("b"), None)
    lanes.start("a", 0.0)
    lanes.start("d", 0.0)
    assert lanes.closed(0.0) == {"a", "b"}
    assert lanes.opens_s(["a", "b", "c", "d"], 0.0) is None
    lanes.turned_away("c", 1.0, started_s=0.0, retry_after_s=10, jitter_s=0.5)
    assert lanes.closed(1.0) == {"a", "b", "c"}
    assert lanes.opens_s(["a", "c", "d"], 1.0) == 11.5
    assert lanes.opens_s(["a", "d"], 1.0) is None
    lanes.end("a", 2.0, started_s=0.0, success=True)
    lanes.adopt("b")
    assert lanes.closed(12.0) == {"a", "b"}
    lanes.end("b", 13.0, started_s=-100.0, success=True)
    assert lanes.closed(13.0) == set()


def test_the_first_moment_is_that_of_the_smallest() -> None:
    lanes = Lanes({"p": LaneSettings(tpm=1000)}, [variant("small", tokens=100), variant("large", tokens=900)])
    lanes.start("small", 0.0)
    lanes.start("small", 6.0)
    assert lanes.closed(12.0) == {"large"}
    assert lanes.opens_s(["large", "small"], 6.0) == 12
    assert lanes.opens_s(["large", "small"], 12.0) == 60


@pytest.mark.parametrize(
    ("own", "reports", "expected"),
    [
        (500, [], 500),
        (500, [700], 600),  # its own number counts as one
        (0, [700], 700),
        (500, [None, 700, None], 600),
        (500, [500] * 50 + [-(10**300)], 469),
        (500, [10**300], 750),  # no more than a minute has
        (400, [200] * 200, 200),
    ],
)
def test_the_estimate_follows_what_trials_report(own: int, reports: list[int | None], expected: int) -> None:
    lanes = Lanes({"p": LaneSettings(tpm=1000)}, [variant("a", tokens=own), variant("b", tokens=1)])
    for i, tokens in enumerate(reports):
        lanes.start("a", 100.0 * i)
        lanes.end("a", 100.0 * i + 1, started_s=100.0 * i, success=True, tokens=tokens)
    assert (lanes.estimate("a"), lanes.estimate("b")) == (expected, 1)


def test_what_was_reserved_is_corrected_and_not_what_the_estimate_is_now() -> None:
    lanes = Lanes({"p": LaneSettings(tpm=1000)}, [variant("a", tokens=200)])
    for now_s in (0.0, 12.0, 24.0):
        lanes.start("a", now_s)
    for now_s in (0.0, 12.0, 24.0):
        lanes.end("a", 30.0, started_s=now_s, success=True, tokens=100)
    assert lanes.status(30.0)["p"]["tokens_in_window"] == 300


def test_a_start_is_recognised_although_its_time_is_not_quite_the_same() -> None:
    lanes = Lanes({"p": LaneSettings(tpm=1000)}, [variant("a", tokens=200)])
    lanes.start("a", 0.0)
    lanes.start("a", 12.0)
    lanes.end("a", 13.0, started_s=0.02, success=True, tokens=150)
    assert lanes.status(13.0)["p"]["tokens_in_window"] == 350


def test_only_lanes_that_changed_are_stored() -> None:
    lanes = Lanes(
        {"p": LaneSettings(), "q": LaneSettings()}, [variant("a", "p"), variant("b", "q"), variant("c", None)]
    )
    assert lanes.take_changed() == []
    lanes.start("c", 0.0)
    lanes.closed(0.0)
    lanes.adopt("a")
    assert lanes.take_changed() == []
    lanes.start("b", 0.0)
    lanes.end("b", 0.0, started_s=0.0, success=True)
    assert lanes.take_changed() == ["q"]
    lanes.turned_away("a", 0.0, started_s=0.0, retry_after_s=1, jitter_s=0)
    assert (lanes.take_changed(), lanes.take_changed()) == (["p"], [])


def test_estimates_outlive_a_crash() -> None:
    limits, variants = {"p": LaneSettings(tpm=1000)}, [variant("a", tokens=500), variant("b", tokens=7)]
    lanes, other = Lanes(limits, variants), Lanes(limits, variants)
    for _ in range(3):
        lanes.end("a", 0.0, started_s=0.0, success=True, tokens=100)
    other.restore("p", json.loads(json.dumps(lanes.snapshot("p", 0.0, WALL_S))), 0.0, WALL_S)
    assert (other.estimate("a"), other.estimate("b")) == (200, 7)
    for each in (lanes, other):
        each.end("a", 0.0, started_s=0.0, success=True, tokens=100)
    assert other.estimate("a") == lanes.estimate("a") == 180


def test_status_shows_each_lane() -> None:
    lanes = Lanes(
        {"p": LaneSettings(max_concurrent=4, tpm=1000, adaptive=True)}, [variant("a", tokens=300), variant("b")]
    )
    lanes.start("a", 0.0)
    lanes.start("a", 18.0)
    lanes.turned_away("a", 20.0, started_s=18.0, retry_after_s=30, jitter_s=0)
    lanes.end("a", 20.0, started_s=18.0, success=False)
    assert lanes.status(25.0) == {
        "p": {
            "in_flight": 1,
            "limit": 2,
            "max_concurrent": 4,
            "blocked_s": 25.0,
            "opens_in_s": 25.0,
            "starts_in_window": 2,
            "tokens_in_window": 600,
            "turned_away": 1,
            "tokens_per_trial": {"a": 300, "b": 0},
        }
    }
    lanes.start("a", 60.0)
    status = lanes.status(70.0)["p"]
    assert (status["opens_in_s"], status["tokens_in_window"], status["blocked_s"]) == (None, 600, 0.0)
