"""Which trial next: each queue by tables, all of them by one suite, and the priority order against a naive model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from boards import variant
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.contracts.experiment import Design, Experiment
from sandbox_exec.contracts.queue import QueueSettings
from sandbox_exec.contracts.words import Cell, Task, TaskProtocol
from sandbox_exec.orders import first_schedule
from sandbox_exec.schedule.priority import LazyHeap, PriorityQueue
from sandbox_exec.schedule.queues import Entry, SequentialQueue, TaskQueue, dependencies_first

unhurried = settings(deadline=None, max_examples=100)  # a busy machine is no fault of the code

VARIANTS = ("a", "b", "c")


class ShortestFirst(SequentialQueue):
    """A queue of a user's own: the shortest input first. What it knows of tasks comes with `submit` or `restore`."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._chars: dict[str, int] = {}
        self._entries: dict[int, Entry] = {}

    def submit(self, tasks: Sequence[Task]) -> Sequence[Cell]:
        self.restore(None, tasks)
        return super().submit(tasks)

    def restore(self, state: Any, tasks: Sequence[Task]) -> None:
        self._chars.update((each.id, len(str(each.input))) for each in tasks)

    def put(self, entry: Entry) -> None:
        self._entries[entry.idx] = entry

    def take(self, now_s: float, closed: Collection[str] = ()) -> int | None:
        open_ones = [entry for entry in self._entries.values() if entry.cell.variant_id not in closed]
        if not open_ones:
            return None
        first = min(open_ones, key=lambda entry: (self._chars.get(entry.cell.task_id, 0), entry.idx))
        return self._entries.pop(first.idx).idx

    def discard(self, idx: int) -> None:
        self._entries.pop(idx, None)


def task(task_id: str, **fields: Any) -> Task:
    return Task(**{"id": task_id, "input": None, **fields})


def experiment(variants: Sequence[str] = VARIANTS, repeats: int = 1, **queue: Any) -> Experiment:
    return Experiment(
        name="queues",
        tasks=(task("t"),),
        variants=tuple(variant(each) for each in variants),
        design=Design(repeats=repeats, queue=QueueSettings(**queue)),
    )


def entry(
    idx: int, priority: int = 0, variant_id: str = "a", submitted_s: float = 0.0, deadline_s: float | None = None
) -> Entry:
    return Entry(idx, Cell(variant_id, f"t{idx}", 0), priority, submitted_s, deadline_s)


def priority_queue(*entries: Entry, **queue: Any) -> PriorityQueue:
    made = PriorityQueue(experiment(**queue))
    for each in entries:
        made.put(each)
    return made


def drained(queue: TaskQueue, now_s: float = 0.0, closed: Collection[str] = ()) -> list[int]:
    found = []
    while (idx := queue.take(now_s, closed)) is not None:
        found.append(idx)
    return found


def with_priority(task_id: str, priority: Any, **fields: Any) -> Task:
    return task(task_id, protocol=TaskProtocol(priority=priority), **fields)


# What every queue keeps


QUEUES = pytest.mark.parametrize("make", [SequentialQueue, PriorityQueue, ShortestFirst])


@QUEUES
def test_nothing_comes_out_of_an_empty_queue_and_a_stranger_is_discarded_in_peace(
    make: Callable[[Experiment], TaskQueue],
) -> None:
    queue = make(experiment())
    queue.discard(7)
    assert queue.take(0.0) is None
    assert queue.should_continue()


@QUEUES
def test_a_submission_gives_each_cell_once_and_dependencies_come_first(
    make: Callable[[Experiment], TaskQueue],
) -> None:
    queue = make(experiment(("a", "b"), repeats=2))
    cells = queue.submit([with_priority("high", "high", depends_on=("low",)), with_priority("low", "low")])
    assert cells == [Cell(v, t, r) for t in ("low", "high") for v in ("a", "b") for r in (0, 1)]


@QUEUES
@settings(unhurried, max_examples=30)
@given(data=st.data())
def test_each_entry_comes_out_once_for_each_time_it_was_put_and_never_of_a_closed_variant(
    make: Callable[[Experiment], TaskQueue], data: st.DataObject
) -> None:
    queue = make(experiment(promote_after_s=4.0, urgent_within_s=2.0))
    held: dict[int, Entry] = {}
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now_s += data.draw(st.sampled_from([0.0, 0.0, 1.0, 5.0]))
        match data.draw(st.sampled_from(["put", "put", "take", "discard"])):
            case "put":
                idx = data.draw(st.integers(0, 20).filter(lambda idx: idx not in held))
                held[idx] = data.draw(entries(idx, now_s))
                queue.put(held[idx])
            case "discard":
                idx = data.draw(st.integers(0, 20))
                held.pop(idx, None)
                queue.discard(idx)
            case "take":
                closed = data.draw(st.sets(st.sampled_from(VARIANTS), max_size=2))
                found = queue.take(now_s, closed)
                if found is None:
                    assert all(each.cell.variant_id in closed for each in held.values())
                else:
                    assert held.pop(found).cell.variant_id not in closed
    assert sorted(drained(queue, now_s)) == sorted(held)


@QUEUES
def test_a_restored_queue_gives_the_same_as_one_that_was_there_all_along(
    make: Callable[[Experiment], TaskQueue],
) -> None:
    tasks = [task(f"t{idx}", input="x" * (idx * 7 % 5), protocol=TaskProtocol(priority=idx % 3)) for idx in range(9)]
    before, after = make(experiment(promote_after_s=1.0)), make(experiment(promote_after_s=1.0))
    before.submit(tasks)
    after.restore(before.snapshot(), tasks)
    for idx in range(9):
        before.put(entry(idx, idx % 3, submitted_s=float(idx % 2)))
    for idx in reversed(range(9)):
        after.put(entry(idx, idx % 3, submitted_s=float(idx % 2)))
    assert drained(before, 1.5) == drained(after, 1.5)


# Sequential, and a user's own


def test_sequential_goes_by_the_schedule_whatever_the_priority() -> None:
    queue = SequentialQueue(experiment())
    for each in [entry(2, 9), entry(0), entry(1, -5, "b")]:
        queue.put(each)
    assert drained(queue, closed={"b"}) == [0, 2]
    queue.put(entry(0))
    assert drained(queue) == [0, 1]


@pytest.mark.parametrize("kind", [SequentialQueue, PriorityQueue, ShortestFirst])
def test_a_run_begins_with_serial_first_tasks_whatever_its_queue(kind: type[SequentialQueue]) -> None:
    first = TaskProtocol(serial="first", priority=-10)
    rows = [task("x"), task("y", protocol=first), task("z"), task("w", protocol=first, depends_on=("y",))]
    slots = first_schedule(kind(experiment(("a",))), rows)
    assert [(slot.schedule_idx, slot.task_id) for slot in slots] == [(0, "y"), (1, "w"), (2, "x"), (3, "z")]


def test_sequential_forgets_what_was_discarded() -> None:
    queue = SequentialQueue(experiment())
    for idx in range(1000):
        queue.put(entry(idx))
    for idx in range(999):
        queue.discard(idx)
    assert len(queue._heaps["a"]) < 100
    assert drained(queue) == [999]


def test_a_queue_of_ones_own_says_only_what_is_different() -> None:
    queue = ShortestFirst(experiment(("a",)))
    cells = queue.submit([task("long", input="x" * 9), task("short", input="x"), task("middle", input="x" * 5)])
    for idx, cell in enumerate(cells):
        queue.put(Entry(idx, cell))
    assert [cells[idx].task_id for idx in drained(queue)] == ["short", "middle", "long"]


def test_dependencies_first_keeps_the_order_otherwise() -> None:
    tasks = [task("a", depends_on=("c", "elsewhere")), task("b"), task("c", depends_on=("d",)), task("d")]
    assert [each.id for each in dependencies_first(tasks)] == ["d", "c", "a", "b"]


# Priority, rule by rule


def test_the_schedule_goes_by_priority() -> None:
    queue = PriorityQueue(experiment(("a",)))
    rows = [with_priority("n1", "normal"), with_priority("c", "critical"), with_priority("n2", 0)]
    assert [cell.task_id for cell in queue.submit(rows)] == ["c", "n1", "n2"]


def test_higher_goes_first_and_within_one_priority_the_schedule_counts() -> None:
    queue = priority_queue(entry(4, 10), entry(0), entry(1, -10), entry(3, 10, "b"), entry(2))
    assert drained(queue) == [3, 4, 0, 2, 1]


@pytest.mark.parametrize(
    ("now_s", "expected"),
    [
        (39.0, [0, 1, 2, 3]),  # none is urgent: by priority
        (40.0, [3, 0, 1, 2]),  # one is
        (45.0, [3, 2, 0, 1]),  # two are: the earlier deadline first
        (500.0, [3, 2, 0, 1]),  # a deadline that has passed is still the earliest
    ],
)
def test_what_is_near_its_deadline_goes_before_all_others(now_s: float, expected: list[int]) -> None:
    queue = priority_queue(
        entry(0, 20),
        entry(1, 10),
        entry(2, 0, deadline_s=105.0),
        entry(3, -10, "b", deadline_s=100.0),
        promote_after_s=None,
    )
    assert drained(queue, now_s) == expected


def test_an_urgent_entry_of_a_closed_variant_waits() -> None:
    queue = priority_queue(entry(0, deadline_s=1.0), entry(1, 5, "b"))
    assert drained(queue, closed={"a"}) == [1]
    assert drained(queue) == [0]


@pytest.mark.parametrize(
    ("now_s", "expected"),
    [
        (9.0, [3, 2, 1, 0]),  # 7, 3, 2, 1 stand at their own
        (10.0, [2, 3, 1, 0]),  # 2: at 7; 1: at 3; 0: at 2
        (20.0, [1, 2, 3, 0]),  # 1: at 7
        (30.0, [0, 1, 2, 3]),  # all at 7, and there by their place in the schedule
        (1e9, [0, 1, 2, 3]),
    ],
)
def test_who_has_waited_stands_at_the_next_priority_that_there_is(now_s: float, expected: list[int]) -> None:
    queue = priority_queue(entry(0, 1), entry(1, 2), entry(2, 3), entry(3, 7), promote_after_s=10.0)
    assert drained(queue, now_s) == expected


def test_time_that_comes_in_small_steps_promotes_as_much_as_in_one() -> None:
    queue = priority_queue(entry(0), entry(1, 1), entry(2, 2), promote_after_s=10.0)
    for tenth in range(200):
        assert queue.take(tenth / 10, VARIANTS) is None
    assert drained(queue, 20.0) == [0, 1, 2]


def test_without_ageing_a_low_one_waits_as_long_as_there_is_a_higher_one() -> None:
    queue = priority_queue(entry(0), entry(1, 1), promote_after_s=None)
    assert drained(queue, 1e12) == [1, 0]


def test_a_priority_counts_that_was_only_submitted_or_has_a_quota() -> None:
    submitted = PriorityQueue(experiment(promote_after_s=10.0))
    submitted.submit([with_priority("x", 5)])
    restored = PriorityQueue(experiment(promote_after_s=10.0))
    restored.restore(submitted.snapshot(), [with_priority("x", 5)])
    configured = PriorityQueue(experiment(promote_after_s=10.0, quotas={"5": 1}))
    for queue in (submitted, restored, configured):
        for each in [entry(0, 0), entry(1, 10)]:
            queue.put(each)
        assert queue.take(10.0) == 1  # the other one stands at 5


def test_a_new_priority_counts_at_once() -> None:
    queue = priority_queue(entry(0, 0), entry(1, 10, submitted_s=10.0), promote_after_s=10.0)
    assert queue.take(10.0, VARIANTS) is None
    queue.put(entry(2, 5, submitted_s=10.0))
    assert drained(queue, 10.0) == [1, 0, 2]


def test_an_entry_that_comes_again_has_aged_since_its_submission() -> None:
    queue = priority_queue(entry(0), entry(1, 1), promote_after_s=10.0)
    assert queue.take(0.0) == 1
    assert queue.take(5.0) == 0
    queue.put(entry(0))
    queue.put(entry(2, 1, submitted_s=5.0))
    assert drained(queue, 10.0) == [0, 2]


def test_what_is_put_twice_is_there_once_and_as_it_was_put_last() -> None:
    queue = priority_queue(entry(0, 9, deadline_s=1.0), entry(1, 5), entry(0, 0))
    assert drained(queue) == [1, 0]


def test_an_entry_that_comes_again_is_promoted_once_at_a_time() -> None:
    queue = priority_queue(entry(0), entry(1, 1), entry(2, 2), promote_after_s=10.0)
    for _ in range(5):
        queue.discard(0)
        queue.put(entry(0))
    assert drained(queue, 10.0) == [1, 2, 0]


def test_a_promotion_is_due_at_its_time_however_floats_round() -> None:
    for tenths in range(1, 500):
        submitted_s, after_s = tenths * 0.1, 0.1 + tenths * 0.7
        queue = priority_queue(entry(0, 0, submitted_s=submitted_s), entry(1, 1), promote_after_s=after_s)
        assert queue.take(submitted_s + after_s) == 0


@pytest.mark.parametrize("after_s", [5e-324, 1e-12])
def test_ageing_faster_than_the_clock_can_say_ends_at_the_top(after_s: float) -> None:
    queue = priority_queue(entry(0, 0, submitted_s=1e6), *(entry(idx, idx) for idx in range(1, 9)))
    queue._promote_after_s = after_s
    assert queue.take(1e6 + 1e-9) in range(9)
    assert queue.take(2e6) in (0, 1)


# Priority against the model


def entries(idx: int, now_s: float) -> st.SearchStrategy[Entry]:
    return st.builds(
        entry,
        st.just(idx),
        st.sampled_from((-3, 0, 1, 9)),
        st.just(VARIANTS[idx % 3]),  # a slot is always of the same one
        st.integers(0, int(now_s)).map(float),
        st.none() | st.integers(0, 60).map(float),
    )


class Model:
    """The rules as they are written, by looking at every entry each time."""

    def __init__(self, promote_after_s: float | None, urgent_within_s: float) -> None:
        self.promote_after_s, self.urgent_within_s = promote_after_s, urgent_within_s
        self.held: dict[int, Entry] = {}
        self.given: set[int] = set()

    def put(self, entry: Entry) -> None:
        self.held[entry.idx] = entry
        self.given.add(entry.priority)

    def priority(self, entry: Entry, now_s: float) -> int:
        higher = sorted(each for each in self.given if each >= entry.priority)
        steps = 0 if self.promote_after_s is None else int(max(0, now_s - entry.submitted_s) / self.promote_after_s)
        return higher[min(steps, len(higher) - 1)]

    def take(self, now_s: float, closed: Collection[str]) -> int | None:
        open_ones = [each for each in self.held.values() if each.cell.variant_id not in closed]
        urgent = [
            (each.deadline_s, each.idx)
            for each in open_ones
            if each.deadline_s is not None and each.deadline_s - self.urgent_within_s <= now_s
        ]
        ranked = urgent or [(-self.priority(each, now_s), each.idx) for each in open_ones]
        return self.held.pop(min(ranked)[1]).idx if ranked else None


@settings(unhurried, max_examples=60)
@given(
    data=st.data(),
    promote_after_s=st.sampled_from([None, 1.0, 4.0, 16.0]),
    urgent_within_s=st.sampled_from([0.0, 8.0]),
)
def test_the_priority_order_is_that_of_a_model_that_looks_at_everything(
    data: st.DataObject, promote_after_s: float | None, urgent_within_s: float
) -> None:
    queue = priority_queue(promote_after_s=promote_after_s, urgent_within_s=urgent_within_s)
    model = Model(promote_after_s, urgent_within_s)
    now_s = 0.0
    steps = st.sampled_from(["put", "put", "put", "take", "take", "discard"])
    for step in data.draw(st.lists(steps, min_size=1, max_size=50)):
        now_s += data.draw(st.sampled_from([0.0, 0.0, 1.0, 3.0, 20.0]))
        closed = data.draw(st.sets(st.sampled_from(VARIANTS), max_size=2))
        match step:
            case "put":
                new = data.draw(entries(data.draw(st.integers(0, 30)), now_s))
                queue.put(new)
                model.put(new)
            case "take":
                assert queue.take(now_s, closed) == model.take(now_s, closed)
            case "discard":
                idx = data.draw(st.integers(0, 30))
                queue.discard(idx)
                model.held.pop(idx, None)
    while model.held:
        assert queue.take(now_s) == model.take(now_s, ())
    assert queue.take(now_s) is None


@unhurried
@given(priorities=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_without_ageing_the_priority_order_is_a_sorted_list(priorities: list[int]) -> None:
    queue = priority_queue(*(entry(idx, each) for idx, each in enumerate(priorities)), promote_after_s=None)
    assert drained(queue, 1e9) == sorted(range(len(priorities)), key=lambda idx: -priorities[idx])


@settings(unhurried, max_examples=50)
@given(levels=st.integers(2, 5), stood_before=st.integers(0, 10), a_second=st.integers(1, 3), seed=st.randoms())
def test_a_stream_of_higher_ones_cannot_hold_a_low_one_back_for_ever(
    levels: int, stood_before: int, a_second: int, seed: Any
) -> None:
    queue = priority_queue(promote_after_s=10.0)
    queue.submit([with_priority(f"t{level}", level) for level in range(levels)])
    for idx in range(stood_before):
        queue.put(entry(idx, seed.randrange(levels)))
    low = stood_before
    queue.put(entry(low, 0))
    latest_s = (levels - 1) * 10 + stood_before // a_second + 1
    coming = low + 1
    for now_s in range(latest_s + 1):
        for _ in range(a_second):  # as many come as go, all of them higher than the low one
            queue.put(entry(coming, seed.randrange(1, levels), submitted_s=float(now_s)))
            coming += 1
        if low in [queue.take(float(now_s)) for _ in range(a_second)]:
            return
    pytest.fail(f"the low one has not come out in {latest_s} s")


# What it costs


def recorded(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[Any, ...]]:
    """Have each call of a method, with all that it is given, written into the list that this returns."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def record(*args: Any) -> Any:
        calls.append(args)
        return method(*args)

    monkeypatch.setattr(owner, name, record)
    return calls


def test_a_lazy_heap_keeps_few_stale_items_whatever_is_done_to_it() -> None:
    heap = LazyHeap()
    for idx in range(10):
        heap.set(idx, idx)
    for round_ in range(1000):
        heap.set(3, 100 + round_)
        heap.set(50, round_)
        heap.drop(50)
        heap.drop(50)
        assert len(heap) <= 2 * 11 + 64
    assert heap.first() == (0, 0)
    for idx in range(10):
        heap.drop(idx)
    assert heap.first() is None


def test_what_is_kept_does_not_grow_with_what_has_passed_through() -> None:
    queue = priority_queue(promote_after_s=300.0)
    for idx in range(5000):
        queue.put(entry(idx, idx % 3, deadline_s=1e6, submitted_s=idx / 100))
        if idx % 2:
            queue.discard(idx)
        else:
            assert queue.take(idx / 100) == idx
    assert max(map(len, [queue._promotions, queue._standing["a"], queue._deadlines["a"]])) <= 100


def test_a_closed_variant_is_passed_over_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = priority_queue(*(entry(idx, 9, "a", deadline_s=0.0) for idx in range(2000)), entry(2000, 0, "b"))
    looked_at = recorded(monkeypatch, LazyHeap, "first")
    assert queue.take(1.0, {"a"}) == 2000
    assert (queue._standing["a"],) not in looked_at
    assert (queue._deadlines["a"],) not in looked_at
    assert len(looked_at) <= 3


def test_a_promotion_moves_each_entry_once_and_takes_move_none(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = priority_queue(*(entry(idx, 0, submitted_s=float(idx)) for idx in range(500)), entry(500, 1))
    moved = recorded(monkeypatch, PriorityQueue, "_place")
    for now_s in range(0, 1000, 10):
        queue.take(float(now_s), VARIANTS)
    assert [each.idx for _, each in moved] == list(range(500))
    drained(queue, 1000.0)
    assert len(moved) == 500
