"""What is measured: a `Side` answers `n` calls, so many in flight at once, and says what each one took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Side(Protocol[T_co]):
    """One way to do the job. `run` gives one result a call; for throughput its latency in seconds.

    `name` is final once `start` has returned. `stop` leaves no process behind, whenever it is called.
    """

    name: str

    def start(self) -> None: ...

    def run(self, n: int, in_flight: int) -> Sequence[T_co]: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call that ended: its number, how long its caller waited, and what came back."""

    i: int
    seconds: float
    value: T


@dataclass(frozen=True)
class Traced:
    """One trace: how long it was written, how long its caller waited, and how much of it is not there."""

    events: int
    guest_s: float
    caller_s: float
    lost: int

    @property
    def guest_rate(self) -> float:
        return self.events / self.guest_s

    @property
    def caller_rate(self) -> float:
        return self.events / self.caller_s


def closed_loop(submit: Callable[[int], Future[T]], n: int, in_flight: int) -> list[Call[T]]:
    """Make `n` calls, the next one as soon as fewer than `in_flight` are open."""
    free = threading.Semaphore(in_flight)
    ended: list[tuple[int, float, Future[T]]] = []

    def start(i: int) -> None:
        begun = time.perf_counter()

        def finish(future: Future[T]) -> None:
            ended.append((i, time.perf_counter() - begun, future))
            free.release()

        submit(i).add_done_callback(finish)

    for i in range(n):
        free.acquire()
        start(i)
    for _ in range(in_flight):
        free.acquire()
    return [Call(i, seconds, future.result()) for i, seconds, future in ended]


def echoed(calls: list[Call[int]]) -> list[float]:
    """Return the latencies of calls that echo their number; a wrong answer is an error, not a number."""
    wrong = [call for call in calls if call.value != call.i]
    if wrong:
        raise ValueError(f"{len(wrong)} wrong answers, the first: {wrong[0]}")
    return [call.seconds for call in calls]
