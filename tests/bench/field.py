"""The sides of one comparison, taking turns; and what a part of a benchmark has to show."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median, quantiles
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from .host import Hosted, SideFailed
from .orphans import sweep

T = TypeVar("T")
R = TypeVar("R")


class Field(Generic[T]):
    """Sides that are started together and take turns. One that fails drops out, and `failures` says why."""

    def __init__(self, sides: Mapping[str, Hosted[T]]) -> None:
        self.sides = sides
        self.failures: dict[str, str] = {}
        self.left_behind = 0  # processes that were alive after all sides had stopped
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack as stack:
            for side in self.sides.values():
                stack.callback(side.stop)
            self.turn(lambda _, side: side.start())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.left_behind = sweep()

    def turn(self, job: Callable[[str, Hosted[T]], R]) -> dict[str, R]:
        """Do the job with each side that still works, one after the other."""
        done = {}
        for key, side in self.sides.items():
            if key in self.failures:
                continue
            try:
                done[key] = job(key, side)
            except SideFailed as failure:
                self.failures[key] = str(failure)
        return done


@dataclass(frozen=True)
class Sprint:
    """One run of one side: what each call took, and all of them together."""

    latencies_s: Sequence[float]
    elapsed_s: float

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.elapsed_s


def sprint(side: Hosted[float], n: int, in_flight: int) -> Sprint:
    begun = time.perf_counter()
    latencies = side.run(n, in_flight)
    return Sprint(latencies, time.perf_counter() - begun)


@dataclass(frozen=True)
class Target:
    """A number to reach. One that could not be measured is not reached."""

    what: str
    measured: float | None
    bound: float
    unit: str
    at_least: bool

    @property
    def is_met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.bound if self.at_least else self.measured < self.bound


@dataclass(frozen=True)
class Part:
    """What one part has to show: a table, the targets, and which sides failed and why."""

    name: str
    title: str
    rows: list[dict[str, Any]]
    targets: list[Target]
    failures: dict[str, str] = field(default_factory=dict)


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def median_or_none(values: Sequence[float]) -> float | None:
    return median(values) if values else None
