"""The queue that an experiment asks for by `design.order`: one of ours, or a class of the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final, cast

from sandbox_exec.contracts import Slot, Task
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.errors import InvalidExperiment
from sandbox_exec.schedule.adaptive import AdaptiveQueue
from sandbox_exec.schedule.priority import PriorityQueue
from sandbox_exec.schedule.queues import SequentialQueue, TaskQueue, number

_ORDERS: Final[dict[str, type[TaskQueue]]] = {
    "sequential": SequentialQueue,
    "priority": PriorityQueue,
    "adaptive": AdaptiveQueue,
}
_METHODS: Final = (
    "submit", "put", "take", "discard", "observe", "should_continue", "snapshot", "restore",
)  # fmt: skip


def make_queue(experiment: Experiment) -> TaskQueue:
    """Return a new queue for the experiment, to which nothing has been submitted.

    A class of the user's is imported from beside the experiment, or from where Python finds it, and runs in the
    coordinator: it is trusted as the experiment itself is.
    """
    order = experiment.design.order
    made = _ORDERS.get(order) or _load(order, str(experiment.base))
    return made(experiment)


def first_schedule(queue: TaskQueue, tasks: Sequence[Task]) -> list[Slot]:
    """Return the schedule that a run begins with. `serial: first` stands at its front, whatever the queue says."""
    firsts = {task.id for task in tasks if task.protocol.serial == "first"}
    return number(sorted(queue.submit(tasks), key=lambda cell: cell.task_id not in firsts))


def _load(order: str, base: str) -> type[TaskQueue]:
    module, _, name = order.partition(":")
    sys.path.insert(0, base)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise InvalidExperiment(f"design.order: {order!r} cannot be loaded: {error}") from error
    finally:
        sys.path.remove(base)
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        lack = ", ".join(missing) or "a class"
        raise InvalidExperiment(
            f"design.order: {order!r} is no queue, it lacks {lack}: derive it from sandbox_exec.SequentialQueue"
        )
    return cast(type[TaskQueue], found)
