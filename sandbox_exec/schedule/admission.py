"""What a submission may add to a run: how much there is room for, what makes room, and what is there already.

Counts are of slots: one task makes one for each variant and repeat. A batch is added as a whole or not at all.
Nothing here changes anything: the caller records the answer, and sends what is displaced to the dead letters.
"""

from __future__ import annotations

import graphlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from sandbox_exec.contracts.experiment import shown
from sandbox_exec.contracts.queue import LEVELS, QueueSettings
from sandbox_exec.contracts.words import Task
from sandbox_exec.errors import InvalidValue
from sandbox_exec.experiment import json_digest

MARKS: Final = (95, 80)  # percent of a bound from which there is a warning, the highest first
_MAX_TOLD: Final = 200  # conflicts in one message: more are one mistake made often


class Waiting(NamedTuple):
    """A slot that has not started."""

    idx: int
    priority: int


class Admitted(NamedTuple):
    """The submission may be added, once these slots have made room: the lowest priority first, the oldest first."""

    displaced: tuple[int, ...] = ()


class Refused(NamedTuple):
    """Nothing of the submission may be added; `reason` is for the submitter, a line for each bound in the way.

    `never`: not even if nothing waited, so that there is no use in waiting.
    """

    reason: str
    never: bool = False


class Pressure(NamedTuple):
    """A bound that is nearly reached: `percent` is the mark that was passed, 80 or 95."""

    what: str
    percent: int
    waiting: int
    allowed: int

    def __str__(self) -> str:
        return f"{self.what}: {self.waiting} of {self.allowed} trials wait, {self.percent} % or more"


class Merged(NamedTuple):
    """What is left of a submission: the tasks to add with their digests, and who stands for the others."""

    tasks: tuple[Task, ...]
    digests: dict[str, str]  # of those tasks, by id
    same: dict[str, str]  # by the id of one that is not added: the id of the one that says the same


def admit(
    settings: QueueSettings,
    waiting_by_priority: Mapping[int, int],
    new_by_priority: Mapping[int, int],
    lowest: Callable[[], Iterable[Waiting]],
) -> Admitted | Refused:
    """Decide about a submission.

    `lowest` gives the slots that may be displaced, the lowest priority first and of that the oldest; it is called
    only if some must be. Each makes room for one of a higher priority. Where more wait than are allowed already,
    as many go as come.
    """
    faults = []
    for priority, allowed in settings.quota_of.items():
        waiting, new = waiting_by_priority.get(priority, 0), new_by_priority.get(priority, 0)
        if new and waiting + new > allowed:
            text = _too_many(f"the quota of {_named(priority)}", allowed, waiting, new)
            faults.append(f"{text} Within one priority nothing makes room for anything else.")
    displaced: list[int] = []
    waiting, new = sum(waiting_by_priority.values()), sum(new_by_priority.values())
    if settings.max_waiting is not None and new and waiting + new > settings.max_waiting:
        text = _too_many("max_waiting", settings.max_waiting, waiting, new)
        if settings.when_full == "refuse":
            faults.append(text)
        elif not faults:
            # The free places are for the lowest of the new ones: the higher ones can displace more.
            comers = sorted(Counter(new_by_priority).elements())[-(waiting + new - settings.max_waiting) :]
            for comer, goer in zip(comers, lowest(), strict=False):
                if goer.priority >= comer:
                    break
                displaced.append(goer.idx)
            if len(displaced) < len(comers):
                faults.append(f"{text} Only {len(displaced)} of a lower priority could make room; {len(comers)} must.")
    if not faults:
        return Admitted(tuple(displaced))
    bounds = [(count, settings.quota_of.get(priority)) for priority, count in new_by_priority.items()]
    never = any(allowed is not None and count > allowed for count, allowed in [*bounds, (new, settings.max_waiting)])
    return Refused("\n".join(faults), never)


def pressure(settings: QueueSettings, waiting_by_priority: Mapping[int, int]) -> tuple[Pressure, ...]:
    """Return each bound that is at 80 % or more, with the highest mark that it has passed."""
    bounds = [(f"quota of {_named(p)}", waiting_by_priority.get(p, 0), most) for p, most in settings.quota_of.items()]
    if settings.max_waiting is not None:
        bounds.insert(0, ("max_waiting", sum(waiting_by_priority.values()), settings.max_waiting))
    return tuple(
        Pressure(what, mark, waiting, allowed)
        for what, waiting, allowed in bounds
        for mark in [mark for mark in MARKS if 100 * waiting >= mark * allowed][:1]
    )


class Watermarks:
    """Says each warning once: when a mark is passed upwards, and again only after it was below that mark."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._passed: dict[str, int] = {}

    def update(self, waiting_by_priority: Mapping[int, int]) -> tuple[Pressure, ...]:
        """Return the warnings that are new. A bound that passes both marks at once gives that of the higher one."""
        now = pressure(self._settings, waiting_by_priority)
        new = tuple(each for each in now if each.percent > self._passed.get(each.what, 0))
        self._passed = {each.what: each.percent for each in now}
        return new


def content_digest(task: Task) -> str:
    """Return the digest of all that a task says but its id. Of the files that it names, only the paths count."""
    return json_digest(task.model_dump(mode="json", exclude={"id"}))


def merge(
    policy: Literal["merge", "reject", "keep"],
    new: Sequence[Task],
    known_by_id: Mapping[str, str],
    known_by_digest: Mapping[str, str],
) -> Merged:
    """Tell the tasks that are new from those that say what another one of the run, or of the batch, says.

    The same id with the same content is always the same task: a batch may be submitted again. The same content under
    another id follows the policy. Where such a task is merged, those that depend on it depend on the one that stays.
    Raises `InvalidValue` with all conflicts; an id that is taken by another content is one with any policy.
    """
    tasks: dict[str, Task] = {}
    digests: dict[str, str] = {}
    owners: dict[str, str] = {}
    same: dict[str, str] = {}
    faults: list[str] = []
    for task in _dependencies_first(new):
        needs = tuple(dict.fromkeys(same.get(need, need) for need in task.depends_on))
        task = task if needs == task.depends_on else task.model_copy(update={"depends_on": needs})
        digest = content_digest(task)
        taken = known_by_id.get(task.id, digests.get(task.id))
        owner = known_by_digest.get(digest, owners.get(digest))
        if taken == digest:
            same.setdefault(task.id, task.id)
        elif taken is not None:
            where = "of the run" if task.id in known_by_id else "of the same submission"
            faults.append(f"{shown(task.id)} is the id of another task {where}: give this one an id of its own")
        else:
            digests[task.id] = digest
            if owner is None or policy == "keep":
                tasks[task.id] = task
                owners[digest] = task.id
            elif policy == "merge":
                same[task.id] = owner
            else:
                faults.append(f"{shown(task.id)} says the same as {shown(owner)}: leave it out")
    if faults:
        more = [f"... and {len(faults) - _MAX_TOLD} more"] if len(faults) > _MAX_TOLD else []
        lines = [f"{len(faults)} of {len(new)} tasks cannot be added, so none was:", *faults[:_MAX_TOLD], *more]
        raise InvalidValue("\n  ".join(lines))
    added = tuple(tasks.pop(task.id) for task in new if task.id in tasks)
    return Merged(added, {task.id: digests[task.id] for task in added}, same)


def _dependencies_first(tasks: Sequence[Task]) -> Iterable[Task]:
    by_id: defaultdict[str, list[Task]] = defaultdict(list)  # an id may stand twice
    order: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for task in tasks:
        by_id[task.id].append(task)
        order.add(task.id, *task.depends_on)
    try:
        ids = list(order.static_order())
    except graphlib.CycleError as error:
        circle = [shown(one) for one in reversed(error.args[1])]
        if len(circle) > 20:
            circle[10:-10] = ["..."]
        raise InvalidValue(f"a task of the submission depends on itself: {' -> '.join(circle)}") from None
    return (task for one in ids for task in by_id.get(one, ()))


def _too_many(bound: str, allowed: int, waiting: int, new: int) -> str:
    room = max(0, allowed - waiting)
    what_to_do = "submit fewer, or again once some began" if new <= allowed else "submit them in parts"
    return f"{bound} is {allowed}: {waiting} trials wait, so there is room for {room} and not for {new}; {what_to_do}."


def _named(priority: int) -> str:
    name = next((name for name, number in LEVELS.items() if number == priority), None)
    return f"priority {priority}" if name is None else f"priority {priority} ({name})"
