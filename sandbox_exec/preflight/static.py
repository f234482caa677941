"""What an experiment says, against itself, its files, the environment and the machine. Starts nothing, opens little."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from sandbox_exec.artifacts import read_manifest
from sandbox_exec.containment import require
from sandbox_exec.contracts import Rung
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.preflight.files import manifests
from sandbox_exec.preflight.findings import Found, Level
from sandbox_exec.preflight.programs import graders_of, programs, shown_to
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.units import format_bytes, processors

_BUDGET_SHARE: Final = 0.8  # as the coordinator takes it, where the design names no budget
_ROOM_SHARE: Final = 0.01  # of all that trials may write: few write a hundredth of it
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}  # the rest: the same names
_GIVEN_ENV: Final = frozenset(("PATH", "HOME", "LANG"))


@dataclass(frozen=True)
class Machine:
    """What the ceilings of an experiment are held against."""

    memory_bytes: int
    cpus: int
    architecture: str  # as images name it
    pids: int

    @classmethod
    def here(cls) -> Machine:
        machine, pids = platform.machine(), [1 << 22]
        for name in ("pid_max", "threads-max"):
            with contextlib.suppress(OSError, ValueError):
                pids.append(int(Path("/proc/sys/kernel", name).read_text()))
        return cls(psutil.virtual_memory().total, processors(), _MACHINES.get(machine, machine), min(pids))


def slots_of(experiment: Experiment) -> int:
    return len(experiment.tasks) * len(experiment.variants) * experiment.design.repeats


def budget_of(experiment: Experiment, memory_bytes: int) -> int:
    """The memory of all trials at once, on a machine with so much."""
    return experiment.design.memory_budget or int(memory_bytes * _BUDGET_SHARE)


def static(
    experiment: Experiment, machine: Machine, runs: Path, workers: int | None, containment: str
) -> Iterator[Found]:
    at_once = workers or experiment.design.max_concurrency
    yield from _paths(experiment)
    yield from _artifacts(experiment, machine)
    yield from programs(experiment)
    yield from _ceilings(experiment, machine, at_once)
    yield from _names(experiment)
    yield from _leaks(experiment)
    yield from _secrets(experiment)
    yield from _room(experiment, runs, at_once)
    yield from _kinds(experiment)
    yield from _grading(experiment)
    yield from _containment(experiment, containment)


def _paths(experiment: Experiment) -> Iterator[Found]:
    base = str(experiment.base)
    look = functools.cache(_absence)
    for task in experiment.tasks:
        named = [("workspace", task.workspace), ("reference", task.reference)]
        named += [("grading.assets", task.grading.assets)] if task.grading is not None else []
        for where, path in named:
            if path is not None and (why := look(os.path.join(base, path))):
                yield Found("error", where, why, "put it there, or name another", "task", task.id)
        if task.reference is None or look(top := os.path.join(base, task.reference)):
            continue
        if not any(os.path.isdir(f"{top}/{name}") for name in ("workspace", "out")):
            what = f"{top} holds neither workspace/ nor out/"
            yield Found("error", "reference", what, "put into them what a perfect agent leaves", "task", task.id)
    for variant in experiment.variants:
        path = variant.agent.artifact
        if path is not None and (why := look(os.path.join(base, path))):
            yield Found("error", "agent.artifact", why, "make it with `sandbox-exec freeze`", "variant", variant.id)
    grading = experiment.grading
    if grading is not None and grading.assets is not None and (why := look(os.path.join(base, grading.assets))):
        yield Found("error", "grading.assets", why, "put it there, or name another")
    for path in experiment.limits(experiment.tasks[0]).readable:
        if why := look(str(path)):
            yield Found("warning", "sandbox.readable", why, "put it there: agents do without it")


def _absence(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        return f"cannot find {path}: {getattr(error, 'strerror', None) or error}"
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        return f"{path} may not be read by this user"
    return ""


def _artifacts(experiment: Experiment, machine: Machine) -> Iterator[Found]:
    here = f"linux/{machine.architecture}"
    for variant, manifest in manifests(experiment, read_manifest):
        if isinstance(manifest, str):
            todo = "make it again with `sandbox-exec freeze`"
            yield Found("error", "agent.artifact", manifest, todo, "variant", variant.id)
        elif experiment.sandbox.kind == "process" and manifest.platform not in ("any", here):
            what = f"the artifact is for {manifest.platform}, and this machine is {here}"
            yield Found("error", "agent.artifact", what, "freeze a build for this machine", "variant", variant.id)


def _ceilings(experiment: Experiment, machine: Machine, at_once: int) -> Iterator[Found]:
    sandbox, grading = experiment.sandbox, experiment.grading
    has = format_bytes(machine.memory_bytes)
    for where, memory in (("sandbox.memory", sandbox.memory), ("grading.memory", grading.memory if grading else 0)):
        if memory is None:
            todo = "name one: without it, one trial can take what the machine has"
            yield Found("warning", where, "there is no memory ceiling", todo)
        elif memory > machine.memory_bytes:
            what = f"{format_bytes(memory)} is more than this machine has, {has}"
            yield Found("error", where, what, "lower it, or use a larger machine")
    budget, at_most = budget_of(experiment, machine.memory_bytes), min(at_once, slots_of(experiment))
    if budget > machine.memory_bytes:
        what = f"{format_bytes(budget)} is more than this machine has, {has}"
        yield Found("warning", "design.memory_budget", what, "lower it: trials would be killed for one another")
    memory = sandbox.memory or 0
    if budget < memory <= machine.memory_bytes:
        what = f"a trial may use {format_bytes(memory)}, and all together only {format_bytes(budget)}"
        yield Found("error", "sandbox.memory", what, "lower it, or raise design.memory_budget")
    elif memory * at_most > budget:
        what = f"{at_once} trials of {format_bytes(memory)} are more than the budget of {format_bytes(budget)}"
        todo = f"lower sandbox.memory, or know that {budget // memory} run at once"
        yield Found("warning", "design.max_concurrency", what, todo)
    if sandbox.cpus is not None:
        if sandbox.cpus > machine.cpus:
            what = f"{sandbox.cpus:g} processors, and this machine gives {machine.cpus}"
            yield Found("warning", "sandbox.cpus", what, "lower it: trials get what there is")
        elif sandbox.cpus * at_most > machine.cpus:
            what = f"{at_once} trials of {sandbox.cpus:g} processors share {machine.cpus}: how far each gets will vary"
            yield Found("note", "sandbox.cpus", what, f"lower it or max_concurrency to {machine.cpus} in all")
    for where, pids in (("sandbox.pids", sandbox.pids), ("grading.pids", grading.pids if grading else 0)):
        if pids is not None and pids * at_most > machine.pids:
            what = f"{at_once} trials of {pids} processes are more than this machine can have, {machine.pids}"
            yield Found("warning", where, what, "lower it, or raise kernel.pid_max")
    for task in experiment.tasks:
        if not (task.protocol.timeout_s or sandbox.timeout_s):
            what = "there is none: an agent that hangs hangs for ever"
            yield Found("warning", "timeout_s", what, "name sandbox.timeout_s", "task", task.id)


def _names(experiment: Experiment) -> Iterator[Found]:
    yield from _nearly_the_same([task.id for task in experiment.tasks], "task", "id")
    yield from _nearly_the_same([variant.id for variant in experiment.variants], "variant", "id")
    chains = Counter(task.chain for task in experiment.tasks if task.chain is not None)
    yield from _nearly_the_same(list(chains), "chain", "")
    for chain, count in chains.items():
        if count == 1 and len(experiment.tasks) > 1:
            todo = "give the tasks that must not run at once the same chain"
            yield Found("note", "", "only one task is in it, so it does nothing", todo, "chain", chain)
    for variant in experiment.variants:
        names = [*variant.env, *variant.pass_env]
        for name in sorted(_GIVEN_ENV.intersection(names)):
            what = f"{name} takes the place of the one that every sandbox has"
            where = f"env.{name}" if name in variant.env else "pass_env"
            yield Found("note", where, what, "leave it out, unless you mean it", "variant", variant.id)
        for name in sorted(name for name, count in Counter(names).items() if count > 1):
            yield Found("note", "pass_env", f"{name} is there twice", "name it once", "variant", variant.id)


def _nearly_the_same(names: Sequence[str], kind: str, where: str) -> Iterator[Found]:
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            what = f"differs from {other!r} only in case or spaces: people will take one for the other"
            yield Found("warning", where, what, "rename one of them", kind, name)


def _leaks(experiment: Experiment) -> Iterator[Found]:
    hidden, base = _Hidden(experiment), str(experiment.base)
    if not hidden.all:
        return
    for task in experiment.tasks:
        if task.workspace is None:
            continue
        top = hidden.real(os.path.join(base, task.workspace))
        if (found := hidden.holders.get(top)) is not None:
            what = f"agents get {top}, which holds {found.what} ({found.path})"
            yield Found("error", "workspace", what, "move that out of it", "task", task.id)
    for path in experiment.limits(experiment.tasks[0]).readable:
        top = hidden.real(str(path))
        around = next((one for one in hidden.all if _is_in(top, one.path)), None)
        shown = around or hidden.holders.get(top)
        if shown is None:
            continue
        level: Level = "error"
        what = f"agents may read {path}, which holds {shown.what} ({shown.path})"
        if around is None and experiment.sandbox.kind != "docker":
            level, what = "warning", f"{what}: that is hidden from them, but not its name"
        yield Found(level, "sandbox.readable", what, "name only what agents need, or move that out of it")
    for variant in experiment.variants:
        where = "agent.command" if variant.agent.command is not None else "agent.python"
        for path in shown_to(variant, experiment.base):
            top = hidden.real(str(path))
            found = next((one for one in hidden.all if _is_in(top, one.path) or _is_in(one.path, top)), None)
            if found is not None:
                what = f"the agent is shown {top}, which belongs to {found.what}"
                todo = "keep agents and graders in different files"
                yield Found(found.level, where, what, todo, "variant", variant.id)


def _is_in(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top.rstrip('/')}/")


class _Secret(NamedTuple):
    path: str
    what: str
    level: Level


class _Hidden:
    """All that belongs to the grading, by its real path, in the order of those."""

    def __init__(self, experiment: Experiment) -> None:
        self._folder = functools.cache(os.path.realpath)
        base = str(experiment.base)
        found: dict[str, tuple[str, Level]] = {}
        for task in experiment.tasks:
            if task.reference is not None:
                found[self.real(os.path.join(base, task.reference))] = "the reference solution", "error"
        programs: set[str] = set()
        for _, grader in graders_of(experiment):
            if grader.assets is not None:
                found[self.real(grader.assets)] = "the grading assets", "error"
            if grader.python is not None:
                top = grader.python.partition(":")[0].partition(".")[0]
                programs |= {f"{top}.py", top}
            programs.update(grader.command or ())
        for word in programs:
            path = os.path.join(base, word)
            if word and not word.startswith("-") and os.path.exists(path):
                found.setdefault(self.real(path), ("the grader's program", "warning"))
        self.all = [_Secret(path, *about) for path, about in sorted(found.items())]
        self.holders: dict[str, _Secret] = {}  # each of them and each folder that one is in, with the first that is
        for one in self.all:
            path = one.path
            while path not in self.holders:
                self.holders[path] = one
                path = os.path.dirname(path)

    def real(self, path: str) -> str:
        """`os.path.realpath` for many paths in few folders."""
        path = os.path.normpath(path)
        if os.path.islink(path):
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        return os.path.join(self._folder(folder), name)


def _secrets(experiment: Experiment) -> Iterator[Found]:
    for variant in experiment.variants:
        for name in variant.pass_env:
            if name not in os.environ:
                what = f"names {name}, which your environment does not have"
                yield Found("error", "pass_env", what, f"export {name}, or leave it out", "variant", variant.id)
            elif not os.environ[name]:
                what = f"names {name}, which is empty in your environment"
                yield Found("warning", "pass_env", what, f"give {name} a value", "variant", variant.id)


def _room(experiment: Experiment, runs: Path, at_once: int) -> Iterator[Found]:
    there = Path(os.path.abspath(runs))
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        yield Found("error", "--runs", f"{there} may not be written by this user", "name another folder")
        return
    free = shutil.disk_usage(there).free
    # What is kept of /out, and for the grading all that was graded.
    one = experiment.sandbox.out_limit * (2 if experiment.grading else 1)
    slots = slots_of(experiment)
    sensible = max(one * min(at_once, slots), int(one * slots * _ROOM_SHARE))
    todo = "free some, lower sandbox.out_limit, or name another folder with --runs"
    if free < one:
        what = f"{format_bytes(free)} are free in {there}, and one trial may keep {format_bytes(one)}"
        yield Found("error", "sandbox.out_limit", what, todo)
    elif free < sensible:
        what = f"{format_bytes(free)} are free in {there}, and {slots} trials may keep {format_bytes(one * slots)}"
        yield Found("warning", "sandbox.out_limit", what, todo)


def _kinds(experiment: Experiment) -> Iterator[Found]:
    """What the chosen sandbox cannot do, and what this version does not."""
    sandbox, grading = experiment.sandbox, experiment.grading
    in_docker = sandbox.kind == "docker"
    for variant in experiment.variants:
        if in_docker and (variant.agent.python is not None or variant.agent.function is not None):
            what, todo = "a function runs in the process sandbox only", "for docker: command, artifact"
            yield Found("error", "agent", what, todo, "variant", variant.id)
        if variant.lane is not None and variant.lane not in experiment.lanes:
            what = f"nothing is said of lane {variant.lane!r}: it only waits when its provider turns a trial away"
            yield Found("note", "lane", what, "name its limits in lanes", "variant", variant.id)
    order = experiment.design.order
    for task in experiment.tasks if order in ("sequential", "adaptive") else ():
        if task.protocol.priority or task.protocol.deadline_s is not None:
            what = f"a priority or a deadline has no effect with order: {order}"
            yield Found("note", "protocol", what, "set design.order: priority, or leave it out", "task", task.id)
    images = [("image", task.image, "task", task.id) for task in experiment.tasks]
    images += [("sandbox.image", sandbox.image, "", ""), ("grading.image", grading.image if grading else None, "", "")]
    for where, image, kind, name in images if not in_docker else ():
        if image is not None:
            what = "an image has no effect in the process sandbox"
            yield Found("warning", where, what, "set sandbox.kind: docker, or leave it out", kind, name)
    if in_docker and grading is not None and grading.image is not None and grading.in_ == "same":
        what = "the grader runs in what the agent left, and not in another image"
        yield Found("warning", "grading.image", what, "leave it out, or set grading.in: fresh")


def _grading(experiment: Experiment) -> Iterator[Found]:
    graded = {task.id for task, _ in graders_of(experiment)}
    if not graded:
        what = "nothing is graded: a trial succeeds when its agent ends well"
        yield Found("note", "grading", what, "name a grader, if there is something to measure")
        return
    for task in experiment.tasks:
        if task.id not in graded:
            yield Found("warning", "grading", "it has no grader, and others have", "name one", "task", task.id)
    if experiment.grading is not None and experiment.grading.in_ == "same":
        what = "the grader runs on the system that the agent left, with any program or library that it put there"
        todo = "use `fresh` where /workspace and /out say enough; see docs/threat-model.md"
        yield Found("warning", "grading.in", what, todo)


def _containment(experiment: Experiment, wanted: str) -> Iterator[Found]:
    if experiment.sandbox.kind != "process":
        return
    graded = any(True for _ in graders_of(experiment))
    if not graded and experiment.sandbox.require is None and wanted == "auto":
        return  # nothing depends on it: not worth the fifth of a second
    try:
        found = chosen(wanted)
        require(found, experiment.limits(experiment.tasks[0]))
    except SandboxUnavailable as error:
        yield Found("error", "sandbox.require", str(error), "see `sandbox-exec doctor`")
        return
    grading = experiment.grading
    if grading is not None and grading.services == "keep" and found.rung is not Rung.ROOT_NAMESPACES:
        what = f"a service can be graded on {Rung.ROOT_NAMESPACES} and in docker only; here is {found.rung}"
        yield Found("error", "grading.services", what, "run as root, or use docker")
    if graded and not found.rung.namespaced:
        what = f"on {found.rung}, agents see your files: they can read the grading assets, and the grader"
        todo = "use a machine with namespaces (see `sandbox-exec doctor`), or docker"
        yield Found("warning", "sandbox.kind", what, todo)
