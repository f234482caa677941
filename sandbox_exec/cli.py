"""The shell's door. Human output is for people, on a terminal or in a file; `--json` is for programs.

Exit codes: 0 done, 2 bad usage, 3 this machine cannot do what was asked, 5 it failed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from sandbox_exec import __version__
from sandbox_exec.errors import (
    InvalidExperiment,
    InvalidValue,
    PreflightFailed,
    SandboxExecError,
    SandboxUnavailable,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sandbox_exec.doctor import Diagnosis

BAD_USAGE: Final = 2
PREFLIGHT_FAILED: Final = 3
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
    return FAILED


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sandbox-exec {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Examples:  sandbox-exec doctor  |  sandbox-exec doctor --json  |  sandbox-exec doctor --require namespaces"
)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run untrusted agents in sandboxes that can truly be killed."""


@app.command(epilog="Exit codes: 0 done, 2 bad usage, 3 no sandbox can be had, or none as strong as --require.")
def doctor(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    require: Annotated[
        Literal["namespaces+cgroup", "namespaces", "cgroup", "subreaper", "process-group"] | None,
        typer.Option(help="Fail with exit code 3 on a machine that gives less, as Limits(require=...) does."),
    ] = None,
) -> None:
    """Show what this machine gives: each rung, each limit, Docker; how it was found out, and how to get more."""
    from sandbox_exec.doctor import diagnose

    diagnosis = diagnose()
    if json:
        print(diagnosis.model_dump_json(indent=2))
    else:
        show(diagnosis, console())
    diagnosis.check(require)
