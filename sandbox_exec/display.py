"""What people see of a run: a live picture on a terminal, lines elsewhere, and a table when it has ended.

A display is a `RunCallback` and hears nothing else, so it costs a run only what its callbacks take. What agents said
(the types and messages of their errors) is shown without control characters and is never read as markup.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sandbox_exec.contracts import Slot, Status, TrialCompletion, derive_trial_id
from sandbox_exec.contracts.queue import LEVELS
from sandbox_exec.coordinator import Coordinator, RunCallback, RunEnd
from sandbox_exec.runs import InFlight, RunStatus, RunSummary
from sandbox_exec.units import format_bytes, format_seconds

WIDTH: Final = 100  # where no terminal says its own
EACH: Final = 200  # trials of a run up to which every one has a line of its own, where there is no terminal
QUIET_S: Final = 10.0  # without a line, after which one says how far the run is
FAILURES: Final = 5  # how many of the last are shown
_LOOK_S: Final = 0.1  # at most so often is the coordinator asked what is in flight
_FRAMES: Final = 8  # a second
_ETA_TRIALS: Final = 3  # before which an estimate would be a guess
_ETA_MEMORY_S: Final = 60.0  # what was longer ago counts less and less
_MAX_MESSAGE: Final = 60  # characters of an error
_FIXED_LINES: Final = 9  # of the picture, with the head of its table: what is left of a terminal is for trials
_FEW_ROWS: Final = 4
_SHORT_S: Final = 0.05  # would be shown as 0.0 s


@dataclass(frozen=True)
class View:
    """All that a picture shows, at one instant."""

    run_id: str
    state: str
    slots: int
    committed: int
    by_status: Mapping[Status, int]
    in_flight: Sequence[InFlight]
    failures: Sequence[str] = ()
    waiting: int = 0  # ended, and not yet committed: an earlier one has not ended
    elapsed_s: float | None = None
    eta_s: float | None = None
    notice: str = ""


class Eta:
    """How long the rest takes, by the rate of commits; recent ones count most."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._noted = 0
        self._trials = self._seconds = 0.0

    def note(self, now_s: float, trials: int = 1) -> None:
        """So many have been committed now."""
        self._trials, self._seconds = self._faded(now_s)
        self._trials += trials
        self._noted += trials
        self._since_s = now_s

    def left_s(self, now_s: float, left: int) -> float | None:
        """Seconds until `left` more are committed; None while nobody can know."""
        trials, seconds = self._faded(now_s)
        if self._noted < _ETA_TRIALS or trials <= 0:
            return None
        left_s = left * seconds / trials
        return left_s if left_s < _ETA_MEMORY_S * 1e6 else None

    def _faded(self, now_s: float) -> tuple[float, float]:
        passed_s = now_s - self._since_s
        share = math.exp(-passed_s / _ETA_MEMORY_S)
        return self._trials * share, self._seconds * share + passed_s


# --- pictures and lines ---


def picture(view: View, height: int = 40) -> RenderableType:
    """All of a view, for a terminal of so many lines."""
    if not view.slots:
        return Text(view.state, "bold")  # how much there is to do is not known yet
    parts: list[RenderableType] = [_bar(view), Text(_ended(view), "dim")]
    rows = max(_FEW_ROWS, height - _FIXED_LINES - len(view.failures))
    if view.in_flight:
        parts += [Text(), _in_flight_table(view.in_flight, rows)]
    if view.failures:
        parts += [Text(), Text("last failures", "bold")]
        parts += [Text(f"  {line}", "yellow", no_wrap=True, overflow="ellipsis") for line in view.failures]
    if view.notice:
        parts += [Text(), Text(view.notice, "bold")]
    return Group(*parts)


def progress_line(view: View) -> str:
    """How far a run is, on one line."""
    parts = [f"{view.committed}/{view.slots}", view.state]
    if view.in_flight:
        oldest_s = max(one.age_s for one in view.in_flight)
        parts.append(f"{len(view.in_flight)} in flight, the oldest for {_age(oldest_s)}")
    return "; ".join([*parts, f"ETA {_eta(view.eta_s)}", _ended(view)])


def trial_line(completion: TrialCompletion, slots: int) -> str:
    """One committed trial, on one line."""
    digits = len(str(slots))
    number = f"{completion.slot.schedule_idx + 1:>{digits}}/{slots}"
    took = format_seconds(completion.usage.wall_s) if completion.usage else "-"
    why = f"  {_why(completion)}" if completion.error else ""
    return f"{number}  {completion.status.value:<17} {took:>8}  {completion.trial_id}{why}"


def failure_line(completion: TrialCompletion) -> str:
    why = f"  {_why(completion)}" if completion.error else ""
    return f"{completion.trial_id}  {completion.status.value}{why}"


def summary_table(summary: RunSummary) -> Table:
    """Variants and how their trials ended."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("variant", no_wrap=True, overflow="ellipsis")
    present = [status for status in Status if summary.by_status.get(status)]
    for status in present:
        table.add_column(status.value, justify="right")
    for variant, counts in summary.by_variant.items():
        cells = [str(counts[status]) if counts.get(status) else "-" for status in present]
        table.add_row(Text(clean(variant)), *cells)
    return table


def status_lines(status: RunStatus) -> list[str]:
    """A run at one instant, for people, without a terminal."""
    reason = f": {clean(status.reason)}" if status.reason else ""
    owner = status.owner
    lines = [
        f"run        {status.run_id}",
        f"folder     {status.folder}",
        f"status     {status.status}{reason}",
        f"held by    {f'process {owner.pid} on {owner.host}, since {owner.since}' if owner else 'nobody'}",
        f"committed  {status.committed} of {status.slots}",
    ]
    if status.by_status:
        lines.append(f"ended as   {_counts(status.by_status)}")
    figures = (status.metrics or {}) if owner else {}  # the last coordinator's are of another time
    for title, rows in (
        ("lifecycle", _lifecycle(status)),
        ("queue", _depth(figures)),
        ("rate", _rate(figures)),
        ("failing", _failing(figures)),
        ("alerts", [_alert_line(one) for one in figures.get("alerts", ())]),
        ("lanes", [_lane_line(name, lane, owner is not None) for name, lane in (status.lanes or {}).items()]),
        ("ability", _abilities(status.queue)),
        ("in flight", [_in_flight_line(one) for one in status.in_flight]),
        ("failures", _failures(status)),
    ):
        for number, row in enumerate(rows):
            lines.append(f"{title if number == 0 else '':<10} {row}".rstrip())
    return lines


def view_of(status: RunStatus, eta_s: float | None = None) -> View:
    return View(
        run_id=status.run_id,
        state=status.status,
        slots=status.slots,
        committed=status.committed,
        by_status=status.by_status,
        in_flight=status.in_flight,
        failures=_failures(status),
        eta_s=eta_s,
    )


def _failures(status: RunStatus) -> list[str]:
    lines = (f"{one.trial_id}  {one.status.value}  {clean(one.error_type or '')}" for one in status.last_failures)
    return [line.rstrip() for line in lines]


def _lifecycle(status: RunStatus) -> list[str]:
    """Where something is left to do: else `ended as` says the same."""
    if status.committed == status.slots:
        return []
    return [", ".join(f"{count} {name}" for name, count in status.lifecycle.items() if count)]


def _depth(figures: Mapping[str, Any]) -> list[str]:
    depth = figures.get("depth") or {"total": 0}
    if not depth["total"]:
        return []
    levels = {str(number): name for name, number in LEVELS.items()}
    parts = [f"{count} {levels.get(key, f'of priority {key}')}" for key, count in depth["by_priority"].items() if count]
    return [f"{depth['total']} waiting: {', '.join(parts)}"]


def _rate(figures: Mapping[str, Any]) -> list[str]:
    if not figures or not figures["throughput_per_minute"]["start"]:
        return []
    parts = [f"{figures['throughput_per_minute']['minute']:.0f} trials a minute"]  # of the first one, a part
    if (busy := figures["utilisation"]["minute"]) is not None:
        parts.append(f"workers {busy:.0%} busy")
    for name, what in (("wait_s", "waited"), ("latency_s", "took")):
        if (half := figures[name]["p50"]) is not None:
            parts.append(f"half {what} up to {_age(half)}")
    return [", ".join(parts)]


def _failing(figures: Mapping[str, Any]) -> list[str]:
    """The worst first, and only some of them: all are in the JSON."""
    rates = figures.get("failure_rate") or {}
    shares = [
        (share["rate"], f"{prefix}{clean(name)}: {share['failed']} of {share['of']} ({share['rate']:.0%})")
        for prefix, kind in (("", "by_variant"), ("tag ", "by_tag"))
        for name, share in rates.get(kind, {}).items()
        if share["failed"]
    ]
    shares.sort(key=lambda one: -one[0])
    more = f"... and {len(shares) - FAILURES} more" if len(shares) > FAILURES else ""
    return [text for text in (*(text for _, text in shares[:FAILURES]), more) if text]


def _alert_line(alert: Mapping[str, Any]) -> str:
    details = [f"{name}={number(value)}" for name, value in alert.items() if name != "alert"]
    return clean("  ".join([str(alert["alert"]), *details]))


def _lane_line(name: str, lane: Mapping[str, Any], live: bool) -> str:
    limit = "" if lane["limit"] is None else f"/{lane['limit']}"
    most = f" (of {lane['max_concurrent']})" if lane["max_concurrent"] != lane["limit"] else ""
    parts = [f"{lane['in_flight']}{limit}{most} in flight"]
    if live and lane["blocked_s"] > 0:
        parts.append(f"blocked for {_age(lane['blocked_s'])}")
    elif live and (lane["opens_in_s"] or 0) >= _SHORT_S:  # None: it is full
        parts.append(f"next start in {_age(lane['opens_in_s'])}")
    if live and lane["tokens_in_window"]:
        parts.append(f"{number(lane['tokens_in_window'])} tokens in the last minute")
    if lane["turned_away"]:
        parts.append(f"turned away {lane['turned_away']} time{'s' * (lane['turned_away'] != 1)}")
    return f"{clean(name)}  {', '.join(parts)}"


def _abilities(queue: Any) -> list[str]:
    """What the adaptive order has learnt; what a queue of the user's own says is in the JSON only."""
    if not isinstance(queue, list) or not all(isinstance(one, dict) and "ability" in one for one in queue):
        return []
    lines = []
    for one in queue:
        repeat = f" repeat {one['repeat']}" if one["repeat"] else ""
        error = "unknown" if one["standard_error"] is None else f"{one['standard_error']:.2f}"
        ended = f"; ended: {one['ended']}" if one["ended"] else ""
        known = f"{one['ability']:+.2f} ± {error}, {one['solved']} of {one['tasks']} tasks solved{ended}"
        lines.append(clean(f"{one['variant_id']}{repeat}  {known}"))
    return lines


def number(value: Any) -> str:
    """A number for people: two places at most."""
    return f"{round(value, 2):.12g}" if isinstance(value, float) else str(value)


def clean(text: str) -> str:
    """Text from anywhere, for a terminal: on one line, and nothing that steers it."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _bar(view: View) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    for _ in range(3):
        row.add_column(no_wrap=True, justify="right")
    elapsed = "" if view.elapsed_s is None else _age(view.elapsed_s)
    row.add_row(
        Text(f"{view.run_id}  {view.state}", "bold"),
        ProgressBar(total=view.slots, completed=view.committed),
        f"{view.committed:>{len(str(view.slots))}}/{view.slots}",
        f"{view.committed * 100 // view.slots:>3} %",
        f"{elapsed:>7}  ETA {_eta(view.eta_s):>7}",  # so that the bar does not jump with them
    )
    return row


def _in_flight_table(trials: Sequence[InFlight], rows: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("in flight", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("attempt", "phase", "age", "memory", "events"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    shown = trials if len(trials) <= rows else trials[: rows - 1]
    for one in shown:
        table.add_row(one.trial_id, str(one.attempt), *_cells(one))
    if len(shown) < len(trials):
        table.add_row(f"... and {len(trials) - len(shown)} more")
    return table


def _in_flight_line(one: InFlight) -> str:
    phase, age, memory, events = _cells(one)
    return f"{one.trial_id}  attempt {one.attempt}, {phase} for {age}, memory {memory}, events {events}"


def _cells(one: InFlight) -> tuple[str, str, str, str]:
    memory = "-" if one.memory_bytes is None else format_bytes(one.memory_bytes)
    return one.phase or "-", _age(one.age_s), memory, "-" if one.events is None else str(one.events)


def _ended(view: View) -> str:
    waiting = f"{view.waiting} ended and waiting for their turn" if view.waiting else ""
    return "; ".join(filter(None, [_counts(view.by_status), waiting])) or "nothing committed yet"


def _counts(by_status: Mapping[Status, int]) -> str:
    return ", ".join(f"{by_status[status]} {status.value}" for status in Status if by_status.get(status))


def _why(completion: TrialCompletion) -> str:
    error = completion.error
    text = clean(f"{error.type}: {error.message}" if error else "")
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}..."


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 59.95 else format_seconds(seconds)


def _eta(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(round(seconds))


# --- displays ---


class Display(RunCallback):
    """What all displays know. `view` may be called from another thread than the coordinator's."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._run: Coordinator | None = None
        self._run_id = ""
        self._state = "starting"
        self._slots = self._committed = self._waiting = 0
        self._by_status = Counter[Status]()
        self._failures: deque[str] = deque(maxlen=FAILURES)
        self._in_flight: list[InFlight] = []
        self._started_s = self._looked_s = now_s()
        self._eta = Eta(self._started_s)
        self._notice = ""

    def view(self) -> View:
        with self._lock:
            now_s = self._now_s()
            passed_s = 0.0 if self._state == "paused" else now_s - self._looked_s
            return View(
                run_id=self._run_id,
                state=self._state,
                slots=self._slots,
                committed=self._committed,
                by_status=dict(self._by_status),
                in_flight=[one.model_copy(update={"age_s": one.age_s + passed_s}) for one in self._in_flight],
                failures=list(self._failures),
                waiting=self._waiting,
                elapsed_s=now_s - self._started_s,
                eta_s=self._eta.left_s(now_s, self._slots - self._committed),
                notice=self._notice,
            )

    def say(self, text: str) -> None:
        """Show a word of ours. May be called from a signal handler."""
        self._notice = text

    def line(self, text: str) -> None:
        """Write a line that stays. Not for signal handlers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    # --- what the coordinator says ---

    def on_run_start(self, run: Coordinator) -> None:
        progress = run.store.progress()
        with self._lock:
            self._run, self._run_id = run, run.store.run().run_id
            self._slots, self._committed = progress.slots, progress.committed
            self._by_status.update(progress.by_status)
            self._eta = Eta(self._now_s())
        self._look()

    def on_trial_selected(self, slot: Slot, attempt: int) -> None:
        self._look_if_due()

    def on_trial_start(self, slot: Slot, attempt: int) -> None:
        self._look_if_due()

    def on_trace(self, slot: Slot, phase: str, events: int) -> None:
        self._look_if_due()

    def on_trial_end(self, completion: TrialCompletion) -> None:
        with self._lock:
            self._committed += 1
            self._slots = len(self._run.board.slots) if self._run is not None else self._slots  # it may have grown
            self._by_status[completion.status] += 1
            self._eta.note(self._now_s())
            # The next look may be far: after its last trial, a run that is kept open has nothing to say.
            self._in_flight = [one for one in self._in_flight if one.trial_id != completion.trial_id]
            if not completion.ok:
                self._failures.append(failure_line(completion))
        self._look_if_due()

    def on_queue_decision(self, kind: str, slot: Slot, reason: str) -> None:
        with self._lock:  # an attempt that ended may be the last news for as long as its lane is shut
            self._in_flight = [one for one in self._in_flight if one.trial_id != derive_trial_id(slot)]

    def on_run_end(self, end: RunEnd) -> None:
        self._look()
        with self._lock:
            self._state = end.status

    def _look_if_due(self) -> None:
        if self._now_s() - self._looked_s >= _LOOK_S:
            self._look()

    def _look(self) -> None:
        """Ask the coordinator, whose thread we are in."""
        if self._run is None:
            return
        counts, found = self._run.board.counts, [InFlight(**one) for one in self._run.in_flight()]
        with self._lock:
            self._state = self._run.mode
            self._slots = len(self._run.board.slots)
            self._waiting = counts.finished + counts.skipped
            self._in_flight = found
            self._looked_s = self._now_s()


class LiveDisplay(Display):
    """A picture that is drawn again several times a second. Gone when it is left: what stays is the summary."""

    def __init__(self, console: Console, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now_s)
        self._console = console
        self._live = Live(
            console=console, get_renderable=self._picture, refresh_per_second=_FRAMES, transient=True, screen=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        self._console.print(Text(text))

    def _picture(self) -> RenderableType:
        return picture(self.view(), self._console.height)


class PlainDisplay(Display):
    """Lines: one for each trial of a small run; for a large one, and when nothing ends, how far it is."""

    def __init__(
        self, write: Callable[[str], object], now_s: Callable[[], float] = time.monotonic, notices: int = 2
    ) -> None:
        """`notices` is the descriptor for `say`: a signal handler may have interrupted a write to the buffer."""
        super().__init__(now_s)
        self._write, self._notices = write, notices
        self._wrote_s = now_s()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody is there to read it
            os.write(self._notices, f"{text}\n".encode())

    def on_trial_end(self, completion: TrialCompletion) -> None:
        super().on_trial_end(completion)
        if self._slots <= EACH:
            self.line(trial_line(completion, self._slots))

    def _look_if_due(self) -> None:
        super()._look_if_due()
        if self._now_s() - self._wrote_s >= QUIET_S:
            self._look()
            self.line(progress_line(self.view()))

    def line(self, text: str) -> None:
        self._wrote_s = self._now_s()
        try:
            self._write(text)
        except OSError:  # a reader that has gone, such as `head`, is no reason to end a run
            self._write = len


def lines_of(renderable: RenderableType, width: int = WIDTH) -> Iterable[str]:
    """What a renderable looks like where there is no terminal: no colours, nothing at the ends of lines."""
    console = Console(width=width, highlight=False, markup=False, emoji=False, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def display_on(console: Console, **options: Any) -> Display:
    """The display for where a console writes."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, **options)
    return PlainDisplay(lambda line: print(line, file=console.file, flush=True), **options)
