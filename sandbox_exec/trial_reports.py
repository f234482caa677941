"""What became of each trial of a benchmark, read from the run's folder: status, traces, configs, grade and usage.

Traces and configs are what the agent's process streamed, and so is the word on whose fault an error was: hostile, so
bounded here, and for the author to read. The run's own status and blame do not follow from them.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from sandbox_exec.contracts import AgentError, Contract, Slot, Status, TrialCompletion, Usage, derive_trial_id
from sandbox_exec.guest.registry import ANSWER, CONFIG, FAULT, MAX_LEFT, MAX_SNAPSHOT, PART, TRACES
from sandbox_exec.store import Committed, RunStore, attempt_folder, read_completion, read_json
from sandbox_exec.trial.trace import MAX_LINE_BYTES, parse_json, parse_object
from sandbox_exec.units import MIB

_MAX_KEPT: Final = 32 * MIB  # of snapshots of one trial
_MAX_COMPONENTS: Final = 1000  # with traces, and as many with a config
_MAX_PARTS: Final = MAX_SNAPSHOT // PART + 1
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
_Name = tuple[str, str]  # category and name of a component
_RENAMED: Final[Mapping[Status, TrialStatus]] = {
    Status.GRADE_ERROR: "evaluation_failed",
    Status.ENVIRONMENT_ERROR: "infra_error",
}


class TrialFault(Contract):
    """What went wrong, and in which part of the benchmark."""

    type: str
    message: str
    component: Component | None = Field(default=None, description="None: in none of them, or nobody can tell.")
    traceback: str | None = Field(default=None, description="None: it was no exception in Python.")


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
    eval_error: TrialFault | None = Field(default=None, description="Why an evaluation that was tried gave no grade.")
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
        skipped = [json.loads(data) for (data,) in store.query("SELECT data FROM events WHERE kind = 'skipped'")]
        reasons = {event["trial_id"]: event["reason"] for event in skipped if event.get("reason")}
        return [
            _report(folder, slot, commits[idx], last.get(idx), attempts[idx], reasons)
            for slot in store.slots()
            if (idx := slot.schedule_idx) in commits
        ]


def _report(
    run: Path, slot: Slot, commit: Committed, last: str | None, attempts: int, reasons: Mapping[str, str]
) -> TrialReport:
    trial_id = derive_trial_id(slot)
    folder = attempt_folder(run, trial_id, commit.attempt)
    streamed = Streamed(folder / "trace.jsonl")
    fields: dict[str, Any] = {
        "task_id": slot.task_id,
        "variant_id": slot.variant_id,
        "repeat": slot.repeat,
        "trial_id": trial_id,
        "traces": streamed.of(TRACES),
        "config": streamed.of(CONFIG),
    }
    if commit.status is Status.SKIPPED or last is None:
        # One that was killed as the run's time was over is not recorded as an attempt, but has left what it left.
        killed = read_completion(folder).value
        message = reasons.get(trial_id, "the run decided not to run it")
        return TrialReport(
            status="skipped",
            error=TrialFault(type=commit.error_type or "Skipped", message=message),
            usage=_usage(killed) if killed is not None else None,
            attempts=attempts + (last is None and folder.exists()),
            **fields,
        )
    completion = TrialCompletion.model_validate_json(last)
    status, error = _judged(completion, streamed.component)
    grading = completion.grading
    return TrialReport(
        status=status,
        error=error,
        answer=read_json(folder / "out", ANSWER, MAX_LEFT).value,
        eval=completion.grade.model_dump() if completion.grade is not None else None,
        eval_error=_fault(grading.error, "evaluator") if grading is not None and grading.error is not None else None,
        usage=_usage(completion),
        attempts=attempts,
        **fields,
    )


def _usage(completion: TrialCompletion) -> TrialUsage | None:
    said, used = completion.provider, completion.usage
    if used is None:
        return None
    return TrialUsage(**dict(used), tokens=said.tokens if said else None, requests=said.requests if said else None)


def _judged(completion: TrialCompletion, claimed: str) -> tuple[TrialStatus, TrialFault | None]:
    if completion.ok:
        return "success", None
    status: Any = _RENAMED.get(completion.status, completion.status.value)
    component: Component | None = None
    match completion.status:
        case Status.AGENT_ERROR:
            status, component = _OF_COMPONENT.get(claimed, _OF_COMPONENT["agent"])
        case Status.TASK_TIMEOUT if claimed in _OF_COMPONENT:
            component = _OF_COMPONENT[claimed][1]
        case Status.GRADE_ERROR:
            component = "evaluator"
    error = completion.error
    if error is None:
        how = f"signal {completion.signal}" if completion.signal is not None else f"exit code {completion.exit_code}"
        error = AgentError(type="Ended", message=f"the process ended with {how}")
    return status, _fault(error, component)


def _fault(error: AgentError, component: Component | None) -> TrialFault:
    traceback = error.traceback or None
    return TrialFault(type=error.type, message=error.message, component=component, traceback=traceback)


class Streamed:
    """The last whole snapshot of each component in a trace, and the last word on whose fault it was.

    All in time that grows with the trace and no faster: who wrote it wants this to take for ever.
    """

    def __init__(self, trace: Path) -> None:
        self.component = ""
        self._kept: dict[str, dict[_Name, tuple[int, Any]]] = {TRACES: {}, CONFIG: {}}  # its size, and it
        self._parts: dict[tuple[str, _Name], tuple[int, list[str]]] = {}  # their size, and they
        self._size = 0
        for size, event in _events(trace):
            type_, name = event.get("type"), (event.get("category"), event.get("name"))
            if type_ == FAULT:
                self.component = str(event.get("component"))
            elif type_ in (TRACES, CONFIG) and all(isinstance(one, str) for one in name):
                self._take(type_, name, size, event)  # type: ignore[arg-type]  # all of it is text

    def of(self, type_: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for (category, name), (_, data) in self._kept[type_].items():
            found.setdefault(category, {})[name] = data
        return found

    def _take(self, type_: str, name: _Name, size: int, event: dict[str, Any]) -> None:
        held, parts = self._parts.pop((type_, name), (0, []))
        if "text" not in event:
            self._keep(type_, name, size, event.get("data"))
            return
        text, number, count = event["text"], event.get("part"), event.get("parts")
        if type(text) is not str or type(number) is not int or type(count) is not int:
            return
        if number == 0:
            held, parts = 0, []
        held += len(text)
        if not number == len(parts) < count <= _MAX_PARTS or held > MAX_SNAPSHOT:
            return
        parts.append(text)
        if len(parts) < count:
            if len(self._parts) < _MAX_COMPONENTS:
                self._parts[type_, name] = held, parts
            return
        try:
            whole = "".join(parts).encode()
            self._keep(type_, name, len(whole), parse_json(whole, finite=True))
        except (ValueError, RecursionError):
            pass

    def _keep(self, type_: str, name: _Name, size: int, data: Any) -> None:
        kept = self._kept[type_]
        old = kept.get(name, (0, None))[0]
        if self._size - old + size > _MAX_KEPT or (name not in kept and len(kept) >= _MAX_COMPONENTS):
            return
        self._size += size - old
        kept[name] = (size, data)


def _events(trace: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Those of the registry's, with their size. The recorder wrote the file: whole lines of bounded length."""
    try:
        file = open(trace, "rb")  # noqa: SIM115  # closed below
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            event = parse_object(line, finite=True) if _MARK in line else None
            if event is not None:
                yield len(line), event
