"""The command about what killed runs left: reap."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from sandbox_exec.sandbox.reaper import Reaped

NO_ENGINE: Final = 3

_EPILOG: Final = """Examples:

\b
  sandbox-exec reap                     what nobody can want any more
  sandbox-exec reap --all               and what is of owners that cannot be seen from here
  sandbox-exec reap --json | jq '.kept[].name'

Exit codes: 0 done; 3 no engine answers: folders and mounts are taken away all the same.
"""


def register(app: typer.Typer) -> None:
    """Add the command to the shell's door."""
    app.command(epilog=_EPILOG)(reap)


def reap(
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Also what belongs to owners of another boot, pid namespace or machine: they may live."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Take away what killed runs left.

    Containers, scratch folders and mounts of ours whose owner is dead, or whose time has passed. Never those of a run
    that lives on this machine. `run` and `continue` do it too, before their first trial.
    """
    from sandbox_exec import runs as door

    reaped = door.sweep(everything=everything)
    print(reaped.model_dump_json(indent=2) if json else "\n".join(lines_of(reaped)))
    if reaped.no_engine:
        print(f"sandbox-exec: containers were not looked at: {reaped.no_engine}", file=sys.stderr)
        raise typer.Exit(NO_ENGINE)


def lines_of(reaped: Reaped) -> list[str]:
    """For people: what, and why not."""
    from sandbox_exec.display import clean

    taken = [
        *(f"removed container {name}" for name in reaped.containers),
        *(f"removed folder {name}" for name in reaped.folders),
        *(f"unmounted {name}" for name in reaped.mounts),
    ]
    left = [
        *(f"kept {one.name}: {one.why}" for one in reaped.kept),
        *(f"could not remove {one.name}: {one.why}" for one in reaped.failed),
    ]
    return [clean(line) for line in (*(taken or ["nothing to take away"]), *left)]
