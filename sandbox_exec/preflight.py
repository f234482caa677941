"""Preflight: what would go wrong with an experiment, found before the first trial and told with what to do about it.

Three parts, each dearer than the one before:

  static   what the experiment says, against itself, its files, the environment and the machine. Reads names and modes,
           and of archives the manifest. Takes milliseconds; `quick_check` is this part alone
  images   for docker: each image is there or can be pulled, is for this machine, has the programs that are named, and
           holds nothing of the grading, in no layer. Nothing of the image runs for this: its files are looked at
           through a container that is created and never started, its layers as the archive that `docker save` gives
  smoke    trials in the same sandboxes as a run's, by the same workers. In each image one that writes to /workspace and
           /out; for each image and variant one whose agent does nothing, which must not pass; where a task names a
           reference solution, the grading of that, which must pass. Each grading twice: a grader that says two things
           of the same input is no measure. No agent under test is ever started

What was found in order by the last two is kept in the user's cache folder, by the digest of what went in, for a week.
What was not is looked at again each time.

Limits. What programs load in turn is not seen, neither by the search for programs nor by the digests. A file of the
grading is found in an image by its content, or by its place below a folder of the same name; renamed and changed, or in
an archive, it is not. A grader that passes the one agent that does nothing may be right about all others, and wrong.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import os
import platform
import shutil
import stat
import tarfile
import tempfile
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import psutil
from pydantic import Field, ValidationError

from sandbox_exec.artifacts import FILES, read_manifest, verify
from sandbox_exec.backends.base import Finished, Lost
from sandbox_exec.backends.local import LocalBackend
from sandbox_exec.containment import require
from sandbox_exec.contracts import (
    ContainerSpec,
    Contract,
    Grade,
    Manifest,
    Rung,
    Slot,
    Status,
    Task,
    TrialCompletion,
    TrialDispatch,
    Variant,
    derive_seed,
    derive_trial_id,
)
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.contracts.words import AgentSpec
from sandbox_exec.coordinator import limits_of, resolve
from sandbox_exec.errors import InvalidArtifact, InvalidExperiment, InvalidValue, SandboxUnavailable
from sandbox_exec.experiment import freeze_functions, json_digest, load_experiment, path_digest
from sandbox_exec.graders import FUNCTIONS, Graders, hidden_from_agents, images_of, role_of
from sandbox_exec.sandbox.owners import name_of
from sandbox_exec.sandbox.process import base_environment
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.sandbox.reaper import LABEL
from sandbox_exec.store import attempt_folder, read_completion, write_atomic
from sandbox_exec.trial.collect import stays_inside
from sandbox_exec.units import GIB, MIB, format_bytes, processors

RECIPE: Final = 1  # raised when the same inputs are to be looked at again
KEPT_S: Final = 7 * 86400.0  # what a grader needs of the machine is not in the digest: it may be gone next month
AT_ONCE: Final = 4  # images, and trials: preflight is beside other work, and a few hide the waiting
_PASS: Final = 1.0  # the score of one that says nothing of passing
_MAX_ALIKE: Final = 20  # findings of one kind that are told one by one
_MAX_NAMES: Final = 3  # of tasks or variants that share a finding
_MAX_TRIED: Final = 200  # pairs of image and variant, and references: the others are as many of the same kind
_BUDGET_SHARE: Final = 0.8  # as the coordinator takes it, where the design names no budget
_ROOM_SHARE: Final = 0.01  # of all that trials may write: few write a hundredth of it
_SLOW_SHARE: Final = 0.5  # of a grader's time: what takes half of it alone takes all of it beside others
_TOO_SMALL: Final = 32  # bytes: below, two files are the same by chance
_MOST_IMAGE_BYTES: Final = 4 * GIB  # minutes, as the engine sends an image
_MOST_SCRIPT_BYTES: Final = MIB
_HEAD_BYTES: Final = 256  # of a script: what the kernel looks at
_PIECE: Final = 1 << 18
_ZSTD: Final = b"\x28\xb5\x2f\xfd"  # which Python cannot read before 3.14
_TRY_S: Final = 60.0  # for a trial that writes two files
_ENGINES_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}  # the rest: the same names
_SCRIPTS: Final = (".py", ".sh", ".pl", ".rb", ".js", ".R", ".jl", ".lua")
_GIVEN_ENV: Final = frozenset(("PATH", "HOME", "LANG"))
_WRITES: Final = ": >/workspace/preflight && : >/out/preflight"  # what a shell does by itself
_INIT: Final = ("/sbin/docker-init", "--version")  # which the engine puts into each of our containers

Level = Literal["error", "warning", "note"]
LEVELS: Final[tuple[Level, ...]] = ("error", "warning", "note")
Say = Callable[[str], None]
PathLike = str | os.PathLike[str]
T = TypeVar("T")


class Finding(Contract):
    """One thing that a person should know before a run."""

    level: Level = Field(description="error: a run would fail or mean nothing; warning: it may; note: as you like.")
    place: str = Field(description="A field of the experiment, a task, a variant or an image.")
    what: str = Field(description="What is wrong.")
    todo: str = Field(description="What to do about it.")


class Preflight(Contract):
    """What was looked at, and what was found. `format` changes when a reader of the JSON would have to."""

    format: Literal[1] = 1
    experiment: str
    quick: bool = Field(description="Whether only the static part was looked at.")
    findings: tuple[Finding, ...] = Field(description="Errors first.")
    checked: tuple[str, ...] = Field(description="What was looked at, in words.")
    from_cache: int = Field(default=0, description="How many images and trials were in order the last time.")
    wall_s: float = Field(ge=0)

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.level != "error" for finding in self.findings)


@dataclass(frozen=True)
class Machine:
    """What the ceilings of an experiment are held against."""

    memory_bytes: int
    cpus: int
    architecture: str  # as images name it
    pids: int

    @classmethod
    def here(cls) -> Machine:
        machine = platform.machine()
        return cls(psutil.virtual_memory().total, processors(), _MACHINES.get(machine, machine), _most_pids())


def preflight(
    experiment: Experiment | PathLike,
    *,
    quick: bool = False,
    say: Say = lambda line: None,
    runs: PathLike = "runs",
    containment: str = "auto",
    cache: PathLike | Literal[True] | None = True,
) -> Preflight:
    """Look at all of an experiment, or of the file that holds one; with `quick`, at what takes no time.

    say: gets lines of progress.
    runs: the folder below which a run would be made: is there room?
    containment: as for `run`.
    cache: the folder for what was in order; True: the user's own, None: none.

    Raises `InvalidExperiment` for a file that is none, `InvalidValue` for no containment. All else is a finding.
    """
    began_s = time.monotonic()
    if containment not in ("auto", *Rung):
        raise InvalidValue(f"there is no containment {containment!r}; allowed: auto, {', '.join(Rung)}")
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    found = [*_static(experiment, Machine.here(), Path(runs), None, containment)]
    slots = len(experiment.tasks) * len(experiment.variants) * experiment.design.repeats
    checked = [f"{len(experiment.tasks)} tasks x {len(experiment.variants)} variants: {slots} trials"]
    from_cache = 0
    if not quick:
        folder = cache_folder() if cache is True else Path(cache) if cache is not None else None
        full = _Full(experiment, containment, say, _Cache(folder))
        found += full.look(broken=any(one.level == "error" for one in found))
        checked += full.checked
        from_cache = full.cache.hits
    return Preflight(
        experiment=experiment.name,
        quick=quick,
        findings=tuple(_told(found)),
        checked=tuple(checked),
        from_cache=from_cache,
        wall_s=round(time.monotonic() - began_s, 3),
    )


def quick_check(
    experiment: Experiment,
    *,
    runs: PathLike = "runs",
    workers: int | None = None,
    containment: str = "auto",
    machine: Machine | None = None,
) -> list[Finding]:
    """What the static part finds, errors first. `workers`: trials at once, in place of the design's."""
    return _told(_static(experiment, machine or Machine.here(), Path(runs), workers, containment))


def cache_folder() -> Path:
    """Where the user's caches are, and below it ours."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return home / "sandbox-exec" / "preflight"


# --- findings ---


class _Found(NamedTuple):
    """A finding of one task, variant or image; those that differ in nothing else are told as one."""

    level: Level
    field: str
    what: str
    todo: str
    kind: str = ""  # task, variant, image
    name: str = ""


def _told(found: Iterable[_Found]) -> list[Finding]:
    names: dict[_Found, dict[str, None]] = {}
    for one in found:
        names.setdefault(one._replace(name=""), {})[one.name] = None
    told: list[Finding] = []
    alike: Counter[tuple[str, ...]] = Counter()
    for one, of in sorted(names.items(), key=lambda item: LEVELS.index(item[0].level)):
        key = (one.level, one.kind, one.field)
        alike[key] += 1
        if alike[key] <= _MAX_ALIKE:
            told.append(Finding(level=one.level, place=_place(one, list(of)), what=one.what, todo=one.todo))
    for (level, kind, where), count in alike.items():
        if count > _MAX_ALIKE:
            place = f"{kind}s: {where}" if kind else where
            what, todo = f"{count - _MAX_ALIKE} more findings of this kind", "do the same about them"
            told.append(Finding.model_validate({"level": level, "place": place, "what": what, "todo": todo}))
    return sorted(told, key=lambda finding: LEVELS.index(finding.level))


def _place(one: _Found, names: list[str]) -> str:
    if not one.kind:
        return one.field
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    of = f"{one.kind}{'s' * (len(names) > 1)} {shown}{more}"
    return f"{of}: {one.field}" if one.field else of


# --- static ----------------------------------------------------------------------------------------


def _static(
    experiment: Experiment, machine: Machine, runs: Path, workers: int | None, containment: str
) -> Iterator[_Found]:
    at_once = workers or experiment.design.max_concurrency
    yield from _paths(experiment)
    yield from _artifacts(experiment, machine)
    yield from _programs(experiment)
    yield from _ceilings(experiment, machine, at_once)
    yield from _names(experiment)
    yield from _leaks(experiment)
    yield from _secrets(experiment)
    yield from _room(experiment, runs, at_once)
    yield from _kinds(experiment)
    yield from _grading(experiment)
    yield from _containment(experiment, containment)


class _Grader(NamedTuple):
    """What a task is graded by, before anything of it is looked at."""

    command: tuple[str, ...] | None
    python: str | None
    assets: str | None


def _graders(experiment: Experiment) -> Iterator[tuple[Task, _Grader]]:
    """As `Experiment.grading_of`, without a model for each of ten thousand tasks."""
    ours, base = experiment.grading, str(experiment.base)
    shared = _Grader(ours.command, ours.python, _joined(base, ours.assets)) if ours else None
    for task in experiment.tasks:
        own = task.grading
        if own is None:
            if shared is not None:
                yield task, shared
            continue
        assets = _joined(base, own.assets) or (shared.assets if shared else None)
        if own.command is None and own.python is None:
            yield task, _Grader(shared.command if shared else None, shared.python if shared else None, assets)
        else:
            yield task, _Grader(own.command, own.python, assets)


def _joined(base: str, path: Path | None) -> str | None:
    return os.path.join(base, path) if path is not None else None


def _paths(experiment: Experiment) -> Iterator[_Found]:
    base = str(experiment.base)
    look = functools.cache(_absence)
    for task in experiment.tasks:
        named = [("workspace", task.workspace), ("reference", task.reference)]
        named += [("grading.assets", task.grading.assets)] if task.grading is not None else []
        for where, path in named:
            if path is not None and (why := look(os.path.join(base, path))):
                yield _Found("error", where, why, "put it there, or name another", "task", task.id)
        top = _joined(base, task.reference)
        if top and not look(top) and not any(os.path.isdir(f"{top}/{name}") for name in ("workspace", "out")):
            what = f"{top} holds neither workspace/ nor out/"
            yield _Found("error", "reference", what, "put into them what a perfect agent leaves", "task", task.id)
    for variant in experiment.variants:
        path = variant.agent.artifact
        if path is not None and (why := look(os.path.join(base, path))):
            yield _Found("error", "agent.artifact", why, "make it with `sandbox-exec freeze`", "variant", variant.id)
    grading = experiment.grading
    if grading is not None and grading.assets is not None and (why := look(os.path.join(base, grading.assets))):
        yield _Found("error", "grading.assets", why, "put it there, or name another")
    for path in experiment.limits(experiment.tasks[0]).readable:
        if why := look(str(path)):
            yield _Found("warning", "sandbox.readable", why, "put it there: agents do without it")


def _absence(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        return f"cannot find {path}: {getattr(error, 'strerror', None) or error}"
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        return f"{path} may not be read by this user"
    return ""


def _artifacts(experiment: Experiment, machine: Machine) -> Iterator[_Found]:
    for variant, manifest in _manifests(experiment, read_manifest):
        if isinstance(manifest, str):
            todo = "make it again with `sandbox-exec freeze`"
            yield _Found("error", "agent.artifact", manifest, todo, "variant", variant.id)
        elif experiment.sandbox.kind == "process" and not _fits(manifest.platform, f"linux/{machine.architecture}"):
            what = f"the artifact is for {manifest.platform}, and this machine is linux/{machine.architecture}"
            yield _Found("error", "agent.artifact", what, "freeze a build for this machine", "variant", variant.id)


def _manifests(experiment: Experiment, read: Callable[[Path], Manifest]) -> Iterator[tuple[Variant, Manifest | str]]:
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


def _fits(wanted: str, given: str) -> bool:
    return wanted in ("any", given)


# --- programs ---


class _Program(NamedTuple):
    """The first word of a command: a file of ours, or something that the sandbox must have."""

    word: str
    file: str = ""  # where it is on this machine


def _program(command: Sequence[str], base: str, assets: str | None = None) -> _Program:
    word = command[0]
    if word and not word.startswith(("-", "/")):
        for folder in (assets, base):
            if folder is not None and os.path.isfile(os.path.join(folder, word)):
                return _Program(word, os.path.join(folder, word))
    if word.startswith("/grading/") and assets is not None:
        return _Program(word, os.path.join(assets, word.removeprefix("/grading/")))
    return _Program(word, word if word.startswith(f"{base}/") else "")


def _programs(experiment: Experiment) -> Iterator[_Found]:
    """In the process sandbox, all of it can be seen from here; of an image, the files that are ours."""
    base, in_process = str(experiment.base), experiment.sandbox.kind == "process"
    workspaces = dict.fromkeys(_joined(base, task.workspace) for task in experiment.tasks)
    for variant in experiment.variants:
        agent = variant.agent
        if agent.python is not None and (why := _module_fault(agent.python, base)):
            yield _Found("error", "agent.python", why, "put the module beside the experiment", "variant", variant.id)
        elif agent.python is not None:
            yield from _locked(variant, [os.path.join(base, agent.python.partition(":")[0].partition(".")[0] + ".py")])
        if agent.command is None:
            continue
        program = _program(agent.command, base)
        path = variant.env.get("PATH") or base_environment()["PATH"]
        if why := _program_fault(program, path, in_process, workspaces):
            todo = "name a program that is there"
            yield _Found("error", "agent.command", why, todo, "variant", variant.id)
        yield from _locked(variant, [os.path.join(base, word) for word in agent.command if word[:1] not in ("", "-")])
        for word in _scripts(agent.command):
            if not any(os.path.isfile(os.path.join(top, word)) for top in (base, *filter(None, workspaces))):
                what = f"{word!r} is neither beside the experiment nor in a task's workspace"
                yield _Found("warning", "agent.command", what, "put it there", "variant", variant.id)
    look = functools.cache(_program_fault)
    for task, grader in _graders(experiment):
        if grader.python is not None and (why := _module_fault(grader.python, base)):
            yield _Found("error", "grading.python", why, "put the module beside the experiment", "task", task.id)
        if grader.command is None:
            continue
        program = _program(grader.command, base, grader.assets)
        if why := look(program, base_environment()["PATH"], in_process):
            todo = "name a program that is there, or put one into the assets"
            yield _Found("error", "grading.command", why, todo, "task", task.id)
        for word in _scripts(grader.command):
            if not any(os.path.isfile(os.path.join(top, word)) for top in filter(None, (grader.assets, base))):
                what = f"{word!r} is neither in the assets nor beside the experiment"
                yield _Found("error", "grading.command", what, "put it into the assets", "task", task.id)


def _locked(variant: Variant, files: Iterable[str]) -> Iterator[_Found]:
    """Files of ours that the agent is shown, and may not read: root's trials run as nobody."""
    for file in files if os.geteuid() == 0 else ():
        if os.path.isfile(file) and not os.stat(file).st_mode & 0o004:
            what = f"{file} can be read by its owner only, and agents are none of your users"
            yield _Found("error", "agent", what, "chmod o+r it", "variant", variant.id)


def _scripts(command: Sequence[str]) -> Iterator[str]:
    """Further words that can only be files."""
    for word in command[1:]:
        if word.endswith(_SCRIPTS) and not word.startswith(("-", "/")) and not any(map(str.isspace, word)):
            yield word


def _program_fault(program: _Program, path: str, in_process: bool, workspaces: Iterable[str | None] = ()) -> str:
    if program.file:
        return _file_fault(program.file, in_process)
    word = program.word
    if "/" in word and not word.startswith("/"):  # from where it starts
        there = [os.path.join(top, word) for top in workspaces if top and os.path.isfile(os.path.join(top, word))]
        if not there:
            return f"{word!r} is neither beside the experiment nor where it is looked for"
        return next(filter(None, (_file_fault(one, in_process) for one in there)), "")
    if not in_process:
        return ""
    if word.startswith("/"):
        return _file_fault(word, in_process)
    return "" if shutil.which(word, path=path) else f"there is no program {word!r} on the PATH of a sandbox"


def _file_fault(file: str, in_process: bool) -> str:
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        return f"cannot find {file}: {error.strerror}"
    if not stat.S_ISREG(mode) or not mode & 0o111:
        return f"{file} is not executable"
    if os.geteuid() == 0 and not mode & 0o001:
        return f"{file} is not executable for others, and who runs it is none of your users"
    with contextlib.suppress(OSError), open(file, "rb") as start:
        interpreter = _interpreter(start.read(_HEAD_BYTES))
        if in_process and interpreter and not os.path.exists(interpreter[0]):
            return f"{file} begins with #!{interpreter[0]}, which is not there"
    return ""


def _interpreter(head: bytes) -> list[str]:
    """What a script is run by, and for `env` what that runs; empty for what is no script."""
    if not head.startswith(b"#!"):
        return []
    words = head[2:].split(b"\n")[0].decode(errors="replace").split()
    if words and os.path.basename(words[0]) == "env":
        return [words[0], *[word for word in words[1:] if not word.startswith("-") and "=" not in word][:1]]
    return words[:1]


@functools.lru_cache(maxsize=64)
def _module_fault(entry: str, base: str) -> str:
    module = entry.partition(":")[0]
    top, *below = module.split(".")
    if os.path.isfile(os.path.join(base, f"{top}.py")):
        return ""
    if os.path.isdir(folder := os.path.join(base, top)):
        path = os.path.join(folder, *below)
        there = any(map(os.path.exists, (path + ".py", path))) if below else True
        return "" if there else f"there is no module {module} in {folder}"
    with contextlib.suppress(ValueError):  # a module without a spec, such as __main__
        if importlib.util.find_spec(top) is not None:
            return ""
    return f"there is no module {top}, neither beside the experiment nor on the path"


# --- ceilings ---


def _ceilings(experiment: Experiment, machine: Machine, at_once: int) -> Iterator[_Found]:
    sandbox, grading, design = experiment.sandbox, experiment.grading, experiment.design
    has = format_bytes(machine.memory_bytes)
    for where, memory in (("sandbox.memory", sandbox.memory), ("grading.memory", grading.memory if grading else 0)):
        if memory is None:
            todo = "name one: without it, one trial can take what the machine has"
            yield _Found("warning", where, "there is no memory ceiling", todo)
        elif memory > machine.memory_bytes:
            what = f"{format_bytes(memory)} is more than this machine has, {has}"
            yield _Found("error", where, what, "lower it, or use a larger machine")
    budget = design.memory_budget or int(machine.memory_bytes * _BUDGET_SHARE)
    if budget > machine.memory_bytes:
        what = f"{format_bytes(budget)} is more than this machine has, {has}"
        yield _Found("warning", "design.memory_budget", what, "lower it: trials would be killed for one another")
    memory = sandbox.memory or 0
    slots = len(experiment.tasks) * len(experiment.variants) * design.repeats
    if budget < memory <= machine.memory_bytes:
        what = f"a trial may use {format_bytes(memory)}, and all together only {format_bytes(budget)}"
        yield _Found("error", "sandbox.memory", what, "lower it, or raise design.memory_budget")
    elif memory * min(at_once, slots) > budget and memory:
        what = f"{at_once} trials of {format_bytes(memory)} are more than the budget of {format_bytes(budget)}"
        todo = f"lower sandbox.memory, or know that {budget // memory} run at once"
        yield _Found("warning", "design.max_concurrency", what, todo)
    if sandbox.cpus is not None:
        if sandbox.cpus > machine.cpus:
            what = f"{sandbox.cpus:g} processors, and this machine gives {machine.cpus}"
            yield _Found("warning", "sandbox.cpus", what, "lower it: trials get what there is")
        elif sandbox.cpus * min(at_once, slots) > machine.cpus:
            what = f"{at_once} trials of {sandbox.cpus:g} processors share {machine.cpus}: how far each gets will vary"
            yield _Found("note", "sandbox.cpus", what, f"lower it or max_concurrency to {machine.cpus} in all")
    for where, pids in (("sandbox.pids", sandbox.pids), ("grading.pids", grading.pids if grading else 0)):
        if pids is not None and pids * min(at_once, slots) > machine.pids:
            what = f"{at_once} trials of {pids} processes are more than this machine can have, {machine.pids}"
            yield _Found("warning", where, what, "lower it, or raise kernel.pid_max")
    untimed = [task for task in experiment.tasks if not (task.protocol.timeout_s or sandbox.timeout_s)]
    for task in untimed:
        todo = "name sandbox.timeout_s"
        yield _Found("warning", "timeout_s", "there is none: an agent that hangs hangs for ever", todo, "task", task.id)


def _most_pids() -> int:
    found = [1 << 22]
    for name in ("pid_max", "threads-max"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path("/proc/sys/kernel", name).read_text()))
    return min(found)


# --- names, and what agents must not see ---


def _names(experiment: Experiment) -> Iterator[_Found]:
    for kind, ids in (
        ("task", [task.id for task in experiment.tasks]),
        ("variant", [v.id for v in experiment.variants]),
    ):
        yield from _nearly_the_same(ids, kind, "id")
    chains = Counter(task.chain for task in experiment.tasks if task.chain is not None)
    yield from _nearly_the_same(list(chains), "chain", "")
    for chain, count in chains.items():
        if count == 1 and len(experiment.tasks) > 1:
            todo = "give the tasks that must not run at once the same chain"
            yield _Found("note", "", "only one task is in it, so it does nothing", todo, "chain", chain)
    for variant in experiment.variants:
        for name in sorted(_GIVEN_ENV & {*variant.env, *variant.pass_env}):
            what = f"{name} takes the place of the one that every sandbox has"
            where = f"env.{name}" if name in variant.env else "pass_env"
            yield _Found("note", where, what, "leave it out, unless you mean it", "variant", variant.id)
        names = [*variant.env, *variant.pass_env]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield _Found("note", "pass_env", f"{name} is there twice", "name it once", "variant", variant.id)


def _nearly_the_same(names: Sequence[str], kind: str, where: str) -> Iterator[_Found]:
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            what = f"differs from {other!r} only in case or spaces: people will take one for the other"
            yield _Found("warning", where, what, "rename one of them", kind, name)


class _Hidden(NamedTuple):
    path: str
    what: str
    level: Level


def _hidden(experiment: Experiment) -> list[_Hidden]:
    """All that belongs to the grading, by its real path, in the order of those."""
    base, real = str(experiment.base), _Real()
    found: dict[str, tuple[str, Level]] = {}
    for task in experiment.tasks:
        if task.reference is not None:
            found[real(os.path.join(base, task.reference))] = "the reference solution", "error"
    programs: set[str] = set()
    for _, grader in _graders(experiment):
        if grader.assets is not None:
            found[real(grader.assets)] = "the grading assets", "error"
        if grader.python is not None:
            top = grader.python.partition(":")[0].partition(".")[0]
            programs |= {f"{top}.py", top}
        programs.update(grader.command or ())
    for word in programs:
        path = os.path.join(base, word)
        if word and not word.startswith("-") and os.path.exists(path):
            found.setdefault(real(path), ("the grader's program", "warning"))
    return [_Hidden(path, *about) for path, about in sorted(found.items())]


class _Real:
    """`os.path.realpath` for many paths in few folders."""

    def __init__(self) -> None:
        self._folder = functools.cache(os.path.realpath)

    def __call__(self, path: str) -> str:
        path = os.path.normpath(path)
        if os.path.islink(path):
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        return os.path.join(self._folder(folder), name)


def _below(hidden: Sequence[_Hidden], paths: Sequence[str], top: str) -> _Hidden | None:
    """The first of the hidden paths that is `top`, or in it."""
    at = bisect_left(paths, top)
    if at < len(paths) and paths[at] == top:
        return hidden[at]
    at = bisect_left(paths, f"{top.rstrip('/')}/")
    return hidden[at] if at < len(paths) and paths[at].startswith(f"{top.rstrip('/')}/") else None


def _leaks(experiment: Experiment) -> Iterator[_Found]:
    hidden, real, base = _hidden(experiment), _Real(), str(experiment.base)
    if not hidden:
        return
    paths = [one.path for one in hidden]
    seen: dict[str, _Hidden | None] = {}
    for task in experiment.tasks:
        if task.workspace is not None:
            top = real(os.path.join(base, task.workspace))
            if top not in seen:
                seen[top] = _below(hidden, paths, top)
            if (found := seen[top]) is not None:
                what = f"agents get {top}, which holds {found.what} ({found.path})"
                yield _Found("error", "workspace", what, "move that out of it", "task", task.id)
    in_docker = experiment.sandbox.kind == "docker"
    for path in experiment.limits(experiment.tasks[0]).readable:
        found = _below(hidden, paths, real(str(path)))
        inside = next((one for one in hidden if real(str(path)).startswith(f"{one.path}/")), None)
        if found is None and inside is None:
            continue
        shown = inside or found
        assert shown is not None
        exact = inside is not None or shown.path == real(str(path))
        what = f"agents may read {path}, which holds {shown.what} ({shown.path})"
        if exact or in_docker:
            yield _Found("error", "sandbox.readable", what, "name only what agents need, or move that out of it")
        else:
            what += ": that is hidden from them, but not its name"
            yield _Found("warning", "sandbox.readable", what, "name only what agents need, or move that out of it")
    for variant in experiment.variants:
        for word in variant.agent.command or ():
            file = os.path.join(base, word)
            if word and not word.startswith("-") and os.path.isfile(file):
                yield from _shown_to(variant, "agent.command", real(file), hidden)
        if variant.agent.python is not None:
            top = variant.agent.python.partition(":")[0].partition(".")[0]
            for file in (os.path.join(base, f"{top}.py"), os.path.join(base, top)):
                if os.path.exists(file):
                    yield from _shown_to(variant, "agent.python", real(file), hidden)


def _shown_to(variant: Variant, where: str, path: str, hidden: Sequence[_Hidden]) -> Iterator[_Found]:
    for one in hidden:
        if path == one.path or path.startswith(f"{one.path}/") or one.path.startswith(f"{path}/"):
            what = f"the agent is shown {path}, which belongs to {one.what}"
            yield _Found(one.level, where, what, "keep agents and graders in different files", "variant", variant.id)
            return


# --- the environment ---


def _secrets(experiment: Experiment) -> Iterator[_Found]:
    for variant in experiment.variants:
        for name in variant.pass_env:
            if name not in os.environ:
                what = f"names {name}, which your environment does not have"
                yield _Found("error", "pass_env", what, f"export {name}, or leave it out", "variant", variant.id)
            elif not os.environ[name]:
                what = f"names {name}, which is empty in your environment"
                yield _Found("warning", "pass_env", what, f"give {name} a value", "variant", variant.id)


def _room(experiment: Experiment, runs: Path, at_once: int) -> Iterator[_Found]:
    there = Path(os.path.abspath(runs))
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        yield _Found("error", "--runs", f"{there} may not be written by this user", "name another folder")
        return
    free = shutil.disk_usage(there).free
    # What is kept of /out, and for the grading all that was graded.
    one = experiment.sandbox.out_limit * (2 if experiment.grading else 1)
    slots = len(experiment.tasks) * len(experiment.variants) * experiment.design.repeats
    sensible = max(one * min(at_once, slots), int(one * slots * _ROOM_SHARE))
    todo = "free some, lower sandbox.out_limit, or name another folder with --runs"
    if free < one:
        what = f"{format_bytes(free)} are free in {there}, and one trial may keep {format_bytes(one)}"
        yield _Found("error", "sandbox.out_limit", what, todo)
    elif free < sensible:
        what = f"{format_bytes(free)} are free in {there}, and {slots} trials may keep {format_bytes(one * slots)}"
        yield _Found("warning", "sandbox.out_limit", what, todo)


def _kinds(experiment: Experiment) -> Iterator[_Found]:
    """What the chosen sandbox cannot do, and what this version does not."""
    sandbox, grading = experiment.sandbox, experiment.grading
    in_docker = sandbox.kind == "docker"
    for variant in experiment.variants:
        if in_docker and (variant.agent.python is not None or variant.agent.function is not None):
            what, todo = "a function runs in the process sandbox only", "for docker: command, artifact"
            yield _Found("error", "agent", what, todo, "variant", variant.id)
        if variant.lane is not None:
            what = f"lanes are not built yet: nothing holds the rate of {variant.lane!r}"
            yield _Found("warning", "lane", what, "use max_parallel_trials instead", "variant", variant.id)
    for task in experiment.tasks:
        if task.image is not None and not in_docker:
            what = "an image has no effect in the process sandbox"
            yield _Found("warning", "image", what, "set sandbox.kind: docker, or leave it out", "task", task.id)
        if task.protocol.priority:
            what = "a priority has no effect: trials are in the order of the tasks"
            yield _Found("note", "protocol.priority", what, "put what is to go first first", "task", task.id)
    for where, image in (("sandbox.image", sandbox.image), ("grading.image", grading.image if grading else None)):
        if image is not None and not in_docker:
            what = "an image has no effect in the process sandbox"
            yield _Found("warning", where, what, "set sandbox.kind: docker, or leave it out")
    if in_docker and grading is not None and grading.image is not None and grading.in_ == "same":
        what = "the grader runs in what the agent left, and not in another image"
        yield _Found("warning", "grading.image", what, "leave it out, or set grading.in: fresh")


def _grading(experiment: Experiment) -> Iterator[_Found]:
    graded = {task.id for task, _ in _graders(experiment)}
    if not graded:
        what = "nothing is graded: a trial succeeds when its agent ends well"
        yield _Found("note", "grading", what, "name a grader, if there is something to measure")
    elif len(graded) < len(experiment.tasks):
        for task in experiment.tasks:
            if task.id not in graded:
                yield _Found("warning", "grading", "it has no grader, and others have", "name one", "task", task.id)
    if graded and experiment.grading is not None and experiment.grading.in_ == "same":
        what = "the grader runs on the system that the agent left, with any program or library that it put there"
        todo = "use `fresh` where /workspace and /out say enough; see docs/threat-model.md"
        yield _Found("warning", "grading.in", what, todo)


def _containment(experiment: Experiment, wanted: str) -> Iterator[_Found]:
    if experiment.sandbox.kind != "process":
        return
    graded = any(True for _ in _graders(experiment))
    if not graded and experiment.sandbox.require is None and wanted == "auto":
        return  # nothing depends on it: not worth the fifth of a second
    try:
        found = chosen(wanted)
        limits = limits_of(experiment.model_copy(update={"tasks": experiment.tasks[:1]}))
        for one in limits[:1]:
            require(found, one)
    except SandboxUnavailable as error:
        yield _Found("error", "sandbox.require", str(error), "see `sandbox-exec doctor`")
        return
    grading = experiment.grading
    if grading is not None and grading.services == "keep" and found.rung is not Rung.ROOT_NAMESPACES:
        what = f"a service can be graded on {Rung.ROOT_NAMESPACES} and in docker only; here is {found.rung}"
        yield _Found("error", "grading.services", what, "run as root, or use docker")
    if graded and not found.rung.namespaced:
        what = f"on {found.rung}, agents see your files: they can read the grading assets, and the grader"
        yield _Found(
            "warning", "sandbox.kind", what, "use a machine with namespaces (see `sandbox-exec doctor`), or docker"
        )


# --- all of it -------------------------------------------------------------------------------------


class _Full:
    """What takes its time: files in full, images, and trials."""

    def __init__(self, experiment: Experiment, containment: str, say: Say, cache: _Cache) -> None:
        self.experiment, self.containment, self.say, self.cache = experiment, containment, say, cache
        self.checked: list[str] = []
        self.images: dict[str, _Image] = {}
        self._entries: dict[str, bytes] = {}  # the first bytes of each artifact's entrypoint, by variant
        self._manifests: dict[str, Manifest] = {}

    def look(self, *, broken: bool) -> list[_Found]:
        found = [*self._deep()]
        if self.experiment.sandbox.kind == "docker":
            found += self._look_at_images()
        if broken or any(one.level == "error" for one in found):
            what = "no trial was tried: what is wrong already would be found again by each of them"
            return [*found, _Found("note", "smoke", what, "put the errors right, then try again")]
        return [*found, *_Smoke(self).look()]

    def _deep(self) -> Iterator[_Found]:
        """What the static part sees of files, in full."""
        experiment, base = self.experiment, self.experiment.base
        in_process = experiment.sandbox.kind == "process"
        for variant, manifest in _manifests(experiment, verify):
            if isinstance(manifest, str):
                todo = "make it again with `sandbox-exec freeze`"
                yield _Found("error", "agent.artifact", manifest, todo, "variant", variant.id)
                continue
            assert variant.agent.artifact is not None
            head = _entry_head(base / variant.agent.artifact, manifest)
            self._entries[variant.id], self._manifests[variant.id] = head, manifest
            interpreter = _interpreter(head)
            if in_process and interpreter and not os.path.exists(interpreter[0]):
                what = f"{manifest.entrypoint} begins with #!{interpreter[0]}, which is not there"
                todo = "install it, or freeze the agent with another"
                yield _Found("error", "agent.artifact", what, todo, "variant", variant.id)
        yield from self._workspaces()
        yield from self._assets()
        try:
            freeze_functions(experiment)
        except InvalidExperiment as error:
            yield _Found("error", "function", str(error), "use what can be pickled, or name it as module:function")

    def _workspaces(self) -> Iterator[_Found]:
        base, measure = self.experiment.base, functools.cache(_measure)
        limits = self.experiment.limits(self.experiment.tasks[0])
        for task in self.experiment.tasks:
            if task.workspace is None or not os.path.exists(base / task.workspace):
                continue
            size, files, why = measure(str(base / task.workspace))
            if why:
                yield _Found("error", "workspace", why, "let this user read it", "task", task.id)
            elif size > limits.disk or files > limits.files:
                what = f"{format_bytes(size)} in {files} files do not fit a sandbox"
                todo = f"at most {format_bytes(limits.disk)} (or sandbox.out_limit) in {limits.files} files"
                yield _Found("error", "workspace", what, todo, "task", task.id)

    def _assets(self) -> Iterator[_Found]:
        try:
            self.secrets = _Secrets(self.experiment)
        except OSError as error:
            what = f"cannot read {error.filename}: {error.strerror}"
            self.secrets = _Secrets(None)
            yield _Found("error", "grading.assets", what, "let this user read it")
            return
        for path in self.secrets.locked if self._as_nobody() else ():
            what = f"{path} can be read by its owner only, and graders are none of your users"
            yield _Found("error", "grading.assets", what, "chmod -R o+rX it")
        for variant_id, manifest in self._manifests.items():
            for file in manifest.files:
                if (name := self.secrets.by_content.get((file.size, file.sha256))) and not self._is_public(file.sha256):
                    what = f"{file.path} in the artifact is {name} of the grading"
                    yield _Found("error", "agent.artifact", what, "freeze it without that", "variant", variant_id)

    def _as_nobody(self) -> bool:
        """Whether graders see the assets themselves, as a user who owns nothing: elsewhere they get copies."""
        grading = self.experiment.grading
        is_fresh = grading is None or grading.in_ == "fresh"
        return os.geteuid() == 0 and is_fresh and self.experiment.sandbox.kind == "docker"

    def _is_public(self, sha256: str) -> bool:
        """Whether agents are given a file of that content: then it is no secret."""
        return sha256 in self._public

    @functools.cached_property
    def _public(self) -> frozenset[str]:
        base = str(self.experiment.base)
        tops = dict.fromkeys(_joined(base, task.workspace) for task in self.experiment.tasks)
        found = set()
        for top in filter(None, tops):
            for path, size in _files_of(top):
                if size in self.secrets.sizes:
                    found.add(_sha256_of(path))
        return frozenset(found)

    # --- images ---

    def _look_at_images(self) -> list[_Found]:
        from sandbox_exec.sandbox import engine  # the SDK takes half a second to load

        try:
            with contextlib.closing(engine.connect()) as client:
                version = client.version()
                platform_of_engine = f"{version['Os']}/{version['Arch']}"
        except SandboxUnavailable as error:
            return [_Found("error", "sandbox.kind", str(error), "then try again; or use sandbox.kind: process")]
        except engine.EngineErrors as error:
            return [_Found("error", "sandbox.kind", engine.explain(error), "see the engine's log")]
        names = sorted(images_of(self.experiment))
        self.say(f"images to look at: {len(names)}")
        found: list[_Found] = []
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            for name, seen in zip(
                names, pool.map(lambda one: self._image(one, platform_of_engine), names), strict=True
            ):
                found += seen.found
                if seen.image is not None:
                    self.images[name] = seen.image
                    self.checked.append(f"image {name}: {seen.image.id}, {seen.image.platform}")
        return found

    def _image(self, name: str, engines: str) -> _Seen:
        from sandbox_exec import images
        from sandbox_exec.sandbox import engine

        lines: list[str] = []
        try:
            image_id = images.resolve([name], say=lines.append)[name]
            if image_id is None:
                why = lines[-1] if lines else f"{name} is not there"
                todo = "build it (sandbox-exec images build), or pull it (docker pull)"
                return _Seen([_Found("error", "", why, todo, "image", name)])
            with contextlib.closing(engine.connect()) as client:
                seen = self._look_into(client, name, client.inspect_image(image_id), engines)
        except SandboxUnavailable as error:
            return _Seen([_Found("error", "", str(error), "then try again", "image", name)])
        except engine.EngineErrors as error:
            return _Seen([_Found("error", "", engine.explain(error), "see the engine's log", "image", name)])
        except tarfile.TarError as error:
            what = f"what the engine says is in it cannot be read: {error}"
            return _Seen([_Found("error", "", what, "build or pull it again", "image", name)])
        self.say(f"image {name}: looked at")
        return seen

    def _look_into(self, client: Any, name: str, about: dict[str, Any], engines: str) -> _Seen:
        config = about.get("Config") or {}
        env = dict(line.partition("=")[::2] for line in config.get("Env") or ())
        platform_ = f"{about['Os']}/{about['Architecture']}"
        needs = self._needs(name, env.get("PATH") or _ENGINES_PATH)
        inputs = {
            "part": "image",
            "image": about["Id"],
            "engine": engines,
            "needs": [[*need, *of] for need, of in needs],
            "assets": self.secrets.digest,
            "public": sorted(self._public),
            "artifacts": {variant_id: manifest.platform for variant_id, manifest in self._manifests.items()},
            "user": self.experiment.sandbox.user,
        }
        kept = self.cache.get(inputs)
        if kept is None:
            found: list[_Found] = []
            with contextlib.closing(_Files(client, about["Id"])) as files:
                found += self._platforms(name, platform_, engines)
                for need, (kind, of) in needs:
                    if why := self._lack(files, need):
                        found.append(_Found("error", need.where, f"in {name}: {why}", _PROGRAM_TODO, kind, of))
                found += self._leftovers(client, name, about, files)
                tools = {tool: path for tool in ("sh", "true") if (path := files.find(tool, _path_of(env)))}
            kept = _Kept(found=tuple(found), tools=tools)
            self.cache.put(inputs, kept)
        image = _Image(name, about["Id"], platform_, dict(kept.tools))
        return _Seen(list(kept.found), image)

    def _needs(self, image: str, path: str) -> list[tuple[_Need, tuple[str, str]]]:
        """The programs that commands name, and who names them, of those that run in this image."""
        experiment, base = self.experiment, str(self.experiment.base)
        named = experiment.sandbox.image
        found: dict[tuple[_Need, tuple[str, str]], None] = {}
        if any((task.image or named) == image for task in experiment.tasks):
            for variant in experiment.variants:
                own, of = variant.env.get("PATH") or path, ("variant", variant.id)
                if variant.agent.command is not None:
                    program = _program(variant.agent.command, base)
                    found[_Need("agent.command", program.word, _head_of(program.file), own), of] = None
                elif variant.id in self._entries:
                    head = self._entries[variant.id].decode("latin-1")
                    found[_Need("agent.artifact", "", head, own), of] = None
        graders = experiment.grading.image if experiment.grading else None
        for task, grader in _graders(experiment):
            if grader.command is not None and (graders or task.image or named) == image:
                program = _program(grader.command, base, grader.assets)
                need = _Need("grading.command", program.word, _head_of(program.file), path)
                of = ("task", task.id)
                if not program.file or _interpreter(need.head.encode("latin-1")):
                    found[need, of] = None
        return list(found)

    def _lack(self, files: _Files, need: _Need) -> str:
        """What the image does not have of what a program needs."""
        interpreter = _interpreter(need.head.encode("latin-1"))
        if not need.head:
            there = files.find(need.word, need.path)
            if there is None:
                return f"there is no program {need.word!r}"
            mode = files.mode(there)
            wanted = 0o001 if self.experiment.sandbox.user is None else 0o111
            if mode is None or not mode & wanted:
                return f"{need.word!r} is not executable for who runs it"
            interpreter = _interpreter(files.head(there))
        for word in interpreter:
            if files.find(word, need.path) is None:
                return (
                    f"{need.word or 'the entrypoint'} begins with #!{' '.join(interpreter)}, and {word!r} is not there"
                )
        return ""

    def _platforms(self, name: str, images: str, engines: str) -> Iterator[_Found]:
        if images != engines:
            what = f"it is for {images}, and the engine is {engines}: it is emulated at best"
            yield _Found("warning", "", what, "build or pull it for this machine", "image", name)
        for variant_id, manifest in self._manifests.items():
            if not _fits(manifest.platform, images):
                what = f"the artifact is for {manifest.platform}, and image {name} is {images}"
                yield _Found("error", "agent.artifact", what, "freeze a build for the image", "variant", variant_id)

    def _leftovers(self, client: Any, name: str, about: dict[str, Any], files: _Files) -> Iterator[_Found]:
        if not self.secrets:
            return
        if about["Size"] > _MOST_IMAGE_BYTES:
            what = f"it has {format_bytes(about['Size'])}: too many to look for files of the grading in its layers"
            yield _Found("warning", "", what, "make sure that none was ever copied into it", "image", name)
            return
        self.say(f"image {name}: looking through {format_bytes(about['Size'])} for files of the grading")
        try:
            matches = list(_search_layers(client.get_image(about["Id"]), self.secrets))
        except tarfile.TarError as error:
            what = f"its layers cannot be searched for files of the grading: {error}"
            yield _Found("warning", "", what, "make sure that none was ever copied into it", "image", name)
            return
        for path, secret, same in matches:
            if same and self._is_public(same):
                continue
            covered = (
                "" if files.mode(path) is not None else ", in a layer: a later one removes it, but not from the image"
            )
            if same:
                what, todo = f"{path} is {secret} of the grading{covered}", "build it without that file, in any layer"
                yield _Found("error", "", what, todo, "image", name)
            else:
                what, todo = f"{path} has the place of {secret} of the grading{covered}", "make sure that it is another"
                yield _Found("warning", "", what, todo, "image", name)


def _path_of(env: dict[str, str]) -> str:
    return env.get("PATH") or _ENGINES_PATH


_PROGRAM_TODO: Final = "put it into the image, or name one that is there"


@dataclass(frozen=True)
class _Image:
    """An image that is there."""

    name: str
    id: str
    platform: str
    tools: dict[str, str]  # where it has what smoke needs


@dataclass(frozen=True)
class _Seen:
    found: list[_Found]
    image: _Image | None = None


class _Need(NamedTuple):
    """A program that an image must have: a word, or what the first bytes of a file of ours ask for."""

    where: str
    word: str
    head: str
    path: str


def _head_of(file: str) -> str:
    if not file:
        return ""
    with contextlib.suppress(OSError), open(file, "rb") as start:
        return start.read(_HEAD_BYTES).decode("latin-1") or "\n"
    return "\n"  # it is ours, whatever it is


def _entry_head(archive: Path, manifest: Manifest) -> bytes:
    """The first bytes of the entrypoint. Of an archive that was verified: its headers are what its manifest says."""
    with tarfile.open(archive, "r:gz") as packed:
        for member in packed:
            if member.name == f"{FILES}/{manifest.entrypoint}":
                file = packed.extractfile(member)
                return file.read(_HEAD_BYTES) if file is not None else b""
    return b""


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
    for folder, folders, names in os.walk(top, onerror=fail):
        folders.sort()
        for name in sorted(names):
            info = os.lstat(path := os.path.join(folder, name))
            if stat.S_ISREG(info.st_mode):
                yield path, info.st_size


def _sha256_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Secrets:
    """The files that belong to the grading, by their content and by their place below a folder."""

    def __init__(self, experiment: Experiment | None) -> None:
        self.by_content: dict[tuple[int, str], str] = {}
        self.by_place: dict[str, str] = {}
        self.locked: list[str] = []  # what only its owner can read
        tops: dict[str, str] = {}
        if experiment is not None:
            base = str(experiment.base)
            tops = {grader.assets: "assets" for _, grader in _graders(experiment) if grader.assets is not None}
            references = (_joined(base, task.reference) for task in experiment.tasks)
            tops |= {top: "reference" for top in references if top is not None}
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


# --- what is in an image, without running it ---


class _Files:
    """The files of an image, through a container that is never started."""

    _LINK, _FOLDER = 1 << 27, 1 << 31  # as the engine, which is written in Go, says it

    def __init__(self, client: Any, image_id: str) -> None:
        self._client = client
        labels = {f"{LABEL}owner": name_of(os.getpid()), f"{LABEL}run": "preflight"}
        config = client.create_container_config(
            image=image_id,
            command=None,
            entrypoint=["/preflight"],
            labels=labels,
            host_config=client.create_host_config(network_mode="none"),
        )
        self._container = str(client.create_container_from_config(config)["Id"])

    def close(self) -> None:
        self._client.remove_container(self._container, v=True, force=True)

    def find(self, word: str, path: str) -> str | None:
        """The path of a program by its name: of a file that is there."""
        names = [word] if word.startswith("/") else [os.path.join("/", top, word) for top in path.split(":")]
        return next((name for name in names if self.mode(name) is not None), None)

    def mode(self, path: str) -> int | None:
        """The permissions of a file, through links; None if there is none."""
        for _ in range(8):
            about = self._about(path)
            if about is None or about["mode"] & self._FOLDER:
                return None
            if not about["mode"] & self._LINK:
                return int(about["mode"]) & 0o7777
            path = about["linkTarget"]
        return None

    def head(self, path: str) -> bytes:
        """Its first bytes, if it is small enough to be a script."""
        about = self._about(path)
        if about is not None and about["mode"] & self._LINK:
            path = about["linkTarget"]
            about = self._about(path)
        if about is None or about["size"] > _MOST_SCRIPT_BYTES:
            return b""
        chunks, _ = self._client.get_archive(self._container, path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as packed:
            member = packed.next()
            file = packed.extractfile(member) if member is not None and member.isreg() else None
            return file.read(_HEAD_BYTES) if file is not None else b""

    def _about(self, path: str) -> dict[str, Any] | None:
        client = self._client
        url = f"{client.base_url}/v{client.api_version}/containers/{self._container}/archive"
        answer = client.head(url, params={"path": path}, timeout=client.timeout)
        answer.close()
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        about: dict[str, Any] = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
        return about


class _Chunks(io.RawIOBase):
    """What an iterator gives, as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _search_layers(chunks: Iterator[bytes], secrets: _Secrets) -> Iterator[tuple[str, str, str]]:
    """Each file of a saved image that is one of the secrets: its path, which it is, and the digest if by content.

    An archive of layers, whatever the engine calls them: what in it is an archive is one.
    """
    with tarfile.open(fileobj=io.BufferedReader(_Chunks(iter(chunks)), _PIECE), mode="r|") as saved:
        for member in saved:
            file = saved.extractfile(member) if member.isreg() else None
            if file is None:
                continue
            start = file.peek(512)[:512] if isinstance(file, io.BufferedReader) else b""
            if start.startswith(_ZSTD):
                raise tarfile.ReadError(f"{member.name} is compressed with zstd")
            if start[257:262] == b"ustar" or start.startswith(b"\x1f\x8b"):
                mode: Literal["r|gz", "r|"] = "r|gz" if start.startswith(b"\x1f\x8b") else "r|"
                with tarfile.open(fileobj=file, mode=mode) as layer:
                    yield from _search_layer(layer, secrets)


def _search_layer(layer: tarfile.TarFile, secrets: _Secrets) -> Iterator[tuple[str, str, str]]:
    for member in layer:
        if not member.isreg():
            continue
        path = f"/{member.name.removeprefix('./').lstrip('/')}"
        if member.size in secrets.sizes:
            content = layer.extractfile(member)
            digest = hashlib.file_digest(content, "sha256").hexdigest() if content is not None else ""  # type: ignore[arg-type]
            if name := secrets.by_content.get((member.size, digest)):
                yield path, name, digest
                continue
        parts = path.split("/")
        for at in range(max(1, len(parts) - 8), len(parts) - 1):  # below a folder of the assets' name
            if name := secrets.by_place.get("/".join(parts[at:])):
                yield path, name, ""
                break


# --- smoke -----------------------------------------------------------------------------------------


class _Try(NamedTuple):
    """A trial that tells something: of an image, of a grader with nothing to grade, or with what must pass."""

    kind: Literal["start", "null", "reference"]
    task: Task
    variant: Variant
    image: str | None


class _Smoke:
    """Trials in a run's sandboxes, by a run's workers, in a folder of their own."""

    def __init__(self, full: _Full) -> None:
        self._full, self._say, self._cache = full, full.say, full.cache
        self._experiment, self._pickles = freeze_functions(full.experiment)
        self._ids = {name: image.id for name, image in full.images.items()}
        self._hidden = hidden_from_agents(self._experiment)
        self._null = shutil.which("true", path=base_environment()["PATH"])
        self._left_out: list[_Found] = []

    def look(self) -> list[_Found]:
        tries = [*self._starts(), *self._nulls(), *self._references()]
        if not tries:
            return []
        found = [*self._left_out]
        with tempfile.TemporaryDirectory(prefix="sandbox-exec-preflight-") as name:
            folder = Path(name)
            for digest, payload in self._pickles.items():
                (folder / FUNCTIONS).mkdir(exist_ok=True)
                (folder / FUNCTIONS / f"{digest}.pkl").write_bytes(payload)
            graders = Graders(self._experiment, folder, self._ids)
            dispatches: list[TrialDispatch] = []
            planned: list[tuple[_Try, dict[str, Any], list[TrialDispatch]]] = []
            for number, one in enumerate(tries):
                first = self._dispatch(number, one, graders, folder)
                inputs = self._inputs(one, first)
                kept = self._cache.get(inputs)
                if kept is not None:
                    found += kept.found
                    continue
                again = first.model_copy(update={"attempt": 2})  # the same in all that the grader sees
                planned.append((one, inputs, [first] if one.kind == "start" else [first, again]))
                dispatches += planned[-1][2]
            if dispatches:
                self._say(f"{len(dispatches)} trials of {len(planned)} kinds, {self._at_once()} at once")
                ended = self._run(dispatches, folder)
                for one, inputs, its in planned:
                    new = list(self._judge(one, its, [ended[each.slot.schedule_idx, each.attempt] for each in its]))
                    self._cache.put(inputs, _Kept(found=tuple(new)))
                    found += new
        counts = Counter[str](one.kind for one in tries)
        told = {"start": "start of an image", "null": "null agent", "reference": "reference solution"}
        self._full.checked.append(
            "smoke: " + ", ".join(f"{told[kind]} x {counts[kind]}" for kind in told if counts[kind])
        )
        return found

    # --- which ---

    def _starts(self) -> Iterator[_Try]:
        for image in self._full.images.values():
            shell = image.tools.get("sh")
            command = (shell, "-c", _WRITES) if shell else _INIT
            variant = Variant(id="preflight", agent=AgentSpec(command=command))
            yield _Try("start", Task(id=f"image {image.name}", input=None, image=image.name), variant, image.name)

    def _nulls(self) -> Iterator[_Try]:
        """One for each image and variant, of different tasks as far as there are; and one for each other grader."""
        by_image: dict[str | None, list[Task]] = {}
        graders: dict[tuple[Any, ...], Task] = {}
        for task, grader in _graders(self._experiment):
            by_image.setdefault(self._image_of(task), []).append(task)
            graders.setdefault((grader.command, grader.python, self._image_of(task)), task)
        pairs = {
            (tasks[idx % len(tasks)].id, variant.id): (tasks[idx % len(tasks)], variant)
            for tasks in by_image.values()
            for idx, variant in enumerate(self._experiment.variants)
        }
        covered = {task_id for task_id, _ in pairs}
        first = self._experiment.variants[0]
        pairs |= {(task.id, first.id): (task, first) for task in graders.values() if task.id not in covered}
        for task, variant in self._spread(list(pairs.values()), "pairs of image and variant"):
            yield _Try("null", task, variant, self._image_of(task))

    def _references(self) -> Iterator[_Try]:
        tasks = [task for task, _ in _graders(self._experiment) if task.reference is not None]
        grading = self._experiment.grading
        if tasks and grading is not None and grading.services == "keep":
            what = "reference solutions were not tried: files do not serve"
            self._left_out.append(_Found("note", "grading.services", what, "try one as a variant"))
            return
        for task in self._spread(tasks, "reference solutions"):
            yield _Try("reference", task, self._experiment.variants[0], self._image_of(task))

    def _spread(self, items: Sequence[T], what: str) -> Sequence[T]:
        """At most so many that preflight ends, from the first to the last."""
        if len(items) <= _MAX_TRIED:
            return items
        said = f"{_MAX_TRIED} of {len(items)} {what} were tried, from the first to the last"
        self._left_out.append(_Found("note", "smoke", said, "nothing, if the others are like them"))
        return [items[at * len(items) // _MAX_TRIED] for at in range(_MAX_TRIED)]

    def _image_of(self, task: Task) -> str | None:
        sandbox = self._experiment.sandbox
        return (task.image or sandbox.image) if sandbox.kind == "docker" else None

    # --- what is dispatched ---

    def _dispatch(self, number: int, one: _Try, graders: Graders, folder: Path) -> TrialDispatch:
        experiment, base, task = self._experiment, self._experiment.base, one.task
        repeat = int(one.kind == "reference")  # another trial than the null agent's, with a folder of its own
        slot = Slot(schedule_idx=number, variant_id=one.variant.id, task_id=task.id, repeat=repeat)
        limits = experiment.limits(task)
        answer: Path | None = None
        agent = one.variant.agent
        if one.kind == "start":
            limits = limits.model_copy(update={"timeout_s": _TRY_S})
        else:
            null = self._full.images[one.image].tools.get("true") if one.image is not None else self._null
            agent = AgentSpec(command=(null or "/null",))
            limits = resolve(limits, one.variant, base, self._hidden)[0]
            if one.kind == "reference" or null is None:
                answer = folder / f"answer-{number}.tar"
                workspace = base / task.workspace if task.workspace is not None else None
                if one.kind == "reference":
                    assert task.reference is not None
                    given = base / task.reference
                    workspace = given / "workspace" if (given / "workspace").is_dir() else workspace
                    _pack(answer, {"workspace": workspace, "out": given / "out"})
                else:
                    _pack(answer, {"workspace": workspace})
        trial_id = derive_trial_id(slot)
        return TrialDispatch(
            slot=slot,
            trial_id=trial_id,
            attempt=1,
            seed=derive_seed(experiment.seed, trial_id),
            task=task,
            variant=one.variant.model_copy(update={"agent": agent, "pass_env": ()}),
            limits=limits,
            base=base,
            out_limit=experiment.sandbox.out_limit,
            run_id="preflight",
            container=self._container(one.image),
            grader=graders.of(task) if one.kind != "start" else None,
            answer=answer,
        )

    def _container(self, image: str | None) -> ContainerSpec | None:
        if image is None:
            return None
        settings = self._experiment.sandbox
        return ContainerSpec(
            image=image,
            image_id=self._ids.get(image),
            user=settings.user,
            network=settings.network,
            read_only=settings.read_only,
            runtime=settings.runtime,
        )

    def _inputs(self, one: _Try, dispatch: TrialDispatch) -> dict[str, Any]:
        task, base = one.task, self._experiment.base
        paths = {name: getattr(task, name) for name in ("workspace", "reference")}
        return {
            "part": one.kind,
            "task": [task.id, task.input],
            "files": {name: path_digest(str(base / path)) for name, path in paths.items() if path is not None},
            "env": dict(dispatch.variant.env),
            "command": dispatch.variant.agent.command,
            "limits": dispatch.limits.model_dump(mode="json"),
            "container": dispatch.container.model_dump(mode="json") if dispatch.container else None,
            "grader": [dispatch.grader.digest, dispatch.grader.services, dispatch.grader.limits.model_dump(mode="json")]
            if dispatch.grader
            else None,
            "containment": self._full.containment,
            "uid": os.geteuid(),
            "seed": dispatch.seed,
        }

    # --- how it goes ---

    def _at_once(self) -> int:
        experiment = self._experiment
        budget = experiment.design.memory_budget or int(psutil.virtual_memory().total * _BUDGET_SHARE)
        most = max(experiment.sandbox.memory or 1, experiment.grading.memory or 1 if experiment.grading else 1)
        return max(1, min(AT_ONCE, experiment.design.max_concurrency, budget // most))

    def _run(self, dispatches: Sequence[TrialDispatch], folder: Path) -> dict[tuple[int, int], TrialCompletion | str]:
        """How each ended, by number and attempt: its completion, or why there is none."""
        specs = [dispatch.grader for dispatch in dispatches if dispatch.grader is not None]
        backend = LocalBackend(
            min(self._at_once(), len(dispatches)),
            limits={dispatch.limits for dispatch in dispatches if dispatch.container is None and not dispatch.answer},
            graders={(spec.limits, role_of(spec)) for spec in specs if spec.container is None},
            docker=bool(self._ids),
            containment=self._full.containment,
            preload=["cloudpickle"] if self._pickles else [],
        )
        ended: dict[tuple[int, int], TrialCompletion | str] = {}
        waiting, flying = deque(dispatches), 0
        try:
            while waiting or flying:
                while waiting and flying < backend.capacity():
                    dispatch = waiting.popleft()
                    place = attempt_folder(folder, dispatch.trial_id, dispatch.attempt)
                    backend.begin(backend.submit(dispatch, place))
                    flying += 1
                for event in backend.poll(None):
                    if isinstance(event, Finished | Lost):
                        read = read_completion(event.ticket.folder)
                        lost = event.reason if isinstance(event, Lost) else read.reason
                        ended[event.ticket.schedule_idx, event.ticket.attempt] = read.value or lost
                        flying -= 1
                        self._say(f"trial {len(ended)} of {len(dispatches)}: {event.ticket.trial_id}")
        except SandboxUnavailable as error:
            ended |= {(one.slot.schedule_idx, one.attempt): str(error) for one in waiting}
            missing = {(one.slot.schedule_idx, one.attempt) for one in dispatches} - ended.keys()
            ended |= dict.fromkeys(missing, str(error))
        finally:
            backend.close()
        return ended

    # --- what it means ---

    def _judge(
        self, one: _Try, dispatches: Sequence[TrialDispatch], ended: Sequence[TrialCompletion | str]
    ) -> Iterator[_Found]:
        kind, name = ("image", one.image or "") if one.kind == "start" else ("task", one.task.id)
        for completion in ended:
            if isinstance(completion, str):
                yield _Found(
                    "error", "smoke", f"a trial was lost: {completion}", "see `sandbox-exec doctor`", kind, name
                )
                return
            if completion.status is not Status.SUCCESS:
                yield self._failure(one, completion, kind, name)
                return
        grades = [completion.grade for completion in ended if isinstance(completion, TrialCompletion)]
        first = grades[0]
        if one.kind == "start" or first is None:
            return
        if one.kind == "null" and _passes(first):
            what = f"the grader passes an agent that does nothing (score {first.score:g})"
            yield _Found("error", "grading", what, "let it look for what only a solution leaves", kind, name)
        if one.kind == "reference" and not _passes(first):
            what = f"the grader does not pass the reference solution (score {first.score:g})"
            yield _Found("error", "reference", what, "put right the reference, or the grader", kind, name)
        yield from self._flakiness(one, [grade for grade in grades if grade is not None], kind, name)
        for dispatch, completion in zip(dispatches, ended, strict=True):
            usage = completion.grading.usage if isinstance(completion, TrialCompletion) and completion.grading else None
            most_s = dispatch.grader.limits.timeout_s if dispatch.grader else None
            if usage is not None and most_s is not None and usage.wall_s > most_s * _SLOW_SHARE:
                what = f"the grader took more than half of its {most_s:g} s, alone on the machine"
                yield _Found("warning", "grading.timeout_s", what, "raise it", kind, name)
                return

    def _flakiness(self, one: _Try, grades: Sequence[Grade], kind: str, name: str) -> Iterator[_Found]:
        first, last = grades[0], grades[-1]
        of = "an agent that does nothing" if one.kind == "null" else "the reference solution"
        todo = "take chance, time and order out of the grader; it gets its seed in task.json"
        if first.passed != last.passed:
            what = f"the grader is flaky: of {of}, it said passed {first.passed}, then {last.passed}"
            yield _Found("error", "grading", what, todo, kind, name)
        elif first.score != last.score:
            what = f"the grader is flaky: of {of}, it said score {first.score:g}, then {last.score:g}"
            yield _Found("warning", "grading", what, todo, kind, name)

    def _failure(self, one: _Try, completion: TrialCompletion, kind: str, name: str) -> _Found:
        error = completion.error
        said = f"{error.type}: {error.message}" if error is not None else completion.status.value
        if one.kind == "start":
            return self._start_failure(one, completion, said)
        if completion.status is Status.GRADE_ERROR:
            of = "an agent that did nothing" if one.kind == "null" else "the reference solution"
            what = f"the grader fails on {of}: {said}"
            return _Found("error", "grading", what, "a grader gives every answer a score, 0 too", kind, name)
        what = f"a trial with an agent that does nothing ended as {completion.status}: {said}"
        return _Found("error", "smoke", what, "see what the message says", kind, name)

    def _start_failure(self, one: _Try, completion: TrialCompletion, said: str) -> _Found:
        name = one.image or ""
        if one.variant.agent.command == _INIT and (completion.status is Status.AGENT_ERROR or _INIT[0] in said):
            what = "whether it starts could not be tried: it has no shell, and the engine's init is elsewhere"
            return _Found("note", "", what, "nothing, if trials run", "image", name)
        if completion.status is Status.AGENT_ERROR:
            what = "/workspace or /out cannot be written by who the agent runs as"
            return _Found("error", "", what, "see sandbox.user, and the engine's user namespaces", "image", name)
        return _Found("error", "", f"it does not start and stop: {said}", "see what the message says", "image", name)


def _passes(grade: Grade) -> bool:
    """As the grader says; where it says nothing, by the score."""
    return grade.passed if grade.passed is not None else grade.score >= _PASS


def _pack(target: Path, tops: dict[str, Path | None]) -> None:
    """An answer, as the grading phase keeps it: workspace/ and out/."""
    with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
        for name, top in tops.items():
            if top is None or not top.exists():
                continue
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                below = path.relative_to(top) if path != top else Path(top.name)
                info = archive.gettarinfo(path, f"{name}/{below}")
                info.uid = info.gid = info.mtime = 0
                info.uname = info.gname = ""
                if info.islnk():  # of a file that is in it already: as another copy
                    info.type, info.size = tarfile.REGTYPE, path.stat().st_size
                if info.isreg():
                    with open(path, "rb") as file:
                        archive.addfile(info, file)
                elif info.isdir() or (info.issym() and stays_inside(info.linkname, len(below.parts) - 1)):
                    archive.addfile(info)


# --- what is kept ----------------------------------------------------------------------------------


class _Kept(Contract):
    """What was found of an image or a trial, none of it an error."""

    found: tuple[_Found, ...] = ()
    tools: Mapping[str, str] = Field(default_factory=dict, description="Where an image has them.")


@dataclass
class _Cache:
    """What was in order, in a file each, by the digest of what went in. One that cannot be read was never there."""

    folder: Path | None
    hits: int = 0
    _version: str = field(default_factory=lambda: _version())

    def get(self, inputs: dict[str, Any]) -> _Kept | None:
        if self.folder is None:
            return None
        file = self._file(inputs)
        try:
            if time.time() - file.stat().st_mtime > KEPT_S:
                return None
            kept = _Kept.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None
        self.hits += 1
        return kept

    def put(self, inputs: dict[str, Any], kept: _Kept) -> None:
        if self.folder is None or any(one.level == "error" for one in kept.found):
            return
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for old in self.folder.glob("*.json"):
                if time.time() - old.stat().st_mtime > KEPT_S:
                    old.unlink()
            write_atomic(self._file(inputs), kept.model_dump_json().encode())

    def _file(self, inputs: dict[str, Any]) -> Path:
        assert self.folder is not None
        digest = json_digest([RECIPE, self._version, inputs])
        return self.folder / f"{digest.removeprefix('sha256:')}.json"


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("sandbox-exec")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a folder
