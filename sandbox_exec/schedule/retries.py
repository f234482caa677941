"""Whether a trial gets another attempt, when, and with how much time: the column "retried" of the status table.

- Attempts that the agent or the task failed share one budget, `max_retries` further ones, at once.
- A timeout follows `timeout_action`. To name `retry` or `extend` asks for another attempt, so it gives one even
  where `max_retries` is 0. With `extend`, every attempt after a timeout has double the time of the one before it.
- Attempts lost to the infrastructure have a budget of their own, and wait longer each time.
- An attempt that a provider turned away waits as long as it was told to and does not count. The agent says
  so, and agents lie: both the wait and the number of such attempts are bounded, so that every trial ends.

Waits are spread by a jitter that follows from the seed, so trials that failed together do not come back together,
and yet a run repeats itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from sandbox_exec.contracts.queue import LONGEST_RETRY_AFTER_S
from sandbox_exec.contracts.status import Retry, Status
from sandbox_exec.contracts.words import TaskProtocol, derive_seed

FIRST_WAIT_S: Final = 1.0  # an engine that restarts, or a lost worker, is back in about that
LONGEST_WAIT_S: Final = 60.0  # of our own waits: a run that recovered should not idle for long
RATE_LIMITED_ATTEMPTS: Final = 100  # a provider that is that busy is down
MAX_DOUBLINGS: Final = 16  # of the time for a task: 65 536 times; more overflows sooner than it helps

_COUNTED: Final = frozenset(s for s in Status if s.retry in (Retry.MAX_RETRIES, Retry.TIMEOUT_ACTION))
_INFRA: Final = frozenset(s for s in Status if s.retry is Retry.INFRA_BUDGET)


class NextAttempt(NamedTuple):
    """Another attempt: in how many seconds, and by what the time for the task is multiplied."""

    after_s: float
    timeout_factor: int


class RetryPolicy:
    """Decides about further attempts. `infra_retries` is the budget of one trial."""

    def __init__(self, infra_retries: int = 3) -> None:
        self.infra_retries = infra_retries

    def next_attempt(
        self,
        status: Status,
        protocol: TaskProtocol,
        attempts: Mapping[Status, int],
        *,
        seed: int,
        retry_after_s: float | None = None,
    ) -> NextAttempt | None:
        """Return the attempt that follows one that ended as `status`; None: the trial has ended so.

        `attempts` counts the trial's attempts by status, the one that just ended among them. `seed` is the
        trial's own.
        """
        counted = sum(attempts.get(each, 0) for each in _COUNTED)
        match status.retry:
            case Retry.MAX_RETRIES if counted <= protocol.max_retries:
                after_s = 0.0
            case Retry.TIMEOUT_ACTION if counted <= _retries_of_timeouts(protocol):
                after_s = 0.0
            case Retry.INFRA_BUDGET:
                lost = sum(attempts.get(each, 0) for each in _INFRA)
                if lost > self.infra_retries:
                    return None
                after_s = _backoff_s(lost, seed)
            case Retry.AFTER_RETRY_AFTER:
                turned_away = attempts.get(status, 0)
                if turned_away >= RATE_LIMITED_ATTEMPTS:
                    return None
                after_s = _backoff_s(turned_away, seed)
                if retry_after_s is not None:
                    # The jitter comes on top: sooner than allowed would only be turned away again.
                    after_s = min(retry_after_s, LONGEST_RETRY_AFTER_S) + _jitter(turned_away, seed)
            case _:
                return None
        return NextAttempt(after_s, timeout_factor(protocol, attempts))


def timeout_factor(protocol: TaskProtocol, attempts: Mapping[Status, int]) -> int:
    """Return by what the time for the task is multiplied in the attempt after these, also when a run continues."""
    doublings = attempts.get(Status.TASK_TIMEOUT, 0) if protocol.timeout_action == "extend" else 0
    return 1 << min(doublings, MAX_DOUBLINGS)


def _retries_of_timeouts(protocol: TaskProtocol) -> int:
    return 0 if protocol.timeout_action == "skip" else max(1, protocol.max_retries)


def _backoff_s(nth: int, seed: int) -> float:
    longest_s = min(FIRST_WAIT_S * 2.0 ** min(nth - 1, 32), LONGEST_WAIT_S)
    return longest_s * (1 + _jitter(nth, seed)) / 2


def _jitter(nth: int, seed: int) -> float:
    return derive_seed(seed, f"retry {nth}") / 2**32
