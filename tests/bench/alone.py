"""The coordinator alone: a backend that does nothing, and N slots. Prints one JSON object.

Run in a process of its own for each N, so that its memory is that of one run.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import psutil

from sandbox_exec.backends.base import Adoption, Finished, PauseAck, WorkerEvent, WorkerTicket
from sandbox_exec.contracts import ActiveTrial, Phase, Status, TrialCompletion, TrialDispatch
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.coordinator import Coordinator
from sandbox_exec.runs import RUNS
from sandbox_exec.store import RunStore
from sandbox_exec.testing import expand

IN_FLIGHT = 8
STATUS_QUERIES = 50


class InstantBackend:
    """Every attempt succeeds at once."""

    def __init__(self) -> None:
        self._events: deque[WorkerEvent] = deque()
        self._dispatches: dict[Path, TrialDispatch] = {}

    def submit(self, dispatch: TrialDispatch, folder: Path) -> WorkerTicket:
        self._dispatches[folder] = dispatch
        return WorkerTicket(dispatch.slot.schedule_idx, dispatch.trial_id, dispatch.attempt, "1-1", folder)

    def begin(self, ticket: WorkerTicket) -> None:
        dispatch = self._dispatches.pop(ticket.folder)
        ticket.folder.mkdir(parents=True)
        completion = TrialCompletion(
            slot=dispatch.slot,
            trial_id=dispatch.trial_id,
            attempt=dispatch.attempt,
            status=Status.SUCCESS,
            phase=Phase.AGENT,
        )
        (ticket.folder / "completion.json").write_text(completion.model_dump_json())
        self._events.append(Finished(ticket))

    def poll(self, timeout_s: float | None) -> list[WorkerEvent]:
        events, self._events = list(self._events), deque()
        return events

    def adopt(self, active: list[ActiveTrial]) -> list[Adoption]:
        return []

    def pause(self, tickets: Sequence[WorkerTicket], timeout_s: float) -> list[PauseAck]:
        return [PauseAck(ticket, frozen=True) for ticket in tickets]

    def capacity(self) -> int:
        return IN_FLIGHT

    def wake(self) -> None: ...
    def resume(self, ticket: WorkerTicket) -> None: ...
    def stop(self, ticket: WorkerTicket, reason: str) -> None: ...
    def close(self) -> None: ...


def measure(slots: int) -> dict[str, float]:
    Path(RUNS).mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="sandbox-exec-bench-", dir=RUNS))
    try:
        experiment = Experiment(
            name="alone",
            tasks=[{"id": f"t{i}", "input": i} for i in range(slots)],
            variants=[{"id": "v", "agent": {"command": ["true"]}}],
            design={"max_concurrency": IN_FLIGHT},
        )
        process = psutil.Process()
        before = process.memory_info().rss
        with RunStore.create(folder, "alone", "{}", expand(experiment), {}) as store:
            coordinator = Coordinator(store, experiment, InstantBackend())
            begun = time.perf_counter()
            end = coordinator.run()
            elapsed = time.perf_counter() - begun
            assert end.status == "completed", end
        return {
            "slots": slots,
            "us_per_trial": elapsed / slots * 1e6,
            "bytes_per_slot": (process.memory_info().rss - before) / slots,
            "status_ms": _status_ms(folder),
        }
    finally:
        shutil.rmtree(folder)


def _status_ms(folder: Path) -> float:
    took = []
    for _ in range(STATUS_QUERIES):
        begun = time.perf_counter()
        with RunStore.open(folder, write=False) as store:
            store.progress()
        took.append(time.perf_counter() - begun)
    return sorted(took)[len(took) // 2] * 1e3


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
