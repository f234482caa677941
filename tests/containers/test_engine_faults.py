"""When Docker misbehaves, for real: an engine that is not there, is another's, old, hung, killed, or full.

The tests that disturb an engine have a private one, with its data on a small file system of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import leftovers
import pytest
from engine import cannot_run
from runs_support import completions, events, history_of, in_child, statuses
from support import Watch, reap

from containers.runs_in_docker import READY, OnTrace, assert_nothing_left, experiment, first_processes, of_run
from sandbox_exec import images, runs
from sandbox_exec.cli import exit_code
from sandbox_exec.contracts import Slot, Status, TrialCompletion
from sandbox_exec.control import ask
from sandbox_exec.coordinator import RunCallback
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import kernel
from sandbox_exec.sandbox import engine

SCRIPT = Path(__file__).parents[2] / "scripts" / "docker-engine"
DATA = "size=96m"  # busybox, what containers write, and what the engine keeps of both
NOBODY = 54_000


class Private:
    """A dockerd that is ours to hurt."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.address = f"unix://{folder}/docker.sock"

    def call(self, word: str) -> None:
        env = {**os.environ, "SANDBOX_EXEC_ENGINE_DIR": str(self.folder)}
        done = subprocess.run([sys.executable, SCRIPT, word, "--private"], capture_output=True, text=True, env=env)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def kill(self) -> None:
        """As the kernel does it when memory runs out: the engine alone. Its containers and their shims live on."""
        with Watch([self.pid]) as watch:
            self.signal(signal.SIGKILL)
            watch.wait_gone()

    def processes(self) -> set[int]:
        """All of it, and what runs in its containers."""
        named = [pid for pid in leftovers.descendants() if f"{self.folder}/" in command_line(pid)]
        return {*named, *(below for pid in named for below in leftovers.descendants(pid))}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def private(_nothing_left_by_module: None) -> Iterator[Private]:
    if os.geteuid() != 0 or shutil.which("dockerd", path="/usr/bin:/usr/sbin:/usr/local/bin") is None:
        cannot_run("only root can start an engine, and only where one is installed")
    place, before = Path(tempfile.mkdtemp(prefix="engine-")), set(leftovers.children(os.getpid()))
    found = Private(place / "e")
    found.data.mkdir(parents=True)
    (found.folder / "sandbox-exec-engine").touch()
    kernel.mount("tmpfs", str(found.data), "tmpfs", data=DATA)
    try:
        found.call("start")
        yield found
    finally:
        found.call("stop")
        reap(set(leftovers.children(os.getpid())) - before)  # the engine's processes have come to us
        shutil.rmtree(place)


@pytest.fixture(autouse=True)
def _nothing_left(_nothing_left_by_module: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """As everywhere; but the engine may be another one after a test."""
    found = request.getfixturevalue("private") if "private" in request.fixturenames else None
    before = leftovers.Picture.take()
    yield
    if found is not None:
        reap(set(leftovers.children(os.getpid())) - before.processes)  # the one that was killed
        before.processes.update(found.processes())
        before.mounts.update(line for line in leftovers.mounts() if str(found.folder) in line)
    if left := before.left():
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def image(private: Private, monkeypatch: pytest.MonkeyPatch) -> str:
    """The small one, on the private engine, which is that of the test."""
    monkeypatch.setenv("DOCKER_HOST", private.address)
    return images.build("busybox").name


# --- an engine that cannot be used ---


def refusal(tmp_path: Path, *, continued: Path | None = None) -> str:
    """What a run says that cannot begin; there is no run then."""
    one = experiment(tmp_path / "base", [{"id": "a", "input": "true"}], "sandbox-exec/busybox:1")
    with pytest.raises(SandboxUnavailable) as caught:
        runs.run(one, runs=tmp_path / "runs")
    assert exit_code(caught.value) == 3
    assert not (tmp_path / "runs").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a socket that is not there yet, which is where the engine should be. Short, as paths of sockets are."""
    place = tempfile.mkdtemp(prefix="socket-")
    os.chmod(place, 0o755)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{place}/s")
    yield f"{place}/s"
    shutil.rmtree(place)


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        yield server


def test_without_an_engine_there_is_no_run_and_the_shell_says_what_to_do(address: str, tmp_path: Path) -> None:
    said = refusal(tmp_path)
    assert said == (
        f"the Docker engine at unix://{address} is not running: start it (systemctl start docker), or name another in "
        "DOCKER_HOST"
    )
    file = tmp_path / "e.yaml"
    file.write_text(
        "{name: e, tasks: [{id: a, input: 1}], variants: [{id: v, agent: {command: ['true']}}], "
        "sandbox: {kind: docker, image: 'sandbox-exec/busybox:1'}}"
    )
    command = [sys.executable, "-m", "sandbox_exec", "run", str(file), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", f"sandbox-exec: {said}\n")


def test_an_engine_that_has_ended_and_left_its_socket_is_not_running(address: str, tmp_path: Path) -> None:
    with listening(address):
        pass
    assert "is not running: start it" in refusal(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_who_may_not_use_the_socket_is_told_to_join_its_group(address: str, tmp_path: Path) -> None:
    def as_nobody() -> None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with pytest.raises(SandboxUnavailable, match="may not be used by this user: join the group of its socket"):
            engine.connect()

    with listening(address):
        os.chmod(address, 0o660)
        assert in_child(as_nobody) == 0


@contextlib.contextmanager
def answering(address: str, body: bytes) -> Iterator[None]:
    """Something that says the same to whatever it is asked."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + body)

    with socketserver.UnixStreamServer(address, Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


def test_an_engine_that_is_too_old_is_named_with_what_is_needed(address: str, tmp_path: Path) -> None:
    with answering(address, b'{"ApiVersion": "1.24", "Version": "1.12.6"}'):
        said = refusal(tmp_path)
    assert "is too old: it speaks version 1.24 of its API, and 1.40 is needed: install engine 19.03 or later" in said


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"ApiVersion": "new"}'])
def test_what_is_no_engine_at_all_is_not_taken_for_one(address: str, tmp_path: Path, body: bytes) -> None:
    with answering(address, body):
        assert "cannot be used" in refusal(tmp_path)


def test_an_engine_that_does_not_answer_is_given_up(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "ANSWER_S", 0.2)
    with listening(address):
        assert "does not answer: see its log, or restart it" in refusal(tmp_path)


# --- an engine that refuses ---


def only(folder: Path) -> TrialCompletion:
    ((completion,),) = completions(folder).values()
    return completion


def test_an_image_that_cannot_be_had_fails_its_own_trials_and_no_others(image: str, tmp_path: Path) -> None:
    tasks = [
        {"id": "ours", "input": "true", "image": "sandbox-exec/nothing:1"},  # which is never pulled
        {"id": "theirs", "input": "true", "image": "127.0.0.1:9/nothing:1"},  # where nobody listens
        {"id": "there", "input": "true"},
    ]
    assert runs.run(experiment(tmp_path / "base", tasks, image), runs=tmp_path, run_id="r").status == "completed"
    assert statuses(tmp_path / "r") == [Status.SETUP_FAILED, Status.SETUP_FAILED, Status.SUCCESS]
    messages = {found.slot.task_id: found.error for (found,) in completions(tmp_path / "r").values()}
    for name, task in (("sandbox-exec/nothing:1", "ours"), ("127.0.0.1:9/nothing:1", "theirs")):
        error = messages[task]
        assert error is not None
        assert error.message == (
            f"there is no image {name!r}: build it (sandbox-exec images build), or pull it (docker pull)"
        )
    assert_nothing_left("r")


@pytest.mark.parametrize(
    ("sandbox", "said"),
    [
        ({"runtime": "nosuch"}, "refused: .*runtime.* nosuch"),
        ({"network": "nosuch"}, "refused: .*network nosuch not found"),
        ({"user": "nosuch"}, "refused: .*unable to find user nosuch"),
    ],
)
def test_what_the_engine_does_not_have_is_told_in_its_words(
    image: str, tmp_path: Path, sandbox: dict[str, str], said: str
) -> None:
    one = experiment(tmp_path / "base", [{"id": "a", "input": "true"}], image, sandbox=sandbox)
    assert runs.run(one, runs=tmp_path, run_id="r").status == "completed"
    found = only(tmp_path / "r")
    assert found.status is Status.SETUP_FAILED
    assert found.error is not None
    assert re.search(said, found.error.message)
    assert_nothing_left("r")


# --- an engine that fails in the middle ---


def test_the_deadline_holds_though_the_engine_hangs(image: str, private: Private, tmp_path: Path) -> None:
    one = experiment(tmp_path / "base", [{"id": "a", "input": f"{READY} trap '' TERM; sleep 1000"}], image,
                     sandbox={"timeout_s": 2})  # fmt: skip
    stood_still: list[bool] = []
    threads: list[threading.Thread] = []

    def hang() -> None:
        watch = Watch(first_processes("r"))
        private.signal(signal.SIGSTOP)

        def let_go() -> None:
            try:
                watch.wait_gone()
                stood_still.append(leftovers.fields(private.pid)["State"].startswith("T"))
            finally:
                watch.close()
                private.signal(signal.SIGCONT)  # or what follows takes as long as we wait for answers

        threads.append(threading.Thread(target=let_go))
        threads[0].start()

    callback = OnTrace(1, hang)
    assert runs.run(one, runs=tmp_path, run_id="r", callbacks=[callback]).status == "completed"
    threads[0].join()
    assert callback.failure is None
    assert stood_still == [True]
    found = only(tmp_path / "r")
    assert found.status is Status.TASK_TIMEOUT
    assert found.kill is not None
    assert "the kernel killed all in it" in found.kill.proof
    assert_nothing_left("r")


def test_what_is_paused_dies_with_its_engine_and_is_tried_again(image: str, private: Private, tmp_path: Path) -> None:
    flag = tmp_path / "flags" / "go"
    flag.parent.mkdir()
    one = experiment(
        tmp_path / "base",
        [{"id": "a", "input": f"{READY} until [ -e {flag} ]; do sleep 0.05; done"}],
        image,
        sandbox={"readable": [str(flag.parent)]},
    )
    folder = tmp_path / "r"

    def pause_and_kill() -> None:
        assert ask(folder, do="pause") == {"status": "paused", "frozen": 1}
        assert [found["State"] for found in of_run("r")] == ["paused"]
        with Watch(first_processes("r")) as watch:
            private.kill()
            watch.wait_gone()
        private.call("start")
        flag.touch()
        assert ask(folder, do="resume") == {"status": "running"}

    with ThreadPoolExecutor(1) as beside:  # who is asked is the thread of the run
        done: list[Future[None]] = []
        callback = OnTrace(1, lambda: done.append(beside.submit(pause_and_kill)))
        assert runs.run(one, runs=tmp_path, run_id="r", callbacks=[callback]).status == "completed"
        done[0].result()
    assert statuses(folder) == [Status.SUCCESS]
    assert [event["status"] for event in events(folder, "attempt_lost")] == ["environment_error"]
    runs.sweep()
    assert_nothing_left("r")


class OnLost(RunCallback):
    """Calls back when the first attempt has been lost: it is tried again."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call

    def on_trial_selected(self, slot: Slot, attempt: int) -> None:
        if attempt == 2 and self._call is not None:
            call, self._call = self._call, None
            call()


def test_an_engine_that_is_killed_and_comes_back_costs_attempts_but_no_trials(
    image: str, private: Private, tmp_path: Path
) -> None:
    flag = tmp_path / "flags" / "go"
    flag.parent.mkdir()
    tasks = [{"id": name, "input": f"{READY} until [ -e {flag} ]; do sleep 0.05; done"} for name in "ab"]
    one = experiment(
        tmp_path / "base",
        [*tasks, {"id": "c", "input": "exit 3"}],
        image,
        design={"max_concurrency": 2, "infra_retries": 10},
        sandbox={"readable": [str(flag.parent)]},
    )
    survivors: list[Watch] = []

    def kill() -> None:
        survivors.append(Watch(first_processes("r")))
        assert len(survivors[0].pids) == 2
        private.kill()
        flag.touch()

    killed, back = OnTrace(2, kill), OnLost(lambda: private.call("start"))
    assert runs.run(one, runs=tmp_path, run_id="r", callbacks=[killed, back]).status == "completed"
    assert killed.failure is None
    with survivors[0] as watch:
        watch.wait_gone()
    lost = events(tmp_path / "r", "attempt_lost")
    assert {event["trial_id"] for event in lost if event["attempt"] == 1} >= {
        found[-1].trial_id for found in completions(tmp_path / "r").values() if found[-1].slot.task_id in "ab"
    }
    assert {event["status"] for event in lost} == {"environment_error"}
    assert [event["reason"] for event in lost if "start it" not in event["reason"]] == []
    assert statuses(tmp_path / "r") == [Status.SUCCESS, Status.SUCCESS, Status.AGENT_ERROR]

    assert runs.run(one, runs=tmp_path, run_id="calm").status == "completed"  # which also sweeps
    assert history_of(tmp_path / "calm") == history_of(tmp_path / "r")
    assert_nothing_left("r")
    assert of_run("calm") == []


def test_a_run_whose_engine_is_gone_for_good_is_interrupted_and_continues_as_if_it_had_not_been(
    image: str, private: Private, tmp_path: Path
) -> None:
    flag = tmp_path / "flags" / "go"
    flag.parent.mkdir()
    waits = f"{READY} until [ -e {flag} ]; do sleep 0.05; done"
    one = experiment(
        tmp_path / "base",
        [{"id": "a", "input": waits}, {"id": "b", "input": "exit 3"}, {"id": "c", "input": "true"}],
        image,
        design={"max_concurrency": 1, "infra_retries": 0},
        sandbox={"readable": [str(flag.parent)]},
    )

    def kill() -> None:
        private.kill()
        flag.touch()

    killed = OnTrace(1, kill)
    summary = runs.run(one, runs=tmp_path, run_id="r", callbacks=[killed])
    assert killed.failure is None
    assert summary.status == "interrupted"
    assert "start it" in summary.reason
    assert {*summary.by_status} <= {Status.SUCCESS, Status.AGENT_ERROR}  # nobody is blamed for it
    private.call("start")
    assert runs.continue_run(tmp_path / "r").status == "completed"
    assert runs.run(one, runs=tmp_path, run_id="calm").status == "completed"
    assert history_of(tmp_path / "calm") == history_of(tmp_path / "r")
    assert_nothing_left("r")


def test_an_engine_without_room_is_the_machines_fault_and_the_trial_is_tried_again(
    image: str, private: Private, tmp_path: Path
) -> None:
    one = experiment(tmp_path / "base", [{"id": "a", "input": "true"}], image)
    filler = private.data / "filler"

    class Fills(RunCallback):
        def on_run_start(self, run: Any) -> None:
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 12)):
                    pass

    callbacks = [Fills(), OnLost(filler.unlink)]
    try:
        assert runs.run(one, runs=tmp_path, run_id="r", callbacks=callbacks).status == "completed"
    finally:
        filler.unlink(missing_ok=True)
    (lost,) = events(tmp_path / "r", "attempt_lost")
    assert lost["status"] == "environment_error"
    assert "has no room left on its disk: free some" in lost["reason"]
    assert statuses(tmp_path / "r") == [Status.SUCCESS]
    assert_nothing_left("r")
