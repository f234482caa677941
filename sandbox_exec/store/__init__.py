"""Where a run is kept: its database, its owner's lock, its trials' folders, and the history read from them."""

from __future__ import annotations

from sandbox_exec.store.db import (
    POINTS,
    Attempt,
    CommitRow,
    Committed,
    Control,
    Event,
    Metric,
    Progress,
    Run,
    RunStore,
)
from sandbox_exec.store.folders import (
    Found,
    attempt_folder,
    begin_folder,
    digest_of,
    read_completion,
    read_file,
    read_grade,
    read_json,
    write_atomic,
)
from sandbox_exec.store.history import history
from sandbox_exec.store.lock import Holder, holder, wait_until_free

__all__ = [
    "POINTS",
    "Attempt",
    "CommitRow",
    "Committed",
    "Control",
    "Event",
    "Found",
    "Holder",
    "Metric",
    "Progress",
    "Run",
    "RunStore",
    "attempt_folder",
    "begin_folder",
    "digest_of",
    "history",
    "holder",
    "read_completion",
    "read_file",
    "read_grade",
    "read_json",
    "wait_until_free",
    "write_atomic",
]
