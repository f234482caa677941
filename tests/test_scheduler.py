from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import pytest
from boards import board, commit, decide, dispatched, queue_of, run_one, schedule, skip_all, task, variant
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.contracts.experiment import Design
from sandbox_exec.contracts.status import Blame, Status
from sandbox_exec.contracts.words import Slot, Task, TaskProtocol, Variant
from sandbox_exec.schedule.board import Board, Counts
from sandbox_exec.schedule.retries import RetryPolicy
from sandbox_exec.schedule.scheduler import Decisions, Verdict, verdict_at_commit

unhurried = settings(deadline=None)  # a busy machine is no fault of the code

OK, FAILED = Status.SUCCESS, Status.AGENT_ERROR


def test_no_more_are_in_flight_than_max_concurrency() -> None:
    b = board("t0", "t1", "t2", "t3", max_concurrency=2)
    assert dispatched(b) == [0, 1]
    assert dispatched(b) == []
    b.finish(1)
    assert dispatched(b) == [2]


def test_a_finished_slot_that_waits_for_its_commit_takes_no_place() -> None:
    b = board("t0", "t1", "t2", max_concurrency=1)
    assert dispatched(b) == [0]
    b.finish(0)
    assert dispatched(b) == [1]


def test_a_backend_with_less_capacity_is_obeyed_with_a_warning_shown_once() -> None:
    b = board("t0", "t1", "t2", max_concurrency=3)
    decisions = decide(b, 0.0, capacity=2)
    assert decisions.dispatch == (0, 1)
    assert decisions.warnings == ("max_concurrency is 3, but the backend runs 2 trials at once: 2 it is",)
    b.capacity_warned = True
    assert decide(b, 0.0, capacity=2).warnings == ()


@pytest.mark.parametrize("capacity", [3, 4])
def test_a_backend_with_enough_capacity_is_no_reason_to_warn(capacity: int) -> None:
    assert decide(board("t0", max_concurrency=3), 0.0, capacity).warnings == ()


def test_a_backend_without_capacity_gets_nothing() -> None:
    assert decide(board("t0"), 0.0, 0).dispatch == ()


def test_a_variant_has_no_more_in_flight_than_its_own_limit_and_holds_up_no_other() -> None:
    b = board("t0", "t1", "t2", variants=[variant("a", 1), variant("b")])
    assert dispatched(b) == [0, 1, 3, 5]
    b.finish(0)
    assert dispatched(b) == [2]


def test_a_slot_put_back_gives_its_variants_place_to_another() -> None:
    b = board("t0", "t1", "t2", variants=[variant("a", 1)])
    assert dispatched(b) == [0]
    b.requeue(0, 10.0)
    assert dispatched(b) == [1]
    assert dispatched(b, 10.0) == []
    b.finish(1)
    assert dispatched(b, 10.0) == [0]


def test_a_chain_runs_one_at_a_time_and_in_order() -> None:
    b = board(task("t0", chain="c"), task("t1"), task("t2", chain="c"), task("t3", chain="c"))
    assert dispatched(b) == [0, 1]
    b.finish(0)
    assert dispatched(b) == [2]
    b.finish(2)
    assert dispatched(b) == [3]


def test_a_chain_waits_for_the_further_attempt_of_its_first() -> None:
    b = board(task("t0", chain="c"), task("t1", chain="c"))
    assert dispatched(b) == [0]
    b.requeue(0, 10.0)
    assert dispatched(b, 9.0) == []
    assert dispatched(b, 10.0) == [0]


def test_a_chain_is_each_variants_own() -> None:
    b = board(task("t0", chain="c"), task("t1", chain="c"), variants=[variant("a"), variant("b")])
    assert dispatched(b) == [0, 1]
    b.finish(1)
    assert dispatched(b) == [3]


def test_a_chain_goes_on_after_a_skipped_slot() -> None:
    b = board("t0", task("t1", chain="c", depends_on=("t0",)), task("t2", chain="c"))
    run_one(b, FAILED)
    assert dispatched(b) == []
    skip_all(b)
    assert dispatched(b) == [2]


def test_what_is_decided_is_started() -> None:
    b = board("t0", "t1", max_concurrency=1)
    assert decide(b, 0.0, 9).dispatch == (0,)
    assert b.in_flight == {0}
    assert decide(b, 0.0, 9).dispatch == ()


def test_a_slot_is_not_started_before_its_time() -> None:
    b = board("t0", "t1")
    assert dispatched(b) == [0, 1]
    b.requeue(0, 12.0)
    b.requeue(1, 11.0)
    assert decide(b, 10.0, 100) == Decisions(wake_s=11.0)
    assert dispatched(b, 11.0) == [1]
    assert decide(b, 11.0, 100) == Decisions(wake_s=12.0)
    assert dispatched(b, 12.0) == [0]


def test_to_decide_on_a_board_that_is_behind_is_an_error() -> None:
    b = board("t0")
    b.start(0)
    b.requeue(0, 5.0)
    with pytest.raises(ValueError, match=r"was due at 5\.0: call board\.advance\(6\.0\) first"):
        decide(b, 6.0, 9)


def test_a_slot_starts_when_its_dependencies_are_committed_for_its_variant_and_repeat() -> None:
    b = board("t0", task("t1", depends_on=("t0",)), variants=[variant("a"), variant("b")], repeats=2)
    assert dispatched(b) == [0, 1, 2, 3]
    for idx in (1, 2, 3):
        b.finish(idx)
    assert dispatched(b) == []  # ended is not committed
    b.finish(0)
    started = []
    for _ in range(4):
        commit(b, OK)
        started.append(dispatched(b))
    assert started == [[4], [5], [6], [7]]


def test_a_slot_starts_only_when_all_of_its_dependencies_are_committed() -> None:
    b = board("t0", "t1", task("t2", depends_on=("t1", "t0")))
    run_one(b, OK)
    assert dispatched(b) == [1]
    b.finish(1)
    commit(b, OK)
    assert dispatched(b) == [2]


@pytest.mark.parametrize("status", [status for status in Status if status is not OK])
def test_dependants_of_what_did_not_succeed_are_skipped_and_theirs_too(status: Status) -> None:
    b = board("t0", task("t1", depends_on=("t0",)), task("t2", depends_on=("t1",)), "t3")
    run_one(b, status)
    assert skip_all(b).skip == ((1, f"it depends on task t0, which ended as {status}"),)
    assert commit(b, None) == Verdict(Status.SKIPPED, f"it depends on task t0, which ended as {status}")
    assert skip_all(b).skip == ((2, "it depends on task t1, which ended as skipped"),)
    commit(b, None)
    assert run_one(b, OK) == Verdict(OK, None)


def test_a_failed_dependency_skips_in_its_own_variant_and_repeat_only() -> None:
    b = board("t0", task("t1", depends_on=("t0",)), variants=[variant("a"), variant("b")], repeats=2)
    for status in (OK, FAILED, OK, OK):
        run_one(b, status)
    assert [idx for idx, _ in skip_all(b).skip] == [5]
    assert dispatched(b) == [4, 6, 7]


PRUNED = "variant a was pruned after 2 failures in a row"


def test_the_waiting_slots_of_a_pruned_variant_are_skipped() -> None:
    b = board("t0", "t1", "t2", "t3", variants=[variant("a"), variant("b")], prune_after_failures=2)
    for status in (FAILED, OK, FAILED):
        run_one(b, status)
    assert skip_all(b).skip == ((4, PRUNED), (6, PRUNED))
    run_one(b, OK)
    assert commit(b, None) == Verdict(Status.SKIPPED, PRUNED)
    assert dispatched(b) == [5, 7]


def test_a_pruned_variants_trials_in_flight_finish_and_are_committed_as_skipped() -> None:
    b = board("t0", "t1", "t2", "t3", "t4", prune_after_failures=2, max_concurrency=4)
    assert dispatched(b) == [0, 1, 2, 3]
    for idx in (3, 1, 0):
        b.finish(idx)
    commit(b, FAILED)
    commit(b, FAILED)
    assert skip_all(b).skip == ((4, PRUNED),)
    assert b.in_flight == {2}
    b.finish(2)
    assert [commit(b, OK), commit(b, OK), commit(b, None)] == [Verdict(Status.SKIPPED, PRUNED)] * 3


def test_a_pruned_variants_trial_in_flight_gets_no_further_attempt() -> None:
    b = board("t0", "t1", "t2", prune_after_failures=2)
    dispatched(b)
    for idx in (0, 1):
        b.finish(idx)
        commit(b, FAILED)
    b.requeue(2, 5.0)
    assert skip_all(b) == Decisions(skip=((2, PRUNED),))


def test_a_pruned_variants_delayed_slot_is_not_waited_for() -> None:
    b = board("t0", "t1", prune_after_failures=1)
    dispatched(b)
    b.requeue(1, 1000.0)
    b.finish(0)
    commit(b, FAILED)
    decisions = skip_all(b)
    assert [idx for idx, _ in decisions.skip] == [1]
    assert decisions.wake_s is None


@pytest.mark.parametrize("skip_at_once", [True, False])
def test_of_two_reasons_to_skip_a_slot_pruning_is_told_whichever_was_known_first(skip_at_once: bool) -> None:
    b = board("t0", "t1", task("t2", depends_on=("t0",)), prune_after_failures=2)
    run_one(b, FAILED)
    if skip_at_once:
        skip_all(b)
    run_one(b, FAILED)
    skip_all(b)
    assert commit(b, None) == Verdict(Status.SKIPPED, PRUNED)


def test_of_several_failed_dependencies_the_tasks_first_is_told() -> None:
    b = board("t0", "t1", task("t2", depends_on=("t1", "t0")))
    run_one(b, FAILED)
    skip_all(b)
    run_one(b, Status.TASK_TIMEOUT)
    assert commit(b, None).reason == "it depends on task t1, which ended as task_timeout"


def test_after_its_duration_a_run_starts_nothing_and_skips_what_waits_in_order() -> None:
    tasks = [task("t0"), task("t1"), task("t2", depends_on=("t0",)), task("t3", chain="c"), task("t4", chain="c")]
    b = board(*tasks, start_s=100.0, max_duration_s=50.0, max_concurrency=2)
    assert dispatched(b, 100.0) == [0, 1]
    b.requeue(1, 500.0)
    assert decide(b, 149.0, 1).wake_s == 150.0
    decisions = skip_all(b, 150.0)
    assert decisions.dispatch == ()
    assert decisions.skip == tuple((idx, "the run is over its duration") for idx in (1, 2, 3, 4))
    assert decisions.wake_s is None
    assert skip_all(b, 151.0) == Decisions()
    b.finish(0)
    assert commit(b, OK) == Verdict(OK, None)
    for _ in range(4):
        assert commit(b, None) == Verdict(Status.SKIPPED, "the run is over its duration")
    assert b.done


def test_a_duration_wakes_as_long_as_something_waits_or_is_in_flight() -> None:
    b = board("t0", "t1", max_duration_s=50.0, max_concurrency=1)
    assert decide(b, 0.0, 9) == Decisions(dispatch=(0,), wake_s=50.0)
    b.finish(0)
    assert decide(b, 0.0, 9) == Decisions(dispatch=(1,), wake_s=50.0)
    assert decide(b, 0.0, 9) == Decisions(wake_s=50.0)
    b.finish(1)
    assert decide(b, 0.0, 9) == Decisions()


def test_a_verdict_is_given_only_when_it_is_the_slots_turn() -> None:
    b = board("t0", "t1")
    dispatched(b)
    b.finish(1)
    for idx in (0, 1):
        with pytest.raises(ValueError, match="cannot be committed now"):
            verdict_at_commit(b, idx, OK)
    b.finish(0)
    with pytest.raises(ValueError, match="was run"):
        verdict_at_commit(b, 0, None)


# The property tests: a run of a made-up experiment, whose slots end as a script says, in an order and at a
# concurrency of chance, with crashes, tasks that join later, and purges; every step is checked against rules that are
# written out again here.

POLICY = RetryPolicy(infra_retries=2)
PURGED = "it was purged"


@dataclass(frozen=True)
class Case:
    """An experiment, and how each attempt of each slot ends; beyond its script, a slot succeeds."""

    tasks: tuple[Task, ...]
    begins_with: int  # how many of the tasks are there from the beginning; the others join one by one
    variants: tuple[Variant, ...]
    repeats: int
    order: str
    memory: int
    budget: int
    prune_after: int | None
    scripts: tuple[tuple[Status, ...], ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return schedule(self.tasks, self.variants, self.repeats)

    def task_of(self, slot: Slot) -> Task:
        return next(each for each in self.tasks if each.id == slot.task_id)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 7))
    begins_with = draw(st.integers(1, count))
    firsts = draw(st.sampled_from([0, 0, 1, 2, 3]))
    ids = [f"t{n}" for n in range(count)]
    tasks = tuple(
        task(
            ids[n],
            depends_on=tuple(draw(st.lists(st.sampled_from(ids[:n]), max_size=2, unique=True))) if n else (),
            chain=draw(st.sampled_from([None, None, "c", "d"])),
            protocol=TaskProtocol(
                timeout_action=draw(st.sampled_from(["skip", "retry", "extend"])),
                max_retries=draw(st.integers(0, 2)),
                priority=draw(st.integers(-1, 1)),
                deadline_s=draw(st.sampled_from([None, None, 1.0, 100.0])),
                serial="first" if n < min(firsts, begins_with) else draw(st.sampled_from([None, None, None, "global"])),
            ),
        )
        for n in range(count)
    )
    limits = draw(st.lists(st.sampled_from([None, 1, 2]), min_size=1, max_size=3))
    variants = tuple(variant(f"v{n}", limit) for n, limit in enumerate(limits))
    repeats = draw(st.integers(1, 2))
    memory = draw(st.integers(0, 4))
    status = st.sampled_from([OK, OK, FAILED, FAILED, Status.TASK_TIMEOUT, *Status])
    slots = count * len(variants) * repeats
    return Case(
        tasks=tasks,
        begins_with=begins_with,
        variants=variants,
        repeats=repeats,
        order=draw(st.sampled_from(["sequential", "priority"])),
        memory=memory,
        budget=draw(st.integers(memory, 12)),
        prune_after=draw(st.sampled_from([None, 1, 2, 3])),
        scripts=tuple(
            tuple(each) for each in draw(st.lists(st.lists(status, max_size=4), min_size=slots, max_size=slots))
        ),
    )


class Committed(NamedTuple):
    idx: int
    status: Status
    reason: str | None


def model(
    case: Case, purged: Collection[int] = (), decided: Mapping[int, Status] = MappingProxyType({})
) -> list[Committed]:
    """The history by the plainest reading of the rules: one slot after the other.

    What people did while the run went on is given: which slots they purged, and as what they let blocked ones end.
    """
    history: list[Committed] = []
    failures: Counter[str] = Counter()
    pruned: set[str] = set()
    ended: dict[tuple[str, str, int], Status] = {}
    for slot in case.slots:
        row = case.task_of(slot)
        unmet = [need for need in row.depends_on if ended[slot.variant_id, need, slot.repeat] is not OK]
        reason = None
        if slot.variant_id in pruned:
            reason = f"variant {slot.variant_id} was pruned after {case.prune_after} failures in a row"
        elif unmet:
            status = ended[slot.variant_id, unmet[0], slot.repeat]
            reason = f"it depends on task {unmet[0]}, which ended as {status}"
        elif slot.schedule_idx in purged:
            reason = PURGED
        status = Status.SKIPPED if reason else decided.get(slot.schedule_idx) or final_status(case, slot)
        if status is OK:
            failures[slot.variant_id] = 0
        elif status.blame is Blame.AGENT:
            failures[slot.variant_id] += 1
            if failures[slot.variant_id] == case.prune_after:
                pruned.add(slot.variant_id)
        ended[slot.variant_id, slot.task_id, slot.repeat] = status
        history.append(Committed(slot.schedule_idx, status, reason))
    return history


def final_status(case: Case, slot: Slot) -> Status:
    attempts: list[Status] = []
    for status in attempt_ends(case, slot.schedule_idx):
        attempts.append(status)
        protocol = case.task_of(slot).protocol
        if POLICY.next_attempt(status, protocol, Counter(attempts), seed=slot.schedule_idx) is None:
            return status
    raise AssertionError("a script ends in success, which is final")


def attempt_ends(case: Case, idx: int) -> Iterator[Status]:
    yield from case.scripts[idx]
    yield OK


@dataclass
class Run:
    """A coordinator on a manual clock that does what is decided, and checks that it may be."""

    case: Case
    concurrency: int
    capacity: int
    chance: random.Random
    duration_s: float | None = None
    purges: bool = False
    blocks: bool = False
    now_s: float = 0.0
    attempts: dict[int, list[Status]] = field(default_factory=dict)
    not_before: dict[int, float] = field(default_factory=dict)
    joined_s: list[float] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)  # of those in flight: ended, but the board was not told since a crash
    finished: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    purged: set[int] = field(default_factory=set)
    blocked: int | None = None
    given_up: set[int] = field(default_factory=set)
    decided: dict[int, Status] = field(default_factory=dict)  # of what was blocked: how it ended at last
    history: list[Committed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = self.case.slots
        self.a_task = len(self.case.variants) * self.case.repeats
        self.joined_s = [0.0] * (self.case.begins_with * self.a_task)
        self.board = self.new_board()

    def new_board(self) -> Board:
        """A board from what a run leaves behind: commits, and the trials that were dispatched."""
        design = Design(
            max_concurrency=self.concurrency,
            prune_after_failures=self.case.prune_after,
            max_duration_s=self.duration_s,
            order=self.case.order,
        )
        b = Board(
            self.slots[: len(self.joined_s)],
            {each.id: each for each in self.case.tasks},
            {each.id: each for each in self.case.variants},
            design,
            queue_of(self.case.tasks, self.case.variants, design),
            self.case.memory,
            self.case.budget,
            submitted_s=self.joined_s,
            committed=[row.status for row in self.history],
            active=self.in_flight | self.finished,
            withdrawn=dict.fromkeys(self.purged, PURGED),
            blocked=self.blocked,
        )
        for idx in self.chance.sample(sorted(self.finished), len(self.finished)):
            if self.chance.random() < 0.5:
                b.finish(idx)
            else:
                self.finished.remove(idx)
                self.untold.add(idx)
                self.in_flight.add(idx)
        return b

    def to_the_end(self, crashes: int = 0) -> list[Committed]:
        steps = 0
        pace = self.chance.choice([0.03, 0.1, 0.3])  # crashes soon, or when much has happened
        while not self.board.done or len(self.joined_s) < len(self.slots):
            steps += 1
            assert steps < 200 * len(self.slots) * (1 + crashes), "it does not come to an end"
            if crashes and self.chance.random() < pace:
                crashes -= 1
                self.skipped.clear()  # none of which was committed, or kept
                self.not_before.clear()  # a continued run does not remember the delays
                self.board = self.new_board()
            self.be_asked()
            if not (self.commit_some() or self.act()) and not self.board.done:
                self.pass_time()
            self.compare()
        return self.history

    def be_asked(self) -> None:
        """A task joins, or what waits is purged."""
        if len(self.joined_s) < len(self.slots) and self.chance.random() < 0.2:
            first = len(self.joined_s)
            self.joined_s += [self.now_s] * self.a_task
            self.board.add(self.slots[first : len(self.joined_s)], self.now_s)
        if self.purges and self.chance.random() < 0.3:
            waiting = list(self.board.not_started())
            for idx in self.chance.sample(waiting, min(1, len(waiting))):
                self.board.withdraw(idx, PURGED)
                self.purged.add(idx)
        if self.blocked is not None and self.chance.random() < 0.1:
            self.unblock()

    def unblock(self) -> None:
        """Retry what is blocked, or give it up."""
        assert self.blocked is not None
        idx, self.blocked = self.blocked, None
        if self.chance.random() < 0.5:
            self.given_up.add(idx)
            self.finished.add(idx)
            self.board.finish(idx)
        else:
            self.not_before[idx] = self.now_s + self.chance.choice([0.0, 1.0])
            self.board.requeue(idx, self.not_before[idx])

    def commit_some(self) -> bool:
        """Commit what can be, but not always at once: a coordinator has other things to do."""
        done = False
        while self.board.committable and self.chance.random() < 0.8:
            idx = self.board.next_to_commit
            verdict = verdict_at_commit(self.board, idx, self.attempts[idx][-1] if idx in self.finished else None)
            self.finished.discard(idx)
            failed = verdict.status not in (OK, Status.SKIPPED)
            if self.blocks and failed and idx not in self.given_up and self.board.has_dependants(idx):
                self.board.block(idx)
                self.blocked = idx
                self.decided[idx] = verdict.status
                return True
            if idx in self.decided:
                self.decided[idx] = self.attempts[idx][-1]
            self.board.commit(idx, verdict.status)
            self.history.append(Committed(idx, *verdict))
            self.skipped.discard(idx)
            done = True
        return done

    def act(self) -> bool:
        self.board.advance(self.now_s)
        decisions = decide(self.board, self.now_s, self.capacity)
        for idx in decisions.dispatch:
            self.check_may_start(idx)
            self.in_flight.add(idx)
        self.compare()
        again = decide(self.board, self.now_s, self.capacity)
        assert again == decisions._replace(dispatch=(), wake_s=again.wake_s)
        for idx, reason in decisions.skip:
            assert idx not in self.in_flight | self.finished | self.skipped
            self.board.skip(idx, reason)
            self.skipped.add(idx)
        return bool(decisions.skip or decisions.dispatch)

    def pass_time(self) -> None:
        """Something happens by itself: a trial ends, or a delay does. If nothing can, the run is stuck."""
        decisions = decide(self.board, self.now_s, self.capacity)
        assert not decisions.dispatch, "there was nothing to do"
        wake_s = decisions.wake_s
        in_vain = not (self.in_flight or wake_s is not None or self.board.committable)
        assert in_vain == self.board.stuck
        if in_vain:
            self.unblock()
        if self.in_flight and (wake_s is None or self.chance.random() < 0.8):
            self.now_s += self.chance.random()
            self.end_attempt(self.chance.choice(sorted(self.in_flight)))
        elif wake_s is not None:
            assert wake_s > self.now_s
            self.now_s = wake_s
        self.board.advance(self.now_s)

    def end_attempt(self, idx: int) -> None:
        self.in_flight.remove(idx)
        if idx in self.untold:
            self.untold.remove(idx)
            self.finished.add(idx)
            self.board.finish(idx)
            return
        made = self.attempts.setdefault(idx, [])
        made.append([*attempt_ends(self.case, idx)][len(made)])
        protocol = self.case.task_of(self.slots[idx]).protocol
        following = POLICY.next_attempt(made[-1], protocol, Counter(made), seed=idx)
        if following is None:
            self.finished.add(idx)
            self.board.finish(idx)
        else:
            self.not_before[idx] = self.now_s + following.after_s
            self.board.requeue(idx, self.not_before[idx])

    def check_may_start(self, idx: int) -> None:
        slot = self.slots[idx]
        row = self.case.task_of(slot)
        own = next(each for each in self.case.variants if each.id == slot.variant_id)
        flying = [self.slots[each] for each in self.in_flight]
        assert idx not in self.in_flight | self.finished | self.skipped | self.purged
        assert idx >= len(self.history)
        assert len(flying) < min(self.concurrency, self.capacity)
        if own.max_parallel_trials is not None:
            assert sum(each.variant_id == own.id for each in flying) < own.max_parallel_trials
        assert self.case.memory * (len(flying) + 1) <= self.case.budget
        assert self.now_s >= self.not_before.get(idx, 0.0)
        serials = {self.serial(each.schedule_idx) for each in flying}
        assert "global" not in serials, "gate"
        if flying:
            assert self.serial(idx) is None, "gate"
        firsts = [each for each in range(len(self.joined_s)) if self.serial(each) == "first" and not self.ended(each)]
        assert not firsts or firsts[0] == idx, "gate"
        if self.duration_s is not None:
            assert self.now_s < self.duration_s
        if row.chain is not None:
            chains = {self.case.task_of(each).chain for each in flying if each.variant_id == own.id}
            assert row.chain not in chains, "chain"
        for each in self.slots[:idx]:
            same = each.variant_id == slot.variant_id
            if same and row.chain is not None and self.case.task_of(each).chain == row.chain:
                # What was blocked had ended once: others of its chain may have begun since, and are let end.
                assert self.ended(each.schedule_idx) or each.schedule_idx in self.decided, "chain"
            if same and each.repeat == slot.repeat and each.task_id in row.depends_on:
                assert each.schedule_idx < len(self.history), "dependency"
                assert self.history[each.schedule_idx].status is OK, "dependency"
        failures = [
            committed.status
            for committed in self.history
            if self.slots[committed.idx].variant_id == own.id
            and (committed.status is OK or committed.status.blame is Blame.AGENT)
        ]
        if self.case.prune_after is not None:
            assert OK in failures[-self.case.prune_after :] or len(failures) < self.case.prune_after, "pruned"

    def serial(self, idx: int) -> str | None:
        return self.case.task_of(self.slots[idx]).protocol.serial

    def ended(self, idx: int) -> bool:
        return idx < len(self.history) or idx in self.finished | self.skipped | {self.blocked}

    def compare(self) -> None:
        """The board and our own books say the same."""
        gone = len(self.in_flight) + len(self.finished) + len(self.skipped) + len(self.history)
        assert self.board.counts == Counts(
            waiting=len(self.joined_s) - gone - (self.blocked is not None),
            in_flight=len(self.in_flight),
            finished=len(self.finished),
            skipped=len(self.skipped),
            committed=len(self.history),
            blocked=int(self.blocked is not None),
        )
        assert self.board.blocked == self.blocked
        assert self.board.in_flight == self.in_flight
        waiting = [idx for idx in range(len(self.joined_s)) if not self.ended(idx) and idx not in self.in_flight]
        assert list(self.board.not_started()) == waiting
        may_start = [idx for idx in waiting if idx not in self.board.doomed]
        depth = Counter(self.case.task_of(self.slots[idx]).protocol.priority for idx in may_start)
        assert self.board.depth == depth
        flying = Counter(self.slots[idx].variant_id for idx in self.in_flight)
        limits = {each.id: each.max_parallel_trials for each in self.case.variants}
        assert self.board.full == {each for each, limit in limits.items() if limit and flying[each] >= limit}


runs = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32))


@settings(unhurried, max_examples=120)
@given(cases(), st.lists(runs, min_size=1, max_size=3))
def test_the_history_is_the_models_at_any_concurrency_and_in_any_order(
    case: Case, runs: list[tuple[int, int, int]]
) -> None:
    expected = model(case)
    for concurrency, capacity, seed in runs:
        assert Run(case, concurrency, capacity, random.Random(seed)).to_the_end() == expected


@settings(unhurried, max_examples=120)
@given(cases(), runs, st.integers(1, 5))
def test_the_history_is_the_models_after_crashes(case: Case, run: tuple[int, int, int], crashes: int) -> None:
    concurrency, capacity, seed = run
    assert Run(case, concurrency, capacity, random.Random(seed)).to_the_end(crashes) == model(case)


@settings(unhurried, max_examples=60)
@given(cases(), runs, st.integers(0, 3))
def test_what_is_purged_is_skipped_and_the_rest_is_as_if_it_had_never_been_there(
    case: Case, run: tuple[int, int, int], crashes: int
) -> None:
    concurrency, capacity, seed = run
    purging = Run(case, concurrency, capacity, random.Random(seed), purges=True)
    assert purging.to_the_end(crashes) == model(case, purging.purged)


@settings(unhurried, max_examples=60)
@given(cases(), runs, st.integers(0, 3))
def test_what_is_blocked_is_retried_or_given_up_and_the_rest_follows_from_that(
    case: Case, run: tuple[int, int, int], crashes: int
) -> None:
    concurrency, capacity, seed = run
    blocking = Run(case, concurrency, capacity, random.Random(seed), purges=True, blocks=True)
    assert blocking.to_the_end(crashes) == model(case, blocking.purged, blocking.decided)


@settings(unhurried, max_examples=60)
@given(cases(), runs, st.floats(0.1, 20.0))
def test_a_run_with_a_duration_ends_and_says_nothing_false(
    case: Case, run: tuple[int, int, int], duration_s: float
) -> None:
    concurrency, capacity, seed = run
    expected = model(case)
    history = Run(case, concurrency, capacity, random.Random(seed), duration_s).to_the_end()
    assert [row.idx for row in history] == list(range(len(expected)))
    over = [row.idx for row in history if row.reason == "the run is over its duration"]
    # Until the first slot that there was no time for, it is the history of a run without end.
    first = over[0] if over else len(expected)
    assert history[:first] == expected[:first]
    for row, due in zip(history[first:], expected[first:], strict=True):
        assert row.status in (due.status, Status.SKIPPED) or due.status is Status.SKIPPED


def seconds_a_slot(count: int) -> float:
    """Processor time to decide, start, finish and commit a slot of a schedule of `count`, 8 in flight."""
    # Of every four tasks: one in a chain, one that depends on the one before it, one that failed and was put back.
    tasks = [
        task(
            f"t{n}",
            chain=f"c{n % 10}" if n % 4 == 1 else None,
            depends_on=(f"t{n - 1}",) if n % 4 == 2 else (),
        )
        for n in range(count // 4)
    ]
    b = board(*tasks, variants=[variant("a", 2), variant("b", 2), variant("c"), variant("d")], max_concurrency=8)
    chance = random.Random(count)
    put_back: set[int] = set()
    gc.collect()
    begin = time.process_time()
    flying: list[int] = []
    step = 0
    while not b.done:
        step += 1
        b.advance(float(step))
        flying += decide(b, float(step), 8).dispatch
        if flying:
            idx = flying.pop(chance.randrange(len(flying)))
            if idx % 16 == 0 and idx not in put_back:
                put_back.add(idx)
                b.requeue(idx, step + 5.0)
            else:
                b.finish(idx)
        while b.committable:
            b.commit(b.next_to_commit, verdict_at_commit(b, b.next_to_commit, OK).status)
    return (time.process_time() - begin) / count


def test_a_slot_costs_the_same_in_a_schedule_thirty_times_as_long() -> None:
    small = min(seconds_a_slot(1_000) for _ in range(10))
    large = seconds_a_slot(30_000)
    assert large < 6 * small  # what searches the schedule would be thirty times slower
