"""By priority: what is urgent, then what stands highest, and nothing waits for ever.

  urgent   an entry so near to its deadline goes before all others, the earliest deadline first
  highest  then the highest priority, and within one priority the order of the schedule
  ageing   an entry that has waited `promote_after_s` since its submission stands at the next higher priority that
           there is, and again after each further such time, up to the highest. There it stands by its place in the
           schedule: what was submitted after it cannot hold it back any longer

How high an entry stands follows from its submission, the time, and all the priorities that were ever given, so it is
the same after a crash. A priority that is new counts at once: who adds higher and higher ones for ever, or more urgent
tasks than can be run, can still hold the rest back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final

from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.contracts.words import Cell, Task
from sandbox_exec.schedule.queues import Entry, SequentialQueue

_FEW: Final = 64  # stale items that are not worth a rebuild
_AT_ONCE: Final = 1000  # promotions at one take: if more are due together, the rest come with the next


class PriorityQueue(SequentialQueue):
    """See the module's text. Urgent and waiting entries are kept by variant, so that a closed one costs nothing."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        settings = experiment.design.queue
        self._promote_after_s = settings.promote_after_s
        self._urgent_within_s = settings.urgent_within_s
        self._levels: list[int] = []
        self._level_of: dict[int, int] = {}  # where in `_levels` a priority is
        self._entries: dict[int, Entry] = {}
        self._standing: defaultdict[str, LazyHeap] = defaultdict(LazyHeap)  # by variant; keys: priorities, negated
        self._deadlines: defaultdict[str, LazyHeap] = defaultdict(LazyHeap)  # by variant
        self._promotions = LazyHeap()  # when each goes up next; not of those that are at the top
        self._now_s = -math.inf
        self._learn(settings.quota_of)

    def submit(self, tasks: Sequence[Task]) -> Sequence[Cell]:
        self._learn(task.protocol.priority for task in tasks)
        return super().submit(tasks)

    def restore(self, state: Any, tasks: Sequence[Task]) -> None:
        super().restore(state, tasks)
        self._learn(task.protocol.priority for task in tasks)

    def ordered(self, tasks: Sequence[Task]) -> Sequence[Task]:
        return sorted(tasks, key=lambda task: -task.protocol.priority)

    def put(self, entry: Entry) -> None:
        self.discard(entry.idx)
        self._learn([entry.priority])
        self._entries[entry.idx] = entry
        if entry.deadline_s is not None:
            self._deadlines[entry.cell.variant_id].set(entry.idx, entry.deadline_s)
        self._place(entry)

    def take(self, now_s: float, closed: Collection[str] = ()) -> int | None:
        self._now_s = now_s
        for _ in range(_AT_ONCE):
            due = self._promotions.first()
            if due is None or due[0] > now_s:
                break
            self._place(self._entries[due[1]])
        found = _first(self._deadlines, closed)
        if found is None or found[0] - self._urgent_within_s > now_s:
            found = _first(self._standing, closed)
        if found is None:
            return None
        self.discard(found[1])
        return found[1]

    def discard(self, idx: int) -> None:
        entry = self._entries.pop(idx, None)
        if entry is not None:
            self._standing[entry.cell.variant_id].drop(idx)
            self._promotions.drop(idx)
            if entry.deadline_s is not None:
                self._deadlines[entry.cell.variant_id].drop(idx)

    def _learn(self, priorities: Iterable[int]) -> None:
        new = {priority for priority in priorities if priority not in self._level_of}
        if new:
            self._levels = sorted([*self._levels, *new])
            self._level_of = {priority: level for level, priority in enumerate(self._levels)}
            for entry in self._entries.values():
                self._place(entry)

    def _place(self, entry: Entry) -> None:
        base, top, after_s = self._level_of[entry.priority], len(self._levels) - 1, self._promote_after_s
        steps = 0
        if after_s is not None:
            steps = int(min(max(0.0, self._now_s - entry.submitted_s) // after_s, top - base))
            due_s = entry.submitted_s + (steps + 1) * after_s
            while base + steps < top and due_s <= self._now_s:  # the division may have rounded a step away
                steps += 1
                due_s = entry.submitted_s + (steps + 1) * after_s
            if base + steps < top:
                self._promotions.set(entry.idx, due_s)
            else:
                self._promotions.drop(entry.idx)
        self._standing[entry.cell.variant_id].set(entry.idx, -self._levels[base + steps])


class LazyHeap:
    """Numbers by a key, the lowest first. What is dropped or moved leaves a stale item, and never many of them."""

    def __init__(self) -> None:
        self._keys: dict[int, float] = {}
        self._items: list[tuple[float, int]] = []  # stale where `_keys` says something else

    def __len__(self) -> int:
        """How many items it keeps, the stale ones among them."""
        return len(self._items)

    def set(self, idx: int, key: float) -> None:
        if self._keys.get(idx) != key:
            self._keys[idx] = key
            heappush(self._items, (key, idx))
            self._tidy()

    def drop(self, idx: int) -> None:
        if self._keys.pop(idx, None) is not None:
            self._tidy()

    def first(self) -> tuple[float, int] | None:
        while self._items:
            key, idx = self._items[0]
            if self._keys.get(idx) == key:
                return key, idx
            heappop(self._items)
        return None

    def _tidy(self) -> None:
        if len(self._items) > 2 * len(self._keys) + _FEW:
            self._items = [(key, idx) for idx, key in self._keys.items()]
            heapify(self._items)


def _first(heaps: Mapping[str, LazyHeap], closed: Collection[str]) -> tuple[float, int] | None:
    firsts = (heap.first() for variant_id, heap in heaps.items() if variant_id not in closed)
    return min((first for first in firsts if first is not None), default=None)
