"""run.db: commits in order or not at all, one owner, a crash or a full disk at any point, and readers all the while."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rows import active, completion, make_run, row, slot
from runs_support import fork, in_child

from sandbox_exec.contracts import Grade, Slot, Status, derive_trial_id
from sandbox_exec.errors import InvalidValue, RunLocked, StoreFull
from sandbox_exec.guest import kernel
from sandbox_exec.store.db import POINTS, CommitRow, RunStore
from sandbox_exec.store.folders import write_atomic
from sandbox_exec.store.history import history
from sandbox_exec.store.lock import LOCK_NAME, Holder, holder
from sandbox_exec.store.room import one_error
from sandbox_exec.store.schema import TABLES

TABLE_NAMES = [table.split()[2] for table in TABLES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(folder: Path) -> Iterator[RunStore]:
    with make_run(folder) as store:
        yield store


def state(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that the database holds, found whole."""
    with RunStore.open(folder, write=False) as store:
        assert list(store.query("PRAGMA integrity_check")) == [("ok",)]
        assert list(store.query("PRAGMA foreign_key_check")) == []
        return {name: list(store.query(f"SELECT * FROM {name}")) for name in TABLE_NAMES}


# What is written is what is read


def test_a_new_run_holds_its_identity_and_its_schedule_and_nothing_else(store: RunStore) -> None:
    assert store.run() == ("run-1", 0.0, 8, '{"name":"x"}', {"a": "1"})
    assert list(store.slots()) == [slot(idx) for idx in range(8)]
    assert store.committed_through() == -1
    assert store.control() == ("created", {}, 0.0)
    assert store.progress() == ("created", 8, 0, 0, {})
    assert [*store.events(), *store.active(), *store.attempts(), *store.commits(), *store.metrics()] == []


def test_the_database_is_a_wal_with_full_sync_and_foreign_keys(store: RunStore) -> None:
    assert list(store.query("PRAGMA journal_mode")) == [("wal",)]
    assert list(store.query("PRAGMA synchronous")) == [(2,)]
    assert list(store.query("PRAGMA foreign_keys")) == [(1,)]


def test_control_replaces_what_was_noted_before(store: RunStore) -> None:
    store.set_control("paused", by="user", label="lunch")
    store.set_control("running", workers=2)
    assert store.control() == ("running", {"workers": 2}, 0.0)


def test_events_are_kept_in_order_and_can_be_read_from_where_one_was(store: RunStore) -> None:
    store.event("dispatch", slot=1)
    store.event("lost", slot=1, why="no heartbeat")
    first, second = store.events()
    assert (first.kind, first.data, second.kind) == ("dispatch", {"slot": 1}, "lost")
    assert list(store.events(after=first.id)) == [second]


def test_an_active_trial_is_there_until_its_attempt_is_recorded_or_committed(store: RunStore) -> None:
    trials = [active(store.folder, idx) for idx in range(3)]
    for trial in trials:
        store.record_dispatch(trial, started_at=7.0)
    assert store.active_since() == [(trial, 7.0) for trial in trials]
    assert store.progress().active == 3
    store.record_attempt(completion(1, Status.WORKER_LOST), counted=False)
    assert store.active() == [trials[0], trials[2]]
    store.commit([row(0)])
    assert store.active() == [trials[2]]


def test_a_run_that_was_moved_finds_its_active_trials_where_it_is_now(store: RunStore, tmp_path: Path) -> None:
    store.record_dispatch(active(store.folder, 0), started_at=0.0)
    store.close()
    moved = store.folder.rename(tmp_path / "moved")
    with RunStore.open(moved) as again:
        assert again.active() == [active(moved, 0)]


def test_the_same_dispatch_again_replaces_its_worker(store: RunStore) -> None:
    store.record_dispatch(active(store.folder, 0, worker="w1"), started_at=1.0)
    store.record_dispatch(active(store.folder, 0, worker="w2"), started_at=2.0)
    assert store.active_since() == [(active(store.folder, 0, worker="w2"), 2.0)]


def test_a_slot_has_one_attempt_in_flight(store: RunStore) -> None:
    store.record_dispatch(active(store.folder, 0), started_at=0.0)
    with pytest.raises(InvalidValue, match="slot 0, attempt 2: another attempt is in flight"):
        store.record_dispatch(active(store.folder, 0, attempt=2), started_at=0.0)
    assert store.active() == [active(store.folder, 0)]


def test_a_committed_slot_is_not_dispatched_again(store: RunStore) -> None:
    store.commit([row(0)])
    with pytest.raises(InvalidValue, match="slot 0 is committed"):
        store.record_dispatch(active(store.folder, 0, attempt=2), started_at=0.0)


def test_an_attempt_that_arrives_twice_is_kept_once_as_it_came_first(store: RunStore) -> None:
    first = completion(3, Status.WORKER_LOST)
    assert store.record_attempt(first, counted=False) is True
    assert store.record_attempt(completion(3, Status.SUCCESS), counted=True) is False
    (kept,) = store.attempts()
    assert kept == (3, 1, Status.WORKER_LOST, None, False, first.model_dump_json())


def test_an_attempt_that_arrives_after_the_commit_changes_nothing(store: RunStore) -> None:
    store.commit([row(0)])
    before = state(store.folder)
    assert store.record_attempt(completion(0, Status.AGENT_ERROR), counted=True) is False
    with pytest.raises(InvalidValue, match="slot 0 is committed"):
        store.record_attempt(completion(0, Status.AGENT_ERROR, attempt=2), counted=True)
    assert state(store.folder) == before


def test_a_commit_holds_everything_of_its_slot(store: RunStore) -> None:
    grade = Grade(score=0.5, passed=True, metrics={"score": 3, "lines": 12.0}, details={"b": 1, "a": [None]})
    graded = completion(0, grade=grade, wall_s=2.0)
    store.commit([CommitRow(graded, counted=True, grade_digest="9f", metrics={"cost": 0.25}), row(1)])
    text = '{"details":{"a":[null],"b":1},"metrics":{"lines":12.0,"score":3.0},"passed":true,"score":0.5}'
    first, second = store.commits()
    assert first == (0, 1, Status.SUCCESS, None, graded.result_sha256, text, "9f", 0.0)
    assert list(store.commits(first=1)) == [second]
    assert {metric.name: metric.value for metric in store.metrics() if metric.schedule_idx == 0} == {
        "score": 0.5,
        "grade.score": 3.0,
        "grade.lines": 12.0,
        "usage.wall_s": 2.0,
        "cost": 0.25,
    }
    assert next(store.attempts()).completion_json == graded.model_dump_json()


def test_a_skipped_slot_is_committed_without_an_attempt(store: RunStore) -> None:
    store.record_attempt(completion(0, Status.AGENT_ERROR), counted=True)
    store.record_dispatch(active(store.folder, 0, attempt=2), started_at=0.0)
    store.commit([row(0, Status.SKIPPED, error_type="Pruned")])
    assert store.active() == []
    assert [(found.attempt, found.status) for found in store.attempts()] == [(1, Status.AGENT_ERROR)]
    assert [(found.status, found.error_type) for found in store.commits()] == [(Status.SKIPPED, "Pruned")]


def test_a_last_attempt_that_was_recorded_before_is_committed_once(store: RunStore) -> None:
    store.record_attempt(completion(0, Status.WORKER_LOST), counted=False)
    store.commit([CommitRow(completion(0, Status.WORKER_LOST), counted=False)])
    assert len(list(store.attempts())) == 1


# A commit is the next in order, or refused


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(3)], "commit of slot 3, but the next to commit is 2"),
        ([row(1)], "commit of slot 1, but the next to commit is 2"),
        ([row(2), row(4)], "commit of slot 4, but the next to commit is 3"),
        ([row(2), row(2)], "commit of slot 2, but the next to commit is 3"),
        ([row(3), row(2)], "commit of slot 3, but the next to commit is 2"),
        ([row(2), row(3, attempt=5)], "commit of slot 3: its attempt 5 was recorded as another"),
        ([row(idx) for idx in range(2, 9)], "slot 8 is not that of 'careful.task-4.0-"),
    ],
    ids=["gap", "repeat", "gap inside", "repeat inside", "out of order", "contradiction", "past the end"],
)
def test_a_commit_out_of_its_turn_is_refused_and_changes_nothing(
    store: RunStore, rows: list[CommitRow], message: str
) -> None:
    store.commit([row(0), row(1)])
    store.record_attempt(completion(3, Status.WORKER_LOST, attempt=5), counted=False)
    before = state(store.folder)
    with pytest.raises(InvalidValue, match=message):
        store.commit(rows)
    assert state(store.folder) == before
    store.commit([row(2)])
    assert store.committed_through() == 2


def test_a_completion_of_another_trial_does_not_take_the_slots_place(store: RunStore) -> None:
    strange = Slot(schedule_idx=0, variant_id="reckless", task_id="task-0", repeat=0)
    other = completion(0).model_copy(update={"slot": strange, "trial_id": derive_trial_id(strange)})
    with pytest.raises(InvalidValue, match="slot 0 is not that of 'reckless"):
        store.commit([CommitRow(other, counted=True)])
    assert store.committed_through() == -1


def test_committing_nothing_is_nothing(store: RunStore) -> None:
    store.commit([])
    assert store.committed_through() == -1


# Batches


def test_the_writes_of_a_batch_last_together_or_not_at_all(store: RunStore) -> None:
    before = state(store.folder)

    def half_a_batch() -> None:
        with store.batch():
            store.event("dispatch")
            store.commit([row(0)])
            raise KeyError("in the middle")

    with pytest.raises(KeyError):
        half_a_batch()
    assert state(store.folder) == before
    with store.batch():
        store.event("dispatch")
        store.commit([row(0)])
        assert state(store.folder) == before, "a reader saw half of it"
    assert store.committed_through() == 0
    assert len(list(store.events())) == 1


def test_a_commit_that_is_refused_inside_a_batch_leaves_the_rest_of_it(store: RunStore) -> None:
    with store.batch():
        store.event("before")
        with pytest.raises(InvalidValue):
            store.commit([row(0), row(5)])
        store.event("after")
    assert [event.kind for event in store.events()] == ["before", "after"]
    assert store.committed_through() == -1


# Making and opening


def test_a_second_run_in_the_same_folder_is_refused(store: RunStore) -> None:
    store.commit([row(0)])
    store.close()
    before = state(store.folder)
    with pytest.raises(InvalidValue, match=r"there is a run in .* already"):
        make_run(store.folder)
    assert state(store.folder) == before
    assert holder(store.folder) is None


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([slot(0), slot(2)], "slot 1 of the schedule says that it is 2"),
        ([slot(0), slot(0).model_copy(update={"schedule_idx": 1})], "one variant, task and repeat"),
    ],
)
def test_a_schedule_that_contradicts_itself_makes_no_run(folder: Path, slots: list[Slot], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        RunStore.create(folder, "run-1", "{}", slots, {})
    with pytest.raises(InvalidValue, match="is not made yet"):
        RunStore.open(folder)
    make_run(folder).close()


def test_a_folder_without_a_run_is_not_opened_and_nothing_is_made_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"no run in .*: it has no run\.db"):
        RunStore.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_version_is_not_opened(store: RunStore) -> None:
    store.close()
    with closing(sqlite3.connect(store.folder / "run.db")) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(InvalidValue, match="is of version 7, and this program reads 2"):
        RunStore.open(store.folder)
    assert holder(store.folder) is None


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"not a database, but long enough to be looked at" * 100)
    for write in (True, False):
        with pytest.raises(InvalidValue, match="damaged, or is not one"):
            RunStore.open(tmp_path, write)
    assert holder(tmp_path) is None


def test_a_closed_store_says_so_and_closes_twice(store: RunStore) -> None:
    store.close()
    store.close()
    with pytest.raises(InvalidValue, match="is closed"):
        store.progress()
    with pytest.raises(InvalidValue, match="is closed"):
        store.event("late")


# Readers


def test_a_reader_sees_commits_while_the_owner_writes_and_cannot_write_itself(store: RunStore) -> None:
    with RunStore.open(store.folder, write=False) as reader:
        store.commit([row(0)])
        assert reader.committed_through() == 0
        lines = history(reader)
        assert next(lines)
        store.commit([row(1)])  # does not wait for the reader that is in the middle of something
        assert list(lines) == []
        assert reader.progress().committed == 2
        with pytest.raises(InvalidValue, match="was opened to be read"):
            reader.commit([row(2)])


def test_progress_counts_by_status_through_continues(store: RunStore) -> None:
    store.commit([row(0), row(1, Status.TASK_TIMEOUT)])
    store.close()
    with RunStore.open(store.folder) as again:
        again.commit([row(2), row(3, Status.AGENT_ERROR, error_type="ValueError")])
        again.set_control("running")
        assert again.progress() == (
            "running", 8, 4, 0, {Status.SUCCESS: 2, Status.TASK_TIMEOUT: 1, Status.AGENT_ERROR: 1}
        )  # fmt: skip


@pytest.mark.parametrize("ask", [RunStore.progress, RunStore.committed_through, RunStore.control, RunStore.active])
def test_what_status_asks_never_walks_a_table_that_grows_with_the_schedule(
    folder: Path, ask: Callable[[RunStore], object]
) -> None:
    asked: list[str] = []
    with make_run(folder, slots=2) as store:
        store._opened().set_trace_callback(asked.append)
        ask(store)
        store._opened().set_trace_callback(None)
        plans = [str(step[-1]) for sql in asked for step in store.query(f"EXPLAIN QUERY PLAN {sql}")]
    assert any(plan.startswith(("SCAN", "SEARCH")) for plan in plans)
    # `active` and `counts` hold what is in flight and one row for each status, `run` and `control` one row.
    small = ("SCAN a", "SCAN active", "SCAN counts", "SCAN run", "SCAN control", "SCAN CONSTANT ROW")
    assert [plan for plan in plans if plan.startswith("SCAN") and not plan.startswith(small)] == []


def test_a_large_schedule_is_taken_slot_by_slot(folder: Path) -> None:
    alive = most = 0

    class Counted(Slot):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def schedule() -> Iterator[Slot]:
        nonlocal alive, most
        for idx in range(5_000):
            alive += 1
            most = max(most, alive)
            yield Counted(schedule_idx=idx, variant_id="v", task_id="t", repeat=idx)

    with RunStore.create(folder, "run-1", "{}", schedule(), {}) as store:
        assert store.run().slots == 5_000
    assert most <= 3


# One owner


def test_a_second_owner_is_refused_and_told_who_holds_the_run(store: RunStore) -> None:
    held = holder(store.folder)
    assert held is not None
    assert (held.pid, held.host) == (os.getpid(), os.uname().nodename)
    for _ in range(2):
        with pytest.raises(RunLocked, match=rf"held by process {os.getpid()} on .*, since 20\d\d-\d\d-\d\dT"):
            RunStore.open(store.folder)
    with pytest.raises(RunLocked):
        make_run(store.folder)
    store.close()
    assert holder(store.folder) is None
    RunStore.open(store.folder).close()


def test_a_holder_that_has_not_signed_yet_is_still_one(store: RunStore) -> None:
    os.truncate(store.folder / LOCK_NAME, 0)
    assert holder(store.folder) == Holder(None, None, None)
    with pytest.raises(RunLocked, match="held by a process that has just taken it"):
        RunStore.open(store.folder)


def test_a_new_owner_signs_over_the_whole_name_of_one_that_was_killed(store: RunStore) -> None:
    store.close()
    (store.folder / LOCK_NAME).write_text('{"pid": 1, "host": "' + "long" * 100 + '", "since": "then"}')
    with RunStore.open(store.folder):
        held = holder(store.folder)
        assert held is not None
        assert held.pid == os.getpid()


def test_asking_who_holds_a_run_never_keeps_an_owner_out(store: RunStore) -> None:
    store.close()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            holder(store.folder)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(50):
            RunStore.open(store.folder).close()
    finally:
        done.set()
        for thread in asking:
            thread.join()


@contextmanager
def killed_owner(folder: Path, leave: Callable[[int], int]) -> Iterator[None]:
    """An owner that is killed after `leave` started a process that lives until the pipe it is given is closed."""
    for_us, for_owner = os.pipe()
    until, kept_open = os.pipe()

    def own() -> None:
        os.close(kept_open)
        with RunStore.open(folder):
            os.write(for_owner, str(leave(until)).encode())
            signal.pause()

    owner = fork(own)
    os.close(until)
    os.close(for_owner)
    left = int(os.read(for_us, 100))
    try:
        with pytest.raises(RunLocked, match=f"process {owner} on"):
            RunStore.open(folder)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        assert left == owner or os.waitpid(left, os.WNOHANG) == (0, 0), "what the owner left must live to prove it"
        yield
    finally:
        os.close(kept_open)
        os.close(for_us)
        if left != owner:
            os.waitpid(left, 0)


def leave_nothing(until: int) -> int:
    return os.getpid()


def leave_fork(until: int) -> int:
    begun, begin = os.pipe()

    def stay() -> None:
        os.write(begin, b"x")  # what is to be done after a fork is done
        os.read(until, 1)

    left = fork(stay)
    os.read(begun, 1)
    return left


def leave_exec(until: int) -> int:
    # Every descriptor that may be inherited is.
    return subprocess.Popen(["cat"], stdin=until, close_fds=False).pid


@pytest.mark.parametrize("leave", [leave_nothing, leave_fork, leave_exec])
def test_a_killed_owners_run_is_free_at_once_whatever_it_left_running(
    store: RunStore, leave: Callable[[int], int]
) -> None:
    store.close()
    with killed_owner(store.folder, leave):
        assert holder(store.folder) is None
        with RunStore.open(store.folder) as again:
            again.commit([row(0)])
            assert str(os.getpid()) in str(holder(store.folder))


def test_a_forked_child_cannot_use_the_store_and_harms_nothing_by_ending(store: RunStore) -> None:
    def use_it() -> None:
        with pytest.raises(InvalidValue, match="opened by this process's parent"):
            store.commit([row(0)])
        store.close()
        with pytest.raises(RunLocked):
            RunStore.open(store.folder)

    store.event("before")
    assert in_child(use_it) == 0
    store.commit([row(0)])
    with pytest.raises(RunLocked):
        RunStore.open(store.folder)
    assert len(state(store.folder)["commits"]) == 1


# A crash at any point


def write_commit(store: RunStore) -> None:
    store.commit([row(1), row(2, Status.AGENT_ERROR, error_type="ValueError"), row(3)])


def write_attempt(store: RunStore) -> None:
    store.record_attempt(completion(1, Status.AGENT_ERROR), counted=True)


def write_dispatch(store: RunStore) -> None:
    store.record_dispatch(active(store.folder, 2), started_at=1.0)


def write_control(store: RunStore) -> None:
    store.set_control("paused", label="lunch")


def write_event(store: RunStore) -> None:
    store.event("paused", label="lunch")


def write_batch(store: RunStore) -> None:
    with store.batch():
        write_attempt(store)
        write_event(store)
        store.commit([row(1, attempt=2)])


WRITES = [write_commit, write_attempt, write_dispatch, write_control, write_event, write_batch]


def killer(point: str) -> Callable[[str], None]:
    def at(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def started_run(folder: Path) -> None:
    with make_run(folder) as store:
        store.record_dispatch(active(folder, 1), started_at=0.0)
        store.commit([row(0)])


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: str(write.__name__))
def test_a_writer_killed_at_any_point_leaves_the_state_before_or_after(
    tmp_path: Path, write: Callable[[RunStore], None], point: str
) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        started_run(folder)
    before = state(calm)
    with RunStore.open(calm, now=lambda: 0.0) as store:
        write(store)
    after = state(calm)
    assert before != after

    def write_and_die() -> None:
        name = write.__name__.removeprefix("write_")
        write(RunStore.open(killed, at=killer(f"{name}:{point}"), now=lambda: 0.0))

    assert in_child(write_and_die) == -signal.SIGKILL
    assert state(killed) == (after if point == "after-commit" else before)
    with RunStore.open(killed, now=lambda: 0.0) as store:
        if point != "after-commit":
            write(store)
    assert state(killed) == after


@pytest.mark.parametrize("point", POINTS)
def test_a_maker_killed_at_any_point_leaves_no_run_or_a_whole_one(folder: Path, point: str) -> None:
    def make_and_die() -> None:
        RunStore.create(folder, "run-1", "{}", map(slot, range(500)), {}, at=killer(f"create:{point}"))

    assert in_child(make_and_die) == -signal.SIGKILL
    if point == "after-commit":
        assert len(state(folder)["schedule"]) == 500
    else:
        for write in (True, False):
            with pytest.raises(InvalidValue, match="is not made yet"):
                RunStore.open(folder, write)
        make_run(folder).close()
        assert len(state(folder)["schedule"]) == 8


def test_a_log_that_was_cut_anywhere_gives_the_state_before_or_after(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    started_run(killed)
    before = state(killed)

    def write_and_die() -> None:
        write_commit(RunStore.open(killed, at=killer("commit:after-commit"), now=lambda: 0.0))

    assert in_child(write_and_die) == -signal.SIGKILL
    log = (killed / "run.db-wal").read_bytes()
    assert log
    seen = []
    for place in [*range(0, len(log), 1777), len(log)]:
        cut = tmp_path / f"cut-{place}"
        cut.mkdir()
        shutil.copy(killed / "run.db", cut)
        (cut / "run.db-wal").write_bytes(log[:place])
        seen.append(state(cut))
    after = seen[-1]
    assert len(after["commits"]) == 4
    assert all(found in (before, after) for found in seen)
    assert seen[0] == before


@pytest.mark.parametrize("heard", [1, 2, 5, 9, 17])
def test_what_a_writer_said_was_committed_is_there_after_it_is_killed(folder: Path, heard: int) -> None:
    make_run(folder, slots=400).close()
    hear, tell = os.pipe()

    def commit_and_tell() -> None:
        with RunStore.open(folder) as store:
            for idx in range(0, 400, 2):
                store.commit([row(idx), row(idx + 1)])
                os.write(tell, b".")

    pid = fork(commit_and_tell)
    os.close(tell)
    said = sum(len(os.read(hear, 1)) for _ in range(heard))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(hear, 1000):
        said += len(more)
    os.close(hear)
    commits = [found[0] for found in state(folder)["commits"]]
    assert commits == list(range(len(commits)))
    assert len(commits) in (2 * said, 2 * said + 2)
    with RunStore.open(folder) as store:
        store.commit([row(len(commits))])


# No room left


def on_a_tiny_disk(tmp_path: Path, options: str, work: Callable[[Path], None]) -> None:
    """Run `work` with a folder that is a file system of its own, in a process and mount namespace of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount_and_work() -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tiny", str(disk)], check=True)
        work(disk)

    assert in_child(mount_and_work) == 0


def fill(disk: Path) -> Path:
    filler = disk / "filler"

    def write_on() -> None:
        with open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with pytest.raises(OSError, match="No space left"):
        write_on()
    return filler


def exhaust(disk: Path) -> Path:
    filler = disk / "files"
    filler.mkdir()

    def make_on() -> None:
        for number in count():
            (filler / str(number)).touch()

    with pytest.raises(OSError, match="No space left"):
        make_on()
    return filler


def large(idx: int) -> CommitRow:
    failed = completion(idx, Status.AGENT_ERROR, error_type="ValueError", traceback="x" * 50_000)
    return CommitRow(failed, counted=True)


def test_on_a_full_disk_a_commit_fails_whole_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    with make_run(tmp_path / "calm", slots=30) as calm:
        calm.commit([large(idx) for idx in range(30)])
        due = list(history(calm))

    def work(disk: Path) -> None:
        with make_run(disk / "run", slots=30) as store:
            store.commit([large(0), large(1)])
            filler = fill(disk)

            def commit_until_full() -> None:
                while True:
                    store.commit([large(store.committed_through() + 1)])

            with pytest.raises(StoreFull, match=r"no room left in .*/run: free some there"):
                commit_until_full()
            full_at = store.committed_through()
            before = state(store.folder)
            for _ in range(3):
                with pytest.raises(StoreFull):
                    store.commit([large(full_at + 1), large(full_at + 2)])
            assert state(store.folder) == before
        filler.unlink()
        with RunStore.open(disk / "run") as store:
            assert store.committed_through() == full_at
            store.commit([large(idx) for idx in range(full_at + 1, 30)])
            assert list(history(store)) == due
        assert len(state(disk / "run")["commits"]) == 30

    on_a_tiny_disk(tmp_path, "size=8m", work)


def test_a_batch_that_hit_a_full_disk_cannot_be_finished_by_ignoring_it(tmp_path: Path) -> None:
    def work(disk: Path) -> None:
        with make_run(disk / "run", slots=300) as store:
            filler = fill(disk)

            def ignore_it() -> None:
                with store.batch():
                    store.event("before")
                    with pytest.raises(StoreFull):
                        store.commit([large(idx) for idx in range(300)])  # more than is kept in memory
                    store.event("after")

            with pytest.raises(InvalidValue, match="an earlier write of this batch failed"):
                ignore_it()
            filler.unlink()
            assert list(store.events()) == []
            assert store.committed_through() == -1
            store.commit([row(0)])

    on_a_tiny_disk(tmp_path, "size=1m", work)


def test_a_run_cannot_be_made_on_a_full_disk_and_can_once_there_is_room(tmp_path: Path) -> None:
    def work(disk: Path) -> None:
        with pytest.raises(StoreFull):
            make_run(disk / "run", slots=20_000)
        fill(disk).unlink()
        make_run(disk / "run").close()
        assert len(state(disk / "run")["schedule"]) == 8

    on_a_tiny_disk(tmp_path, "size=1m", work)


@pytest.mark.parametrize("use_up", [fill, exhaust])
def test_a_full_disk_keeps_a_run_from_being_continued_and_not_from_being_read(
    tmp_path: Path, use_up: Callable[[Path], Path]
) -> None:
    def work(disk: Path) -> None:
        with make_run(disk / "run") as store:
            store.commit([row(0)])
        used = use_up(disk)
        with pytest.raises(StoreFull):
            RunStore.open(disk / "run")
        assert holder(disk / "run") is None
        assert len(state(disk / "run")["commits"]) == 1
        with pytest.raises(StoreFull):
            write_atomic(disk / "run" / "completion.json", bytes(100_000))
        shutil.rmtree(used) if used.is_dir() else used.unlink()
        with RunStore.open(disk / "run") as store:
            store.commit([row(1)])

    on_a_tiny_disk(tmp_path, "size=1m,nr_inodes=100", work)


def test_a_finished_run_can_be_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    def work(disk: Path) -> None:
        with make_run(disk / "run") as store:
            store.commit([row(0)])
        subprocess.run(["mount", "-o", "remount,ro", "tiny", str(disk)], check=True)
        assert len(state(disk / "run")["commits"]) == 1

    on_a_tiny_disk(tmp_path, "size=1m", work)


def test_an_error_that_is_not_about_room_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), one_error(tmp_path):
        raise PermissionError(13, "no")
    with pytest.raises(sqlite3.OperationalError), one_error(tmp_path):
        sqlite3.connect(tmp_path / "not" / "there")
