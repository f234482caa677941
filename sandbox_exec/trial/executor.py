"""The phases of one attempt at a trial, from its dispatch to its completion, in the worker that runs it.

Stage, agent, collect, teardown; the grading phase will stand between agent and collect. The executor writes only
into the attempt's folder. `completion.json` comes last, whole and synced: once it is there, the attempt has ended,
whatever happens to the worker or to the coordinator.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandbox_exec.clock import Clock
from sandbox_exec.contracts import AgentError, Outcome, Phase, Status, TrialCompletion, TrialDispatch
from sandbox_exec.errors import InvalidValue
from sandbox_exec.guest import entry
from sandbox_exec.sandbox.base import Launch, Sandbox
from sandbox_exec.sandbox.process import ProcessSandbox
from sandbox_exec.sandbox.provider import Provider
from sandbox_exec.trial.collect import collect
from sandbox_exec.trial.recorder import Recorder
from sandbox_exec.trial.supervisor import Supervisor


class Executor:
    """One attempt. `on_done` is called once, with the completion that has not yet been written."""

    def __init__(
        self,
        dispatch: TrialDispatch,
        folder: Path,
        provider: Provider,
        clock: Clock,
        on_done: Callable[[TrialCompletion], None],
    ) -> None:
        self.dispatch, self.folder = dispatch, folder
        self.phase = Phase.STAGE
        self.supervisor: Supervisor | None = None
        self._stopped = False
        self._clock, self._on_done = clock, on_done
        self.recorder = Recorder(folder, dispatch.limits)
        try:
            self._launch = build_launch(dispatch, os.environ)
        except (OSError, InvalidValue) as error:
            self._fail(Status.SETUP_FAILED, "SetupFailed", str(error))
            return
        if b"cloudpickle" in self._launch.payload:
            provider.preload("cloudpickle")
        provider.acquire(
            0,
            dispatch.limits,
            self._begin,
            lambda reason: self._fail(Status.ENVIRONMENT_ERROR, "SandboxUnavailable", reason),
        )

    def stop(self) -> None:
        self._stopped = True
        if self.supervisor is not None:
            self.supervisor.stop("cancelled")

    def _begin(self, sandbox: ProcessSandbox) -> None:
        self.phase = Phase.AGENT
        try:
            self.supervisor = Supervisor(
                sandbox,
                self._launch,
                self._clock,
                lambda outcome: self._ended(sandbox, outcome),
                tee=self.recorder.feed,
            )
        except OSError as error:  # the workspace could not be copied: too large for `disk`, or unreadable
            self._fail(Status.SETUP_FAILED, "SetupFailed", f"the workspace cannot be staged: {error}")
            return
        if self._stopped:
            self.supervisor.stop("cancelled")

    def _ended(self, sandbox: Sandbox, outcome: Outcome) -> None:
        self.phase = Phase.COLLECT
        digest = self._write_result(outcome.value)
        self._collect(sandbox)
        self._complete(
            status=outcome.status,
            phase=Phase.AGENT,
            error=outcome.error,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            result_sha256=digest,
            dropped=outcome.dropped,
            usage=outcome.usage,
            kill=outcome.kill,
            isolation=outcome.isolation,
        )

    def _write_result(self, value: Any) -> str | None:
        if value is None:
            return None
        data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        (self.folder / "result.json").write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    def _collect(self, sandbox: Sandbox) -> None:
        fd = sandbox.open_folder("out")
        try:
            found = collect(fd, self.folder / "out", self.dispatch.out_limit, frozenset(("result.json",)))
        finally:
            os.close(fd)
        if found.left_out:
            report = {"left_out": found.left_out, "left_out_more": found.left_out_more}
            (self.folder / "collected.json").write_text(json.dumps(report, indent=1))

    def _fail(self, status: Status, kind: str, message: str) -> None:
        self._complete(status=status, phase=self.phase, error=AgentError(type=kind, message=message))

    def _complete(self, **fields: Any) -> None:
        self.recorder.close()
        self.phase = Phase.TEARDOWN
        dispatch = self.dispatch
        self._on_done(
            TrialCompletion(slot=dispatch.slot, trial_id=dispatch.trial_id, attempt=dispatch.attempt, **fields)
        )


def build_launch(dispatch: TrialDispatch, environ: Mapping[str, str]) -> Launch:
    """What to run for a dispatch. Secrets come from `environ`, and go into the launch and nowhere else."""
    task = {
        "id": dispatch.task.id,
        "input": dispatch.task.input,
        "seed": dispatch.seed,
        "repeat": dispatch.slot.repeat,
    }
    variant, agent = dispatch.variant, dispatch.variant.agent
    missing = [name for name in variant.pass_env if name not in environ]
    if missing:
        raise InvalidValue(f"pass_env names {', '.join(missing)}, which the environment does not have")
    workspace = dispatch.task.workspace
    common: dict[str, Any] = {
        "limits": dispatch.limits,
        "env": {**variant.env, **{name: environ[name] for name in variant.pass_env}},
        "seed": dispatch.seed,
        "workspace": dispatch.base / workspace if workspace is not None else None,
    }
    if agent.command is not None:
        staged = {"in/task.json": json.dumps(task).encode()}
        return Launch(argv=agent.command, staged=staged, **common)
    if agent.python is not None:
        module, _, function = agent.python.partition(":")
        call: tuple[Any, ...] = (entry.call, (str(dispatch.base), module, function, task), {})
        return Launch(payload=pickle.dumps(call), **common)
    if dispatch.payload is not None:
        return Launch(payload=_with_argument(_read_function(dispatch.payload), task), **common)
    raise InvalidValue("this agent is neither a command nor a function; artifacts come with the Docker sandbox")


@functools.lru_cache(maxsize=16)  # named by its digest: it does not change
def _read_function(path: Path) -> bytes:
    return path.read_bytes()


def _with_argument(function: bytes, task: dict[str, Any]) -> bytes:
    """A call of a pickled function, without unpickling it here."""
    return pickle.dumps((entry.call_pickled, (function, task), {}))
