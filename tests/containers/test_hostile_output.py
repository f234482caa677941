"""What an agent of either kind leaves to harm whoever collects it: through the executor, as in a run.

The agent makes all that it can, in /out and in /workspace, and says what it was refused. Then the attempt's folder is
looked at: regular files and folders only, what was left out is listed with its reason, and a canary of the host's,
to which the links lead, is neither read nor written.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from containers.boxes import Box, Kind, a_box
from containers.interpreter import Python
from sandbox_exec.clock import MonotonicClock
from sandbox_exec.contracts import (
    AgentSpec,
    ContainerSpec,
    Limits,
    Slot,
    Status,
    Task,
    TrialCompletion,
    TrialDispatch,
    Variant,
    derive_trial_id,
)
from sandbox_exec.sandbox.base import Sandbox
from sandbox_exec.trial.executor import Executor

OUT_LIMIT = 1 << 20
GIANT = 200_000_000  # bytes, none of them there
LEAVES = """
import json, os, socket, stat, sys

CANARY = sys.argv[1]
refused = {}


def attempt(name, make, *arguments):
    try:
        make(*arguments)
    except OSError as error:
        refused[name] = error.strerror


def write(name, mode=0o644, data=b"of the agent"):
    with open(name, "wb") as file:
        file.write(data)
    os.chmod(name, mode)


def giant(name):
    with open(name, "wb") as file:
        file.truncate(%(GIANT)d)


def bind(name):
    socket.socket(socket.AF_UNIX).bind(name)


def mess(top):
    os.chdir(top)
    os.umask(0)
    write("plain")
    write("setuid", 0o6755)
    write("unreadable", 0)
    os.mkdir("folder", 0o7777)
    write("folder/in it")
    os.mkdir("locked")
    write("locked/inside")
    os.chmod("locked", 0)
    write("twice")
    attempt("a hard link within", os.link, "twice", "twice more")
    for path in ("/etc/passwd", "/etc/group", CANARY, "/proc/self/status", os.environ["SANDBOX_EXEC_TRACE"]):
        attempt("a hard link to " + path, os.link, path, "hard")
    attempt("a fifo", os.mkfifo, "fifo")
    attempt("a socket", bind, "socket")
    attempt("a block device", os.mknod, "disk", 0o666 | stat.S_IFBLK, os.makedev(8, 0))
    attempt("a character device", os.mknod, "memory", 0o666 | stat.S_IFCHR, os.makedev(1, 1))
    for name, path in {
        "to the canary": CANARY, "to its folder": os.path.dirname(CANARY), "to the root": "/", "loop": "loop",
        "climbs": "../" * 40 + CANARY.lstrip("/"), "dangles": "nowhere", "inside": "plain", "proc": "/proc/self/root",
    }.items():
        os.symlink(path, name)
    attempt("a giant", giant, "giant")
    os.mkdir("deep")
    for level in range(80):
        os.chdir("deep") if level == 0 else os.chdir("d")
        write("at %%d" %% level)
        os.mkdir("d")
    os.chdir(top)
    os.mkdir("odd")
    odd = b"new\\nline", b"\\x1b[2Jescape", b"\\xff\\xfe", b"-rf", b"%%41", "\\u202eexe.txt".encode(), b"n" * 255, b"~"
    for name in odd:
        write(b"odd/" + name)


mess(os.environ["SANDBOX_EXEC_WORKSPACE"])
mess(os.environ["SANDBOX_EXEC_OUT"])
with open("result.json", "w") as file:
    json.dump({"refused": refused}, file)
""" % {"GIANT": GIANT}  # noqa: UP031 - it is full of braces

SWAPS = """
import os, time

os.chdir(os.environ["SANDBOX_EXEC_OUT"])
for folder in ("a", "swapped", "z"):
    os.mkdir(folder)
    for number in range(200):
        with open(f"{folder}/{number}", "w") as file:
            file.write("of the agent")
open("made", "w").close()
while not os.path.exists("swapping"):
    time.sleep(0.001)
"""


class Place(NamedTuple):
    name: str
    kind: Kind
    user: str | None = None


PLACES = (Place("process", "process"), Place("docker", "docker"), Place("docker as root", "docker", user="0"))


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: place.name.replace(" ", "_"))
def place(request: pytest.FixtureRequest) -> Place:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> Iterator[Python]:
    made = Python(request.getfixturevalue("busybox_image"))
    yield made
    made.close()


class Canary:
    """A folder of the host's with a secret, which every agent knows the path of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.secret = folder, os.urandom(16).hex()
        folder.mkdir()
        folder.chmod(0o777)
        self.file = folder / "secret"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        os.utime(self.file, ns=(1, 1))  # to read it would move its time of access
        self._before = self._picture()

    def _picture(self) -> Any:
        info = self.file.stat()
        names = sorted(path.name for path in self.folder.iterdir())
        return names, info.st_size, info.st_mtime_ns, info.st_mode, info.st_nlink, info.st_uid

    def is_untouched(self) -> bool:
        return bool(self._picture() == self._before) and self.file.read_text() == self.secret

    def is_in(self, folder: Path) -> list[str]:
        """The files below it that hold the secret."""
        paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        return [str(path) for path in paths if self.secret.encode() in path.read_bytes()]


class Attempt(NamedTuple):
    completion: TrialCompletion
    folder: Path
    canary: Canary

    def collected(self) -> dict[str, str]:
        found = json.loads((self.folder / "collected.json").read_text())
        return {entry["path"]: entry["reason"] for entry in found["left_out"]}


Runs = Callable[..., Attempt]


@pytest.fixture
def attempt(place: Place, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runs]:
    python = request.getfixturevalue("python") if place.kind == "docker" else None
    image = python.name if python else ""
    with a_box(place.kind, image, 1, MonotonicClock()) as box:

        def run(script: str, on_started: Callable[[Sandbox, Canary], None] = lambda *_: None) -> Attempt:
            canary, folder = Canary(tmp_path / "canary"), tmp_path / "attempt-1"
            folder.mkdir()
            command = (python.executable if python else sys.executable, "-S", "-E", "-c", script, str(canary.file))
            container = ContainerSpec(image=image, user=place.user) if python else None
            dispatch = _dispatch(tmp_path, command, container, python.readable if python else ())
            ended = _execute(box, dispatch, folder, lambda sandbox: on_started(sandbox, canary))
            return Attempt(ended, folder, canary)

        yield run


def _dispatch(
    base: Path, command: tuple[str, ...], container: ContainerSpec | None, readable: tuple[str, ...]
) -> TrialDispatch:
    slot = Slot(schedule_idx=0, variant_id="v", task_id="t", repeat=0)
    return TrialDispatch(
        slot=slot,
        trial_id=derive_trial_id(slot),
        attempt=1,
        seed=1,
        task=Task(id="t", input=None),
        variant=Variant(id="v", agent=AgentSpec(command=command)),
        limits=Limits(timeout_s=60.0, readable=readable),
        base=base,
        out_limit=OUT_LIMIT,
        container=container,
    )


def _execute(box: Box, dispatch: TrialDispatch, folder: Path, on_started: Callable[[Sandbox], None]) -> TrialCompletion:
    done: list[TrialCompletion] = []
    executor = Executor(dispatch, folder, lambda kind: box.places[0], box.clock, on_started, done.append)
    executor.start()

    def has_ended() -> bool:
        if executor.due_s is not None and executor.due_s <= box.clock.now_s():
            executor.on_time()
        return bool(done)

    box.until(has_ended, "the attempt has ended: nothing that was left blocks it")
    return done[0]


def test_of_all_that_an_agent_leaves_only_regular_files_and_folders_come_over(attempt: Runs, place: Place) -> None:
    found = attempt(LEAVES)
    assert (found.completion.status, found.completion.error) == (Status.SUCCESS, None), _stderr(found)
    refused = json.loads((found.folder / "result.json").read_text())["refused"]
    assert {"a block device", "a character device"} <= set(refused), "it has no right to make one"
    assert {f"a hard link to {path}" for path in ("/etc/passwd", str(found.canary.file))} <= set(refused)
    assert "a fifo" not in refused
    assert "a socket" not in refused

    out, names = found.folder / "out", {path.name for path in (found.folder / "out").iterdir()}
    assert names == {"plain", "setuid", "unreadable", "folder", "locked", "twice", "twice%20more", "deep", "odd"}
    assert (out / "folder" / "in%20it").read_text() == "of the agent"
    assert (out / "locked" / "inside").read_text() == "of the agent"  # root collects; an ordinary user could not
    assert {path.name for path in (out / "odd").iterdir()} >= {"new%0Aline", "%1B[2Jescape", "%FF%FE", "-rf", "%2541"}
    assert len(list((out / "odd").iterdir())) == 8

    left = found.collected()
    links = ("to%20the%20canary", "to%20its%20folder", "to%20the%20root", "loop", "climbs", "dangles", "inside", "proc")
    assert {name: left.pop(name) for name in links} == dict.fromkeys(links, "a symbolic link")
    assert (left.pop("fifo"), left.pop("socket")) == ("a FIFO", "a socket")
    assert left.pop("giant") == f"{GIANT} bytes do not fit the {OUT_LIMIT} that are kept"
    ((path, reason),) = left.items()
    assert (path.startswith("deep/d/d"), reason) == (True, "deeper than 64 folders")
    assert_harmless(found)


def test_a_folder_that_is_swapped_for_a_link_while_it_is_collected_leads_nowhere(attempt: Runs) -> None:
    """As by a survivor: nothing of the agent's own is alive by then."""
    swapper = Swapper()
    try:
        found = attempt(SWAPS, swapper.start)
    finally:
        swapper.stop()
    assert found.completion.status is Status.SUCCESS
    assert swapper.rounds > 0
    assert (found.folder / "out" / "z" / "199").read_text() == "of the agent"
    assert_harmless(found)


class Swapper:
    """Puts a link to the canary's folder in the place of a folder, and back, as fast as it can."""

    rounds = 0

    def __init__(self) -> None:
        self._over = threading.Event()

    def start(self, sandbox: Sandbox, canary: Canary) -> None:
        self._out, self._canary = sandbox.open_folder("out"), canary
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        os.close(self._out)

    def _work(self) -> None:
        while not self._over.is_set() and not self._there("made"):
            os.sched_yield()
        if self._over.is_set():
            return
        os.symlink(self._canary.folder, "link", dir_fd=self._out)
        steps = ("swapped", "aside"), ("link", "swapped"), ("swapped", "link"), ("aside", "swapped")
        while not self._over.is_set():
            for first, second in steps:
                os.rename(first, second, src_dir_fd=self._out, dst_dir_fd=self._out)
            if not self.rounds:
                os.close(os.open("swapping", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=self._out))
            self.rounds += 1

    def _there(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._out)
        except FileNotFoundError:
            return False
        return True


def assert_harmless(found: Attempt) -> None:
    """All in the attempt's folder is plain and ours; the canary is as it was, and nowhere else."""
    assert found.canary.is_untouched()
    assert found.canary.is_in(found.folder) == []
    for path in found.folder.rglob("*"):
        info = path.lstat()
        assert stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode), path
        assert stat.S_IMODE(info.st_mode) in (0o644, 0o755), (path, oct(info.st_mode))
        assert info.st_uid == os.geteuid(), path
        assert stat.S_ISDIR(info.st_mode) or info.st_nlink == 1, path


def _stderr(found: Attempt) -> str:
    path = found.folder / "stderr.log"
    return path.read_text() if path.exists() else ""
