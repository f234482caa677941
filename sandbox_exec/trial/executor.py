"""The phases of one attempt at a trial, from its dispatch to its completion, in the worker that runs it.

Stage, agent, collect, grade, teardown. The executor writes only into the attempt's folder. `completion.json` comes
last, whole and synced: once it is there, the attempt has ended, whatever happens to the worker or to the coordinator.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox_exec.clock import Clock
from sandbox_exec.contracts import (
    AgentError,
    Blame,
    ContainerSpec,
    Outcome,
    Phase,
    Status,
    TrialCompletion,
    TrialDispatch,
)
from sandbox_exec.errors import NO_ROOM, InvalidValue, StoreFull
from sandbox_exec.sandbox.base import End, Places, Sandbox
from sandbox_exec.trial.collect import Collected, CollectLimits, collect
from sandbox_exec.trial.grading import ANSWER, REJECTED, Graded, Grading, carry, keep_answer, put_answer
from sandbox_exec.trial.launches import build_launch
from sandbox_exec.trial.recorder import Recorder
from sandbox_exec.trial.supervisor import Supervisor

_TYPES = {
    Status.TASK_TIMEOUT: "TrialTimeout",
    Status.MEMORY_EXCEEDED: "MemoryExceeded",
    Status.PIDS_EXCEEDED: "PidsExceeded",
    Status.OUTPUT_EXCEEDED: "OutputExceeded",
    Status.DISK_EXCEEDED: "DiskExceeded",
    Status.CANCELLED: "Cancelled",
}


class Executor:
    """One attempt, from `start`. Whoever runs the loop asks for `due_s` and calls `on_time` when that has come.

    `on_started` is called when its sandbox is there, right before the agent; `on_done` once, with the completion
    that has not yet been written.
    """

    def __init__(
        self,
        dispatch: TrialDispatch,
        folder: Path,
        places_for: Callable[[str], Places],
        clock: Clock,
        on_started: Callable[[Sandbox], None],
        on_done: Callable[[TrialCompletion], None],
    ) -> None:
        self.dispatch, self.folder = dispatch, folder
        self.phase = Phase.STAGE
        self.recorder = Recorder(folder, dispatch.limits)
        self.sandbox: Sandbox | None = None
        self._supervisor: Supervisor | None = None
        self._stopped = self._frozen = False
        self._places_for, self._clock = places_for, clock
        self._places = places_for(kind_of(dispatch.container))
        self._grading: Grading | None = None
        self._fields: dict[str, Any] = {}  # of the completion, as far as they are known
        self._verdict: Graded | None = None  # on an agent that still runs
        self._laps_s: dict[str, float] = {}
        self._lap_from_s = clock.now_s()
        self._on_started, self._on_done = on_started, on_done

    def start(self) -> None:
        if self.dispatch.answer is not None:
            self._fields = {"status": Status.SUCCESS, "phase": Phase.GRADE}
            self._grade(dict(self.dispatch.answer.agent) or {"status": None, "exit_code": None, "signal": None})
            return
        try:
            self._launch = build_launch(self.dispatch, os.environ)
        except (OSError, InvalidValue) as error:
            self._fail(Status.SETUP_FAILED, "SetupFailed", str(error))
            return
        self._places.acquire(self._launch, self._begin, self._refused)

    @property
    def _active(self) -> list[Supervisor]:
        """Of the agent, and of the grader: both at once only where a service is graded."""
        grader = self._grading.supervisor if self._grading is not None else None
        return [one for one in (self._supervisor, grader) if one is not None]

    @property
    def due_s(self) -> float | None:
        return min((one.due_s for one in self._active if one.due_s is not None), default=None)

    def on_time(self) -> None:
        now_s = self._clock.now_s()
        for one in self._active:
            if one.due_s is not None and one.due_s <= now_s:
                one.on_time()

    # --- a word may come before the sandbox is there: it holds from then on ---

    def stop(self) -> None:
        self._stopped = True
        if self._grading is not None:
            self._grading.stopped = True
        for one in self._active:
            one.stop("cancelled")

    def freeze(self) -> None:
        self._frozen = True
        if self._grading is not None:
            self._grading.frozen = True
        for one in self._active:
            one.freeze()

    def thaw(self) -> None:
        self._frozen = False
        if self._grading is not None:
            self._grading.frozen = False
        for one in self._active:
            one.thaw()

    # --- the phases ---

    def _refused(self, end: End) -> None:
        if end.setup:
            self._fail(Status.SETUP_FAILED, "SetupFailed", end.setup)
        else:
            self._fail(Status.ENVIRONMENT_ERROR, "SandboxUnavailable", end.fault)

    def _begin(self, sandbox: Sandbox) -> None:
        self._lap("stage")
        self.phase, self.sandbox = Phase.AGENT, sandbox
        self._on_started(sandbox)
        if self.dispatch.grader is not None and self.dispatch.grader.services == "keep":
            self.recorder.on_serving = self._serving
        self._supervisor = Supervisor(
            sandbox,
            self._launch,
            self._clock,
            lambda outcome: self._ended(sandbox, outcome),
            tee=self.recorder.feed,
        )
        if self._frozen:
            self._supervisor.freeze()
        if self._stopped:
            self._supervisor.stop("cancelled")

    def _serving(self) -> None:
        """The agent says that its service is there: it is graded as it runs, and ended after that."""
        if self._supervisor is not None and self._grading is None and not self._stopped:
            self._supervisor.hold()
            self._grade({"status": "serving", "exit_code": None, "signal": None}, beside=self.sandbox)

    def _ended(self, sandbox: Sandbox, outcome: Outcome) -> None:
        signals = self.recorder.signals
        if self._supervisor is not None:
            signals.wait(self._supervisor.retry_after_s)
        self._supervisor = None
        self._lap("agent")
        self.phase = Phase.COLLECT
        status, error, result = outcome.status, _error_of(outcome), None
        try:
            result = _encode(outcome.value)
        except ValueError as fault:
            if outcome.ok:
                status, error = Status.AGENT_ERROR, AgentError(type="MalformedResult", message=str(fault))
        if status is Status.AGENT_ERROR and (outcome.exit_code == os.EX_TEMPFAIL or signals.turned_away):
            status = Status.RATE_LIMITED
        try:
            if self.recorder.failure is not None:
                raise self.recorder.failure
            if result is not None:
                (self.folder / "result.json").write_bytes(result)
            self._collect(sandbox)
        except OSError as failure:
            self._fail(*_unwritten(failure, self.folder))
            return
        self._lap("collect")
        self._fields = {
            "status": status,
            "phase": Phase.AGENT,
            "error": error,
            "exit_code": outcome.exit_code,
            "signal": outcome.signal,
            "retry_after_s": signals.retry_after_s if status is Status.RATE_LIMITED else None,
            "result_sha256": hashlib.sha256(result).hexdigest() if result is not None else None,
            "dropped": outcome.dropped,
            "usage": outcome.usage,
            "kill": outcome.kill,
            "isolation": outcome.isolation,
        }
        if self._grading is not None:
            return  # a service that has ended, while it is graded: that is for the grader to find out
        if self._verdict is not None:
            self._judge(self._verdict)
        elif self._is_graded(status):
            self._grade({"status": status, "exit_code": outcome.exit_code, "signal": outcome.signal})
        else:
            self._complete(**self._fields)

    # --- grading ---

    def _is_graded(self, status: Status) -> bool:
        grader = self.dispatch.grader
        if grader is None or self._stopped:
            return False
        return status is Status.SUCCESS or (grader.grade_on == "always" and status.blame is Blame.AGENT)

    def _grade(self, about: dict[str, Any], beside: Sandbox | None = None) -> None:
        self.phase = Phase.GRADE
        grader = self.dispatch.grader
        assert grader is not None
        places = self._places_for(kind_of(grader.container))
        like = self.sandbox if grader.in_ == "same" and grader.container is not None else None
        self._grading = Grading(
            self.dispatch, self.folder, places, self._clock, self._put_left, about, self._graded, like, beside
        )
        self._grading.frozen = self._frozen
        self._grading.stopped = self._stopped
        self._grading.start()

    def _put_left(self, grader: Sandbox) -> None:
        """What there is to grade, into the grader's sandbox; and kept, to be graded again."""
        spec = self.dispatch.grader
        assert spec is not None
        limits = CollectLimits(spec.limits.disk, files=spec.limits.files)
        if self.dispatch.answer is not None:
            put_answer(self.dispatch.answer.archive, grader, limits)
            return
        assert self.sandbox is not None
        if spec.in_ == "same" and spec.container is not None:
            return  # it sees the agent's own
        names = ("workspace", "out", "tmp") if spec.in_ == "same" else ("workspace", "out")
        left_out = carry(self.sandbox, grader, names, limits)
        if left_out:
            report = [{"path": path, "reason": reason} for path, reason in left_out]
            (self.folder / "not_graded.json").write_text(json.dumps(report, indent=1))
        keep_answer(grader, names, self.folder / ANSWER, self.dispatch.out_limit)

    def _graded(self, graded: Graded) -> None:
        self._lap("grade")
        self._grading = None
        if self._supervisor is not None:  # a service, which has been graded
            self._verdict = graded
            self._supervisor.release()
        else:
            self._judge(graded)

    def _judge(self, graded: Graded) -> None:
        if self._fields["status"] is Status.RATE_LIMITED:  # a service that gave up while it was graded
            self._complete(**self._fields)
            return
        if graded.raw is not None:
            name = "grade.json" if graded.grade is not None else REJECTED
            try:
                (self.folder / name).write_bytes(graded.raw)
            except OSError as failure:
                self._fail(*_unwritten(failure, self.folder))
                return
        fields: dict[str, Any] = {**self._fields, "grading": graded.report, "grade": graded.grade}
        if graded.grade is not None and graded.raw is not None:
            fields["grade_sha256"] = hashlib.sha256(graded.raw).hexdigest()
        if graded.status is not Status.SUCCESS and (
            self._fields["status"] is Status.SUCCESS or graded.status is not Status.GRADE_ERROR
        ):
            fields |= {"status": graded.status, "phase": Phase.GRADE, "error": graded.report.error}
        self._complete(**fields)

    def _collect(self, sandbox: Sandbox) -> None:
        try:
            fd = sandbox.open_folder("out")
        except OSError as error:  # the agent put something else there
            found = Collected(left_out=[("out", error.strerror or str(error))])
        else:
            try:
                limits = CollectLimits(self.dispatch.out_limit)
                found = collect(fd, self.folder / "out", limits, frozenset(("result.json",)))
            finally:
                os.close(fd)
        if found.left_out:
            (self.folder / "collected.json").write_text(json.dumps(found.report(), indent=1))

    def _fail(self, status: Status, kind: str, message: str) -> None:
        self._complete(status=status, phase=self.phase, error=AgentError(type=kind, message=message))

    def _complete(self, **fields: Any) -> None:
        self.recorder.close()
        self.phase = Phase.TEARDOWN
        dispatch, sandbox = self.dispatch, self.sandbox

        def done() -> None:
            self._lap("teardown")
            self._on_done(
                TrialCompletion(
                    slot=dispatch.slot,
                    trial_id=dispatch.trial_id,
                    attempt=dispatch.attempt,
                    provider=self.recorder.signals.provider,
                    image_id=dispatch.container.image_id if dispatch.container else None,
                    steps_s={**self._laps_s, **(sandbox.steps_s if sandbox else {})},
                    **fields,
                )
            )

        if sandbox is None:
            done()
        else:
            self._places.release(sandbox, done)

    def _lap(self, name: str) -> None:
        now_s = self._clock.now_s()
        self._laps_s[name], self._lap_from_s = round(now_s - self._lap_from_s, 4), now_s


def kind_of(container: ContainerSpec | None) -> str:
    """The kind of sandbox that it takes."""
    return "process" if container is None else "docker"


def _error_of(outcome: Outcome) -> AgentError | None:
    """Where the status says what happened, so does the type: what a killed agent got to say is a matter of luck."""
    kind = _TYPES.get(outcome.status)
    if kind is None:
        return outcome.error
    if outcome.error is None:
        return AgentError(type=kind, message="the agent was killed")
    return outcome.error.model_copy(update={"type": kind})


def _encode(value: Any) -> bytes | None:
    """What result.json will hold. Raises ValueError for NaN and infinities, which Python reads and JSON has not."""
    if value is None:
        return None
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _unwritten(error: OSError, folder: Path) -> tuple[Status, str, str]:
    """What the agent did is not all on the disk: that is the machine's doing, and the attempt does not count."""
    if error.errno in NO_ROOM:
        return Status.ENVIRONMENT_ERROR, StoreFull.__name__, f"no room left in {folder}: {error.strerror}"
    return Status.ENVIRONMENT_ERROR, type(error).__name__, str(error)
