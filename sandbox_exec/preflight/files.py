"""The files of an experiment in full: artifacts, workspaces, and what belongs to the grading by its content."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from sandbox_exec.artifacts import FILES, verify
from sandbox_exec.contracts import Manifest, Variant
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.errors import InvalidArtifact, InvalidExperiment
from sandbox_exec.experiment import freeze_functions, json_digest
from sandbox_exec.preflight.findings import Found
from sandbox_exec.preflight.programs import HEAD_BYTES, graders_of, interpreter_in
from sandbox_exec.units import format_bytes

_TOO_SMALL: Final = 32  # bytes: below, two files are the same by chance


class Files:
    """What the static part sees of files, in full; and what of it the images are held against."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.artifacts: dict[
            str, tuple[Manifest, tuple[str, ...]]
        ] = {}  # by variant, with the entrypoint's interpreter
        self.secrets = Secrets({})

    def look(self) -> Iterator[Found]:
        yield from self._artifacts()
        yield from self._workspaces()
        yield from self._assets()
        try:
            freeze_functions(self._experiment)
        except InvalidExperiment as error:
            yield Found("error", "function", str(error), "use what can be pickled, or name it as module:function")

    @functools.cached_property
    def public(self) -> frozenset[str]:
        """The digests of files that agents are given: what is the same is no secret."""
        found: set[str] = set()
        for workspace in {task.workspace for task in self._experiment.tasks if task.workspace is not None}:
            with contextlib.suppress(OSError):  # told already
                files = _files_of(str(self._experiment.base / workspace))
                found.update(_sha256_of(path) for path, size in files if size in self.secrets.sizes)
        return frozenset(found)

    def _artifacts(self) -> Iterator[Found]:
        for variant, manifest in manifests(self._experiment, verify):
            if isinstance(manifest, str):
                todo = "make it again with `sandbox-exec freeze`"
                yield Found("error", "agent.artifact", manifest, todo, "variant", variant.id)
                continue
            assert variant.agent.artifact is not None
            interpreter = interpreter_in(_entry_head(self._experiment.base / variant.agent.artifact, manifest))
            self.artifacts[variant.id] = manifest, interpreter
            if self._experiment.sandbox.kind == "process" and interpreter and not os.path.exists(interpreter[0]):
                what = f"{manifest.entrypoint} begins with #!{interpreter[0]}, which is not there"
                todo = "install it, or freeze the agent with another"
                yield Found("error", "agent.artifact", what, todo, "variant", variant.id)

    def _workspaces(self) -> Iterator[Found]:
        base, measure = self._experiment.base, functools.cache(_measure)
        limits = self._experiment.limits(self._experiment.tasks[0])
        for task in self._experiment.tasks:
            if task.workspace is None or not os.path.exists(base / task.workspace):
                continue
            size, files, why = measure(str(base / task.workspace))
            if why:
                yield Found("error", "workspace", why, "let this user read it", "task", task.id)
            elif size > limits.disk or files > limits.files:
                what = f"{format_bytes(size)} in {files} files do not fit a sandbox"
                todo = f"at most {format_bytes(limits.disk)} (or sandbox.out_limit) in {limits.files} files"
                yield Found("error", "workspace", what, todo, "task", task.id)

    def _assets(self) -> Iterator[Found]:
        experiment = self._experiment
        tops = {grader.assets: "assets" for _, grader in graders_of(experiment) if grader.assets is not None}
        references = [task.reference for task in experiment.tasks if task.reference is not None]
        tops |= {str(experiment.base / reference): "reference" for reference in references}
        try:
            self.secrets = Secrets(tops)
        except OSError as error:
            what = f"cannot read {error.filename}: {error.strerror}"
            yield Found("error", "grading.assets", what, "let this user read it")
            return
        # Elsewhere, graders get copies.
        is_fresh = experiment.grading is None or experiment.grading.in_ == "fresh"
        if os.geteuid() == 0 and is_fresh and experiment.sandbox.kind == "docker":
            for path in self.secrets.locked:
                what = f"{path} can be read by its owner only, and graders are none of your users"
                yield Found("error", "grading.assets", what, "chmod -R o+rX it")
        for variant_id, (manifest, _) in self.artifacts.items():
            for file in manifest.files:
                name = self.secrets.by_content.get((file.size, file.sha256))
                if name and file.sha256 not in self.public:
                    what = f"{file.path} in the artifact is {name} of the grading"
                    yield Found("error", "agent.artifact", what, "freeze it without that", "variant", variant_id)


class Secrets:
    """The files that belong to the grading, by their content and by their place below a folder. Raises OSError."""

    def __init__(self, tops: Mapping[str, str]) -> None:
        self.by_content: dict[tuple[int, str], str] = {}
        self.by_place: dict[str, str] = {}
        self.locked: list[str] = []  # what only its owner can read
        for top, kind in tops.items():
            if os.path.exists(top):
                self._take(top, kind)
        self.sizes = {size for size, _ in self.by_content}
        self.digest = json_digest([sorted(self.by_content), sorted(self.by_place)])

    def _take(self, top: str, kind: str) -> None:
        for path, size in _files_of(top):
            below = os.path.relpath(path, top) if path != top else os.path.basename(top)
            name = f"{below} ({kind})"
            if kind == "assets":
                if not os.stat(path).st_mode & 0o004 or not os.stat(os.path.dirname(path)).st_mode & 0o001:
                    self.locked.append(path)
                if path != top and size:
                    self.by_place[f"{os.path.basename(top)}/{below}"] = name
            if size >= _TOO_SMALL:
                self.by_content[size, _sha256_of(path)] = name

    def __bool__(self) -> bool:
        return bool(self.by_content or self.by_place)


def manifests(experiment: Experiment, read: Callable[[Path], Manifest]) -> Iterator[tuple[Variant, Manifest | str]]:
    """Each artifact once: its manifest, or what is wrong with it. What is not there is told elsewhere."""
    known: dict[Path, Manifest | str] = {}
    for variant in experiment.variants:
        if variant.agent.artifact is None or not os.path.isfile(archive := experiment.base / variant.agent.artifact):
            continue
        if archive not in known:
            try:
                known[archive] = read(archive)
            except InvalidArtifact as error:
                known[archive] = str(error)
        yield variant, known[archive]


def _entry_head(archive: Path, manifest: Manifest) -> bytes:
    """The first bytes of the entrypoint. Of an archive that was verified: its headers are what its manifest says."""
    with tarfile.open(archive, "r:gz") as packed:
        entry = next(member for member in packed if member.name == f"{FILES}/{manifest.entrypoint}")
        file = packed.extractfile(entry)
        return file.read(HEAD_BYTES) if file is not None else b""


def _measure(top: str) -> tuple[int, int, str]:
    """Size and number of files of a folder or a file, or what of it cannot be read."""
    size = files = 0
    try:
        for path, one in _files_of(top):
            size, files = size + one, files + 1
            if not os.access(path, os.R_OK):
                return 0, 0, f"{path} may not be read by this user"
    except OSError as error:
        return 0, 0, f"cannot read {error.filename}: {error.strerror}"
    return size, files, ""


def _files_of(top: str) -> Iterator[tuple[str, int]]:
    """The regular files below a folder, or the file itself, with their sizes; through no link."""

    def fail(error: OSError) -> None:
        raise error

    if os.path.isfile(top):
        yield top, os.stat(top).st_size
        return
    for folder, folders, names in os.walk(top, onerror=fail):
        folders.sort()
        for name in sorted(names):
            info = os.lstat(path := os.path.join(folder, name))
            if stat.S_ISREG(info.st_mode):
                yield path, info.st_size


def _sha256_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
