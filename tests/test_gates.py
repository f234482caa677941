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
    lanes.turned_away("a", 0.0, started_s=0.0, retry_after_s=until_s, jitter_s=0.0)
    return lanes


# serial: first


def test_the_first_go_one_by_one_in_order_and_then_the_rest() -> None:
    b = board(first("f0"), first("f1"), "t0", "t1", variants=[variant("a"), variant("b")])
    for idx in range(4):
        assert dispatched(b) == [idx]
        assert dispatched(b) == []
        b.finish(idx)
    assert dispatched(b) == [4, 5, 6, 7]


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
    b = board(first("f0"), variants=[variant("a"), variant("b")])
    b.skip(1, "one is enough here")
    join(b, "t0", variants=[variant("b")])
    leave(b)
    assert dispatched(b) == [2]


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


def test_a_first_that_is_tried_again_from_the_dead_letters_runs_alone_when_its_turn_has_come() -> None:
    b = board(first("f0"), "t0", "t1", "t2", max_concurrency=2)
    run_one(b, FAILED)
    assert dispatched(b) == [1, 2]
    assert join(b, first("f0"), "t3", repeat=1, repeat_of={4: 0}) == [4, 5]
    b.finish(1)
    assert dispatched(b) == [3]
    b.finish(2)
    assert dispatched(b) == []
    b.finish(3)
    assert dispatched(b) == [4]
    assert dispatched(b) == []
    b.finish(4)
    assert dispatched(b) == [5]


def test_a_first_that_joins_behind_its_chain_does_not_stop_the_run() -> None:
    b = board(first("f0", chain="c"), "t0", task("t1", chain="c"), max_concurrency=1)
    run_one(b, FAILED)
    assert dispatched(b) == [1]
    join(b, first("f0", chain="c"), repeat=1, repeat_of={3: 0})  # from the dead letters, while t1 still waits
    b.finish(1)
    assert to_the_end(b) == [2, 3]


def test_firsts_behind_others_do_not_stop_the_run() -> None:
    b = board("t0")
    join(b, first("f0"), first("f1", depends_on=("f0",)))
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
        task("t0", protocol=high),
        alone("g"),
        order="priority",
        queue=QueueSettings(promote_after_s=20.0),
        max_concurrency=1,
    )
    now_s, started = 0.0, dispatched(b)
    while 1 not in started:
        assert now_s < 25.0, "it starves"
        now_s += 1.0
        join(b, task(f"t{now_s}", protocol=high), submitted_s=now_s)
        b.finish(min(b.in_flight))
        started += dispatched(b, now_s)
    assert len(started) > 10
    assert b.in_flight == {1}


def skip_at_gate(b: Board) -> None:
    b.skip(1, "no need")


def withdraw_at_gate(b: Board) -> None:
    b.withdraw(1, "no need")


def prune_at_gate(b: Board) -> None:
    b.prune("a", "no good")


@pytest.mark.parametrize("leave", [skip_at_gate, withdraw_at_gate, prune_at_gate])
def test_a_global_that_leaves_while_it_waits_at_the_gate_opens_it(leave: Callable[[Board], None]) -> None:
    b = board(alone("g"), "t0", variants=[variant("b"), variant("a")], active=[2])
    b.skip(0, "one is enough here")
    assert dispatched(b) == []
    leave(b)
    assert dispatched(b) == ([] if leave is prune_at_gate else [3])


def test_a_global_that_was_put_back_lets_others_go_on_and_is_alone_again() -> None:
    b = board(alone("g"), "t0", "t1", max_concurrency=1)
    assert dispatched(b) == [0]
    b.requeue(0, 10.0)
    assert dispatched(b, 5.0) == [1]
    assert dispatched(b, 10.0) == []
    b.finish(1)
    assert dispatched(b, 10.0) == [0]
    assert dispatched(b, 10.0) == []
    b.finish(0)
    assert dispatched(b, 10.0) == [2]


def test_a_global_is_at_the_gate_only_when_its_own_turn_has_come() -> None:
    b = board("t0", alone("g", depends_on=("t0",)), task("t1", chain="c"), alone("h", chain="c"), "t2")
    assert dispatched(b) == [0, 2, 4]
    join(b, "t3")
    b.finish(0)
    assert dispatched(b) == [5]  # ended is not committed: g is still to come
    commit(b, OK)
    join(b, "t4")
    assert dispatched(b) == []
    for idx in (2, 4, 5):
        b.finish(idx)
    assert to_the_end(b) == [1, 3, 6]


def test_a_high_global_comes_to_the_gate_before_what_is_lower() -> None:
    b = board("t0", "t1", alone("g", priority=5), order="priority", max_concurrency=2)
    assert dispatched(b) == [2]
    b.finish(2)
    assert dispatched(b) == [0, 1]


def test_a_global_of_a_full_variant_is_passed_and_its_turn_comes_with_the_place() -> None:
    full, other = variant("a", 1), variant("b")
    b = board("t0", variants=[full, other], max_concurrency=3)
    join(b, alone("g"), variants=[full])
    join(b, "t1", "t2", variants=[other])
    assert dispatched(b) == [0, 1, 3]
    b.finish(1)
    assert dispatched(b) == [4]
    b.finish(0)
    assert dispatched(b) == []
    b.finish(3)
    b.finish(4)
    assert dispatched(b) == [2]


def test_a_global_whose_lane_is_closed_is_passed() -> None:
    b = board(alone("g"), "t0", variants=[A, B], max_concurrency=1)
    b.skip(1, "one is enough here")
    lanes = blocked_until(30.0)
    assert decide_with_lanes(b, lanes, 0.0, 100) == Decisions(dispatch=(3,))
    b.finish(3)
    assert decide_with_lanes(b, lanes, 30.0, 100).dispatch == (0,)


def test_a_global_at_the_gate_whose_lane_closes_starts_when_it_opens() -> None:
    b = board(alone("g"), "t0", variants=[A, B], active=[3])
    b.skip(1, "one is enough here")
    lanes = Lanes({"x": LaneSettings()}, [A, B])
    assert decide_with_lanes(b, lanes, 0.0, 100).dispatch == ()
    lanes.turned_away("a", 0.0, started_s=0.0, retry_after_s=30.0, jitter_s=0.0)
    b.finish(3)
    assert decide_with_lanes(b, lanes, 1.0, 100).wake_s == 30.0
    assert 0 in decide_with_lanes(b, lanes, 30.0, 100).dispatch


def test_an_adopted_global_lets_nothing_start_beside_it() -> None:
    b = board("t0", alone("g"), "t1", active=[1])
    assert dispatched(b) == []
    b.finish(1)
    assert dispatched(b) == [0, 2]


def test_a_global_waits_for_adopted_trials() -> None:
    b = board("t0", alone("g"), "t1", active=[0, 2])
    assert dispatched(b) == []
    b.finish(0)
    assert dispatched(b) == []
    b.finish(2)
    assert dispatched(b) == [1]


@pytest.mark.parametrize("ended", [0, 1])
def test_of_two_adopted_globals_one_had_ended_and_the_other_is_still_alone(ended: int) -> None:
    b = board(alone("g0"), alone("g1"), "t0", active=[0, 1])
    b.finish(ended)
    assert dispatched(b) == []
    b.finish(1 - ended)
    assert dispatched(b) == [2]


def test_over_the_duration_what_waits_at_a_gate_is_skipped_in_order() -> None:
    b = board("t0", alone("g"), "t1", max_duration_s=50.0)
    assert dispatched(b) == [0]
    assert dispatched(b) == []
    assert skip_all(b, 50.0) == Decisions(skip=((1, OVER), (2, OVER)))
    b.finish(0)
    assert [commit(b, OK), commit(b, None), commit(b, None)] == [
        Verdict(OK, None),
        *[Verdict(Status.SKIPPED, OVER)] * 2,
    ]
    assert b.done


def test_over_the_duration_firsts_are_skipped_too_and_a_gate_that_waits_wakes_the_run() -> None:
    b = board(first("f0"), first("f1"), "t0", max_duration_s=50.0)
    assert decide(b, 0.0, 100) == Decisions(dispatch=(0,), wake_s=50.0)
    b.requeue(0, 80.0)
    assert decide(b, 1.0, 100) == Decisions(wake_s=50.0)
    assert [idx for idx, _ in skip_all(b, 50.0).skip] == [0, 1, 2]


serials = st.sampled_from([None, None, "global", "first"])


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(serials, st.integers(0, 1)), min_size=1, max_size=12),
    st.lists(st.sampled_from([None, 1, 2]), min_size=2, max_size=2),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_gates_hold_whatever_happens_and_open_again(
    rows: list[tuple[str | None, int]], limits: list[int | None], concurrency: int, seed: int
) -> None:
    """Slots join late, are put back and withdrawn; in the order of the schedule, nothing passes an open global."""
    chance = random.Random(seed)
    variants = [variant("a", limits[0]), variant("b", limits[1])]
    b = board(variants=variants, max_concurrency=concurrency)
    serial = [kind for kind, _ in rows]
    front = next((at for at, kind in enumerate(serial) if kind != "first"), len(serial))
    serial[front:] = ["global" if kind == "first" else kind for kind in serial[front:]]  # as it is for those
    delayed: dict[int, float] = {}
    done: set[int] = set()
    flying: set[int] = set()
    now_s, joined = 0.0, 0
    while joined < len(rows) or not b.done:
        if joined < len(rows) and (b.done or chance.random() < 0.5):
            row = task(f"t{joined}", protocol=TaskProtocol.model_validate({"serial": rows[joined][0]}))
            joined += len(join(b, row, variants=[variants[rows[joined][1]]]))
        waiting = list(b.not_started())
        if waiting and chance.random() < 0.1:
            b.withdraw(chance.choice(waiting), "no need")
        done |= {idx for idx, _ in skip_all(b, now_s).skip}
        delayed = {idx: due_s for idx, due_s in delayed.items() if due_s > now_s}
        for idx in dispatched(b, now_s):
            firsts = [one for one in range(joined) if serial[one] == "first" and one not in done]
            assert not firsts or (firsts[0] == idx and not flying)
            assert not any(serial[one] == "global" for one in flying)
            assert serial[idx] is None or not flying
            load = Counter(rows[one][1] for one in flying)
            for one in range(idx):
                limit = limits[rows[one][1]]
                is_open = limit is None or load[rows[one][1]] < limit
                waits = one not in done | flying | set(delayed)
                assert not (serial[one] == "global" and serial[idx] is None and waits and is_open), "it was passed"
            flying.add(idx)
        assert flying or delayed or joined < len(rows) or b.committable or b.done, "the gate stays shut"
        now_s += 1.0
        if flying:
            idx = chance.choice(sorted(flying))
            flying.remove(idx)
            if chance.random() < 0.2:
                delayed[idx] = now_s + chance.choice([0.0, 2.5])
                b.requeue(idx, delayed[idx])
            else:
                done.add(idx)
                b.finish(idx)
        while b.committable:
            commit(b, OK if b.skip_reason(b.next_to_commit) is None else None)
    assert sorted(done) == list(range(len(rows)))
