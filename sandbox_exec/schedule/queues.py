"""Which trial next: the queue that a run takes from, behind one protocol, and the plainest one.

What a queue is told and asked, in this order:

  submit(tasks)    these are to be run: which cells of them join the schedule, and in which order? Called once when
                   the run is made, and for every batch of tasks that is added later
  put(entry)       this slot may start: its dependencies are committed, its turn in its chain and its time have come
  take(now_s)      which of those starts now? It is reserved: nobody else gets it
  discard(idx)     this one will not start: it is skipped
  observe(done)    this slot is committed. Called in the order of commits, so that what follows from it is the same at
                   any concurrency: which cells join the schedule now?
  should_continue  whether more is to be run. Asked after each commit: once it says no, the rest is skipped

The order in which slots start changes nothing but when they run: history has the order of the schedule, which follows
from `submit` and `observe` alone. So `take` may look at the clock, and they must not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, Protocol

from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.contracts.words import Cell, Slot, Task, TrialCompletion


class Entry(NamedTuple):
    """A slot that may start."""

    idx: int  # its schedule_idx
    cell: Cell
    priority: int = 0
    submitted_s: float = 0.0  # by the clock that `take` is given
    deadline_s: float | None = None  # by that clock: when it should have begun


class TaskQueue(Protocol):
    """What a run takes its next trial from. See the module's text for when each is called.

    A queue of your own is a class that is made with the experiment; most derive it from `SequentialQueue` and say
    in `put` and `take` what is different. It belongs to the coordinator's thread.
    """

    def __init__(self, experiment: Experiment) -> None: ...

    def submit(self, tasks: Sequence[Task]) -> Sequence[Cell]:
        """Return the cells that join the schedule now, in its order: a task after those that it depends on."""

    def put(self, entry: Entry) -> None:
        """Hold an entry until it is taken or discarded. One that failed comes again for its next attempt."""

    def take(self, now_s: float, closed: Collection[str] = ()) -> int | None:
        """Remove the entry that is to start now and return its idx; None if there is none.

        `closed` are the variants of which none can start now: they are at their limit, or their lane's.
        """

    def discard(self, idx: int) -> None:
        """Forget an entry. Nothing happens if it is not there."""

    def observe(self, completion: TrialCompletion) -> Sequence[Cell]:
        """Learn from a commit, and return the cells that join the schedule because of it."""

    def should_continue(self) -> bool: ...

    def snapshot(self) -> Any:
        """Return what `submit` and `observe` have taught it, as JSON. Kept with each commit, so it should be small."""

    def restore(self, state: Any, tasks: Sequence[Task]) -> None:
        """Be as at that snapshot. `tasks` are all that were submitted; entries are put again."""


class SequentialQueue:
    """In the order of the schedule: task by task, in each variant by variant, in each repeat by repeat."""

    def __init__(self, experiment: Experiment) -> None:
        self._variant_ids = [variant.id for variant in experiment.variants]
        self._repeats = experiment.design.repeats
        self._heaps: defaultdict[str, list[int]] = defaultdict(list)  # by variant; of those not in `_held`: stale
        self._held: dict[int, str] = {}  # the variant of each that is here

    def submit(self, tasks: Sequence[Task]) -> Sequence[Cell]:
        ordered = dependencies_first(self.ordered(tasks))
        return [
            Cell(variant_id, task.id, repeat)
            for task in ordered
            for variant_id in self._variant_ids
            for repeat in range(self._repeats)
        ]

    def ordered(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks in the order in which they are to be committed, dependencies aside."""
        return tasks

    def put(self, entry: Entry) -> None:
        self._held[entry.idx] = entry.cell.variant_id
        heappush(self._heaps[entry.cell.variant_id], entry.idx)

    def take(self, now_s: float, closed: Collection[str] = ()) -> int | None:
        tops = [top for variant_id in self._heaps if variant_id not in closed for top in self._top(variant_id)]
        if not tops:
            return None
        idx = min(tops)
        heappop(self._heaps[self._held.pop(idx)])
        return idx

    def discard(self, idx: int) -> None:
        variant_id = self._held.pop(idx, None)
        if variant_id is not None and len(self._heaps[variant_id]) > 2 * len(self._held) + 64:
            self._heaps[variant_id] = [one for one in self._heaps[variant_id] if one in self._held]
            heapify(self._heaps[variant_id])

    def observe(self, completion: TrialCompletion) -> Sequence[Cell]:
        return ()

    def should_continue(self) -> bool:
        return True

    def snapshot(self) -> Any:
        return None

    def restore(self, state: Any, tasks: Sequence[Task]) -> None:
        pass

    def _top(self, variant_id: str) -> Iterator[int]:
        heap = self._heaps[variant_id]
        while heap and heap[0] not in self._held:
            heappop(heap)
        yield from heap[:1]


def number(cells: Iterable[Cell], first: int = 0) -> list[Slot]:
    """Return the slots of cells that join a schedule which has `first` already."""
    return [
        Slot(schedule_idx=idx, variant_id=cell.variant_id, task_id=cell.task_id, repeat=cell.repeat)
        for idx, cell in enumerate(cells, first)
    ]


def dependencies_first(tasks: Iterable[Task]) -> list[Task]:
    """The tasks in their order, but each after those of them that it depends on: commits go in this order."""
    tasks = list(tasks)
    by_id = {task.id: task for task in tasks}
    placed: dict[str, Task] = {}
    for task in tasks:
        pending = [task]  # a stack and not recursion: a chain of dependencies may be as long as the dataset
        while pending:
            current = pending[-1]
            waiting = [by_id[need] for need in current.depends_on if need not in placed and need in by_id]
            if waiting:
                pending.extend(reversed(waiting))
            else:
                pending.pop()
                placed.setdefault(current.id, current)
    return list(placed.values())
