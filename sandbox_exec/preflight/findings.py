"""What is found: one by one by those who look, and for people as few lines as say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from pydantic import Field

from sandbox_exec.contracts import Contract

_MAX_ALIKE: Final = 20  # findings of one kind that are told one by one
_MAX_NAMES: Final = 3  # of tasks or variants that share a finding

Level = Literal["error", "warning", "note"]
_LEVELS: Final[tuple[Level, ...]] = ("error", "warning", "note")


class Finding(Contract):
    """One thing that a person should know before a run."""

    level: Level = Field(description="error: a run would fail or mean nothing; warning: it may; note: as you like.")
    place: str = Field(description="A field of the experiment, a task, a variant or an image.")
    what: str = Field(description="What is wrong.")
    todo: str = Field(description="What to do about it.")


class Preflight(Contract):
    """What was looked at, and what was found. `format` changes when a reader of the JSON would have to."""

    format: Literal[1] = 1
    experiment: str
    quick: bool = Field(description="Whether only the static part was looked at.")
    findings: tuple[Finding, ...] = Field(description="Errors first.")
    checked: tuple[str, ...] = Field(description="What was looked at, in words.")
    from_cache: int = Field(default=0, description="How many images and trials were in order the last time.")
    wall_s: float = Field(ge=0)

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not has_error(self.findings)


class Found(NamedTuple):
    """A finding of one task, variant or image; those that differ in nothing else are told as one."""

    level: Level
    field: str
    what: str
    todo: str
    kind: str = ""  # task, variant, image
    name: str = ""


def has_error(found: Iterable[Found | Finding]) -> bool:
    return any(one.level == "error" for one in found)


def told(found: Iterable[Found]) -> list[Finding]:
    """For people: errors first, each thing once, and of very many alike the first."""
    names: dict[Found, dict[str, None]] = {}
    for one in found:
        names.setdefault(one._replace(name=""), {})[one.name] = None
    told: list[Finding] = []
    alike: Counter[tuple[Level, str, str]] = Counter()
    for one, of in names.items():
        key = (one.level, one.kind, one.field)
        alike[key] += 1
        if alike[key] <= _MAX_ALIKE:
            told.append(Finding(level=one.level, place=_place(one, list(of)), what=one.what, todo=one.todo))
    for (level, kind, field), count in alike.items():
        if count > _MAX_ALIKE:
            place, what = f"{kind}s: {field}" if kind else field, f"{count - _MAX_ALIKE} more findings of this kind"
            told.append(Finding(level=level, place=place, what=what, todo="do the same about them"))
    return sorted(told, key=lambda finding: _LEVELS.index(finding.level))


def _place(one: Found, names: list[str]) -> str:
    if not one.kind:
        return one.field
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    of = f"{one.kind}{'s' * (len(names) > 1)} {shown}{more}"
    return f"{of}: {one.field}" if one.field else of
