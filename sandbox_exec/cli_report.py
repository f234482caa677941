"""The command about what came out of a run: report.

A report is laid out once, as sections of plain text cells, and written twice: as tables for a terminal and as Markdown.
Names and messages in it are others': they steer no terminal, and are no markup of any kind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from sandbox_exec.errors import InvalidValue
from sandbox_exec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sandbox_exec.contracts import Isolation, Status
    from sandbox_exec.report import Comparison, Conditions, MeanScore, Paired, PassRate, Percentiles, Report

WIDTH: Final = 100  # the most that a table takes, and what it takes where no terminal says its own
ROWS: Final = 20  # of one table on a terminal; Markdown and JSON have all
KS: Final = 6  # columns of pass@k that fit
NOTHING: Final = "-"

_EPILOG: Final = """Examples:

\b
  sandbox-exec report night-1                        tables, for people
  sandbox-exec report night-1 --md -o results.md     to be published, with the conditions of the run
  sandbox-exec report night-1 --json | jq '.variants[] | {variant_id, pass_rate}'

A run that is worked at, or was interrupted, can be reported too: the report says how far it is. The same commits give
the same bytes every time.
"""


def register(app: typer.Typer) -> None:
    """Add the command to the shell's door."""
    app.command(epilog=_EPILOG)(report)


def report(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or its id below --runs.")],
    runs: Annotated[str, typer.Option("--runs", metavar="DIR", help="Where runs are.")] = "runs",
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    md: Annotated[bool, typer.Option("--md", help="As a Markdown document.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write it there instead of printing it.")
    ] = None,
) -> None:
    """Show what came out of a run.

    By variant: pass rate, score, pass@k, time and memory; by tag; variants compared on the same tasks; what failed and
    why. A trial that failed by its agent counts as not passed; one that failed by something else does not count.
    """
    from sandbox_exec.report import report_of
    from sandbox_exec.runs import find_run

    if json and md:
        raise InvalidValue("both --json and --md are given; a report has one form")
    found = report_of(find_run(name, runs))
    if out is None and not json and not md:
        _show(found)
        return
    text = found.model_dump_json(indent=2) + "\n" if json else markdown(found) if md else plain(found)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"cannot write {out}: {error.strerror or error}") from error


# --- what it says ---


class Section(NamedTuple):
    """One table. In the columns of `said` stands what agents said, or what is to be copied."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    said: Sequence[str] = ()
    words: Sequence[str] = ()  # columns of text, which may be cut on a terminal


def heading(report: Report) -> str:
    """How far the run is, on one line."""
    far = "finished" if report.finished else "NOT FINISHED"
    return f"{far}: {report.committed} of {report.slots} trials committed"


def sections(report: Report) -> Iterator[Section]:
    """All tables that have something in them."""
    for section in (
        _results(report),
        _abilities(report),
        _endings(report),
        _pass_at_k(report),
        _costs(report),
        _by_tag(report),
        _compared(report),
        _metrics(report),
        _failures(report),
    ):
        if section.rows:
            yield section


def _results(report: Report) -> Section:
    rows = [
        [one.variant_id, f"{one.trials}/{one.slots}", str(one.counted), *_rate(one.pass_rate), *_score(one.score)]
        for one in report.variants
    ]
    columns = ["variant", "trials", "counted", "passed", "pass rate (95 %)", "score", "(95 %)"]
    return Section("Results", columns, rows, words=["variant"])


def _endings(report: Report) -> Section:
    rows = [
        [one.variant_id, _counts(one.by_status), str(one.graded), _counts(one.not_counted)] for one in report.variants
    ]
    return Section(
        "How trials ended",
        ["variant", "ended as", "graded", "not counted"],
        rows,
        words=["variant", "ended as", "not counted"],
    )


def _pass_at_k(report: Report) -> Section:
    ks = sorted({one.k for variant in report.variants for one in variant.pass_at_k})
    if len(ks) < 2:
        return Section("pass@k", [], [])
    if len(ks) > KS:
        ks = [k for k in ks if re.fullmatch("[125]0*", str(k)) or k == ks[-1]]
        ks = [*ks[: KS - 1], ks[-1]] if len(ks) > KS else ks
    rows = []
    for variant in report.variants:
        known = {one.k: _percent(one.value) for one in variant.pass_at_k}
        rows.append([variant.variant_id, *(known.get(k, NOTHING) for k in ks)])
    return Section("pass@k", ["variant", *(f"pass@{k}" for k in ks)], rows, words=["variant"])


def _costs(report: Report) -> Section:
    if not any(one.wall_s or one.peak_memory_bytes for one in report.variants):
        return Section("Time and memory", [], [])
    rows = [
        [
            one.variant_id,
            *_three(one.wall_s, format_seconds),
            *_three(one.peak_memory_bytes, lambda size: format_bytes(round(size))),
        ]
        for one in report.variants
    ]
    columns = ["variant", "time p50", "p90", "p99", "memory p50", "p90", "p99"]
    return Section("Time and memory", columns, rows, words=["variant"])


def _abilities(report: Report) -> Section:
    rows = [
        [
            one.variant_id,
            str(one.repeat),
            _number(one.ability, "+"),
            "-" if one.standard_error is None else _number(one.standard_error),
            f"{one.solved} of {one.tasks}",
            one.ended or "-",
        ]
        for one in report.abilities
    ]
    return Section("Ability", ["variant", "repeat", "ability", "error", "solved", "ended by"], rows, words=["variant"])


def _by_tag(report: Report) -> Section:
    rows = [
        [one.tag, one.variant_id, str(one.tasks), str(one.counted), *_rate(one.pass_rate), *_score(one.score)[:1]]
        for one in report.tags
    ]
    columns = ["tag", "variant", "tasks", "counted", "passed", "pass rate (95 %)", "score"]
    return Section("By tag", columns, rows, words=["tag", "variant"])


def _compared(report: Report) -> Section:
    rows = [
        [one.variant_id, one.against, what, *_difference(paired, share=what == "pass rate")]
        for one in report.comparisons
        for what, paired in _both(one)
    ]
    return Section(
        "Compared on the same tasks",
        ["variant", "against", "in", "tasks", "difference", "(95 %)", "above 0"],
        rows,
        words=["variant", "against", "in"],
    )


def _both(one: Comparison) -> Iterator[tuple[str, Paired]]:
    if one.pass_rate:
        yield "pass rate", one.pass_rate
    if one.score:
        yield "score", one.score


def _metrics(report: Report) -> Section:
    names = sorted({name for variant in report.variants for name in variant.metrics})
    rows = [
        [name, variant.variant_id, str(variant.metrics[name].n), _number(variant.metrics[name].mean)]
        for name in names
        for variant in report.variants
        if name in variant.metrics
    ]
    columns = ["metric", "variant", "trials", "mean"]
    return Section("Metrics", columns, rows, said=["metric"], words=["metric", "variant"])


def _failures(report: Report) -> Section:
    rows = [
        [
            str(group.count),
            group.status.value,
            ": ".join(filter(None, (group.error_type, group.message))) or NOTHING,
            ", ".join(f"{variant} {count}" for variant, count in group.by_variant.items()),
            ", ".join(group.examples),
        ]
        for group in report.failures
    ]
    return Section(
        "What failed",
        ["trials", "status", "why", "by variant", "for example"],
        rows,
        said=["why", "for example"],
        words=["status", "why", "by variant", "for example"],
    )


def _conditions(conditions: Conditions, run_id: str) -> list[tuple[str, str]]:
    """What is to be copied stands in the second."""
    graders = [f"{digest} ({_trials(count)})" for digest, count in conditions.grader_digests.items()]
    seen = [
        f"{'grader' if one.phase == 'grade' else one.phase}, {_trials(one.trials)}: {_isolation(one.isolation)}"
        for one in conditions.isolation
    ]
    images = [f"{name} = {digest}" for name, digest in conditions.images.items()]
    known = set(conditions.images.values())
    images += [f"{one} ({_trials(count)})" for one, count in conditions.image_ids.items() if one not in known]
    return [
        ("run", run_id),
        ("made", conditions.created_at),
        ("experiment", conditions.experiment),
        ("experiment digest", conditions.experiment_digest),
        ("inputs digest", conditions.inputs_digest),
        ("seed", str(conditions.seed)),
        ("tasks x repeats", f"{conditions.tasks} x {conditions.repeats}"),
        ("sandbox", conditions.sandbox),
        *(("isolation", one) for one in seen),
        *(("image", one) for one in images),
        *(("grader digest", one) for one in graders),
        ("report made by", f"sandbox-exec {conditions.sandbox_exec}"),
    ]


def _in_short(conditions: Conditions) -> str:
    rungs = sorted({str(one.isolation.rung) for one in conditions.isolation if one.phase == "agent"})
    held = f" ({', '.join(rungs)})" if rungs else ""
    tasks = f"{conditions.tasks} tasks x {conditions.repeats}"
    return f"{tasks}, seed {conditions.seed}, sandbox {conditions.sandbox}{held}; --md has all conditions"


def _isolation(one: Isolation) -> str:
    words = [
        f"{one.rung}, memory {one.memory}, pids {one.pids}, cpu {one.cpu}, files {one.filesystem}, disk {one.disk}",
        f"network {one.network}, seccomp {'yes' if one.seccomp else 'no'}, landlock {one.landlock or 'no'}",
    ]
    return ", ".join([*words, *(f"not held: {note}" for note in one.notes)])


# --- cells ---


def _rate(rate: PassRate | None) -> list[str]:
    if rate is None:
        return [NOTHING, NOTHING]
    return [f"{rate.passed}/{rate.n}", f"{_percent(rate.rate)} [{rate.low * 100:.1f}, {rate.high * 100:.1f}]"]


def _score(score: MeanScore | None) -> list[str]:
    return [NOTHING, NOTHING] if score is None else [_number(score.mean), _interval(score.low, score.high)]


def _difference(paired: Paired, share: bool) -> list[str]:
    def shown(value: float) -> str:
        return f"{value * 100:+.1f}" if share else _number(value, "+")

    interval = NOTHING
    if paired.low is not None and paired.high is not None:
        interval = f"[{shown(paired.low)}, {shown(paired.high)}]"
    above = NOTHING if paired.above is None else _percent(paired.above)
    return [str(paired.tasks), f"{shown(paired.difference)}{' pp' * share}", interval, above]


def _three(found: Percentiles | None, shown: Callable[[float], str]) -> list[str]:
    return [NOTHING] * 3 if found is None else [shown(found.p50), shown(found.p90), shown(found.p99)]


def _interval(low: float | None, high: float | None) -> str:
    return NOTHING if low is None or high is None else f"[{_number(low)}, {_number(high)}]"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign}.3f}" if 0.1 <= abs(value) < 1000 or value == 0 else f"{value:{sign}.3g}"


def _counts(by_status: Mapping[Status, int]) -> str:
    return ", ".join(f"{count} {status.value}" for status, count in by_status.items()) or NOTHING


def _trials(count: int) -> str:
    return f"{count} trial{'s' * (count != 1)}"


# --- for people ---


def plain(report: Report) -> str:
    """As tables without lines and colours, of at most 100 columns."""
    from sandbox_exec.display import lines_of

    lines = [line for part in _parts(report, lines=False) for line in lines_of(part, WIDTH)]
    return "\n".join(lines) + "\n"


def _show(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        sys.stdout.write(plain(report))
        return
    console.width = min(console.width, WIDTH)
    for part in _parts(report, lines=True):
        console.print(part)


def _parts(report: Report, lines: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    from sandbox_exec.display import clean

    yield Text(clean(f"run {report.run_id}, experiment {report.conditions.experiment}"), "bold")
    yield Text(heading(report), "bold" if report.finished else "bold yellow")
    yield Text(_in_short(report.conditions), "dim")
    for section in sections(report):
        yield Text()
        yield Text(section.title, "bold")
        yield _failure_lines(section) if section.title == "What failed" else _table(section, lines)
        if len(section.rows) > ROWS:
            yield Text(f"... and {len(section.rows) - ROWS} more: --md and --json have all", "dim")
    if report.notes:
        yield Text()
    for note in report.notes:
        yield Text(clean(f"Note: {note}"))


def _table(section: Section, lines: bool) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from sandbox_exec.display import clean

    table = Table(box=box.SIMPLE_HEAD if lines else None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in section.columns:
        # Numbers are never cut; what is of words gives way.
        is_words = column in section.words
        table.add_column(column, justify="left" if is_words else "right", no_wrap=not is_words, overflow="fold")
    for row in section.rows[:ROWS]:
        table.add_row(*(Text(clean(cell)) for cell in row))
    return table


def _failure_lines(section: Section) -> RenderableType:
    """Five columns of words do not fit beside each other."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from sandbox_exec.display import clean

    parts: list[RenderableType] = []
    for count, status, why, by_variant, examples in section.rows[:ROWS]:
        parts.append(Text(clean(f"{count:>5}  {status}  {why}"), no_wrap=True, overflow="ellipsis"))
        parts.append(
            Padding(Text(clean(f"by {by_variant}; for example {examples}"), "dim", overflow="fold"), (0, 0, 0, 7))
        )
    return Group(*parts)


# --- to be published ---


def markdown(report: Report) -> str:
    """As a Markdown document, in ASCII but for what others wrote."""
    run = f"Run {_code(report.run_id)} of experiment {_code(report.conditions.experiment)}"
    state = f"**{heading(report)}**" if not report.finished else heading(report)
    parts = ["# Report", f"{run}. {state[0].upper() + state[1:]}."]
    for section in sections(report):
        parts += [f"## {section.title}", _markdown_table(section)]
    parts += ["## Conditions", "\n".join(_conditions_table(report))]
    if report.notes:
        parts += ["## Notes", "\n".join(f"- {_escaped(note)}" for note in report.notes)]
    parts.append(
        "What counts: a graded trial by its grade; one without a grade that its agent is to blame for as not passed, "
        "with score 0; all others do not count. Intervals are of 95 %: Wilson's for pass rates, clustered by task for "
        "scores, a seeded paired bootstrap over tasks for differences (pp: percentage points; above 0: the share of "
        "its rounds in which the difference is). Time and memory are of the agent's phase."
    )
    return "\n\n".join(parts) + "\n"


def _markdown_table(section: Section) -> str:
    lines = [
        _row(section.columns),
        _row("---" if column in section.words else "---:" for column in section.columns),
        *(
            _row(
                _code(cell) if column in section.said else _escaped(cell) if column in section.words else cell
                for column, cell in zip(section.columns, row, strict=True)
            )
            for row in section.rows
        ),
    ]
    return "\n".join(lines)


def _conditions_table(report: Report) -> Iterator[str]:
    yield _row(["what", "which"])
    yield _row(["---", "---"])
    for what, which in _conditions(report.conditions, report.run_id):
        yield _row([what, _code(which)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    """As code: nothing in it is markup. A pipe would end the cell even there."""
    from sandbox_exec.display import clean

    inner = clean(text).replace("`", "'").replace("|", "\\|")
    return f"`{inner}`" if inner.strip(f" {NOTHING}") else NOTHING


# Not all that Markdown has: inside a line or a cell, "#" and "-" begin nothing, and nor does a "_" inside a word.
_MARKUP: Final = re.compile(r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")


def _escaped(text: str) -> str:
    from sandbox_exec.display import clean

    return _MARKUP.sub(r"\\\g<0>", clean(text))
