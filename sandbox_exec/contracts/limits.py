"""What a trial may use and see, and how strongly that must be held."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sandbox_exec.contracts.base import Bytes, Contract, Seconds
from sandbox_exec.errors import InvalidValue
from sandbox_exec.units import MIB, format_bytes

MIN_MEMORY_BYTES: Final = 4 * MIB  # no interpreter starts in less: the trial would die of our limit, not its own
MIN_DISK_BYTES: Final = MIB  # a tmpfs of size 0 has no limit at all
MIN_FILES: Final = 16  # likewise for inodes; and the folders of the sandbox are files too
MIN_OPEN_FILES: Final = 16  # the pipes of the sandbox and what an interpreter opens to start


class Rung(StrEnum):
    """The ways to hold every process of a sandbox, strongest first. Compare with `at_least`, not with `<`."""

    ROOT_NAMESPACES = "root-namespaces"
    USER_NAMESPACES = "user-namespaces"
    CGROUP = "cgroup"
    SUBREAPER = "subreaper"
    PROCESS_GROUP = "process-group"

    def at_least(self, other: Rung) -> bool:
        """Whether this rung is as strong as `other` or stronger."""
        order = list(Rung)
        return order.index(self) <= order.index(other)

    @property
    def namespaced(self) -> bool:
        """Whether the sandbox has a pid namespace of its own: nothing in it survives a kill."""
        return self.at_least(Rung.USER_NAMESPACES)


Require = Literal["namespaces+cgroup", "namespaces", "cgroup", "subreaper", "process-group"]
"""The least containment to accept, strongest first: both of the next two; namespaces of its own; ceilings
that the kernel enforces; the subreaper or better; anything."""


def _absolute(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise InvalidValue(f"{value!r} is not a path")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidValue(f"{text!r} is not a path: it is text, not empty, and without NUL")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise InvalidValue(f"{text!r} names a home that is not known; write './{text}' for a file of that name")
    # Links stay as they are: the path is what the agent sees, not what it leads to.
    return os.path.abspath(expanded)


def _at_least(least: int, why: str) -> AfterValidator:
    def check(size: int) -> int:
        if size < least:
            raise InvalidValue(f"{format_bytes(size)} is too little: at least {format_bytes(least)}, {why}")
        return size

    return AfterValidator(check)


def _several(value: Any) -> Any:
    if isinstance(value, str | bytes | os.PathLike):
        raise InvalidValue(f"{value!r} is one path; give a list of paths")
    return value


AbsolutePath = Annotated[Path, BeforeValidator(_absolute, json_schema_input_type=str)]
Paths = Annotated[tuple[AbsolutePath, ...], BeforeValidator(_several, json_schema_input_type=list[str])]
Count = Annotated[int, Field(strict=True, ge=1)]


class Limits(Contract):
    """What one trial may use and see. The defaults suit a small agent without network.

    A limit is held as strongly as the machine's containment can: `Outcome.isolation` says how it was.
    """

    timeout_s: Annotated[Seconds, Field(gt=0)] | None = Field(
        default=60.0,
        description="Wall time until the trial is ended; frozen time does not count. None: no deadline.",
    )
    grace_s: Seconds = Field(
        default=0.5,
        description="Time between SIGTERM and the kill at the deadline, for a decent agent to flush.",
    )
    memory: Annotated[Bytes, _at_least(MIN_MEMORY_BYTES, "or no interpreter starts")] | None = Field(
        default=512 * MIB, description="Memory of all the trial's processes together. None: no ceiling."
    )
    pids: Count | None = Field(
        default=128,
        description="Processes and threads of the trial that may exist at once. None: no ceiling.",
    )
    cpus: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        default=None,
        description="Share of the processors, 1.5 being one and a half. None: as many as there are.",
    )
    disk: Annotated[Bytes, _at_least(MIN_DISK_BYTES, "as the sandbox itself needs some")] = Field(
        default=256 * MIB, description="What may be written to /tmp, /workspace and /out, in total."
    )
    files: Annotated[int, Field(strict=True, ge=MIN_FILES)] = Field(
        default=100_000, description="Files and folders that may exist in the places that `disk` counts."
    )
    file_size: Bytes | None = Field(default=None, description="Size of any one file. None: as large as `disk` allows.")
    open_files: Annotated[int, Field(strict=True, ge=MIN_OPEN_FILES)] = Field(
        default=1024, description="Descriptors that one process may have open."
    )
    address_space: Annotated[Bytes, _at_least(MIN_MEMORY_BYTES, "or no interpreter starts")] | None = Field(
        default=None,
        description="RLIMIT_AS of each process. Off unless asked for: it counts what is reserved rather than "
        "used (a few threads exhaust it), each process has its own, and shared memory escapes it. "
        "`memory` is the ceiling.",
    )
    stdout: Bytes = Field(default=MIB, description="How much of stdout is kept: its tail.")
    stderr: Bytes = Field(default=MIB, description="How much of stderr is kept: its tail.")
    trace: Bytes = Field(default=64 * MIB, description="How much of the trace is kept; later events are counted.")
    result: Bytes = Field(default=16 * MIB, description="How large the value or result that comes back may be.")
    output_ceiling: Bytes | None = Field(
        default=None,
        description="Total of stdout, stderr and trace at which the trial is ended as output_exceeded. "
        "None: it goes on, and what is not kept is dropped and counted.",
    )
    network: Literal["none", "host"] = Field(default="none", description="No network at all, or the caller's own.")
    require: Require | None = Field(
        default=None,
        description="The least containment to accept; a machine that gives less refuses to run. "
        "'namespaces': pid, mount, ipc and net namespaces of its own. "
        "'cgroup': ceilings that the kernel enforces. None: the best that the machine gives.",
    )
    readable: Paths = Field(
        default=(),
        description="Paths that the agent may read beside the system and its interpreter. '~' is the home.",
    )
    hidden: Paths = Field(default=(), description="Paths that the agent must not see. '~' is the home.")

    if TYPE_CHECKING:
        # What is accepted is wider than what is held; a type checker knows only the latter from the fields.
        def __init__(
            self,
            *,
            timeout_s: float | str | None = ...,
            grace_s: float | str = ...,
            memory: int | str | None = ...,
            pids: int | None = ...,
            cpus: float | None = ...,
            disk: int | str = ...,
            files: int = ...,
            file_size: int | str | None = ...,
            open_files: int = ...,
            address_space: int | str | None = ...,
            stdout: int | str = ...,
            stderr: int | str = ...,
            trace: int | str = ...,
            result: int | str = ...,
            output_ceiling: int | str | None = ...,
            network: Literal["none", "host"] = ...,
            require: Require | None = ...,
            readable: Iterable[str | os.PathLike[str]] = ...,
            hidden: Iterable[str | os.PathLike[str]] = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        both = sorted(str(path) for path in set(self.readable) & set(self.hidden))
        if both:
            raise InvalidValue(f"both readable and hidden: {', '.join(both)}; name each path in one of them")
        return self
