"""Grading without agents: what a run left, again or by another grader; and answers that were made elsewhere.

A grading is a run like any other, with the same pool, ceilings, ordered commits and `continue`: only that each trial
begins with its grading phase, on an archive. That of a run is in its folder, `gradings/<n>/`; the run itself, and the
grades it was committed with, stay as they are.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from sandbox_exec.contracts import (
    Answer,
    Experiment,
    Grade,
    GradingSettings,
    Phase,
    Slot,
    Status,
    Task,
    TaskGrading,
    Variant,
    derive_trial_id,
)
from sandbox_exec.contracts.experiment import MAX_SLOTS, shown, told
from sandbox_exec.contracts.queue import QueueSettings
from sandbox_exec.errors import InvalidExperiment, InvalidValue
from sandbox_exec.experiment import load_experiment, load_grading, without_repeats
from sandbox_exec.graders import FUNCTIONS
from sandbox_exec.ledger import experiment_of
from sandbox_exec.report import TagReport, VariantReport, report_of
from sandbox_exec.runs import RUNS, RunSummary, answers_of, make_run, new_run_id, work_at
from sandbox_exec.store import RunStore, attempt_folder, read_completion
from sandbox_exec.store.db import DB_NAME
from sandbox_exec.trial.grading import ANSWER
from sandbox_exec.units import MIB

GRADINGS: Final = "gradings"
MAX_PREDICTION_BYTES: Final = 64 * MIB  # one row; larger things are files that a run collects
_MAX_DEPTH: Final = 64  # as that of what is collected from an agent
_ROW_FIELDS: Final = {"task_id", "id", "variant", "repeat", "answer", "files"}
_MOST_CHANGES: Final = 20  # that a person reads; all are in the histories
_NOBODY: Final = {"command": ["true"]}  # no agent runs; but a variant has one


def grade_run(
    folder: str | os.PathLike[str],
    *,
    grading: GradingSettings | str | os.PathLike[str] | None = None,
    only: Iterable[str] = (),
    **how: Any,
) -> RunSummary:
    """Grade again what the committed trials of a run left. `how` are arguments of `run`.

    grading: another grader, or the file that has one: a mapping as the experiment's `grading`, or an experiment.
    only: "variant=ID", "task=ID", "tag=TAG" or "status=STATUS"; those of one kind add up, kinds narrow down.
    """
    run = Path(os.path.abspath(folder))
    with RunStore.open(run, write=False) as store:
        experiment = experiment_of(store)
        commits, slots = list(store.commits()), list(store.slots())
    base = experiment.base
    if isinstance(grading, GradingSettings):
        settings: GradingSettings | None = grading
    elif grading is not None:
        settings, base = load_grading(grading), Path(os.path.abspath(grading)).parent
    else:
        settings = experiment.grading
    wanted = _filter(experiment, only)
    answers: dict[str, Answer] = {}
    prior = answers_of(run)  # of a run that had no agents either
    kept: list[Slot] = []
    for commit in commits:
        slot = slots[commit.schedule_idx]
        answer = prior.get(derive_trial_id(slot)) or _answer(attempt_folder(run, derive_trial_id(slot), commit.attempt))
        if wanted(slot, commit.status) and answer.archive.exists():
            answers[derive_trial_id(slot)] = answer
            kept.append(slot.model_copy(update={"schedule_idx": len(kept)}))
    if not kept:
        raise InvalidValue(
            f"there is nothing to grade in {run}: no committed trial that was asked for has left {ANSWER}, which is "
            "kept of trials that were graded, if it is no larger than sandbox.out_limit"
        )
    target = run / GRADINGS / str(1 + max((int(name) for name in _numbers(run / GRADINGS)), default=0))
    graded = _without_agents(experiment, settings, base, grading is not None)
    store, frozen = make_run(graded, target, kept, _functions(run), answers)
    return work_at(store, frozen, **how)


def grade_predictions(
    predictions: str | os.PathLike[str],
    experiment: Experiment | str | os.PathLike[str],
    *,
    runs: str | os.PathLike[str] = RUNS,
    run_id: str | None = None,
    **how: Any,
) -> RunSummary:
    """Grade answers that were made elsewhere: a JSONL file with a task's id, and its answer or files, on each line."""
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    rows = read_predictions(Path(predictions), {task.id for task in experiment.tasks})
    order = {task.id: idx for idx, task in enumerate(experiment.tasks)}
    rows.sort(key=lambda row: (order[row["task_id"]], row["variant"], row["repeat"]))
    variants = sorted({row["variant"] for row in rows})
    named = {row["task_id"] for row in rows}
    tasks = [task for task in experiment.tasks if task.id in named]
    plain = experiment.model_copy(
        update={
            "tasks": tuple(tasks),
            "variants": tuple(_variants(variants)),
        }
    )
    folder = Path(os.path.abspath(runs)) / (run_id or new_run_id(experiment.name))
    if (folder / DB_NAME).exists():  # before its answers are written over
        raise InvalidValue(f"there is a run in {folder} already: continue it, or name another")
    slots, answers = [], {}
    for idx, row in enumerate(rows):
        slot = Slot(schedule_idx=idx, variant_id=row["variant"], task_id=row["task_id"], repeat=row["repeat"])
        path = folder / "answers" / f"{derive_trial_id(slot)}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_archive(row))
        slots.append(slot)
        answers[derive_trial_id(slot)] = Answer(archive=path)
    store, frozen = make_run(
        _without_agents(plain, experiment.grading, experiment.base, False), folder, slots, None, answers
    )
    return work_at(store, frozen, **how)


@dataclass(frozen=True)
class Change:
    """A trial whose grade is another than before."""

    trial_id: str
    before: Grade | None
    after: Grade | None


def changes_of(grading: Path, before: Path) -> list[Change]:
    """What a grading says otherwise than the run did, in the order of the schedule."""
    old, new = _grades(before), _grades(grading)
    return [Change(trial_id, old.get(trial_id), grade) for trial_id, grade in new.items() if old.get(trial_id) != grade]


def lines_of(grading: Path, before: Path | None) -> list[str]:
    """For a person: how it came out, by variant and tag, and what changed against the grades of before."""
    report = report_of(grading)
    lines = [f"{one.variant_id}: {_figures(one)}" for one in report.variants if one.trials]
    lines += [f"{one.variant_id}, {one.tag}: {_figures(one)}" for one in report.tags]
    if before is None:
        return lines
    missing = _committed(before) - report.committed
    if report.finished and missing > 0:
        lines.append(f"not graded: {missing} trials of the run, which were not asked for or left nothing that was kept")
    changes = changes_of(grading, before)
    if not changes:
        return [*lines, "no grade is another than before"]
    lines.append(f"{len(changes)} grades are others than before:")
    lines += [f"  {one.trial_id}: {_told(one.before)} -> {_told(one.after)}" for one in changes[:_MOST_CHANGES]]
    if len(changes) > _MOST_CHANGES:
        lines.append(f"  ... and {len(changes) - _MOST_CHANGES} more")
    return lines


def _figures(one: VariantReport | TagReport) -> str:
    found = []
    if one.pass_rate is not None:
        rate = one.pass_rate
        interval = f"[{rate.low * 100:.1f}, {rate.high * 100:.1f}]"
        found.append(f"passed {rate.passed} of {rate.n}, {rate.rate * 100:.1f} % {interval}")
    if one.score is not None:
        found.append(f"mean score {one.score.mean:.3f}")
    return "; ".join(found) or "no grades"


def _committed(folder: Path) -> int:
    with RunStore.open(folder, write=False) as store:
        return store.progress().committed


def _told(grade: Grade | None) -> str:
    if grade is None:
        return "no grade"
    passed = {None: "", True: ", passed", False: ", failed"}[grade.passed]
    return f"{grade.score:g}{passed}"


def _grades(folder: Path) -> dict[str, Grade | None]:
    query = """SELECT s.trial_id, c.grade FROM commits c JOIN schedule s ON s.schedule_idx = c.schedule_idx
               ORDER BY c.schedule_idx"""
    with RunStore.open(folder, write=False) as store:
        return {name: None if grade is None else Grade.model_validate_json(grade) for name, grade in store.query(query)}


def read_predictions(file: Path, tasks: set[str]) -> list[dict[str, Any]]:
    """The rows of a file of predictions, checked. Raises InvalidExperiment with all that is wrong, line by line."""
    rows, problems, seen = [], [], set()
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidExperiment(f"cannot read {str(file)!r}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _prediction(line, tasks)
        except (ValueError, RecursionError) as error:
            problems.append(f"{file}:{number}: {str(error) or 'nested too deeply'}")
            continue
        key = (row["task_id"], row["variant"], row["repeat"])
        if key in seen:
            problems.append(f"{file}:{number}: there is an answer to task {key[0]!r} of {key[1]!r}, repeat {key[2]}")
        seen.add(key)
        rows.append(row)
    if not rows and not problems:
        problems.append(f"{file}: is empty; needed: one JSON object a line, with task_id and answer or files")
    if problems:
        raise InvalidExperiment(told(problems))
    return rows


def _prediction(line: bytes, tasks: set[str]) -> dict[str, Any]:
    if len(line) > MAX_PREDICTION_BYTES:
        raise InvalidValue(f"larger than {MAX_PREDICTION_BYTES} bytes")
    row = json.loads(line, object_pairs_hook=without_repeats)
    if not isinstance(row, dict):
        raise InvalidValue("not a JSON object")
    unknown = sorted(set(row) - _ROW_FIELDS)
    if unknown:
        raise InvalidValue(f"unknown: {', '.join(unknown)}; allowed: {', '.join(sorted(_ROW_FIELDS))}")
    task = row.get("task_id", row.get("id"))
    if not isinstance(task, str) or task not in tasks:
        raise InvalidValue(f"task_id is {shown(task)}, which is no task of the experiment")
    variant, repeat = row.get("variant", "predictions"), row.get("repeat", 0)
    if not isinstance(variant, str) or not 0 < len(variant) <= 256:
        raise InvalidValue(f"variant is {shown(variant)}; needed: text of up to 256 characters")
    variant.encode()  # half of a surrogate pair is no text
    if not isinstance(repeat, int) or isinstance(repeat, bool) or not 0 <= repeat < MAX_SLOTS:
        raise InvalidValue(f"repeat is {shown(repeat)}; needed: a whole number from 0 to {MAX_SLOTS - 1}")
    if ("answer" in row) == ("files" in row):
        raise InvalidValue("needed: either answer (any JSON) or files (a path to its text)")
    return {"task_id": task, "variant": variant, "repeat": repeat, "files": _files(row)}


def _files(row: Mapping[str, Any]) -> dict[str, bytes]:
    """What the row leaves in /out and /workspace, by path."""
    if "answer" in row:
        answer = row["answer"] if isinstance(row["answer"], dict) else {"answer": row["answer"]}
        return {"out/result.json": json.dumps(answer, allow_nan=False).encode() + b"\n"}
    if not isinstance(row["files"], dict) or not row["files"]:
        raise InvalidValue("files is no object of paths and texts")
    found: dict[str, bytes] = {}
    for name, content in row["files"].items():
        path = PurePosixPath(name)
        parts = path.parts
        if not parts or path.is_absolute() or ".." in parts or "\0" in name or len(name.encode()) > 2048:
            raise InvalidValue(f"files: {name[:80]!r} is not a path below /out or /workspace")
        if len(parts) > _MAX_DEPTH or max(len(part.encode()) for part in parts) > 255:
            raise InvalidValue(
                f"files: {name[:80]!r} is deeper than {_MAX_DEPTH} folders, or has a name over 255 bytes"
            )
        if parts[0] not in ("out", "workspace") or len(parts) == 1:
            path = PurePosixPath("out", *parts)
        if str(path) in found:
            raise InvalidValue(f"files: {str(path)[:80]!r} is named twice")
        if isinstance(content, str):
            found[str(path)] = content.encode()
        elif isinstance(content, dict) and set(content) == {"base64"} and isinstance(content["base64"], str):
            try:
                found[str(path)] = base64.b64decode(content["base64"], validate=True)
            except binascii.Error as error:
                raise InvalidValue(f"files: {name[:80]!r}: {error}") from error
        else:
            raise InvalidValue(f"files: {name[:80]!r} is neither text nor {{'base64': ...}}")
    folders = {str(parent) for path in found for parent in PurePosixPath(path).parents}
    both = sorted(folders & set(found))
    if both:
        raise InvalidValue(f"files: {both[0]!r} is both a file and a folder")
    return found


def _archive(row: Mapping[str, Any]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(row["files"].items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def _without_agents(experiment: Experiment, settings: GradingSettings | None, base: Path, replaced: bool) -> Experiment:
    """The experiment with nothing in it that concerns agents: what they cannot influence is not an input."""
    tasks = []
    for task in experiment.tasks:
        own = _own_grading(task, experiment.base, settings) if replaced else task.grading
        if own is None and settings is None:
            raise InvalidValue(f"task {task.id!r} has no grading: name one with --with")
        fields: dict[str, Any] = {"depends_on": (), "chain": None, "workspace": None, "reference": None, "grading": own}
        fields["protocol"] = task.protocol.model_copy(update={"serial": None})
        tasks.append(task.model_copy(update=fields))
    whole = {"prune_after_failures": None, "max_duration_s": None, "order": "sequential", "queue": QueueSettings()}
    design = experiment.design.model_copy(update=whole)
    return Experiment(
        name=experiment.name,
        seed=experiment.seed,
        tasks=tasks,
        variants=_variants(variant.id for variant in experiment.variants),
        design=design,
        sandbox=experiment.sandbox,
        grading=settings,
        base=base,
    )


def _own_grading(task: Task, base: Path, settings: GradingSettings | None) -> TaskGrading | None:
    """What a task keeps of its own under another grader: its assets, unless that one names some for all."""
    if task.grading is None or task.grading.assets is None or (settings is not None and settings.assets is not None):
        return None
    return TaskGrading(assets=Path(os.path.abspath(base / task.grading.assets)))


def _variants(ids: Iterable[str]) -> list[Variant]:
    return [Variant.model_validate({"id": one, "agent": _NOBODY}) for one in ids]


def _filter(experiment: Experiment, only: Iterable[str]) -> Any:
    tags = {task.id: set(task.protocol.tags) for task in experiment.tasks}
    wanted: dict[str, set[str]] = {}
    for text in only:
        kind, equals, value = text.partition("=")
        if not equals or kind not in ("variant", "task", "tag", "status"):
            raise InvalidValue(f"{text!r} is no filter; allowed: variant=ID, task=ID, tag=TAG, status=STATUS")
        wanted.setdefault(kind, set()).add(value)

    def matches(slot: Slot, status: Status) -> bool:
        has = {
            "variant": {slot.variant_id},
            "task": {slot.task_id},
            "tag": tags[slot.task_id],
            "status": {status.value},
        }
        return all(has[kind] & values for kind, values in wanted.items())

    return matches


def _numbers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []


def _answer(attempt: Path) -> Answer:
    """What an attempt left, and how its agent ended, as its grader was told."""
    completion = read_completion(attempt).value
    agent: dict[str, Any] = {}
    if completion is not None:
        # What went wrong with the grading is not the agent's end.
        status = Status.SUCCESS if completion.phase is Phase.GRADE else completion.status
        agent = {"status": status.value, "exit_code": completion.exit_code, "signal": completion.signal}
    return Answer(archive=attempt / ANSWER, agent=agent)


def _functions(run: Path) -> dict[str, bytes]:
    folder = run / FUNCTIONS
    return {path.stem: path.read_bytes() for path in folder.glob("*.pkl")} if folder.is_dir() else {}
