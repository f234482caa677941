"""What is to be run: tasks, variants, and how. Frozen, checked as a whole, and without any I/O.

`sandbox_exec.experiment` reads one from files and sees whether the files it names are there.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from sandbox_exec.contracts.base import Bytes, Contract, Seconds
from sandbox_exec.contracts.limits import MIN_MEMORY_BYTES, AbsolutePath, Count, Limits, Require
from sandbox_exec.contracts.queue import LaneSettings, QueueSettings
from sandbox_exec.contracts.words import Argv, Function, Id, Location, Ordinal, Task, Variant, entry_point
from sandbox_exec.errors import InvalidExperiment, InvalidValue
from sandbox_exec.units import MIB, processors

MAX_SLOTS: Final = 1_000_000  # what one coordinator holds in about a gigabyte

_MAX_TOLD: Final = 200  # problems in one message: more are one mistake made often, and nobody reads them
_MAX_SHOWN: Final = 64  # characters of a value in a message
_MAX_NEAREST: Final = 200  # names to compare with: with more, a file full of mistakes takes minutes to refuse
_FOR_PYTHON: Final = {"base", "sources", "function"}  # fields that no file may have

GRADERS: Final = ("command", "python", "function")  # what a grader can be

Loc = tuple[int | str, ...]
"""The path of a value in an experiment: ("tasks", 0, "id")."""


ORDERS: Final = ("sequential", "priority", "adaptive")


def _order(text: str) -> str:
    if text in ORDERS:
        return text
    if ":" not in text:
        raise InvalidValue(f'{text!r} is no order; allowed: {", ".join(ORDERS)}, or your own as "module:Class"')
    return entry_point(text)


class Design(Contract):
    """How the schedule is made and worked through."""

    repeats: Count = Field(default=1, description="Trials of each task with each variant.")
    max_concurrency: Count = Field(
        default_factory=processors, description="Trials in flight. Default: the processors there are."
    )
    order: Annotated[str, AfterValidator(_order)] = Field(
        default="sequential", description='sequential, priority, adaptive, or a TaskQueue of your own: "module:Class".'
    )
    queue: QueueSettings = QueueSettings()
    max_duration_s: Annotated[Seconds, Field(gt=0)] | None = Field(
        default=None, description="After this, what is in flight is killed, and what has not ended is skipped."
    )
    prune_after_failures: Count | None = Field(
        default=None, description="Failures in a row after which the rest of a variant is skipped."
    )
    memory_budget: Annotated[Bytes, Field(ge=MIN_MEMORY_BYTES)] | None = Field(
        default=None, description="Sum of the ceilings in flight. None: 80 % of the machine."
    )
    infra_retries: Ordinal = Field(
        default=3, description="Further attempts at a trial that was lost to the machine, not to its agent."
    )


class SandboxSettings(Contract):
    """Where trials run, and what each may use and see. The defaults are those of `Limits`."""

    kind: Literal["process", "docker"] = "process"
    image: str | None = Field(default=None, description="For docker, unless the task names one.")
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = Limits().timeout_s
    memory: Annotated[Bytes, Field(ge=MIN_MEMORY_BYTES)] | None = Limits().memory
    pids: Count | None = Limits().pids
    cpus: Annotated[float, Field(strict=True, gt=0)] | None = Limits().cpus
    disk: Bytes | None = Field(
        default=None, description="What may be written. None: 256 MiB, or out_limit if that is more."
    )
    out_limit: Bytes = Field(default=64 * MIB, description="How much of /out is kept.")
    network: Annotated[str, Field(min_length=1)] = Field(
        default="none", description="none or host; for docker also bridge, or a network of the engine's by name."
    )
    user: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="For docker: uid, uid:gid, or a user of the image's. None: an unprivileged one."
    )
    read_only: bool = Field(default=False, description="For docker: only /tmp, /workspace and /out can be written.")
    runtime: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="For docker: a runtime of the engine's, such as runsc. None: its default."
    )
    require: Require | None = None
    readable: tuple[Location, ...] = Field(default=(), description="As in Limits; relative to the experiment.")
    hidden: tuple[Location, ...] = Field(default=(), description="As in Limits; relative to the experiment.")

    def limits(self, task: Task, base: Path = Path()) -> Limits:
        """The limits of a trial of `task`, whose own timeout goes first. Relative paths start from `base`."""
        return self._limits(task.protocol.timeout_s or self.timeout_s, base)

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.kind == "process":
            if self.network not in ("none", "host"):
                raise InvalidValue(f"network is {self.network!r}; the process sandbox has: 'none', 'host'")
            others = [name for name in ("user", "read_only", "runtime") if getattr(self, name)]
            if others:
                raise InvalidValue(f"only for docker: {', '.join(others)}; remove them, or set kind: docker")
        return self

    @model_validator(mode="after")
    def _gives_limits(self) -> Self:
        try:
            self._limits(self.timeout_s, Path())
        except ValidationError as error:
            raise InvalidValue("; ".join(fault.text for fault in faults_of(error))) from None
        return self

    def _limits(self, timeout_s: float | None, base: Path) -> Limits:
        return Limits(
            timeout_s=timeout_s,
            memory=self.memory,
            pids=self.pids,
            cpus=self.cpus,
            # By default at least what is kept of /out, or that could never be so large.
            disk=self.disk or max(Limits.model_fields["disk"].default, self.out_limit),
            network="host" if self.network == "host" else "none",
            require=self.require,
            readable=[_placed(path, base) for path in self.readable],
            hidden=[_placed(path, base) for path in self.hidden],
        )


class GradingSettings(Contract):
    """How trials are graded, by a process that the agent cannot see or outlive."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    command: Argv | None = Field(
        default=None, description="Words that name files of the assets, or beside the experiment, become their paths."
    )
    python: Annotated[str, AfterValidator(entry_point)] | None = None
    function: Function | None = Field(
        default=None, description="A callable, in Python only; in a run's files the digest of its pickle."
    )
    assets: Location | None = Field(default=None, description="What the grader sees and the agent never does.")
    timeout_s: Annotated[Seconds, Field(gt=0)] = 60.0
    memory: Annotated[Bytes, Field(ge=MIN_MEMORY_BYTES)] | None = Limits().memory
    pids: Count | None = Limits().pids
    image: str | None = Field(default=None, description="For docker: another image than the task's.")
    in_: Literal["fresh", "same"] = Field(
        default="fresh",
        validation_alias="in",
        serialization_alias="in",
        description="A new sandbox with the workspace and /out only, or the agent's filesystem.",
    )
    writable: bool = Field(
        default=False, description="Whether the grader may write to its copy of /workspace and /out."
    )
    services: Literal["stop", "keep"] = Field(
        default="stop",
        description="keep: an agent that traces an event of type 'serving' is graded while it runs, over a network "
        "that only it and the grader share.",
    )
    grade_on: Literal["completed", "always"] = Field(
        default="completed", description="Whether the work of an agent that failed or was late is graded too."
    )

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.services == "keep" and self.in_ == "same":
            raise InvalidValue("services: keep needs in: fresh: a grader cannot stand where the agent still runs")
        if self.services == "keep" and self.command is None:
            raise InvalidValue("services: keep needs a command: a function is graded in a sandbox of another kind")
        return self

    @model_validator(mode="after")
    def _one_grader(self) -> Self:
        given = [name for name in GRADERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidValue(
                "exactly one of command and python (or in Python: function) is needed; "
                f"given: {', '.join(given) or 'none'}"
            )
        return self


class Experiment(Contract):
    """Tasks x variants x repeats, and how to run them.

    Raises `InvalidExperiment` with everything that is wrong. Whether the files it names are there is not looked
    at: see `sandbox_exec.experiment.check_files`.
    """

    name: Id
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    tasks: Annotated[tuple[Task, ...], Field(min_length=1)]
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    lanes: Mapping[Id, LaneSettings] = Field(default_factory=dict, description="What providers allow, by lane.")
    design: Design = Field(default_factory=Design)
    sandbox: SandboxSettings = SandboxSettings()
    grading: GradingSettings | None = None
    base: AbsolutePath = Field(
        default_factory=Path.cwd, description="The folder that relative paths start from. No part of what it is."
    )
    sources: tuple[AbsolutePath, ...] = Field(
        default=(), description="The files it was read from. No part of what it is."
    )

    if TYPE_CHECKING:
        # What is accepted is wider than what is held; a type checker knows only the latter from the fields.
        def __init__(
            self,
            *,
            name: str,
            seed: int = ...,
            tasks: Iterable[Task | Mapping[str, Any]],
            variants: Iterable[Variant | Mapping[str, Any]],
            lanes: Mapping[str, LaneSettings | Mapping[str, Any]] = ...,
            design: Design | Mapping[str, Any] = ...,
            sandbox: SandboxSettings | Mapping[str, Any] = ...,
            grading: GradingSettings | Mapping[str, Any] | None = ...,
            base: str | os.PathLike[str] = ...,
            sources: Iterable[str | os.PathLike[str]] = ...,
        ) -> None: ...
    else:

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
                faults = [*self._faults()]
                if faults:
                    raise ValidationError.from_exception_data("Experiment", [fault.as_details() for fault in faults])
            except ValidationError as error:
                # The cause has the paths as data, for who can tell files and lines.
                raise InvalidExperiment(told([str(fault) for fault in faults_of(error)])) from error

    def limits(self, task: Task) -> Limits:
        """The limits of a trial of `task`."""
        return self.sandbox.limits(task, self.base)

    def grading_of(self, task: Task) -> GradingSettings | None:
        """How trials of `task` are graded: its own grading where it has one, the experiment's for the rest."""
        if task.grading is None:
            return self.grading
        own = task.grading.model_dump(exclude_none=True)
        rest = dict(self.grading) if self.grading else {}
        if any(name in own for name in GRADERS):
            rest = {name: value for name, value in rest.items() if name not in GRADERS}
        return GradingSettings.model_validate({**rest, **own})

    def _faults(self) -> Iterator[Fault]:
        needs = [(task.id, task.depends_on) for task in self.tasks]
        yield from id_faults(needs, [variant.id for variant in self.variants])
        slots = len(self.tasks) * len(self.variants) * self.design.repeats
        if slots > MAX_SLOTS:
            yield Fault(("design", "repeats"), f"{slots} trials are too many; allowed: {MAX_SLOTS} in a run")
        for idx, task in enumerate(self.tasks):
            if self.sandbox.kind == "docker" and not (task.image or self.sandbox.image):
                yield Fault(("tasks", idx), "has no image, which docker needs; name one here or in sandbox.image")
            if task.grading and not (task.grading.command or task.grading.python or self.grading):
                yield Fault(("tasks", idx, "grading"), "has no command, and the experiment has no grading")
        yield from self._queue_faults()

    def _queue_faults(self) -> Iterator[Fault]:
        names = list(self.lanes)
        for idx, variant in enumerate(self.variants):
            # Without any limits named, a lane only says who waits together when a provider turns one away.
            if variant.lane is not None and names and variant.lane not in self.lanes:
                text = f"there is no lane {shown(variant.lane)};{_nearest(variant.lane, names)}".rstrip(";")
                yield Fault(("variants", idx, "lane"), text)
            lane = self.lanes.get(variant.lane) if variant.lane is not None else None
            tpm = lane.tpm if lane is not None else None
            if tpm is not None and variant.tokens_per_trial > tpm:
                text = f"{variant.tokens_per_trial} tokens a trial are more than the {tpm:g} a minute of its lane"
                yield Fault(("variants", idx, "tokens_per_trial"), text)
        serial = {task.id: task.protocol.serial for task in self.tasks}
        for idx, task in enumerate(self.tasks):
            late = [name for name in task.depends_on if serial.get(name) != "first"]
            if task.protocol.serial == "first" and late:
                text = f"goes before all others, but needs {shown(late[0])}, which does not"
                yield Fault(("tasks", idx, "protocol", "serial"), text)
            if self.design.order == "adaptive" and (task.depends_on or task.chain or task.protocol.serial):
                text = "the adaptive order chooses freely: no task may have depends_on, chain or protocol.serial"
                yield Fault(("tasks", idx), text)
        if self.design.order == "adaptive" and self.grading is None and not all(task.grading for task in self.tasks):
            yield Fault(("design", "order"), "adaptive needs grading: what it chooses follows from what was solved")


def path_text(loc: Loc) -> str:
    """A path as people write it: tasks[0].protocol.timeout_s."""
    text = ""
    for part in loc:
        plain = isinstance(part, str) and part.isidentifier() and len(part) <= _MAX_SHOWN
        text += f".{part}" if plain else f"[{shown(part)}]"
    return text.removeprefix(".")


def shown(value: object) -> str:
    """A value in a message: on one line, and not too much of it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with too many digits to print, or too deep a list
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


class Fault(NamedTuple):
    """One thing that is wrong with an experiment, and where."""

    loc: Loc
    text: str

    def __str__(self) -> str:
        return f"{path_text(self.loc)}: {self.text}" if self.loc else self.text

    def as_details(self) -> InitErrorDetails:
        # The text goes in as a value: in the template itself, braces of the user's would be places.
        error = PydanticCustomError("contradiction", "{text}", {"text": self.text})
        return InitErrorDetails(type=error, loc=self.loc, input=None)


def id_faults(
    needs: Sequence[tuple[str, Sequence[str]]],
    variant_ids: Sequence[str],
    name_of: Callable[[Loc], str] = path_text,
) -> Iterator[Fault]:
    """Yield each id that stands twice, each dependency on no task, and each circle of dependencies.

    `needs` has the id of each task, and the ids that it depends on; `name_of` tells a person where another is.
    """
    task_ids = [task_id for task_id, _ in needs]
    for kind, ids in (("tasks", task_ids), ("variants", variant_ids)):
        first: dict[str, int] = {}
        for idx, one in enumerate(ids):
            if first.setdefault(one, idx) != idx:
                where = name_of((kind, first[one]))
                yield Fault((kind, idx, "id"), f"{shown(one)} is already the id of {where}")
    place = {task_id: idx for idx, task_id in enumerate(task_ids)}
    for idx, (_, depends_on) in enumerate(needs):
        for at, needed in enumerate(depends_on):
            if needed not in place:
                loc = ("tasks", idx, "depends_on", at)
                yield Fault(loc, f"there is no task {shown(needed)};{_nearest(needed, task_ids)}".rstrip(";"))
    for circle in _circles(dict(needs)):
        names = [shown(name) for name in circle]
        if len(names) > 20:
            names[10:-10] = ["..."]
        text = f"depends on itself: {' -> '.join([*names, names[0]])}"
        yield Fault(("tasks", place[circle[0]], "depends_on"), text)


def _circles(needs: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    # Depth first without recursion. `way` is the path from the root to where we are: a dict, for its order.
    done: set[str] = set()
    for root in needs:
        way = {} if root in done else {root: iter(needs[root])}
        while way:
            current = next(reversed(way))
            for needed in way[current]:
                if needed in way and needed != current:  # a task on itself alone is refused by its own contract
                    names = list(way)
                    yield names[names.index(needed) :]
                elif needed in needs and needed not in done and needed != current:
                    way[needed] = iter(needs[needed])
                    break
            else:
                done.add(current)
                del way[current]


def faults_of(error: ValidationError, within: Loc = ()) -> list[Fault]:
    """What pydantic found in an experiment, in words for people: what stood there, and what is allowed.

    `within`: where in an experiment that stood, if it was a part of one.
    """
    faults = []
    for detail in error.errors(include_url=False):
        loc, kind, value = _json_path((*within, *detail["loc"])), detail["type"], detail["input"]
        match kind:
            case "value_error":
                text = detail["msg"].removeprefix("Value error, ")
            case "contradiction":
                text = detail["msg"]
            case "missing":
                text = "is missing"
            case "extra_forbidden":
                names = _known_names(loc[:-1])
                near = _nearest(str(loc[-1]), names)
                text = f"unknown field;{near} allowed: {', '.join(names)}"
            case "too_short" if value:
                continue  # its items are told one by one
            case "tuple_type":
                text = f"should be a list; found {_found(loc, value)}"
            case "model_type" | "dict_type" | "mapping_type":
                text = f"should be a mapping; found {_found(loc, value)}"
            case "path_type":
                text = f"should be a path; found {_found(loc, value)}"
            case "string_type" if isinstance(value, bool | int | float):
                text = f"should be text; found {_found(loc, value)}: put it in quotes"
            case "recursion_depth_exceeded" | "recursion_loop":
                text = "nested too deeply"
            case _:
                text = f"{detail['msg']}; found {_found(loc, value)}"
        faults.append(Fault(loc, text))
    return faults


def told(problems: Sequence[str]) -> str:
    """One message of many problems, one a line. Of very many, the first."""
    lines = [f"  {problem}" for problem in problems[:_MAX_TOLD]]
    if len(problems) > _MAX_TOLD:
        lines.append(f"  ... and {len(problems) - _MAX_TOLD} more")
    return "\n".join([f"{len(problems)} problem{'s' * (len(problems) != 1)} in the experiment:", *lines])


def _found(loc: Loc, value: object) -> str:
    # Someone who writes a secret into the wrong form should not find it in a log.
    if loc[:1] == ("variants",) and loc[2:3] in (("env",), ("pass_env",)):
        return f"a value of type {type(value).__name__}"
    return shown(value)


def _json_path(loc: Loc) -> Loc:
    # Inside any JSON, pydantic names the type before each key: ("tasks", 0, "input", "list", 3, "float").
    if loc[:1] == ("tasks",) and loc[2:3] == ("input",):
        return loc[:3] + loc[4::2]
    return loc


def _known_names(loc: Loc) -> list[str]:
    model: type[Contract] = Experiment
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            model = _contract_in(model.model_fields[part].annotation) or model
    fields = model.model_fields.items()
    return [str(field.validation_alias or name) for name, field in fields if name not in _FOR_PYTHON]


def _contract_in(annotation: Any) -> type[Contract] | None:
    if isinstance(annotation, type) and issubclass(annotation, Contract):
        return annotation
    found = (_contract_in(inner) for inner in get_args(annotation))
    return next((model for model in found if model is not None), None)


def _nearest(name: str, known: Sequence[str]) -> str:
    if len(known) > _MAX_NEAREST:
        return ""
    names = [one for one in known if len(one) <= _MAX_SHOWN]
    near = difflib.get_close_matches(name[:_MAX_SHOWN], names, 1)
    return f" did you mean {shown(near[0])}?" if near else ""


def _placed(path: Path, base: Path) -> Path:
    return path if str(path).startswith("~") else base / path
