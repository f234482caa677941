"""The ledger: a run's schedule, and all that decides what of it comes next, as run.db keeps it.

Whoever holds the run holds its ledger: the coordinator while it works, or a command that adds tasks to a run that
nobody works at. Everything that is asked for (tasks to add, slots to purge, dead letters to retry) is one transaction:
it is on the disk before it is answered, so that a crash leaves all of it or nothing.
"""

from __future__ import annotations

import fnmatch
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import psutil
from pydantic import Field, ValidationError

from sandbox_exec.contracts import Cell, Contract, Slot, Status, Task, TrialCompletion, derive_trial_id
from sandbox_exec.contracts.experiment import MAX_SLOTS, Experiment, Fault, faults_of, shown, told
from sandbox_exec.contracts.queue import Priority
from sandbox_exec.dispatching import IMAGE, image_digests
from sandbox_exec.errors import InvalidExperiment, InvalidValue, ProtocolFault, QueueFull
from sandbox_exec.experiment import MISSING, check_files, file_digests
from sandbox_exec.orders import make_queue
from sandbox_exec.schedule.admission import Refused, Waiting, admit, content_digest, merge
from sandbox_exec.schedule.board import Board
from sandbox_exec.schedule.lanes import Lanes
from sandbox_exec.schedule.queues import number
from sandbox_exec.store import Committed, RunStore

DISPLACED: Final = "Displaced"
PURGED: Final = "Purged"

QUEUE: Final = "queue"  # these are names in the store's state
BLOCKED: Final = "blocked"
_ENDED, _GIVEN_UP, _FORGIVEN, _LANE = "ended", "given up", "forgiven", "lane "
_BUDGET_SHARE: Final = 0.8  # of the machine's memory, where the design names no budget
_ENOUGH: Final = "the queue has seen enough"


class Submitted(Contract):
    """What came of a submission. It is on the disk."""

    tasks: tuple[str, ...] = Field(description="Ids of the tasks that were added.")
    merged: Mapping[str, str] = Field(description="Ids of those that were not, as the run has the same: by its id.")
    trials: int = Field(description="How many trials are scheduled for them now.")
    displaced: tuple[str, ...] = Field(default=(), description="Trials that made room for them.")
    waiting: int = Field(description="How many trials wait now.")


class SlotFilter(Contract):
    """Which slots are meant: those that fit everything that is named here. Names may have * and ?."""

    variant: str | None = None
    task: str | None = None
    tag: str | None = None
    priority: Priority | None = None

    def fits(self, slot: Slot, task: Task) -> bool:
        return (
            (self.variant is None or fnmatch.fnmatchcase(slot.variant_id, self.variant))
            and (self.task is None or fnmatch.fnmatchcase(slot.task_id, self.task))
            and (self.tag is None or any(fnmatch.fnmatchcase(tag, self.tag) for tag in task.protocol.tags))
            and (self.priority is None or task.protocol.priority == self.priority)
        )


class Ledger:
    """What of a run is kept in memory. `now_s` is the clock that the run is worked at by."""

    def __init__(self, store: RunStore, experiment: Experiment, now_s: Callable[[], float]) -> None:
        self.store, self._now_s = store, now_s
        self.experiment = with_submitted(store, experiment)
        self.tasks = {task.id: task for task in self.experiment.tasks}
        self.variants = {variant.id: variant for variant in experiment.variants}
        self.lanes = Lanes(experiment.lanes, experiment.variants)
        self._digests: dict[str, str] = {}  # of what tasks say, by id; made when it is first asked for
        self._owners: dict[str, str] = {}  # the other way round
        state, wall_s = store.state(), time.time()
        for name in self.lanes.by_name:
            if f"{_LANE}{name}" in state:
                self.lanes.restore(name, state[f"{_LANE}{name}"], now_s(), wall_s)
        self.queue = make_queue(experiment)
        self.queue.restore(state.get(QUEUE), self.experiment.tasks)
        self.withdrawn = store.withdrawn()
        self.forgiven: dict[str, int] = state.get(_FORGIVEN) or {}  # by trial, its attempts before a retry
        commits = list(store.commits())
        self.began_s = now_s() - _used_before_s(store, commits)
        self._given_up: int | None = state.get(_GIVEN_UP)
        self.retries: dict[int, int] = {}  # by slot, the slot that it is another try at
        is_dropped = self._given_up == len(commits)  # and not committed: it waits for that, as it ended
        blocked = self._given_up if is_dropped else state.get(BLOCKED)
        ended = (state.get(_ENDED, 0), _ENOUGH)
        self.board = self._board([one.status for one in commits], blocked, ended, now_s() - wall_s)
        if is_dropped:
            self.board.finish(len(commits))
        self._go_on()

    def _board(
        self, committed: Sequence[Status], blocked: int | None, ended: tuple[int, str], clock_offset_s: float
    ) -> Board:
        slots, submitted_s = [], []
        for slot, submitted_at, retry_of in self.store.scheduled():
            slots.append(slot)
            submitted_s.append(submitted_at + clock_offset_s)
            if retry_of is not None:
                self.retries[slot.schedule_idx] = retry_of
        design = self.experiment.design
        return Board(
            slots,
            self.tasks,
            self.variants,
            design,
            self.queue,
            memory_of(self.experiment),
            design.memory_budget or int(psutil.virtual_memory().total * _BUDGET_SHARE),
            start_s=self.began_s,
            submitted_s=submitted_s,
            committed=committed,
            active=[one.slot.schedule_idx for one in self.store.active()],
            withdrawn={idx: reason for idx, (_, reason) in self.withdrawn.items()},
            blocked=blocked,
            repeat_of={idx: slots[self._root(idx)].repeat for idx in self.retries},
            ended=ended,
        )

    # --- what follows from commits ---

    def observe(self, completion: TrialCompletion) -> None:
        """Tell the queue of a commit, and schedule what follows from it. In the transaction of the commit."""
        if completion.slot.schedule_idx not in self.retries:  # the first try was what the queue asked for
            self._schedule(self.queue.observe(completion))
            self._go_on()

    def save_queue(self) -> None:
        """Keep what the queue has learnt, with the commits that it learnt it from."""
        self.store.set_state(QUEUE, self.queue.snapshot())

    def _go_on(self) -> None:
        if not self.queue.should_continue():
            self.board.end(_ENOUGH)
        elif self.board.reopen():
            self.store.set_state(_ENDED, self.board.ended_before)

    def save_lanes(self) -> None:
        """Keep what has changed of the lanes. Cheap: inside a transaction of others'."""
        for name in self.lanes.take_changed():
            self.store.set_state(f"{_LANE}{name}", self.lanes.snapshot(name, self._now_s(), time.time()))

    def figures(self) -> dict[str, Any]:
        """How the lanes stand, and what the queue has learnt."""
        report = getattr(self.queue, "report", None)
        return {"lanes": self.lanes.status(self._now_s()), "queue": report() if report is not None else None}

    def blocks(self, idx: int, status: Status) -> bool:
        """Whether the slot whose turn it is must not be committed: others need it, and it failed."""
        return (
            self.experiment.design.queue.failed_dependency == "block"
            and status not in (Status.SUCCESS, Status.SKIPPED)
            and self._given_up != idx
            and self.board.has_dependants(idx)
        )

    def block(self, idx: int) -> None:
        self.board.block(idx)
        self.store.set_state(BLOCKED, idx)

    def skip_type(self, idx: int) -> str:
        """The type of the error with which a skipped slot is committed."""
        return self.withdrawn[idx][0] if idx in self.withdrawn else "Skipped"

    # --- what is asked for ---

    def obey(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked for in a message of JSON, and return the answer, which is one too.

        Raises `InvalidValue`, or what the method that does it raises.
        """
        match request:
            case {"do": "submit", "tasks": list(tasks), "inputs": dict(inputs)} if _all_text(inputs.values()):
                given = [Task.model_validate(one) for one in tasks]  # one that is a task already is taken as it is
                return {"submitted": self.submit(given, inputs).model_dump(mode="json")}
            case {"do": "purge", "filter": dict(which)}:
                return {"trials": self.purge(SlotFilter.model_validate(which))}
            case {"do": "retry", "trials": list(trials)} if _all_text(trials):
                return {"trials": self.retry(self._indices(trials))}
            case {"do": "give_up", "trials": list(trials)} if _all_text(trials):
                return {"trials": self.give_up(self._indices(trials))}
        raise InvalidValue(f"{shown(request)} is no request; allowed: submit, purge, retry, give_up")

    def _indices(self, trial_ids: Sequence[str]) -> list[int]:
        wanted = set(trial_ids)
        found = {
            derive_trial_id(slot): slot.schedule_idx for slot in self.board.slots if derive_trial_id(slot) in wanted
        }
        if unknown := wanted - set(found):
            raise InvalidValue(f"the run has no trial {', '.join(sorted(unknown))}")
        return [found[trial_id] for trial_id in trial_ids]

    def submit(self, tasks: Sequence[Task], inputs: Mapping[str, str]) -> Submitted:
        """Add tasks: all of them, or none and an error. Those that the run has already are merged or refused.

        Raises `InvalidExperiment` or `InvalidValue` with what is wrong with them, `QueueFull` if there is no room now.
        """
        settings, board = self.experiment.design.queue, self.board
        self._refuse_if_over()
        if not self._digests:
            self._digests = {task.id: content_digest(task) for task in self.tasks.values()}
            self._owners = {digest: task_id for task_id, digest in reversed(self._digests.items())}
        new, digests, merged = merge(settings.duplicates, tasks, self._digests, self._owners)
        check_tasks(self.experiment, new, self.tasks)
        each = len(self.experiment.variants) * self.experiment.design.repeats
        if len(board.slots) + len(new) * each > MAX_SLOTS:
            raise InvalidValue(f"a run has {MAX_SLOTS} trials at most: begin another one")
        coming = Counter(task.protocol.priority for task in new)
        needed = {name for task in new for name in task.depends_on}
        counts = {one: count * each for one, count in coming.items()}
        admitted = admit(settings, board.depth, counts, lambda: self._lowest(needed))
        if isinstance(admitted, Refused):
            raise (InvalidValue if admitted.never else QueueFull)(admitted.reason)
        reason = "it was displaced by tasks of a higher priority"
        displaced = dict.fromkeys(admitted.displaced, (DISPLACED, reason))
        self.tasks |= {task.id: task for task in new}
        with self.store.batch():
            cells = self.queue.submit(new)
            self._go_on()
            slots = self._schedule(cells, new, inputs)
            self._withdraw(displaced)
            self.save_queue()
            ids = [task.id for task in new]
            self.store.event("submitted", tasks=len(ids), merged=len(merged), trials=len(slots))
            for idx in displaced:
                self.store.event("displaced", trial_id=derive_trial_id(board.slots[idx]))
        self.experiment = self.experiment.model_copy(update={"tasks": (*self.experiment.tasks, *new)})
        self._digests |= digests
        self._owners = {digest: task_id for task_id, digest in digests.items()} | self._owners
        return Submitted(
            tasks=tuple(ids),
            merged=merged,
            trials=len(slots),
            displaced=tuple(derive_trial_id(board.slots[idx]) for idx in displaced),
            waiting=board.depth.total(),
        )

    def purge(self, which: SlotFilter) -> list[str]:
        """Take out of the schedule what waits and is meant: it is committed as skipped. Return its trials."""
        board = self.board
        waiting = [idx for idx in board.not_started() if idx not in board.doomed]
        meant = [idx for idx in waiting if which.fits(board.slots[idx], self.tasks[board.slots[idx].task_id])]
        with self.store.batch():
            self._withdraw(dict.fromkeys(meant, (PURGED, "it was purged on request")))
            self.store.event("purged", trials=len(meant), filter=which.model_dump(exclude_none=True))
        return [derive_trial_id(board.slots[idx]) for idx in meant]

    def retry(self, indices: Sequence[int]) -> dict[str, str]:
        """Schedule dead letters again, and what was skipped because of them.

        Return the trials that do so, by those that they are tries of.
        """
        board, origins = self.board, set(self.retries.values())
        self._refuse_if_over()
        for idx in indices:
            name, slot = derive_trial_id(board.slots[idx]), board.slots[idx]
            if idx in origins:
                raise InvalidValue(f"{name} is being retried already, or was")
            if idx != board.blocked and board.committed_as(idx) in (None, Status.SUCCESS) and idx not in self.withdrawn:
                raise InvalidValue(f"{name} has not failed for good")
            if board.is_pruned(slot.variant_id):
                raise InvalidValue(
                    f"{name} cannot be retried: variant {slot.variant_id} is pruned, and would be skipped"
                )
        blocked = board.blocked if board.blocked in indices else None
        chosen = {idx for idx in indices if idx != blocked}
        # What was skipped for want of one of them has another chance too, unless somebody took it out.
        skipped = [idx for idx in board.skipped_for(chosen) if idx not in origins and idx not in self.withdrawn]
        again = sorted(chosen.union(skipped))
        repeats: Counter[tuple[str, str]] = Counter()
        wanted = {(board.slots[idx].variant_id, board.slots[idx].task_id) for idx in again}
        for slot in board.slots if wanted else ():
            if (slot.variant_id, slot.task_id) in wanted:
                repeats[slot.variant_id, slot.task_id] = max(repeats[slot.variant_id, slot.task_id], slot.repeat + 1)
        cells = []
        for idx in again:
            key = board.slots[idx].variant_id, board.slots[idx].task_id
            cells.append(Cell(*key, repeats[key]))
            repeats[key] += 1
        with self.store.batch():
            slots = self._schedule(cells, retry_of=again)
            done = {
                derive_trial_id(board.slots[idx]): derive_trial_id(slot) for idx, slot in zip(again, slots, strict=True)
            }
            if blocked is not None:
                trial_id = derive_trial_id(board.slots[blocked])
                self.forgiven[trial_id] = max((one.attempt for one in self.store.attempts(blocked, blocked)), default=0)
                self.store.set_state(_FORGIVEN, self.forgiven)
                self.store.set_state(BLOCKED, None)
                board.requeue(blocked, self._now_s())
                done[trial_id] = trial_id
            self.store.event("retried", trials=done)
        return done

    def give_up(self, indices: Sequence[int]) -> list[str]:
        """Let what is blocked be committed as it ended: what needs it is skipped. Return it."""
        for idx in indices:
            if idx != self.board.blocked:
                raise InvalidValue(f"{derive_trial_id(self.board.slots[idx])} does not block the run: nothing to drop")
            with self.store.batch():
                self.store.set_state(BLOCKED, None)
                self.store.set_state(_GIVEN_UP, idx)
            self._given_up = idx
            self.board.finish(idx)
        return [derive_trial_id(self.board.slots[idx]) for idx in indices]

    # --- parts ---

    def _schedule(
        self,
        cells: Iterable[Cell],
        tasks: Sequence[Task] = (),
        inputs: Mapping[str, str] | None = None,
        retry_of: Sequence[int] = (),
    ) -> list[Slot]:
        first = len(self.board.slots)
        slots = number(cells, first)
        origins = dict(enumerate(retry_of, first))
        if slots or tasks:
            self.store.extend(slots, tasks, inputs, origins)
            self.retries |= origins
            repeat_of = {idx: self.board.slots[self._root(idx)].repeat for idx in origins}
            try:
                self.board.add(slots, self._now_s(), repeat_of)
            except InvalidExperiment as error:  # the queue knows of these tasks now, and we cannot go back
                raise ProtocolFault(f"{type(self.queue).__name__}: {error}") from error
        return slots

    def _root(self, idx: int) -> int:
        """The slot at which all the tries before began."""
        while idx in self.retries:
            idx = self.retries[idx]
        return idx

    def _refuse_if_over(self) -> None:
        ends_s = self.board.ends_s
        if ends_s is not None and self._now_s() >= ends_s:
            raise InvalidValue("the run is over its max_duration_s: what is added now would be skipped")

    def _withdraw(self, slots: Mapping[int, tuple[str, str]]) -> None:
        self.store.withdraw(slots)
        self.withdrawn |= slots
        for idx, (_, reason) in slots.items():
            self.board.withdraw(idx, reason)

    def _lowest(self, needed: Collection[str]) -> Iterable[Waiting]:
        """What waits and could make room: lowest priority first, and of that the oldest. Not what others need."""
        board = self.board
        slots = board.slots
        waiting = [
            idx
            for idx in board.not_started()
            if idx not in board.doomed and slots[idx].task_id not in needed and not board.has_dependants(idx)
        ]
        waiting.sort(key=lambda idx: (board.priority(idx), board.submitted_s(idx), idx))
        return [Waiting(idx, board.priority(idx)) for idx in waiting]


def figures_of(store: RunStore) -> dict[str, Any]:
    """What the coordinator of a run that was killed would say of lanes and queue, where that can be told."""
    state = store.state()
    if state.get(QUEUE) is None and not any(name.startswith(_LANE) for name in state):
        return {}
    try:
        ledger = Ledger(store, Experiment.model_validate_json(store.run().experiment_json), time.monotonic)
    except InvalidExperiment:  # a queue of the user's that is not there any more
        return {}
    return ledger.figures()


def experiment_of(store: RunStore) -> Experiment:
    """Return what a run is of: the experiment that it was made with, and the tasks that were added to it."""
    return with_submitted(store, Experiment.model_validate_json(store.run().experiment_json))


def with_submitted(store: RunStore, experiment: Experiment) -> Experiment:
    submitted = store.submitted()
    return experiment.model_copy(update={"tasks": (*experiment.tasks, *submitted)}) if submitted else experiment


def request_to_submit(
    experiment: Experiment, known: Mapping[str, Task], tasks: Iterable[Task | Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the request that adds tasks to a run, with the digests of all files and images that they name.

    `known`: the tasks that the run has. Raises `InvalidExperiment` or `InvalidValue` for what could not be run, before
    anybody is troubled: whoever works at the run has no time to hash files, or to pull images.
    """
    given = [_task(one, at) for at, one in enumerate(tasks)]
    new = list({task.id: task for task in given if task.id not in known}.values())  # the same one twice is one
    check_tasks(experiment, new, known)
    return {"do": "submit", "tasks": given, "inputs": _digests_of(experiment, new) if new else {}}


def _all_text(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _task(one: Task | Mapping[str, Any], at: int) -> Task:
    try:
        return one if isinstance(one, Task) else Task.model_validate(one)
    except ValidationError as error:
        raise InvalidValue("; ".join(str(fault) for fault in faults_of(error, ("tasks", at)))) from error


def _digests_of(experiment: Experiment, tasks: Sequence[Task]) -> dict[str, str]:
    alone = experiment.model_copy(update={"tasks": tuple(tasks)})
    images = image_digests(alone)
    missing = [name.removeprefix(IMAGE) for name, digest in images.items() if digest == MISSING]
    if missing:
        raise InvalidExperiment(f"there is no image {', '.join(missing)}, and it cannot be pulled: build it first")
    naming = tuple(task for task in tasks if task.workspace or task.reference or task.grading)
    if not naming:
        return images
    alone = experiment.model_copy(update={"tasks": naming})
    check_files(alone)
    return file_digests(alone) | images


def check_tasks(experiment: Experiment, tasks: Sequence[Task], known: Mapping[str, Task]) -> None:
    """Raise `InvalidExperiment` with all that is wrong with tasks that are to join an experiment."""
    if not tasks:
        return
    ids = {task.id for task in tasks}
    faults = []
    for at, task in enumerate(tasks):
        faults += [
            Fault(("tasks", at, "depends_on"), f"there is no task {name!r} in the run or in what is submitted")
            for name in task.depends_on
            if name not in ids and name not in known
        ]
        if task.protocol.serial == "first":
            text = "'first' is for the tasks that a run begins with; allowed now: 'global'"
            faults.append(Fault(("tasks", at, "protocol", "serial"), text))
    if faults:
        raise InvalidExperiment(told([str(fault) for fault in faults]))
    inner = [
        task
        if ids.issuperset(task.depends_on)
        else task.model_copy(update={"depends_on": tuple(name for name in task.depends_on if name in ids)})
        for task in tasks
    ]
    Experiment(**{**dict(experiment), "tasks": inner})


def memory_of(experiment: Experiment) -> int:
    """What a trial may hold at once: its agent, then its grader; or both, where a service is graded."""
    agent, grading = experiment.sandbox.memory or 0, experiment.grading
    if grading is None:
        return agent
    grader = grading.memory or 0
    return agent + grader if grading.services == "keep" else max(agent, grader)


def _used_before_s(store: RunStore, commits: Sequence[Committed]) -> float:
    """What the coordinators before us used. One that was killed worked at least until its last commit."""
    control = store.control()
    used_s = float(control.metadata.get("used_s", 0.0))
    if control.status == "running" and commits:
        used_s += max(0.0, commits[-1].committed_at - control.changed_at)
    return used_s
