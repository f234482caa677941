"""The commands about what a run has to do: what is printed where, exit codes, with and without a coordinator."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shell import Done
from support import Meeting, spin_until
from test_cli_runs import Program

from sandbox_exec.experiment import load_experiment
from sandbox_exec.ledger import Submitted
from sandbox_exec.runs import RunStatus, make_run, status_of
from sandbox_exec.store import RunStore, holder
from sandbox_exec.submission import DeadLetter, dead_letters

Call = Callable[..., Done]
RETRY_S = "0.01"


class Bench:
    """An experiment whose agents fail if their task's input is "fail", and a run of it that nobody works at yet."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "runs" / "one"
        self.hint = f"nobody works at the run: continue it with `sandbox-exec continue {self.run}`\n"
        (folder / "agent.sh").write_text(
            'grep -q "\\"input\\": \\"fail\\"" "$SANDBOX_EXEC_IN/task.json" && exit 3\n'
            'echo "{}" > "$SANDBOX_EXEC_OUT/result.json"\n'
        )

    def write(self, tasks: list[dict[str, Any]], design: dict[str, Any], **fields: Any) -> Path:
        rows = {
            "name": "bench",
            "tasks": [{"input": "", **task} for task in tasks],
            "variants": [{"id": "v", "agent": {"command": ["sh", "agent.sh"]}}],
            "design": {"max_concurrency": 2, **design},
            **fields,
        }
        file = self.folder / "experiment.yaml"
        file.write_text(json.dumps(rows))
        return file

    def make(self, *tasks: dict[str, Any], **queue: Any) -> None:
        store, _ = make_run(load_experiment(self.write(list(tasks), {"queue": queue})), self.run)
        store.close()

    def jsonl(self, *tasks: dict[str, Any]) -> Path:
        file = self.folder / "more.jsonl"
        file.write_text("".join(json.dumps({"input": "", **task}) + "\n" for task in tasks))
        return file

    def program(self, command: str, *options: object) -> Program:
        return Program(command, *map(str, options), cwd=self.folder)

    def status(self) -> RunStatus:
        return status_of(self.run)

    def tasks(self) -> list[str]:
        with RunStore.open(self.run, write=False) as store:
            return [slot.task_id for slot in store.slots()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    tmp_path.chmod(0o755)
    return Bench(tmp_path)


# --- a run that is kept open ---


def test_a_run_that_is_kept_open_takes_tasks_and_shows_metrics_until_ctrl_c(bench: Bench, call: Call) -> None:
    file = bench.write([{"id": "t0"}], {"order": "priority"})
    more = bench.jsonl({"id": "t1", "input": "fail"}, {"id": "t2", "protocol": {"priority": "high"}})
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(
            bench.program("run", file, "--run-id", "one", "--keep-open", "--metrics-port", "0")
        )
        program.hear("/metrics\n")
        spin_until(lambda: bench.status().committed == 1, "the first task is done")
        watcher = stack.enter_context(bench.program("events", "one", "--follow", "--json"))

        done = Submitted.model_validate_json(call("submit", bench.run, more, "--json").out)
        assert (done.tasks, done.merged, done.trials) == (("t1", "t2"), {}, 2)
        again = call("submit", bench.run, more)
        assert (again.code, again.err) == (0, "")
        assert again.out.splitlines()[:2] == ["added 0 tasks, 0 trials", "merged 2 tasks with what the run has: t1, t2"]

        spin_until(lambda: bench.status().committed == 3, "what was submitted is done")
        shown = call("status", bench.run).out
        assert re.search(r"^rate +\d+ trials a minute, workers \d+% busy, half waited", shown, re.MULTILINE)
        assert "failing    v: 1 of 3 (33%)\n" in shown
        assert "lifecycle" not in shown
        lifecycle = json.loads(call("status", bench.run, "--json").out)["lifecycle"]
        assert (lifecycle["completed"], lifecycle["failed"]) == (2, 1)

        (address,) = re.findall(rb"metrics: (http://127\.0\.0\.1:\d+/metrics)", program._read)
        with urllib.request.urlopen(address.decode(), timeout=10) as answer:
            text = answer.read().decode()
        assert 'sandbox_exec_trials_committed_total{run="one",outcome="completed"} 2' in text

        program.send(signal.SIGINT)
        ended, watched = program.end(), watcher.end()
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[:2] == [
        "runs/one: 1 trials, 2 at once",
        "open for more: sandbox-exec submit runs/one TASKS.jsonl",
    ]
    assert {line.split()[0] for line in lines[2:5]} == {"1/1", "2/3", "3/3"}
    assert lines[-1].startswith("completed: 3 of 3 trials committed")
    assert (watched.code, watched.err) == (0, "")
    kinds = [json.loads(line)["kind"] for line in watched.out.splitlines()]
    assert (kinds.count("submitted"), kinds.count("completed"), kinds.count("failed")) == (2, 2, 1)


def test_a_completed_run_can_be_opened_again(bench: Bench, call: Call) -> None:
    bench.make({"id": "t0"})
    assert call("continue", bench.run).code == 0
    with bench.program("continue", "one", "--keep-open", "--json") as program:
        program.hear("open for more: sandbox-exec submit runs/one")
        assert call("submit", bench.run, bench.jsonl({"id": "t1", "input": 1})).out.endswith(" waiting now\n")
        spin_until(lambda: bench.status().committed == 2, "what was submitted is done")
        assert call("stop", bench.run).out == "completed: 2 of 2 trials committed\n"
        done = program.end()
    assert (done.code, json.loads(done.out)["status"]) == (0, "completed")


# --- submitting ---


def test_tasks_for_a_run_that_nobody_works_at_wait_for_the_next_continue(bench: Bench, call: Call) -> None:
    bench.make({"id": "t0"})
    same = {"id": "other", "protocol": {"tags": ["x"]}}
    done = call("submit", bench.run, bench.jsonl({"id": "t1", "protocol": {"tags": ["x"]}}, same))
    assert done == Done(
        0,
        "added 1 task, 1 trial: t1\n"
        "merged 1 task with what the run has: other is t1\n"
        f"2 trials waiting now\n{bench.hint}",
        "",
    )
    assert "lifecycle  2 pending\n" in call("status", bench.run).out
    assert call("continue", bench.run).code == 0
    assert (bench.tasks(), bench.status().committed) == (["t0", "t1"], 2)
    late = call("submit", bench.run, bench.jsonl({"id": "t2", "input": 2}), "--json")
    assert (json.loads(late.out)["tasks"], late.err) == (["t2"], bench.hint)
    assert bench.status().status == "interrupted"  # it was completed, and is not any more


def test_tasks_can_come_from_standard_input(bench: Bench, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    bench.make({"id": "t0"})
    feed('{"id": "t1", "input": 1}\n\n{"id": "t2", "input": 2}\n')
    assert call("submit", bench.run, "-").out.startswith("added 2 tasks, 2 trials: t1, t2\n")
    feed('{"id": "t3", "input": 3}\n{"id": "t4"}\nno JSON\n')
    done = call("submit", bench.run, "-")
    assert (done.code, done.out) == (2, "")
    assert "standard input:2: input: is missing" in done.err
    assert "standard input:3: not a JSON object" in done.err
    assert bench.tasks() == ["t0", "t1", "t2"]


def test_a_full_queue_refuses_with_a_code_of_its_own_and_says_how_to_wait(bench: Bench, call: Call) -> None:
    bench.make({"id": "t0"}, {"id": "t1"}, max_waiting=2)
    more = bench.jsonl({"id": "t2", "input": 2})
    done = call("submit", bench.run, more)
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith("sandbox-exec: max_waiting is 2: 2 trials wait, so there is room for 0")
    assert done.err.endswith("Nothing was submitted. To wait for room: --wait, or --wait-s S\n")
    done = call("submit", bench.run, more, "--wait-s", RETRY_S)
    assert (done.code, done.out) == (4, "")
    assert f"nobody works at it: continue it with `sandbox-exec continue {bench.run}`" in done.err
    assert done.err.endswith("\nNothing was submitted: there was no room in that time\n")
    assert bench.tasks() == ["t0", "t1"]


def test_who_waits_does_not_keep_out_who_continues_the_run(bench: Bench, call: Call) -> None:
    bench.make({"id": "t0"}, {"id": "t1"}, max_waiting=2)
    with bench.program("submit", "one", bench.jsonl({"id": "t2", "input": 2}), "--wait", "--json") as program:
        program.hear("waiting for room")
        spin_until(lambda: call("continue", bench.run).code == 0, "the run is continued between two tries")
        done = program.end()
    assert (done.code, json.loads(done.out)["tasks"]) == (0, ["t2"])
    assert bench.tasks() == ["t0", "t1", "t2"]


def test_who_waits_gets_in_once_a_trial_began(bench: Bench, meeting: Meeting, call: Call) -> None:
    (bench.folder / "agent.sh").write_text(
        f'echo up > "{meeting.folder}/up"; dd bs=1 count=1 < "{meeting.folder}/down" > /dev/null 2>&1\n'
        'echo "{}" > "$SANDBOX_EXEC_OUT/result.json"\n'
    )
    design = {"max_concurrency": 1, "queue": {"max_waiting": 1}}
    file = bench.write([{"id": "t0"}, {"id": "t1"}], design, sandbox={"readable": [meeting.folder]})
    with bench.program("run", file, "--run-id", "one") as run:
        meeting.expect("up")  # and t1 waits
        more = bench.jsonl({"id": "t2", "input": 2})
        assert call("submit", bench.run, more).code == 4
        with bench.program("submit", "one", more, "--wait") as program:
            program.hear("waiting for room: max_waiting is 1")
            meeting.let_go(1)
            meeting.expect("up")
            done = program.end()
        assert (done.code, done.out) == (0, "added 1 task, 1 trial: t2\n1 trial waiting now\n")
        meeting.let_go(2)
        assert run.end().code == 0
    assert bench.status().committed == 3


def test_ctrl_c_ends_the_waiting_and_nothing_was_submitted(bench: Bench) -> None:
    bench.make({"id": "t0"}, max_waiting=1)
    with bench.program("submit", "one", bench.jsonl({"id": "t1", "input": 1}), "--wait") as program:
        program.hear("waiting for room")
        program.send(signal.SIGINT)
        done = program.end()
    assert (done.code, done.out) == (130, "")
    assert "interrupted, and not acknowledged" in done.err
    assert "Traceback" not in done.err
    assert (bench.tasks(), holder(bench.run)) == (["t0"], None)


def test_what_is_displaced_is_told_and_is_a_dead_letter(bench: Bench, call: Call) -> None:
    bench.make({"id": "t0", "protocol": {"priority": "low"}}, max_waiting=1, when_full="displace")
    done = call("submit", bench.run, bench.jsonl({"id": "t1", "protocol": {"priority": "high"}}))
    assert re.search(
        r"^displaced 1 trial, now dead letters: v\.t0\.0-\w+\n1 trial waiting now$", done.out, re.MULTILINE
    )
    assert call("continue", bench.run).code == 0
    listed = call("dead", "list", bench.run).out.splitlines()
    assert [line.split()[1:] for line in listed] == [
        ["status", "error", "attempts", "retried", "as", "blocks"],
        ["skipped", "Displaced", "0", "-", "-"],
    ]
    shown = call("dead", "show", bench.run, "v.t0").out
    assert "status      skipped  Displaced: it was displaced by tasks of a higher priority\n" in shown
    assert "attempts    none: it never began\n" in shown


# --- purging ---


def test_purge_takes_out_what_fits_every_filter(bench: Bench, call: Call) -> None:
    bench.make(
        {"id": "a1", "protocol": {"tags": ["slow"], "priority": "low"}},
        {"id": "a2", "protocol": {"tags": ["slow"]}},
        {"id": "b1", "protocol": {"tags": ["slow"], "priority": 7}},
        {"id": "c1"},
    )
    done = call("purge", bench.run, "--task", "a*", "--tag", "s?ow", "--priority", "low", "--variant", "v", "--yes")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(rf"purged 1 trial: v\.a1\.0-\w+\n{re.escape(bench.hint)}", done.out)
    done = call("purge", bench.run, "--priority", "7", "--yes", "--json")
    assert [one.split(".")[1] for one in json.loads(done.out)["trials"]] == ["b1"]
    assert done.err == bench.hint
    assert call("purge", bench.run, "--variant", "nobody", "--yes") == Done(0, "purged 0 trials\n", "")
    assert len(json.loads(call("purge", bench.run, "--all", "--yes", "--json").out)["trials"]) == 2
    assert call("continue", bench.run).code == 0
    assert json.loads(call("status", bench.run, "--json").out)["lifecycle"]["skipped"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to purge"),
        (["--all", "--task", "x"], "say what to purge"),
        (["--priority", "urgent", "--yes"], "'urgent' is no priority; allowed: a whole number, low, normal, high"),
        (["--all"], "--yes says that it is meant"),
    ],
)
def test_a_purge_must_be_meant(
    bench: Bench, call: Call, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    bench.make({"id": "t0"})
    done = call("purge", bench.run, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert bench.status().lifecycle["pending"] == 1


def test_at_a_terminal_a_purge_asks(bench: Bench, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.make({"id": "t0"})
    for answer, code in (("n\n", 1), ("y\n", 0)):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdin", terminal)
        done = call("purge", bench.run, "--task", "t*")
        assert done.code == code
        assert "what waits: task=t*?" in done.err
    assert "purged 1 trial: v.t0." in done.out


# --- dead letters ---


def test_a_trial_that_blocks_is_shown_retried_and_dropped(bench: Bench, call: Call) -> None:
    bench.make({"id": "bad", "input": "fail"}, {"id": "next", "depends_on": ["bad"]}, failed_dependency="block")
    assert call("dead", "list", bench.run) == Done(0, "no dead letters\n", "")
    stopped = call("continue", bench.run)
    assert (stopped.code, "blocked: v.bad.0-" in stopped.out) == (4, True)

    head, row = call("dead", "list", bench.run).out.splitlines()
    assert head.split() == ["trial", "status", "error", "attempts", "retried", "as", "blocks"]
    trial, status, _, attempts, retried_as, blocks = row.split()
    assert (status, attempts, retried_as, blocks) == ("agent_error", "1", "-", "yes")
    shown = call("dead", "show", bench.run, "v.bad").out
    assert "blocks      the run stands still until it is retried or dropped\n" in shown
    assert re.search(
        rf"^attempt 1   agent_error, exit code \d+\n +{bench.run}/trials/{trial}/attempt-1$", shown, re.MULTILINE
    )

    assert call("dead", "retry", bench.run, "v.bad") == Done(0, f"{trial} gets further attempts\n{bench.hint}", "")
    assert call("dead", "list", bench.run).out == "no dead letters\n"
    assert call("continue", bench.run).code == 4
    letter = DeadLetter.model_validate_json(call("dead", "show", bench.run, trial, "--json").out)
    assert ([one.attempt for one in letter.attempts], letter.blocks) == ([1, 2], True)

    dropped = call("dead", "drop", bench.run, "v.bad", "--json")
    assert (dropped.code, json.loads(dropped.out), dropped.err) == (0, {"trials": [trial]}, bench.hint)
    assert call("continue", bench.run).code == 0
    assert json.loads(call("status", bench.run, "--json").out)["by_status"] == {"agent_error": 1, "skipped": 1}
    refused = call("dead", "drop", bench.run, "v.bad")
    assert (refused.code, "does not block the run" in refused.err) == (2, True)


def test_dead_letters_are_retried_once_and_by_status(bench: Bench, call: Call) -> None:
    bench.make({"id": "x1", "input": "fail"}, {"id": "x2", "input": "fail", "protocol": {"tags": ["y"]}}, {"id": "ok"})
    assert call("continue", bench.run).code == 0
    first, second = (letter.trial_id for letter in dead_letters(bench.run))
    assert call("dead", "retry", bench.run, "--all", "--status", "task_timeout").out == "nothing to retry\n"
    one = call("dead", "retry", bench.run, first, "--json")
    (again,) = json.loads(one.out)["trials"].values()
    assert again.startswith("v.x1.1-")
    listed = json.loads(call("dead", "list", bench.run, "--json").out)
    assert [(one["trial_id"], one["retried_as"]) for one in listed] == [(first, again), (second, None)]
    twice = call("dead", "retry", bench.run, first)
    assert (twice.code, f"is tried again already, as '{again}'" in twice.err) == (2, True)
    rest = call("dead", "retry", bench.run, "--all", "--status", "agent_error")
    assert re.fullmatch(rf"{second} again, as v\.x2\.1-\w+\n{re.escape(bench.hint)}", rest.out)
    assert call("continue", bench.run).code == 0
    assert bench.status().by_status == {"success": 1, "agent_error": 4}
    ambiguous = call("dead", "show", bench.run, "v.x")
    assert (ambiguous.code, f"'v.x' is the beginning of {first}, {second}" in ambiguous.err) == (2, True)


# --- events ---


def test_events_are_lines_for_people_and_objects_for_programs(bench: Bench, call: Call) -> None:
    bench.make({"id": "t0"})
    call("submit", bench.run, bench.jsonl({"id": "t1", "input": 1}))
    (line,) = call("events", bench.run).out.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  submitted +merged=0  tasks=1  trials=1", line)
    call("purge", bench.run, "--task", "t1", "--yes")
    assert call("continue", bench.run).code == 0
    found = [json.loads(line) for line in call("events", bench.run, "--json").out.splitlines()]
    assert all(set(one) == {"id", "at", "kind", "data"} for one in found)
    of_t0 = [one["kind"] for one in found if one["data"].get("trial_id", "").startswith("v.t0")]
    assert of_t0 == ["assigned", "executing", "completed"]
    purged = next(one["id"] for one in found if one["kind"] == "purged")
    later = call("events", bench.run, "--after", purged, "--kind", "completed", "--kind", "submitted", "--json")
    assert [json.loads(line)["kind"] for line in later.out.splitlines()] == ["completed"]
    assert call("events", bench.run, "--follow", "--json").out.count("\n") == len(found)  # nobody works at it
    none = call("events", bench.run, "--after", purged, "--kind", "complete")
    said = "sandbox-exec: no events of this kind; there are: assigned, completed, executing, skipped\n"
    assert none == Done(0, "", said)
    last = found[-1]["id"]
    assert call("events", bench.run, "--after", last, "--kind", "alert").err.endswith("there are none at all\n")


def test_numbers_of_events_are_short_for_people_and_whole_for_programs(bench: Bench, call: Call) -> None:
    bench.make({"id": "t0"})
    with RunStore.open(bench.run) as store:
        store.event("alert", in_flight_s=2.000357796, limit_s=2.0, of=3, trial_id="v.t0")
    assert call("events", bench.run).out.endswith("alert         in_flight_s=2  limit_s=2  of=3  trial_id=v.t0\n")
    assert json.loads(call("events", bench.run, "--json").out)["data"]["in_flight_s"] == 2.000357796


def test_ctrl_c_ends_the_following_and_not_the_run(bench: Bench, call: Call) -> None:
    bench.make({"id": "t0"})
    with bench.program("continue", "one", "--keep-open") as run:
        spin_until(lambda: bench.status().committed == 1, "its task is done")
        with bench.program("events", "one", "--follow", "--kind", "completed") as follower:
            assert follower.process.stdout is not None
            assert b"  completed  " in follower.process.stdout.readline()
            follower.send(signal.SIGINT)
            assert follower.end() == Done(0, "", "")
        assert call("stop", bench.run).code == 0
        assert run.end().code == 0


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "RUN", "nowhere.jsonl"], "nowhere.jsonl"),
        (["submit", "RUN", "bad.jsonl"], "bad.jsonl:2: not a JSON object"),
        (["submit", "RUN", "needs.jsonl"], "there is no task 'nobody' in the run or in what is submitted"),
        (["submit", "RUN", "taken.jsonl"], "'t0' is the id of another task of the run"),
        (["submit", "RUN", "bad.jsonl", "--wait-s", "-1"], "Invalid value for '--wait-s'"),
        (["submit", "nowhere", "bad.jsonl"], "there is no run in nowhere"),
        (["purge", "nowhere", "--all", "--yes"], "there is no run in nowhere"),
        (["events", "nowhere"], "there is no run in nowhere"),
        (["dead", "list", "nowhere"], "there is no run in nowhere"),
        (["dead", "show", "RUN", "v.t0"], "no dead letter begins with 'v.t0'; to see them: sandbox-exec dead list"),
        (["dead", "drop", "RUN", "v.t0"], "no dead letter begins with 'v.t0'"),
        (["dead", "retry", "RUN"], "say what to retry: the names of trials, or --all"),
        (["dead", "retry", "RUN", "v.t0", "--all"], "and not both"),
        (["dead", "retry", "RUN", "v.t0", "--status", "agent_error"], "--status is for --all"),
        (["dead", "retry", "RUN", "--all", "--status", "lazy"], "'lazy' is no status; allowed: success, "),
    ],
)
def test_bad_usage_is_exit_code_2(
    bench: Bench, call: Call, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(bench.folder)
    bench.make({"id": "t0"})
    Path("bad.jsonl").write_text('{"id": "t1", "input": 1}\n{"id"\n')
    Path("needs.jsonl").write_text('{"id": "t1", "input": 1, "depends_on": ["nobody"]}\n')
    Path("taken.jsonl").write_text('{"id": "t0", "input": "another"}\n')
    done = call(*(str(bench.run) if one == "RUN" else one for one in arguments))
    assert (done.code, done.out) == (2, "")
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert bench.tasks() == ["t0"]


@pytest.mark.parametrize(
    "command", [["submit"], ["purge"], ["events"], *(["dead", one] for one in ("list", "show", "retry", "drop"))]
)
def test_help_has_examples(call: Call, command: list[str]) -> None:
    done = call(*command, "--help")
    assert done.code == 0
    assert f"  sandbox-exec {' '.join(command)} night-1" in done.out


def test_help_of_the_group_has_examples_too(call: Call) -> None:
    assert "  sandbox-exec dead retry night-1 --all" in call("dead", "--help").out


def test_an_empty_name_is_the_beginning_of_no_trial(bench: Bench, call: Call) -> None:
    bench.make({"id": "x1", "input": "fail"})
    assert call("continue", bench.run).code == 0
    done = call("dead", "show", bench.run, "")
    assert (done.code, "no dead letter begins with ''" in done.err) == (2, True)
