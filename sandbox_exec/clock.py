"""The clock, as a thing that is passed in, so that tests own time (`sandbox_exec.testing.ManualClock`)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells monotonic time; only differences between two readings mean anything."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary fixed point; never less than an earlier reading."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. It stands still while the machine is suspended (Linux)."""

    def now_s(self) -> float:
        return time.monotonic()
