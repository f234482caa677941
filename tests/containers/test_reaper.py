"""The reaper takes away what killed runs left, in the engine and on the disk; never what is of a living one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import leftovers
import pytest
from runs_support import children, fork, in_child, reap_orphans, statuses
from support import Script, Watch

from containers.runs_in_docker import READY, SLEEPS, OnTrace, assert_nothing_left, experiment, first_processes, of_run
from sandbox_exec import runs
from sandbox_exec.contracts import Status
from sandbox_exec.guest import kernel
from sandbox_exec.sandbox import owners, reaper
from sandbox_exec.sandbox.reaper import LABEL

UNKNOWN = "1-1-00000000-1"  # of another boot
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount, and make what is another user's")
Make = Callable[..., str]


def dead() -> str:
    """The name of a process that has ended."""
    hear, tell = os.pipe()
    pid = fork(lambda: os.write(tell, owners.name_of(os.getpid()).encode()))
    os.waitpid(pid, 0)
    os.close(tell)
    with os.fdopen(hear) as file:
        return file.read()


@pytest.fixture
def make(engine: Any, busybox_image: str) -> Iterator[Make]:
    """Make a container with our labels; its name."""
    made: list[str] = []

    def make(owner: str, *, deadline_s: float | None = 60.0, start: bool = False, pause: bool = False) -> str:
        labels = {f"{LABEL}owner": owner}
        if deadline_s is not None:
            labels[f"{LABEL}deadline"] = f"{time.time() + deadline_s:.0f}"
        config = engine.create_host_config(network_mode="none", init=True)
        name = f"sandbox-exec-reaper-{os.getpid()}-{len(made)}"
        engine.create_container(busybox_image, ["sleep", "1000"], labels=labels, host_config=config, name=name)
        made.append(name)
        if start or pause:
            engine.start(name)
        if pause:
            engine.pause(name)
        return name

    yield make
    for name in made:
        reaper._remove(engine, name)


def make_folder(owner: str, prefix: str = owners.DOCKER_SCRATCH) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{owner}-"))
    (folder / "box" / "out").mkdir(parents=True)
    (folder / "box" / "out" / "file").touch()
    return folder


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `everything`: what others on this machine have that cannot be seen from here is not ours to take."""
    told = owners.state_of
    monkeypatch.setattr(
        owners, "state_of", lambda name: "alive" if told(name) != "dead" and name != UNKNOWN else told(name)
    )


def kept(reaped: reaper.Reaped) -> dict[str, str]:
    return {left.name: left.why for left in reaped.kept}


# --- owners ---


def test_an_owner_is_alive_until_it_has_ended_though_nobody_has_reaped_it() -> None:
    hear, tell = os.pipe()
    pid = fork(lambda: os.read(hear, 1))
    name = owners.name_of(pid)
    assert owners.state_of(name) == "alive"
    os.write(tell, b".")
    with Watch([pid]) as watch:
        watch.wait_gone()
    assert owners.state_of(name) == "dead"  # a zombie
    os.waitpid(pid, 0)
    assert owners.state_of(name) == "dead"
    os.close(hear)
    os.close(tell)


def test_a_process_that_has_a_dead_ones_pid_is_another() -> None:
    pid, born, *place = owners.name_of(os.getpid()).split("-")
    assert owners.state_of("-".join([pid, str(int(born) - 1), *place])) == "dead"
    assert owners.state_of("-".join([pid, born, "00000000", place[1]])) == "unknown"
    assert owners.state_of("-".join([pid, born, place[0], "1"])) == "unknown"
    assert owners.state_of("") == "unknown"


# --- containers ---


def test_what_is_of_a_dead_owner_goes_and_what_is_of_a_living_one_stays(make: Make, alone: None) -> None:
    ours, gone = owners.name_of(os.getpid()), dead()
    paused, late = make(ours, pause=True, deadline_s=-1000), make(ours, deadline_s=-1000)
    running, frozen, created = make(gone, start=True), make(gone, pause=True), make(gone, deadline_s=None)
    reaped = reaper.reap(_client())
    assert {running, frozen, created} <= set(reaped.containers)
    assert not {paused, late} & set(reaped.containers)
    assert kept(reaped)[paused] == kept(reaped)[late] == f"its owner lives: process {os.getpid()}"
    assert reaped.failed == ()
    assert {running, frozen, created, paused, late} & names() == {paused, late}
    assert not {paused, late} & set(reaper.reap(_client(), everything=True).containers)


def test_what_is_of_an_owner_that_cannot_be_seen_goes_when_its_time_has_passed_or_it_does_not_run(
    make: Make, engine: Any, alone: None
) -> None:
    over, ended = make(UNKNOWN, deadline_s=-1), make(UNKNOWN, start=True)
    engine.kill(ended, "SIGKILL")
    engine.wait(ended)
    new, frozen = make(UNKNOWN), make(UNKNOWN, pause=True, deadline_s=-1)  # whose time stands still
    reaped = reaper.reap(_client())
    assert {over, ended} <= set(reaped.containers)
    assert all("may live: --all takes it too" in kept(reaped)[name] for name in (new, frozen))
    assert {over, ended, new, frozen} & names() == {new, frozen}
    assert {new, frozen} <= set(reaper.reap(_client(), everything=True).containers)
    assert not {new, frozen} & names()


def test_of_two_sweeps_at_once_none_fails(make: Make) -> None:
    name, found = make(dead(), start=True), list[reaper.Reaped]()
    threads = [threading.Thread(target=lambda: found.append(reaper.reap(_client()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert [left for one in found for left in one.failed] == []
    assert name not in names()


_clients: list[Any] = []


def _client() -> Any:
    from engine import client

    _clients.append(client())
    return _clients[-1]


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop().close()


def names() -> set[str]:
    return {one["Names"][0].lstrip("/") for one in _client().containers(all=True)}


# --- folders and mounts ---


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are, for this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folders_of_dead_owners_go_and_others_stay(place: Path, alone: None) -> None:
    gone, ours = dead(), owners.name_of(os.getpid())
    left = [make_folder(gone), make_folder(gone, owners.PROCESS_SCRATCH)]
    lives, unknown, old = make_folder(ours), make_folder(UNKNOWN), make_folder(UNKNOWN)
    os.utime(old, (0, 0))
    another = place / "sandbox-exec-tests-1"
    another.mkdir()
    reaped = reaper.reap_folders()
    assert sorted(reaped.folders) == sorted(map(str, [*left, old]))
    assert list(kept(reaped)) == [str(path) for path in place.iterdir() if path in (lives, unknown)]
    assert sorted(place.iterdir()) == sorted([lives, unknown, another])
    assert str(unknown) in reaper.reap(everything=True).folders
    assert sorted(place.iterdir()) == sorted([lives, another])


@as_root
def test_a_mount_goes_with_its_folder_wherever_that_is(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    here, elsewhere = make_folder(dead()), make_folder(dead())
    elsewhere = elsewhere.rename(tmp_path_factory.mktemp("else where") / elsewhere.name)
    for folder in (here, elsewhere):
        kernel.mount("tmpfs", str(folder / "box"), "tmpfs")
        (folder / "box" / "file").touch()
    assert reaper.reap_folders().mounts == (f"{here}/box",)
    reaped = reaper.reap()
    assert f"{elsewhere}/box" in reaped.mounts
    assert not elsewhere.exists()


@as_root
def test_what_another_user_put_there_under_such_a_name_is_not_touched(place: Path) -> None:
    target = place / "target"
    (target / "box").mkdir(parents=True)
    kernel.mount("tmpfs", str(target / "box"), "tmpfs")
    (place / f"{owners.DOCKER_SCRATCH}{dead()}-aaaaaaaa").symlink_to(target)
    theirs = make_folder(dead())
    os.chown(theirs, 54_000, 54_000)
    try:
        reaped = reaper.reap()  # not everything: there may be other runs on this machine
        assert not any(str(place) in name for name in (*reaped.folders, *reaped.mounts, *kept(reaped)))
        assert os.path.ismount(target / "box")
        assert (theirs / "box" / "out" / "file").exists()
    finally:
        kernel.umount(str(target / "box"))


def test_a_killed_pool_on_a_weak_rung_leaves_a_folder_that_the_next_run_removes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(place))
    known = children()
    with Script(place, _POOL) as script:
        script.expect("4")
        (folder,) = place.glob("sandbox-exec-*")
        assert owners.owner_of(folder.name) == owners.name_of(script.pid)
        assert reaper.reap_folders().folders == ()  # it lives
        for pid in (*leftovers.descendants(script.pid), script.pid):  # a zygote that lives on removes it
            with contextlib.suppress(ProcessLookupError):  # it ended with another of them
                os.kill(pid, signal.SIGKILL)
        script.process.wait()
        reap_orphans(known)
    assert folder.exists()
    done = subprocess.run([sys.executable, "-c", _RUN, place, folder], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\ncompleted False\n"), done.stderr


_POOL = """
    import signal
    from sandbox_exec import Pool

    with Pool(1, containment="subreaper") as pool:
        print(pool.submit(len, "four").result().value, flush=True)
        signal.pause()
"""
_RUN = """
import os, sys
from sandbox_exec import Experiment, run
def before_the_first_trial(_): print(os.path.exists(sys.argv[2]), flush=True)
one = Experiment(name="t", tasks=[{"id": "t", "input": {}}], variants=[{"id": "v", "agent": {"command": ["true"]}}])
print(run(one, runs=sys.argv[1] + "/runs", on_ready=before_the_first_trial).status, "docker" in sys.modules)
"""


# --- runs ---


def orphan(folder: Path, image: str) -> None:
    """A run of two trials whose coordinator, host and workers are all killed while both run."""
    one = experiment(folder / "base", [{"id": "a", "input": SLEEPS}, {"id": "b", "input": SLEEPS}], image,
                     design={"max_concurrency": 2})  # fmt: skip

    def kill_all() -> None:
        for pid in (*leftovers.descendants(os.getpid()), os.getpid()):
            os.kill(pid, signal.SIGKILL)

    known = children()
    assert in_child(lambda: runs.run(one, runs=folder, run_id="r", callbacks=[OnTrace(2, kill_all)])) == -signal.SIGKILL
    reap_orphans(known)


def test_what_outlived_everybody_is_gone_after_reap_or_the_start_of_another_run(
    tmp_path: Path, busybox_image: str
) -> None:
    orphan(tmp_path / "first", busybox_image)
    assert len(of_run("r")) == 2
    with Watch(first_processes("r")) as watch:
        assert all(watch.is_alive(pid) for pid in watch.pids)
        done = call("reap", "--json")
        assert done.returncode == 0
        reaped = json.loads(done.stdout)
        assert (len(reaped["containers"]), len(reaped["folders"]), reaped["failed"]) == (2, 2, [])
        watch.wait_gone()
    assert_nothing_left("r")

    orphan(tmp_path / "second", busybox_image)
    assert len(of_run("r")) == 2
    one = experiment(tmp_path / "base", [{"id": "a", "input": READY}], busybox_image)

    def before_its_first_trial(_: object) -> None:
        assert_nothing_left("r")

    ended = runs.run(one, runs=tmp_path, run_id="another", on_ready=before_its_first_trial)
    assert ended.status == "completed"
    assert statuses(tmp_path / "another") == [Status.SUCCESS]


def call(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sandbox_exec", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def test_people_are_told_what_went_and_what_stays_and_why(make: Make, place: Path) -> None:
    mine, theirs = make(owners.name_of(os.getpid())), make(dead())
    folder = make_folder(dead())
    done = call("reap", TMPDIR=str(place))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert f"removed container {theirs}" in lines
    assert f"removed folder {folder}" in lines
    assert f"kept {mine}: its owner lives: process {os.getpid()}" in lines
    folder = make_folder(dead())
    done = call("reap", TMPDIR=str(place), DOCKER_HOST=f"unix://{place}/nobody")
    assert done.returncode == 3
    assert f"removed folder {folder}" in done.stdout.splitlines()
    assert done.stderr == (
        f"sandbox-exec: containers were not looked at: the Docker engine at unix://{place}/nobody is not running: "
        "start it (systemctl start docker), or name another in DOCKER_HOST\n"
    )
