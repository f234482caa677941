"""The ceiling of tracing: `json.dumps` and one write an event, into a pipe that another process drains."""

from __future__ import annotations

import json
import multiprocessing
import os
import time

from . import agents
from .side import Traced

DRAIN_BYTES = 1 << 16  # what a pipe holds


class CeilingSide:
    """The least that any trace from the standard library must do. The writer is this process."""

    name = "ceiling: json.dumps and os.write"

    def start(self) -> None:
        self._readable, self._writable = os.pipe()
        context = multiprocessing.get_context("fork")
        self._drain = context.Process(target=_drain, args=(self._readable, self._writable), daemon=True)
        self._drain.start()

    def run(self, n: int, in_flight: int) -> list[Traced]:
        seconds = [_write(self._writable, n) for _ in range(in_flight)]
        return [Traced(n, guest_s=one, caller_s=one, lost=0) for one in seconds]

    def stop(self) -> None:
        os.close(self._writable)
        os.close(self._readable)
        self._drain.join()


def _write(pipe: int, events: int) -> float:
    begun = time.perf_counter()
    for i in range(events):
        event = {"t": round(time.perf_counter() - begun, 6), "type": "tick", "i": i, "text": agents.TEXT}
        os.write(pipe, json.dumps(event).encode() + b"\n")
    return time.perf_counter() - begun


def _drain(readable: int, writable: int) -> None:
    os.close(writable)  # else there is no end to read
    while os.read(readable, DRAIN_BYTES):
        pass
