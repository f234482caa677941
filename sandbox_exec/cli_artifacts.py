"""The command about frozen artifacts: freeze."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sandbox_exec.contracts import Contract, Manifest
from sandbox_exec.units import format_bytes


class Frozen(Contract):
    """What `freeze` made."""

    archive: Path
    digest: str
    manifest: Manifest


def register(app: typer.Typer) -> None:
    """Add the command to the shell's door."""
    app.command(
        epilog="""Examples:

\b
  sandbox-exec freeze my-agent -o my-agent.tar.gz --entrypoint bin/agent
  sandbox-exec freeze . -o ../solver.tar.gz --entrypoint solve.sh --id solver-2
  sandbox-exec freeze my-agent -o my-agent.tar.gz --entrypoint bin/agent --json | jq -r .digest

In an experiment: `agent: {artifact: my-agent.tar.gz}`. Exit codes: 0 done; 2 the folder cannot be frozen.
"""
    )(freeze)


def freeze(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The agent's folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The archive, a .tar.gz.")],
    entrypoint: Annotated[
        str, typer.Option("--entrypoint", metavar="PATH", help="The program in DIR that is run, such as bin/agent.")
    ],
    id: Annotated[str | None, typer.Option("--id", metavar="NAME", help="Its name. Default: the folder's.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Make an archive of an agent's folder.

    The same files give the same bytes, whoever freezes them and when. A run verifies the archive and shows it to its
    trials read-only, at SANDBOX_EXEC_AGENT.
    """
    from sandbox_exec import artifacts as door

    manifest = door.freeze(folder, output, entrypoint=entrypoint, id=id)
    frozen = Frozen(archive=output, digest=door.archive_digest(output), manifest=manifest)
    if json:
        print(frozen.model_dump_json(indent=2, exclude_none=True))
        return
    size = format_bytes(sum(file.size for file in manifest.files))
    print(f"{output}: {manifest.id}, {_count(len(manifest.files))}, {size}, platform {manifest.platform}")
    print(frozen.digest)


def _count(files: int) -> str:
    return f"{files} file{'s' * (files != 1)}"
