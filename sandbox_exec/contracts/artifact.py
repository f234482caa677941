"""The manifest of a frozen artifact: what an archive holds, and so what it may not hold.

Everything that unpacking relies on is checked here: names, order, modes, sizes. What has passed can be written below
a folder of its own without another look at its names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sandbox_exec.contracts.base import Contract
from sandbox_exec.errors import InvalidValue
from sandbox_exec.units import GIB, format_bytes

# Far above any agent that was seen, and far below what hurts a machine. The last two are the file systems' own.
MAX_UNPACKED_BYTES: Final = 4 * GIB
MAX_ENTRIES: Final = 100_000  # files, and the folders that they are in
MAX_DEPTH: Final = 32
MAX_PATH_BYTES: Final = 1024  # PATH_MAX is 4096, and the folder that it is below takes some of it
MAX_NAME_BYTES: Final = 255

_SHOWN_CHARS: Final = 80
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def path_fault(path: str) -> str:
    """Return why a path cannot be in an artifact; empty if it can."""
    parts = path.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if path.startswith("/"):
        return "it is an absolute path"
    if _CONTROL.search(path):
        return "its name holds a control character"
    if not {"", ".", ".."}.isdisjoint(parts):
        return "its path holds an empty part, '.' or '..'"
    if max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(parts) > MAX_PATH_BYTES:
        return f"its path is too long: at most {MAX_NAME_BYTES} bytes a name, and {MAX_PATH_BYTES} in all"
    if len(parts) > MAX_DEPTH:
        return f"it is nested too deeply: at most {MAX_DEPTH} names in a path"
    return ""


def shown_path(path: str) -> str:
    """For a message: without anything that a terminal would obey, and not too long."""
    text = ascii(path)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _path(path: str) -> str:
    if fault := path_fault(path):
        raise InvalidValue(f"{shown_path(path)}: {fault}")
    return path


def _name(text: str) -> str:
    if _CONTROL.search(text) or not text.isprintable():
        raise InvalidValue(f"{shown_path(text)} is not a name: it holds what cannot be printed")
    return text


Mode = Literal["0644", "0755"]
ArtifactPath = Annotated[str, Field(strict=True), AfterValidator(_path)]


class ArtifactFile(Contract):
    """One file of an artifact."""

    path: ArtifactPath = Field(description="Below the artifact's folder; parts are separated by '/'.")
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(strict=True, ge=0, le=MAX_UNPACKED_BYTES)]
    mode: Mode

    @property
    def is_executable(self) -> bool:
        return self.mode == "0755"


class Manifest(Contract):
    """What a frozen artifact is. With the contents of the files it determines every byte of the tar archive."""

    schema_version: Literal["agent_artifact_v1"] = "agent_artifact_v1"
    id: Annotated[str, Field(strict=True, min_length=1, max_length=256), AfterValidator(_name)]
    entrypoint: ArtifactPath = Field(description="The file that is run; one of `files`, and executable.")
    platform: Annotated[str, Field(pattern=r"^(any|[a-z0-9]+/[a-z0-9_-]+)$", max_length=64)] = Field(
        description='What its programs are for, such as "linux/amd64"; "any" where they are scripts.'
    )
    files: Annotated[tuple[ArtifactFile, ...], Field(min_length=1, max_length=MAX_ENTRIES)] = Field(
        description="Sorted by path."
    )
    frozen_at: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")] | None = Field(
        default=None, description="SOURCE_DATE_EPOCH, or the time of `source_commit`; never that of freezing."
    )
    source_commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")] | None = Field(
        default=None, description="Of the clean git checkout that the files are from."
    )

    @property
    def folders(self) -> set[str]:
        """The folders that the files are in, without the top."""
        return {file.path[:end] for file in self.files for end in _slashes(file.path)}

    @model_validator(mode="after")
    def _can_be_unpacked(self) -> Self:
        for fault in self._faults():
            raise InvalidValue(fault)
        return self

    def _faults(self) -> Iterator[str]:
        paths = [file.path for file in self.files]
        for before, after in itertools.pairwise(paths):
            if before == after:
                yield f"files: {shown_path(after)} is there twice"
            elif before > after:
                yield f"files: not sorted by path: {shown_path(before)} before {shown_path(after)}"
        folders = self.folders
        for path in paths:
            if path in folders:
                yield f"files: {shown_path(path)} is a file, and a folder of another one"
        if len(paths) + len(folders) > MAX_ENTRIES:
            yield f"files: {len(paths)} files in {len(folders)} folders; at most {MAX_ENTRIES} in all"
        total = sum(file.size for file in self.files)
        if total > MAX_UNPACKED_BYTES:
            yield f"files: {format_bytes(total)} in all; at most {format_bytes(MAX_UNPACKED_BYTES)}"
        entry = next((file for file in self.files if file.path == self.entrypoint), None)
        if entry is None:
            yield f"entrypoint: {shown_path(self.entrypoint)} is not among the files"
        elif not entry.is_executable:
            yield f"entrypoint: {shown_path(self.entrypoint)} is not executable"


def _slashes(path: str) -> Iterator[int]:
    return (at for at, char in enumerate(path) if char == "/")
