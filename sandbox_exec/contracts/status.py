"""How a trial ended, whose doing it was, and what makes it worth another attempt: one table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pydantic import computed_field, model_validator

from sandbox_exec.contracts.base import Contract


class Blame(StrEnum):
    """Whose doing it was that a trial did not succeed."""

    AGENT = "agent"
    TASK = "task"
    PROVIDER = "provider"
    INFRA = "infra"
    RUN = "run"


class Retry(StrEnum):
    """What decides whether a trial that ended so gets another attempt."""

    NEVER = "never"
    MAX_RETRIES = "max_retries"  # the task's protocol.max_retries
    TIMEOUT_ACTION = "timeout_action"  # the task's protocol.timeout_action: skip, retry, extend
    AFTER_RETRY_AFTER = "after_retry_after"  # once the provider allows it; does not count as an attempt
    INFRA_BUDGET = "infra_budget"  # with backoff, as long as the run's budget for such faults lasts


class Status(StrEnum):
    """How a trial ended. `success` says that it ran to its end; how good the agent was is the grade."""

    SUCCESS = "success"
    AGENT_ERROR = "agent_error"  # exit code, signal, exception, malformed result
    TASK_TIMEOUT = "task_timeout"
    MEMORY_EXCEEDED = "memory_exceeded"
    PIDS_EXCEEDED = "pids_exceeded"
    OUTPUT_EXCEEDED = "output_exceeded"
    DISK_EXCEEDED = "disk_exceeded"
    SETUP_FAILED = "setup_failed"  # image, artifact, workspace
    GRADE_ERROR = "grade_error"  # the grader failed, or its grade is malformed or missing
    RATE_LIMITED = "rate_limited"
    ENVIRONMENT_ERROR = "environment_error"  # engine down, no disk
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"  # pruned, dependency failed, run over its duration

    @property
    def blame(self) -> Blame | None:
        """Whose doing it was; None for success."""
        return STATUS_TABLE[self].blame

    @property
    def retry(self) -> Retry:
        """What decides about another attempt."""
        return STATUS_TABLE[self].retry


class StatusRow(NamedTuple):
    """One row of `STATUS_TABLE`."""

    blame: Blame | None
    retry: Retry


STATUS_TABLE: Final[Mapping[Status, StatusRow]] = MappingProxyType(
    {
        Status.SUCCESS: StatusRow(None, Retry.NEVER),
        Status.AGENT_ERROR: StatusRow(Blame.AGENT, Retry.MAX_RETRIES),
        Status.TASK_TIMEOUT: StatusRow(Blame.AGENT, Retry.TIMEOUT_ACTION),
        Status.MEMORY_EXCEEDED: StatusRow(Blame.AGENT, Retry.NEVER),
        Status.PIDS_EXCEEDED: StatusRow(Blame.AGENT, Retry.NEVER),
        Status.OUTPUT_EXCEEDED: StatusRow(Blame.AGENT, Retry.NEVER),
        Status.DISK_EXCEEDED: StatusRow(Blame.AGENT, Retry.NEVER),
        Status.SETUP_FAILED: StatusRow(Blame.TASK, Retry.MAX_RETRIES),
        Status.GRADE_ERROR: StatusRow(Blame.TASK, Retry.MAX_RETRIES),
        Status.RATE_LIMITED: StatusRow(Blame.PROVIDER, Retry.AFTER_RETRY_AFTER),
        Status.ENVIRONMENT_ERROR: StatusRow(Blame.INFRA, Retry.INFRA_BUDGET),
        Status.WORKER_LOST: StatusRow(Blame.INFRA, Retry.INFRA_BUDGET),
        Status.CANCELLED: StatusRow(Blame.RUN, Retry.NEVER),
        Status.SKIPPED: StatusRow(Blame.RUN, Retry.NEVER),
    }
)


class Judged(Contract):
    """A contract with a status. Its blame follows from that: it is written out, and checked when read."""

    status: Status

    # A property of its own would be enough, but readers of the JSON should not need the table.
    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorator on top of property
    @property
    def blame(self) -> Blame | None:
        """Whose doing it was; None for success."""
        return self.status.blame

    @property
    def ok(self) -> bool:
        """Whether the status is success."""
        return self.status is Status.SUCCESS

    @model_validator(mode="before")
    @classmethod
    def _take_own_blame(cls, data: Any) -> Any:
        # What model_dump wrote must load again, although blame is no field.
        if not (isinstance(data, dict) and "blame" in data):
            return data
        rest = {key: value for key, value in data.items() if key != "blame"}
        try:
            status = Status(rest.get("status", ""))
        except ValueError:
            return rest  # the field's own validation says what is wrong with the status
        if data["blame"] != status.blame:
            due = status.blame and status.blame.value
            raise ValueError(f"blame is {data['blame']!r}, but status {status} means {due!r}")
        return rest
