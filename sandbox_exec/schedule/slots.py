"""The schedule of an experiment: every trial that it asks for, numbered in the order of commits."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.contracts.words import Slot, Task


def expand(experiment: Experiment) -> tuple[Slot, ...]:
    """Return the slots: task by task, in each variant by variant, in each repeat by repeat.

    Tasks keep the experiment's order, but that one comes after those it depends on: commits go in this order,
    so a trial that waited for a later commit would wait for ever.
    """
    cells = (
        (variant.id, task.id, repeat)
        for task in _dependencies_first(experiment.tasks)
        for variant in experiment.variants
        for repeat in range(experiment.design.repeats)
    )
    return tuple(
        Slot(schedule_idx=idx, variant_id=variant_id, task_id=task_id, repeat=repeat)
        for idx, (variant_id, task_id, repeat) in enumerate(cells)
    )


def _dependencies_first(tasks: Sequence[Task]) -> list[Task]:
    by_id = {task.id: task for task in tasks}
    placed: dict[str, Task] = {}
    for task in tasks:
        pending = [task]  # a stack and not recursion: a chain of dependencies may be as long as the dataset
        while pending:
            current = pending[-1]
            waiting = [by_id[needed] for needed in current.depends_on if needed not in placed]
            if waiting:
                pending.extend(reversed(waiting))
            else:
                pending.pop()
                placed.setdefault(current.id, current)
    return list(placed.values())
