"""The commands about durable runs: run, continue, status, pause, resume, stop, history, schema.

While a run is worked at, Ctrl-C means: start nothing more, finish what is in flight. A second one, or SIGTERM, means:
kill what is in flight; nothing of it is committed, and it runs again when the run is continued. Either way the exit
code is 4; or 0, if nothing is left to do: so ends a run with `--keep-open`. A terminal that is closed ends the
coordinator as `kill -9` does: workers finish their trials, and `continue` takes them up.
"""

from __future__ import annotations

import json as json_
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from sandbox_exec.contracts import Contract, Experiment, Judged, Rung
from sandbox_exec.errors import InvalidValue, PreflightFailed, SandboxExecError

if TYPE_CHECKING:
    from rich.console import Console

    from sandbox_exec.coordinator import Coordinator
    from sandbox_exec.display import Display
    from sandbox_exec.runs import RunStatus, RunSummary

INTERRUPTED: Final = 4
CTRL_C: Final = 130  # as a shell says it of what that ended: there is nothing to continue
FAILED: Final = 5
EXPERIMENT_FILE: Final = "ExperimentFile"
WATCH_S: Final = 0.5  # between two looks at a run of another process
_CODES: Final = {"completed": 0, "interrupted": INTERRUPTED, "failed": FAILED}
_RUN_CODES: Final = (
    "Exit codes: 0 completed; 2 bad usage or experiment; 3 no such sandbox here; 4 interrupted, can be continued; "
    "5 the run failed, or another process holds it."
)

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or its id below --runs.")]
Runs = Annotated[str, typer.Option("--runs", metavar="DIR", help="Where runs are.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
JsonAtEnd = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout at the end; progress goes to stderr.")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Trials at once, in place of design.max_concurrency."),
]
Containment = Annotated[
    str,
    typer.Option("--containment", metavar="RUNG", help=f"auto, or a rung of `doctor`'s: {', '.join(Rung)}."),
]
KeepOpen = Annotated[
    bool, typer.Option("--keep-open", help="When all is done, wait for tasks from `submit`, until it is stopped.")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        metavar="N",
        min=0,
        max=65535,
        help="Serve metrics for Prometheus at this port of the loopback, without a password; 0 picks one.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the shell's door."""
    app.command(epilog=_examples(_RUN_EXAMPLES, _RUN_CODES))(run)
    app.command("continue", epilog=_examples(_CONTINUE_EXAMPLES, _RUN_CODES))(continue_)
    app.command(epilog=_examples(_GRADE_EXAMPLES, _RUN_CODES))(grade)
    app.command(epilog=_examples(_STATUS_EXAMPLES))(status)
    app.command(epilog=_examples(_PAUSE_EXAMPLES))(pause)
    app.command(epilog=_examples(_RESUME_EXAMPLES))(resume)
    app.command(epilog=_examples(_STOP_EXAMPLES))(stop)
    app.command(epilog=_examples(_HISTORY_EXAMPLES))(history)
    app.command(epilog=_examples(_SCHEMA_EXAMPLES))(schema)


_RUN_EXAMPLES = """
  sandbox-exec run experiment.yaml                    into ./runs, with what this machine has
  sandbox-exec run experiment.yaml --run-id night-1   under a name of your own
  sandbox-exec run experiment.yaml --workers 2 --json > summary.json
  sandbox-exec run experiment.yaml --keep-open --metrics-port 9464   as a service: `submit` gives it tasks
"""
_CONTINUE_EXAMPLES = """
  sandbox-exec continue night-1         what ./runs/night-1 has not committed
  sandbox-exec continue /data/night-1
"""
_GRADE_EXAMPLES = """
  sandbox-exec grade night-1                            the same grader again, on what the agents left
  sandbox-exec grade night-1 --with strict.yaml         another one; the grades of before are kept
  sandbox-exec grade night-1 --only variant=careful --only status=grade_error
  sandbox-exec grade --predictions answers.jsonl experiment.yaml
"""
_STATUS_EXAMPLES = """
  sandbox-exec status night-1           once
  sandbox-exec status night-1 --watch   until nobody works at it any more
  sandbox-exec status night-1 --json
"""
_RESUME_EXAMPLES = """
  sandbox-exec resume night-1
"""
_PAUSE_EXAMPLES = """
  sandbox-exec pause night-1            every trial stands still, and so do the deadlines
  sandbox-exec resume night-1
"""
_STOP_EXAMPLES = """
  sandbox-exec stop night-1             finish what is in flight
  sandbox-exec stop night-1 --now       kill it; it runs again when the run is continued
"""
_HISTORY_EXAMPLES = """
  sandbox-exec history night-1 | sha256sum      the same for the same experiment, whatever happened to the run
  sandbox-exec history night-1 | jq .status
"""
_SCHEMA_EXAMPLES = """
  sandbox-exec schema                   names
  sandbox-exec schema Experiment > experiment.schema.json
"""


def _examples(text: str, more: str = "") -> str:
    return f"Examples:\n\n\b\n{text.strip(chr(10))}\n\n{more}"


# --- working at a run ---


def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="A YAML file.")],
    runs: Runs = "runs",
    run_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The run's name. Default: of the experiment's name and the time.")
    ] = None,
    workers: Workers = None,
    containment: Containment = "auto",
    preflight: Annotated[
        bool, typer.Option("--preflight/--no-preflight", help="Whether the quick checks are made before it.")
    ] = True,
    keep_open: KeepOpen = False,
    metrics_port: MetricsPort = None,
    json: JsonAtEnd = False,
) -> None:
    """Run an experiment.

    Durably: it can be watched, paused, stopped and continued. Ctrl-C finishes what is in flight and stops; a second
    one kills it. Nothing that was committed is lost.
    """
    from sandbox_exec import runs as door
    from sandbox_exec.experiment import load_experiment

    loaded = load_experiment(experiment)
    if preflight:
        _check(loaded, runs, workers, containment)

    def work(display: Display, on_ready: Callable[[Coordinator], None]) -> RunSummary:
        return door.run(
            loaded,
            runs=runs,
            run_id=run_id,
            workers=workers,
            containment=containment,
            callbacks=[display],
            on_ready=on_ready,
            keep_open=keep_open,
            metrics_port=metrics_port,
        )

    _work(work, json, keep_open=keep_open, metrics=metrics_port is not None)


def _check(experiment: Experiment, runs: str, workers: int | None, containment: str) -> None:
    """The quick part of `preflight`: warnings are told, errors end it."""
    from sandbox_exec.preflight import quick_check

    findings = quick_check(experiment, runs=runs, workers=workers, containment=containment)
    for finding in findings:
        if finding.level == "warning":
            print(f"sandbox-exec: warning: {finding.place}: {finding.what}; {finding.todo}", file=sys.stderr)
    errors = [f"{one.place}: {one.what}; {one.todo}" for one in findings if one.level == "error"]
    if errors:
        raise PreflightFailed(
            "\n  ".join(["this experiment would not get far (--no-preflight runs it all the same):", *errors])
        )


def continue_(
    name: Run,
    runs: Runs = "runs",
    workers: Workers = None,
    containment: Containment = "auto",
    keep_open: KeepOpen = False,
    metrics_port: MetricsPort = None,
    json: JsonAtEnd = False,
) -> None:
    """Continue a run that was stopped or died.

    As if nothing had happened. Refused if the experiment's files are not those that the run was made with.
    """
    from sandbox_exec import runs as door

    folder = door.find_run(name, runs)

    def work(display: Display, on_ready: Callable[[Coordinator], None]) -> RunSummary:
        return door.continue_run(
            folder,
            workers=workers,
            containment=containment,
            callbacks=[display],
            on_ready=on_ready,
            keep_open=keep_open,
            metrics_port=metrics_port,
        )

    _work(work, json, keep_open=keep_open, metrics=metrics_port is not None)


def grade(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="The run to grade again; with --predictions, an experiment.")
    ],
    runs: Runs = "runs",
    with_: Annotated[
        Path | None, typer.Option("--with", metavar="FILE", help="A YAML file with another `grading`.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="KIND=VALUE", help="variant=ID, task=ID, tag=TAG or status=STATUS; repeatable."),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL: task_id, and answer or files; variant and repeat if wanted."),
    ] = None,
    workers: Workers = None,
    containment: Containment = "auto",
    json: JsonAtEnd = False,
) -> None:
    """Grade without agents: what a run left, again; or answers that were made elsewhere.

    Each grading is a run of its own, in the run's folder, and can be continued; earlier grades are kept.
    """
    from sandbox_exec import regrade
    from sandbox_exec import runs as door

    if predictions is not None and (with_ is not None or only):
        raise InvalidValue("--predictions takes neither --with nor --only: the experiment has the grading")
    before: Path | None = None if predictions is not None else door.find_run(name, runs)

    def work(display: Display, on_ready: Callable[[Coordinator], None]) -> RunSummary:
        how: dict[str, Any] = {"workers": workers, "containment": containment, "on_ready": on_ready}
        how["callbacks"] = [display]
        if before is None:
            assert predictions is not None
            return regrade.grade_predictions(predictions, name, runs=runs, **how)
        return regrade.grade_run(before, grading=with_, only=only or (), **how)

    def tell(summary: RunSummary) -> None:
        for line in regrade.lines_of(summary.folder, before):
            print(line, file=sys.stderr if json else sys.stdout)

    _work(work, json, tell)


def _work(
    work: Callable[[Display, Callable[[Coordinator], None]], RunSummary],
    json: bool,
    tell: Callable[[RunSummary], None] = lambda summary: None,
    *,
    keep_open: bool = False,
    metrics: bool = False,
) -> None:
    from sandbox_exec.display import display_on

    console = _console(stderr=json)
    display = display_on(console)

    def on_ready(coordinator: Coordinator) -> None:
        signals.take(coordinator)
        display.line(_beginning(coordinator))
        if keep_open:
            display.line(f"open for more: sandbox-exec submit {_shown(coordinator.store.folder)} TASKS.jsonl")
        if metrics:
            print(f"metrics: http://127.0.0.1:{_metrics_port(coordinator)}/metrics", file=sys.stderr, flush=True)

    try:
        with _Signals(display) as signals:
            with display:
                summary = work(display, on_ready)
            tell(summary)
            _print_summary(summary, json)  # still deaf to a Ctrl-C that comes late
    except KeyboardInterrupt:
        print("sandbox-exec: interrupted before the first trial", file=sys.stderr)
        raise typer.Exit(CTRL_C) from None
    raise typer.Exit(_CODES[summary.status])


def _print_summary(summary: RunSummary, json: bool) -> None:
    from sandbox_exec.display import lines_of, summary_table

    if json:
        print(summary.model_dump_json(indent=2))
    else:
        for line in lines_of(summary_table(summary)) if summary.committed else ():
            print(line)
    print(_ending(summary), file=sys.stderr if json else sys.stdout, flush=True)


def _metrics_port(coordinator: Coordinator) -> int:
    sql = "SELECT data FROM events WHERE kind = 'metrics' ORDER BY id DESC LIMIT 1"
    ((data,),) = coordinator.store.query(sql)
    return int(json_.loads(data)["port"])


def _beginning(coordinator: Coordinator) -> str:
    progress, design = coordinator.store.progress(), coordinator.experiment.design
    done = f", {progress.committed} of them committed" if progress.committed else ""
    return f"{_shown(coordinator.store.folder)}: {progress.slots} trials{done}, {design.max_concurrency} at once"


def _ending(summary: RunSummary) -> str:
    from sandbox_exec.display import clean
    from sandbox_exec.units import format_seconds

    folder = _shown(summary.folder)
    far = f"{summary.committed} of {summary.slots} trials committed in {format_seconds(summary.wall_s)}"
    if summary.status == "completed":
        return f"completed: {far}, in {folder}"
    reason = f" ({clean(summary.reason)})" if summary.reason else ""
    then = "then " if summary.reason.startswith("blocked:") else ""  # which says what is to be done first
    return f"{summary.status}{reason}: {far}\nto go on: {then}sandbox-exec continue {folder}"


def _shown(folder: Path) -> str:
    """As short as it can be from here."""
    below = os.path.relpath(folder)
    return str(folder) if below.startswith("..") else below


class _Signals:
    """Ctrl-C and SIGTERM, once there is a coordinator: words to it, and never an exception."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._asked = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def take(self, coordinator: Coordinator) -> None:
        """From here on there is somebody to tell."""
        self._coordinator = coordinator
        for signum in (signal.SIGINT, signal.SIGTERM):
            # A script that started us in the background has us ignore Ctrl-C, as it is not for us.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._asked = 2 if signum == signal.SIGTERM else self._asked + 1
        if self._asked == 1:
            self._display.say("finishing the trials in flight, then stopping; Ctrl-C again kills them")
            self._coordinator.drain("Ctrl-C")
        else:
            self._display.say("killing the trials in flight; nothing of them is committed")
            self._coordinator.kill("killed by a signal")


# --- looking at a run, and steering it ---


def status(
    name: Run,
    runs: Runs = "runs",
    watch: Annotated[bool, typer.Option("--watch", help="Until nobody works at it any more.")] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON; with --watch, one object a line.")] = False,
) -> None:
    """Show how far a run is, and what is in flight."""
    from sandbox_exec import runs as door
    from sandbox_exec.display import status_lines

    folder = door.find_run(name, runs)
    if watch:
        _watch(lambda: door.status_of(folder), json)
        return
    found = door.status_of(folder)
    print(found.model_dump_json(indent=2) if json else "\n".join(status_lines(found)))


def _watch(look: Callable[[], RunStatus], json: bool) -> None:
    """Ends when nobody holds the run. There is no handle to wait on for news of another process's run."""
    from rich.live import Live

    from sandbox_exec.display import Eta, picture, progress_line, status_lines, view_of

    console = _console()
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal and not json else None
    found, last = look(), ""
    eta = Eta(time.monotonic())
    try:
        if live:
            live.start()
        while found.owner is not None:
            eta_s = eta.left_s(time.monotonic(), found.slots - found.committed)
            if live:
                live.update(picture(view_of(found, eta_s), console.height), refresh=True)
            else:
                line = found.model_dump_json() if json else progress_line(view_of(found, eta_s))
                if json or line.split(";")[0] != last:
                    print(line, flush=True)
                last = line.split(";")[0]
            time.sleep(WATCH_S)
            before, found = found.committed, look()
            if found.committed > before:
                eta.note(time.monotonic(), found.committed - before)
    except KeyboardInterrupt:
        return  # of watching, not of the run
    finally:
        if live:
            live.stop()
    print(found.model_dump_json() if json else "\n".join(status_lines(found)))


def pause(name: Run, runs: Runs = "runs", json: Json = False) -> None:
    """Freeze a run that is worked at.

    Nothing more is started, what is in flight stands still, and its deadlines with it. Ends the run as interrupted
    if a trial cannot be frozen.
    """
    answer = _ask(name, runs, do="pause")
    if answer["status"] == "paused":
        _say(answer, json, f"paused; trials in flight that stand still: {answer['frozen']}")
        return
    _say(answer, json, f"interrupted: these did not freeze: {', '.join(answer.get('survivors', ()))}")
    raise typer.Exit(INTERRUPTED)


def resume(name: Run, runs: Runs = "runs", json: Json = False) -> None:
    """Let a paused run go on."""
    answer = _ask(name, runs, do="resume")
    _say(answer, json, f"{answer['status']}")


def stop(
    name: Run,
    runs: Runs = "runs",
    now: Annotated[bool, typer.Option("--now", help="Kill what is in flight instead of finishing it.")] = False,
    json: Json = False,
) -> None:
    """Stop a run that is worked at.

    Returns when it has stopped; it can be continued. Ctrl-C ends the waiting; the run stops all the same.
    """
    from sandbox_exec import runs as door
    from sandbox_exec.store import wait_until_free

    folder = door.find_run(name, runs)
    _ask(folder, runs, do="stop", now=now)
    try:
        wait_until_free(folder)
    except KeyboardInterrupt:
        raise typer.Exit(CTRL_C) from None
    found = door.status_of(folder)
    far = f"{found.committed} of {found.slots} trials committed"
    hint = "" if found.status == "completed" else f"; to go on: sandbox-exec continue {_shown(found.folder)}"
    answer = {"status": found.status, "committed": found.committed, "slots": found.slots}
    _say(answer, json, f"{found.status}: {far}{hint}")


def history(
    name: Run,
    runs: Runs = "runs",
    grading: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of the run's N-th grading by `grade`, not of the run itself."),
    ] = None,
) -> None:
    """Write what the agents did.

    As canonical JSON, one committed trial a line. The same experiment gives the same bytes, at any concurrency and
    after any crash: no times, no workers.
    """
    from sandbox_exec import runs as door
    from sandbox_exec.regrade import GRADINGS
    from sandbox_exec.store import RunStore
    from sandbox_exec.store import history as lines

    folder = door.find_run(name, runs)
    if grading is not None:
        folder = door.find_run(folder / GRADINGS / str(grading), folder / GRADINGS)
    with RunStore.open(folder, write=False) as store:
        sys.stdout.buffer.writelines(lines(store))
    sys.stdout.buffer.flush()


def schema(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A contract's name; without it, all are listed.")
    ] = None,
) -> None:
    """Print the JSON Schema of a contract.

    ExperimentFile is that of the file that `run` takes; TrialCompletion that of completion.json; RunSummary and
    RunStatus those of what `run` and `status` print.
    """
    contracts = _contracts()
    names = sorted([*contracts, EXPERIMENT_FILE])
    if name is None:
        print("\n".join(names))
    elif name == EXPERIMENT_FILE:
        print(json_.dumps(_file_schema(), indent=2))
    elif name in contracts:
        # What we write has more than what is read: what follows from the rest, such as blame.
        mode: Any = "serialization" if issubclass(contracts[name], Judged) else "validation"
        print(json_.dumps(contracts[name].model_json_schema(mode=mode), indent=2))
    else:
        raise InvalidValue(f"there is no contract {name!r}; allowed: {', '.join(names)}")


def _file_schema() -> dict[str, Any]:
    """That of an experiment as a YAML file: tasks may be in a file of their own, and agents are no callables."""
    schema = Experiment.model_json_schema()
    properties = schema["properties"]
    for name in ("base", "sources"):
        del properties[name]
    tasks = properties["tasks"]
    listed = {name: tasks.pop(name) for name in ("type", "items", "minItems")}
    tasks["anyOf"] = [{"type": "string", "description": "A JSONL file, relative to this one."}, listed]
    del schema["$defs"]["AgentSpec"]["properties"]["function"]
    return {**schema, "title": EXPERIMENT_FILE}


def _contracts() -> dict[str, type[Contract]]:
    import sandbox_exec.doctor
    import sandbox_exec.images
    import sandbox_exec.preflight
    import sandbox_exec.report
    import sandbox_exec.runs
    import sandbox_exec.submission  # noqa: F401  # contracts of their own

    found: dict[str, type[Contract]] = {}
    pending = [Contract]
    while pending:
        for contract in pending.pop().__subclasses__():
            pending.append(contract)
            if not contract.__name__.startswith("_") and contract.__module__.startswith("sandbox_exec."):
                found[contract.__name__] = contract
    return dict(sorted(found.items()))


def _ask(name: str | Path, runs: str, **request: Any) -> dict[str, Any]:
    from sandbox_exec import runs as door
    from sandbox_exec.control import ask

    answer = ask(door.find_run(name, runs), **request)
    if "error" in answer:
        raise SandboxExecError(str(answer["error"]))
    return answer


def _say(answer: dict[str, Any], json: bool, text: str) -> None:
    print(json_.dumps(answer) if json else text)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)
