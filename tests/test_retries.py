from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.contracts.queue import LONGEST_RETRY_AFTER_S
from sandbox_exec.contracts.status import STATUS_TABLE, Retry, Status
from sandbox_exec.contracts.words import TaskProtocol
from sandbox_exec.schedule import retries
from sandbox_exec.schedule.retries import NextAttempt, RetryPolicy, timeout_factor

unhurried = settings(deadline=None)  # a busy machine is no fault of the code

OK, ERROR, TIMEOUT = Status.SUCCESS, Status.AGENT_ERROR, Status.TASK_TIMEOUT
LOST, LIMITED = Status.WORKER_LOST, Status.RATE_LIMITED


def after(*ended: Status, seed: int = 0, retry_after_s: float | None = None, **protocol: Any) -> NextAttempt | None:
    """Return what follows attempts that ended so."""
    policy = RetryPolicy(infra_retries=3)
    return policy.next_attempt(
        ended[-1], TaskProtocol(**protocol), Counter(ended), seed=seed, retry_after_s=retry_after_s
    )


@pytest.mark.parametrize("status", [s for s in Status if STATUS_TABLE[s].retry is Retry.NEVER])
def test_what_is_never_retried_is_not(status: Status) -> None:
    assert after(status, max_retries=5, timeout_action="retry") is None


@pytest.mark.parametrize("status", [s for s in Status if STATUS_TABLE[s].retry is Retry.MAX_RETRIES])
@pytest.mark.parametrize(
    ("failures", "max_retries", "again"), [(1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True)]
)
def test_a_failure_is_retried_at_once_up_to_max_retries(
    status: Status, failures: int, max_retries: int, again: bool
) -> None:
    assert after(*[status] * failures, max_retries=max_retries) == (NextAttempt(0.0, 1) if again else None)


def test_failures_of_agent_and_task_share_one_budget() -> None:
    assert after(ERROR, Status.GRADE_ERROR, max_retries=1) is None
    assert after(TIMEOUT, ERROR, max_retries=1, timeout_action="retry") is None


@pytest.mark.parametrize(
    ("action", "ended", "max_retries", "due"),
    [
        ("skip", [TIMEOUT], 5, None),
        ("retry", [TIMEOUT], 0, NextAttempt(0.0, 1)),
        ("retry", [TIMEOUT, TIMEOUT], 0, None),
        ("retry", [TIMEOUT, TIMEOUT], 2, NextAttempt(0.0, 1)),
        ("retry", [ERROR, TIMEOUT], 1, None),
        ("extend", [TIMEOUT], 0, NextAttempt(0.0, 2)),
        ("extend", [TIMEOUT], 3, NextAttempt(0.0, 2)),
        ("extend", [TIMEOUT, TIMEOUT], 3, NextAttempt(0.0, 4)),
        ("extend", [TIMEOUT, TIMEOUT, TIMEOUT], 3, NextAttempt(0.0, 8)),
        ("extend", [TIMEOUT] * 4, 3, None),
        ("extend", [TIMEOUT, ERROR], 3, NextAttempt(0.0, 2)),
        ("extend", [TIMEOUT] * 2000, 9999, NextAttempt(0.0, 2**16)),
    ],
)
def test_a_timeout_follows_its_action(
    action: str, ended: list[Status], max_retries: int, due: NextAttempt | None
) -> None:
    assert after(*ended, timeout_action=action, max_retries=max_retries) == due


def test_time_once_extended_stays_so_when_an_attempt_is_lost() -> None:
    following = after(TIMEOUT, LOST, timeout_action="extend", max_retries=3)
    assert following is not None
    assert following.timeout_factor == 2


@pytest.mark.parametrize(("action", "factor"), [("skip", 1), ("retry", 1), ("extend", 4)])
def test_the_time_of_the_next_attempt_follows_from_the_attempts_alone(action: str, factor: int) -> None:
    protocol = TaskProtocol.model_validate({"timeout_action": action, "max_retries": 5})
    assert timeout_factor(protocol, {}) == 1
    assert timeout_factor(protocol, Counter([TIMEOUT, ERROR, TIMEOUT, LOST])) == factor


def test_lost_attempts_wait_twice_as_long_each_time_until_their_budget_is_spent() -> None:
    for lost in (1, 2, 3):
        following = after(*[LOST] * lost)
        assert following is not None
        assert 2 ** (lost - 1) / 2 <= following.after_s <= 2 ** (lost - 1)
    assert after(*[LOST] * 4) is None
    assert after(LOST, LOST, LOST, Status.ENVIRONMENT_ERROR) is None


def test_lost_attempts_and_failures_have_budgets_of_their_own() -> None:
    assert after(LOST, LOST, LOST, ERROR, max_retries=1) == NextAttempt(0.0, 1)
    assert after(ERROR, LOST, max_retries=0) is not None


def test_our_own_waits_have_an_end() -> None:
    policy = RetryPolicy(infra_retries=10_000)
    following = policy.next_attempt(LOST, TaskProtocol(), {LOST: 5_000}, seed=1)
    assert following is not None
    assert following.after_s <= retries.LONGEST_WAIT_S


def test_a_rate_limit_is_waited_out_and_does_not_count() -> None:
    following = after(ERROR, *[LIMITED] * 50, retry_after_s=7.5)
    assert following is not None
    assert 7.5 <= following.after_s <= 8.5


def test_a_rate_limit_that_names_no_time_backs_off() -> None:
    first, fifth = after(LIMITED), after(*[LIMITED] * 5)
    assert first is not None
    assert fifth is not None
    assert 0.5 <= first.after_s <= 1 < 8 <= fifth.after_s <= 16


def test_an_agent_cannot_keep_a_trial_alive_by_rate_limits() -> None:
    following = after(LIMITED, retry_after_s=1e9)
    assert following is not None
    assert following.after_s <= LONGEST_RETRY_AFTER_S + 1
    assert after(*[LIMITED] * retries.RATE_LIMITED_ATTEMPTS) is None


def test_waits_follow_from_the_seed_and_differ_between_trials() -> None:
    waits = [[after(*[LOST] * lost, seed=seed) for lost in (1, 2, 3)] for seed in (1, 1, 2)]
    assert waits[0] == waits[1] != waits[2]


@unhurried
@given(
    ends=st.lists(st.sampled_from(list(Status)), min_size=1, max_size=8),
    action=st.sampled_from(["skip", "retry", "extend"]),
    max_retries=st.integers(0, 3),
)
def test_every_trial_ends(ends: list[Status], action: str, max_retries: int) -> None:
    policy = RetryPolicy(infra_retries=3)
    protocol = TaskProtocol.model_validate({"timeout_action": action, "max_retries": max_retries})
    attempts: Counter[Status] = Counter()
    bound = 1 + max(1, max_retries) + 3 + retries.RATE_LIMITED_ATTEMPTS
    while True:
        status = ends[attempts.total() % len(ends)]
        attempts[status] += 1
        following = policy.next_attempt(status, protocol, attempts, seed=7)
        if following is None:
            break
        assert following.after_s >= 0
        assert following.timeout_factor >= 1
        assert attempts.total() <= bound
