"""What to run for a dispatch: its agent, and its grader."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox_exec.contracts import GraderSpec, GradingSettings, TrialDispatch
from sandbox_exec.errors import InvalidValue
from sandbox_exec.guest import entry
from sandbox_exec.sandbox.base import Launch, Role, Sandbox


def build_launch(dispatch: TrialDispatch, environ: Mapping[str, str]) -> Launch:
    """Its agent. Secrets come from `environ`, and go into the launch and nowhere else."""
    task = _task(dispatch)
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
        "container": dispatch.container,
        "labels": _labels(dispatch),
    }
    if agent.command is not None:
        return Launch(argv=agent.command, staged=_staged(task), **common)
    if dispatch.artifact is not None:
        argv = (f"/agent/{dispatch.entrypoint}",)
        return Launch(argv=argv, agent=dispatch.artifact, staged=_staged(task), **common)
    payload = _call(dispatch, agent.python, dispatch.payload, task)
    if payload is None:
        raise InvalidValue("this agent is no command, and its function or artifact is not in the dispatch")
    return Launch(payload=payload, **common)


def build_grader(
    dispatch: TrialDispatch, about: dict[str, Any], like: Sandbox | None = None, beside: Sandbox | None = None
) -> Launch:
    """Its grader, which reads in `about` how the agent ended. `like`, `beside`: see `Launch`."""
    spec = dispatch.grader
    assert spec is not None
    task = _task(dispatch) | {"agent": about}
    common: dict[str, Any] = {
        "limits": spec.limits,
        "seed": dispatch.seed,
        "role": role_of(spec),
        "assets": spec.assets,
        "container": spec.container,
        "staged": _staged(task),
        "labels": _labels(dispatch),
        "like": like,
        "beside": beside,
    }
    if spec.command is not None:
        return Launch(argv=spec.command, **common)
    payload = _call(dispatch, spec.python, spec.payload, task)
    assert payload is not None
    return Launch(payload=payload, **common)


def role_of(spec: GraderSpec | GradingSettings) -> Role:
    return "grader-writable" if spec.writable or spec.in_ == "same" else "grader"


def _task(dispatch: TrialDispatch) -> dict[str, Any]:
    """What is told of it in task.json, or as the argument of a function."""
    return {
        "id": dispatch.task.id,
        "input": dispatch.task.input,
        "seed": dispatch.seed,
        "repeat": dispatch.slot.repeat,
    }


def _staged(task: dict[str, Any]) -> dict[str, bytes]:
    return {"in/task.json": json.dumps(task).encode()}


def _labels(dispatch: TrialDispatch) -> dict[str, str]:
    return {"run": dispatch.run_id, "trial": dispatch.trial_id, "attempt": str(dispatch.attempt)}


def _call(dispatch: TrialDispatch, python: str | None, function: Path | None, task: dict[str, Any]) -> bytes | None:
    """A call of "module:function", or of a pickled function, which is not unpickled here; None if there is neither."""
    if python is not None:
        module, _, name = python.partition(":")
        return pickle.dumps((entry.call, (str(dispatch.base), module, name, task), {}))
    if function is not None:
        return pickle.dumps((entry.call_pickled, (function.read_bytes(), task), {}))
    return None
