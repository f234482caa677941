from __future__ import annotations

import math

import pytest

from sandbox_exec.clock import Clock, MonotonicClock
from sandbox_exec.errors import InvalidValue
from sandbox_exec.testing import ManualClock


def reading(clock: Clock) -> float:
    return clock.now_s()  # the type checker holds both clocks to the protocol here


def test_the_monotonic_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    readings = [reading(clock) for _ in range(1000)]
    assert readings == sorted(readings)


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(start_s=5.0)
    assert [reading(clock), reading(clock)] == [5.0, 5.0]
    clock.advance(2.5)
    assert reading(clock) == 7.5
    clock.advance(0)
    assert reading(clock) == 7.5


@pytest.mark.parametrize("seconds", [-0.001, math.nan, math.inf])
def test_a_manual_clock_cannot_go_back_or_nowhere(seconds: float) -> None:
    clock = ManualClock()
    with pytest.raises(InvalidValue, match="finite number of seconds >= 0"):
        clock.advance(seconds)
    assert clock.now_s() == 0.0
