"""What was in order the last time, and need not be looked at again."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from sandbox_exec.experiment import json_digest
from sandbox_exec.preflight.findings import Found, has_error
from sandbox_exec.store import write_atomic

RECIPE: Final = 2  # raised when the same inputs are to be looked at again
KEPT_S: Final = 7 * 86400.0  # what a grader needs of the machine is not in the digest: it may be gone next month


def cache_folder() -> Path:
    """Where the user's caches are, and below it ours."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return home / "sandbox-exec" / "preflight"


class Kept(NamedTuple):
    """What was found of an image or a trial, none of it an error."""

    found: tuple[Found, ...]
    tools: dict[str, str]  # where an image has what smoke needs


_KEPT: Final = TypeAdapter(Kept)


class Cache:
    """A file for each that was in order, by the digest of what went in. One that cannot be read was never there."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.hits = 0

    def get(self, inputs: dict[str, Any]) -> Kept | None:
        if self._folder is None:
            return None
        file = self._folder / _name(inputs)
        try:
            if time.time() - file.stat().st_mtime > KEPT_S:
                return None
            kept = _KEPT.validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None
        self.hits += 1
        return kept

    def put(self, inputs: dict[str, Any], kept: Kept) -> None:
        if self._folder is None or has_error(kept.found):
            return
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for old in self._folder.glob("*.json"):
                if time.time() - old.stat().st_mtime > KEPT_S:
                    old.unlink()
            write_atomic(self._folder / _name(inputs), _KEPT.dump_json(kept))


def _name(inputs: dict[str, Any]) -> str:
    return f"{json_digest([RECIPE, _version(), inputs]).removeprefix('sha256:')}.json"


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("sandbox-exec")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a folder
