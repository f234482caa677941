"""A durable run from Python: agents that are functions, a callback, an interruption, and a continuation.

    .venv/bin/python examples/python_api.py [RUNS]

RUNS is the folder for the run; by default a temporary one. The run is drained on purpose when a third of it is
committed, as a first Ctrl-C in the shell does, and then continued: nothing is run twice, nothing is lost.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

from sandbox_exec import Experiment, RunCallback, context, continue_run, run
from sandbox_exec.contracts import TrialCompletion
from sandbox_exec.coordinator import Coordinator

Task = dict[str, Any]  # id, input, seed, repeat

# --- the agents: each is called with its task, in a sandbox, and what it returns is its result -----------


def careful(task: Task) -> dict[str, Any]:
    numbers = task["input"]
    context().trace("read", numbers=len(numbers))
    return {"median": statistics.median(numbers) if numbers else None}


def sloppy(task: Task) -> dict[str, Any]:
    """Raises on an empty list."""
    numbers = sorted(task["input"])
    return {"median": numbers[len(numbers) // 2]}


def sleepy(task: Task) -> dict[str, Any]:
    """Too late if there is much to do."""
    for _ in task["input"]:
        time.sleep(0.1)
    return careful(task)


EXPERIMENT = Experiment(
    name="medians",
    seed=7,
    tasks=[
        {"id": "three", "input": [3, 1, 2]},
        {"id": "four", "input": [4, 1, 3, 2]},
        {"id": "none", "input": []},
        {"id": "many", "input": list(range(40))},
    ],
    variants=[
        {"id": "careful", "agent": {"function": careful}},
        {"id": "sloppy", "agent": {"function": sloppy}},
        {"id": "sleepy", "agent": {"function": sleepy}},
    ],
    design={"max_concurrency": 2},
    sandbox={"timeout_s": 1, "memory": "128MiB"},
)

# --- what happens, as it happens ------------------------------------------------------------------------


class Teller(RunCallback):
    """Results come one at a time and in the order of the schedule, whichever ended first."""

    def on_trial_end(self, completion: TrialCompletion) -> None:
        slot, error = completion.slot, completion.error
        print(f"  {slot.task_id:<6} {slot.variant_id:<8} {completion.status}{f', {error.type}' if error else ''}")

    def on_task_end(self, task_id: str, completions: Any) -> None:
        good = sum(completion.ok for completion in completions)
        print(f"  {task_id}: {good} of {len(completions)} agents came to an end")


class Interrupter(RunCallback):
    """Asks the coordinator to stop after some trials. `drain` and `kill` may also be called from another thread."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_run_start(self, run: Coordinator) -> None:
        self.run = run

    def on_trial_end(self, completion: TrialCompletion) -> None:
        if completion.slot.schedule_idx + 1 == self.after:
            self.run.drain("seen enough for now")


def main(runs: str) -> int:
    print("run:")
    first = run(EXPERIMENT, runs=runs, callbacks=[Teller(), Interrupter(after=4)])
    print(f"  {first.status} ({first.reason}): {first.committed} of {first.slots} trials")

    print("continue:")
    second = continue_run(first.folder, callbacks=[Teller()])
    print(f"  {second.status}: {second.committed} of {second.slots} trials")
    for variant, counts in second.by_variant.items():
        print(f"  {variant:<8} {', '.join(f'{count} {status}' for status, count in counts.items())}")
    return 0 if second.status == "completed" else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(folder))
