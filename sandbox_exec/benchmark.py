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
    MAX_DIGITS,
    MAX_LEFT,
    ComponentRegistry,
    as_json,
    watch_trace,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from types import CodeType, FrameType
    from typing import Any, NoReturn

    from sandbox_exec.contracts import Experiment, Task
    from sandbox_exec.runs import PathLike, RunSummary
    from sandbox_exec.schedule.queues import TaskQueue
    from sandbox_exec.trial_reports import TrialReport

MADE_WITH = "benchmark.json"  # in the run's folder: digests of what its experiment does not say

_MAX_GRADE = 1 << 20  # bytes of JSON; the run takes no more

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
    """Names of your object's attributes that the copy in the agent's sandbox does not have."""

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
        and the same call with its `run_id` goes on. A note on KeyboardInterrupt says which that is.
        """
        from sandbox_exec.contracts import Experiment
        from sandbox_exec.errors import InvalidValue, SandboxExecError
        from sandbox_exec.trial_reports import reports_of

        design = dict(design or {})
        if twice := {"order", "queue", "repeats"} & set(design):
            raise InvalidValue(f"design has {', '.join(sorted(twice))}: say it with queue and n_task_repeats")
        if "workers" in how:
            raise InvalidValue("workers is given: say it with max_workers")
        rows, evaluations = _apart(tasks)
        given = _given(variants or {type(self).__name__: {}})
        data = {key: value.pop("data", None) for key, value in given.items()}
        own = self._for_agents()
        self._check_pickle()
        sandbox = sandbox or {}
        experiment = Experiment(
            name=name or type(self).__name__,
            seed=seed,
            tasks=rows,
            variants=[
                {**value, "id": key, "agent": {"function": InSandbox(own, data[key])}} for key, value in given.items()
            ],
            lanes=lanes or {},
            design={**design, **_order_of(queue), "repeats": n_task_repeats},
            sandbox=_without_script(sandbox),
            grading={**(grading or {}), "function": InGrading(self, evaluations)},
        )
        _check_graders(experiment)
        made_with = {
            "evaluation data": _digest(evaluations),
            "data of variants": _digest(data),
            "sandbox.hidden": _digest([str(path) for path in sandbox.get("hidden", ())]),
            **self._state(),
        }
        summary = _work(experiment, made_with, runs, run_id, max_workers, how)
        if summary.status != "completed":
            raise SandboxExecError(
                f"{summary.folder} is {summary.status} ({summary.reason}), {summary.committed} of {summary.slots} "
                f"trials committed; the same call with run_id={summary.run_id!r} goes on"
            )
        return reports_of(summary.folder)

    def _for_agents(self) -> Benchmark:
        import copy

        from sandbox_exec.errors import InvalidValue

        kind = type(self).__name__
        hidden: Any = self.evaluation_only
        if isinstance(hidden, str) or not set(hidden) <= set(vars(self)):
            raise InvalidValue(
                f"{kind}.evaluation_only is {hidden!r}; it is a tuple of names of the object's own attributes, which "
                f"are: {', '.join(vars(self)) or 'none'}"
            )
        own = copy.copy(self)
        for name in hidden:
            own.__dict__.pop(name, None)
        for name, value in vars(own).items():
            if hidden and getattr(value, "__self__", None) is self:
                raise InvalidValue(
                    f"{kind}.{name} is a method of the object, and agents would get the whole object with it, what is "
                    "evaluation_only included: call the method by its own name instead"
                )
        return own

    def _check_pickle(self) -> None:
        import cloudpickle

        from sandbox_exec.errors import InvalidExperiment

        of = type(self).__name__
        try:
            cloudpickle.dumps(self)
        except Exception as error:  # whatever it holds may fail in its own way
            for name, value in vars(self).items():
                try:
                    cloudpickle.dumps(value)
                except Exception:
                    of = f"{of}.{name}"
                    break
            raise InvalidExperiment(f"{of} cannot be pickled: {error}") from error

    def _state(self) -> dict[str, str]:
        """Digests of those of its attributes that are JSON: the pickles of others differ from process to process."""
        from sandbox_exec.errors import InvalidExperiment

        digests = {}
        for name, value in vars(self).items():
            with suppress(InvalidExperiment):
                digests[f"{type(self).__name__}.{name}"] = _digest(value)
        return digests


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
                _leave(LEFT, fitting(registry.final()))
            raise
        _leave(LEFT, fitting(registry.final()))
        _leave(ANSWER, text)
        return answer

    def _run(self, task: dict[str, Any], registry: ComponentRegistry) -> Any:
        benchmark = self._benchmark
        ours: set[int] = set()  # the others in the registry were registered by hand, and keep the name they have

        def register(category: str, components: dict[str, Any]) -> None:
            for name, component in components.items():
                if component is not None and (id(component) in ours or component not in registry):
                    registry.register(category, name, component)
                    ours.add(id(component))
            registry.snapshot()

        environment = benchmark.setup_environment(task)
        register("environment", {"environment": environment})
        user = benchmark.setup_user(task, environment)
        register("user", {"user": user})
        made = benchmark.setup_agents(task, environment, user)
        agents = dict(made) if isinstance(made, dict) else {"agent": made}
        register("agents", agents)
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
    category = _CATEGORIES.get(benchmark.registry.category_of(first) or "")
    return category if category and _is_method(code, type(first)) else None


def _is_method(code: CodeType, kind: type) -> bool:
    """Whether it is code of the class: a function that is called with a component is not."""
    name = code.co_name
    return any(
        f".{code.co_qualname}".endswith(f".{one.__name__}.{name}")  # also below a decorator
        or getattr(vars(one).get(name), "__code__", None) is code
        for one in kind.__mro__
    )


def fitting(traces: dict[str, dict[str, Any]]) -> str:
    """The traces as JSON of the size that an evaluation reads: the largest are only said to be too large."""
    from json import dumps

    text = dumps(traces)
    if len(text) <= MAX_LEFT:
        return text
    too_much = len(text) - MAX_LEFT
    sizes = [(len(dumps(data)), category, name) for category, of in traces.items() for name, data in of.items()]
    for size, category, name in sorted(sizes, reverse=True):
        if too_much > 0:
            said = {"error": f"too large: {size} characters; {MAX_LEFT} are allowed for all components"}
            traces[category][name] = said
            too_much -= size - len(dumps(said))
    return dumps(traces)


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
    in it are metrics too, and all else is in the details. But for the score, nothing in it can make an evaluation fail:
    it may be what an agent said, which would rather have no grade than a bad one.
    """
    if isinstance(said, bool):
        return {"score": float(said), "passed": said}
    score = _number(said["score"] if isinstance(said, dict) and "score" in said else said)
    if score is None:
        raise ValueError(f'evaluate() returned {said!r:.200}; return a finite number, or a dict with one as "score"')
    if not isinstance(said, dict):
        return {"score": score}
    metrics = said.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise ValueError(f"evaluate() returned metrics that are {metrics!r:.200}; they are a dict of numbers by name")
    numbers, others = {}, {}
    for key, value in {**metrics, **{key: value for key, value in said.items() if key not in _GRADE}}.items():
        number = _number(value)
        if number is None:
            others[key] = value
        else:
            numbers[str(key)] = number
    details = said.get("details")
    if others:
        details = {**(details if isinstance(details, dict) else {"details": details} if details else {}), **others}
    passed = said.get("passed")
    grade = {"score": score, "passed": None if passed is None else bool(passed), "metrics": numbers}
    return _bounded(grade, details)


def _bounded(grade: dict[str, Any], details: Any) -> dict[str, Any]:
    from json import dumps

    try:
        details = as_json(details)
    except ValueError as error:
        details = {"error": f"the details are left out: {error}"}
    for left_out in ("details", "metrics"):
        whole = {**grade, "details": details}
        size = len(dumps(whole))
        if size <= _MAX_GRADE:
            break
        details = {"error": f"{left_out} left out: the grade has {size} bytes, and {_MAX_GRADE} are allowed"}
        if left_out == "metrics":
            grade = {**grade, "metrics": {}}
    return {**grade, "details": details}


def _number(value: Any) -> float | None:
    """As a finite float: what Python, fractions and numpy call a number. None: it is none."""
    if not hasattr(type(value), "__float__"):
        return None
    try:
        number = float(value)
    except Exception:  # too large, or an array
        return None
    return number if number - number == 0 else None


def _left(name: str) -> Any:
    """What the agent left there, or None if it is no JSON: an agent must not be able to make an evaluation fail."""
    from json import loads

    try:
        with open(os.path.join(os.environ["SANDBOX_EXEC_OUT"], name), "rb") as file:
            data = file.read(MAX_LEFT + 1)
        if len(data) > MAX_LEFT:
            return None
        return loads(data, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
    except (OSError, ValueError, RecursionError):
        return None


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"no number that JSON has: {text:.40}")


def _finite(text: str) -> float:
    number = float(text)
    return number if number - number == 0 else _refuse(text)


def _whole(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else _refuse(text)


# --- in the caller's process ---


def _work(
    experiment: Experiment,
    made_with: dict[str, str],
    runs: PathLike,
    run_id: str | None,
    workers: int | None,
    how: dict[str, Any],
) -> RunSummary:
    from json import dumps
    from pathlib import Path

    from sandbox_exec.runs import continue_run, run
    from sandbox_exec.store import write_atomic
    from sandbox_exec.store.db import DB_NAME

    folder = Path(os.path.abspath(runs), run_id) if run_id is not None else None
    on_ready = how.pop("on_ready", None)

    def ready(coordinator: Any) -> None:
        nonlocal folder
        folder = coordinator.store.folder
        if not (folder / MADE_WITH).exists():
            write_atomic(folder / MADE_WITH, dumps(made_with).encode())
        if on_ready is not None:
            on_ready(coordinator)

    try:
        if folder is None or not (folder / DB_NAME).exists():
            return run(experiment, runs=runs, run_id=run_id, workers=workers, on_ready=ready, **how)
        _check_same(folder, experiment, made_with)
        return continue_run(folder, workers=workers, on_ready=ready, **how)
    except KeyboardInterrupt as interrupt:
        if folder is not None and (folder / DB_NAME).exists():
            interrupt.add_note(f"the run is in {folder}; the same call with run_id={folder.name!r} goes on")
        raise


def _check_same(folder: Path, experiment: Experiment, made_with: dict[str, str]) -> None:
    """Whether the run is of this very call."""
    from json import loads

    from sandbox_exec.errors import InvalidExperiment
    from sandbox_exec.store import RunStore

    with RunStore.open(folder, write=False) as store:
        made = type(experiment).model_validate_json(store.run().experiment_json)
    before, now = _comparable(made), _comparable(experiment)
    if (folder / MADE_WITH).exists():  # one that was killed as it began has not got it yet, and nothing has run of it
        before |= loads((folder / MADE_WITH).read_bytes())
        now |= made_with
    if changed := [name for name in {**now, **before} if now.get(name) != before.get(name)]:
        raise InvalidExperiment(
            f"{folder} was made with other {', '.join(changed)}: call run() as then, or with another run_id"
        )


def _comparable(experiment: Experiment) -> dict[str, Any]:
    """All but the code, whose pickle is another one in each process, and the name of the script."""
    without: Any = {"variants": {"__all__": {"agent"}}, "grading": {"function"}, "design": {"max_concurrency"}}
    return experiment.model_dump(exclude={**without, "sandbox": {"hidden"}, "base": True, "sources": True})


def _without_script(sandbox: Mapping[str, Any]) -> Mapping[str, Any]:
    """The file of the script is hidden from agents: it is not needed there, and its text may tell what to answer."""
    import __main__

    script = os.path.abspath(getattr(__main__, "__file__", None) or "")
    if not os.path.isfile(script) or script in map(os.path.abspath, sandbox.get("readable", ())):
        return sandbox
    return {**sandbox, "hidden": [*sandbox.get("hidden", ()), script]}


def _given(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    from collections.abc import Mapping

    from sandbox_exec.errors import InvalidValue

    rows: Any = variants
    if not isinstance(rows, Mapping) or not all(isinstance(one, Mapping) for one in rows.values()):
        raise InvalidValue(f"variants is {rows!r:.200}; it is a dict, by id, of dicts of settings")
    for key, one in variants.items():
        if own := {"id", "agent"} & set(one):
            raise InvalidValue(
                f"variants[{key!r}] has {', '.join(sorted(own))}: its id is its key, its agents are those of "
                "setup_agents, which can tell variants apart by self.agent_data"
            )
    return {key: dict(one) for key, one in variants.items()}


def _check_graders(experiment: Experiment) -> None:
    from sandbox_exec.errors import InvalidValue

    for task in experiment.tasks:
        if task.grading is not None and (task.grading.command or task.grading.python):
            raise InvalidValue(f"task {task.id!r} has a grader of its own: the grader of a benchmark is evaluate()")


def _apart(tasks: Iterable[Task | Mapping[str, Any]]) -> tuple[list[Any], dict[str, str]]:
    """The tasks as agents may know them, and the evaluation data of those that have some."""
    from collections.abc import Mapping

    from sandbox_exec.errors import InvalidValue

    rows: list[Any] = []
    evaluations = {}
    for task in tasks:
        if isinstance(task, Mapping) and "evaluation" in task:
            evaluations[str(task.get("id"))] = _json(task["evaluation"], f"task {task.get('id')!r}: evaluation")
            task = {key: value for key, value in task.items() if key != "evaluation"}
        rows.append(task)
    if not rows:
        raise InvalidValue("there are no tasks: give at least one")
    return rows, evaluations


def _order_of(queue: str | type[TaskQueue] | Mapping[str, Any]) -> dict[str, Any]:
    from collections.abc import Mapping

    from sandbox_exec.errors import InvalidValue

    if isinstance(queue, str):
        return {"order": queue}
    if isinstance(queue, type):
        return {"order": f"{queue.__module__}:{queue.__qualname__}"}
    if not isinstance(queue, Mapping):
        raise InvalidValue(
            f'queue is {queue!r:.200}; it is the name of an order, a class, or a dict of queue settings with "order"'
        )
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
