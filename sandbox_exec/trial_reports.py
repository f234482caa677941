"""What became of each trial of a benchmark, read from the run's folder: status, traces, configs, grade and usage.

Traces and configs are what the agent's process streamed, and so is the word on whose fault an error was: hostile, so
bounded here, and for the author to read. The run's own status and blame do not follow from them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from sandbox_exec.contracts import Contract, Slot, Status, TrialCompletion, Usage, derive_trial_id
from sandbox_exec.guest.registry import ANSWER, CONFIG, FAULT, MAX_LEFT, MAX_SNAPSHOT, TRACES
from sandbox_exec.store import Committed, RunStore, attempt_folder, read_json
from sandbox_exec.trial.trace import MAX_LINE_BYTES, parse_json, parse_object, refuse_constant
from sandbox_exec.units import MIB

_MAX_KEPT: Final = 32 * MIB  # of snapshots of one trial
_MAX_COMPONENTS: Final = 1000
_MARK: Final = b'"component_'  # in each line that is of interest

TrialStatus = Literal[
    "success",
    "agent_error",
    "environment_error",
    "user_error",
    "evaluation_failed",
    "task_timeout",
    "memory_exceeded",
    "pids_exceeded",
    "output_exceeded",
    "disk_exceeded",
    "setup_failed",
    "rate_limited",
    "infra_error",
    "worker_lost",
    "cancelled",
    "skipped",
]
"""As the run's, but for errors of a benchmark's parts. `environment_error` is the benchmark's environment's; what the
run calls so, a fault of the machine, is `infra_error` here."""
Component = Literal["agent", "environment", "user", "evaluator"]

_OF_COMPONENT: Final[Mapping[str, tuple[TrialStatus, Component]]] = {
    "agent": ("agent_error", "agent"),
    "environment": ("environment_error", "environment"),
    "user": ("user_error", "user"),
}
_RENAMED: Final[Mapping[Status, TrialStatus]] = {
    Status.GRADE_ERROR: "evaluation_failed",
    Status.ENVIRONMENT_ERROR: "infra_error",
}


class TrialFault(Contract):
    """What went wrong, and in which part of the benchmark."""

    type: str
    message: str
    component: Component | None = Field(default=None, description="None: in none of them, or nobody can tell.")


class TrialUsage(Usage):
    """What the trial's last attempt used; tokens and requests are what it traced of them."""

    tokens: int | None = None
    requests: int | None = None


class TrialReport(Contract):
    """How one trial of a benchmark ended. Traces and configs are by category and name of the component."""

    task_id: str
    variant_id: str
    repeat: int
    trial_id: str
    status: TrialStatus
    error: TrialFault | None = None
    answer: Any = Field(default=None, description="What run_agents returned.")
    traces: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    config: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    eval: Mapping[str, Any] | None = Field(default=None, description="score, passed, metrics, details. None: no grade.")
    usage: TrialUsage | None = None
    attempts: int = Field(description="How many there were, those that were lost to the machine among them.")


def reports_of(run: str | os.PathLike[str]) -> list[TrialReport]:
    """The reports of what is committed of the run in this folder, in the order of its schedule."""
    folder = Path(run)
    with RunStore.open(folder, write=False) as store:
        commits = {one.schedule_idx: one for one in store.commits()}
        attempts: dict[int, int] = defaultdict(int)
        last: dict[int, str] = {}
        for attempt in store.attempts():
            idx = attempt.schedule_idx
            attempts[idx] += 1
            if idx in commits and commits[idx].attempt == attempt.attempt:
                last[idx] = attempt.completion_json
        return [
            _report(folder, slot, commits[idx], last.get(idx), attempts[idx])
            for slot in store.slots()
            if (idx := slot.schedule_idx) in commits
        ]


def _report(run: Path, slot: Slot, commit: Committed, completion_json: str | None, attempts: int) -> TrialReport:
    fields: dict[str, Any] = {
        "task_id": slot.task_id,
        "variant_id": slot.variant_id,
        "repeat": slot.repeat,
        "trial_id": derive_trial_id(slot),
        "attempts": attempts,
    }
    if commit.status is Status.SKIPPED or completion_json is None:
        fault = TrialFault(type=commit.error_type or "Skipped", message="the run decided not to run it")
        return TrialReport(status="skipped", error=fault, **fields)
    completion = TrialCompletion.model_validate_json(completion_json)
    folder = attempt_folder(run, completion.trial_id, completion.attempt)
    streamed = Streamed(folder / "trace.jsonl")
    status, error = _judged(completion, streamed.component)
    said = completion.provider
    return TrialReport(
        status=status,
        error=error,
        answer=read_json(folder / "out", ANSWER, MAX_LEFT).value,
        traces=streamed.of(TRACES),
        config=streamed.of(CONFIG),
        eval=completion.grade.model_dump() if completion.grade is not None else None,
        usage=TrialUsage(
            **dict(completion.usage), tokens=said.tokens if said else None, requests=said.requests if said else None
        )
        if completion.usage is not None
        else None,
        **fields,
    )


def _judged(completion: TrialCompletion, claimed: str) -> tuple[TrialStatus, TrialFault | None]:
    status: Any = _RENAMED.get(completion.status, completion.status.value)
    component: Component | None = None
    if completion.ok:
        return "success", None
    if completion.status is Status.AGENT_ERROR:
        status, component = _OF_COMPONENT.get(claimed, _OF_COMPONENT["agent"])
    elif completion.status is Status.GRADE_ERROR:
        component = "evaluator"
    if completion.error is not None:
        kind, message = completion.error.type, completion.error.message
    else:
        how = f"signal {completion.signal}" if completion.signal is not None else f"exit code {completion.exit_code}"
        kind, message = "Ended", f"the process ended with {how}"
    return status, TrialFault(type=kind, message=message, component=component)


class Streamed:
    """The last whole snapshot of each component in a trace, and the last word on whose fault it was."""

    def __init__(self, trace: Path) -> None:
        self.component = ""
        self._kept: dict[tuple[str, str, str], tuple[int, Any]] = {}  # by type, category, name: its size, and it
        self._parts: dict[tuple[str, str, str], list[str]] = {}
        self._size = 0
        for size, event in _events(trace):
            key = (event.get("type"), event.get("category"), event.get("name"))
            if event.get("type") == FAULT:
                self.component = str(event.get("component"))
            elif key[0] in (TRACES, CONFIG) and all(isinstance(one, str) for one in key):
                self._take(key, size, event)  # type: ignore[arg-type]  # all of it is text

    def of(self, type_: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for (kind, category, name), (_, data) in self._kept.items():
            if kind == type_:
                found.setdefault(category, {})[name] = data
        return found

    def _take(self, key: tuple[str, str, str], size: int, event: dict[str, Any]) -> None:
        if "text" not in event:
            self._parts.pop(key, None)
            self._keep(key, size, event.get("data"))
            return
        text, number, count = event["text"], event.get("part"), event.get("parts")
        before = self._parts.pop(key, []) if number != 0 else []
        if not isinstance(text, str) or number != len(before) or len(self._parts) >= _MAX_COMPONENTS:
            return
        parts = [*before, text]
        if sum(map(len, parts)) > MAX_SNAPSHOT:
            return
        if len(parts) != count:
            self._parts[key] = parts
            return
        try:
            whole = "".join(parts).encode()
            self._keep(key, len(whole), parse_json(whole, parse_constant=refuse_constant))
        except (ValueError, RecursionError):
            pass

    def _keep(self, key: tuple[str, str, str], size: int, data: Any) -> None:
        old = self._kept.get(key, (0, None))[0]
        if self._size - old + size > _MAX_KEPT or (key not in self._kept and len(self._kept) >= _MAX_COMPONENTS):
            return
        self._size += size - old
        self._kept[key] = (size, data)


def _events(trace: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Those of the registry's, with their size. The recorder wrote the file: whole lines of bounded length."""
    try:
        file = open(trace, "rb")  # noqa: SIM115  # closed below
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            event = parse_object(line) if _MARK in line else None
            if event is not None:
                yield len(line), event
