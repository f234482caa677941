"""What commands name: of agents and graders, the programs, scripts and modules that a sandbox must have."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sandbox_exec.contracts import Limits, Task, Variant
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.dispatching import resolve
from sandbox_exec.preflight.findings import Found
from sandbox_exec.sandbox.process import base_environment

HEAD_BYTES: Final = 256  # of a script: what the kernel looks at
_SCRIPTS: Final = (".py", ".sh", ".pl", ".rb", ".js", ".R", ".jl", ".lua")


class Grader(NamedTuple):
    """What a task is graded by, before anything of it is looked at."""

    command: tuple[str, ...] | None
    python: str | None
    assets: str | None


def graders_of(experiment: Experiment) -> Iterator[tuple[Task, Grader]]:
    """As `Experiment.grading_of`, without a model for each of ten thousand tasks."""
    ours, base = experiment.grading, str(experiment.base)
    shared = Grader(ours.command, ours.python, _joined(base, ours.assets)) if ours else None
    nothing = Grader(None, None, None)
    for task in experiment.tasks:
        own = task.grading
        if own is not None:
            rest = shared or nothing
            by = rest if own.command is None and own.python is None else own
            yield task, Grader(by.command, by.python, _joined(base, own.assets) or rest.assets)
        elif shared is not None:
            yield task, shared


def _joined(base: str, path: Path | None) -> str | None:
    return os.path.join(base, path) if path is not None else None


def program_of(command: Sequence[str], base: str, assets: str | None = None) -> tuple[str, str]:
    """The first word, and where that is on this machine; empty for what the sandbox must have."""
    word = command[0]
    if word and not word.startswith(("-", "/")):
        for folder in (assets, base):
            if folder is not None and os.path.isfile(os.path.join(folder, word)):
                return word, os.path.join(folder, word)
    if word.startswith("/grading/") and assets is not None:
        return word, os.path.join(assets, word.removeprefix("/grading/"))
    return word, word if word.startswith(f"{base}/") else ""


def shown_to(variant: Variant, base: Path) -> tuple[Path, ...]:
    """Files of ours that its command or module shows to the agent."""
    return resolve(Limits(), variant, base)[0].readable


def programs(experiment: Experiment) -> Iterator[Found]:
    """In the process sandbox, all of it can be seen from here; of an image, the files that are ours."""
    base, in_process = str(experiment.base), experiment.sandbox.kind == "process"
    places = dict.fromkeys(task.workspace for task in experiment.tasks if task.workspace is not None)
    workspaces = tuple(os.path.join(base, place) for place in places)
    for variant in experiment.variants:
        agent, path = variant.agent, variant.env.get("PATH") or base_environment()["PATH"]
        if agent.python is not None and (why := _module_fault(agent.python, base)):
            yield Found("error", "agent.python", why, "put the module beside the experiment", "variant", variant.id)
        if agent.command is not None and (
            why := _program_fault(program_of(agent.command, base), path, in_process, workspaces)
        ):
            yield Found("error", "agent.command", why, "name a program that is there", "variant", variant.id)
        yield from _locked(variant, experiment.base)
        for word in _missing_scripts(agent.command or (), (base, *workspaces)):
            what = f"{word!r} is neither beside the experiment nor in a task's workspace"
            yield Found("warning", "agent.command", what, "put it there", "variant", variant.id)
    look = functools.cache(_program_fault)
    for task, grader in graders_of(experiment):
        if grader.python is not None and (why := _module_fault(grader.python, base)):
            yield Found("error", "grading.python", why, "put the module beside the experiment", "task", task.id)
        if grader.command is None:
            continue
        if why := look(program_of(grader.command, base, grader.assets), base_environment()["PATH"], in_process):
            todo = "name a program that is there, or put one into the assets"
            yield Found("error", "grading.command", why, todo, "task", task.id)
        for word in _missing_scripts(grader.command, (grader.assets or base, base)):
            what = f"{word!r} is neither in the assets nor beside the experiment"
            yield Found("error", "grading.command", what, "put it into the assets", "task", task.id)


def _locked(variant: Variant, base: Path) -> Iterator[Found]:
    """Files that the agent is shown, and may not read: root's trials run as nobody."""
    for file in shown_to(variant, base) if os.geteuid() == 0 else ():
        if file.is_file() and not file.stat().st_mode & 0o004:
            what = f"{file} can be read by its owner only, and agents are none of your users"
            yield Found("error", "agent", what, "chmod o+r it", "variant", variant.id)


def _missing_scripts(command: Sequence[str], tops: Iterable[str]) -> Iterator[str]:
    """Further words that can only be files, and are none."""
    for word in command[1:]:
        is_file = word.endswith(_SCRIPTS) and not word.startswith(("-", "/")) and not any(map(str.isspace, word))
        if is_file and not any(os.path.isfile(os.path.join(top, word)) for top in tops):
            yield word


def _program_fault(program: tuple[str, str], path: str, in_process: bool, workspaces: Iterable[str] = ()) -> str:
    word, file = program
    if file:
        return _file_fault(file, in_process)
    if "/" in word and not word.startswith("/"):  # from where it starts
        there = [one for top in workspaces if os.path.isfile(one := os.path.join(top, word))]
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
    interpreter = interpreter_of(file)
    if in_process and interpreter and not os.path.exists(interpreter[0]):
        return f"{file} begins with #!{interpreter[0]}, which is not there"
    return ""


def interpreter_of(file: str) -> tuple[str, ...]:
    with contextlib.suppress(OSError), open(file, "rb") as start:
        return interpreter_in(start.read(HEAD_BYTES))
    return ()


def interpreter_in(head: bytes) -> tuple[str, ...]:
    """What a script is run by, and for `env` what that runs; empty for what is no script."""
    words = head[2:].split(b"\n")[0].decode(errors="replace").split() if head.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        return (words[0], *[word for word in words[1:] if not word.startswith("-") and "=" not in word][:1])
    return tuple(words[:1])


@functools.lru_cache(maxsize=64)
def _module_fault(entry: str, base: str) -> str:
    module = entry.partition(":")[0]
    top, *below = module.split(".")
    if os.path.isfile(os.path.join(base, f"{top}.py")):
        return ""
    if os.path.isdir(folder := os.path.join(base, top)):
        path = os.path.join(folder, *below)
        there = any(map(os.path.exists, (path + ".py", path)))
        return "" if there else f"there is no module {module} in {folder}"
    with contextlib.suppress(ValueError):  # a module without a spec, such as __main__
        if importlib.util.find_spec(top) is not None:
            return ""
    return f"there is no module {top}, neither beside the experiment nor on the path"
