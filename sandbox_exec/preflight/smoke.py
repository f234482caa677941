"""Trials that tell something before a run does, in a run's sandboxes, by a run's workers, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import psutil

from sandbox_exec.backends.base import Finished, Lost
from sandbox_exec.backends.local import LocalBackend
from sandbox_exec.contracts import (
    Answer,
    ContainerSpec,
    Grade,
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
from sandbox_exec.dispatching import resolve
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.experiment import freeze_functions, path_digest
from sandbox_exec.graders import FUNCTIONS, Graders, hidden_from_agents
from sandbox_exec.preflight.cache import Cache, Kept
from sandbox_exec.preflight.findings import Found
from sandbox_exec.preflight.images import Image
from sandbox_exec.preflight.programs import graders_of
from sandbox_exec.preflight.static import budget_of
from sandbox_exec.sandbox.process import base_environment
from sandbox_exec.store import attempt_folder, read_completion
from sandbox_exec.trial.collect import stays_inside
from sandbox_exec.trial.launches import role_of

_AT_ONCE: Final = 4  # preflight is beside other work, and a few hide the waiting
_PASS: Final = 1.0  # the score of one that says nothing of passing
_MAX_TRIED: Final = 200  # pairs of image and variant, and references: the others are as many of the same kind
_SLOW_SHARE: Final = 0.5  # of a grader's time: what takes half of it alone takes all of it beside others
_TRY_S: Final = 60.0  # for a trial that writes two files
_WRITES: Final = ": >/workspace/preflight && : >/out/preflight"  # what a shell does by itself
_INIT: Final = ("/sbin/docker-init", "--version")  # which the engine puts into each of our containers
_KINDS: Final = {"start": "start of an image", "null": "null agent", "reference": "reference solution"}

T = TypeVar("T")
Ended = TrialCompletion | str  # how a trial ended, or why that is not known


class _Try(NamedTuple):
    """A trial that tells something: of an image, of a grader with nothing to grade, or with what must pass."""

    kind: Literal["start", "null", "reference"]
    task: Task
    variant: Variant
    image: str | None

    def found(self, level: Literal["error", "warning", "note"], field: str, what: str, todo: str) -> Found:
        of = ("image", self.image or "") if self.kind == "start" else ("task", self.task.id)
        return Found(level, field, what, todo, *of)


class Smoke:
    """The trials of an experiment whose images are there. `checked`: what was tried, in words."""

    def __init__(
        self,
        experiment: Experiment,
        images: Mapping[str, Image],
        containment: str,
        cache: Cache,
        say: Callable[[str], None],
    ) -> None:
        self._experiment, self._pickles = freeze_functions(experiment)
        self._images, self._containment, self._cache, self._say = images, containment, cache, say
        self._ids = {name: image.id for name, image in images.items()}
        self._hidden = hidden_from_agents(self._experiment)
        self._null = shutil.which("true", path=base_environment()["PATH"])
        grading, design = experiment.grading, experiment.design
        most = max(experiment.sandbox.memory or 1, grading.memory or 1 if grading else 1)
        fit = budget_of(experiment, psutil.virtual_memory().total) // most
        self._at_once = max(1, min(_AT_ONCE, design.max_concurrency, fit))
        self._left_out: list[Found] = []
        self.checked: list[str] = []

    def look(self) -> list[Found]:
        tries = [*self._starts(), *self._nulls(), *self._references()]
        if not tries:
            return []
        found = self._left_out
        with tempfile.TemporaryDirectory(prefix="sandbox-exec-preflight-") as name:
            folder = Path(name)
            (folder / FUNCTIONS).mkdir()
            for digest, payload in self._pickles.items():
                (folder / FUNCTIONS / f"{digest}.pkl").write_bytes(payload)
            graders = Graders(self._experiment, folder, self._ids)
            planned: list[tuple[_Try, dict[str, Any], list[TrialDispatch]]] = []
            for number, one in enumerate(tries):
                first = self._dispatch(number, one, graders, folder)
                inputs = self._inputs(one, first)
                if (kept := self._cache.get(inputs)) is not None:
                    found += kept.found
                    continue
                again = first.model_copy(update={"attempt": 2})  # the same in all that the grader sees
                planned.append((one, inputs, [first] if one.kind == "start" else [first, again]))
            dispatches = [dispatch for _, _, its in planned for dispatch in its]
            if dispatches:
                self._say(f"{len(dispatches)} trials of {len(planned)} kinds, {self._at_once} at once")
                ended = self._run(dispatches, folder)
                for one, inputs, its in planned:
                    new = tuple(self._judge(one, its[0], [ended[each.slot.schedule_idx, each.attempt] for each in its]))
                    self._cache.put(inputs, Kept(new, {}))
                    found += new
        counts = Counter[str](one.kind for one in tries)
        said = ", ".join(f"{words} x {counts[kind]}" for kind, words in _KINDS.items() if counts[kind])
        self.checked.append(f"smoke: {said}")
        return found

    # --- which ---

    def _starts(self) -> Iterator[_Try]:
        for name, image in self._images.items():
            shell = image.tools.get("sh")
            variant = Variant(id="preflight", agent=AgentSpec(command=(shell, "-c", _WRITES) if shell else _INIT))
            yield _Try("start", Task(id=f"image {name}", input=None, image=name), variant, name)

    def _nulls(self) -> Iterator[_Try]:
        """One for each image and variant, of different tasks as far as there are; and one for each other grader."""
        by_image: dict[str | None, list[Task]] = {}
        graders: dict[tuple[Any, ...], Task] = {}
        for task, grader in graders_of(self._experiment):
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
        tasks = [task for task, _ in graders_of(self._experiment) if task.reference is not None]
        grading = self._experiment.grading
        if tasks and grading is not None and grading.services == "keep":
            what = "reference solutions were not tried: files do not serve"
            self._left_out.append(Found("note", "grading.services", what, "try one as a variant"))
            return
        for task in self._spread(tasks, "reference solutions"):
            yield _Try("reference", task, self._experiment.variants[0], self._image_of(task))

    def _spread(self, items: Sequence[T], what: str) -> Sequence[T]:
        """At most so many that preflight ends, from the first to the last."""
        if len(items) <= _MAX_TRIED:
            return items
        said = f"{_MAX_TRIED} of {len(items)} {what} were tried, from the first to the last"
        self._left_out.append(Found("note", "smoke", said, "nothing, if the others are like them"))
        return [items[at * len(items) // _MAX_TRIED] for at in range(_MAX_TRIED)]

    def _image_of(self, task: Task) -> str | None:
        sandbox = self._experiment.sandbox
        return (task.image or sandbox.image) if sandbox.kind == "docker" else None

    # --- what is dispatched ---

    def _dispatch(self, number: int, one: _Try, graders: Graders, folder: Path) -> TrialDispatch:
        experiment, base, task = self._experiment, self._experiment.base, one.task
        repeat = int(one.kind == "reference")  # another trial than the null agent's, with a folder of its own
        slot = Slot(schedule_idx=number, variant_id=one.variant.id, task_id=task.id, repeat=repeat)
        limits, agent, answer = experiment.limits(task), one.variant.agent, None
        if one.kind == "start":
            limits = limits.model_copy(update={"timeout_s": _TRY_S})
        else:
            null = self._images[one.image].tools.get("true") if one.image is not None else self._null
            agent = AgentSpec(command=(null or "/null",))
            limits = resolve(limits, one.variant, base, self._hidden)[0]
            if one.kind == "reference" or null is None:
                answer = folder / f"answer-{number}.tar"
                _pack(answer, self._answer(one))
        container = None
        if one.image is not None:
            of = experiment.sandbox.model_dump(include={"user", "network", "read_only", "runtime"})
            container = ContainerSpec(image=one.image, image_id=self._ids.get(one.image), **of)
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
            container=container,
            grader=graders.of(task) if one.kind != "start" else None,
            answer=Answer(archive=answer) if answer is not None else None,
        )

    def _answer(self, one: _Try) -> dict[str, Path]:
        """What a perfect agent leaves, or one that does nothing."""
        base, task = self._experiment.base, one.task
        found = {"workspace": base / task.workspace} if task.workspace is not None else {}
        if one.kind == "reference" and task.reference is not None:
            for name in ("workspace", "out"):
                if (base / task.reference / name).is_dir():
                    found[name] = base / task.reference / name
        return found

    def _inputs(self, one: _Try, dispatch: TrialDispatch) -> dict[str, Any]:
        task, base, grader = one.task, self._experiment.base, dispatch.grader
        paths = {"workspace": task.workspace, "reference": task.reference}
        return {
            "part": one.kind,
            "task": [task.id, task.input],
            "files": {name: path_digest(str(base / path)) for name, path in paths.items() if path is not None},
            "env": dict(dispatch.variant.env),
            "command": dispatch.variant.agent.command,
            "limits": dispatch.limits.model_dump(mode="json"),
            "container": dispatch.container.model_dump(mode="json") if dispatch.container else None,
            "grader": [grader.digest, grader.services, grader.limits.model_dump(mode="json")] if grader else None,
            "containment": self._containment,
            "uid": os.geteuid(),
            "seed": dispatch.seed,
        }

    # --- how it goes ---

    def _run(self, dispatches: Sequence[TrialDispatch], folder: Path) -> dict[tuple[int, int], Ended]:
        """How each ended, by number and attempt."""
        specs = [dispatch.grader for dispatch in dispatches if dispatch.grader is not None]
        backend = LocalBackend(
            min(self._at_once, len(dispatches)),
            limits={dispatch.limits for dispatch in dispatches if dispatch.container is None and not dispatch.answer},
            graders={(spec.limits, role_of(spec)) for spec in specs if spec.container is None},
            docker=bool(self._ids),
            containment=self._containment,
            preload=["cloudpickle"] if self._pickles else [],
        )
        ended: dict[tuple[int, int], Ended] = {}
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
            every = {(one.slot.schedule_idx, one.attempt): str(error) for one in dispatches}
            return {**every, **ended}
        finally:
            backend.close()
        return ended

    # --- what it means ---

    def _judge(self, one: _Try, dispatch: TrialDispatch, ended: Sequence[Ended]) -> Iterator[Found]:
        completions: list[TrialCompletion] = []
        for end in ended:
            if isinstance(end, str):
                yield one.found("error", "smoke", f"a trial was lost: {end}", "see `sandbox-exec doctor`")
                return
            if end.status is not Status.SUCCESS:
                yield _failure(one, end)
                return
            completions.append(end)
        grades = [completion.grade for completion in completions if completion.grade is not None]
        if one.kind == "start" or not grades:
            return
        first, last = grades[0], grades[-1]
        if one.kind == "null" and _passes(first):
            what = f"the grader passes an agent that does nothing (score {first.score:g})"
            yield one.found("error", "grading", what, "let it look for what only a solution leaves")
        if one.kind == "reference" and not _passes(first):
            what = f"the grader does not pass the reference solution (score {first.score:g})"
            yield one.found("error", "reference", what, "put right the reference, or the grader")
        of = "an agent that does nothing" if one.kind == "null" else "the reference solution"
        todo = "take chance, time and order out of the grader; it gets its seed in task.json"
        if first.passed != last.passed:
            what = f"the grader is flaky: of {of}, it said passed {first.passed}, then {last.passed}"
            yield one.found("error", "grading", what, todo)
        elif first.score != last.score:
            what = f"the grader is flaky: of {of}, it said score {first.score:g}, then {last.score:g}"
            yield one.found("warning", "grading", what, todo)
        most_s = dispatch.grader.limits.timeout_s if dispatch.grader else None
        usages = [completion.grading.usage for completion in completions if completion.grading]
        slowest_s = max((usage.wall_s for usage in usages if usage is not None), default=0.0)
        if most_s is not None and slowest_s > most_s * _SLOW_SHARE:
            what = f"the grader took more than half of its {most_s:g} s, alone on the machine"
            yield one.found("warning", "grading.timeout_s", what, "raise it")


def _failure(one: _Try, completion: TrialCompletion) -> Found:
    error, status = completion.error, completion.status
    said = f"{error.type}: {error.message}" if error is not None else status.value
    if one.kind == "start":
        if one.variant.agent.command == _INIT and (status is Status.AGENT_ERROR or _INIT[0] in said):
            what = "whether it starts could not be tried: it has no shell, and the engine's init is elsewhere"
            return one.found("note", "", what, "nothing, if trials run")
        if status is Status.AGENT_ERROR:
            what = "/workspace or /out cannot be written by who the agent runs as"
            return one.found("error", "", what, "see sandbox.user, and the engine's user namespaces")
        return one.found("error", "", f"it does not start and stop: {said}", "see what the message says")
    if status is Status.GRADE_ERROR:
        of = "an agent that did nothing" if one.kind == "null" else "the reference solution"
        what = f"the grader fails on {of}: {said}"
        return one.found("error", "grading", what, "a grader gives every answer a score, 0 too")
    what = f"a trial with an agent that does nothing ended as {status}: {said}"
    return one.found("error", "smoke", what, "see what the message says")


def _passes(grade: Grade) -> bool:
    """As the grader says; where it says nothing, by the score."""
    return grade.passed if grade.passed is not None else grade.score >= _PASS


def _pack(target: Path, tops: Mapping[str, Path]) -> None:
    """An answer, as the grading phase keeps it: workspace/ and out/."""
    with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
        for name, top in tops.items():
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
