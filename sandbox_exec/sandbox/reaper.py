"""Takes away what a killed process left: containers, scratch folders, and the mounts in those.

Each has the name of its owner, in a label or in its own name, and each container the time at which nobody can want it
any more. What belongs to a living process is never touched. An owner of another boot or pid namespace cannot be told
from a living one: a container of its goes when it does not run, or when its time has passed and it is not paused; a
folder when nobody has touched it for a week.

Limits. Folders are looked for where temporary files are (`TMPDIR`); elsewhere only those that are mounted are found.
What is another user's stays. A container of another pid namespace that was paused and goes on has the time that it was
made with: a sweep from here takes it then, though its owner may live.

The engine's SDK takes half a second to load, and is loaded only by who has a client.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from sandbox_exec.contracts import Contract
from sandbox_exec.guest import kernel
from sandbox_exec.guest.view import remove_scratch
from sandbox_exec.sandbox import owners

LABEL: Final = "sandbox-exec."  # what the labels of our containers begin with: run, trial, attempt, owner, deadline
_ENDED: Final = ("exited", "dead", "removing")  # and so not `created`, which is the instant before it is started
_FOLDER_S: Final = 7 * 86400.0  # after which a folder of an owner of whom nothing is known is nobody's
_UNKNOWN: Final = "its owner is of another boot, pid namespace or machine, and may live: --all takes it too"


class Left(Contract):
    """Something that is still there, and why."""

    name: str
    why: str


class Reaped(Contract):
    """What was taken away, and what was not."""

    containers: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    kept: tuple[Left, ...] = Field(default=(), description="Of living owners, or of owners who may live.")
    failed: tuple[Left, ...] = Field(default=(), description="Nobody's, and yet it could not be taken away.")
    no_engine: str = Field(default="", description="Why no containers were looked at; empty: they were.")


def reap(client: Any | None = None, *, everything: bool = False, no_engine: str = "") -> Reaped:
    """Take away all whose owner is dead, or whose time has passed.

    `everything`: also what belongs to owners of whom nothing is known. Without a client: folders and mounts only.
    Raises what the engine's calls do.
    """
    sweep = _Sweep(lambda owner: owners.state_of(owner), everything)
    if client is not None:
        sweep.containers(client, f"{LABEL}owner")
    sweep.folders()
    sweep.mounts()
    return sweep.reaped(no_engine)


def reap_folders() -> Reaped:
    """The quick part, for the start of every run: the scratch folders of dead owners, and what is mounted there."""
    sweep = _Sweep(lambda owner: owners.state_of(owner), everything=False)
    sweep.folders()
    return sweep.reaped()


def reap_owner(client: Any | None, owner: str) -> Reaped:
    """Take away all of one owner, which has ended."""
    sweep = _Sweep(lambda name: "dead" if name == owner else "alive", everything=False)
    try:
        if client is not None:
            sweep.containers(client, f"{LABEL}owner={owner}")
    finally:
        sweep.folders()
    return sweep.reaped()


@dataclass
class _Sweep:
    state_of: Callable[[str], str]
    everything: bool
    found: dict[str, list[str]] = field(default_factory=lambda: {"containers": [], "folders": [], "mounts": []})
    kept: list[Left] = field(default_factory=list)
    failed: list[Left] = field(default_factory=list)

    def reaped(self, no_engine: str = "") -> Reaped:
        taken = {kind: tuple(names) for kind, names in self.found.items()}
        return Reaped(**taken, kept=tuple(self.kept), failed=tuple(self.failed), no_engine=no_engine)

    def containers(self, client: Any, label: str) -> None:
        from sandbox_exec.sandbox import engine

        for one in client.containers(all=True, filters={"label": label}):
            name = (one.get("Names") or [one["Id"][:12]])[0].lstrip("/")
            why = self._why_kept(one["Labels"], one["State"])
            if why:
                self.kept.append(Left(name=name, why=why))
                continue
            try:
                _remove(client, one["Id"])
            except engine.EngineErrors as error:
                if engine.is_down(error):
                    raise
                self.failed.append(Left(name=name, why=engine.explain(error)))
            else:
                self.found["containers"].append(name)

        self._images(client, label)

    def _images(self, client: Any, label: str) -> None:
        """Of file systems that were to be graded: they have the labels of the container that they were made of."""
        from sandbox_exec.sandbox import engine

        for one in client.images(filters={"label": label}):
            if not self._why_kept(one["Labels"], "exited"):
                with contextlib.suppress(*engine.EngineErrors):  # something else is built on it
                    client.remove_image(one["Id"], force=True)

    def _why_kept(self, labels: dict[str, str], state: str) -> str:
        """Empty: it is to go."""
        owner = labels[f"{LABEL}owner"]
        match self.state_of(owner):
            case "alive":
                return f"its owner lives: process {owner.partition('-')[0]}"
            case "dead":
                return ""
        is_over = state != "paused" and _is_over(labels)  # the time of what is paused stands still
        return "" if self.everything or state in _ENDED or is_over else _UNKNOWN

    def folders(self) -> None:
        place = tempfile.gettempdir()
        with os.scandir(place) as entries:
            names = [(entry.name, owner) for entry in entries if (owner := owners.owner_of(entry.name)) is not None]
        for name, owner in names:
            self._folder(Path(place, name), owner)

    def mounts(self) -> None:
        """Those that are elsewhere: a run whose temporary files were in another place."""
        for box in _mounted_boxes():
            owner = owners.owner_of(box.parent.name)
            if owner is not None:
                self._folder(box.parent, owner)

    def _folder(self, folder: Path, owner: str) -> None:
        if not _is_ours(folder):
            return
        state = self.state_of(owner)
        if state == "alive" or (state == "unknown" and not self.everything and _age_s(folder) < _FOLDER_S):
            why = _UNKNOWN if state == "unknown" else f"its owner lives: process {owner.partition('-')[0]}"
            self.kept.append(Left(name=str(folder), why=why))
            return
        box = str(folder / "box")
        was_mounted = os.path.ismount(box)
        remove_folder(folder)
        if was_mounted and not os.path.ismount(box):
            self.found["mounts"].append(box)
        if folder.exists():
            self.failed.append(Left(name=str(folder), why="something is still written there, or it is not ours"))
        else:
            self.found["folders"].append(str(folder))


def remove_folder(folder: Path) -> None:
    """Remove a scratch folder, mounted or not."""
    with contextlib.suppress(OSError):
        kernel.umount(str(folder / "box"))
    remove_scratch(str(folder))


def _remove(client: Any, container: str) -> None:
    from sandbox_exec.sandbox import engine

    try:
        client.remove_container(container, v=True, force=True)
    except engine.EngineErrors as error:
        if engine.is_missing(error):
            return
        if not engine.is_being_removed(error):
            raise
        with contextlib.suppress(engine.Missing):
            client.wait(container, condition="removed")  # by another sweep


def _is_over(labels: dict[str, str]) -> bool:
    with contextlib.suppress(KeyError, ValueError):
        return float(labels[f"{LABEL}deadline"]) < time.time()
    return False


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder, and this user's: in a place that all can write to, a name says nothing."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _mounted_boxes() -> list[Path]:
    with open("/proc/self/mountinfo") as file:
        places = [line.split(" ")[4] for line in file if owners.DOCKER_SCRATCH in line and " - tmpfs " in line]
    found = [Path(place.encode().decode("unicode_escape")) for place in places]  # a space is \040
    return [path for path in found if path.name == "box"]


def _age_s(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - folder.stat().st_mtime
    return 0.0
