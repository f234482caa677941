from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from boards import board, dispatched, queue_of, run_one, schedule, task, variant

from sandbox_exec.contracts.experiment import Design
from sandbox_exec.contracts.status import Status
from sandbox_exec.errors import InvalidExperiment
from sandbox_exec.schedule.board import Board, Counts

FAILED = Status.AGENT_ERROR
OK = Status.SUCCESS


def test_a_slot_is_counted_where_it_is() -> None:
    b = board("t0", "t1", "t2", "t3", "t4")
    b.start(0)
    b.start(1)
    b.start(2)
    b.finish(0)
    b.commit(0, OK)
    b.finish(1)
    b.skip(4, "no need")
    assert b.counts == Counts(waiting=1, in_flight=1, finished=1, skipped=1, committed=1)
    assert b.in_flight == {2}
    assert b.next_to_commit == 1


def test_an_empty_schedule_is_done() -> None:
    b = board()
    assert b.done
    assert not b.committable
    assert dispatched(b) == []


def test_a_board_is_done_when_the_last_slot_is_committed() -> None:
    b = board("t0", "t1")
    run_one(b, OK)
    assert not b.done
    run_one(b, FAILED)
    assert b.done


def test_only_an_ended_slot_whose_turn_it_is_can_be_committed() -> None:
    b = board("t0", "t1")
    b.start(0)
    b.start(1)
    b.finish(1)
    assert not b.committable
    b.finish(0)
    assert b.committable


def test_slots_start_lowest_first_those_that_were_put_back_too() -> None:
    b = board(*(f"t{n}" for n in range(50)))
    for idx in (7, 3, 30, 0):
        b.start(idx)
    for idx in (30, 7):
        b.requeue(idx, 0.0)
    assert dispatched(b, 0.0) == [idx for idx in range(50) if idx not in (0, 3)]


def test_a_slot_started_from_the_middle_and_put_back_is_ready_once() -> None:
    b = board("t0", "t1", "t2")
    b.start(1)
    b.requeue(1, 5.0)
    assert dispatched(b) == [0, 2]
    assert dispatched(b, 5.0) == [1]
    assert dispatched(b, 5.0) == []


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda b: b.start(0), "slot 0 is committed, not ready"),
        (lambda b: b.start(4), "slot 4 is waiting, not ready"),
        (lambda b: b.finish(2), "slot 2 is ready, not in flight or blocked"),
        (lambda b: b.requeue(2, 0.0), "slot 2 is ready, not in flight or blocked"),
        (lambda b: b.skip(1, "why not"), "slot 1 is in flight, not waiting or ready"),
        (lambda b: b.withdraw(1, "why not"), "slot 1 is in flight, not waiting or ready"),
        (lambda b: b.withdraw(3, "why not"), "slot 3 is finished, not waiting or ready"),
        (lambda b: b.block(1), "slot 1 is in flight, not finished or waiting"),
        (lambda b: b.commit(1, OK), "slot 1 is in flight, not finished or skipped"),
        (lambda b: b.commit(0, OK), "slot 0 is committed, not finished or skipped"),
        (lambda b: b.commit(3, OK), "slot 3 is not next to be committed, 1 is"),
    ],
)
def test_a_step_that_a_slot_cannot_take_is_refused(misuse: Callable[[Board], None], message: str) -> None:
    b = board("t0", "t1", "t2", "t3", task("t4", depends_on=("t1",)))
    run_one(b, OK)
    b.start(1)
    b.start(3)
    b.finish(3)
    with pytest.raises(ValueError, match=message):
        misuse(b)


def test_a_ceiling_above_the_budget_is_an_error_from_the_beginning() -> None:
    with pytest.raises(InvalidExperiment, match=r"a trial may use 11 B .* 10 B: lower sandbox.memory, or raise"):
        board("t0", "t1", memory=11, budget=10)


@pytest.mark.parametrize(
    ("memory", "budget", "most"),
    [(3, 10, 3), (10, 10, 1), (5, 10, 2), (1, 100, 4), (0, 10, 4), (0, 0, 4)],
)
def test_as_many_run_at_once_as_their_ceiling_fits_the_budget(memory: int, budget: int, most: int) -> None:
    b = board("t0", "t1", "t2", "t3", "t4", memory=memory, budget=budget, max_concurrency=4)
    assert b.most_at_once == most
    assert len(dispatched(b)) == most
    b.finish(0)
    assert dispatched(b) == [most]


def test_a_dependency_that_stands_later_is_an_error_from_the_beginning() -> None:
    with pytest.raises(InvalidExperiment, match="task 't0' depends on 't1', which is not scheduled before it"):
        board(task("t0", depends_on=("t1",)), "t1")


def test_a_schedule_with_a_gap_is_refused() -> None:
    slots = schedule([task("t0"), task("t1")], [variant("a")])
    with pytest.raises(ValueError, match="slot 0 of the schedule says that it is 1"):
        Board(
            slots[1:], {"t1": task("t1")}, {"a": variant("a")}, Design(), queue_of([], [variant("a")], Design()), 1, 1
        )


@pytest.mark.parametrize(
    ("statuses", "prune_after", "pruned_at"),
    [
        pytest.param([FAILED, FAILED], 2, 1, id="as many failures as it takes"),
        pytest.param([FAILED, OK, FAILED], 2, None, id="success begins the row anew"),
        pytest.param([FAILED, Status.GRADE_ERROR, FAILED], 2, 2, id="the task's failure does not end the row"),
        pytest.param([FAILED, Status.WORKER_LOST, FAILED], 2, 2, id="nor does the infrastructure's"),
        pytest.param([FAILED, Status.RATE_LIMITED, FAILED], 2, 2, id="nor does the provider's"),
        pytest.param([FAILED, Status.CANCELLED, FAILED], 2, 2, id="nor does a cancelled trial"),
        pytest.param([Status.GRADE_ERROR, Status.SETUP_FAILED], 1, None, id="the task's failures do not count"),
        pytest.param([Status.WORKER_LOST, Status.ENVIRONMENT_ERROR], 1, None, id="nor do the infrastructure's"),
        pytest.param([Status.TASK_TIMEOUT, Status.MEMORY_EXCEEDED], 2, 1, id="all that the agent does counts"),
        pytest.param([FAILED] * 5, None, None, id="not asked for"),
    ],
)
def test_a_row_of_the_agents_failures_prunes_its_variant(
    statuses: list[Status], prune_after: int | None, pruned_at: int | None
) -> None:
    b = board(*(f"t{n}" for n in range(len(statuses) + 1)), prune_after_failures=prune_after)
    pruned = []
    for idx, status in enumerate(statuses):
        b.start(idx)
        b.finish(idx)
        pruned.append(b.commit(idx, status))
    assert pruned == ["a" if idx == pruned_at else None for idx in range(len(statuses))]


def test_variants_are_pruned_apart() -> None:
    b = board("t0", "t1", "t2", variants=[variant("a"), variant("b")], prune_after_failures=2)
    for status in (FAILED, OK, OK, FAILED):
        run_one(b, status)
    assert b.doomed == {}
    b.start(4)
    b.finish(4)
    assert b.commit(4, FAILED) is None
    b.start(5)
    b.finish(5)
    assert b.commit(5, FAILED) == "b"


def test_a_board_made_from_commits_knows_what_they_did() -> None:
    tasks = [
        task("t0"),
        task("t1", chain="c"),
        task("t2", chain="c"),
        task("t3", depends_on=("t0",)),
        task("t4", depends_on=("t1",)),
    ]
    b = board(*tasks, committed=[OK, FAILED])
    assert b.next_to_commit == 2
    assert dispatched(b) == [2, 3]
    assert b.doomed == {4: "it depends on task t1, which ended as agent_error"}


def test_a_board_made_from_commits_knows_the_row_of_failures() -> None:
    b = board("t0", "t1", "t2", "t3", prune_after_failures=2, committed=[OK, FAILED])
    b.start(2)
    b.finish(2)
    assert b.commit(2, FAILED) == "a"


def test_active_trials_count_from_the_beginning() -> None:
    tasks = [task("t0"), task("t1", chain="c"), task("t2", chain="c"), task("t3")]
    b = board(*tasks, variants=[variant("a", 2)], committed=[OK], active=[1])
    assert b.in_flight == {1}
    assert dispatched(b) == [3]  # 2 waits for its chain, and the variant has two
    b.finish(1)
    assert dispatched(b) == [2]


def test_of_adopted_trials_of_a_chain_the_later_may_end_first() -> None:
    b = board(*(task(f"t{n}", chain="c") for n in range(3)), active=[0, 1])
    b.finish(1)
    assert dispatched(b) == []
    b.finish(0)
    assert dispatched(b) == [2]


def test_an_adopted_trial_of_a_chain_that_was_put_back_waits_for_its_time() -> None:
    b = board(*(task(f"t{n}", chain="c") for n in range(2)), active=[0, 1])
    b.requeue(1, 10.0)
    b.finish(0)
    assert dispatched(b, 9.0) == []
    assert dispatched(b, 10.0) == [1]


def test_a_slot_cannot_be_committed_and_active() -> None:
    with pytest.raises(ValueError, match="slot 0 is finished, not waiting"):
        board("t0", committed=[OK], active=[0])


def test_adopted_trials_count_even_where_they_are_more_than_the_limits() -> None:
    b = board("t0", "t1", "t2", "t3", "t4", variants=[variant("a", 1)], max_concurrency=4, active=[0, 1, 2])
    assert dispatched(b) == []
    b.finish(0)
    b.finish(1)
    assert dispatched(b) == []
    b.finish(2)
    assert dispatched(b) == [3]


def test_what_is_pruned_is_forgotten_by_the_queue() -> None:
    variants = [variant("a"), variant("b"), variant("c")]
    b = board(*(f"t{n}" for n in range(50)), variants=variants, prune_after_failures=1, max_concurrency=200)
    run_one(b, FAILED)
    run_one(b, FAILED)
    assert dispatched(b, capacity=200) == list(range(2, 150, 3))


def test_what_skipping_left_of_the_delayed_slots_is_swept_away() -> None:
    b = board(*(f"t{n}" for n in range(200)))
    for idx in range(200):
        b.start(idx)
        b.requeue(idx, float(idx))
    for idx in range(1, 200):
        b.skip(idx, "no need")
    assert b.next_due_s == 0.0
    assert len(b._delayed) <= 2 + 64
    b.skip(0, "no need")
    assert b.next_due_s is None


def test_a_skipped_slot_leaves_its_place_to_another() -> None:
    b = board("t0", "t1", variants=[variant("a", 1)])
    b.skip(0, "no need")
    assert dispatched(b) == [1]


def test_a_slot_costs_well_under_a_kibibyte() -> None:
    count = 10_000
    tasks = [
        task(f"t{n}", chain=f"c{n % 100}" if n % 2 else None, depends_on=(f"t{n - 1}",) if n else ())
        for n in range(count)
    ]
    variants = {"a": variant("a", 3)}
    slots = schedule(tasks, list(variants.values()))
    by_id = {each.id: each for each in tasks}
    queue = queue_of([], list(variants.values()), Design())
    tracemalloc.start()
    try:
        b = Board(slots, by_id, variants, Design(max_concurrency=8), queue, 1, 100)
        per_slot = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    assert b.counts.waiting == count
    assert per_slot < 700  # every slot has a dependency, half a chain; the rest of a KiB is the slot's own
