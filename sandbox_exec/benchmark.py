"""`Benchmark`: for people who write benchmarks in Python. They say what there is; a durable run does the rest.

Theory of operation. A benchmark is pickled twice. One copy goes into each trial's sandbox, where environment, user and
agents are made and run: there is nothing in it of the tasks' evaluation data. The other one goes, with that data, into
the grading phase: a sandbox of its own, in which no agent has been. From the first to the second goes JSON in files of
/out, `answer.json` and `traces.json`, and nothing else; it is hostile, as all that an agent leaves.

Loaded in every trial, so it imports nothing but the guest until `run` is called.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress

from sandbox_exec.guest import context
from sandbox_exec.guest.registry import (
    ANSWER,
    FAULT,
    LEFT,
    MAX_LEFT,
    ComponentRegistry,
    as_json,
    watch_trace,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from types import FrameType
    from typing import Any

    from sandbox_exec.contracts import Experiment, Task
    from sandbox_exec.runs import PathLike, RunSummary
    from sandbox_exec.schedule.queues import TaskQueue
    from sandbox_exec.trial_reports import TrialReport

MADE_WITH = "benchmark.json"  # in the run's folder: the digest of what its experiment does not say

_CATEGORIES = {"environment": "environment", "user": "user", "agents": "agent"}
_HOOKS = {"setup_environment": "environment", "setup_user": "user", "setup_agents": "agent", "run_agents": "agent"}
_GRADE = ("score", "passed", "metrics", "details")


class AgentFault(Exception):
    """Raised by any part of a benchmark: what went wrong is the agent's doing."""


class EnvironmentFault(Exception):
    """Raised by any part of a benchmark: what went wrong is the environment's doing."""


class UserFault(Exception):
    """Raised by any part of a benchmark: what went wrong is the simulated user's doing."""


_FAULTS = {AgentFault: "agent", EnvironmentFault: "environment", UserFault: "user"}


class Benchmark(ABC):
    """Derive from it and say what a trial is made of. `task` is a dict: id, input, seed, repeat.

    The first four methods are called in the agent's sandbox, where `registry` holds the trial's components and
    `agent_data` is what `run` was given for the variant. The last two are called in the grading phase, in a process
    that never ran the agent, where `task` has also "evaluation", the task's evaluation data, and "agent", how the
    agent ended.
    """

    registry: ComponentRegistry
    agent_data: Any = None
    evaluation_only: tuple[str, ...] = ()
    """Attributes of yours that the copy in the agent's sandbox does not have."""

    def setup_environment(self, task: dict[str, Any]) -> Any:
        """Return what the agents act on, if there is such a thing. Registered as environment/environment."""
        return None

    def setup_user(self, task: dict[str, Any], environment: Any) -> Any:
        """Return the simulated user, if there is one. Registered as user/user."""
        return None

    @abstractmethod
    def setup_agents(self, task: dict[str, Any], environment: Any, user: Any) -> Any:
        """Return the agents by name, or one agent. Registered as agents/<name>; one without a name as agents/agent."""

    @abstractmethod
    def run_agents(self, task: dict[str, Any], agents: dict[str, Any], environment: Any, user: Any) -> Any:
        """Let them work, and return the answer: JSON. Call `self.registry.snapshot()` after a step to keep it."""

    def setup_evaluators(self, task: dict[str, Any]) -> Any:
        """Return what `evaluate` needs."""
        return None

    @abstractmethod
    def evaluate(self, task: dict[str, Any], evaluators: Any, answer: Any, traces: dict[str, dict[str, Any]]) -> Any:
        """Return the score, or a dict with "score"; see `grade_of`. `answer` and `traces` are hostile: any JSON."""

    def run(
        self,
        tasks: Iterable[Task | Mapping[str, Any]],
        *,
        queue: str | type[TaskQueue] | Mapping[str, Any] = "sequential",
        max_workers: int | None = None,
        n_task_repeats: int = 1,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        lanes: Mapping[str, Any] | None = None,
        design: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | None = None,
        grading: Mapping[str, Any] | None = None,
        name: str | None = None,
        seed: int = 0,
        runs: PathLike = "runs",
        run_id: str | None = None,
        **how: Any,
    ) -> list[TrialReport]:
        """Run all tasks with all variants, and return a report of each trial, in the order of the schedule.

        tasks: those of an experiment; as a dict, one may have "evaluation": JSON that only its evaluation gets.
        queue: the design's order, or a class of yours that can be imported; or a dict of queue settings with "order".
        max_workers: trials at once.
        n_task_repeats: trials of each task with each variant.
        variants: by id, settings of a variant (env, pass_env, lane, ...), and in "data" the JSON that is `agent_data`.
        lanes, design, sandbox, grading, seed: more of the experiment's settings; its grader is `evaluate`.
        runs, run_id: where the run is kept. One that is there already is continued, with the code it was made with.
        how: more arguments of `sandbox_exec.run`, such as callbacks.

        Raises `SandboxExecError` if the run was stopped before its end: `reports_of` has those of what is committed,
        and the same call with its `run_id` goes on.
        """
        from sandbox_exec.errors import InvalidValue, SandboxExecError
        from sandbox_exec.trial_reports import reports_of

        design = dict(design or {})
        if twice := {"order", "queue", "repeats"} & set(design):
            raise InvalidValue(f"design has {', '.join(sorted(twice))}: say it with queue and n_task_repeats")
        rows, evaluations = _apart(tasks)
        given = {key: dict(value) for key, value in (variants or {type(self).__name__: {}}).items()}
        data = {key: value.pop("data", None) for key, value in given.items()}
        order = _order_of(queue)
        experiment = self._experiment(
            name=name or type(self).__name__,
            seed=seed,
            tasks=rows,
            variants=[
                {**value, "id": key, "agent": {"function": InSandbox(self._for_agents(), data[key])}}
                for key, value in given.items()
            ],
            lanes=lanes or {},
            design={**design, **order, "repeats": n_task_repeats},
            sandbox=sandbox or {},
            grading={**(grading or {}), "function": InGrading(self, evaluations)},
        )
        summary = _work(experiment, _digest([evaluations, data]), runs, run_id, max_workers, how)
        if summary.status != "completed":
            raise SandboxExecError(
                f"{summary.folder} is {summary.status} ({summary.reason}), {summary.committed} of {summary.slots} "
                f"trials committed; the same call with run_id={summary.run_id!r} goes on"
            )
        return reports_of(summary.folder)

    def _for_agents(self) -> Benchmark:
        import copy

        own = copy.copy(self)
        for attribute in self.evaluation_only:
            own.__dict__.pop(attribute, None)
        return own

    def _experiment(self, sandbox: Mapping[str, Any], **fields: Any) -> Experiment:
        """A script's own file is hidden from agents: it is not needed there, and its text may tell what to answer."""
        import __main__
        from sandbox_exec.contracts import Experiment

        script = getattr(__main__, "__file__", None) if type(self).__module__ == "__main__" else None
        if script is not None and os.path.abspath(script) not in map(os.path.abspath, sandbox.get("readable", ())):
            sandbox = {**sandbox, "hidden": [*sandbox.get("hidden", ()), os.path.abspath(script)]}
        return Experiment(sandbox=sandbox, **fields)


# --- in the agent's sandbox ---


class InSandbox:
    """A trial, from its task to its answer."""

    def __init__(self, benchmark: Benchmark, data: Any) -> None:
        self._benchmark, self._data = benchmark, data

    def __call__(self, task: dict[str, Any]) -> Any:
        from json import dumps

        benchmark = self._benchmark
        registry = benchmark.registry = ComponentRegistry(context().trace)
        benchmark.agent_data = self._data
        watch_trace(registry)
        try:
            answer = self._run(task, registry)
            try:
                text = dumps(answer, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise AgentFault(f"what run_agents returned is not JSON: {error}") from error
            if len(text) > MAX_LEFT:
                raise AgentFault(f"the answer has {len(text)} bytes; {MAX_LEFT} are allowed: leave files in /out")
        except BaseException as error:
            # First the word, then the traces: what follows a line that the deadline tore is lost with it.
            context().trace(FAULT, component=component_of(error, benchmark), error=type(error).__name__)
            with suppress(OSError):  # a full disk is not what went wrong
                _leave(LEFT, dumps(registry.final()))
            raise
        _leave(LEFT, dumps(registry.final()))
        _leave(ANSWER, text)
        return answer

    def _run(self, task: dict[str, Any], registry: ComponentRegistry) -> Any:
        benchmark = self._benchmark
        environment = benchmark.setup_environment(task)
        _register(registry, "environment", "environment", environment)
        user = benchmark.setup_user(task, environment)
        _register(registry, "user", "user", user)
        made = benchmark.setup_agents(task, environment, user)
        agents = dict(made) if isinstance(made, dict) else {"agent": made}
        for name, agent in agents.items():
            _register(registry, "agents", name, agent)
        return benchmark.run_agents(task, agents, environment, user)


def component_of(error: BaseException, benchmark: Benchmark) -> str:
    """Whose doing an error is: a fault says it; else that of the innermost component, or hook, that it came through."""
    for fault, component in _FAULTS.items():
        if isinstance(error, fault):
            return component
    found = "agent"
    traceback = error.__traceback__
    while traceback is not None:
        found = _component_at(traceback.tb_frame, benchmark) or found
        traceback = traceback.tb_next
    return found


def _component_at(frame: FrameType, benchmark: Benchmark) -> str | None:
    code = frame.f_code
    if not code.co_argcount:
        return None
    first = frame.f_locals.get(code.co_varnames[0])  # what methods call self
    if first is benchmark:
        return _HOOKS.get(code.co_name)
    return _CATEGORIES.get(benchmark.registry.category_of(first) or "")


def _register(registry: ComponentRegistry, category: str, name: str, component: Any) -> None:
    if component is not None and component not in registry:
        registry.register(category, name, component)
    registry.snapshot()


def _leave(name: str, text: str) -> None:
    if len(text) <= MAX_LEFT:
        with open(os.path.join(os.environ["SANDBOX_EXEC_OUT"], name), "w") as file:
            file.write(text)


# --- in the grading phase ---


class InGrading:
    """An evaluation, from what the agent left to a grade. `evaluations` are JSON texts by task."""

    def __init__(self, benchmark: Benchmark, evaluations: dict[str, str]) -> None:
        self._benchmark, self._evaluations = benchmark, evaluations

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        from json import loads

        task = {**task, "evaluation": loads(self._evaluations.get(task["id"], "null"))}
        evaluators = self._benchmark.setup_evaluators(task)
        traces = _left(LEFT)
        traces = {key: of for key, of in traces.items() if isinstance(of, dict)} if isinstance(traces, dict) else {}
        return grade_of(self._benchmark.evaluate(task, evaluators, _left(ANSWER), traces))


def grade_of(said: Any) -> dict[str, Any]:
    """The grade in what `evaluate` returned: a number, True or False, or a dict with "score".

    Such a dict may have the other fields of a grade: passed, metrics (numbers) and details (JSON). Further numbers
    in it are metrics too, and all else is in the details.
    """
    if isinstance(said, bool):
        return {"score": float(said), "passed": said}
    if isinstance(said, int | float):
        return {"score": float(said)}
    if not isinstance(said, dict) or "score" not in said:
        raise ValueError(f'evaluate() returned {said!r:.200}; return a number, or a dict with "score"')
    rest = {key: value for key, value in said.items() if key not in _GRADE}
    numbers = {key: float(value) for key, value in rest.items() if isinstance(value, int | float)}
    others = {key: value for key, value in rest.items() if key not in numbers}
    details = said.get("details")
    if others:
        details = {**(details if isinstance(details, dict) else {"details": details} if details else {}), **others}
    metrics = {**{key: float(value) for key, value in (said.get("metrics") or {}).items()}, **numbers}
    passed = said.get("passed")
    return {
        "score": float(said["score"]),
        "passed": None if passed is None else bool(passed),
        "metrics": metrics,
        "details": as_json(details),
    }


def _left(name: str) -> Any:
    """What the agent left there, or None if it is no JSON: an agent must not be able to make an evaluation fail."""
    from json import loads

    try:
        with open(os.path.join(os.environ["SANDBOX_EXEC_OUT"], name), "rb") as file:
            data = file.read(MAX_LEFT + 1)
        return loads(data) if len(data) <= MAX_LEFT else None
    except (OSError, ValueError, RecursionError):
        return None


# --- in the caller's process ---


def _work(
    experiment: Experiment, digest: str, runs: PathLike, run_id: str | None, workers: int | None, how: dict[str, Any]
) -> RunSummary:
    from pathlib import Path

    from sandbox_exec.errors import InvalidExperiment
    from sandbox_exec.runs import continue_run, run
    from sandbox_exec.store import RunStore, write_atomic
    from sandbox_exec.store.db import DB_NAME

    folder = Path(os.path.abspath(runs), run_id) if run_id is not None else None
    if folder is None or not (folder / DB_NAME).exists():
        on_ready = how.pop("on_ready", None)

        def ready(coordinator: Any) -> None:
            write_atomic(coordinator.store.folder / MADE_WITH, digest.encode())
            if on_ready is not None:
                on_ready(coordinator)

        return run(experiment, runs=runs, run_id=run_id, workers=workers, on_ready=ready, **how)
    with RunStore.open(folder, write=False) as store:
        made = type(experiment).model_validate_json(store.run().experiment_json)
    before, now = _comparable(made), _comparable(experiment)
    changed = [name for name in now if now[name] != before[name]]
    if not changed and digest != _read(folder / MADE_WITH, digest):
        changed = ["evaluation data, or data of variants"]
    if changed:
        raise InvalidExperiment(
            f"{folder} was made with other {', '.join(changed)}: call run() as then, or with another run_id"
        )
    return continue_run(folder, workers=workers, **how)


def _comparable(experiment: Experiment) -> dict[str, Any]:
    """All but the code, whose pickle is another one in each process."""
    without: Any = {"variants": {"__all__": {"agent"}}, "grading": {"function"}, "design": {"max_concurrency"}}
    return experiment.model_dump(exclude={**without, "base": True, "sources": True})


def _read(path: Path, default: str) -> str:
    """A run that was killed as it began has not got it yet, and nothing has run of it."""
    return path.read_text() if path.exists() else default


def _apart(tasks: Iterable[Task | Mapping[str, Any]]) -> tuple[list[Any], dict[str, str]]:
    """The tasks as agents may know them, and the evaluation data of those that have some."""
    from collections.abc import Mapping

    rows: list[Any] = []
    evaluations = {}
    for task in tasks:
        if isinstance(task, Mapping) and "evaluation" in task:
            evaluations[str(task.get("id"))] = _json(task["evaluation"], f"task {task.get('id')!r}: evaluation")
            task = {key: value for key, value in task.items() if key != "evaluation"}
        rows.append(task)
    return rows, evaluations


def _order_of(queue: str | type[TaskQueue] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(queue, str):
        return {"order": queue}
    if isinstance(queue, type):
        return {"order": f"{queue.__module__}:{queue.__qualname__}"}
    order = _order_of(queue.get("order", "sequential"))
    return {**order, "queue": {key: value for key, value in queue.items() if key != "order"}}


def _digest(value: Any) -> str:
    import hashlib

    return hashlib.sha256(_json(value, "data of a variant").encode()).hexdigest()


def _json(value: Any, what: str) -> str:
    from json import dumps

    from sandbox_exec.errors import InvalidExperiment

    try:
        return dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidExperiment(f"{what} is not JSON: {error}") from error
