"""The history of a run: what its agents did, as bytes that are the same whenever they did the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from sandbox_exec.contracts.status import Status
from sandbox_exec.store.canonical import canonical
from sandbox_exec.store.db import RunStore

# One statement is one snapshot, so a commit made meanwhile is in the history as a whole or not at all.
_QUERY = """
    SELECT c.schedule_idx, s.trial_id, s.variant_id, s.task_id, s.repeat,
           c.status, c.error_type, c.result_digest, c.grade, c.grade_digest,
           a.status, a.error_type
    FROM commits c
    JOIN schedule s ON s.schedule_idx = c.schedule_idx
    LEFT JOIN attempts a ON a.schedule_idx = c.schedule_idx AND a.counted
    ORDER BY c.schedule_idx, a.attempt"""
_OF_COMMIT = 10  # columns before those of an attempt


def history(store: RunStore) -> Iterator[bytes]:
    """Yield a line of canonical JSON for each committed slot, in the order of commits.

    No times, no workers, no numbers of attempts, and no attempt that did not count: those say what the machine
    did, and are in the run's events and attempts. The store must not be written until the last line is out.
    """
    for commit, rows in groupby(store.query(_QUERY), key=itemgetter(slice(_OF_COMMIT))):
        idx, trial_id, variant, task, repeat, status, error_type, result_digest, grade, grade_digest = commit
        line = {
            "slot": idx,
            "trial_id": trial_id,
            "variant": variant,
            "task": task,
            "repeat": repeat,
            # A slot that pruning skipped may have been tried already, at a higher concurrency.
            "attempts": [
                _ending(*row[_OF_COMMIT:]) for row in rows if row[_OF_COMMIT] is not None and status != Status.SKIPPED
            ],
            **_ending(status, error_type),
            "result_digest": result_digest,
            "grade": None if grade is None else json.loads(grade),
            "grade_digest": grade_digest,
        }
        yield canonical(line).encode("ascii") + b"\n"


def _ending(status: str, error_type: str | None) -> dict[str, Any]:
    return {"status": status, "blame": Status(status).blame, "error_type": error_type}
