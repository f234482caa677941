"""run.db: all that a run is, in one SQLite file.

Theory of operation
  owner     the coordinator, and nobody else, writes. It holds the flock on run.lock (`lock.py`) while it does
  readers   `status`, `history`, `report` open the file read-only, at any time, and wait for nobody (WAL)
  run.db    with run.db-wal and run.db-shm beside it while it is open, and after a crash. The three belong together:
            who copies a run copies them all. No process that has the store open may open run.db by itself, as
            closing that descriptor would drop SQLite's locks of the whole process

Every write is one transaction that has reached the disk when the method returns, so a crash leaves the state before
it or after it. `batch` makes one transaction of several writes: one wait for the disk instead of many.

The named points of a transaction (`POINTS`) are passed to `at` as "<write>:<point>", so that tests can end the
process at each of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sqlite3
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from sandbox_exec.contracts.status import Status
from sandbox_exec.contracts.words import ActiveTrial, Slot, Task, TrialCompletion, derive_trial_id
from sandbox_exec.errors import InvalidValue
from sandbox_exec.store.canonical import canonical
from sandbox_exec.store.folders import sync_folder
from sandbox_exec.store.lock import OwnerLock, holder
from sandbox_exec.store.room import one_error
from sandbox_exec.store.schema import INDEXES, SCHEMA_VERSION, TABLES

DB_NAME: Final = "run.db"
POINTS: Final = ("before-begin", "in-transaction", "before-commit", "after-commit")

_BUSY_S: Final = 10.0  # for the instants in which one side of a WAL must wait: recovery, the last close
_WAL_LIMIT_BYTES: Final = 4 << 20  # kept of the WAL after a large transaction; the usual size between checkpoints


class Run(NamedTuple):
    """What a run is. Written once."""

    run_id: str
    created_at: float
    slots: int
    experiment_json: str
    digests: dict[str, str]


class Scheduled(NamedTuple):
    """A slot, when it joined the schedule, and the slot that it is another try at, if it is one."""

    slot: Slot
    submitted_at: float
    retry_of: int | None


class Control(NamedTuple):
    """The run's status, and what its owner noted with it."""

    status: str
    metadata: dict[str, Any]
    changed_at: float


class Progress(NamedTuple):
    """How far a run is, at one instant."""

    status: str
    slots: int
    committed: int
    active: int
    by_status: dict[Status, int]


class Attempt(NamedTuple):
    """One attempt that has ended. `counted`: the agent's own, in the history; not one lost to something else."""

    schedule_idx: int
    attempt: int
    status: Status
    error_type: str | None
    counted: bool
    completion_json: str


class Committed(NamedTuple):
    """One commit, as it was written."""

    schedule_idx: int
    attempt: int
    status: Status
    error_type: str | None
    result_digest: str | None
    grade_json: str | None
    grade_digest: str | None
    committed_at: float


class Metric(NamedTuple):
    """One number of a committed slot: `score`, `grade.<name>`, `usage.<name>`, or a name of the coordinator's."""

    schedule_idx: int
    name: str
    value: float


class Event(NamedTuple):
    """Something that happened to the run. Later events have larger ids."""

    id: int
    at: float
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class CommitRow:
    """What a commit publishes of a slot. A `skipped` slot had no last attempt, so none is recorded for it."""

    completion: TrialCompletion
    counted: bool
    grade_digest: str | None = None
    metrics: Mapping[str, float] | None = None


class RunStore:
    """The database of one run, open. Made by `create` and `open`; belongs to the thread that made it.

    A process that is forked while it is open gets a closed one: it neither holds the lock nor can write.
    """

    def __init__(self, folder: Path, mode: str, at: Callable[[str], None] | None, now: Callable[[], float]) -> None:
        self.folder = folder
        self._at = at or (lambda point: None)
        self._now = now
        self._writes = mode != "ro"
        self._in_transaction = False
        self._lock = OwnerLock(folder) if self._writes else None
        try:
            self._connection: sqlite3.Connection | None = _connect(folder / DB_NAME, mode)
        except BaseException:
            if self._lock:
                self._lock.forget()
            raise
        _open_stores.add(self)

    @classmethod
    def create(
        cls,
        folder: Path,
        run_id: str,
        experiment_json: str,
        slots: Iterable[Slot],
        digests: Mapping[str, str],
        *,
        state: Mapping[str, Any] | None = None,
        at: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> Self:
        """Make a run with nothing committed, and own it. `folder` may exist; a run in it may not.

        Ends as a whole or not at all: after a crash in here there is no run, and it can be made again. The slots
        are taken one by one and not kept.
        """
        with one_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        with one_error(folder):
            store = cls(folder, "rwc", at, now)
        try:
            store._fill(run_id, experiment_json, slots, digests, state or {})
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(
        cls,
        folder: Path,
        write: bool = True,
        *,
        at: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> Self:
        """Open the run in `folder`: to own it, or to read it while somebody may own it.

        Raises `InvalidValue` if there is none or it is of another version, `RunLocked` if another owns it. A reader
        in a folder that it cannot write, of a run that nobody owned, does not see an owner that comes later.
        """
        if not (folder / DB_NAME).exists():
            raise InvalidValue(f"there is no run in {folder}: it has no {DB_NAME}")
        with one_error(folder):
            store = cls(folder, "rw" if write else "ro", at, now)
            try:
                store._check_version()
            except BaseException:
                store.close()
                raise
        return store

    def close(self) -> None:
        """Close, and give the run free. Does nothing the second time."""
        try:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
        finally:
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a run is, and how far

    def run(self) -> Run:
        """Return what the run was made with."""
        ((run_id, created_at, slots, experiment, digests),) = self.query(
            "SELECT run_id, created_at, slots, experiment, digests FROM run"
        )
        return Run(run_id, created_at, slots, experiment, json.loads(digests))

    def slots(self) -> Iterator[Slot]:
        """Yield the schedule, in its order."""
        rows = self.query("SELECT schedule_idx, variant_id, task_id, repeat FROM schedule ORDER BY schedule_idx")
        for idx, variant_id, task_id, repeat in rows:
            yield Slot.model_construct(schedule_idx=idx, variant_id=variant_id, task_id=task_id, repeat=repeat)

    def scheduled(self) -> Iterator[Scheduled]:
        """Yield the schedule, in its order, with all that is known of each slot."""
        rows = self.query(
            """SELECT schedule_idx, variant_id, task_id, repeat, submitted_at, retry_of
               FROM schedule ORDER BY schedule_idx"""
        )
        for idx, variant_id, task_id, repeat, submitted_at, retry_of in rows:
            slot = Slot.model_construct(schedule_idx=idx, variant_id=variant_id, task_id=task_id, repeat=repeat)
            yield Scheduled(slot, submitted_at, retry_of)

    def extend(
        self,
        slots: Sequence[Slot],
        tasks: Sequence[Task] = (),
        inputs: Mapping[str, str] | None = None,
        retry_of: Mapping[int, int] | None = None,
    ) -> None:
        """Let slots join the schedule, after all others, with the tasks that they are of and their files' digests.

        Raises `InvalidValue`, and changes nothing, unless they are the next ones and of cells that are not there.
        """
        with self._transaction("extend") as db:
            now = self._now()
            db.executemany(
                "INSERT INTO tasks (task_id, submitted_at, task) VALUES (?, ?, ?)",
                [(task.id, now, task.model_dump_json()) for task in tasks],
            )
            db.executemany("INSERT OR IGNORE INTO inputs VALUES (?, ?)", (inputs or {}).items())
            ((first,),) = db.execute("SELECT slots FROM run")
            made = _insert_slots(db, slots, first, now, retry_of or {})
            db.execute("UPDATE run SET slots = slots + ?", (made,))

    def submitted(self) -> tuple[Task, ...]:
        """Return the tasks that were added to the run after it was made, in the order of their slots."""
        rows = self.query("SELECT task FROM tasks ORDER BY number")
        return tuple(Task.model_validate_json(text) for (text,) in rows)

    def inputs(self) -> dict[str, str]:
        """Return the digests of the files of those tasks."""
        return dict(self.query("SELECT name, digest FROM inputs"))

    def withdraw(self, slots: Mapping[int, tuple[str, str]]) -> None:
        """Note that slots must not start: by slot the kind, and the reason in words."""
        with self._transaction("withdraw") as db:
            db.executemany(
                "INSERT OR IGNORE INTO withdrawn VALUES (?, ?, ?)",
                [(idx, kind, reason) for idx, (kind, reason) in slots.items()],
            )

    def withdrawn(self) -> dict[int, tuple[str, str]]:
        rows = self.query("SELECT schedule_idx, kind, reason FROM withdrawn")
        return {idx: (kind, reason) for idx, kind, reason in rows}

    def set_state(self, name: str, value: Any) -> None:
        """Keep a value that JSON has under a name; None: forget it."""
        with self._transaction("state") as db:
            if value is None:
                db.execute("DELETE FROM state WHERE name = ?", (name,))
            else:
                db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (name, canonical(value)))

    def state(self) -> dict[str, Any]:
        return {name: json.loads(value) for name, value in self.query("SELECT name, value FROM state")}

    def progress(self) -> Progress:
        """Return how far the run is: in time that does not grow with the schedule."""
        ((status, slots, through, active, counts),) = self.query(
            """SELECT (SELECT status FROM control), (SELECT slots FROM run),
                      (SELECT max(schedule_idx) FROM commits), (SELECT count(*) FROM active),
                      (SELECT json_group_object(status, slots) FROM counts)"""
        )
        by_status = {Status(name): count for name, count in json.loads(counts).items()}
        return Progress(status, slots, 0 if through is None else through + 1, active, by_status)

    def committed_through(self) -> int:
        """Return the last committed `schedule_idx`, all before it being committed too; -1 if there is none."""
        ((through,),) = self.query("SELECT max(schedule_idx) FROM commits")
        return -1 if through is None else int(through)

    def control(self) -> Control:
        ((status, metadata, changed_at),) = self.query("SELECT status, metadata, changed_at FROM control")
        return Control(status, json.loads(metadata), changed_at)

    def set_control(self, status: str, **metadata: Any) -> None:
        """Set the run's status; what was noted with the one before is replaced."""
        with self._transaction("control") as db:
            db.execute(
                "UPDATE control SET status = ?, metadata = ?, changed_at = ?",
                (status, canonical(metadata), self._now()),
            )

    def now(self) -> float:
        """The time that its records are stamped with."""
        return self._now()

    def event(self, kind: str, at: float | None = None, /, **data: Any) -> None:
        """Note something that happened to the run, now or `at` a time before, with values that JSON has."""
        row = (self._now() if at is None else at, kind, canonical(data))
        with self._transaction("event") as db:
            db.execute("INSERT INTO events (at, kind, data) VALUES (?, ?, ?)", row)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield the events with a larger id than `after`, in order."""
        rows = self.query("SELECT id, at, kind, data FROM events WHERE id > ? ORDER BY id", after)
        for number, at, kind, data in rows:
            yield Event(number, at, kind, json.loads(data))

    # Attempts

    def record_dispatch(self, trial: ActiveTrial, started_at: float) -> None:
        """Note that an attempt is in flight. The same attempt again replaces its folder, worker and start.

        Raises `InvalidValue` if another attempt of the slot is in flight, or the slot is committed.
        """
        folder = trial.folder
        if folder.is_relative_to(self.folder):  # so that a run can be moved
            folder = folder.relative_to(self.folder)
        with self._transaction("dispatch") as db:
            self._check_uncommitted(trial.slot, trial.trial_id)
            noted = db.execute(
                """INSERT INTO active (schedule_idx, attempt, folder, worker, started_at) VALUES (?, ?, ?, ?, ?)
                   ON CONFLICT (schedule_idx) DO UPDATE
                   SET folder = excluded.folder, worker = excluded.worker, started_at = excluded.started_at
                   WHERE attempt = excluded.attempt""",
                (trial.slot.schedule_idx, trial.attempt, str(folder), trial.worker, started_at),
            )
            if not noted.rowcount:
                raise InvalidValue(
                    f"slot {trial.slot.schedule_idx}, attempt {trial.attempt}: another attempt is in flight"
                )

    def active(self) -> list[ActiveTrial]:
        """Return the attempts in flight, in the order of the schedule."""
        return [trial for trial, _ in self.active_since()]

    def active_since(self) -> list[tuple[ActiveTrial, float]]:
        """Return the attempts in flight, each with when it started."""
        rows = self.query(
            """SELECT s.schedule_idx, s.variant_id, s.task_id, s.repeat, s.trial_id,
                      a.attempt, a.folder, a.worker, a.started_at
               FROM active a JOIN schedule s ON s.schedule_idx = a.schedule_idx ORDER BY a.schedule_idx"""
        )
        found = []
        for idx, variant_id, task_id, repeat, trial_id, attempt, folder, worker, started_at in rows:
            slot = Slot(schedule_idx=idx, variant_id=variant_id, task_id=task_id, repeat=repeat)
            trial = ActiveTrial(
                slot=slot, trial_id=trial_id, attempt=attempt, folder=self.folder / folder, worker=worker
            )
            found.append((trial, started_at))
        return found

    def record_attempt(self, completion: TrialCompletion, counted: bool) -> bool:
        """Keep an attempt that is not the slot's last, and note that it is not in flight any more.

        Returns False, and keeps what is there, if this attempt was recorded before: a completion can arrive twice.
        Raises `InvalidValue` if the slot is committed and this attempt was not part of it.
        """
        with self._transaction("attempt") as db:
            if self._recorded(completion) is not None:
                return False
            self._check_uncommitted(completion.slot, completion.trial_id)
            _insert_attempt(db, completion, counted)
            _clear(db, completion)
        return True

    def attempts(self, first: int = 0, last: int | None = None) -> Iterator[Attempt]:
        """Yield the attempts of the slots from `first` to `last`, or to the end, by slot and number."""
        rows = self.query(
            """SELECT schedule_idx, attempt, status, error_type, counted, completion
               FROM attempts WHERE schedule_idx >= ? AND schedule_idx <= ? ORDER BY schedule_idx, attempt""",
            first,
            sys.maxsize if last is None else last,
        )
        for idx, attempt, status, error_type, counted, completion in rows:
            yield Attempt(idx, attempt, Status(status), error_type, bool(counted), completion)

    # Commits

    def commit(self, rows: Sequence[CommitRow]) -> None:
        """Publish the next slots of the schedule, as one transaction with everything of them.

        Raises `InvalidValue`, and changes nothing, unless the rows are the slots right after the last committed
        one, in order, and none contradicts what was recorded of its attempt.
        """
        if not rows:
            return
        with self._transaction("commit") as db:
            for due, row in enumerate(rows, self.committed_through() + 1):
                self._check_due(row, due)
            for row in rows:
                self._insert_commit(db, row)
            db.executemany(
                """INSERT INTO counts (status, slots) VALUES (?, ?)
                   ON CONFLICT (status) DO UPDATE SET slots = slots + excluded.slots""",
                Counter(row.completion.status.value for row in rows).items(),
            )

    def commits(self, first: int = 0) -> Iterator[Committed]:
        """Yield the commits from slot `first` on, in order."""
        rows = self.query(
            """SELECT schedule_idx, attempt, status, error_type, result_digest, grade, grade_digest, committed_at
               FROM commits WHERE schedule_idx >= ? ORDER BY schedule_idx""",
            first,
        )
        for idx, attempt, status, *rest in rows:
            yield Committed(idx, attempt, Status(status), *rest)

    def metrics(self, first: int = 0) -> Iterator[Metric]:
        """Yield the numbers of the slots from `first` on, by slot and name."""
        rows = self.query(
            """SELECT schedule_idx, name, value FROM metrics
               WHERE schedule_idx >= ? ORDER BY schedule_idx, name""",
            first,
        )
        return (Metric(*row) for row in rows)

    # Underneath

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Make one transaction of all writes inside: all of them last, or none if an error leaves the block."""
        with self._transaction("batch"):
            yield

    def query(self, sql: str, *parameters: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a SELECT. While rows are left it holds its snapshot: do not keep it half read."""
        return iter(self._opened().execute(sql, parameters))

    @contextmanager
    def _transaction(self, name: str) -> Iterator[sqlite3.Connection]:
        if not self._writes:
            raise InvalidValue(f"the run in {self.folder} was opened to be read")
        db = self._opened()
        if self._in_transaction:
            if not db.in_transaction:  # SQLite gave it up at an error that was caught inside `batch`
                raise InvalidValue("an earlier write of this batch failed, and with it the batch")
            with one_error(self.folder):
                yield db
            return
        with one_error(self.folder):
            self._at(f"{name}:before-begin")
            db.execute("BEGIN IMMEDIATE")
            self._in_transaction = True
            try:
                self._at(f"{name}:in-transaction")
                yield db
                self._at(f"{name}:before-commit")
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            finally:
                self._in_transaction = False
        self._at(f"{name}:after-commit")

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise InvalidValue(f"the run in {self.folder} is closed, or was opened by this process's parent")
        return self._connection

    def _fill(
        self,
        run_id: str,
        experiment_json: str,
        slots: Iterable[Slot],
        digests: Mapping[str, str],
        state: Mapping[str, Any],
    ) -> None:
        with self._transaction("create") as db:
            ((version,),) = db.execute("PRAGMA user_version")
            if version:
                raise InvalidValue(f"there is a run in {self.folder} already: continue it, or name another")
            for statement in (*TABLES, *INDEXES):
                db.execute(statement)
            now = self._now()
            made = _insert_slots(db, slots, 0, now, {})
            db.execute(
                "INSERT INTO run VALUES (1, ?, ?, ?, ?, ?)",
                (run_id, now, made, experiment_json, canonical(dict(digests))),
            )
            for name, value in state.items():
                self.set_state(name, value)
            db.execute("INSERT INTO control VALUES (1, 'created', '{}', ?)", (now,))
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _check_version(self) -> None:
        ((version,),) = self.query("PRAGMA user_version")
        if version == 0:
            raise InvalidValue(f"the run in {self.folder} is not made yet; if nothing makes it, start it again")
        if version != SCHEMA_VERSION:
            raise InvalidValue(
                f"the run in {self.folder} is of version {version}, and this program reads {SCHEMA_VERSION}"
            )

    def _check_uncommitted(self, slot: Slot, trial_id: str) -> None:
        self._check_scheduled(slot, trial_id)
        if slot.schedule_idx <= self.committed_through():
            raise InvalidValue(f"slot {slot.schedule_idx} is committed")

    def _check_scheduled(self, slot: Slot, trial_id: str) -> None:
        found = list(self.query("SELECT trial_id FROM schedule WHERE schedule_idx = ?", slot.schedule_idx))
        if found != [(trial_id,)]:
            raise InvalidValue(f"slot {slot.schedule_idx} is not that of {trial_id!r} in this run's schedule")

    def _check_due(self, row: CommitRow, due: int) -> None:
        slot = row.completion.slot
        if slot.schedule_idx != due:
            raise InvalidValue(f"commit of slot {slot.schedule_idx}, but the next to commit is {due}")
        self._check_scheduled(slot, row.completion.trial_id)
        recorded = self._recorded(row.completion)
        if recorded is None or row.completion.status is Status.SKIPPED:
            return
        if recorded != (row.counted, row.completion.model_dump_json()):
            raise InvalidValue(f"commit of slot {due}: its attempt {row.completion.attempt} was recorded as another")

    def _recorded(self, completion: TrialCompletion) -> tuple[bool, str] | None:
        """What is recorded under this attempt's identity: run, slot, trial, number."""
        rows = self.query(
            """SELECT a.counted, a.completion FROM attempts a JOIN schedule s ON s.schedule_idx = a.schedule_idx
               WHERE a.schedule_idx = ? AND a.attempt = ? AND s.trial_id = ?""",
            completion.slot.schedule_idx, completion.attempt, completion.trial_id,
        )  # fmt: skip
        return next(((bool(counted), completion_json) for counted, completion_json in list(rows)), None)

    def _insert_commit(self, db: sqlite3.Connection, row: CommitRow) -> None:
        completion = row.completion
        idx, grade = completion.slot.schedule_idx, completion.grade
        if completion.status is not Status.SKIPPED:
            _insert_attempt(db, completion, row.counted)
        db.execute("DELETE FROM active WHERE schedule_idx = ?", (idx,))
        db.execute(
            "INSERT INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                idx, completion.attempt, completion.status.value, _error_type(completion),
                completion.result_sha256,
                None if grade is None else canonical(grade.model_dump(mode="json")), row.grade_digest,
                self._now(),
            ),
        )  # fmt: skip
        numbers = {**_numbers(completion), **(row.metrics or {})}
        db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", [(idx, name, value) for name, value in numbers.items()])

    def _leave_to_parent(self) -> None:
        if self._lock is not None:
            self._lock.forget()
        if self._connection is not None:
            # SQLite forbids even closing a connection that was opened before a fork, so it is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            self._connection = None


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    if mode != "ro":
        return _connection(
            path,
            f"mode={mode}",
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = FULL",
            "PRAGMA foreign_keys = ON",
            f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}",
        )
    try:
        return _connection(path, "mode=ro", "PRAGMA user_version")
    except sqlite3.OperationalError:
        # A reader needs the WAL and its index, and cannot make them in a folder that is full or not its to write.
        # Where there is nothing in a WAL and no owner, run.db alone is everything.
        wal = path.with_name(f"{path.name}-wal")
        if (wal.exists() and wal.stat().st_size) or holder(path.parent) is not None:
            raise
    return _connection(path, "mode=ro&immutable=1", "PRAGMA user_version")


def _connection(path: Path, options: str, *first: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{options}"
    db = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)
    try:
        for statement in first:
            db.execute(statement).fetchall()
    except BaseException:
        db.close()
        raise
    return db


def _insert_slots(
    db: sqlite3.Connection, slots: Iterable[Slot], first: int, now: float, retry_of: Mapping[int, int]
) -> int:
    """Add slots after the `first` that there are; return how many."""
    try:
        made = db.executemany(
            "INSERT INTO schedule VALUES (?, ?, ?, ?, ?, ?, ?)", _schedule_rows(slots, first, now, retry_of)
        )
    except sqlite3.IntegrityError as error:
        raise InvalidValue("two slots of the schedule are of one variant, task and repeat") from error
    return max(made.rowcount, 0)


def _schedule_rows(
    slots: Iterable[Slot], first: int, now: float, retry_of: Mapping[int, int]
) -> Iterator[tuple[Any, ...]]:
    for due, slot in enumerate(slots, first):
        if slot.schedule_idx != due:
            raise InvalidValue(f"slot {due} of the schedule says that it is {slot.schedule_idx}")
        yield due, derive_trial_id(slot), slot.variant_id, slot.task_id, slot.repeat, now, retry_of.get(due)


def _insert_attempt(db: sqlite3.Connection, completion: TrialCompletion, counted: bool) -> None:
    db.execute(
        "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (
            completion.slot.schedule_idx, completion.attempt, completion.status.value, _error_type(completion),
            counted, completion.model_dump_json(),
        ),
    )  # fmt: skip


def _clear(db: sqlite3.Connection, trial: ActiveTrial | TrialCompletion) -> None:
    db.execute("DELETE FROM active WHERE schedule_idx = ? AND attempt = ?", (trial.slot.schedule_idx, trial.attempt))


def _error_type(completion: TrialCompletion) -> str | None:
    return None if completion.error is None else completion.error.type


def _numbers(completion: TrialCompletion) -> dict[str, float]:
    numbers: dict[str, float] = {}
    if completion.grade is not None:
        numbers["score"] = completion.grade.score
        numbers |= {f"grade.{name}": value for name, value in completion.grade.metrics.items()}
    if completion.usage is not None:
        used = completion.usage.model_dump(exclude_none=True)
        numbers |= {f"usage.{name}": value for name, value in used.items()}
    return numbers


_open_stores: weakref.WeakSet[RunStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in _open_stores:
        store._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
