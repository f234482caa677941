"""What the benchmarks run in a child: standard library only, because every side loads this module there."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # what is loaded here is in every fork of every side
if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from typing import Any, NoReturn, TypeAlias

    Stubborn: TypeAlias = Callable[[], Any]

TEXT = "x" * 162  # with the rest of the event a line of about 214 bytes


def echo(value: int) -> int:
    """Do nothing: what is left to measure is the machinery around the call."""
    return value


def nap(task: dict[str, Any]) -> tuple[float, float]:
    """Sleep as long as the task says; return from when to when, by the clock that all processes share."""
    begun = time.monotonic()
    time.sleep(task["input"])
    return begun, time.monotonic()


def answer(pipe: Connection, function: Callable[[int], int], value: int) -> None:
    """Call, and send the result: what a bare `multiprocessing.Process` needs around a function."""
    pipe.send(function(value))
    pipe.close()


def spin() -> NoReturn:
    """Burn a processor and ignore SIGTERM."""
    _ignore_sigterm()
    while True:
        pass


def sleep_with_children() -> NoReturn:
    """Sleep beside three children that sleep; all ignore SIGTERM."""
    _ignore_sigterm()
    for _ in range(3):
        if os.fork() == 0:
            break
    _sleep_for_ever()


def daemonize() -> NoReturn:
    """Leave a daemon (double fork, own session) and sleep; both ignore SIGTERM."""
    _ignore_sigterm()
    if os.fork() == 0:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
    _sleep_for_ever()


STUBBORN: tuple[Stubborn, ...] = (spin, sleep_with_children, daemonize)


def trace_ticks(events: int) -> float:
    """Trace in a tight loop; return the seconds that it took, by the guest's own clock."""
    from sandbox_exec.guest import context  # here, so that the peers' children do not load it

    trace = context().trace
    begun = time.perf_counter()
    for i in range(events):
        trace("tick", i=i, text=TEXT)
    return time.perf_counter() - begun


def _ignore_sigterm() -> None:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)
