"""The commands about what a run has to do: submit, purge, dead list|show|retry|drop, events.

Each works whether somebody works at the run or not. Where nobody does, it says how to go on with it.
"""

from __future__ import annotations

import json as json_
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from pydantic import ValidationError

from sandbox_exec.contracts import Status
from sandbox_exec.contracts.experiment import faults_of
from sandbox_exec.errors import InvalidExperiment, InvalidValue, QueueFull

if TYPE_CHECKING:
    from sandbox_exec.contracts import Task
    from sandbox_exec.ledger import Submitted
    from sandbox_exec.store.db import Event
    from sandbox_exec.submission import DeadLetter

CTRL_C: Final = 130  # as a shell says it of what that ended
FOLLOW_S: Final = 0.5  # between two looks for events of another process's run
_NAMED: Final = 5  # of many ids, how many a person is told
_UNLIMITED: Final = 1 << 12  # columns: a name that is cut cannot be copied

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or its id below --runs.")]
Runs = Annotated[str, typer.Option("--runs", metavar="DIR", help="Where runs are.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
Trial = Annotated[str, typer.Argument(metavar="TRIAL", help="The trial's name, or how it begins.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the shell's door."""
    app.command(epilog=_epilog(_SUBMIT_EXAMPLES, _SUBMIT_CODES))(submit)
    app.command(epilog=_epilog(_PURGE_EXAMPLES))(purge)
    dead = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=_epilog(_DEAD_EXAMPLES),
    )
    dead.callback()(_dead)
    dead.command("list", epilog=_epilog(_DEAD_LIST_EXAMPLES))(dead_list)
    dead.command("show", epilog=_epilog(_DEAD_SHOW_EXAMPLES))(dead_show)
    dead.command("retry", epilog=_epilog(_DEAD_RETRY_EXAMPLES))(dead_retry)
    dead.command("drop", epilog=_epilog(_DEAD_DROP_EXAMPLES))(dead_drop)
    app.add_typer(dead, name="dead")
    app.command(epilog=_epilog(_EVENTS_EXAMPLES))(events)


_SUBMIT_EXAMPLES = """
  sandbox-exec submit night-1 more.jsonl           refused, if the queue has no room for all of them
  sandbox-exec submit night-1 more.jsonl --wait    until it has
  make-tasks | sandbox-exec submit night-1 -
"""
_SUBMIT_CODES = (
    "Exit codes: 0 they are on the disk; 2 bad usage or tasks; 4 no room now, nothing was taken; "
    "5 another process holds the run and does not answer."
)
_PURGE_EXAMPLES = """
  sandbox-exec purge night-1 --task 'draft-*'      asks first, at a terminal
  sandbox-exec purge night-1 --priority low --tag slow --yes
  sandbox-exec purge night-1 --all --yes           all that is not in flight
"""
_DEAD_EXAMPLES = """
  sandbox-exec dead list night-1
  sandbox-exec dead retry night-1 --all            then: sandbox-exec continue night-1
"""
_DEAD_LIST_EXAMPLES = """
  sandbox-exec dead list night-1
  sandbox-exec dead list night-1 --json | jq -r '.[] | select(.retried_as == null).trial_id'
"""
_DEAD_SHOW_EXAMPLES = """
  sandbox-exec dead show night-1 careful.sort.0    every attempt, and where its files are
"""
_DEAD_RETRY_EXAMPLES = """
  sandbox-exec dead retry night-1 careful.sort.0
  sandbox-exec dead retry night-1 --all --status task_timeout
"""
_DEAD_DROP_EXAMPLES = """
  sandbox-exec dead drop night-1 careful.sort.0    what needs it is skipped, and the run can go on
"""
_EVENTS_EXAMPLES = """
  sandbox-exec events night-1 --follow             until nobody works at it any more
  sandbox-exec events night-1 --kind alert --kind queue_filling
  sandbox-exec events night-1 --json --after 120 | jq .kind
"""


def _epilog(examples: str, more: str = "") -> str:
    return f"Examples:\n\n\b\n{examples.strip(chr(10))}\n\n{more}"


# --- adding and taking out ---


def submit(
    name: Run,
    tasks: Annotated[str, typer.Argument(metavar="TASKS", help="A JSONL file, one task a line; - is standard input.")],
    wait: Annotated[bool, typer.Option("--wait", help="If the queue is full, wait until there is room.")] = False,
    wait_s: Annotated[
        float | None, typer.Option("--wait-s", metavar="S", min=0, help="As --wait, for so many seconds.")
    ] = None,
    runs: Runs = "runs",
    json: Json = False,
) -> None:
    """Add tasks to a run: all of them, or none.

    They are on the disk when it returns, and get the next slots. Paths in them are relative to the experiment. The
    same again is merged with what is there.
    """
    from sandbox_exec import runs as door
    from sandbox_exec.experiment import load_tasks
    from sandbox_exec.submission import submit as add

    folder = door.find_run(name, runs)
    try:
        given = _from_stdin() if tasks == "-" else load_tasks(tasks)
        try:
            done = add(folder, given)
        except QueueFull as error:
            if not wait and wait_s is None:
                raise QueueFull(f"{error}\nNothing was submitted. To wait for room: --wait, or --wait-s S") from error
            hint = "" if _is_worked_at(folder) else f"; nobody works at it: {_go_on(folder)}"
            print(f"sandbox-exec: waiting for room: {error}{hint}", file=sys.stderr, flush=True)
            try:
                done = add(folder, given, wait_s=wait_s)
            except QueueFull as late:
                raise QueueFull(f"{late}\nNothing was submitted: there was no room in that time") from late
    except KeyboardInterrupt:
        # It may have been on its way: only an answer says that it is in.
        print(
            "sandbox-exec: interrupted, and not acknowledged. Submit the same again to be sure: it is merged",
            file=sys.stderr,
        )
        raise typer.Exit(CTRL_C) from None
    _say(done.model_dump_json(indent=2), "\n".join(_submitted_lines(done)), json)
    if done.tasks:
        _hint(folder, json)


def _from_stdin() -> list[Task]:
    """Through a file, as tasks are read from one."""
    from sandbox_exec.experiment import load_tasks

    with tempfile.NamedTemporaryFile(suffix=".jsonl") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        try:
            return load_tasks(copy.name)
        except InvalidExperiment as error:
            raise InvalidExperiment(str(error).replace(copy.name, "standard input")) from None


def _submitted_lines(done: Submitted) -> Iterable[str]:
    added = f": {_some(done.tasks)}" if done.tasks else ""
    yield f"added {_count(len(done.tasks), 'task')}, {_count(done.trials, 'trial')}{added}"
    if done.merged:
        same = [one if one == other else f"{one} is {other}" for one, other in done.merged.items()]
        yield f"merged {_count(len(same), 'task')} with what the run has: {_some(same)}"
    if done.displaced:
        yield f"displaced {_count(len(done.displaced), 'trial')}, now dead letters: {_some(done.displaced)}"
    yield f"{_count(done.waiting, 'trial')} waiting now"


def purge(
    name: Run,
    variant: Annotated[str | None, typer.Option(metavar="NAME", help="Of this variant; * and ? are allowed.")] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Of this task; * and ? are allowed.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="With this tag; * and ? are allowed.")] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="P", help="Of this priority: a number, low, normal, high or critical.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that waits.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask. Needed with --json, and where there is no terminal.")
    ] = False,
    runs: Runs = "runs",
    json: Json = False,
) -> None:
    """Take out of a run what waits and fits every option, also for another attempt.

    It is committed as skipped, which cannot be undone; what needs it is skipped too. What is in flight goes on.
    """
    from sandbox_exec import runs as door
    from sandbox_exec.ledger import SlotFilter
    from sandbox_exec.submission import purge as take_out

    given = {"variant": variant, "task": task, "tag": tag, "priority": _as_number(priority)}
    if everything == any(value is not None for value in given.values()):
        raise InvalidValue("say what to purge: --variant, --task, --tag and --priority, or --all without them")
    try:
        which = SlotFilter.model_validate(given)
    except ValidationError as error:
        raise InvalidValue("; ".join(str(fault) for fault in faults_of(error))) from error
    folder = door.find_run(name, runs)
    if not yes:
        if json or not sys.stdin.isatty():
            raise InvalidValue("purging cannot be undone, and nobody can be asked here: --yes says that it is meant")
        what = _pairs(which.model_dump(exclude_none=True)) or "everything"
        typer.confirm(f"Take out of {folder} what waits: {what}?", abort=True, err=True)
    trials = take_out(folder, which)
    named = f": {_some(trials)}" if trials else ""
    _say(json_.dumps({"trials": trials}), f"purged {_count(len(trials), 'trial')}{named}", json)
    if trials:
        _hint(folder, json)


def _as_number(text: str | None) -> int | str | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


# --- dead letters ---


def _dead() -> None:
    """Show what failed for good; retry it, or drop it."""


def dead_list(name: Run, runs: Runs = "runs", json: Json = False) -> None:
    """List what failed for good, or was displaced while it waited."""
    from rich.table import Table

    from sandbox_exec.display import clean, lines_of

    _, letters = _letters(name, runs)
    if json:
        print(json_.dumps([letter.model_dump(mode="json") for letter in letters], indent=2))
        return
    if not letters:
        print("no dead letters")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("trial", "status", "error", "attempts", "retried as", "blocks"):
        table.add_column(title, justify="right" if title == "attempts" else "left", no_wrap=True)
    for one in letters:
        cells = [one.trial_id, one.status.value, one.error_type or "-", str(len(one.attempts)), one.retried_as or "-"]
        table.add_row(*map(clean, cells), "yes" if one.blocks else "-")
    print("\n".join(lines_of(table, _UNLIMITED)))


def dead_show(name: Run, trial: Trial, runs: Runs = "runs", json: Json = False) -> None:
    """Show a dead letter with all its attempts."""
    folder, letters = _letters(name, runs)
    letter = _named(trial, letters, folder)
    _say(letter.model_dump_json(indent=2), "\n".join(_letter_lines(letter)), json)


def _letter_lines(letter: DeadLetter) -> Iterable[str]:
    from sandbox_exec.display import clean

    yield f"trial       {letter.trial_id}"
    yield clean(f"cell        variant {letter.variant_id}, task {letter.task_id}, repeat {letter.repeat}")
    yield f"status      {letter.status.value}{_because(letter.error_type, letter.message)}"
    if letter.blocks:
        yield "blocks      the run stands still until it is retried or dropped"
    if letter.retried_as is not None:
        yield f"retried as  {letter.retried_as}"
    if not letter.attempts:
        yield "attempts    none: it never began"
    for one in letter.attempts:
        counted = "" if one.counted else ", not the agent's fault"
        counted += f", exit code {one.exit_code}" if one.exit_code else ""
        yield f"attempt {one.attempt:<3} {one.status.value}{counted}{_because(one.error_type, one.message)}"
        yield clean(f"            {one.folder}")


def _because(error_type: str | None, message: str) -> str:
    from sandbox_exec.display import clean

    text = clean(": ".join(filter(None, [error_type, message])))
    return f"  {text}" if text else ""


def dead_retry(
    name: Run,
    trials: Annotated[list[str] | None, typer.Argument(metavar="TRIAL", help="Their names, or how they begin.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that have not been retried.")] = False,
    status: Annotated[str | None, typer.Option(metavar="STATUS", help="With --all: only those that ended so.")] = None,
    runs: Runs = "runs",
    json: Json = False,
) -> None:
    """Try dead letters again.

    One that is committed stays so and gets a further repeat; one that blocks the run gets further attempts.
    """
    from sandbox_exec.submission import retry_dead

    if everything == bool(trials):
        raise InvalidValue("say what to retry: the names of trials, or --all, and not both")
    if status is not None and not everything:
        raise InvalidValue("--status is for --all: a trial that is named is retried however it ended")
    if status is not None and status not in list(Status):
        raise InvalidValue(f"{status!r} is no status; allowed: {', '.join(Status)}")
    folder, letters = _letters(name, runs)
    if everything:
        fresh = [one for one in letters if one.retried_as is None and status in (None, one.status.value)]
        names = [one.trial_id for one in fresh]
    else:
        names = [_named(one, letters, folder).trial_id for one in trials or ()]
    done = retry_dead(folder, names)
    lines = [f"{old} gets further attempts" if old == new else f"{old} again, as {new}" for old, new in done.items()]
    _say(json_.dumps({"trials": done}), "\n".join(lines or ["nothing to retry"]), json)
    if done:
        _hint(folder, json)


def dead_drop(name: Run, trial: Trial, runs: Runs = "runs", json: Json = False) -> None:
    """Give up a trial that blocks the run.

    It is committed as it ended, and what needs it is skipped.
    """
    from sandbox_exec.submission import drop_dead

    folder, letters = _letters(name, runs)
    trial_id = _named(trial, letters, folder).trial_id
    drop_dead(folder, trial_id)
    _say(json_.dumps({"trials": [trial_id]}), f"dropped {trial_id}: what needs it is skipped", json)
    _hint(folder, json)


def _letters(name: str, runs: str) -> tuple[Path, list[DeadLetter]]:
    from sandbox_exec import runs as door
    from sandbox_exec.submission import dead_letters

    folder = door.find_run(name, runs)
    return folder, dead_letters(folder)


def _named(trial: str, letters: list[DeadLetter], folder: Path) -> DeadLetter:
    found = [one for one in letters if trial and one.trial_id.startswith(trial)]
    found = [one for one in found if one.trial_id == trial] or found
    if not found:
        raise InvalidValue(f"no dead letter begins with {trial!r}; to see them: sandbox-exec dead list {folder}")
    if len(found) > 1:
        raise InvalidValue(f"{trial!r} is the beginning of {_some([one.trial_id for one in found])}: say more of it")
    return found[0]


# --- events ---


def events(
    name: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until nobody works at the run any more.")] = False,
    after: Annotated[
        int, typer.Option("--after", metavar="ID", min=0, help="Only those after the one of this id.")
    ] = 0,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Only of this kind; repeatable.")
    ] = None,
    runs: Runs = "runs",
    json: Annotated[bool, typer.Option("--json", help="As JSON, one object a line, with the id.")] = False,
) -> None:
    """Show what happened to a run.

    Trials assigned, executing, retrying, completed, failed; submissions, alerts, warnings. Times are UTC.
    """
    from sandbox_exec import runs as door
    from sandbox_exec.store import RunStore, holder

    folder = door.find_run(name, runs)
    seen: set[str] = set()
    try:
        while True:
            last = not follow or holder(folder) is None  # before the look: nothing comes after it
            with RunStore.open(folder, write=False) as store:
                for event in store.events(after):
                    after = event.id
                    seen.add(event.kind)
                    if not kind or event.kind in kind:
                        print(json_.dumps(event._asdict()) if json else _event_line(event))
            if last:
                break
            sys.stdout.flush()
            time.sleep(FOLLOW_S)  # there is no handle to wait on for news of another process's run
    except KeyboardInterrupt:
        return  # of following, not of the run
    if kind and not seen.intersection(kind):
        there = f"there are: {', '.join(sorted(seen))}" if seen else "there are none at all"
        print(f"sandbox-exec: no events of this kind; {there}", file=sys.stderr)


def _event_line(event: Event) -> str:
    from sandbox_exec.display import clean

    at = datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    return clean(f"{at}  {event.kind:<12}  {_pairs(event.data)}").rstrip()


# --- parts ---


def _pairs(data: dict[str, Any]) -> str:
    from sandbox_exec.display import number

    def text(value: Any) -> str:
        return number(value) if isinstance(value, str | float) else json_.dumps(value, ensure_ascii=False)

    return "  ".join(f"{name}={text(value)}" for name, value in data.items())


def _say(as_json: str, text: str, json: bool) -> None:
    print(as_json if json else text)


def _is_worked_at(folder: Path) -> bool:
    from sandbox_exec.store import holder

    return holder(folder) is not None


def _hint(folder: Path, json: bool) -> None:
    if not _is_worked_at(folder):
        print(f"nobody works at the run: {_go_on(folder)}", file=sys.stderr if json else sys.stdout)


def _go_on(folder: Path) -> str:
    return f"continue it with `sandbox-exec continue {folder}`"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _some(names: Iterable[str]) -> str:
    from sandbox_exec.display import clean

    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return clean(", ".join(listed[:_NAMED])) + more
