"""scripts/docker-engine: a private engine comes, is used, and goes without a trace; another's is left alone."""

from __future__ import annotations

import os
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leftovers import children, mounts, wait_for_end_of_one
from support import PATIENCE_S, reap

SCRIPT = Path(__file__).parent.parent / "scripts" / "docker-engine"
Call = Callable[..., "subprocess.CompletedProcess[str]"]

can_start = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("dockerd", path="/usr/bin:/usr/sbin:/usr/local/bin") is None,
    reason="only root can start an engine, and only where one is installed: scripts/docker-engine start",
)


@pytest.fixture
def place() -> Iterator[Path]:
    """Short, as sockets are below it; pytest's own folders are too deep."""
    place = Path(tempfile.mkdtemp(prefix="engine-"))
    yield place / "e"
    shutil.rmtree(place)


@pytest.fixture
def call(place: Path) -> Iterator[Call]:
    """Call the script. Whatever it left is stopped, so that a test that fails leaves no engine."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("DOCKER_")}
        return subprocess.run(
            [sys.executable, SCRIPT, *arguments],
            capture_output=True,
            text=True,
            env={**inherited, "SANDBOX_EXEC_ENGINE_DIR": str(place), **environment},
        )

    before = children(os.getpid())
    yield call
    call("stop")
    reap(set(children(os.getpid())) - set(before))  # the engine's processes have come to us


class _Engine(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\nOK")


@pytest.fixture
def another(place: Path) -> Iterator[str]:
    """The address of an engine that is not ours: it answers as one, and does no more."""
    path = place.with_name("another.sock")
    with socketserver.UnixStreamServer(str(path), _Engine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"unix://{path}"
        server.shutdown()
        thread.join()


def processes_of(place: Path) -> list[str]:
    """The command lines that name the folder, but for the script's own."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
        except OSError:
            continue  # it has ended
        if f"{place}/" in line:
            found.append(line.replace("\0", " "))
    return found


def nothing_left(place: Path) -> bool:
    return (processes_of(place), [line for line in mounts() if str(place) in line], place.exists()) == ([], [], False)


@can_start
def test_a_private_engine_starts_once_and_leaves_nothing_when_it_stops(call: Call, place: Path, another: str) -> None:
    address = f"unix://{place}/docker.sock"
    before = call("status", "--private")
    assert (before.returncode, before.stdout) == (1, "no engine answers; to start one: scripts/docker-engine start\n")

    first = call("start", "--private", DOCKER_HOST=another)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith(f"started: the private engine answers at {address} after ")
    (pid,) = (place / "pid").read_text().split()
    again = call("start")
    assert (again.returncode, again.stdout) == (0, f"running already: the private engine answers at {address}\n")
    assert (place / "pid").read_text() == pid

    assert call("status").stdout == f"the private engine answers at {address}\n"
    assert call("env").stdout == f"export DOCKER_HOST={address}\n"
    assert call("status", DOCKER_HOST=address).stdout == f"the private engine answers at {address}\n"
    assert not nothing_left(place)

    assert call("stop", DOCKER_HOST=address).returncode == 0
    assert nothing_left(place)
    assert call("status", "--private").returncode == 1
    assert call("stop", "--private").stdout == "nothing to stop: no private engine\n"


@can_start
def test_an_engine_that_was_killed_goes_on_or_is_cleared_away(call: Call, place: Path) -> None:
    assert call("start", "--private").returncode == 0
    (place / "data" / "of-the-first").touch()
    kill_engine(place)
    assert call("status", "--private").returncode == 1
    assert call("start", "--private").returncode == 0
    assert (place / "data" / "of-the-first").exists()
    kill_engine(place)
    assert call("stop").returncode == 0
    assert nothing_left(place)


def kill_engine(place: Path) -> None:
    pid = int((place / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    reap_one(pid)


def reap_one(pid: int) -> None:
    """Its parent has ended, so it is ours."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:  # not on this machine: another process takes orphans
        assert wait_for_end_of_one([pid], PATIENCE_S)


@can_start
def test_an_engine_that_does_not_start_says_why_and_leaves_nothing(call: Call, place: Path, tmp_path: Path) -> None:
    broken = tmp_path / "dockerd"
    broken.write_text("#!/bin/sh\necho no room for an engine; exit 3\n")
    broken.chmod(0o755)
    done = call("start", "--private", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "scripts/docker-engine: dockerd ended with code 3. The end of its log:\n  no room for an engine\n"
    )
    assert nothing_left(place)


def test_an_engine_that_answers_is_used_and_never_stopped(call: Call, place: Path, another: str) -> None:
    started = call("start", DOCKER_HOST=another)
    assert (started.returncode, started.stdout) == (0, f"using the engine that answers at {another}; none is started\n")
    assert call("env", DOCKER_HOST=another).stdout == f"export DOCKER_HOST={another}\n"
    status = call("status", DOCKER_HOST=another)
    assert (status.returncode, status.stdout) == (0, f"an engine that is not ours answers at {another}\n")
    stopped = call("stop", DOCKER_HOST=another)
    assert (stopped.returncode, stopped.stdout) == (
        0,
        f"nothing to stop: no private engine, and that at {another} is not ours\n",
    )
    assert call("status", DOCKER_HOST=another).returncode == 0
    assert nothing_left(place)


def test_a_pid_that_became_anothers_is_not_killed(call: Call, place: Path) -> None:
    place.mkdir()
    (place / "sandbox-exec-engine").touch()
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (place / "pid").write_text(str(bystander.pid))
        assert call("stop").returncode == 0
        assert bystander.poll() is None
        bystander.kill()
    assert not place.exists()


def test_a_folder_with_other_things_is_neither_used_nor_removed(call: Call, place: Path) -> None:
    place.mkdir()
    (place / "thesis").touch()
    assert call("stop", "--private").stdout == "nothing to stop: no private engine\n"
    if os.geteuid() == 0:
        done = call("start", "--private")
        assert (done.returncode, f"{place} holds other things" in done.stderr) == (1, True), done.stderr
    assert [entry.name for entry in place.iterdir()] == ["thesis"]


def test_a_folder_that_is_too_long_for_sockets_is_refused(call: Call) -> None:
    done = call("start", SANDBOX_EXEC_ENGINE_DIR="/run/" + "long" * 20)
    assert (done.returncode, "is too long for sockets: /run/longlong" in done.stderr) == (1, True)


def test_help_says_what_it_does(call: Call) -> None:
    done = call("--help")
    assert done.returncode == 0
    assert "usage: scripts/docker-engine [-h] [--private] {start,stop,status,env}" in done.stdout
