"""The tables of run.db. A change here is a new `SCHEMA_VERSION`."""

from __future__ import annotations

from typing import Final

SCHEMA_VERSION: Final = 2

# Not STRICT: that needs SQLite 3.37. Times are seconds since 1970. JSON is canonical text.
TABLES: Final = (
    """CREATE TABLE run (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        run_id TEXT NOT NULL,
        created_at REAL NOT NULL,
        slots INTEGER NOT NULL,
        experiment TEXT NOT NULL,
        digests TEXT NOT NULL)""",
    """CREATE TABLE control (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        status TEXT NOT NULL,
        metadata TEXT NOT NULL,
        changed_at REAL NOT NULL)""",
    """CREATE TABLE schedule (
        schedule_idx INTEGER PRIMARY KEY,
        trial_id TEXT NOT NULL UNIQUE,
        variant_id TEXT NOT NULL,
        task_id TEXT NOT NULL,
        repeat INTEGER NOT NULL,
        submitted_at REAL NOT NULL,
        retry_of INTEGER REFERENCES schedule)""",
    # Tasks that were added to the run after it was made, with what their files were.
    """CREATE TABLE tasks (
        number INTEGER PRIMARY KEY,
        task_id TEXT NOT NULL UNIQUE,
        submitted_at REAL NOT NULL,
        task TEXT NOT NULL)""",
    """CREATE TABLE inputs (
        name TEXT PRIMARY KEY,
        digest TEXT NOT NULL) WITHOUT ROWID""",
    # Slots that must not start: purged, or displaced by others.
    """CREATE TABLE withdrawn (
        schedule_idx INTEGER PRIMARY KEY REFERENCES schedule,
        kind TEXT NOT NULL,
        reason TEXT NOT NULL)""",
    # What the coordinator must find again: the queue's snapshot, lanes, what is blocked. JSON by name.
    """CREATE TABLE state (
        name TEXT PRIMARY KEY,
        value TEXT NOT NULL) WITHOUT ROWID""",
    # One row a slot: a trial has one attempt in flight at most.
    """CREATE TABLE active (
        schedule_idx INTEGER PRIMARY KEY REFERENCES schedule,
        attempt INTEGER NOT NULL,
        folder TEXT NOT NULL,
        worker TEXT NOT NULL,
        started_at REAL NOT NULL)""",
    """CREATE TABLE attempts (
        schedule_idx INTEGER NOT NULL REFERENCES schedule,
        attempt INTEGER NOT NULL,
        status TEXT NOT NULL,
        error_type TEXT,
        counted INTEGER NOT NULL CHECK (counted IN (0, 1)),
        completion TEXT NOT NULL,
        PRIMARY KEY (schedule_idx, attempt))""",
    """CREATE TABLE commits (
        schedule_idx INTEGER PRIMARY KEY REFERENCES schedule,
        attempt INTEGER NOT NULL,
        status TEXT NOT NULL,
        error_type TEXT,
        result_digest TEXT,
        grade TEXT,
        grade_digest TEXT,
        committed_at REAL NOT NULL)""",
    # How many commits have each status: a status query must not count 100 000 rows.
    """CREATE TABLE counts (
        status TEXT PRIMARY KEY,
        slots INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE metrics (
        schedule_idx INTEGER NOT NULL REFERENCES commits,
        name TEXT NOT NULL,
        value REAL NOT NULL,
        PRIMARY KEY (schedule_idx, name)) WITHOUT ROWID""",
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        data TEXT NOT NULL)""",
)
INDEXES: Final = ("CREATE INDEX retries ON schedule (retry_of) WHERE retry_of IS NOT NULL",)
