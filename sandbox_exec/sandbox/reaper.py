"""Takes away what a killed worker left: containers, their scratch folders, and the mounts in those.

Each has the name of its owner, in a label or in its own name, and each container the time at which nobody can want it
any more. What belongs to a living process is never touched. An owner of another boot or pid namespace cannot be told
from a living one: what is its goes when it does not run, or when its time has passed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sandbox_exec.sandbox import engine, owners
from sandbox_exec.sandbox.docker import LABEL, SCRATCH, remove_folder

_RUNNING: Final = ("running", "paused", "restarting")
_FOLDER_S: Final = 7 * 86400.0  # after which a folder of an owner of whom nothing is known is nobody's


@dataclass
class Reaped:
    """What was taken away, and what could not be."""

    containers: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # of living owners, or of owners of whom nothing is known
    failed: list[str] = field(default_factory=list)


def reap_owner(client: Any, owner: str) -> Reaped:
    """Take away all of one owner, which has ended."""
    return _reap(client, lambda name: name == owner, by_owner=owner)


def reap(client: Any | None, *, everything: bool = False) -> Reaped:
    """Take away all whose owner is dead, or whose time has passed.

    `everything`: also what belongs to owners of whom nothing is known. Without a client: folders and mounts only.
    """
    return _reap(client, lambda name: _is_dead(name, everything))


def _is_dead(name: str, everything: bool) -> bool:
    state = owners.state_of(name)
    return state == "dead" or (everything and state == "unknown")


def _reap(client: Any | None, is_dead: Callable[[str], bool], by_owner: str = "") -> Reaped:
    reaped = Reaped()
    if client is not None:
        wanted = f"{LABEL}owner={by_owner}" if by_owner else f"{LABEL}owner"
        for found in client.containers(all=True, filters={"label": wanted}):
            _reap_container(client, found, is_dead, reaped)
    prefix = f"{SCRATCH}{by_owner}"
    with os.scandir(tempfile.gettempdir()) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(prefix)]
    for name in names:
        folder = Path(tempfile.gettempdir(), name)
        owner = name.removeprefix(SCRATCH).rpartition("-")[0]
        if not is_dead(owner) and not (owners.state_of(owner) == "unknown" and _age_s(folder) > _FOLDER_S):
            if not by_owner:
                reaped.kept.append(str(folder))
            continue
        remove_folder(folder)
        (reaped.failed if folder.exists() else reaped.folders).append(str(folder))
    return reaped


def _reap_container(client: Any, found: dict[str, Any], is_dead: Callable[[str], bool], reaped: Reaped) -> None:
    labels, name = found["Labels"], (found.get("Names") or [found["Id"][:12]])[0].lstrip("/")
    owner = labels[f"{LABEL}owner"]
    if not is_dead(owner):
        unknown = owners.state_of(owner) == "unknown"
        if not unknown or (found["State"] in _RUNNING and not _is_over(labels)):
            reaped.kept.append(name)
            return
    try:
        client.remove_container(found["Id"], v=True, force=True)
    except engine.EngineErrors as error:
        if not engine.is_missing(error):
            reaped.failed.append(f"{name}: {engine.explain(error)}")
            return
    reaped.containers.append(name)


def _is_over(labels: dict[str, str]) -> bool:
    with contextlib.suppress(KeyError, ValueError):
        return float(labels[f"{LABEL}deadline"]) < time.time()
    return False


def _age_s(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - folder.stat().st_mtime
    return 0.0
