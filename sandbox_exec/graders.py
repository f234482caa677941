"""The graders of an experiment: what runs, on which assets, with which limits; and what agents must not see of them."""

from __future__ import annotations

import functools
import glob
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sandbox_exec.contracts import ContainerSpec, GraderSpec, Limits, Task
from sandbox_exec.contracts.experiment import Experiment, GradingSettings
from sandbox_exec.experiment import json_digest, path_digest
from sandbox_exec.trial.launches import role_of
from sandbox_exec.units import MIB

FUNCTIONS: Final = "functions"  # in the run's folder: the pickled functions of agents and graders that are functions
_OWN_DISK: Final = 64 * MIB  # what a grader may write of its own, beside the copies of what it grades
_MANY: Final = 16  # of one folder: then the folder is hidden, and not each of them


class Graders:
    """The graders of a run, by task. `images`: what each image was at the run's start."""

    def __init__(self, experiment: Experiment, folder: Path, images: Mapping[str, str]) -> None:
        self._experiment, self._folder, self._images = experiment, folder, images
        self._cached = functools.lru_cache(maxsize=256)(self._make)  # most tasks share one, or go by in order

    def of(self, task: Task) -> GraderSpec | None:
        settings = self._experiment.grading_of(task)
        if settings is None:
            return None
        return self._cached(settings, task.image)

    def _make(self, settings: GradingSettings, image: str | None) -> GraderSpec:
        experiment = self._experiment
        assets = _assets(experiment, settings)
        command, shown = _resolve(settings, experiment.base, assets)
        function = settings.function if isinstance(settings.function, str) else None
        container = self._container(settings, image)
        said = {
            "command": settings.command,
            "python": settings.python,
            "function": function,
            "files": [path_digest(str(path)) for path in shown],
            "assets": path_digest(str(assets)) if assets is not None else None,
            "image": container.image_id if container is not None else None,
            "in": settings.in_,
            "writable": settings.writable,
            "services": settings.services,
        }
        return GraderSpec(
            command=command,
            python=settings.python,
            payload=self._folder / FUNCTIONS / f"{function}.pkl" if function else None,
            assets=assets,
            limits=_limits(experiment, settings, assets, shown),
            in_=settings.in_,
            writable=settings.writable,
            services=settings.services,
            grade_on=settings.grade_on,
            container=container,
            digest=json_digest(said),
        )

    def _container(self, settings: GradingSettings, image: str | None) -> ContainerSpec | None:
        sandbox = self._experiment.sandbox
        if not _is_in_container(self._experiment, settings):
            return None
        name = settings.image or image or sandbox.image or ""
        same = settings.in_ == "same"  # then as root, who was nobody in the agent phase, and the root can be written
        return ContainerSpec(
            image=name,
            image_id=self._images.get(name),
            runtime=sandbox.runtime,
            user="0:0" if same else None,
            read_only=not same,
        )


def images_of(experiment: Experiment) -> set[str]:
    """The names of all images that a run of it uses."""
    sandbox = experiment.sandbox
    if sandbox.kind != "docker":
        return set()
    names = {task.image or sandbox.image or "" for task in experiment.tasks}
    gradings = filter(None, [experiment.grading])
    return names | {grading.image for grading in gradings if grading.image is not None}


def limits_of_graders(experiment: Experiment) -> list[tuple[Limits, str]]:
    """The limits of all graders in the process sandbox, with their roles: so that they can be made ready."""
    found: dict[tuple[Limits, str], None] = {}
    for settings in dict.fromkeys(map(experiment.grading_of, experiment.tasks)):
        if settings is not None and not _is_in_container(experiment, settings):
            assets = _assets(experiment, settings)
            shown = _resolve(settings, experiment.base, assets)[1]
            found[_limits(experiment, settings, assets, shown), role_of(settings)] = None
    return list(found)


def hidden_from_agents(experiment: Experiment) -> tuple[Path, ...]:
    """Every file and folder that belongs to the grading: no agent may see one, whatever else it is shown."""
    paths: set[Path] = set()
    for task in experiment.tasks:
        settings = experiment.grading_of(task)
        if settings is not None:
            assets = _assets(experiment, settings)
            paths.update([assets] if assets is not None else [])
            own = _resolve(settings, experiment.base, assets)[1]
            paths.update(own)
            # What an import by anybody else has left: the same code.
            paths.update(found for path in own for found in path.parent.glob(f"__pycache__/{glob.escape(path.stem)}.*"))
        if task.reference is not None:
            paths.add(experiment.base / task.reference)
    parents = Counter(path.parent for path in paths)
    crowded = {parent for parent, count in parents.items() if count > _MANY and experiment.base != parent}
    return tuple(sorted({path.parent if path.parent in crowded else path for path in paths}))


def _is_in_container(experiment: Experiment, settings: GradingSettings) -> bool:
    """Functions are graded in the process sandbox, wherever the agent ran: an image need not have our Python."""
    return experiment.sandbox.kind == "docker" and settings.command is not None


def _assets(experiment: Experiment, settings: GradingSettings) -> Path | None:
    return experiment.base / settings.assets if settings.assets is not None else None


def _resolve(
    settings: GradingSettings, base: Path, assets: Path | None
) -> tuple[tuple[str, ...] | None, tuple[Path, ...]]:
    """The command with the paths that the grader sees, and the files beside the experiment that it must be shown."""
    if settings.python is not None:
        top = settings.python.partition(":")[0].split(".")[0]
        return None, tuple(path for path in (base / f"{top}.py", base / top) if path.exists())
    words: list[str] = []
    shown: list[Path] = []
    for word in settings.command or ():
        plain = bool(word) and not word.startswith(("-", "/"))
        if plain and assets is not None and os.path.isfile(assets / word):
            words.append(f"/grading/{word}")
        elif plain and os.path.isfile(base / word):
            words.append(str(base / word))
            shown.append(base / word)
        else:
            words.append(word)
    return tuple(words) if settings.command is not None else None, tuple(shown)


def _limits(experiment: Experiment, settings: GradingSettings, assets: Path | None, shown: tuple[Path, ...]) -> Limits:
    agents = experiment.sandbox.limits(experiment.tasks[0], experiment.base)
    fields: dict[str, Any] = {
        "timeout_s": settings.timeout_s,
        "memory": settings.memory,
        "pids": settings.pids,
        "cpus": agents.cpus,
        "disk": agents.disk + _OWN_DISK + (_size_of(assets) if assets is not None else 0),
        "files": agents.files * 2,
        "require": agents.require,
        "readable": [*shown],
    }
    return Limits(**fields)


def _size_of(top: Path) -> int:
    if top.is_file():
        return top.stat().st_size + 4096
    return sum(path.lstat().st_size + 4096 for path in top.rglob("*"))
