"""The board: how far each slot of a run is, indexed so that what may start next is found without a search.

Theory of operation. The coordinator owns one board and alone changes it. A slot goes through these states:

    WAITING -> QUEUED -> READY -> IN_FLIGHT -> FINISHED -> COMMITTED
    the first three -> SKIPPED -> COMMITTED;  IN_FLIGHT -> WAITING, for another attempt

WAITING: a dependency is not committed, an earlier slot of its chain has not ended, or its time has not come.
QUEUED: only its variant's `max_parallel_trials` holds it back. READY: nothing holds it back but what all
share: concurrency, capacity and memory. So every READY slot could start at the same moment, and `decide` takes
the first of them. A variant's READY and IN_FLIGHT slots together never exceed its limit; a slot that comes back
from a delay may therefore start after that many later ones of its variant, never after more.

Every rule points from a higher `schedule_idx` to a lower one: dependencies stand earlier in the schedule (the
constructor refuses others), chains go in its order, commits too. The lowest slot that is not committed thus
waits for nothing but trials in flight and the clock, which is why no board can get stuck.

What is pruned or skipped follows from commits alone, see `scheduler.verdict_at_commit`.

A further gate (a lane, say) would stand where `max_parallel_trials` stands: in `_offer` and `_release`.
Another order of dispatch changes what READY is sorted by, and nothing else.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from sandbox_exec.contracts.experiment import Design
from sandbox_exec.contracts.status import Blame, Status
from sandbox_exec.contracts.words import Slot, Task, Variant
from sandbox_exec.errors import InvalidExperiment
from sandbox_exec.units import format_bytes

# States fit one byte of an array: there may be a hundred thousand slots, and few of them are in motion.
_WAITING, _QUEUED, _READY, _IN_FLIGHT, _FINISHED, _SKIPPED, _COMMITTED = range(7)
_NOT_STARTED: Final = (_WAITING, _QUEUED, _READY)
_NAMES: Final = ("waiting", "queued", "ready", "in flight", "finished", "skipped", "committed")
_STATUSES: Final = tuple(Status)
_SLACK: Final = 64  # stale entries of a heap that are not worth building it anew
_CODES: Final = {status: code for code, status in enumerate(_STATUSES)}


class Counts(NamedTuple):
    """How many slots are in which state; `waiting` are all that have not been started or skipped."""

    waiting: int
    in_flight: int
    finished: int
    skipped: int
    committed: int


class _Variant:
    # What the board knows of one variant.
    __slots__ = ("admitted", "failures", "id", "limit", "pruned", "queue", "slots")

    def __init__(self, variant: Variant, slots: int) -> None:
        self.id = variant.id
        self.limit = variant.max_parallel_trials or slots
        self.admitted = 0  # READY and IN_FLIGHT
        self.queue: list[int] = []  # a heap of QUEUED slots; entries of slots that left that state are stale
        self.slots = array("q")
        self.failures = 0  # committed one after the other, blamed on the agent
        self.pruned: str | None = None  # the reason


class Board:
    """The coordinator's view of a run's progress. Not for use from several threads.

    `memory_of` gives the ceiling of a slot's trial in bytes, and is called once a slot. `start_s` is the clock
    when the run's time began: a continued run passes the present less what was used before. `committed` has the
    statuses of the slots committed so far, in order, and `active` the slots that were dispatched and are
    not committed: they begin as in flight, whatever the limits.

    Raises `InvalidExperiment` for what could never be run: a ceiling above the budget, a dependency that
    is missing or stands later in the schedule.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        tasks_by_id: Mapping[str, Task],
        variants_by_id: Mapping[str, Variant],
        design: Design,
        memory_of: Callable[[Slot], int],
        budget_bytes: int,
        *,
        start_s: float = 0.0,
        committed: Sequence[Status] = (),
        active: Iterable[int] = (),
    ) -> None:
        self.slots = slots
        self.max_concurrency = design.max_concurrency
        self.ends_s = None if design.max_duration_s is None else start_s + design.max_duration_s
        self.budget_bytes = budget_bytes
        self.in_flight: set[int] = set()
        self.in_flight_bytes = 0
        self.doomed: dict[int, str] = {}  # not started and certain to be skipped: why
        self.next_to_commit = 0
        self.capacity_warned = False  # set by who has shown the warning about the backend's capacity

        self._prune_after = design.prune_after_failures
        self._state = bytearray(len(slots))
        self._status = bytearray(len(slots))  # of committed slots: an index of _STATUSES
        self._counts = [len(slots), *[0] * (len(_NAMES) - 1)]
        self._ready: list[int] = []  # a heap; entries of slots that left READY are stale, and may be double
        self._delayed: list[tuple[float, int]] = []  # a heap of (not before, slot); of slots not below: stale
        self._held: set[int] = set()
        self._reasons: dict[int, str] = {}  # of SKIPPED slots
        self._variants = {key: _Variant(variant, len(slots)) for key, variant in variants_by_id.items()}
        self._variant_of: list[_Variant] = [self._variants[slot.variant_id] for slot in slots]
        self._chain_of: dict[int, deque[int]] = {}  # slots of the chain that have not ended, in order
        self._needs: dict[int, tuple[int, ...]] = {}  # the slots that a slot depends on
        self._unmet: dict[int, int] = {}  # how many of them are not committed as success
        self._dependants: dict[int, list[int]] = {}

        self.memory_bytes = array("q", map(memory_of, slots))
        self.least_bytes = min(self.memory_bytes, default=0)
        self._index(tasks_by_id)
        for idx in range(len(committed)):
            self._move(idx, _FINISHED)
        for idx in active:
            self._expect(idx, _WAITING)
            self._variant_of[idx].admitted += 1
            self._fly(idx)
        for idx, status in enumerate(committed):
            self._leave_chain(idx)
            self._record(idx, status)
        for idx in range(self.next_to_commit, len(slots)):
            self._offer(idx)

    def _index(self, tasks: Mapping[str, Task]) -> None:
        wanted = {name for task in tasks.values() for name in task.depends_on}
        place: dict[tuple[str, str, int], int] = {}
        chains: dict[tuple[str, str], deque[int]] = {}
        for idx, slot in enumerate(self.slots):
            if slot.schedule_idx != idx:
                raise ValueError(f"slot {idx} of the schedule says that it is {slot.schedule_idx}")
            task = tasks[slot.task_id]
            if self.memory_bytes[idx] > self.budget_bytes:
                raise InvalidExperiment(
                    f"task {task.id!r} with variant {slot.variant_id!r} may use "
                    f"{format_bytes(self.memory_bytes[idx])} of memory, but all trials together may use "
                    f"{format_bytes(self.budget_bytes)}: lower its memory, or raise design.memory_budget"
                )
            self._variant_of[idx].slots.append(idx)
            if task.chain is not None:
                chain = chains.setdefault((slot.variant_id, task.chain), deque())
                chain.append(idx)
                self._chain_of[idx] = chain
            if task.id in wanted:
                place[slot.variant_id, task.id, slot.repeat] = idx
            if task.depends_on:
                needs = [place.get((slot.variant_id, name, slot.repeat)) for name in task.depends_on]
                for name, need in zip(task.depends_on, needs, strict=True):
                    if need is None:
                        raise InvalidExperiment(
                            f"task {task.id!r} depends on {name!r}, which is not scheduled before it for "
                            f"variant {slot.variant_id!r} and repeat {slot.repeat}"
                        )
                    self._dependants.setdefault(need, []).append(idx)
                self._needs[idx] = tuple(need for need in needs if need is not None)
                self._unmet[idx] = len(needs)

    # What others read.

    @property
    def counts(self) -> Counts:
        waiting, queued, ready, *rest = self._counts
        return Counts(waiting + queued + ready, *rest)

    @property
    def done(self) -> bool:
        """Whether every slot is committed."""
        return self.next_to_commit == len(self.slots)

    @property
    def committable(self) -> bool:
        """Whether the slot whose turn it is has ended: it can be committed now."""
        return not self.done and self._state[self.next_to_commit] in (_FINISHED, _SKIPPED)

    @property
    def next_due_s(self) -> float | None:
        """When the first delayed slot may go on, for `advance`; None: no slot is delayed."""
        return self._delayed[0][0] if self._delayed else None

    def ready(self) -> Iterator[int]:
        """Yield the slots that could all start now, lowest first; changes nothing, and costs what is taken."""
        # Walks the heap from its top: the next in order is always a child of one that was yielded.
        heap, last = self._ready, -1
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            idx, at = heappop(frontier)
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(frontier, (heap[child], child))
            if idx != last and self._state[idx] == _READY:
                last = idx
                yield idx

    def not_started(self) -> Iterator[int]:
        """Yield every slot that has neither been started nor skipped, lowest first. Walks the whole schedule."""
        if self.counts.waiting:
            for idx in range(self.next_to_commit, len(self.slots)):
                if self._state[idx] in _NOT_STARTED:
                    yield idx

    def pruned(self, idx: int) -> str | None:
        """Return why the slot's variant is pruned; None: it is not."""
        return self._variant_of[idx].pruned

    def failed_dependency(self, idx: int) -> str | None:
        """Return a reason to skip the slot: its first dependency that is committed as other than success."""
        for need in self._needs.get(idx, ()):
            if self._state[need] == _COMMITTED and self._status[need] != _CODES[Status.SUCCESS]:
                return self._blame(need)
        return None

    def skip_reason(self, idx: int) -> str | None:
        """Return the reason that `skip` was given, until the slot is committed."""
        return self._reasons.get(idx)

    # What the coordinator does.

    def advance(self, now_s: float) -> None:
        """Let go on what was delayed until now; to be called before `decide`."""
        while self._delayed and self._delayed[0][0] <= now_s:
            _, idx = heappop(self._delayed)
            self._held.discard(idx)
            self._offer(idx)
        self._trim()

    def start(self, idx: int) -> None:
        """Note that a READY slot was dispatched."""
        self._expect(idx, _READY)
        self._fly(idx)
        self._trim()

    def requeue(self, idx: int, not_before_s: float) -> None:
        """Note that a slot in flight needs another attempt, no sooner than at `not_before_s`."""
        self._expect(idx, _IN_FLIGHT)
        self._land(idx, _WAITING)
        reason = self.pruned(idx) or self.failed_dependency(idx)
        if reason is not None:
            self.doomed[idx] = reason
        else:
            self._held.add(idx)
            heappush(self._delayed, (not_before_s, idx))

    def finish(self, idx: int) -> None:
        """Note that a slot in flight has its final completion, which waits for its turn to be committed."""
        self._expect(idx, _IN_FLIGHT)
        self._land(idx, _FINISHED)
        self._leave_chain(idx)

    def skip(self, idx: int, reason: str) -> None:
        """Note that a slot will not be started; that waits for its turn to be committed."""
        self._expect(idx, *_NOT_STARTED)
        was_ready = self._state[idx] == _READY
        self._move(idx, _SKIPPED)
        self._reasons[idx] = reason
        self.doomed.pop(idx, None)
        self._held.discard(idx)
        if was_ready:
            self._release(self._variant_of[idx])
        self._leave_chain(idx)
        self._trim()

    def commit(self, idx: int, status: Status) -> str | None:
        """Note the commit of the slot whose turn it is, with the status that `verdict_at_commit` gave.

        Returns the id of the variant that this commit pruned, or None.
        """
        self._expect(idx, _FINISHED, _SKIPPED)
        return self._record(idx, status)

    def prune(self, variant_id: str, reason: str) -> None:
        """Skip what is not committed of a variant. `commit` calls this; by hand, it makes history depend on time."""
        variant = self._variants[variant_id]
        variant.pruned = reason
        for idx in variant.slots[bisect_right(variant.slots, self.next_to_commit - 1) :]:
            if self._state[idx] in _NOT_STARTED:
                self._doom(idx, reason)
        self._trim()

    # How it is done.

    def _expect(self, idx: int, *states: int) -> None:
        if self._state[idx] not in states:
            due = " or ".join(_NAMES[state] for state in states)
            raise ValueError(f"slot {idx} is {_NAMES[self._state[idx]]}, not {due}")

    def _move(self, idx: int, state: int) -> None:
        self._counts[self._state[idx]] -= 1
        self._counts[state] += 1
        self._state[idx] = state

    def _fly(self, idx: int) -> None:
        self._move(idx, _IN_FLIGHT)
        self.in_flight.add(idx)
        self.in_flight_bytes += self.memory_bytes[idx]

    def _land(self, idx: int, state: int) -> None:
        self._move(idx, state)
        self.in_flight.remove(idx)
        self.in_flight_bytes -= self.memory_bytes[idx]
        self._release(self._variant_of[idx])

    def _offer(self, idx: int) -> None:
        # Let a slot go as far as its own conditions allow; harmless if they do not hold yet.
        if self._state[idx] != _WAITING or idx in self._unmet or idx in self._held or idx in self.doomed:
            return
        chain = self._chain_of.get(idx)
        if chain is not None and chain[0] != idx:
            return
        variant = self._variant_of[idx]
        if variant.admitted < variant.limit:
            variant.admitted += 1
            self._move(idx, _READY)
            heappush(self._ready, idx)
        else:
            self._move(idx, _QUEUED)
            heappush(variant.queue, idx)

    def _release(self, variant: _Variant) -> None:
        variant.admitted -= 1
        while variant.queue and variant.admitted < variant.limit:
            idx = heappop(variant.queue)
            if self._state[idx] == _QUEUED:
                variant.admitted += 1
                self._move(idx, _READY)
                heappush(self._ready, idx)

    def _leave_chain(self, idx: int) -> None:
        chain = self._chain_of.pop(idx, None)
        if chain is None:
            return
        # From the front only: of adopted trials, a later one may end first.
        while chain and chain[0] not in self._chain_of:
            chain.popleft()
        if chain:
            self._offer(chain[0])

    def _record(self, idx: int, status: Status) -> str | None:
        if idx != self.next_to_commit:
            raise ValueError(f"slot {idx} is not next to be committed, {self.next_to_commit} is")
        self._move(idx, _COMMITTED)
        self._status[idx] = _CODES[status]
        self._reasons.pop(idx, None)
        self._needs.pop(idx, None)
        self._unmet.pop(idx, None)
        self.next_to_commit += 1
        for dependant in self._dependants.pop(idx, ()):
            if status is Status.SUCCESS:
                self._meet(dependant)
            elif self._state[dependant] == _WAITING:
                self._doom(dependant, self._blame(idx))
        return self._judge(self._variant_of[idx], status)

    def _meet(self, idx: int) -> None:
        if self._unmet[idx] > 1:
            self._unmet[idx] -= 1
        else:
            del self._unmet[idx]
            self._offer(idx)

    def _judge(self, variant: _Variant, status: Status) -> str | None:
        # Success ends a row of failures. What was not the agent's doing says nothing about it: it neither
        # counts nor ends the row, or a flaky grader or a lost worker would save a broken agent, or condemn a good one.
        if status is Status.SUCCESS:
            variant.failures = 0
        elif status.blame is Blame.AGENT:
            variant.failures += 1
            if variant.pruned is None and variant.failures == self._prune_after:
                self.prune(variant.id, f"variant {variant.id} was pruned after {variant.failures} failures in a row")
                return variant.id
        return None

    def _blame(self, idx: int) -> str:
        return f"it depends on task {self.slots[idx].task_id}, which ended as {_STATUSES[self._status[idx]]}"

    def _doom(self, idx: int, reason: str) -> None:
        # A READY slot keeps its place among its variant's: only pruning dooms one, and then none needs it.
        self._move(idx, _WAITING)
        self._held.discard(idx)
        self.doomed[idx] = reason

    def _trim(self) -> None:
        # Keeps live entries on top, so that reading a top changes nothing. Where stale ones pile up below one,
        # builds anew: as often as the operations that made them stale have paid for.
        while self._ready and self._state[self._ready[0]] != _READY:
            heappop(self._ready)
        if len(self._ready) > 2 * self._counts[_READY] + _SLACK:
            self._ready = sorted({idx for idx in self._ready if self._state[idx] == _READY})
        while self._delayed and self._delayed[0][1] not in self._held:
            heappop(self._delayed)
        if len(self._delayed) > 2 * len(self._held) + _SLACK:
            self._delayed = sorted(entry for entry in self._delayed if entry[1] in self._held)
