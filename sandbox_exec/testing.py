"""What users' tests and ours share: stand-ins for the parts that are passed in."""

from __future__ import annotations

import math

from sandbox_exec.errors import InvalidValue


class ManualClock:
    """A clock that moves only when it is told to. Not for use from several threads at once."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`; a monotonic clock never moves back."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidValue(f"a clock advances by a finite number of seconds >= 0, not {seconds!r}")
        self._now_s += seconds
