"""What a benchmark found: as tables for people, as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .field import Part, Target


def as_json(parts: Sequence[Part]) -> str:
    """Return all that was found; `met` is what the exit code says."""
    found = {
        "machine": machine(),
        "parts": {part.name: {"title": part.title, "rows": part.rows, "failures": part.failures} for part in parts},
        "targets": [asdict(target) | {"is_met": target.is_met} for target in _targets(parts)],
        "met": all_met(parts),
    }
    return json.dumps(found, indent=2)


def show(parts: Sequence[Part], console: Console) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for part in parts:
        console.print(_table(part))
        for side, why in part.failures.items():
            console.print(f"[red]{side} failed:[/] {escape(why)}")
    console.print(_target_table(_targets(parts)))
    missed = [target.what for target in _targets(parts) if not target.is_met]
    console.print(f"[red]not met:[/] {'; '.join(missed)}" if missed else "[green]all targets are met[/]")


def all_met(parts: Sequence[Part]) -> bool:
    return all(target.is_met for target in _targets(parts))


def machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "kernel": platform.release(), "processors": os.cpu_count()}


def _targets(parts: Sequence[Part]) -> list[Target]:
    return [target for part in parts for target in part.targets]


def _table(part: Part) -> Table:
    table = Table(title=part.title, title_justify="left")
    rows = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in part.rows]
    headings = list(rows[0]) if rows else ["nothing was measured"]
    for i, heading in enumerate(headings):
        table.add_column(heading.replace("_per_s", "/s").replace("_", " "), justify="right" if i else "left")
    for row in rows:
        table.add_row(*(escape(_cell(key, value)) for key, value in row.items()))
    return table


def _target_table(targets: Sequence[Target]) -> Table:
    table = Table("target", "measured", "to reach", "", title="Targets", title_justify="left")
    for target in targets:
        sign = ">=" if target.at_least else "<"
        measured = "not measured" if target.measured is None else f"{_number(target.measured)} {target.unit}"
        verdict = "[green]met[/]" if target.is_met else "[red]NOT MET[/]"
        table.add_row(target.what, measured, f"{sign} {_number(target.bound)} {target.unit}", verdict)
    return table


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    return f"{_number(value)}x" if key == "ours_is" else _number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
