"""The commands about durable runs, as programs: what is printed where, exit codes, signals, steering."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from runs_support import children, reap_orphans
from shell import Done
from support import PATIENCE_S, Meeting, meetings, spin_until, wait_readable

from sandbox_exec.contracts import Experiment, TrialCompletion
from sandbox_exec.errors import RunNotActive
from sandbox_exec.runs import RunStatus, RunSummary, status_of
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.store import RunStore, holder
from sandbox_exec.store import history as history_lines

# A test runner in the background has its children ignore Ctrl-C.
HEAR_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
START = f"{HEAR_CTRL_C}; from sandbox_exec.cli import main; main()"
SLOTS = 4


class Program:
    """The command line as a process of its own."""

    def __init__(self, *arguments: str | Path, cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            start_new_session=True,
        )
        self._read = b""

    def hear(self, words: str) -> None:
        """Wait until it has said this on stderr."""
        assert self.process.stderr is not None
        fd = self.process.stderr.fileno()
        while words.encode() not in self._read:
            wait_readable(fd)
            data = os.read(fd, 65536)
            assert data, f"it ended, and said {self._read.decode()}"
            self._read += data

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def end(self) -> Done:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return Done(self.process.returncode, out.decode(), (self._read + err).decode())

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()  # not read to its end: workers that outlive it have it too


class Bench:
    """An experiment whose agents say that they have begun, and wait until they are let go."""

    def __init__(self, folder: Path, meeting: Meeting) -> None:
        self.folder, self.meeting = folder, meeting
        self.run_folder = folder / "runs" / "one"
        self.file = folder / "experiment.yaml"
        (folder / "tasks.jsonl").write_text(
            "".join(f'{{"id": "t{n}", "input": {n}, "protocol": {{"timeout_s": 100}}}}\n' for n in range(SLOTS))
        )
        (folder / "agent.sh").write_text(
            'id=$(sed "s/.*\\"id\\": \\"//; s/\\".*//" "$SANDBOX_EXEC_IN/task.json")\n'
            'echo "{\\"type\\": \\"begun\\"}" > "$SANDBOX_EXEC_TRACE"\n'
            'echo "$id" > "$MEETING/up"\n'
            'dd bs=1 count=1 < "$MEETING/down" > /dev/null 2>&1\n'
            '[ "$id" = t1 ] && exit 3\n'
            'cat "$NOSY" || true\n'
            'echo "{\\"answer\\": \\"$id\\"}" > "$SANDBOX_EXEC_OUT/result.json"\n'
        )
        (folder / "nosy.txt").write_text("not for agents")
        self.file.write_text(
            "name: bench\ntasks: tasks.jsonl\nseed: 1\n"
            f"variants: [{{id: v, agent: {{command: [sh, agent.sh]}},"
            f" env: {{MEETING: '{meeting.folder}', NOSY: '{folder}/nosy.txt'}}}}]\n"
            "design: {max_concurrency: 2}\n"
            f"sandbox: {{memory: 64MiB, readable: ['{meeting.folder}']}}\n"
        )

    def run(self, *options: str) -> Program:
        return Program("run", self.file, "--run-id", "one", *options, cwd=self.folder)

    def go_on(self, *options: str) -> Program:
        return Program("continue", "one", *options, cwd=self.folder)

    def status(self) -> RunStatus:
        return status_of(self.run_folder)

    def history(self) -> bytes:
        with RunStore.open(self.run_folder, write=False) as store:
            return b"".join(history_lines(store))


def make_bench(factory: pytest.TempPathFactory) -> Iterator[Bench]:
    for meeting in meetings(factory.mktemp("meeting")):
        yield Bench(factory.mktemp("bench"), meeting)


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from make_bench(tmp_path_factory)


class Undisturbed(NamedTuple):
    bench: Bench
    done: Done
    history: bytes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    for bench in make_bench(tmp_path_factory):
        bench.meeting.let_go(SLOTS)
        with bench.run("--json", "--workers", "3") as program:
            done = program.end()
        yield Undisturbed(bench, done, bench.history())


# --- a run that nothing disturbs ---


def test_with_json_stdout_has_one_object_and_progress_goes_to_stderr(undisturbed: Undisturbed) -> None:
    code, out, err = undisturbed.done
    summary = RunSummary.model_validate_json(out)
    assert (code, summary.status, summary.committed, summary.slots) == (0, "completed", SLOTS, SLOTS)
    assert summary.folder == undisturbed.bench.run_folder
    assert json.loads(out)["by_status"] == {"success": 3, "agent_error": 1}
    lines = err.splitlines()
    assert lines[0] == "runs/one: 4 trials, 3 at once"
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["1/4", "success"],
        ["2/4", "agent_error"],
        ["3/4", "success"],
        ["4/4", "success"],
    ]
    assert re.fullmatch(r"completed: 4 of 4 trials committed in .*s, in runs/one", lines[-1])


def test_agents_do_not_see_the_folder_that_the_shell_is_in(undisturbed: Undisturbed) -> None:
    if not chosen().rung.namespaced:
        pytest.skip("on this rung files are seen")
    logs = [path.read_text() for path in undisturbed.bench.run_folder.rglob("std*.log")]
    assert len(logs) == 3
    assert all("No such file" in log and "not for agents" not in log for log in logs)


def test_history_writes_canonical_bytes(undisturbed: Undisturbed) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sandbox_exec", "history", undisturbed.bench.run_folder], capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (undisturbed.history, b"")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["task"] for line in lines] == ["t0", "t1", "t2", "t3"]
    assert done.stdout == b"".join(
        json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n" for line in lines
    )


def test_history_can_be_cut_short_by_its_reader(undisturbed: Undisturbed) -> None:
    command = f"{sys.executable} -m sandbox_exec history {undisturbed.bench.run_folder} | head -c 10"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
    assert (len(done.stdout), done.stderr) == (10, b"")


def test_the_status_of_a_run_that_has_ended(undisturbed: Undisturbed, call: Callable[..., Done]) -> None:
    shown, data = (call("status", undisturbed.bench.run_folder, *option) for option in ((), ("--json",)))
    assert (shown.code, shown.err, data.code, data.err) == (0, "", 0, "")
    status = RunStatus.model_validate_json(data.out)
    assert (status.status, status.owner, status.committed, status.in_flight) == ("completed", None, SLOTS, ())
    assert "committed  4 of 4" in shown.out
    assert "held by    nobody" in shown.out
    assert re.search(r"^failures   v\.t1\.0-\w+  agent_error", shown.out, re.MULTILINE)


def test_watching_a_run_that_has_ended_shows_it_once(undisturbed: Undisturbed, call: Callable[..., Done]) -> None:
    done = call("status", undisturbed.bench.run_folder, "--watch", "--json")
    assert done.code == 0
    assert json.loads(done.out)["status"] == "completed"


def test_continuing_a_completed_run_does_nothing(undisturbed: Undisturbed, call: Callable[..., Done]) -> None:
    done = call("continue", undisturbed.bench.run_folder)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].endswith("4 trials, 4 of them committed, 2 at once")
    assert "completed: 4 of 4 trials committed" in done.out
    assert undisturbed.bench.history() == undisturbed.history


def test_a_run_is_found_by_its_id(
    undisturbed: Undisturbed, call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(undisturbed.bench.folder)
    assert "status     completed" in call("status", "one").out
    assert "status     completed" in call("status", "one", "--runs", undisturbed.bench.folder / "runs").out


# --- Ctrl-C ---


def test_one_ctrl_c_finishes_what_is_in_flight_and_the_run_continues_to_the_same_history(
    bench: Bench, undisturbed: Undisturbed
) -> None:
    with bench.run() as program:
        bench.meeting.expect("t0", "t1")
        program.send(signal.SIGINT)
        program.hear("finishing the trials in flight")
        bench.meeting.let_go(2)
        done = program.end()
    assert done.code == 4
    assert "interrupted (Ctrl-C): 2 of 4 trials committed" in done.out
    assert done.out.splitlines()[-1] == "to go on: sandbox-exec continue runs/one"
    assert (bench.status().status, bench.status().committed) == ("interrupted", 2)
    with bench.go_on() as program:
        bench.meeting.expect("t2", "t3")  # and no other is run again
        bench.meeting.let_go(2)
        done = program.end()
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "runs/one: 4 trials, 2 of them committed, 2 at once"
    assert bench.history() == undisturbed.history


def test_two_ctrl_c_kill_what_is_in_flight_and_the_run_continues_to_the_same_history(
    bench: Bench, undisturbed: Undisturbed
) -> None:
    with bench.run("--json") as program:
        bench.meeting.expect("t0", "t1")
        program.send(signal.SIGINT)
        program.hear("finishing")
        program.send(signal.SIGINT)
        program.hear("killing the trials in flight")
        done = program.end()
    summary = RunSummary.model_validate_json(done.out)
    assert (done.code, summary.status, summary.committed, summary.by_status) == (4, "interrupted", 0, {})
    assert "to go on: sandbox-exec continue runs/one" in done.err
    assert "Traceback" not in done.err
    bench.meeting.let_go(SLOTS)
    with bench.go_on() as program:
        assert program.end().code == 0
    bench.meeting.expect("t0", "t1", "t2", "t3")
    assert bench.history() == undisturbed.history


def test_sigterm_kills_what_is_in_flight(bench: Bench) -> None:
    with bench.run() as program:
        bench.meeting.expect("t0", "t1")
        program.send(signal.SIGTERM)
        done = program.end()
    assert done.code == 4
    assert "killing the trials in flight" in done.err
    assert bench.status().committed == 0


def test_ctrl_c_at_a_terminal_is_heard_and_the_picture_goes(bench: Bench) -> None:
    with terminal("run", bench.file, "--run-id", "one", cwd=bench.folder) as screen:
        bench.meeting.expect("t0", "t1")
        screen.expect(r"v\.t0\.0-\w+ +1 +agent +\d\.\d s")
        screen.type(b"\x03")
        screen.expect("finishing the trials in flight, then stopping; Ctrl-C again kills them")
        bench.meeting.let_go(2)
        assert screen.end() == 4
    assert re.search(r"interrupted \(Ctrl-C\): 2 of 4 trials committed .*\s+to go on: sandbox-exec", screen.text)


def test_ctrl_c_before_there_is_a_run_is_what_a_shell_says_of_it(
    bench: Bench, call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sandbox_exec.runs.input_digests", ctrl_c)
    done = call("run", bench.file, "--runs", bench.folder / "runs")
    assert done == Done(130, "", "sandbox-exec: interrupted before the first trial\n")
    assert not (bench.folder / "runs").exists()


# --- steering ---


def test_a_run_can_be_watched_paused_resumed_and_stopped_from_another_process(
    bench: Bench, undisturbed: Undisturbed, call: Callable[..., Done]
) -> None:
    run = bench.run_folder
    with contextlib.ExitStack() as stack, bench.run() as program:
        bench.meeting.expect("t0", "t1")
        watcher = stack.enter_context(Program("status", "one", "--watch", "--json", cwd=bench.folder))
        spin_until(lambda: all(one.events for one in bench.status().in_flight), "both have traced")

        status = json.loads(call("status", run, "--json").out)
        assert (status["status"], status["owner"]["pid"]) == ("running", program.process.pid)
        assert [(one["task_id"], one["phase"], one["events"]) for one in status["in_flight"]] == [
            ("t0", "agent", 1),
            ("t1", "agent", 1),
        ]

        second = call("continue", run)
        assert (second.code, second.out) == (5, "")
        assert re.fullmatch(
            rf"sandbox-exec: the run in .* is held by process {program.process.pid} on .*\n", second.err
        )

        assert json.loads(call("pause", run, "--json").out) == {"status": "paused", "frozen": 2}
        assert bench.status().status == "paused"
        bench.meeting.let_go(2)
        frozen = bench.meeting.unread()
        assert call("resume", run) == Done(0, "running\n", "")
        bench.meeting.expect("t2", "t3")
        assert (frozen, bench.meeting.unread()) == (2, 0)

        with Program("stop", "one", cwd=bench.folder) as stopper:
            spin_until(lambda: bench.status().status == "draining", "the run has heard that it is to stop")
            assert stopper.process.poll() is None
            assert call("pause", run).err == "sandbox-exec: the run is being stopped\n"
            bench.meeting.let_go(2)
            stopped = stopper.end()
        assert stopped == Done(0, "completed: 4 of 4 trials committed\n", "")  # there was nothing left to stop
        assert program.end().code == 0
        watched = [json.loads(line) for line in watcher.end().out.splitlines()]
    assert watched[-1]["status"] == "completed"
    assert watched[-1]["owner"] is None
    assert bench.history() == undisturbed.history


def test_stop_now_kills_and_returns_when_the_run_is_free(bench: Bench, call: Callable[..., Done]) -> None:
    with bench.run() as program:
        bench.meeting.expect("t0", "t1")
        done = call("stop", bench.run_folder, "--now", "--json")
        assert holder(bench.run_folder) is None
        assert program.end().code == 4
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {"status": "interrupted", "committed": 0, "slots": SLOTS}


def test_a_paused_run_that_is_drained_finishes_what_is_frozen(bench: Bench, call: Callable[..., Done]) -> None:
    with bench.run() as program:
        bench.meeting.expect("t0", "t1")
        assert call("pause", bench.run_folder).out == "paused; trials in flight that stand still: 2\n"
        bench.meeting.let_go(2)
        program.send(signal.SIGINT)
        done = program.end()
    assert done.code == 4
    assert bench.status().committed == 2


def test_a_run_that_dies_while_it_is_paused_is_continued(
    bench: Bench, undisturbed: Undisturbed, call: Callable[..., Done]
) -> None:
    known = children()
    with bench.run() as program:
        bench.meeting.expect("t0", "t1")
        assert call("pause", bench.run_folder).code == 0
        program.send(signal.SIGKILL)
        program.process.wait()
    assert (bench.status().status, bench.status().reason) == ("interrupted", "its coordinator is gone")
    bench.meeting.let_go(SLOTS)
    with bench.go_on() as program:
        assert program.end().code == 0
    reap_orphans(known)
    bench.meeting.expect("t2", "t3")  # the other two went on, and were not run again
    assert bench.history() == undisturbed.history


@pytest.mark.parametrize("command", ["pause", "resume", "stop"])
def test_a_run_that_nobody_works_at_cannot_be_steered(
    undisturbed: Undisturbed, call: Callable[..., Done], command: str
) -> None:
    done = call(command, undisturbed.bench.run_folder)
    assert (done.code, done.out) == (5, "")
    assert done.err.startswith("sandbox-exec: no coordinator holds the run in ")


# --- what is refused ---


def test_changed_inputs_are_bad_usage_and_it_is_said_what_changed(bench: Bench, call: Callable[..., Done]) -> None:
    with bench.run() as program:
        bench.meeting.expect("t0", "t1")
        program.send(signal.SIGTERM)
        program.end()
    (bench.folder / "agent.sh").write_text("true")
    done = call("continue", bench.run_folder)
    assert (done.code, done.out) == (2, "")
    assert "agent.sh has changed" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [{id: t}]", "experiment.yaml:1: tasks[0].input: is missing"),
        ("tasks: [{id: t, input: 1}]\nsandbox: {kind: docker}", "has no image, which docker needs"),
        ("tasks: [{id: t, input: 1}]\ngrading: {assets: .}", "exactly one of command and python"),
    ],
    ids=["malformed", "docker", "grading"],
)
def test_a_bad_experiment_is_exit_code_2(tmp_path: Path, call: Callable[..., Done], text: str, message: str) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(f"{text}\nname: x\nvariants: [{{id: v, agent: {{command: ['true']}}}}]\n")
    done = call("run", file, "--runs", tmp_path / "runs")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "Missing argument"),
        (["run", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["run", "x.yaml", "--workers", "0"], "greater than or equal to 1"),
        (["run", "x.yaml", "--metrics-port", "70000"], "Invalid value for '--metrics-port'"),
        (["continue", "nowhere"], "there is no run in nowhere, nor in runs/nowhere; there are no runs in runs"),
        (["status", "nowhere"], "there is no run in nowhere"),
        (["stop", "nowhere"], "there is no run in nowhere"),
        (["history", "nowhere"], "there is no run in nowhere"),
        (["schema", "Swimming"], "there is no contract 'Swimming'; allowed: Ability, ActiveTrial, "),
    ],
)
def test_bad_usage_is_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., Done],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert (done.code, done.out) == (2, "")
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_a_coordinator_that_does_not_answer_is_an_error_and_no_traceback(
    undisturbed: Undisturbed, call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object, **__: object) -> None:
        raise RunNotActive("the coordinator said nothing for 60 s")

    monkeypatch.setattr("sandbox_exec.control.ask", silent)
    assert call("pause", undisturbed.bench.run_folder) == Done(
        5, "", "sandbox-exec: the coordinator said nothing for 60 s\n"
    )


# --- help and schemas ---


@pytest.mark.parametrize("command", ["run", "continue", "status", "pause", "stop", "history", "schema"])
def test_help_has_examples(call: Callable[..., Done], command: str) -> None:
    done = call(command, "--help")
    assert done.code == 0
    assert f"  sandbox-exec {command}" in done.out


def test_every_contract_has_a_schema(call: Callable[..., Done]) -> None:
    names = call("schema").out.split()
    expected = {"Experiment", "ExperimentFile", "TrialCompletion", "RunSummary", "RunStatus", "Diagnosis"}
    assert {*expected, "Submitted", "SlotFilter", "DeadLetter"} <= set(names)
    for name in names:
        schema = json.loads(call("schema", name).out)
        assert (schema["title"], schema["type"]) == (name, "object")


def test_the_schema_of_what_is_written_has_all_that_is_written(call: Callable[..., Done]) -> None:
    schema = json.loads(call("schema", "TrialCompletion").out)
    assert {*TrialCompletion.model_fields, "blame"} == set(schema["properties"])


def test_the_schema_of_the_file_is_that_of_what_may_stand_in_it(call: Callable[..., Done]) -> None:
    schema = json.loads(call("schema", "ExperimentFile").out)
    assert set(schema["properties"]) == set(Experiment.model_fields) - {"base", "sources"}
    assert [option["type"] for option in schema["properties"]["tasks"]["anyOf"]] == ["string", "array"]
    assert set(schema["$defs"]["AgentSpec"]["properties"]) == {"command", "artifact", "python"}


# --- a terminal ---


class Screen:
    """The other end of a terminal of 30 lines and 120 columns."""

    def __init__(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        self._fd, self._process = fd, process
        self.text = ""

    def expect(self, pattern: str) -> None:
        """Wait until this has been written since the last word that was expected."""
        self.text = ""
        while not re.search(pattern, self.text):
            assert self._take(), f"it ended, and wrote {self.text}"

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def end(self) -> int:
        while self._take():
            pass
        return self._process.wait(PATIENCE_S)

    def _take(self) -> bool:
        wait_readable(self._fd)
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # how Linux says that the last writer is gone
            return False
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace")).replace("\r", "")
        return bool(data)


@contextlib.contextmanager
def terminal(*arguments: Any, cwd: Path) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    # In a session of its own, this terminal becomes the one that Ctrl-C is typed at.
    code = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {START}"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
    )
    os.close(theirs)
    try:
        yield Screen(ours, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)
