"""Trials of agents that are frozen artifacts, in real process sandboxes: what they see, and what they cannot do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ordinary_user
import pytest
from runs_support import children, in_child, reap_orphans

from sandbox_exec import Experiment, RunCallback, continue_run, run
from sandbox_exec.artifacts import archive_digest, freeze, unpack
from sandbox_exec.contracts import Limits, Rung, Status, TrialCompletion
from sandbox_exec.errors import InvalidArtifact, InvalidExperiment
from sandbox_exec.guest.view import remove_scratch
from sandbox_exec.runs import RunSummary
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.process import ProcessSandbox
from sandbox_exec.sandbox.provider import Provider, chosen
from sandbox_exec.store import RunStore, history

ROOT = Path(__file__).parent.parent
AGENT = """#!/usr/bin/env python3
import errno, json, os, sys

agent = os.environ["SANDBOX_EXEC_AGENT"]


def attempt(function, *args):
    try:
        function(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"


with open("/proc/self/mountinfo") as file:
    mounts = [line.split() for line in file]
with open(os.environ["SANDBOX_EXEC_IN"] + "/task.json") as file:
    task = json.load(file)
with open(agent + "/who") as file:
    who = file.read()
seen = {
    "argv": sys.argv,
    "agent": agent,
    "who": who,
    "task": task["id"],
    "cwd": os.getcwd(),
    "mount": sorted(flag for mount in mounts if mount[4] == agent for flag in mount[5].split(",")),
    "up": sorted(os.listdir(agent + "/..")),
    "writes": {
        "create": attempt(open, agent + "/new", "w"),
        "change": attempt(open, agent + "/who", "a"),
        "remove": attempt(os.unlink, agent + "/who"),
        "rename": attempt(os.rename, agent + "/bin", agent + "/nib"),
        "mode": attempt(os.chmod, agent + "/who", 0o777),
        "time": attempt(os.utime, agent + "/who"),
        "folder": attempt(os.rename, agent, agent + "-2"),
    } if task["input"] == "attack" else {},
}
with open(os.environ["SANDBOX_EXEC_OUT"] + "/result.json", "w") as file:
    json.dump(seen, file)
"""


def make_artifact(base: Path, name: str) -> Path:
    folder = base / f"source-{name}"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "agent").write_text(AGENT)
    (folder / "bin" / "agent").chmod(0o755)
    (folder / "who").write_text(name)
    freeze(folder, base / f"{name}.tar.gz", entrypoint="bin/agent")
    return base / f"{name}.tar.gz"


def experiment(base: Path, *names: str, **changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "name": "artifacts",
        "tasks": [{"id": f"t{n}", "input": "attack"} for n in range(2)],
        "variants": [{"id": name, "agent": {"artifact": f"{name}.tar.gz"}} for name in names],
        "design": {"max_concurrency": 1},
        "sandbox": {"timeout_s": 30, "memory": "128MiB"},
        "base": base,
    }
    return Experiment(**{**fields, **changes})


def results(folder: Path) -> dict[str, Any]:
    """By variant and task."""
    found = {path.parent.parent.name: json.loads(path.read_text()) for path in folder.rglob("attempt-*/result.json")}
    return {".".join(name.split(".")[:2]): seen for name, seen in found.items()}


def assert_sealed(seen: dict[str, Any]) -> None:
    """What an agent on a rung with namespaces must have found."""
    assert (seen["agent"], seen["argv"], seen["cwd"]) == ("/agent", ["/agent/bin/agent"], "/workspace")
    assert {"ro", "nosuid", "nodev"} <= set(seen["mount"])
    assert set(seen["writes"]) >= {"create", "change", "remove", "rename", "mode", "time", "folder"}
    assert set(seen["writes"].values()) <= {"EROFS", "EBUSY", "EACCES", "EPERM"}
    assert {"agent", "in", "out", "proc", "tmp", "workspace"} <= set(seen["up"])
    assert "manifest.json" not in seen["up"]


def unpacked(folder: Path, archive: Path) -> Path:
    return folder / "artifacts" / archive_digest(archive).removeprefix("sha256:")


# --- what an agent sees ---


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    """A run of four variants on one worker: two artifacts, none, and one whose program cannot start."""
    base = tmp_path_factory.mktemp("done")
    for name in ("one", "two", "broken"):
        make_artifact(base, name)
    (base / "source-broken" / "bin" / "agent").write_text("#!/no/such/interpreter\n")
    freeze(base / "source-broken", base / "broken.tar.gz", entrypoint="bin/agent")
    plain = 'ls -A $SANDBOX_EXEC_AGENT | wc -l > n; echo {\\"n\\": $(cat n)} > $SANDBOX_EXEC_OUT/result.json'
    variants = [
        {"id": "one", "agent": {"artifact": "one.tar.gz"}},
        {"id": "none", "agent": {"command": ["sh", "-c", plain]}},
        {"id": "two", "agent": {"artifact": "two.tar.gz"}},
        {"id": "broken", "agent": {"artifact": "broken.tar.gz"}},
    ]
    return run(experiment(base, variants=variants), runs=base / "runs", run_id="r")


def test_each_variant_sees_its_own_artifact_and_can_only_read_it(done: RunSummary) -> None:
    seen = results(done.folder)
    for variant in ("one", "two"):
        for task in ("t0", "t1"):
            assert seen[f"{variant}.{task}"]["who"] == variant
            assert seen[f"{variant}.{task}"]["task"] == task
            if chosen().rung.namespaced:
                assert_sealed(seen[f"{variant}.{task}"])


def test_an_agent_without_an_artifact_finds_the_place_empty(done: RunSummary) -> None:
    seen = results(done.folder)
    assert seen["none.t0"] == seen["none.t1"] == {"n": 0}


def test_an_artifact_whose_program_cannot_start_is_a_fault_of_the_setup(done: RunSummary) -> None:
    assert done.by_variant["broken"] == {Status.SETUP_FAILED: 2}
    assert done.by_status == {Status.SUCCESS: 6, Status.SETUP_FAILED: 2}


def test_each_archive_is_unpacked_once_below_the_runs_folder(done: RunSummary) -> None:
    base = done.folder.parent.parent
    places = {name: unpacked(done.folder, base / f"{name}.tar.gz") for name in ("one", "two", "broken")}
    assert {path.name for path in (done.folder / "artifacts").iterdir()} == {path.name for path in places.values()}
    dispatch = json.loads(next(done.folder.glob("trials/one.t0*/attempt-1/dispatch.json")).read_text())
    assert (dispatch["artifact"], dispatch["entrypoint"]) == (str(places["one"] / "files"), "bin/agent")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that an agent of another uid can reach, as none hides it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    remove_scratch(str(folder))  # which goes through folders that are read-only


def test_on_a_rung_without_mounts_it_is_named_where_it_is(open_folder: Path) -> None:
    archive = make_artifact(open_folder, "one")
    one = experiment(open_folder, "one", tasks=[{"id": "t", "input": "look"}])
    summary = run(one, runs=open_folder / "runs", containment=Rung.SUBREAPER.value)
    (seen,) = results(summary.folder).values()
    folder = unpacked(summary.folder, archive) / "files"
    assert (seen["agent"], seen["argv"], seen["who"]) == (str(folder), [f"{folder}/bin/agent"], "one")


def test_an_ordinary_users_agent_sees_it_read_only(tmp_path: Path) -> None:
    try:
        driver = ordinary_user.start("test_artifact_trials", {}, uid=ordinary_user.new_uid())
    except PermissionError:
        pytest.skip("this machine has no namespaces for ordinary users")
    said = list(driver.lines())
    assert driver.verdict["driver"] == "0", said
    (line,) = said
    assert line["status"] == "completed"
    assert line["seen"]["who"] == "mine"
    if line["rung"] == Rung.USER_NAMESPACES:
        assert_sealed(line["seen"])


def as_ordinary_user() -> None:
    """The driver: a run in a folder of its own, which it can remove afterwards."""
    base = Path(tempfile.mkdtemp())
    make_artifact(base, "mine")
    summary = run(experiment(base, "mine", tasks=[{"id": "t", "input": "attack"}]), runs=base / "runs")
    (seen,) = results(summary.folder).values()
    print(json.dumps({"status": summary.status, "seen": seen, "rung": str(chosen().rung)}), flush=True)


def test_a_slot_is_lent_again_only_for_the_same_artifact(tmp_path: Path) -> None:
    folders = []
    for name in ("one", "two"):
        unpack(make_artifact(tmp_path, name), tmp_path / name)
        folders.append(tmp_path / name / "files")
    loop = Loop()
    given: list[ProcessSandbox] = []
    provider = Provider(loop, chosen(), 1, [])

    def acquire(agent: Path | None) -> ProcessSandbox:
        failed: list[str] = []
        count = len(given)
        provider.acquire(0, Limits(), given.append, failed.append, agent=agent)
        while len(given) == count:
            assert not failed
            loop.run_once(10)
        return given[-1]

    try:
        first = acquire(folders[0])
        assert acquire(folders[0]) is first
        second = acquire(folders[1])
        assert second is not first
        assert acquire(None) is not second
    finally:
        provider.close()
        loop.close()


# --- a run and its archives ---


class DieAfter(RunCallback):
    """Ends the coordinator, as `kill -9` does, when so many trials have been committed."""

    def __init__(self, trials: int) -> None:
        self._left = trials

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def history_of(folder: Path) -> bytes:
    with RunStore.open(folder, write=False) as store:
        return b"".join(history(store))


def test_a_run_that_was_killed_is_continued_with_the_same_artifacts(tmp_path: Path) -> None:
    archive = make_artifact(tmp_path, "one")
    tasks = [{"id": f"t{n}", "input": "look"} for n in range(3)]
    one = experiment(tmp_path, "one", tasks=tasks)
    undisturbed = run(one, runs=tmp_path / "runs", run_id="undisturbed")
    known = children()
    killed = in_child(lambda: run(one, runs=tmp_path / "runs", run_id="killed", callbacks=[DieAfter(1)]))
    assert killed == -signal.SIGKILL
    reap_orphans(known)
    folder = tmp_path / "runs" / "killed"
    place = unpacked(folder, archive)
    before = place.stat().st_ino
    summary = continue_run(folder)
    assert (summary.status, summary.by_status) == ("completed", {Status.SUCCESS: 3})
    assert place.stat().st_ino == before
    assert history_of(folder) == history_of(undisturbed.folder)
    archive.unlink()
    assert continue_run(folder).status == "completed"  # it needs it no more


def test_what_was_touched_is_unpacked_again(tmp_path: Path) -> None:
    archive = make_artifact(tmp_path, "one")
    first = run(experiment(tmp_path, "one"), runs=tmp_path / "runs", on_ready=lambda coordinator: coordinator.drain(""))
    place = unpacked(first.folder, archive)
    (place / "files" / "who").chmod(0o644)
    (place / "files" / "who").write_text("an impostor")
    (place.parent / ".stale.tmp").mkdir()  # of one that was killed while it unpacked
    assert continue_run(first.folder).by_status == {Status.SUCCESS: 2}
    assert {seen["who"] for seen in results(first.folder).values()} == {"one"}
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_an_archive_that_was_replaced_is_not_continued_with(tmp_path: Path) -> None:
    archive = make_artifact(tmp_path, "one")
    first = run(experiment(tmp_path, "one"), runs=tmp_path / "runs", on_ready=lambda coordinator: coordinator.drain(""))
    freeze(tmp_path / "source-one", archive, entrypoint="bin/agent", id="another")
    with pytest.raises(InvalidExperiment, match=r"one\.tar\.gz has changed"):
        continue_run(first.folder)


def test_a_tampered_archive_refuses_the_run_before_there_is_one(tmp_path: Path) -> None:
    make_artifact(tmp_path, "good")
    for name in ("cut", "flipped"):
        data = bytearray(make_artifact(tmp_path, name).read_bytes())
        data[-5] ^= 1
        (tmp_path / f"{name}.tar.gz").write_bytes(data if name == "flipped" else data[:-100])
    with pytest.raises(InvalidArtifact) as caught:
        run(experiment(tmp_path, "good", "cut", "flipped"), runs=tmp_path / "runs")
    first, *lines = str(caught.value).splitlines()
    assert first == "this experiment cannot be run:"
    assert [re.sub(r"'/.*/", "'", line).strip() for line in lines] == [
        "variant 'cut': agent.artifact: 'cut.tar.gz' is not a frozen artifact that can be used: "
        "it is truncated: the end of the gzip stream is missing",
        "variant 'flipped': agent.artifact: 'flipped.tar.gz' is not a frozen artifact that can be used: "
        "it is damaged: Error -3 while decompressing data: incorrect data check",
    ]
    assert not (tmp_path / "runs").exists()


# --- the example ---


def test_the_example_is_frozen_and_run_as_its_file_says(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "artifact", tmp_path / "examples" / "artifact")
    text = (tmp_path / "examples" / "artifact" / "experiment.yaml").read_text()
    for command in re.findall(r"^#   sandbox-exec (.*)$", text, re.MULTILINE):
        words = [sys.executable, "-W", "error", "-P", "-m", "sandbox_exec", *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
    found = {path.parent.parent.name: path.read_text() for path in (tmp_path / "runs").rglob("attempt-1/result.json")}
    assert {name.split(".")[1]: text for name, text in found.items()} == {
        "fruit": '{"known":2}\n',
        "stones": '{"known":0}\n',
    }


if __name__ == "__main__":
    as_ordinary_user()
