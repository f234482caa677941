"""The shell's door. Human output is for people, on a terminal or in a file; `--json` is for programs.

Exit codes: 0 done, 2 bad usage or experiment, 3 this machine cannot do what was asked, 4 interrupted and can be
continued, or no room in a run's queue now, 5 it failed. The commands about runs are in `cli_runs` and `cli_queue`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, get_args

import typer

from sandbox_exec import __version__, cli_artifacts, cli_images, cli_preflight, cli_queue, cli_reap, cli_report
from sandbox_exec.cli_runs import register
from sandbox_exec.contracts import Limits, Require
from sandbox_exec.errors import (
    InvalidExperiment,
    InvalidValue,
    PreflightFailed,
    QueueFull,
    SandboxExecError,
    SandboxUnavailable,
)
from sandbox_exec.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sandbox_exec.doctor import Diagnosis

BAD_USAGE: Final = 2
PREFLIGHT_FAILED: Final = 3
NO_ROOM: Final = 4
FAILED: Final = 5
WIDTH: Final = 100  # where no terminal says its own

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line. An error of ours is one message on stderr; only a bug of ours is a traceback."""
    try:
        app(prog_name="sandbox-exec")
    except SandboxExecError as error:
        print(f"sandbox-exec: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def exit_code(error: SandboxExecError) -> int:
    if isinstance(error, InvalidValue | InvalidExperiment):
        return BAD_USAGE
    if isinstance(error, PreflightFailed | SandboxUnavailable):
        return PREFLIGHT_FAILED
    return NO_ROOM if isinstance(error, QueueFull) else FAILED


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sandbox-exec {__version__}")
        raise typer.Exit


def _one_of(allowed: tuple[str, ...]) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}")
        return value

    return check


@app.callback(
    epilog="""Examples:

\b
  sandbox-exec doctor                        what this machine gives
  sandbox-exec preflight experiment.yaml     what would go wrong, before it does
  sandbox-exec run experiment.yaml           durably; Ctrl-C, then `continue`
  sandbox-exec submit RUN more.jsonl         further tasks, while it runs or before it goes on
  sandbox-exec report RUN                    who passed what, with intervals
  sandbox-exec grade RUN                     again, without the agents
"""
)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    """Run untrusted agents in sandboxes that can truly be killed."""


@app.command(epilog="Exit codes: 0 done; 2 bad usage; 3 no sandbox can be had, or none as strong as --require asks.")
def doctor(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    require: Annotated[
        str | None,
        typer.Option(
            callback=_one_of(get_args(Require)),
            metavar="WHAT",
            help=f"Fail if the machine gives less, as Limits(require=WHAT) does: {', '.join(get_args(Require))}.",
        ),
    ] = None,
) -> None:
    """Show what this machine gives: rungs, limits, Docker; how that is known, and how to get more."""
    from sandbox_exec.containment import require as hold_to
    from sandbox_exec.doctor import diagnose
    from sandbox_exec.sandbox.provider import chosen

    diagnosis = diagnose()
    if json:
        print(diagnosis.model_dump_json(indent=2))
    else:
        show(diagnosis)
    if diagnosis.chosen is None:
        raise SandboxUnavailable("no sandbox can be had here: `rungs` says why, for each")
    if require is not None:
        hold_to(chosen(), Limits.model_validate({"require": require}))  # as a Pool does it


register(app)  # what is about durable runs
cli_queue.register(app)
cli_images.register(app)
cli_artifacts.register(app)
cli_reap.register(app)
cli_report.register(app)
cli_preflight.register(app)


# --- for people ------------------------------------------------------------------------------------


def show(diagnosis: Diagnosis) -> None:
    """Print it as tables of at most 100 columns; without lines and colours where there is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        console.width = min(console.width, WIDTH)
        _show(diagnosis, console)
        return
    console.width = WIDTH
    with console.capture() as capture:
        _show(diagnosis, console)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _show(diagnosis: Diagnosis, console: Console) -> None:
    machine = diagnosis.machine
    console.print(
        f"sandbox-exec {machine.sandbox_exec} on {machine.system} {machine.kernel} "
        f"({machine.architecture}), Python {machine.python}, {machine.cores} cores, "
        f"{format_bytes(machine.memory_bytes)}, uid {machine.uid}"
    )
    console.print(f"A Pool takes here: {diagnosis.chosen or 'nothing, it refuses to start'}", style="bold")
    for table in (_rung_table, _limit_table, _more_table, _advice_table):
        if (filled := table(diagnosis, console.is_terminal)).row_count:
            console.print()
            console.print(filled)
    for note in diagnosis.notes:
        console.print(f"\nNote: {note}")


def _rung_table(diagnosis: Diagnosis, lines: bool) -> Table:
    table = _table(lines, "rung", "here", "how it is known")
    for rung in diagnosis.rungs:
        mark = "used" if rung.chosen else "yes" if rung.available else "no"
        table.add_row(rung.rung, _mark(mark, not rung.available), _said(rung.how_found, rung.why_not))
    return table


def _limit_table(diagnosis: Diagnosis, lines: bool) -> Table:
    table = _table(lines, "limit", "held by", f"what that means, on {diagnosis.chosen}")
    for limit in diagnosis.limits:
        table.add_row(limit.name, _mark(limit.held_by, bool(limit.to_get)), limit.meaning)
    return table


def _more_table(diagnosis: Diagnosis, lines: bool) -> Table:
    table = _table(lines, "beside", "here", "how it is known")
    cgroups, docker = diagnosis.cgroups, diagnosis.docker
    versions = " ".join(sorted({f"v{hierarchy.version}" for hierarchy in cgroups.hierarchies})) or "none"
    table.add_row("cgroups", versions, _said("the trees that are mounted", cgroups.failure))
    for controller in cgroups.controllers:
        mark = _mark(controller.held_by, bool(controller.to_get))
        found = controller.how_found + (f", in {controller.folder}" if controller.folder else "")
        table.add_row(f"  {controller.name}", mark, _said(found, controller.why_not))
    mark = _mark(docker.state, bool(docker.to_get))
    version = f" is version {docker.version}, API {docker.api_version}" if docker.state == "answers" else ""
    table.add_row("docker", mark, _said(f"{docker.address}{version}", docker.why_not))
    return table


def _advice_table(diagnosis: Diagnosis, lines: bool) -> Table:
    """What to do, each once, with all that it is good for."""
    good_for: dict[str, list[str]] = {}
    for name, advice in (
        *((str(rung.rung), rung.to_get) for rung in diagnosis.rungs),
        *((limit.name, limit.to_get) for limit in diagnosis.limits),
        *((controller.name, controller.to_get) for controller in diagnosis.cgroups.controllers),
        ("docker (for sandbox.kind: docker only)", diagnosis.docker.to_get),
    ):
        if advice and name not in good_for.setdefault(advice, []):
            good_for[advice].append(name)
    table = _table(lines, "to get", "do this", wrap_from=0)
    for advice, names in good_for.items():
        table.add_row(", ".join(names), advice)
    return table


def _table(lines: bool, *columns: str, wrap_from: int = 2) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if lines else None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index < wrap_from, overflow="fold")
    return table


def _mark(word: str, is_lacking: bool) -> Text:
    from rich.text import Text

    return Text(word, style="yellow" if is_lacking else "green")


def _said(found: str, why_not: str) -> str:
    return f"{found}: {why_not}" if why_not else found
