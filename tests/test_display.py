"""What people see of a run, held to what the coordinator said."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from sandbox_exec.contracts import AgentError, Phase, Slot, Status, TrialCompletion, Usage, derive_trial_id
from sandbox_exec.contracts.queue import AlertSettings
from sandbox_exec.coordinator import Coordinator, RunEnd
from sandbox_exec.display import (
    EACH,
    QUIET_S,
    WIDTH,
    Display,
    Eta,
    LiveDisplay,
    PlainDisplay,
    View,
    display_on,
    lines_of,
    picture,
    progress_line,
    status_lines,
    summary_table,
    trial_line,
)
from sandbox_exec.metrics import Metrics
from sandbox_exec.runs import Failure, InFlight, Owner, RunStatus, RunSummary
from sandbox_exec.testing import ManualClock

HOSTILE = "\x1b[2J[bold red]owned[/]\r\n:bug:\u202e"


def slot(idx: int) -> Slot:
    return Slot(schedule_idx=idx, variant_id="wild", task_id=f"task {idx}", repeat=0)


def completion(idx: int, status: Status = Status.SUCCESS, message: str | None = None) -> TrialCompletion:
    return TrialCompletion(
        slot=slot(idx),
        trial_id=derive_trial_id(slot(idx)),
        attempt=1,
        status=status,
        phase=Phase.AGENT,
        error=None if message is None else AgentError(type="Oops", message=message),
        usage=Usage(wall_s=1.5),
    )


def in_flight(idx: int, **details: Any) -> InFlight:
    return InFlight(
        trial_id=derive_trial_id(slot(idx)),
        variant_id="wild",
        task_id=f"task {idx}",
        repeat=0,
        attempt=1,
        **{"age_s": 2.0, **details},
    )


class FakeRun:
    """What a display asks of a coordinator."""

    def __init__(self, slots: int, committed: int = 0) -> None:
        by_status = {Status.SUCCESS: committed} if committed else {}
        progress = SimpleNamespace(slots=slots, committed=committed, by_status=by_status)
        self.store = SimpleNamespace(progress=lambda: progress, run=lambda: SimpleNamespace(run_id="night-1"))
        self.board = SimpleNamespace(counts=SimpleNamespace(finished=0, skipped=0), slots=range(slots))
        self.mode = "running"
        self.trials: list[InFlight] = []

    def in_flight(self) -> list[dict[str, Any]]:
        return [one.model_dump() for one in self.trials]

    def start(self, display: Display) -> None:
        display.on_run_start(cast(Coordinator, self))


def text_of(view: View, height: int = 40) -> str:
    return "\n".join(lines_of(picture(view, height)))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# --- how long it will take ---


def test_the_eta_is_unknown_until_a_few_trials_were_committed(clock: ManualClock) -> None:
    eta = Eta(clock.now_s())
    for _ in range(2):
        clock.advance(1)
        eta.note(clock.now_s())
        assert eta.left_s(clock.now_s(), 10) is None
    clock.advance(1)
    eta.note(clock.now_s())
    assert eta.left_s(clock.now_s(), 10) == pytest.approx(10, rel=0.1)


def test_the_eta_follows_the_rate_without_jumping_to_it(clock: ManualClock) -> None:
    eta = Eta(clock.now_s())
    for _ in range(100):
        clock.advance(1)
        eta.note(clock.now_s())
    slow_s = eta.left_s(clock.now_s(), 100)
    for _ in range(10):
        clock.advance(0.1)
        eta.note(clock.now_s())
    soon_s = eta.left_s(clock.now_s(), 100)
    for _ in range(3000):
        clock.advance(0.1)
        eta.note(clock.now_s())
    later_s = eta.left_s(clock.now_s(), 100)
    assert slow_s is not None
    assert soon_s is not None
    assert later_s is not None
    assert slow_s == pytest.approx(100)
    assert 70 < soon_s < slow_s
    assert later_s == pytest.approx(10, rel=0.1)


def test_the_eta_grows_while_nothing_is_committed_and_is_given_up_in_the_end(clock: ManualClock) -> None:
    eta = Eta(clock.now_s())
    for _ in range(5):
        clock.advance(1)
        eta.note(clock.now_s())
    before_s = eta.left_s(clock.now_s(), 5)
    clock.advance(20)
    after_s = eta.left_s(clock.now_s(), 5)
    assert before_s is not None
    assert after_s is not None
    assert after_s > 2 * before_s
    clock.advance(10_000)
    assert eta.left_s(clock.now_s(), 5) is None


# --- what is counted ---


def test_totals_are_those_of_the_whole_run_from_the_first_moment(clock: ManualClock) -> None:
    run, display = FakeRun(slots=30, committed=12), Display(clock.now_s)
    run.start(display)
    assert (display.view().committed, display.view().slots) == (12, 30)
    display.on_trial_end(completion(12, Status.TASK_TIMEOUT))
    view = display.view()
    assert (view.committed, view.slots) == (13, 30)
    assert view.by_status == {Status.SUCCESS: 12, Status.TASK_TIMEOUT: 1}


def test_the_total_grows_with_the_schedule(clock: ManualClock) -> None:
    run = FakeRun(slots=1)
    display, lines = plain(run, clock)
    display.on_trial_end(completion(0))
    run.board.slots = range(3)
    display.on_trial_end(completion(1))
    assert [line.split()[0] for line in lines] == ["1/1", "2/3"]
    run.board.slots = range(4)
    clock.advance(1)
    display.on_trace(slot(0), "agent", 1)
    assert (display.view().committed, display.view().slots) == (2, 4)


def test_nothing_is_counted_before_it_is_known_how_much_there_is(clock: ManualClock) -> None:
    assert text_of(Display(clock.now_s).view()) == "starting"


def test_what_is_in_flight_ages_between_two_looks_and_not_while_paused(clock: ManualClock) -> None:
    run, display = FakeRun(slots=3), Display(clock.now_s)
    run.trials = [in_flight(0, age_s=1.0)]
    run.start(display)
    clock.advance(5)
    assert display.view().in_flight[0].age_s == 6.0
    run.mode = "paused"
    run.trials = [in_flight(0, age_s=6.0)]
    display.on_trace(slot(0), "agent", 1)
    clock.advance(5)
    assert (display.view().state, display.view().in_flight[0].age_s) == ("paused", 6.0)


def test_the_coordinator_is_not_asked_at_every_event(clock: ManualClock) -> None:
    run, display = FakeRun(slots=3), Display(clock.now_s)
    run.start(display)
    run.trials = [in_flight(0)]
    display.on_trace(slot(0), "agent", 1)
    assert display.view().in_flight == []
    clock.advance(1)
    display.on_trace(slot(0), "agent", 1)
    assert len(display.view().in_flight) == 1


def test_what_is_committed_is_not_in_flight_though_nobody_looked_since(clock: ManualClock) -> None:
    run, display = FakeRun(slots=2), Display(clock.now_s)
    run.trials = [in_flight(0), in_flight(1)]
    run.start(display)
    display.on_trial_end(completion(1))  # too soon for a look; a run that is kept open has no further events
    assert [one.trial_id for one in display.view().in_flight] == [in_flight(0).trial_id]


def test_the_last_failures_are_kept_and_successes_are_not_among_them(clock: ManualClock) -> None:
    run, display = FakeRun(slots=100), Display(clock.now_s)
    run.start(display)
    for idx in range(10):
        display.on_trial_end(completion(idx, Status.AGENT_ERROR, f"no {idx}"))
        display.on_trial_end(completion(idx + 10))
    failures = display.view().failures
    assert [line.partition("Oops: ")[2] for line in failures] == ["no 5", "no 6", "no 7", "no 8", "no 9"]


def test_how_it_ended_is_the_last_word(clock: ManualClock) -> None:
    run, display = FakeRun(slots=1), Display(clock.now_s)
    run.start(display)
    display.on_run_end(RunEnd("interrupted", "Ctrl-C"))
    assert display.view().state == "interrupted"


# --- pictures and lines ---


def view(**fields: Any) -> View:
    known = {"run_id": "night-1", "state": "running", "slots": 20, "committed": 5, "by_status": {Status.SUCCESS: 5}}
    return View(**{**known, "in_flight": [], **fields})


def test_a_picture_has_progress_times_counts_trials_and_failures() -> None:
    text = text_of(
        view(
            in_flight=[in_flight(7, phase="agent", events=3, memory_bytes=3 << 20)],
            failures=["wild.x  agent_error"],
            waiting=4,
            elapsed_s=61.0,
            eta_s=3661.0,
            notice="finishing",
        )
    )
    first, *rest = text.splitlines()
    assert first.split()[:2] == ["night-1", "running"]
    assert " ".join(first.split()).endswith("5/20 25 % 1m 1s ETA 1h 1m")
    assert "5 success; 4 ended and waiting for their turn" in rest[0]
    assert any(line.split()[1:] == ["1", "agent", "2.0", "s", "3", "MiB", "3"] for line in rest)
    assert "  wild.x  agent_error" in rest
    assert rest[-1] == "finishing"


def test_a_picture_says_what_is_not_known_with_a_dash() -> None:
    text = text_of(view(in_flight=[in_flight(7)]))
    assert "ETA       -" in text
    assert any(line.split()[1:] == ["1", "-", "2.0", "s", "-", "-"] for line in text.splitlines())


@pytest.mark.parametrize("height", [1, 10, 24, 60])
def test_a_picture_fits_the_terminal_and_says_what_it_leaves_out(height: int) -> None:
    trials = [in_flight(idx) for idx in range(100)]
    text = text_of(view(in_flight=trials, failures=["one", "two"], notice="finishing"), height)
    shown = text.count("wild.task-")
    assert f"... and {100 - shown} more" in text
    assert len(text.splitlines()) <= max(height, 16)


def test_a_line_of_progress_has_what_matters() -> None:
    line = progress_line(view(in_flight=[in_flight(7), in_flight(8, age_s=90.0)], eta_s=8.2))
    assert line == "5/20; running; 2 in flight, the oldest for 1m 30s; ETA 8 s; 5 success"


def test_a_trial_is_a_line_with_its_number_status_time_and_name() -> None:
    good, bad = trial_line(completion(4), 1000), trial_line(completion(5, Status.AGENT_ERROR, "no"), 1000)
    assert good.split() == ["5/1000", "success", "1.5", "s", derive_trial_id(slot(4))]
    assert bad.endswith("  Oops: no")


def test_what_an_agent_said_cannot_steer_the_terminal(clock: ManualClock) -> None:
    run, display = FakeRun(slots=10), Display(clock.now_s)
    run.start(display)
    bad = completion(0, Status.AGENT_ERROR, HOSTILE)
    display.on_trial_end(bad)
    for text in (text_of(display.view()), trial_line(bad, 10)):
        assert "[bold red]owned[/]" in text
        assert ":bug:" in text
        assert all(char.isprintable() or char == "\n" for char in text)


def test_a_long_message_is_cut() -> None:
    line = trial_line(completion(0, Status.AGENT_ERROR, "x" * 1000), 10)
    assert len(line) < 140
    assert line.endswith("x...")


def test_the_summary_has_a_row_for_each_variant_and_only_the_statuses_there_are() -> None:
    summary = RunSummary(
        run_id="night-1",
        folder=Path("/runs/night-1"),
        status="completed",
        slots=5,
        committed=5,
        by_status={Status.TASK_TIMEOUT: 1, Status.SUCCESS: 4},
        by_variant={"good": {Status.SUCCESS: 3}, HOSTILE: {Status.SUCCESS: 1, Status.TASK_TIMEOUT: 1}},
        wall_s=1.0,
    )
    head, good, hostile = lines_of(summary_table(summary))
    assert head.split() == ["variant", "success", "task_timeout"]
    assert good.split() == ["good", "3", "-"]
    assert hostile.split()[-2:] == ["1", "1"]
    assert hostile.isprintable()


def test_a_status_is_lines_for_people() -> None:
    status = RunStatus(
        run_id="night-1",
        folder=Path("/runs/night-1"),
        status="running",
        created_at=0.0,
        owner=Owner(pid=7, host="here", since="today"),
        slots=5,
        committed=2,
        by_status={Status.SUCCESS: 1, Status.AGENT_ERROR: 1},
        in_flight=(in_flight(3, phase="agent"), in_flight(4)),
        last_failures=(Failure(trial_id="wild.x", status=Status.AGENT_ERROR, error_type=HOSTILE),),
        lifecycle={"pending": 1, "assigned": 0, "executing": 2, "retrying": 0, "completed": 1, "failed": 1},
        metrics=None,
        lanes={},
        queue=None,
    )
    lines = status_lines(status)
    assert "held by    process 7 on here, since today" in lines
    assert "committed  2 of 5" in lines
    assert "ended as   1 success, 1 agent_error" in lines
    assert sum("attempt 1" in line for line in lines) == 2
    assert all(line.isprintable() for line in lines)


def figures(**fields: Any) -> dict[str, Any]:
    """What a coordinator says, of a run in which nothing has happened."""
    metrics = Metrics(AlertSettings(), lambda task_id: (), 0.0).snapshot(0.0)
    return {**metrics, **fields}


def status(owner: bool = True, **fields: Any) -> RunStatus:
    known: dict[str, Any] = {
        "run_id": "night-1",
        "folder": Path("/runs/night-1"),
        "status": "running",
        "created_at": 0.0,
        "owner": Owner(pid=7, host="here", since="today") if owner else None,
        "slots": 5,
        "committed": 5,
        "by_status": {Status.SUCCESS: 5},
        "in_flight": (),
        "last_failures": (),
        "lifecycle": {"pending": 0, "completed": 5},
        "metrics": figures(),
        "lanes": {},
        "queue": None,
    }
    return RunStatus(**{**known, **fields})


def section(lines: list[str], title: str) -> list[str]:
    """The rows below a title, which stands beside the first of them."""
    first = next(idx for idx, line in enumerate(lines) if line.startswith(f"{title} "))
    rows = [lines[first]]
    for line in lines[first + 1 :]:
        if not line.startswith(" "):
            break
        rows.append(line)
    return [row[11:] for row in rows]


def test_a_status_says_no_more_than_there_is() -> None:
    titles = [line[:10].rstrip() for line in status_lines(status())]
    assert titles == ["run", "folder", "status", "held by", "committed", "ended as"]


def test_a_status_has_the_lifecycle_while_something_is_left_to_do() -> None:
    lifecycle = {"pending": 2, "assigned": 0, "executing": 1, "retrying": 1, "finished": 0, "completed": 1}
    assert "lifecycle  2 pending, 1 executing, 1 retrying, 1 completed" in status_lines(
        status(committed=1, lifecycle=lifecycle)
    )


def test_a_status_has_the_depth_by_the_names_of_priorities() -> None:
    depth = {"total": 6, "by_priority": {"10": 1, "7": 2, "0": 3, "-10": 0}}
    lines = status_lines(status(metrics=figures(depth=depth)))
    assert section(lines, "queue") == ["6 waiting: 1 high, 2 of priority 7, 3 normal"]


def test_a_status_has_the_rate_and_the_worst_failure_rates() -> None:
    by_variant = {f"v{n}": {"failed": n, "of": 10, "rate": n / 10} for n in range(6)}
    by_tag = {HOSTILE: {"failed": 2, "of": 2, "rate": 1.0}}
    half = {"p50": 0.5}
    metrics = figures(
        throughput_per_minute={"start": 9.0, "minute": 12.4},
        utilisation={"start": 0.1, "minute": 0.931},
        wait_s=half,
        latency_s={"p50": None},
        failure_rate={"by_variant": by_variant, "by_tag": by_tag, "tags_left_out": 0},
    )
    lines = status_lines(status(metrics=metrics))
    assert section(lines, "rate") == ["12 trials a minute, workers 93% busy, half waited up to 0.5 s"]
    worst, *rest = section(lines, "failing")
    assert (worst.startswith("tag "), worst.isprintable()) == (True, True)
    assert rest == [*(f"v{n}: {n} of 10 ({n}0%)" for n in (5, 4, 3, 2)), "... and 1 more"]


def test_a_status_has_alerts_and_lanes() -> None:
    alert = {"alert": "failure_rate", "variant_id": "v", "failed": 2, "of": 3, "rate": 2 / 3}
    lane = {"in_flight": 2, "limit": 4, "max_concurrent": 8, "blocked_s": 12.34, "tokens_in_window": 4000.0}
    free = {"in_flight": 1, "limit": None, "max_concurrent": None, "blocked_s": 0.0, "tokens_in_window": 0.0}
    lanes = {
        "api": {**lane, "opens_in_s": 12.34, "turned_away": 3},
        "free": {**free, "opens_in_s": 0.01, "turned_away": 0},
        "full": {**free, "opens_in_s": None, "turned_away": 1},
        "slow": {**free, "opens_in_s": 7.5, "turned_away": 0},
    }
    lines = status_lines(status(metrics=figures(alerts=[alert]), lanes=lanes))
    assert section(lines, "alerts") == ["failure_rate  variant_id=v  failed=2  of=3  rate=0.67"]
    assert section(lines, "lanes") == [
        "api  2/4 (of 8) in flight, blocked for 12.3 s, 4000 tokens in the last minute, turned away 3 times",
        "free  1 in flight",
        "full  1 in flight, turned away 1 time",
        "slow  1 in flight, next start in 7.5 s",
    ]


def test_figures_of_a_coordinator_that_has_gone_are_not_shown_as_those_of_now() -> None:
    depth = {"total": 6, "by_priority": {"0": 6}}
    lane = {"in_flight": 0, "limit": 4, "max_concurrent": 4, "blocked_s": 9.0, "tokens_in_window": 4000.0}
    metrics = figures(depth=depth, alerts=[{"alert": "depth", "depth": 6, "limit": 5}])
    lines = status_lines(status(owner=False, metrics=metrics, lanes={"api": {**lane, "turned_away": 3}}))
    assert not any(line.startswith(("queue", "alerts")) for line in lines)
    assert section(lines, "lanes") == ["api  0/4 in flight, turned away 3 times"]


def test_a_status_has_the_abilities_that_the_adaptive_order_found() -> None:
    known = {"variant_id": "v", "repeat": 0, "ability": 0.516, "standard_error": 0.297, "tasks": 7, "chosen": 8}
    found = [
        {**known, "solved": 5, "ended": "standard_error"},
        {**known, "repeat": 1, "ability": -1.0, "standard_error": None, "tasks": 0, "solved": 0, "ended": None},
    ]
    assert section(status_lines(status(queue=found)), "ability") == [
        "v  +0.52 ± 0.30, 5 of 7 tasks solved; ended: standard_error",
        "v repeat 1  -1.00 ± unknown, 0 of 0 tasks solved",
    ]
    own = status_lines(status(queue={"of the user's": "own"}))
    assert not any(line.startswith("ability") for line in own)


# --- without a terminal ---


def plain(run: FakeRun, clock: ManualClock) -> tuple[PlainDisplay, list[str]]:
    lines: list[str] = []
    display = PlainDisplay(lines.append, clock.now_s)
    run.start(display)
    return display, lines


def test_every_trial_of_a_small_run_has_a_line(clock: ManualClock) -> None:
    display, lines = plain(FakeRun(slots=EACH), clock)
    for idx in range(3):
        display.on_trial_end(completion(idx))
    assert [line.split()[0] for line in lines] == [f"{idx}/{EACH}" for idx in (1, 2, 3)]


def test_a_large_run_has_a_line_now_and_then(clock: ManualClock) -> None:
    display, lines = plain(FakeRun(slots=EACH + 1), clock)
    for idx in range(int(3 * QUIET_S)):
        clock.advance(1)
        display.on_trial_end(completion(idx))
    assert [line.split(";")[0] for line in lines] == [f"{n}/{EACH + 1}" for n in (10, 20, 30)]


def test_a_run_in_which_nothing_ends_is_not_silent(clock: ManualClock) -> None:
    run = FakeRun(slots=3)
    display, lines = plain(run, clock)
    run.trials = [in_flight(0)]
    clock.advance(QUIET_S - 1)
    display.on_trace(slot(0), "agent", 1)
    assert lines == []
    clock.advance(1)
    display.on_trace(slot(0), "agent", 1)
    assert len(lines) == 1
    assert "1 in flight" in lines[0]


def test_a_word_of_ours_goes_straight_to_its_descriptor(clock: ManualClock) -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader:
        PlainDisplay(lambda line: None, clock.now_s, notices=write).say("finishing")
        os.close(write)
        assert reader.read() == b"finishing\n"


def test_a_reader_that_has_gone_does_not_disturb_the_run(clock: ManualClock) -> None:
    written = []

    def write(line: str) -> None:
        written.append(line)
        raise BrokenPipeError

    run, display = FakeRun(slots=3), PlainDisplay(write, clock.now_s, notices=1 << 20)
    run.start(display)
    for idx in range(3):
        display.on_trial_end(completion(idx))
    display.say("finishing")
    assert len(written) == 1
    assert display.view().committed == 3


# --- on a terminal ---


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=30, _environ={"TERM": "xterm"})


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_a_picture_and_anything_else_gets_lines() -> None:
    assert isinstance(display_on(terminal()), LiveDisplay)
    for console in (
        Console(file=io.StringIO()),
        Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}),
    ):
        assert isinstance(display_on(console), PlainDisplay)


def test_the_picture_is_gone_when_the_display_is_left_and_lines_stay() -> None:
    console, run = terminal(), FakeRun(slots=4)
    with LiveDisplay(console) as display:
        run.start(display)
        display.line("runs/night-1: 4 trials")
        display.say("finishing")
        display._live.refresh()
        assert "night-1  running" in output(console)
        assert "finishing" in output(console)
        before = len(output(console))
    assert "\x1b[1A\x1b[2K" in output(console)[before:]  # up, and erase the line
    assert "runs/night-1: 4 trials" in output(console)


def test_the_picture_is_taken_away_when_the_run_raises() -> None:
    console = terminal()
    display = LiveDisplay(console)
    with pytest.raises(ZeroDivisionError), display:
        raise ZeroDivisionError
    assert "\x1b[?25h" in output(console)  # the cursor is shown again
