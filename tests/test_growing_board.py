"""The board while a run goes on: slots join, are withdrawn and blocked; the queue says what next, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
from boards import board, commit, decide, dispatched, first, join, run_one, skip_all, task, variant

from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.contracts.queue import LaneSettings, QueueSettings
from sandbox_exec.contracts.status import Status
from sandbox_exec.contracts.words import Cell, Slot, Task, TaskProtocol
from sandbox_exec.errors import InvalidExperiment, ProtocolFault
from sandbox_exec.schedule.board import Board, Counts
from sandbox_exec.schedule.lanes import Lanes
from sandbox_exec.schedule.queues import Entry, SequentialQueue
from sandbox_exec.schedule.scheduler import OVER, Decisions, Verdict
from sandbox_exec.schedule.scheduler import decide as decide_with_lanes

OK, FAILED = Status.SUCCESS, Status.AGENT_ERROR
T0_FAILED = "it depends on task t0, which ended as agent_error"
EXPERIMENT = Experiment(name="e", tasks=[task("t")], variants=[variant("a")])


def needs(name: str, task_id: str = "late") -> Task:
    return task(task_id, depends_on=(name,))


def skipped(reason: str) -> Verdict:
    return Verdict(Status.SKIPPED, reason)


def rank(task_id: str, priority: int, deadline_s: float | None = None) -> Task:
    return task(task_id, protocol=TaskProtocol(priority=priority, deadline_s=deadline_s))


class Noting(SequentialQueue):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__(EXPERIMENT)
        self.entries: list[Entry] = []

    def put(self, entry: Entry) -> None:
        self.entries.append(entry)
        super().put(entry)


class Scripted(SequentialQueue):
    """Gives what it was told to give, be it true or not."""

    def __init__(self, *gives: int) -> None:
        super().__init__(EXPERIMENT)
        self.gives = list(gives)

    def take(self, now_s: float, closed: Collection[str] = ()) -> int | None:
        return self.gives.pop(0) if self.gives else None


# Slots that join


def test_slots_that_join_stand_after_all_others_and_go_like_them() -> None:
    b = board("t0")
    assert dispatched(b) == [0]
    assert join(b, "t1", "t2") == [1, 2]
    assert b.counts == Counts(waiting=2, in_flight=1, finished=0, skipped=0, committed=0)
    assert dispatched(b) == [1, 2]


def test_a_board_that_was_done_goes_on_when_slots_join() -> None:
    b = board("t0", committed=[OK])
    join(b, "t1")
    assert not b.done
    run_one(b, OK)
    assert b.next_to_commit == 2


def test_a_later_slot_starts_at_once_where_its_dependency_is_committed_as_success() -> None:
    b = board("t0", committed=[OK])
    join(b, needs("t0"))
    assert dispatched(b) == [1]


def test_a_later_slot_is_skipped_where_its_dependency_is_committed_as_something_else() -> None:
    b = board("t0", committed=[FAILED])
    join(b, needs("t0"), needs("late", "later"))
    assert skip_all(b).skip == ((1, T0_FAILED),)
    assert commit(b, None) == skipped(T0_FAILED)
    assert skip_all(b).skip == ((2, "it depends on task late, which ended as skipped"),)


@pytest.mark.parametrize("starts_before", [True, False])
@pytest.mark.parametrize(("status", "starts"), [(OK, [1]), (FAILED, [])])
def test_a_later_slot_waits_for_the_commit_of_a_dependency(
    starts_before: bool, status: Status, starts: list[int]
) -> None:
    b = board("t0")
    if starts_before:
        b.start(0)
    join(b, needs("t0"))
    if not starts_before:
        b.start(0)
    assert dispatched(b) == []
    b.finish(0)
    assert dispatched(b) == []  # ended is not committed
    commit(b, status)
    assert b.doomed == ({} if starts else {1: T0_FAILED})
    assert dispatched(b) == starts


def test_of_several_dependencies_those_that_are_committed_are_not_waited_for() -> None:
    b = board("t0", "t1", committed=[OK])
    join(b, task("late", depends_on=("t0", "t1")))
    assert dispatched(b) == [1]
    b.finish(1)
    commit(b, OK)
    assert dispatched(b) == [2]


def test_a_later_slot_may_need_one_that_joins_with_it() -> None:
    b = board()
    join(b, "t0", needs("t0"))
    assert dispatched(b) == [0]
    b.finish(0)
    commit(b, OK)
    assert dispatched(b) == [1]


def test_a_later_slot_needs_those_of_its_own_variant_and_repeat() -> None:
    variants = [variant("a"), variant("b")]
    b = board("t0", variants=variants, committed=[OK, FAILED])
    join(b, needs("t0"), variants=variants)
    assert dispatched(b) == [2]
    assert list(b.doomed) == [3]


@pytest.mark.parametrize(("stands_for", "starts"), [(0, []), (1, [4])])
def test_a_slot_that_is_tried_again_needs_what_the_first_try_needed(stands_for: int, starts: list[int]) -> None:
    b = board("t0", needs("t0"), repeats=2, committed=[FAILED, OK, Status.SKIPPED, FAILED])
    join(b, needs("t0"), repeat=2, repeat_of={4: stands_for})
    assert dispatched(b) == starts


def test_a_dependency_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InvalidExperiment, match="task 'late' depends on 't1', which is not scheduled before it"):
        join(board("t0"), needs("t1"))
    with pytest.raises(InvalidExperiment, match="for variant 'a' and repeat 7"):
        join(board("t0"), needs("t0"), repeat=7)


def test_slots_that_leave_a_gap_are_refused() -> None:
    with pytest.raises(ValueError, match="slot 1 of the schedule says that it is 2"):
        board("t0").add([Slot(schedule_idx=2, variant_id="a", task_id="t0", repeat=1)], 0.0)


def test_a_chain_goes_on_with_what_joins_it() -> None:
    b = board(task("t0", chain="c"))
    assert dispatched(b) == [0]
    join(b, task("t1", chain="c"), task("t2", chain="c"))
    assert dispatched(b) == []
    b.finish(0)
    assert dispatched(b) == [1]
    b.finish(1)
    assert dispatched(b) == [2]
    b.finish(2)
    join(b, task("t3", chain="c"))
    assert dispatched(b) == [3]


def test_what_joins_for_a_pruned_variant_is_skipped() -> None:
    variants = [variant("a"), variant("b")]
    b = board("t0", variants=variants, prune_after_failures=1, committed=[FAILED, OK])
    join(b, "t1", variants=variants)
    reason = "variant a was pruned after 1 failures in a row"
    assert skip_all(b).skip == ((2, reason),)
    assert commit(b, None) == skipped(reason)
    assert dispatched(b) == [3]


def test_a_later_slot_can_be_pruned() -> None:
    b = board("t0", prune_after_failures=1)
    join(b, "t1")
    run_one(b, FAILED)
    assert list(b.doomed) == [1]


def test_the_queue_learns_when_a_slot_joined_and_by_when_it_should_begin() -> None:
    queue = Noting()
    b = board("t0", rank("t1", 3, deadline_s=5.0), taken_from=queue, start_s=100.0)
    join(b, rank("t2", -1, deadline_s=5.0), submitted_s=140.0)
    assert queue.entries == [
        Entry(0, Cell("a", "t0", 0), 0, 100.0, None),
        Entry(1, Cell("a", "t1", 0), 3, 100.0, 105.0),
        Entry(2, Cell("a", "t2", 0), -1, 140.0, 145.0),
    ]
    assert [b.submitted_s(idx) for idx in range(3)] == [100.0, 100.0, 140.0]
    assert [b.priority(idx) for idx in range(3)] == [0, 3, -1]


def test_a_board_made_again_tells_a_new_queue_the_same() -> None:
    queue = Noting()
    board("t0", rank("t1", 3, deadline_s=5.0), taken_from=queue, start_s=100.0, submitted_s=[90.0, 140.0])
    assert [(entry.submitted_s, entry.deadline_s) for entry in queue.entries] == [(90.0, None), (140.0, 145.0)]


def test_a_further_attempt_comes_to_the_queue_with_the_time_of_its_submission() -> None:
    queue = Noting()
    b = board("t0", taken_from=queue, start_s=100.0)
    b.start(0)
    b.requeue(0, 200.0)
    b.advance(200.0)
    assert queue.entries[0] == queue.entries[1]
    assert len(queue.entries) == 2


# What is withdrawn


def test_a_slot_that_is_withdrawn_is_skipped_for_the_reason_given() -> None:
    b = board("t0", "t1")
    b.withdraw(0, "it was purged")
    assert dispatched(b) == [1]
    assert skip_all(b).skip == ((0, "it was purged"),)
    assert commit(b, None) == skipped("it was purged")


def test_what_needs_a_withdrawn_slot_is_skipped_and_its_chain_goes_on() -> None:
    b = board(task("t0", chain="c"), task("t1", chain="c"), needs("t0"))
    b.withdraw(0, "it was purged")
    skip_all(b)
    assert dispatched(b) == [1]
    commit(b, None)
    assert skip_all(b).skip == ((2, "it depends on task t0, which ended as skipped"),)


def test_a_delayed_slot_that_is_withdrawn_is_not_waited_for() -> None:
    b = board("t0", "t1")
    dispatched(b)
    b.requeue(0, 50.0)
    b.withdraw(0, "it was purged")
    skip_all(b)
    assert decide(b, 0.0, 100) == Decisions()
    assert dispatched(b, 60.0) == []


def test_a_slot_that_waits_for_a_dependency_never_starts_once_it_is_withdrawn() -> None:
    b = board("t0", needs("t0"))
    b.withdraw(1, "it was purged")
    run_one(b, OK)
    assert dispatched(b) == []
    skip_all(b)
    assert commit(b, None) == skipped("it was purged")


def test_the_first_reason_to_withdraw_a_slot_stays() -> None:
    b = board("t0")
    b.withdraw(0, "it was purged")
    b.withdraw(0, "it was displaced")
    assert b.doomed == {0: "it was purged"}


def test_what_follows_from_commits_is_told_before_what_was_asked_for() -> None:
    b = board("t0", needs("t0"))
    b.withdraw(1, "it was purged")
    run_one(b, FAILED)
    skip_all(b)
    assert commit(b, None) == skipped(T0_FAILED)


@pytest.mark.parametrize(
    "withdrawn",
    [
        pytest.param(task("t1"), id="by itself"),
        pytest.param(needs("t0", "t1"), id="its dependency is committed"),
        pytest.param(task("t1", chain="c"), id="it is the next of its chain"),
    ],
)
def test_what_was_withdrawn_stays_so_when_the_board_is_made_again(withdrawn: Task) -> None:
    b = board(task("t0", chain="c"), withdrawn, committed=[OK], withdrawn={1: "it was purged"})
    assert dispatched(b) == []
    skip_all(b)
    assert commit(b, None) == skipped("it was purged")


def test_what_was_withdrawn_and_committed_is_history() -> None:
    b = board("t0", "t1", committed=[Status.SKIPPED], withdrawn={0: "it was purged"})
    assert b.doomed == {}
    assert dispatched(b) == [1]


# What is blocked


def blocked_board(*tasks: Task | str) -> Board:
    """A board on which t0 has failed, and the policy blocks."""
    b = board("t0", *tasks)
    b.start(0)
    b.finish(0)
    b.block(0)
    return b


def test_a_blocked_slot_is_not_committed_and_what_needs_it_waits() -> None:
    b = blocked_board(needs("t0"), "t1")
    assert b.blocked == 0
    assert b.counts == Counts(waiting=2, in_flight=0, finished=0, skipped=0, committed=0, blocked=1)
    assert not b.committable
    assert dispatched(b) == [2]


def test_a_blocked_slot_that_is_retried_can_succeed() -> None:
    b = blocked_board(needs("t0"))
    b.requeue(0, 5.0)
    assert b.blocked is None
    assert decide(b, 0.0, 100) == Decisions(wake_s=5.0)
    assert dispatched(b, 5.0) == [0]
    b.finish(0)
    assert commit(b, OK) == Verdict(OK, None)
    assert dispatched(b, 5.0) == [1]


def test_a_blocked_slot_that_is_given_up_is_committed_as_it_ended() -> None:
    b = blocked_board(needs("t0"))
    b.finish(0)
    assert b.blocked is None
    assert commit(b, FAILED) == Verdict(FAILED, None)
    assert skip_all(b).skip == ((1, T0_FAILED),)


def test_has_dependants_are_those_that_still_wait() -> None:
    b = board("t0", needs("t0"), "t1")
    assert b.has_dependants(0)
    assert not b.has_dependants(2)
    b.skip(1, "no need")
    assert not b.has_dependants(0)
    join(b, needs("t0", "later"))
    assert b.has_dependants(0)


@pytest.mark.parametrize(
    ("meanwhile", "is_stuck"),
    [
        pytest.param(lambda b: None, False, id="something is ready"),
        pytest.param(lambda b: b.start(2), False, id="something is in flight"),
        pytest.param(lambda b: (b.start(2), b.requeue(2, 9.0)), False, id="something is delayed"),
        pytest.param(lambda b: b.withdraw(2, "no need"), False, id="something is to be skipped"),
        pytest.param(lambda b: b.skip(2, "no need"), True, id="something is skipped"),
        pytest.param(lambda b: (b.start(2), b.finish(2)), True, id="something is finished"),
        pytest.param(lambda b: (b.skip(2, "no need"), b.finish(0)), False, id="it was given up"),
        pytest.param(lambda b: (b.skip(2, "no need"), b.requeue(0, 9.0)), False, id="it is retried"),
        pytest.param(lambda b: (b.skip(2, "no need"), join(b, "t2")), False, id="something joins"),
        pytest.param(lambda b: (b.skip(2, "no need"), join(b, needs("t0", "t2"))), True, id="something in vain joins"),
    ],
)
def test_a_board_is_stuck_when_only_what_is_blocked_could_go_on(
    meanwhile: Callable[[Board], object], is_stuck: bool
) -> None:
    b = blocked_board(needs("t0"), "t1")
    meanwhile(b)
    assert b.stuck is is_stuck


def test_a_board_on_which_nothing_is_blocked_is_not_stuck() -> None:
    b = board("t0")
    assert not b.stuck
    run_one(b, FAILED)
    assert not b.stuck


def test_a_board_is_stuck_when_a_first_that_waits_for_what_is_blocked_holds_the_rest() -> None:
    b = board(first("t0"), first("f1", depends_on=("t0",)), "t1")
    assert dispatched(b) == [0]
    b.finish(0)
    b.block(0)
    assert decide(b, 0.0, 100) == Decisions()
    assert b.stuck


@pytest.mark.parametrize(
    "tasks",
    [
        pytest.param(("t0", "t1", needs("t1")), id="by itself"),
        pytest.param(("t0", needs("t0", "t1"), needs("t1")), id="its own dependency is committed"),
        pytest.param((task("t0", chain="c"), task("t1", chain="c"), needs("t1")), id="it was the next of its chain"),
        pytest.param((first("t0"), first("t1"), needs("t1")), id="it was one of the first"),
    ],
)
def test_what_was_blocked_is_so_when_the_board_is_made_again(tasks: tuple[Task | str, ...]) -> None:
    b = board(*tasks, committed=[OK], blocked=1)
    assert b.blocked == 1
    assert b.stuck
    b.requeue(1, 0.0)
    assert dispatched(b) == [1]
    b.finish(1)
    commit(b, OK)
    assert dispatched(b) == [2]


def retried_beside_its_chain(kind: Any) -> Board:
    """Slot 0 was blocked and is tried again; slot 1, the next of its chain, has begun since."""
    b = board(kind("t0", chain="c"), kind("t1", chain="c"), needs("t0"))
    assert dispatched(b) == [0]
    b.finish(0)
    b.block(0)
    assert dispatched(b) == [1]
    b.requeue(0, 0.0)
    assert dispatched(b) == []
    return b


def test_a_blocked_slot_that_is_retried_runs_beside_none_of_its_chain() -> None:
    b = retried_beside_its_chain(task)
    b.finish(1)
    assert dispatched(b) == [0]


@pytest.mark.parametrize("kind", [task, first])
def test_a_blocked_slot_that_is_retried_goes_before_a_further_attempt_at_the_next_of_its_chain(kind: Any) -> None:
    b = retried_beside_its_chain(kind)
    b.requeue(1, 0.0)
    assert dispatched(b) == [0]
    b.finish(0)
    assert dispatched(b) == [1]


def test_after_a_crash_too_a_blocked_slot_that_is_retried_runs_beside_none_of_its_chain() -> None:
    b = board(task("t0", chain="c"), task("t1", chain="c"), needs("t0"), active=[1])
    assert dispatched(b) == []
    b.finish(1)
    assert dispatched(b) == [0]


def test_over_the_duration_what_is_blocked_stays_so() -> None:
    b = board("t0", needs("t0"), max_duration_s=10.0, blocked=0)
    assert skip_all(b, 10.0).skip == ((1, OVER),)
    assert b.stuck


# The queue says stop


def test_after_the_end_all_that_is_not_committed_is_skipped() -> None:
    b = board("t0", "t1", "t2", "t3", needs("t3"), max_concurrency=3)
    assert dispatched(b) == [0, 1, 2]
    b.finish(0)
    b.finish(2)
    commit(b, OK)
    b.end("enough")
    assert b.in_flight == {1}
    assert skip_all(b).skip == ((3, "enough"), (4, "enough"))
    assert dispatched(b) == []
    b.finish(1)
    assert [commit(b, OK), commit(b, FAILED), commit(b, None), commit(b, None)] == [skipped("enough")] * 4
    assert b.done


def test_after_the_end_there_is_no_further_attempt_and_what_was_delayed_is_not_waited_for() -> None:
    b = board("t0", "t1")
    dispatched(b)
    b.requeue(0, 1000.0)
    b.end("enough")
    b.requeue(1, 1000.0)
    assert skip_all(b) == Decisions(skip=((0, "enough"), (1, "enough")))


def test_after_the_end_what_joins_is_skipped_too() -> None:
    b = board("t0", committed=[OK])
    b.end("enough")
    join(b, "t1")
    assert dispatched(b) == []
    skip_all(b)
    assert commit(b, None) == skipped("enough")


def test_after_the_end_what_somebody_asked_to_try_again_is_run() -> None:
    b = board("t0", "t1", committed=[FAILED])
    join(b, "t0", repeat=1, repeat_of={2: 0})
    b.end("enough")
    join(b, "t0", repeat=2, repeat_of={3: 0})
    assert dispatched(b) == [2, 3]
    skip_all(b)
    b.finish(2)
    assert [commit(b, None), commit(b, OK)] == [skipped("enough"), Verdict(OK, None)]


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_a_queue_that_goes_on_again_runs_what_joins_then_and_what_was_skipped_stays_so(concurrency: int) -> None:
    b = board("t0", "t1", "t2", max_concurrency=concurrency)
    for idx in dispatched(b):
        b.finish(idx)
    commit(b, OK)
    b.end("enough")
    b.reopen()
    join(b, "t3")
    skip_all(b)
    ran = concurrency - 1
    assert [commit(b, OK if idx < ran else None) for idx in range(2)] == [skipped("enough")] * 2
    assert run_one(b, OK) == Verdict(OK, None)


def test_a_pruned_variant_is_told_before_the_end() -> None:
    b = board("t0", "t1", prune_after_failures=1)
    run_one(b, FAILED)
    b.end("enough")
    skip_all(b)
    assert commit(b, None) == skipped("variant a was pruned after 1 failures in a row")


# Depth, for who asks how much waits. That it is always right is in the property tests of the scheduler.


def test_depth_is_what_has_not_started_and_may_by_priority() -> None:
    b = board(rank("t0", 1), rank("t1", 1), rank("t2", -1), "t3")
    assert b.depth == {1: 2, -1: 1, 0: 1}
    b.start(0)
    b.withdraw(3, "no need")
    assert b.depth == {1: 1, -1: 1, 0: 0}
    skip_all(b)
    join(b, rank("t4", -1))
    b.requeue(0, 0.0)
    assert b.depth == {1: 2, -1: 2, 0: 0}


# A queue of the user's


@pytest.mark.parametrize(
    ("gives", "wrong"),
    [
        pytest.param((0, 0), 0, id="one twice"),
        pytest.param((-1,), -1, id="one below the schedule"),
        pytest.param((5,), 5, id="one beyond the schedule"),
        pytest.param((2,), 2, id="one whose dependency is not committed"),
        pytest.param((3,), 3, id="one that is skipped"),
        pytest.param((0, 4), 4, id="one of a variant at its limit"),
    ],
)
def test_a_queue_that_gives_what_cannot_start_is_stopped(gives: tuple[int, ...], wrong: int) -> None:
    a, b = variant("a", 1), variant("b")
    one = board("t0", variants=[a, b], taken_from=Scripted(*gives))
    join(one, needs("t0"), variants=[b])
    join(one, "t1", variants=[b])
    join(one, "t2", variants=[a])
    one.skip(3, "no need")
    with pytest.raises(ProtocolFault, match=rf"Scripted\.take gave slot {wrong}, which cannot start now"):
        decide(one, 0.0, 100)


def test_a_queue_that_gives_a_variant_whose_lane_is_closed_is_stopped() -> None:
    a = variant("a", lane="x")
    lanes = Lanes({"x": LaneSettings(max_concurrent=1)}, [a])
    with pytest.raises(ProtocolFault, match="gave slot 1"):
        decide_with_lanes(board("t0", "t1", variants=[a], taken_from=Scripted(0, 1)), lanes, 0.0, 100)


def test_a_queue_may_hold_back_and_choose_as_it_likes() -> None:
    b = board("t0", "t1", "t2", taken_from=Scripted(2, 0))
    assert dispatched(b) == [2, 0]
    assert dispatched(b) == []


# Which next


def test_the_highest_priority_goes_first_and_within_one_the_order_of_the_schedule() -> None:
    b = board("t0", rank("t1", 5), rank("t2", -5), rank("t3", 5), order="priority")
    join(b, rank("t4", 7))
    assert dispatched(b) == [4, 1, 3, 0, 2]


def test_a_dependency_goes_before_what_needs_it_whatever_their_priorities() -> None:
    high = task("t1", depends_on=("t0",), protocol=TaskProtocol(priority=9))
    b = board(rank("t0", -9), high, "t2", order="priority", max_concurrency=1)
    order = []
    while not b.done:
        (idx,) = dispatched(b)
        order.append(idx)
        b.finish(idx)
        while b.committable:
            commit(b, OK)
    assert order == [2, 0, 1]


def test_a_deadline_counts_from_when_the_slot_joined() -> None:
    settings = QueueSettings(urgent_within_s=10.0)
    b = board(rank("t0", 5), rank("t1", 5), order="priority", queue=settings, max_concurrency=1)
    join(b, rank("late", 0, deadline_s=30.0), submitted_s=100.0)
    assert dispatched(b, 119.0) == [0]
    b.finish(0)
    assert dispatched(b, 120.0) == [2]


# Lanes

A, B, C = variant("a", lane="x"), variant("b", lane="y"), variant("c")


def lanes_with_gaps() -> Lanes:
    return Lanes({"x": LaneSettings(min_gap_s=10.0), "y": LaneSettings(min_gap_s=4.0)}, [A, B, C])


def test_a_closed_lane_holds_back_its_own_variants_and_no_other() -> None:
    b = board("t0", "t1", variants=[A, B, C])
    lanes = lanes_with_gaps()
    assert decide_with_lanes(b, lanes, 0.0, 100) == Decisions(dispatch=(0, 1, 2, 5), wake_s=4.0)
    assert decide_with_lanes(b, lanes, 4.0, 100) == Decisions(dispatch=(4,), wake_s=10.0)
    assert decide_with_lanes(b, lanes, 10.0, 100) == Decisions(dispatch=(3,))


def test_a_lane_wakes_nobody_while_none_of_its_variants_has_anything_ready() -> None:
    b = board("t0", needs("t0"), variants=[A])
    lanes = lanes_with_gaps()
    assert decide_with_lanes(b, lanes, 0.0, 100) == Decisions(dispatch=(0,))
    assert list(b.ready_variants()) == []
    b.finish(0)
    commit(b, OK)
    assert list(b.ready_variants()) == ["a"]
    assert decide_with_lanes(b, lanes, 1.0, 100) == Decisions(wake_s=10.0)


def test_a_lane_at_its_most_in_flight_is_opened_by_an_end_and_not_by_the_clock() -> None:
    b = board("t0", "t1", variants=[A])
    lanes = Lanes({"x": LaneSettings(max_concurrent=1)}, [A])
    assert decide_with_lanes(b, lanes, 0.0, 100) == Decisions(dispatch=(0,))
    lanes.end("a", 5.0, started_s=0.0, success=True)
    b.finish(0)
    assert decide_with_lanes(b, lanes, 5.0, 100) == Decisions(dispatch=(1,))


def test_variants_of_one_lane_share_it() -> None:
    shared = [variant("a", lane="x"), variant("b", lane="x")]
    b = board("t0", variants=shared)
    lanes = Lanes({"x": LaneSettings(min_gap_s=10.0)}, shared)
    assert decide_with_lanes(b, lanes, 0.0, 100) == Decisions(dispatch=(0,), wake_s=10.0)
    assert decide_with_lanes(b, lanes, 10.0, 100) == Decisions(dispatch=(1,))


def test_without_a_place_no_lane_is_used() -> None:
    b = board("t0", "t1", variants=[A], max_concurrency=1)
    lanes = lanes_with_gaps()
    assert decide_with_lanes(b, lanes, 0.0, 100).dispatch == (0,)
    assert decide_with_lanes(b, lanes, 50.0, 100) == Decisions()
    b.finish(0)
    assert decide_with_lanes(b, lanes, 51.0, 100).dispatch == (1,)


def test_a_delay_that_ends_before_a_lane_opens_wakes_first() -> None:
    b = board("t0", "t1", variants=[A, C])
    lanes = lanes_with_gaps()
    assert decide_with_lanes(b, lanes, 0.0, 100).dispatch == (0, 1, 3)
    b.requeue(1, 6.0)
    assert decide_with_lanes(b, lanes, 1.0, 100).wake_s == 6.0
    b.advance(6.0)
    assert decide_with_lanes(b, lanes, 6.0, 100) == Decisions(dispatch=(1,), wake_s=10.0)
