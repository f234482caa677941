"""What belongs to the grading and is where agents see it, by its path. By its content: see files.py and images.py."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import NamedTuple

from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.preflight.findings import Found, Level
from sandbox_exec.preflight.programs import graders_of, shown_to


def leaks(experiment: Experiment) -> Iterator[Found]:
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
