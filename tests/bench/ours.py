"""Our side: `Pool` on full isolation, how fast it kills, and how fast its guest traces."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox_exec import Limits, Outcome, Pool

from . import agents
from .side import Call, Traced, closed_loop

TIMEOUT_S = 0.15  # long enough for an agent to be up and to ignore SIGTERM
GRACE_S = 0.05


class PoolSide:
    """`Pool` on the strongest rung of the machine, with the function loaded, as the preloaded peer has it."""

    name = "ours"

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def start(self) -> None:
        limits = Limits(timeout_s=30, memory="256MiB")
        self._pool = Pool(max_workers=self._workers, limits=limits, preload=[agents.__name__])
        isolation = self._pool.submit(agents.echo, 0).result().isolation
        self.name = f"ours: Pool, {isolation.rung if isolation else 'isolation unknown'}"

    def run(self, n: int, in_flight: int) -> list[float]:
        calls = closed_loop(lambda i: self._pool.submit(agents.echo, i), n, in_flight)
        return [_echoed(call) for call in calls]

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Kill:
    """One kill at a deadline, in seconds after the end of its grace, by three clocks.

    `call_s` is what the kill itself took; `late_s` when the last process was gone, as the supervisor saw it;
    `caller_s` when the caller had the outcome, the start of the trial included: a bound that trusts nobody.
    """

    agent: str
    call_s: float
    late_s: float
    caller_s: float

    @property
    def after_grace_s(self) -> float:
        """The number that is judged."""
        return max(self.call_s, self.late_s)


class KillSide:
    """Agents that ignore SIGTERM, killed at their deadline, in a pool that is full."""

    name = "kills"

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def start(self) -> None:
        limits = Limits(timeout_s=TIMEOUT_S, grace_s=GRACE_S)
        self._pool = Pool(max_workers=self._workers, limits=limits, preload=[agents.__name__])

    def run(self, n: int, in_flight: int) -> list[Kill]:
        calls = closed_loop(lambda i: self._pool.submit(_stubborn(i)), n, in_flight)
        return [_kill(call) for call in calls]

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class TraceSide:
    """A guest that traces in a tight loop, with the standard library alone."""

    name = "ours: TrialContext.trace"

    def start(self) -> None:
        limits = Limits(timeout_s=120, trace="256MiB", memory="1GiB")
        self._pool = Pool(max_workers=1, limits=limits, preload=[agents.__name__])

    def run(self, n: int, in_flight: int) -> list[Traced]:
        calls = closed_loop(lambda _: self._pool.submit(agents.trace_ticks, n), in_flight, in_flight)
        return [_traced(call, n) for call in calls]

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _echoed(call: Call[Outcome]) -> float:
    if call.value.unwrap() != call.i:
        raise ValueError(f"a wrong answer: {call}")
    return call.seconds


def _stubborn(i: int) -> agents.Stubborn:
    return agents.STUBBORN[i % len(agents.STUBBORN)]


def _kill(call: Call[Outcome]) -> Kill:
    outcome, allowed_s = call.value, TIMEOUT_S + GRACE_S
    if outcome.status != "task_timeout" or outcome.kill is None:
        raise ValueError(f"{_stubborn(call.i).__name__} was not killed at its deadline: {outcome}")
    return Kill(
        agent=_stubborn(call.i).__name__,
        call_s=outcome.kill.latency_s,
        late_s=outcome.usage.wall_s - allowed_s,
        caller_s=call.seconds - allowed_s,
    )


def _traced(call: Call[Outcome], events: int) -> Traced:
    outcome = call.value
    guest_s = float(outcome.unwrap())
    in_place = sum(event.get("i") == i for i, event in enumerate(outcome.trace))
    dropped = sum(outcome.dropped.model_dump().values())
    return Traced(events, guest_s, call.seconds, lost=events - in_place + dropped)
