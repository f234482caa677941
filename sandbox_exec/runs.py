"""The library's door to durable runs: `run` an experiment, `continue_run` one that was interrupted, look at one.

A run is a folder, `runs/<run_id>/`, which holds all that is needed to continue it: the resolved experiment with the
digests of its inputs in run.db, the pickled functions of agents that are functions, and the trials. What the
experiment's files say is not copied: a run whose inputs changed is not continued.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import Field

from sandbox_exec.artifacts import FILES, Unpacked, archive_digest, unpack, verify
from sandbox_exec.backends.base import WorkerBackend
from sandbox_exec.backends.local import LocalBackend
from sandbox_exec.containment import require
from sandbox_exec.contracts import Answer, Contract, Experiment, Rung, Slot, Status
from sandbox_exec.control import ask
from sandbox_exec.coordinator import Coordinator, Ending, RunCallback
from sandbox_exec.dispatching import IMAGE, image_digests, images_in, limits_of, unseen_runs
from sandbox_exec.errors import (
    InvalidArtifact,
    InvalidExperiment,
    InvalidValue,
    RunLocked,
    RunNotActive,
    SandboxUnavailable,
)
from sandbox_exec.experiment import (
    MISSING,
    changed_inputs,
    check_files,
    file_digests,
    freeze_functions,
    input_digests,
    load_experiment,
)
from sandbox_exec.graders import FUNCTIONS, hidden_from_agents, limits_of_graders
from sandbox_exec.guest.view import remove_scratch
from sandbox_exec.ledger import PURGED, QUEUE, figures_of, with_submitted
from sandbox_exec.metrics import MetricsServer
from sandbox_exec.orders import first_schedule, make_queue
from sandbox_exec.sandbox import reaper
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.sandbox.reaper import Reaped
from sandbox_exec.store import Progress, RunStore, holder, write_atomic
from sandbox_exec.store.db import DB_NAME
from sandbox_exec.store.folders import COMPLETION

ARTIFACTS: Final = "artifacts"  # in the run's folder: the unpacked agents, by the digest of their archive
ANSWERS: Final = "answers.json"  # in the run's folder, if it only grades: by trial, the archive to grade
RUNS: Final = "runs"  # where runs are, beside where they are started
STATUS_S: Final = 2.0  # for a coordinator to say what is in flight; else the database's word must do

_RUN_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MOMENT_S: Final = 5.0  # for somebody who adds tasks to the run
_LOOK_S: Final = 0.05
_SLUG_CHARS: Final = 40  # of the experiment's name in a run's: what a person recognises
_LAST_FAILURES: Final = 5
_LOOK_BACK: Final = 1000  # commits among which the last failures are looked for: a status must not read them all

RunState = Literal["created", "running", "draining", "killing", "paused", "completed", "interrupted", "failed"]
PathLike = str | os.PathLike[str]


class RunSummary(Contract):
    """How a run, or this coordinator's part of it, ended. Only a `completed` one has nothing left to do."""

    run_id: str
    folder: Path
    status: Ending
    reason: str = Field(default="", description="Why it is not completed.")
    slots: int
    committed: int
    by_status: Mapping[Status, int] = Field(description="Committed trials; a status that none has is left out.")
    by_variant: Mapping[str, Mapping[Status, int]]
    wall_s: float = Field(description="Of this coordinator; a run that was continued has had others.")


class InFlight(Contract):
    """One attempt that runs. Phase, events and memory are known to a living coordinator only."""

    trial_id: str
    variant_id: str
    task_id: str
    repeat: int
    attempt: int
    age_s: float
    phase: str = ""
    events: int | None = Field(default=None, description="How many it has traced.")
    memory_bytes: int | None = Field(default=None, description="Its peak so far, where the sandbox knows it.")


class Failure(Contract):
    """One committed trial that did not succeed."""

    trial_id: str
    status: Status
    error_type: str | None


class Owner(Contract):
    """The process that holds a run."""

    pid: int | None
    host: str | None
    since: str | None


class RunStatus(Contract):
    """A run at one instant."""

    run_id: str
    folder: Path
    status: RunState
    reason: str = ""
    created_at: float = Field(description="Seconds since 1970.")
    owner: Owner | None = Field(description="None: nobody works at it.")
    slots: int
    committed: int
    by_status: Mapping[Status, int]
    in_flight: tuple[InFlight, ...]
    last_failures: tuple[Failure, ...] = Field(description="The latest committed ones, latest last.")
    lifecycle: Mapping[str, int] = Field(
        description="Trials that are pending, assigned, executing, retrying, finished, completed, failed or skipped."
    )
    metrics: Mapping[str, Any] | None = Field(
        description="Depth, waits, throughput, failure rates and alerts; of the last coordinator, if none works at it."
    )
    lanes: Mapping[str, Any] | None = Field(description="By name, how each lane stands.")
    queue: Any = Field(description="What the queue has learnt: for order adaptive, the ability of each variant.")


def run(
    experiment: Experiment | PathLike,
    *,
    runs: PathLike = RUNS,
    run_id: str | None = None,
    workers: int | None = None,
    containment: str = "auto",
    callbacks: Iterable[RunCallback] = (),
    backend: WorkerBackend | None = None,
    on_ready: Callable[[Coordinator], None] | None = None,
    keep_open: bool = False,
    metrics_port: int | None = None,
) -> RunSummary:
    """Make a run of an experiment, or of the file that holds one, and work at it until it ends.

    runs: the folder below which the run's own is made.
    run_id: its name; by default one of the experiment's name and the time, which no other run has.
    workers: trials at once, in place of the design's `max_concurrency`.
    containment: "auto", or a rung by name, to use a weaker one.
    callbacks: told what happens, in the thread that calls this.
    backend: where trials run; by default processes of this machine. It is closed at the end, as that would be.
    on_ready: given the coordinator before the first trial: `drain`, `kill` and `submit` may be called from anywhere.
    keep_open: when all is done, wait for more tasks to be submitted, until the run is stopped.
    metrics_port: serve metrics for Prometheus at this port of the loopback, path /metrics; 0 picks one.

    Ctrl-C is KeyboardInterrupt, as everywhere: what is in flight is killed, and the run can be continued.
    Raises `InvalidExperiment`, `InvalidValue` and `SandboxUnavailable` before there is a run. What goes wrong with the
    machine later ends it as interrupted, with the reason.
    """
    if isinstance(experiment, Experiment):
        check_files(experiment)
    else:
        experiment = load_experiment(experiment)
    _check_run(experiment, workers, containment, backend)
    _check_artifacts(experiment)
    run_id = _checked_id(run_id) if run_id is not None else new_run_id(experiment.name)
    folder = Path(os.path.abspath(runs)) / run_id
    with _serving(folder, metrics_port) as server:
        store, frozen = make_run(experiment, folder)
        return _work(store, frozen, workers, containment, callbacks, backend, on_ready, keep_open, server)


def make_run(
    experiment: Experiment,
    folder: Path,
    slots: Sequence[Slot] | None = None,
    functions: Mapping[str, bytes] | None = None,
    answers: Mapping[str, Answer] | None = None,
) -> tuple[RunStore, Experiment]:
    """Make the folder of a run, with all that it needs to be continued, and return it with the frozen experiment.

    `slots`: the schedule, where it is not the one that the experiment's queue makes of its tasks. `functions`: pickles
    that the experiment names by their digests. `answers`: by trial, archives to grade instead of running agents.
    """
    queue = make_queue(experiment)
    slots = first_schedule(queue, experiment.tasks) if slots is None else slots
    frozen, own = freeze_functions(experiment)
    digests = {**input_digests(frozen), **image_digests(frozen)}
    if (folder / DB_NAME).exists():
        raise InvalidValue(f"there is a run in {folder} already: continue it, or name another")
    # Before the database: a run that exists has all that it needs.
    for digest, payload in {**(functions or {}), **own}.items():
        (folder / FUNCTIONS).mkdir(parents=True, exist_ok=True)
        write_atomic(_function_file(folder, digest), payload)
    if answers is not None:
        folder.mkdir(parents=True, exist_ok=True)
        there = {
            trial_id: {"archive": os.path.relpath(answer.archive, folder), "agent": dict(answer.agent)}
            for trial_id, answer in answers.items()
        }
        write_atomic(folder / ANSWERS, json.dumps(there).encode())
    state = {QUEUE: queue.snapshot()}
    return RunStore.create(folder, folder.name, frozen.model_dump_json(), slots, digests, state=state), frozen


def work_at(store: RunStore, experiment: Experiment, **how: Any) -> RunSummary:
    """Work at a run that `make_run` made, as `run` does; `how` are its arguments."""
    workers, containment = how.pop("workers", None), how.pop("containment", "auto")
    try:
        _check_run(experiment, workers, containment, how.get("backend"))
    except BaseException:
        store.close()
        raise
    callbacks, backend, on_ready = how.pop("callbacks", ()), how.pop("backend", None), how.pop("on_ready", None)
    return _work(store, experiment, workers, containment, callbacks, backend, on_ready)


def continue_run(
    folder: PathLike,
    *,
    workers: int | None = None,
    containment: str = "auto",
    callbacks: Iterable[RunCallback] = (),
    backend: WorkerBackend | None = None,
    on_ready: Callable[[Coordinator], None] | None = None,
    keep_open: bool = False,
    metrics_port: int | None = None,
) -> RunSummary:
    """Work at what is not committed of the run in `folder`, as `run` does; nothing, if it is completed.

    Raises `RunLocked` if another process does so already, `InvalidExperiment` with what changed if the inputs are
    not those that the run was made with.
    """
    store = _open(Path(os.path.abspath(folder)))
    try:
        experiment = Experiment.model_validate_json(store.run().experiment_json)
        progress = store.progress()
        if progress.committed < progress.slots or keep_open:
            _check_unchanged(store, experiment)
            _check_run(with_submitted(store, experiment), workers, containment, backend)
        serving = _serving(store.folder, metrics_port)
    except BaseException:
        store.close()
        raise
    with serving as server:
        return _work(store, experiment, workers, containment, callbacks, backend, on_ready, keep_open, server)


def new_run_id(name: str) -> str:
    """A name for a run: the experiment's, the time in UTC, and a few random letters."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:_SLUG_CHARS] or "run"
    return f"{slug}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def find_run(name: PathLike, runs: PathLike = RUNS) -> Path:
    """Return the folder of a run: `name` itself if there is a run in it, or the run of that id below `runs`."""
    named = Path(name)
    if (named / DB_NAME).is_file():
        return named
    below = Path(runs) / named
    if len(named.parts) == 1 and (below / DB_NAME).is_file():
        return below
    known = sorted(path.parent.name for path in Path(runs).glob(f"*/{DB_NAME}"))
    hint = f"runs in {runs}: {', '.join(known[-10:])}" if known else f"there are no runs in {runs}"
    raise InvalidValue(f"there is no run in {named}, nor in {below}; {hint}")


def status_of(folder: PathLike) -> RunStatus:
    """Return how far the run in `folder` is. Only reads, and can be called while a coordinator works at it."""
    folder = Path(os.path.abspath(folder))
    owner = holder(folder)
    live = _live_status(folder) if owner is not None else {}
    with RunStore.open(folder, write=False) as store:
        # Not `store.run()`: an experiment of a hundred thousand tasks takes longer to read than all the rest.
        ((run_id, created_at),) = store.query("SELECT run_id, created_at FROM run")
        progress, control = store.progress(), store.control()
        status, reason = control.status, str(control.metadata.get("reason", ""))
        if owner is None and status in ("created", "running", "paused"):
            status, reason = "interrupted", "its coordinator is gone"
        known = {one["trial_id"]: one for one in live.get("in_flight", ())}
        figures = live or control.metadata.get("last") or (figures_of(store) if owner is None else {})
        active, now = store.active_since(), time.time()
        # One whose attempt has ended waits for its turn to be committed. Who works at the run knows of it.
        ended = {one.trial_id for one, _ in active if not live and (one.folder / COMPLETION).exists()}
        in_flight = [
            InFlight(
                trial_id=trial.trial_id,
                variant_id=trial.slot.variant_id,
                task_id=trial.slot.task_id,
                repeat=trial.slot.repeat,
                attempt=trial.attempt,
                age_s=round(max(0.0, now - since), 3),
                **_details(known.get(trial.trial_id, {})),
            )
            for trial, since in active
            if trial.trial_id in known or (not live and trial.trial_id not in ended)
        ]
        return RunStatus(
            run_id=run_id,
            folder=folder,
            status=live.get("status", status),
            reason=live.get("reason") or reason,
            created_at=created_at,
            owner=Owner(pid=owner.pid, host=owner.host, since=owner.since) if owner else None,
            slots=progress.slots,
            committed=progress.committed,
            by_status=progress.by_status,
            in_flight=tuple(in_flight),
            last_failures=_last_failures(store, progress.committed, progress.by_status),
            lifecycle=_lifecycle(progress, live, len(ended)),
            metrics=figures.get("metrics"),
            lanes=figures.get("lanes"),
            queue=figures.get("queue"),
        )


# --- parts ---


def _open(folder: Path) -> RunStore:
    """Open a run to work at it. Who only adds to it holds it for a moment, and does not answer when it is asked."""
    until_s = time.monotonic() + _MOMENT_S
    while True:
        try:
            return RunStore.open(folder)
        except RunLocked:
            if time.monotonic() >= until_s or _live_status(folder):
                raise
            time.sleep(_LOOK_S)


def _serving(folder: Path, port: int | None) -> contextlib.AbstractContextManager[MetricsServer | None]:
    """Serve the metrics of a run, from before it is worked at: a port that is taken is told at once."""
    if port is None:
        return contextlib.nullcontext()
    return contextlib.closing(MetricsServer(port, lambda: _metrics_text(folder)))


def _work(
    store: RunStore,
    experiment: Experiment,
    workers: int | None,
    containment: str,
    callbacks: Iterable[RunCallback],
    backend: WorkerBackend | None,
    on_ready: Callable[[Coordinator], None] | None,
    keep_open: bool = False,
    server: MetricsServer | None = None,
) -> RunSummary:
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(store)
        slots, committed = store.progress().slots, store.progress().committed
        to_do = committed < slots or keep_open
        artifacts = _unpack_artifacts(store.folder, experiment) if to_do else {}
        answers = answers_of(store.folder)
        images = images_in({**store.inputs(), **store.run().digests})
        if backend is None and to_do:
            if experiment.sandbox.kind != "docker":
                reaper.reap_folders()
            elif (why_not := sweep().no_engine) != "":
                raise SandboxUnavailable(why_not)
        if backend is None:
            experiment = _at_once(experiment, workers or experiment.design.max_concurrency)
            backend = _local_backend(with_submitted(store, experiment), containment, store.folder)
        elif workers is not None:
            experiment = _at_once(experiment, workers)
        stack.callback(backend.close)
        coordinator = Coordinator(
            store,
            experiment,
            backend,
            callbacks=callbacks,
            artifacts=artifacts,
            images=images,
            answers=answers,
            keep_open=keep_open,
        )
        if server is not None:
            store.event("metrics", port=server.port)
        if on_ready is not None:
            on_ready(coordinator)
        end = coordinator.run()
        progress = store.progress()
        return RunSummary(
            run_id=store.run().run_id,
            folder=store.folder,
            status=end.status,
            reason=end.reason,
            slots=progress.slots,
            committed=progress.committed,
            by_status=progress.by_status,
            by_variant=_by_variant(store),
            wall_s=round(time.monotonic() - started_s, 3),
        )


def answers_of(folder: Path) -> dict[str, Answer]:
    """By trial, what is graded instead of what an agent leaves; empty, where agents run."""
    try:
        there = json.loads((folder / ANSWERS).read_bytes())
    except FileNotFoundError:
        return {}
    return {name: Answer(archive=folder / one["archive"], agent=one["agent"]) for name, one in there.items()}


def sweep(*, everything: bool = False) -> Reaped:
    """Take away what killed runs left on this machine and its engine: containers, folders and mounts.

    Without an engine, folders and mounts; `no_engine` says why. `everything`: also what is of owners that may live,
    but not here: of another boot, pid namespace or machine.
    """
    from sandbox_exec.sandbox import engine  # the SDK takes half a second to load

    try:
        with contextlib.closing(engine.connect()) as client:
            return reaper.reap(client, everything=everything)
    except SandboxUnavailable as error:
        return reaper.reap(everything=everything, no_engine=str(error))
    except engine.EngineErrors as error:
        return reaper.reap(everything=everything, no_engine=engine.explain(error))


def _at_once(experiment: Experiment, trials: int) -> Experiment:
    design = experiment.design.model_copy(update={"max_concurrency": trials})
    return experiment.model_copy(update={"design": design})


def _local_backend(experiment: Experiment, containment: str, folder: Path) -> LocalBackend:
    grading = experiment.grading
    functions = any(variant.agent.function is not None for variant in experiment.variants)
    functions = functions or (grading is not None and grading.function is not None)
    in_docker = experiment.sandbox.kind == "docker"
    return LocalBackend(
        experiment.design.max_concurrency,
        limits=() if in_docker else limits_of(experiment, [unseen_runs(experiment, folder)]),
        graders=limits_of_graders(experiment),
        docker=in_docker,
        containment=containment,
        preload=["cloudpickle"] if functions else [],  # what their pickles are made of
    )


def _check_run(experiment: Experiment, workers: int | None, containment: str, backend: WorkerBackend | None) -> None:
    """Refuse what cannot be run, here and now, before there is a run."""
    if workers is not None and workers < 1:
        raise InvalidValue(f"workers is {workers}; at least 1 is needed")
    if containment not in ("auto", *Rung):
        raise InvalidValue(f"there is no containment {containment!r}; allowed: auto, {', '.join(Rung)}")
    faults = [*_not_hidden(experiment), *_not_in_docker(experiment), *_not_in_environment(experiment)]
    if faults:
        raise InvalidExperiment("\n  ".join(["this experiment cannot be run:", *faults]))
    if (
        backend is None
        and experiment.sandbox.kind == "process"
        and (containment != "auto" or experiment.sandbox.require is not None)
    ):
        found = chosen(containment)
        for limits in limits_of(experiment):
            require(found, limits)
    serves = experiment.grading is not None and experiment.grading.services == "keep"
    if backend is None and experiment.sandbox.kind == "process" and serves:
        found = chosen(containment)
        if found.rung is not Rung.ROOT_NAMESPACES:
            why = "only so can a grader share an agent's network, and nobody else's"
            raise SandboxUnavailable(f"grading.services: keep needs root, or docker: {why}; here is {found.rung}")


def _check_artifacts(experiment: Experiment) -> None:
    """Refuse archives that cannot be unpacked. A run that is continued has done so: its inputs are the same."""
    faults: dict[Path, str] = {}
    for variant in experiment.variants:
        if variant.agent.artifact is not None and (archive := experiment.base / variant.agent.artifact) not in faults:
            try:
                verify(archive)
                faults[archive] = ""
            except InvalidArtifact as error:
                faults[archive] = f"variant {variant.id!r}: agent.artifact: {error}"
    if any(faults.values()):
        raise InvalidArtifact("\n  ".join(["this experiment cannot be run:", *filter(None, faults.values())]))


def _unpack_artifacts(folder: Path, experiment: Experiment) -> dict[str, Unpacked]:
    """By variant. Each archive once; what is there already and was not touched stays."""
    unpacked: dict[str, Unpacked] = {}
    for variant in experiment.variants:
        if variant.agent.artifact is not None:
            archive = experiment.base / variant.agent.artifact
            target = folder / ARTIFACTS / archive_digest(archive).removeprefix("sha256:")
            target.parent.mkdir(exist_ok=True)
            manifest = unpack(archive, target, replace=True)
            unpacked[variant.id] = Unpacked(target / FILES, manifest.entrypoint)
    for stale in (folder / ARTIFACTS).glob(".*.tmp") if unpacked else ():  # of one that was killed at it
        remove_scratch(str(stale))
    return unpacked


def _not_hidden(experiment: Experiment) -> Iterable[str]:
    """What an agent would be given that belongs to its grading."""
    secret = hidden_from_agents(experiment)
    for workspace in dict.fromkeys(task.workspace for task in experiment.tasks if task.workspace is not None):
        top = experiment.base / workspace
        held = next((path for path in secret if path.is_relative_to(top) or top.is_relative_to(path)), None)
        if held is not None:
            yield f"workspace {str(workspace)!r} holds {held}, which belongs to the grading: keep them apart"


def _not_in_docker(experiment: Experiment) -> Iterable[str]:
    if experiment.sandbox.kind != "docker":
        return
    for variant in experiment.variants:
        if variant.agent.python is not None or variant.agent.function is not None:
            yield f"variant {variant.id!r}: a function runs in the process sandbox only; for docker: command, artifact"
    for limits in limits_of(experiment):
        for path in limits.hidden:
            shown = next((one for one in limits.readable if path.is_relative_to(one)), None)
            if shown is not None:
                yield f"sandbox.readable: {shown} holds {path}, which no agent may see; docker cannot hide a part of it"
                return


def _not_in_environment(experiment: Experiment) -> Iterable[str]:
    for variant in experiment.variants:
        missing = [name for name in variant.pass_env if name not in os.environ]
        if missing:
            yield f"variant {variant.id!r}: pass_env names {', '.join(missing)}, which your environment does not have"


def _checked_id(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        allowed = "up to 128 letters, digits, '.', '_' and '-', the first a letter, a digit or '_'"
        raise InvalidValue(f"{run_id!r} is not a run's id; allowed: {allowed}")
    return run_id


def _check_unchanged(store: RunStore, experiment: Experiment) -> None:
    old = {**store.inputs(), **store.run().digests}
    now = with_submitted(store, experiment)
    images = image_digests(now)
    # An image that was not there may have been built since: its trials that ran have failed, and the others can run.
    known = {name: digest for name, digest in images.items() if old.get(name, MISSING) != MISSING}
    inputs = {name: digest for name, digest in old.items() if name in known or not name.startswith(IMAGE)}
    changes = changed_inputs(inputs, {**input_digests(experiment), **file_digests(now), **known})
    for variant in experiment.variants:
        digest = variant.agent.function
        if isinstance(digest, str) and not _is_intact(_function_file(store.folder, digest), digest):
            changes.append(f"the function of variant {variant.id!r} is gone from the run's folder, or is another")
    if changes:
        lines = [
            "the inputs are not those that the run was made with, and its trials must all have the same:",
            *changes,
            "Put them back, or start a new run",
        ]
        raise InvalidExperiment("\n  ".join(lines))


def _function_file(folder: Path, digest: str) -> Path:
    return folder / FUNCTIONS / f"{digest}.pkl"


def _is_intact(file: Path, digest: str) -> bool:
    try:
        return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" == digest
    except OSError:
        return False


def _by_variant(store: RunStore) -> dict[str, dict[Status, int]]:
    found: dict[str, dict[Status, int]] = {}
    rows = store.query(
        """SELECT s.variant_id, c.status, count(*) FROM commits c JOIN schedule s ON s.schedule_idx = c.schedule_idx
           GROUP BY s.variant_id, c.status ORDER BY min(c.schedule_idx)"""
    )
    for variant_id, status, count in rows:
        found.setdefault(variant_id, {})[Status(status)] = count
    return found


def _live_status(folder: Path) -> dict[str, Any]:
    try:
        answer = ask(folder, do="status", timeout_s=STATUS_S)
    except RunNotActive:  # it is beginning or ending
        return {}
    return answer if answer.get("status") in get_args(RunState) else {}


def _metrics_text(folder: Path) -> str:
    return str(ask(folder, do="metrics", timeout_s=STATUS_S)["text"])


def _lifecycle(progress: Progress, live: Mapping[str, Any], ended: int) -> dict[str, int]:
    """From the database what is committed; how far the rest is, a living coordinator knows better."""
    skipped, completed = progress.by_status.get(Status.SKIPPED, 0), progress.by_status.get(Status.SUCCESS, 0)
    left = progress.slots - progress.committed
    assigned = progress.active - ended
    found = {"pending": left - progress.active, "assigned": assigned, "executing": 0, "retrying": 0, "finished": ended}
    if live:
        known = live["metrics"]["lifecycle"]
        found = {name: known[name] for name in ("pending", "assigned", "executing", "retrying", "finished")}
    return {**found, "completed": completed, "failed": progress.committed - completed - skipped, "skipped": skipped}


def _details(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: said[name] for name in ("phase", "events", "memory_bytes") if name in said}


def _last_failures(store: RunStore, committed: int, by_status: Mapping[Status, int]) -> tuple[Failure, ...]:
    if sum(by_status.values()) == by_status.get(Status.SUCCESS, 0):
        return ()
    rows = store.query(
        """SELECT s.trial_id, c.status, c.error_type FROM commits c JOIN schedule s ON s.schedule_idx = c.schedule_idx
           WHERE c.schedule_idx >= ? AND c.status != ? AND c.error_type IS NOT ?
           ORDER BY c.schedule_idx DESC LIMIT ?""",
        committed - _LOOK_BACK,
        Status.SUCCESS.value,
        PURGED,
        _LAST_FAILURES,
    )
    found = [Failure(trial_id=trial_id, status=Status(status), error_type=kind) for trial_id, status, kind in rows]
    return tuple(reversed(found))
