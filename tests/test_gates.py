"""The gates: `serial: first` and `serial: global`, by tables and by chance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from boards import alone, board, commit, decide, dispatched, first, join, run_one, skip_all, task, variant
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.contracts.queue import LaneSettings, QueueSettings
from sandbox_exec.contracts.status import Status
from sandbox_exec.contracts.words import TaskProtocol
from sandbox_exec.schedule.board import Board
from sandbox_exec.schedule.lanes import Lanes
from sandbox_exec.schedule.scheduler import OVER, Decisions, Verdict
from sandbox_exec.schedule.scheduler import decide as decide_with_lanes

OK, FAILED = Status.SUCCESS, Status.AGENT_ERROR
A, B = variant("a", lane="x"), variant("b")


def blocked_until(until_s: float) -> Lanes:
    """Lanes of which x, that of variant a, is closed until then."""
    lanes = Lanes({"x": LaneSettings()}, [A, B])
    close(lanes, until_s)
    return lanes


def close(lanes: Lanes, until_s: float) -> None:
    lanes.turned_away("a", 0.0, started_s=0.0, retry_after_s=until_s, jitter_s=0.0)


# serial: first


def test_the_first_go_one_by_one_in_order_and_then_the_rest() -> None:
    b = board(first("f0"), first("f1"), "t0", "t1", variants=[variant("a"), variant("b")])
    for idx in range(4):
        assert dispatched(b) == [idx]
        assert dispatched(b) == []
        b.finish(idx)
    assert dispatched(b) == [4, 5, 6, 7]


def test_the_first_go_before_others_wherever_they_stand() -> None:
    b = board("t0", first("f0"), "t1", first("f1"))
    order = []
    for _ in range(2):
        started = dispatched(b)
        order += started
        b.finish(started[0])
    assert order == [1, 3]
    assert dispatched(b) == [0, 2]


def test_the_further_attempt_of_a_first_is_waited_for() -> None:
    b = board(first("f0"), first("f1"), "t0")
    assert dispatched(b) == [0]
    b.requeue(0, 10.0)
    assert decide(b, 9.0, 100) == Decisions(wake_s=10.0)
    assert dispatched(b, 10.0) == [0]


def test_a_first_that_needs_another_waits_for_its_commit_and_nobody_slips_in() -> None:
    b = board(first("f0"), first("f1", depends_on=("f0",)), "t0")
    assert dispatched(b) == [0]
    b.finish(0)
    assert dispatched(b) == []
    commit(b, OK)
    assert dispatched(b) == [1]


def skip_it(b: Board) -> None:
    b.skip(0, "no need")


def withdraw_it(b: Board) -> None:
    b.withdraw(0, "no need")
    skip_all(b)


def prune_it(b: Board) -> None:
    b.prune("a", "no good")
    skip_all(b)


def run_and_prune_it(b: Board) -> None:
    assert dispatched(b) == [0]
    b.prune("a", "no good")
    b.requeue(0, 1000.0)
    skip_all(b)


def finish_it(b: Board) -> None:
    assert dispatched(b) == [0]
    b.finish(0)


@pytest.mark.parametrize("leave", [skip_it, withdraw_it, prune_it, run_and_prune_it, finish_it])
def test_a_first_that_leaves_opens_the_gate(leave: Callable[[Board], None]) -> None:
    b = board(first("f0"), "t0", variants=[variant("a")])
    join(b, "t1", variants=[variant("a")])
    b = board(first("f0"), "t0", variants=[variant("a"), variant("b")])
    b.withdraw(1, "one is enough here")
    skip_all(b)
    leave(b)
    assert 3 in dispatched(b)


def test_a_first_that_is_doomed_and_not_yet_skipped_keeps_the_gate_shut() -> None:
    b = board(first("f0"), first("f1"), "t0")
    b.withdraw(0, "no need")
    assert decide(b, 0.0, 100) == Decisions(skip=((0, "no need"),))
    b.skip(0, "no need")
    assert dispatched(b) == [1]


def test_a_first_whose_dependency_failed_is_skipped_and_the_rest_begins() -> None:
    b = board(first("f0"), first("f1", depends_on=("f0",)), "t0")
    run_one(b, FAILED)
    assert [idx for idx, _ in skip_all(b).skip] == [1]
    assert dispatched(b) == [2]


def test_a_first_whose_lane_is_closed_holds_all_lanes_until_it_opens() -> None:
    b = board(first("f0"), "t0", variants=[A, B])
    lanes = blocked_until(30.0)
    assert decide_with_lanes(b, lanes, 0.0, 100) == Decisions(wake_s=30.0)
    assert decide_with_lanes(b, lanes, 30.0, 100).dispatch == (0,)


def test_a_first_waits_for_adopted_trials_and_they_for_nobody() -> None:
    b = board(first("f0"), "t0", "t1", active=[1])
    assert dispatched(b) == []
    b.finish(1)
    assert dispatched(b) == [0]


def test_an_adopted_first_holds_the_others() -> None:
    b = board(first("f0"), first("f1"), "t0", active=[0])
    assert dispatched(b) == []
    b.finish(0)
    assert dispatched(b) == [1]


def test_committed_firsts_hold_nobody() -> None:
    assert dispatched(board(first("f0"), first("f1"), "t0", committed=[OK, FAILED])) == [2]


def test_a_first_that_is_tried_again_from_the_dead_letters_holds_the_others_again() -> None:
    b = board(first("f0"), "t0", "t1", max_concurrency=1)
    run_one(b, FAILED)
    assert dispatched(b) == [1]
    assert join(b, first("f0"), repeat=1, repeat_of={3: 0}) == [3]
    b.finish(1)
    assert dispatched(b) == [3]
    b.finish(3)
    assert dispatched(b) == [2]


def test_a_first_that_joins_behind_its_chain_does_not_stop_the_run() -> None:
    b = board(first("f0", chain="c"), "t0", task("t1", chain="c"), max_concurrency=1)
    run_one(b, FAILED)
    assert dispatched(b) == [1]
    join(b, first("f0", chain="c"), repeat=1, repeat_of={3: 0})  # from the dead letters, while t1 still waits
    b.finish(1)
    assert to_the_end(b) == [2, 3]


def test_a_first_that_needs_what_is_behind_others_does_not_stop_the_run() -> None:
    b = board("t0")
    join(b, first("f0"), first("f1", depends_on=("f0",)))  # a queue of the user's may order them so
    assert sorted(to_the_end(b)) == [0, 1, 2]


def to_the_end(b: Board) -> list[int]:
    """Run what is left, each to success, and return the order of the starts."""
    order: list[int] = []
    while not b.done:
        started = dispatched(b)
        assert started or b.in_flight or b.committable, f"stuck after {order}"
        order += started
        for idx in sorted(b.in_flight):
            b.finish(idx)
        while b.committable:
            commit(b, OK)
    return order


# serial: global


def test_a_global_runs_alone() -> None:
    b = board("t0", alone("g"), "t1", "t2")
    assert dispatched(b) == [0]
    b.finish(0)
    assert dispatched(b) == [1]
    assert dispatched(b) == []
    b.finish(1)
    assert dispatched(b) == [2, 3]


def test_a_global_waits_until_the_last_has_ended() -> None:
    b = board("t0", "t1", alone("g"))
    assert dispatched(b) == [0, 1]
    b.finish(1)
    assert dispatched(b) == []
    b.finish(0)
    assert dispatched(b) == [2]


def test_globals_go_one_after_the_other() -> None:
    b = board(alone("g0"), alone("g1"), "t0")
    for idx in (0, 1, 2):
        assert dispatched(b) == [idx]
        b.finish(idx)


def test_a_global_does_not_starve_when_others_keep_coming() -> None:
    b = board("t0", alone("g"))
    assert dispatched(b) == [0]
    for n in range(1, 20):
        join(b, f"t{n}")
        assert dispatched(b) == []
    b.finish(0)
    assert dispatched(b) == [1]


def test_a_low_global_is_promoted_past_the_higher_ones_that_keep_coming() -> None:
    high = TaskProtocol(priority=10)
    b = board(
        task("t0", protocol=high), alone("g"), order="priority", max_concurrency=2, queue=None,
        **{"queue_settings": None} if False else {},
    )  # fmt: skip
    assert b
    b = board_of_priorities(task("t0", protocol=high), alone("g"))
    flying = dispatched(b)
    now_s, started = 0.0, list(flying)
    while 1 not in started:
        assert now_s < 60.0, "it starves"
        now_s += 1.0
        join(b, task(f"t{now_s}", protocol=high), submitted_s=now_s)
        b.finish(min(b.in_flight))
        started += dispatched(b, now_s)
    assert b.in_flight == {1}


def board_of_priorities(*tasks: object) -> Board:
    raise NotImplementedError


def requeue_it(b: Board) -> None:
    b.withdraw(1, "no need")


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(lambda b: b.withdraw(1, "no need"), id="withdrawn"),
        pytest.param(lambda b: b.skip(1, "no need"), id="skipped"),
        pytest.param(lambda b: b.prune("a", "no good"), id="pruned"),
        pytest.param(lambda b: b.end("enough"), id="ended"),
    ],
)
def test_a_global_that_leaves_while_it_waits_at_the_gate_opens_it(leave: Callable[[Board], None]) -> None:
    b = board("t0", alone("g"), "t1", variants=[variant("a")])
    assert dispatched(b) == [0]
    assert dispatched(b) == []
    leave(b)
    join(b, "t2", variants=[variant("a")])
    skip_all(b)
    pending = set(b.not_started())
    assert set(dispatched(b)) == pending
