"""The rest of the design's words as types: tasks, variants, slots, grades, and the messages about trials.

No behaviour but validation, and the two derivations that make a run repeatable: `derive_trial_id` and
`derive_seed`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from sandbox_exec.contracts.base import Bytes, Contract, Seconds
from sandbox_exec.contracts.limits import Limits
from sandbox_exec.contracts.outcome import AgentError, Dropped, Isolation, KillReport, Usage
from sandbox_exec.contracts.queue import ItemParameters, Priority
from sandbox_exec.contracts.status import Judged
from sandbox_exec.errors import InvalidValue
from sandbox_exec.units import MIB

RESERVED_ENV_PREFIX: Final = "SANDBOX_EXEC_"  # names by which a sandbox tells the agent where things are

_SLUG_CHARS: Final = 40  # of each name: what a person recognises, well within a folder name's 255 bytes
_ID_HASH_CHARS: Final = 12  # 48 bits: tells apart slots whose slugs are the same
_MAX_JSON_DEPTH: Final = 100  # JSON parsers give up between 200 and 1000, and messages wrap the value in more
_MAX_JSON_INT: Final = 10**300  # parsers refuse numbers of thousands of digits, and a float ends at 308
_FUNCTION_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class Phase(StrEnum):
    """What a trial goes through, in order."""

    STAGE = "stage"
    AGENT = "agent"
    GRADE = "grade"
    COLLECT = "collect"
    TEARDOWN = "teardown"


def _env_name(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise InvalidValue(f"{name!r} is not a name of an environment variable: not empty, without '=' and NUL")
    if name.startswith(RESERVED_ENV_PREFIX):
        raise InvalidValue(f"{name!r} is reserved: the sandbox sets the names that begin with {RESERVED_ENV_PREFIX}")
    return name


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise InvalidValue(f"{text!r} holds a NUL, which no argument or variable can")
    return text


def entry_point(text: str) -> str:
    module, _, function = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        raise InvalidValue(
            f'{text!r} does not name a function; allowed: "module:function", such as "agents.solve:main"'
        )
    return text


def _portable(value: JsonValue) -> JsonValue:
    # Parsers let all of this through, but what stores or reads the value later fails on it.
    level: list[JsonValue] = [value]
    for _ in range(_MAX_JSON_DEPTH + 1):
        below: list[JsonValue] = []
        for item in level:
            if isinstance(item, str):
                _encodable(item)
            elif isinstance(item, dict):
                for name in item:
                    _encodable(name)
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, float) and not math.isfinite(item):
                raise InvalidValue(f"{item} is not JSON: numbers are finite")
            elif isinstance(item, int) and abs(item) >= _MAX_JSON_INT:
                raise InvalidValue("a number has too many digits: at most 300; write it as text")
        if not below:
            return value
        level = below
    raise InvalidValue(f"nested too deeply: at most {_MAX_JSON_DEPTH} lists and objects in each other")


def _encodable(text: str) -> str:
    # JSON can spell half of a surrogate pair (backslash, ud800), which no encoding can write.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidValue(f"{text[:40]!r} holds half of a surrogate pair, which is no character") from None
    return text


def _location(value: object) -> object:
    if isinstance(value, str) and (not value or "\0" in value):
        raise InvalidValue(f"{value!r} is not a path: it is text, not empty, and without NUL")
    return _encodable(value) if isinstance(value, str) else value


def _function(value: object) -> object:
    if callable(value) or (isinstance(value, str) and _FUNCTION_DIGEST.fullmatch(value)):
        return value
    raise InvalidValue(f"{value!r} is not a callable, nor the digest of a pickled one")


def _function_as_json(value: object) -> str:
    if isinstance(value, str):
        return value
    raise InvalidValue(f"{value!r} is a callable, which JSON cannot hold: use freeze_functions() first")


Json = Annotated[JsonValue, AfterValidator(_portable)]
Location = Annotated[Path, BeforeValidator(_location, json_schema_input_type=str)]
Function = Annotated[
    Callable[..., Any] | str,
    PlainValidator(_function, json_schema_input_type=str),
    PlainSerializer(_function_as_json, return_type=str, when_used="json"),
]
Id = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, AfterValidator(_without_nul)]
EnvName = Annotated[str, AfterValidator(_env_name)]
Argv = Annotated[tuple[Text, ...], Field(min_length=1)]
Ordinal = Annotated[int, Field(strict=True, ge=0)]
TimeoutAction = Literal["skip", "retry", "extend"]


class TaskProtocol(Contract):
    """How a task is to be run."""

    timeout_s: Annotated[Seconds, Field(gt=0)] | None = Field(
        default=None, description="Time that the agent has. None: what the sandbox's settings give."
    )
    timeout_action: TimeoutAction = Field(
        default="skip", description="After a timeout: leave it, try again, or double the time and try again."
    )
    max_retries: Ordinal = Field(default=0, description="Further attempts after a failed one.")
    priority: Priority = Field(
        default=0, description="Higher goes first, with order: priority. Or a level: low, normal, high, critical."
    )
    deadline_s: Annotated[Seconds, Field(gt=0)] | None = Field(
        default=None,
        description="With order: priority. Seconds after its submission by which it should begin: shortly before "
        "that it goes before all others.",
    )
    serial: Literal["first", "global"] | None = Field(
        default=None,
        description="first: one by one, before all others. global: with nothing else in flight.",
    )
    tags: tuple[str, ...] = ()


class TaskGrading(Contract):
    """How a task is graded, where that differs from the experiment's grading."""

    assets: Location | None = Field(default=None, description="What the grader sees and the agent never does.")
    command: Argv | None = None
    python: Annotated[str, AfterValidator(entry_point)] | None = None

    @model_validator(mode="after")
    def _one_grader(self) -> Self:
        if self.command is not None and self.python is not None:
            raise InvalidValue("both command and python are given; a task has one grader")
        return self


class Task(Contract):
    """One row of a dataset."""

    id: Id
    input: Json = Field(description="What the agent is given.")
    image: str | None = None
    workspace: Location | None = Field(default=None, description="What the working directory is filled from.")
    grading: TaskGrading | None = None
    reference: Location | None = Field(
        default=None,
        description="A folder with what a perfect agent leaves, in workspace/ and out/: preflight must see it pass.",
    )
    protocol: TaskProtocol = TaskProtocol()
    depends_on: tuple[Id, ...] = Field(default=(), description="Tasks that must have succeeded first.")
    chain: Id | None = Field(default=None, description="Tasks of one chain run one at a time, in order.")
    item: ItemParameters | None = Field(default=None, description="How hard it is, for order: adaptive.")

    @model_validator(mode="after")
    def _not_on_itself(self) -> Self:
        if self.id in self.depends_on:
            raise InvalidValue(f"task {self.id!r} depends on itself")
        return self


class AgentSpec(Contract):
    """Where an agent comes from: exactly one of a command, a frozen artifact, or a Python function.

    `function` is for experiments made in Python. JSON cannot hold it: `freeze_functions` puts the digest of its
    pickle there, and the pickle is kept beside.
    """

    command: Argv | None = None
    artifact: Location | None = None
    python: Annotated[str, AfterValidator(entry_point)] | None = None
    function: Function | None = Field(
        default=None, description="A callable, in Python only; in a run's files the digest of its pickle."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidValue(
                "exactly one of command, artifact and python (or in Python: function) is needed; "
                f"given: {', '.join(given) or 'none'}"
            )
        return self


class Variant(Contract):
    """One agent configuration under test."""

    id: Id
    agent: AgentSpec
    env: Mapping[EnvName, Text] = Field(default_factory=dict, description="Variables that the agent gets.")
    pass_env: tuple[EnvName, ...] = Field(
        default=(),
        description="Variables taken from the caller's environment; their values are never stored.",
    )
    max_parallel_trials: Annotated[int, Field(strict=True, ge=1)] | None = None
    lane: Id | None = Field(default=None, description="The rate scope of the provider that the agent uses.")
    tokens_per_trial: Ordinal = Field(
        default=0, description="An estimate of the tokens that a trial uses; what trials report corrects it."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        both = sorted(set(self.env) & set(self.pass_env))
        if both:
            raise InvalidValue(f"both in env and in pass_env: {', '.join(both)}; name each variable in one of them")
        return self


class Cell(NamedTuple):
    """What a slot is for. Its trial's name follows from this alone."""

    variant_id: str
    task_id: str
    repeat: int


class Slot(Contract):
    """One cell of the schedule. `schedule_idx` is its place in the order of commits, not its identity."""

    schedule_idx: Ordinal
    variant_id: Id
    task_id: Id
    repeat: Ordinal


def derive_trial_id(slot: Slot) -> str:
    """Return the name of the slot's trial: of variant, task and repeat alone, and safe as a folder name.

    It does not depend on `schedule_idx`, so reordering a schedule keeps its trials' names.
    """
    return _trial_id(slot.variant_id, slot.task_id, slot.repeat)


@functools.lru_cache(maxsize=1024)  # every message about a trial checks it, all within a short time
def _trial_id(variant_id: str, task_id: str, repeat: int) -> str:
    identity = json.dumps([variant_id, task_id, repeat])
    digest = hashlib.sha256(identity.encode("ascii")).hexdigest()[:_ID_HASH_CHARS]
    return f"{_slug(variant_id)}.{_slug(task_id)}.{repeat}-{digest}"


def derive_seed(seed: int, trial_id: str) -> int:
    """Return a trial's seed, from the experiment's. It has 32 bits, the most that every generator takes."""
    digest = hashlib.sha256(json.dumps([seed, trial_id]).encode("ascii")).digest()
    return int.from_bytes(digest[:4], "big")


@functools.lru_cache(maxsize=1024)  # a schedule has few variants, and the slots of a task stand together
def _slug(name: str) -> str:
    # A leading dot or hyphen would make a hidden folder, or an option of a command.
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:_SLUG_CHARS] or "_"


class Grade(Contract):
    """What a grader wrote. Hostile until it has passed through here: it read what the agent left."""

    score: Annotated[float, Field(strict=True)]
    passed: Annotated[bool, Field(strict=True)] | None = None
    metrics: Mapping[str, Annotated[float, Field(strict=True)]] = Field(default_factory=dict)
    details: Json = None


class ContainerSpec(Contract):
    """The container that a trial runs in, where it runs in one."""

    image: str = Field(description="As the experiment names it.")
    image_id: str | None = Field(default=None, description="What that was at the start of the run: sha256:...")
    user: str | None = Field(
        default=None, description="uid, uid:gid, or a name of the image's. None: an unprivileged one."
    )
    network: str = "none"
    read_only: bool = Field(default=False, description="Whether only /tmp, /workspace and /out can be written.")
    runtime: str | None = Field(default=None, description="Of the engine's, such as runsc. None: its default.")


class GraderSpec(Contract):
    """The grader of a trial, resolved. Nothing of it is in any place that an agent can read."""

    command: Argv | None = None
    python: str | None = None
    payload: Path | None = Field(default=None, description="The pickled function of a grader that is one.")
    assets: Path | None = None
    limits: Limits
    in_: Literal["fresh", "same"] = "fresh"
    writable: bool = False
    services: Literal["stop", "keep"] = "stop"
    grade_on: Literal["completed", "always"] = "completed"
    container: ContainerSpec | None = Field(default=None, description="None: the process sandbox.")
    digest: str = Field(default="", description="Of the grader and its assets: two grades of one digest are alike.")


class Answer(Contract):
    """What there is to grade without an agent phase, and what a grader is told of who left it."""

    archive: Path
    agent: Mapping[str, Json] = Field(default_factory=dict)


class _OfTrial(Contract):
    # What each message about a trial begins with.
    slot: Slot
    trial_id: str
    attempt: Annotated[int, Field(strict=True, ge=1)]

    @model_validator(mode="after")
    def _derived(self) -> Self:
        due = derive_trial_id(self.slot)
        if self.trial_id != due:
            raise InvalidValue(f"trial_id is {self.trial_id!r}, but this slot's trial is {due!r}")
        return self


class TrialDispatch(_OfTrial):
    """The message to a worker: all that it needs to run one attempt, and nothing secret."""

    seed: Ordinal
    task: Task
    variant: Variant
    limits: Limits
    base: Path = Field(description="The experiment's folder, which relative paths start from.")
    payload: Path | None = Field(default=None, description="The pickled function of an agent that is one.")
    artifact: Path | None = Field(default=None, description="The unpacked files of an agent that is an artifact.")
    entrypoint: str | None = Field(default=None, description="Which of them is run.")
    out_limit: Bytes = Field(default=64 * MIB, description="How much of /out is kept.")
    run_id: str = ""
    container: ContainerSpec | None = Field(default=None, description="None: the process sandbox.")
    grader: GraderSpec | None = None
    answer: Answer | None = Field(default=None, description="What was left to grade: then there is no agent phase.")

    @model_validator(mode="after")
    def _of_its_slot(self) -> Self:
        if (self.variant.id, self.task.id) != (self.slot.variant_id, self.slot.task_id):
            raise InvalidValue(
                f"the slot is for variant {self.slot.variant_id!r} and task {self.slot.task_id!r}, "
                f"but the dispatch holds {self.variant.id!r} and {self.task.id!r}"
            )
        return self


class ProviderUse(Contract):
    """What the agent says that it had of its provider. It may lie: so each number is bounded."""

    tokens: Ordinal | None = Field(default=None, description="None: it did not say.")
    requests: Ordinal | None = None
    turned_away: Ordinal = Field(default=0, description="How often the provider did so.")


class GradingReport(Contract):
    """How the grading phase went. The verdict is in `grade` and nowhere else."""

    ok: bool = Field(description="Whether there is a grade.")
    error: AgentError | None = Field(default=None, description="Why there is none.")
    exit_code: int | None = None
    signal: int | None = None
    usage: Usage | None = None
    kill: KillReport | None = None
    isolation: Isolation | None = None
    grader_digest: str = ""


class TrialCompletion(_OfTrial, Judged):
    """The message from a worker: how one attempt ended. Written to the attempt's folder before it is sent."""

    phase: Phase = Field(description="The last phase that was entered before the trial's end was decided.")
    result_sha256: str | None = Field(default=None, description="Digest of result.json, if there is one.")
    error: AgentError | None = None
    exit_code: int | None = None
    signal: int | None = None
    grade: Grade | None = None
    grade_sha256: str | None = Field(default=None, description="Digest of grade.json, if there is one.")
    grading: GradingReport | None = Field(default=None, description="None: it was not graded.")
    retry_after_s: Seconds | None = Field(default=None, description="When a provider allows the next attempt.")
    provider: ProviderUse | None = Field(default=None, description="None: the agent traced nothing about one.")
    dropped: Dropped = Dropped()
    usage: Usage | None = Field(default=None, description="None: the agent was never started, or its worker is lost.")
    kill: KillReport | None = None
    isolation: Isolation | None = None
    image_id: str | None = Field(default=None, description="Of the image that it ran in.")
    steps_s: Mapping[str, float] = Field(default_factory=dict, description="How long each step took, in seconds.")


class ActiveTrial(_OfTrial):
    """An attempt that was dispatched and not committed; a backend finds its worker again by it."""

    folder: Path = Field(description="The attempt's folder.")
    worker: str = Field(description="The backend's own name of the worker; no later worker may have it.")
