"""The command that looks at an experiment before it is run: preflight."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sandbox_exec.contracts import Rung

if TYPE_CHECKING:
    from sandbox_exec.preflight import Preflight

PREFLIGHT_FAILED: Final = 3
CTRL_C: Final = 130  # as a shell says it of what that ended
_STYLES: Final = {"error": "bold red", "warning": "yellow", "note": "dim"}
_WIDTH: Final = 120  # of the table on a wide terminal


def register(app: typer.Typer) -> None:
    """Add the command to the shell's door."""
    app.command(
        epilog="""Examples:

\b
  sandbox-exec preflight experiment.yaml            all of it: files, images, and trials of a grader
  sandbox-exec preflight experiment.yaml --quick    what takes no time, as `run` does before it starts
  sandbox-exec preflight experiment.yaml --json | jq -r '.findings[] | select(.level == "error").what'

Exit codes: 0 no errors, though there may be warnings; 2 bad usage or experiment; 3 errors.
"""
    )(preflight)


def preflight(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="A YAML file.")],
    quick: Annotated[bool, typer.Option("--quick", help="Neither images nor trials: milliseconds.")] = False,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Leave out what was in order and has not changed since.")
    ] = True,
    runs: Annotated[str, typer.Option("--runs", metavar="DIR", help="Where the run would be: is there room?")] = "runs",
    containment: Annotated[
        str, typer.Option("--containment", metavar="RUNG", help=f"auto, or a rung: {', '.join(Rung)}.")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs; progress goes to stderr.")] = False,
) -> None:
    """Find what would go wrong with an experiment.

    Looks at its files and at the machine, into its images, and lets its graders grade an agent that does nothing, which
    must not pass, and each task's reference solution, which must. No agent of the experiment is started.
    """
    from sandbox_exec import preflight as door

    try:
        report = door.preflight(
            experiment,
            quick=quick,
            say=_say,
            runs=runs,
            containment=containment,
            cache=True if cache else None,
        )
    except KeyboardInterrupt:
        print("sandbox-exec: interrupted; nothing is left of it", file=sys.stderr)
        raise typer.Exit(CTRL_C) from None
    if json:
        print(report.model_dump_json(indent=2))
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(PREFLIGHT_FAILED)


def _show(report: Preflight) -> None:
    """As a table; without colours where there is no terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sandbox_exec.display import clean, lines_of
    from sandbox_exec.units import format_seconds

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("level", no_wrap=True)
    table.add_column("place", overflow="fold", max_width=32)
    table.add_column("what, and what to do", overflow="fold")
    for finding in report.findings:
        said = Text.assemble(clean(finding.what), "\n", (f"-> {clean(finding.todo)}", "cyan"))
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(clean(finding.place)), said)
    console = Console(highlight=False, markup=False, emoji=False)
    if report.findings and console.is_terminal:
        console.print(table, width=min(console.width, _WIDTH))
    elif report.findings:
        print("\n".join(lines_of(table)))
    for line in report.checked:
        print(f"checked: {clean(line)}")
    if report.from_cache:
        print(f"{report.from_cache} images and trials were in order the last time, and have not changed")
    counts = Counter[str](finding.level for finding in report.findings)
    told = [f"{count} {level}{'s' * (count != 1)}" for level in _STYLES if (count := counts[level])]
    print(f"{', '.join(told) or 'nothing found'}; in {format_seconds(report.wall_s)}")


def _say(line: str) -> None:
    from sandbox_exec.display import clean

    print(clean(line), file=sys.stderr, flush=True)
