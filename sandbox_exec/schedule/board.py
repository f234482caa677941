"""The board: how far each slot of a run is, and what holds it back.

Theory of operation. The coordinator owns one board and alone changes it. A slot goes through these states:

    WAITING -> READY -> IN_FLIGHT -> FINISHED -> COMMITTED
    the first two -> SKIPPED -> COMMITTED;  IN_FLIGHT -> WAITING, for another attempt
    FINISHED -> BLOCKED -> WAITING or FINISHED, where a failed dependency blocks

WAITING: a dependency is not committed, an earlier slot of its chain has not ended, or its time has not come.
READY: nothing of its own holds it back, and the run's queue has it. What holds back many at once (concurrency, memory,
a variant's limit, a lane, a gate) is asked when the queue is: `take` gets the variants that are closed.

Gates. Slots of a task with `serial: first` stand at the front of the schedule and never see the queue: while one of
them has not ended, nothing else starts, and they go one by one, in the order of the schedule. One with `serial: global`
goes through the queue; when its turn has come nothing is taken any more, until all that is in flight has ended, and
then until it has. So does another try at a first one: it stands behind others, which may be what it waits for.

Every rule points from a higher `schedule_idx` to a lower one: dependencies stand earlier in the schedule (the
constructor refuses others), chains go in its order, commits too. The lowest slot that is not committed thus
waits for nothing but trials in flight and the clock, which is why no board can get stuck, unless it is blocked.

What is pruned or skipped follows from commits alone, see `scheduler.verdict_at_commit`.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from sandbox_exec.contracts.experiment import Design
from sandbox_exec.contracts.status import Blame, Status
from sandbox_exec.contracts.words import Cell, Slot, Task, Variant
from sandbox_exec.errors import InvalidExperiment, ProtocolFault
from sandbox_exec.schedule.queues import Entry, TaskQueue
from sandbox_exec.units import format_bytes

# States fit one byte of an array: there may be a hundred thousand slots, and few of them are in motion.
_WAITING, _READY, _IN_FLIGHT, _FINISHED, _SKIPPED, _COMMITTED, _BLOCKED = range(7)
_NOT_STARTED: Final = (_WAITING, _READY)
_NAMES: Final = ("waiting", "ready", "in flight", "finished", "skipped", "committed", "blocked")
_STATUSES: Final = tuple(Status)
_ALL: Final = sys.maxsize  # slots, those among them that are yet to come
_SLACK: Final = 64  # stale entries of a heap that are not worth building it anew
_CODES: Final = {status: code for code, status in enumerate(_STATUSES)}


class Counts(NamedTuple):
    """How many slots are in which state; `waiting` are all that have not been started or skipped."""

    waiting: int
    in_flight: int
    finished: int
    skipped: int
    committed: int
    blocked: int = 0


class _Variant:
    # What the board knows of one variant.
    __slots__ = ("failures", "id", "in_flight", "limit", "pruned", "ready", "slots")

    def __init__(self, variant: Variant) -> None:
        self.id = variant.id
        self.limit = variant.max_parallel_trials
        self.in_flight = 0
        self.ready = 0
        self.slots = array("q")
        self.failures = 0  # committed one after the other, blamed on the agent
        self.pruned: str | None = None  # the reason


class Board:
    """The coordinator's view of a run's progress. Not for use from several threads.

    `tasks_by_id` may grow before `add` is called. `memory_bytes` is the ceiling of one trial. `start_s` is the clock
    when the run's time began: a continued run passes the present less what was used before; `submitted_s` has when
    each slot joined, by that clock, where it was later. `committed` has the statuses of the slots committed so far,
    in order; `active` the slots that were dispatched and are not committed: they begin as in flight, whatever the
    limits; `withdrawn` those that must not start, and why; `blocked` the one that failed and others need; `repeat_of`
    the repeats that retried slots stand for; `ended` what `ended_before` was, and the reason that `end` was given.

    Raises `InvalidExperiment` for what could never be run: a ceiling above the budget, a dependency that
    is missing or stands later in the schedule.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        tasks_by_id: Mapping[str, Task],
        variants_by_id: Mapping[str, Variant],
        design: Design,
        queue: TaskQueue,
        memory_bytes: int,
        budget_bytes: int,
        *,
        start_s: float = 0.0,
        submitted_s: Sequence[float] = (),
        committed: Sequence[Status] = (),
        active: Iterable[int] = (),
        withdrawn: Mapping[int, str] | None = None,
        blocked: int | None = None,
        repeat_of: Mapping[int, int] | None = None,
        ended: tuple[int, str] = (0, ""),
    ) -> None:
        if memory_bytes > budget_bytes:
            raise InvalidExperiment(
                f"a trial may use {format_bytes(memory_bytes)} of memory, but all trials together may use "
                f"{format_bytes(budget_bytes)}: lower sandbox.memory, or raise design.memory_budget"
            )
        fit = budget_bytes // memory_bytes if memory_bytes else design.max_concurrency
        self.slots: list[Slot] = []
        self.queue = queue
        self.max_concurrency = design.max_concurrency
        self.most_at_once = min(design.max_concurrency, fit)
        self.ends_s = None if design.max_duration_s is None else start_s + design.max_duration_s
        self.in_flight: set[int] = set()
        self.doomed: dict[int, str] = {}  # not started and certain to be skipped: why
        self.next_to_commit = 0
        self.depth: Counter[int] = Counter()  # what has not been started and is not doomed, by priority
        self.full: set[str] = set()  # variants at their limit
        self.capacity_warned = False  # set by who has shown the warning about the backend's capacity

        self._tasks = tasks_by_id
        self._prune_after = design.prune_after_failures
        self._start_s = start_s
        self._submitted_s = array("d")
        self._state = bytearray()
        self._status = bytearray()  # of committed slots: an index of _STATUSES
        self._counts = [0] * len(_NAMES)
        self._delayed: list[tuple[float, int]] = []  # a heap of (not before, slot); of slots not below: stale
        self._held: set[int] = set()
        self._reasons: dict[int, str] = {}  # of SKIPPED slots
        self.ended_before, self._ended = ended  # no slot below it is to be run any more, and why
        self._variants = {key: _Variant(variant) for key, variant in variants_by_id.items()}
        self._variant_of: list[_Variant] = []
        self._chains: dict[tuple[str, str], deque[int]] = {}  # slots that have not ended, in order
        self._chain_of: dict[int, deque[int]] = {}
        self._needs: dict[int, tuple[int, ...]] = {}  # the slots that a slot depends on
        self._unmet: dict[int, int] = {}  # how many of them are not committed as success
        self._dependants: dict[int, list[int]] = {}
        self._repeat_of: dict[int, int] = {}  # of slots that are tried again on request
        self._front = 0  # how many slots of `serial: first` the schedule begins with
        self._firsts: set[int] = set()  # those of them that have not ended
        self._first_queue: deque[int] = deque()  # in order; of those not in `_firsts`: stale
        self._gate: int | None = None  # the slot of `serial: global` whose turn has come
        self._alone: int | None = None  # the one that is in flight

        self._append(slots, submitted_s, repeat_of or {})
        for idx in range(len(committed)):
            self._move(idx, _FINISHED)
        for idx in active:
            self._expect(idx, _WAITING)
            self._fly(idx)
        for idx, reason in (withdrawn or {}).items():
            if self._state[idx] == _WAITING:
                self._doom(idx, reason)
        if blocked is not None:
            self._leave(blocked)
            self.block(blocked)
        for idx, status in enumerate(committed):
            self._leave(idx)
            self._record(idx, status)
        for idx in range(self.next_to_commit, self.ended_before):
            if self._state[idx] == _WAITING and idx not in self._repeat_of:
                self._doom(idx, self._ended)
        for idx in range(self.next_to_commit, len(slots)):
            self._offer(idx)

    def add(self, slots: Sequence[Slot], submitted_s: float, repeat_of: Mapping[int, int] | None = None) -> None:
        """Let further slots join the schedule: they stand after all others."""
        first = len(self.slots)
        self._append(slots, [submitted_s] * len(slots), repeat_of or {})
        for idx in range(first, len(self.slots)):
            reason = self.pruned(idx) or self.failed_dependency(idx)
            if reason is not None:
                self._doom(idx, reason)
            self._offer(idx)

    def _append(self, slots: Sequence[Slot], submitted_s: Sequence[float], repeat_of: Mapping[int, int]) -> None:
        self._repeat_of |= repeat_of
        needs = self._needs_of(slots)
        for at, slot in enumerate(slots):
            idx, task = len(self.slots), self._tasks[slot.task_id]
            if slot.schedule_idx != idx:
                raise ValueError(f"slot {idx} of the schedule says that it is {slot.schedule_idx}")
            variant = self._variants[slot.variant_id]
            self.slots.append(slot)
            self._variant_of.append(variant)
            self._state.append(_WAITING)
            self._status.append(0)
            self._counts[_WAITING] += 1
            self._submitted_s.append(submitted_s[at] if submitted_s else self._start_s)
            self.depth[task.protocol.priority] += 1
            variant.slots.append(idx)
            if task.chain is not None:
                chain = self._chains.setdefault((slot.variant_id, task.chain), deque())
                chain.append(idx)
                self._chain_of[idx] = chain
            if task.protocol.serial == "first" and idx == self._front:
                self._front += 1
                self._firsts.add(idx)
                self._first_queue.append(idx)
            if idx in needs:
                self._depend(idx, needs[idx])

    def _needs_of(self, slots: Sequence[Slot]) -> dict[int, tuple[int, ...]]:
        # The slots that each of these slots, which are about to join, depends on. Of several tries, on the last one.
        wanted = {name for slot in slots for name in self._tasks[slot.task_id].depends_on}
        found: dict[int, tuple[int, ...]] = {}
        place: dict[Cell, int] = {}
        for slot in itertools.chain(self.slots, slots) if wanted else ():
            idx, task = slot.schedule_idx, self._tasks[slot.task_id]
            repeat = self._repeat_of.get(idx, slot.repeat)
            if idx >= len(self.slots) and task.depends_on:
                cells = [Cell(slot.variant_id, name, repeat) for name in task.depends_on]
                for cell in cells:
                    if cell not in place:
                        raise InvalidExperiment(
                            f"task {task.id!r} depends on {cell.task_id!r}, which is not scheduled before it for "
                            f"variant {cell.variant_id!r} and repeat {repeat}"
                        )
                found[idx] = tuple(place[cell] for cell in cells)
            if task.id in wanted:
                place[Cell(slot.variant_id, task.id, repeat)] = idx
        return found

    def _depend(self, idx: int, needs: tuple[int, ...]) -> None:
        unmet = [need for need in needs if self._state[need] != _COMMITTED or not self._succeeded(need)]
        self._needs[idx] = needs
        if unmet:
            self._unmet[idx] = len(unmet)
            for need in unmet:
                self._dependants.setdefault(need, []).append(idx)

    # What others read.

    @property
    def counts(self) -> Counts:
        waiting, ready, *rest = self._counts
        return Counts(waiting + ready, *rest)

    @property
    def done(self) -> bool:
        """Whether every slot is committed."""
        return self.next_to_commit == len(self.slots)

    @property
    def committable(self) -> bool:
        """Whether the slot whose turn it is has ended: it can be committed now."""
        return not self.done and self._state[self.next_to_commit] in (_FINISHED, _SKIPPED)

    @property
    def blocked(self) -> int | None:
        """The slot that cannot be committed, as others need it and it failed; it is the next to be."""
        return self.next_to_commit if self._counts[_BLOCKED] else None

    @property
    def stuck(self) -> bool:
        """Whether nothing can happen any more until what is blocked is retried or given up."""
        first = self._first()
        may_start = self._counts[_READY] if first is None else self._state[first] == _READY
        return self.blocked is not None and not (may_start or self._delayed or self.doomed or self.in_flight)

    @property
    def next_due_s(self) -> float | None:
        """When the first delayed slot may go on, for `advance`; None: no slot is delayed."""
        return self._delayed[0][0] if self._delayed else None

    def ready_variants(self) -> Iterator[str]:
        """Yield the variants of which a slot could start, were they not closed."""
        return (variant.id for variant in self._variants.values() if variant.ready)

    def not_started(self) -> Iterator[int]:
        """Yield every slot that has neither been started nor skipped, lowest first. Walks the whole schedule."""
        if self.counts.waiting:
            for idx in range(self.next_to_commit, len(self.slots)):
                if self._state[idx] in _NOT_STARTED:
                    yield idx

    def committed_as(self, idx: int) -> Status | None:
        """Return what a slot was committed as; None: it is not committed."""
        return _STATUSES[self._status[idx]] if self._state[idx] == _COMMITTED else None

    def skipped_for(self, indices: Iterable[int]) -> list[int]:
        """Return what was committed as skipped because it needs one of these slots, or one that was skipped so."""
        missing, found = set(indices), []
        for idx, needs in self._needs.items():  # in the order of the schedule
            if self.committed_as(idx) is Status.SKIPPED and not missing.isdisjoint(needs):
                missing.add(idx)
                found.append(idx)
        return found

    def priority(self, idx: int) -> int:
        return self._tasks[self.slots[idx].task_id].protocol.priority

    def submitted_s(self, idx: int) -> float:
        return self._submitted_s[idx]

    def pruned(self, idx: int) -> str | None:
        """Return why the slot's variant is pruned, or the run is at its end; None: neither is."""
        is_over = idx < self.ended_before and idx not in self._repeat_of  # somebody asked for those
        return self._variant_of[idx].pruned or (self._ended if is_over else None)

    def is_pruned(self, variant_id: str) -> bool:
        return self._variants[variant_id].pruned is not None

    def failed_dependency(self, idx: int) -> str | None:
        """Return a reason to skip the slot: its first dependency that is committed as other than success."""
        for need in self._needs.get(idx, ()):
            if self._state[need] == _COMMITTED and not self._succeeded(need):
                return self._blame(need)
        return None

    def skip_reason(self, idx: int) -> str | None:
        """Return the reason that `skip` was given, until the slot is committed."""
        return self._reasons.get(idx)

    def has_dependants(self, idx: int) -> bool:
        """Whether others wait for the slot to be committed as success."""
        waiting = (one for one in self._dependants.get(idx, ()) if one not in self.doomed)
        return any(self._state[one] in _NOT_STARTED for one in waiting)

    # What the coordinator does.

    def advance(self, now_s: float) -> None:
        """Let go on what was delayed until now; to be called before `decide`."""
        while self._delayed and self._delayed[0][0] <= now_s:
            _, idx = heappop(self._delayed)
            self._held.discard(idx)
            self._offer(idx)
        self._trim()

    def take(self, now_s: float, closed: Collection[str]) -> int | None:
        """Start the slot whose turn it is, and return it; None if there is none now. `closed`: see the queue's."""
        idx = self._next(now_s, closed)
        if idx is not None:
            self.start(idx)
        return idx

    def start(self, idx: int) -> None:
        """Note that a READY slot was dispatched."""
        self._expect(idx, _READY)
        self.queue.discard(idx)
        self._fly(idx)

    def requeue(self, idx: int, not_before_s: float) -> None:
        """Note that a slot in flight, or blocked, needs another attempt, no sooner than at `not_before_s`."""
        self._expect(idx, _IN_FLIGHT, _BLOCKED)
        if self._state[idx] == _BLOCKED:
            self._return(idx)
        self._land(idx, _WAITING)
        reason = self.pruned(idx) or self.failed_dependency(idx)
        if reason is not None:
            self._doom(idx, reason)
        else:
            self._held.add(idx)
            heappush(self._delayed, (not_before_s, idx))
        chain = self._chain_of.get(idx)
        if chain is not None:
            self._offer(chain[0])

    def finish(self, idx: int) -> None:
        """Note that a slot in flight has its final completion, which waits for its turn to be committed."""
        self._expect(idx, _IN_FLIGHT, _BLOCKED)
        self._land(idx, _FINISHED)
        self._leave(idx)

    def block(self, idx: int) -> None:
        """Note that the slot whose turn it is must not be committed as it ended."""
        self._expect(idx, _FINISHED, _WAITING)
        self._move(idx, _BLOCKED)

    def skip(self, idx: int, reason: str) -> None:
        """Note that a slot will not be started; that waits for its turn to be committed."""
        self._expect(idx, *_NOT_STARTED)
        self.queue.discard(idx)
        self._move(idx, _SKIPPED)
        self._reasons[idx] = reason
        self.doomed.pop(idx, None)
        self._held.discard(idx)
        self._leave(idx)
        self._trim()

    def withdraw(self, idx: int, reason: str) -> None:
        """Let a slot that has not started be skipped."""
        self._expect(idx, *_NOT_STARTED)
        self._doom(idx, self.doomed.get(idx, reason))

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

    def end(self, reason: str) -> None:
        """Skip all that is not committed: the queue has said, after a commit, that no more is to be run."""
        if self.ended_before == _ALL:
            return
        self.ended_before, self._ended = _ALL, reason
        for idx in list(self.not_started()):
            if idx not in self._repeat_of:
                self._doom(idx, reason)
        self._trim()

    def reopen(self) -> bool:
        """Run what is added from now on: the queue goes on. Return whether it had ended."""
        had_ended = self.ended_before == _ALL
        if had_ended:
            self.ended_before = len(self.slots)
        return had_ended

    # How it is done.

    def _next(self, now_s: float, closed: Collection[str]) -> int | None:
        if self._alone is not None:
            return None
        first = self._first()
        if first is not None:
            may = not self.in_flight and self._state[first] == _READY and self._variant_of[first].id not in closed
            return first if may else None
        gate, self._gate = self._gate, None
        if gate is not None and self._state[gate] == _READY:
            if self._variant_of[gate].id not in closed:
                self._gate = gate
                return None if self.in_flight else gate
            self._put(gate)  # its lane is shut: others do not wait for that
        idx = self.queue.take(now_s, closed)
        if idx is None:
            return None
        if not 0 <= idx < len(self.slots) or self._state[idx] != _READY or self._variant_of[idx].id in closed:
            raise ProtocolFault(f"{type(self.queue).__name__}.take gave slot {idx}, which cannot start now")
        if self._is_global(idx) and self.in_flight:
            self._gate = idx
            return None
        return idx

    def _first(self) -> int | None:
        # The slot of `serial: first` whose turn it is; None: all of them have ended.
        while self._first_queue and self._first_queue[0] not in self._firsts:
            self._first_queue.popleft()
        return self._first_queue[0] if self._first_queue else None

    def _is_global(self, idx: int) -> bool:
        return idx >= self._front and self._tasks[self.slots[idx].task_id].protocol.serial is not None

    def _expect(self, idx: int, *states: int) -> None:
        if self._state[idx] not in states:
            due = " or ".join(_NAMES[state] for state in states)
            raise ValueError(f"slot {idx} is {_NAMES[self._state[idx]]}, not {due}")

    def _move(self, idx: int, state: int) -> None:
        before = self._state[idx]
        self._counts[before] -= 1
        self._counts[state] += 1
        self._state[idx] = state
        if before != state:
            variant = self._variant_of[idx]
            variant.ready += (state == _READY) - (before == _READY)
            if idx not in self.doomed:
                self.depth[self.priority(idx)] += (state <= _READY) - (before <= _READY)
            if _IN_FLIGHT in (before, state):
                variant.in_flight += 1 if state == _IN_FLIGHT else -1
                is_full = variant.limit is not None and variant.in_flight >= variant.limit  # more, if adopted
                (self.full.add if is_full else self.full.discard)(variant.id)

    def _fly(self, idx: int) -> None:
        self._move(idx, _IN_FLIGHT)
        self.in_flight.add(idx)
        if self._is_global(idx):
            self._alone, self._gate = idx, None

    def _land(self, idx: int, state: int) -> None:
        self._move(idx, state)
        self.in_flight.discard(idx)
        if self._alone == idx:  # of adopted trials, several may be global: all but one had ended
            self._alone = next((one for one in self.in_flight if self._is_global(one)), None)

    def _offer(self, idx: int) -> None:
        # Let a slot go as far as its own conditions allow; harmless if they do not hold yet.
        if self._state[idx] != _WAITING or idx in self._unmet or idx in self._held or idx in self.doomed:
            return
        chain = self._chain_of.get(idx)
        if chain is not None and (chain[0] != idx or self.in_flight.intersection(itertools.islice(chain, 1, 2))):
            return  # of a chain one runs at a time: the first, or the second if the first had ended and is tried again
        self._move(idx, _READY)
        if idx not in self._firsts:
            self._put(idx)

    def _put(self, idx: int) -> None:
        slot, protocol = self.slots[idx], self._tasks[self.slots[idx].task_id].protocol
        submitted_s = self._submitted_s[idx]
        due_s = None if protocol.deadline_s is None else submitted_s + protocol.deadline_s
        cell = Cell(slot.variant_id, slot.task_id, slot.repeat)
        self.queue.put(Entry(idx, cell, protocol.priority, submitted_s, due_s))

    def _leave(self, idx: int) -> None:
        # It has ended: what waited for that goes on.
        self._firsts.discard(idx)
        chain = self._chain_of.pop(idx, None)
        if chain is None:
            return
        # From the front only: of adopted trials, a later one may end first.
        while chain and chain[0] not in self._chain_of:
            chain.popleft()
        if chain:
            self._offer(chain[0])

    def _return(self, idx: int) -> None:
        # It had ended, and is not to have: what waited for that waits again. What has begun since is let end.
        if idx < self._front:
            self._firsts.add(idx)
            self._first_queue.appendleft(idx)
        task = self._tasks[self.slots[idx].task_id]
        if task.chain is None:
            return
        self._chain_of[idx] = chain = self._chains[self.slots[idx].variant_id, task.chain]
        if chain and self._state[chain[0]] == _READY:
            self.queue.discard(chain[0])
            self._move(chain[0], _WAITING)
        chain.appendleft(idx)

    def _record(self, idx: int, status: Status) -> str | None:
        if idx != self.next_to_commit:
            raise ValueError(f"slot {idx} is not next to be committed, {self.next_to_commit} is")
        self._move(idx, _COMMITTED)
        self._status[idx] = _CODES[status]
        self._reasons.pop(idx, None)
        self._unmet.pop(idx, None)
        self.next_to_commit += 1
        for dependant in self._dependants.pop(idx, ()):
            if status is Status.SUCCESS:
                self._meet(dependant)
            elif self._state[dependant] == _WAITING:
                self._doom(dependant, self._blame(idx))
        return self._judge(self._variant_of[idx], status)

    def _meet(self, idx: int) -> None:
        if idx not in self._unmet:  # it was skipped
            return
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

    def _succeeded(self, idx: int) -> bool:
        return self._status[idx] == _CODES[Status.SUCCESS]

    def _blame(self, idx: int) -> str:
        return f"it depends on task {self.slots[idx].task_id}, which ended as {_STATUSES[self._status[idx]]}"

    def _doom(self, idx: int, reason: str) -> None:
        self.queue.discard(idx)
        self._move(idx, _WAITING)
        self._held.discard(idx)
        if idx not in self.doomed:
            self.depth[self.priority(idx)] -= 1
        self.doomed[idx] = reason

    def _trim(self) -> None:
        # Keeps a live entry on top, so that reading the top changes nothing. Where stale ones pile up below it,
        # builds anew: as often as the operations that made them stale have paid for.
        while self._delayed and self._delayed[0][1] not in self._held:
            heappop(self._delayed)
        if len(self._delayed) > 2 * len(self._held) + _SLACK:
            self._delayed = sorted(entry for entry in self._delayed if entry[1] in self._held)
