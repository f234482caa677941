"""From a slot to the message that a worker gets: limits, images, artifacts, graders and answers, resolved."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sandbox_exec.artifacts import Unpacked
from sandbox_exec.contracts import (
    Answer,
    ContainerSpec,
    Limits,
    Slot,
    Task,
    TrialDispatch,
    Variant,
    derive_seed,
    derive_trial_id,
)
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.experiment import MISSING
from sandbox_exec.graders import FUNCTIONS, Graders, hidden_from_agents, images_of

IMAGE: Final = "image "  # what the names of images begin with among a run's inputs


class Dispatches:
    """Makes the dispatches of a run, whose folder is `folder`."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        run_id: str,
        artifacts: Mapping[str, Unpacked],
        images: Mapping[str, str],
        answers: Mapping[str, Answer],
    ) -> None:
        """`artifacts`: by variant; `images`: what each name was at the start of the run; `answers`: by trial."""
        self._experiment, self._folder, self._run_id = experiment, folder, run_id
        self._artifacts, self._images, self._answers = artifacts, dict(images), answers
        self._variants = {variant.id: variant for variant in experiment.variants}
        self._graders = Graders(experiment, folder, self._images)
        self._hidden = (*hidden_from_agents(experiment), unseen_runs(experiment, folder))
        self._limits_for = functools.cache(self._resolve)  # thousands of tasks share them

    def add(self, tasks: Sequence[Task], images: Mapping[str, str]) -> None:
        """Know of tasks that have joined the run: what belongs to their grading is hidden from all agents."""
        self._images |= images
        more = hidden_from_agents(self._experiment.model_copy(update={"tasks": tuple(tasks)}))
        if not {*more} <= {*self._hidden}:
            self._hidden = tuple(dict.fromkeys((*more, *self._hidden)))
            self._limits_for.cache_clear()

    def make(self, slot: Slot, task: Task, attempt: int, timeout_factor: int) -> TrialDispatch:
        trial_id = derive_trial_id(slot)
        own_s = task.protocol.timeout_s
        limits, variant = self._limits_for(own_s or self._experiment.sandbox.timeout_s, slot.variant_id)
        if timeout_factor > 1 and limits.timeout_s is not None:
            limits = limits.model_copy(update={"timeout_s": limits.timeout_s * timeout_factor})
        function = variant.agent.function
        artifact = self._artifacts.get(variant.id)
        return TrialDispatch(
            slot=slot,
            trial_id=trial_id,
            attempt=attempt,
            seed=derive_seed(self._experiment.seed, trial_id),
            task=task,
            variant=variant,
            limits=limits,
            base=self._experiment.base,
            payload=self._folder / FUNCTIONS / f"{function}.pkl" if isinstance(function, str) else None,
            artifact=artifact.folder if artifact else None,
            entrypoint=artifact.entrypoint if artifact else None,
            out_limit=self._experiment.sandbox.out_limit,
            run_id=self._run_id,
            container=self._container(task),
            grader=self._graders.of(task),
            answer=self._answers.get(trial_id),
        )

    def _container(self, task: Task) -> ContainerSpec | None:
        settings = self._experiment.sandbox
        if settings.kind != "docker":
            return None
        image = task.image or settings.image or ""
        return ContainerSpec(
            image=image,
            image_id=self._images.get(image),
            user=settings.user,
            network=settings.network,
            read_only=settings.read_only,
            runtime=settings.runtime,
        )

    def _resolve(self, timeout_s: float | None, variant_id: str) -> tuple[Limits, Variant]:
        limits = self._experiment.limits(self._experiment.tasks[0]).model_copy(update={"timeout_s": timeout_s})
        return resolve(limits, self._variants[variant_id], self._experiment.base, self._hidden)


def image_digests(experiment: Experiment) -> dict[str, str]:
    """What each image is now, pulled if it is not there and can be had."""
    if experiment.sandbox.kind != "docker":
        return {}
    from sandbox_exec.images import resolve as look_up  # loads what talks to the engine

    return {f"{IMAGE}{name}": found or MISSING for name, found in look_up(sorted(images_of(experiment))).items()}


def images_in(inputs: Mapping[str, str]) -> dict[str, str]:
    """What each image is, among the digests of a run's inputs; those that could not be had are left out."""
    return {
        name.removeprefix(IMAGE): digest
        for name, digest in inputs.items()
        if name.startswith(IMAGE) and digest != MISSING
    }


def unseen_runs(experiment: Experiment, folder: Path) -> Path:
    """What no agent of the run in `folder` sees of runs: where all of them are, as earlier ones have answers too.

    Only that folder itself, where agents need something else that is beside it.
    """
    runs = os.path.realpath(folder.parent)
    beside = [experiment.base / path for path in experiment.sandbox.readable]
    needed = [*map(Path, sys.path), Path(sys.prefix), Path(sys.base_prefix), experiment.base, *beside]
    return folder if any(Path(os.path.realpath(path)).is_relative_to(runs) for path in needed) else folder.parent


def limits_of(experiment: Experiment, hidden: Sequence[Path] = ()) -> list[Limits]:
    """The limits of all that an experiment will dispatch, retries with more time aside."""
    tasks, hidden = {experiment.limits(task) for task in experiment.tasks}, (*hidden_from_agents(experiment), *hidden)
    return [resolve(limits, variant, experiment.base, hidden)[0] for limits in tasks for variant in experiment.variants]


def resolve(limits: Limits, variant: Variant, base: Path, hidden: Sequence[Path] = ()) -> tuple[Limits, Variant]:
    """Words of a command, and modules, that are files beside the experiment are shown to the agent; no other there.

    What belongs to the grading is hidden, unless the agent's own command or the experiment shows it by name.
    """
    agent = variant.agent
    shown: list[Path] = []
    if agent.command is not None:
        words = []
        for word in agent.command:
            path = base / word
            beside = word and not word.startswith("-") and os.path.isfile(path)  # which a word of any length may be
            words.append(str(path) if beside else word)
            if beside:
                shown.append(path)
        variant = variant.model_copy(update={"agent": agent.model_copy(update={"command": tuple(words)})})
    elif agent.python is not None:
        top = agent.python.partition(":")[0].split(".")[0]
        shown = [path for path in (base / f"{top}.py", base / top) if path.exists()]
    if shown:
        limits = limits.model_copy(update={"readable": tuple(dict.fromkeys([*limits.readable, *shown]))})
    unseen = [path for path in hidden if path not in limits.readable]
    if unseen:
        limits = limits.model_copy(update={"hidden": tuple(dict.fromkeys([*limits.hidden, *unseen]))})
    return limits, variant
