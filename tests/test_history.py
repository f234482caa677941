"""The history: the same deeds of the agents give the same bytes, however the machine went about it."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from rows import active, completion, make_run, row, slot

from sandbox_exec.contracts import Grade, Status, derive_trial_id
from sandbox_exec.store.canonical import canonical
from sandbox_exec.store.db import CommitRow, RunStore
from sandbox_exec.store.history import history

QUICK = "/dev/shm" if os.path.isdir("/dev/shm") else None  # hundreds of commits wait for no disk there

OWN_FAILURES = [Status.AGENT_ERROR, Status.TASK_TIMEOUT, Status.SETUP_FAILED, Status.GRADE_ERROR]
LOST = [Status.WORKER_LOST, Status.ENVIRONMENT_ERROR, Status.RATE_LIMITED]
ENDS = [Status.SUCCESS, Status.MEMORY_EXCEEDED, *OWN_FAILURES, Status.WORKER_LOST, Status.SKIPPED]

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), FLOATS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
GRADES = st.builds(
    Grade,
    score=FLOATS,
    passed=st.none() | st.booleans(),
    metrics=st.dictionaries(TEXT, FLOATS, max_size=3),
    details=JSON,
)
ERRORS = st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


class Deed(NamedTuple):
    """What an agent did with a slot: failed attempts of its own, and the last."""

    failures: list[tuple[Status, str | None]]
    status: Status
    error_type: str | None
    grade: Grade | None


DEEDS = st.lists(
    st.builds(
        Deed,
        st.lists(st.tuples(st.sampled_from(OWN_FAILURES), ERRORS), max_size=3),
        st.sampled_from(ENDS),
        ERRORS,
        st.none() | GRADES,
    ),
    min_size=1,
    max_size=5,
)


def in_history(idx: int, deed: Deed) -> dict[str, Any]:
    """The line that a deed is due, as a value."""
    attempts = [*deed.failures, (deed.status, deed.error_type)]
    if deed.status is Status.WORKER_LOST:
        attempts = deed.failures
    elif deed.status is Status.SKIPPED:
        attempts = []  # whether it had been tried before it was skipped is the machine's doing
    return {
        "slot": idx,
        "trial_id": derive_trial_id(slot(idx)),
        "variant": slot(idx).variant_id,
        "task": slot(idx).task_id,
        "repeat": slot(idx).repeat,
        "attempts": [{"status": how, "blame": how.blame, "error_type": error} for how, error in attempts],
        "status": deed.status,
        "blame": deed.status.blame,
        "error_type": deed.error_type,
        "result_digest": f"{idx:064x}" if deed.status is Status.SUCCESS else None,
        "grade": None if deed.grade is None else deed.grade.model_dump(mode="json"),
        "grade_digest": None if deed.grade is None else f"digest-{idx}",
    }


def live(folder: Path, deeds: list[Deed], data: st.DataObject) -> list[bytes]:
    """Run the deeds in some way: other workers, times, losses, order of arrivals, batches and crashes."""
    make_run(folder, len(deeds)).close()
    clock = count(data.draw(st.integers(0, 9)))
    arrivals: list[tuple[int, list[tuple[Status, str | None, bool]]]] = []
    last = {}
    for idx, deed in enumerate(deeds):
        tries = [(how, error, True) for how, error in deed.failures]
        for _ in range(data.draw(st.integers(0, 2))):
            lost = (data.draw(st.sampled_from(LOST)), "Lost", False)
            tries.insert(data.draw(st.integers(0, len(tries))), lost)
        arrivals.append((idx, tries))
        last[idx] = len(tries) + 1
    with RunStore.open(folder, now=lambda: float(next(clock))) as store:
        for idx, tries in data.draw(st.permutations(arrivals)):
            for attempt, (how, error, counted) in enumerate(tries, 1):
                worker = f"w{data.draw(st.integers(0, 9))}"
                store.record_dispatch(active(folder, idx, attempt, worker), started_at=float(next(clock)))
                failed = completion(idx, how, attempt=attempt, error_type=error, wall_s=float(next(clock)))
                store.record_attempt(failed, counted)
    idx = 0
    while idx < len(deeds):
        end = data.draw(st.integers(idx + 1, len(deeds)))
        with RunStore.open(folder, now=lambda: float(next(clock))) as store:
            store.commit([_row(at, deeds[at], last[at], wall_s=float(next(clock))) for at in range(idx, end)])
        idx = end
    with RunStore.open(folder, write=False) as store:
        return list(history(store))


def _row(idx: int, deed: Deed, attempt: int, wall_s: float) -> CommitRow:
    return CommitRow(
        completion(
            idx, deed.status, attempt=attempt, error_type=deed.error_type, grade=deed.grade, wall_s=wall_s
        ),
        counted=deed.status not in (Status.WORKER_LOST, Status.SKIPPED),
        grade_digest=None if deed.grade is None else f"digest-{idx}",
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(DEEDS, st.data())
def test_the_same_deeds_give_the_same_bytes_in_whatever_way_they_were_committed(
    deeds: list[Deed], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory(dir=QUICK) as place:
        one, other = (live(Path(place) / name, deeds, data) for name in ("one", "other"))
    assert one == other
    # Every deed is in its line in full, so that other deeds would have given other bytes.
    assert [json.loads(line) for line in one] == [in_history(idx, deed) for idx, deed in enumerate(deeds)]


@given(JSON)
def test_canonical_json_reads_back_as_the_same_value_and_writes_again_as_the_same_bytes(value: Any) -> None:
    text = canonical(value)
    assert json.loads(text) == value
    assert canonical(json.loads(text)) == text
    assert text.isascii()
    assert "\n" not in text


def test_a_line_is_written_exactly_so(tmp_path: Path) -> None:
    grade = Grade(score=1, metrics={"z": 0.1, "a": 1e22}, details={"é": [True, None, -0.0]})
    with make_run(tmp_path) as store:
        store.record_attempt(completion(0, Status.WORKER_LOST), counted=False)
        store.record_attempt(completion(0, Status.AGENT_ERROR, attempt=2, error_type="ValueError"), counted=True)
        store.commit([CommitRow(completion(0, attempt=3, grade=grade), counted=True, grade_digest="9f")])
        assert b"".join(history(store)) == (
            b'{"attempts":[{"blame":"agent","error_type":"ValueError","status":"agent_error"},'
            b'{"blame":null,"error_type":null,"status":"success"}],"blame":null,"error_type":null,'
            b'"grade":{"details":{"\\u00e9":[true,null,-0.0]},"metrics":{"a":1e+22,"z":0.1},"passed":null,"score":1.0},'
            b'"grade_digest":"9f","repeat":0,"result_digest":"' + b"0" * 64 + b'",'
            b'"slot":0,"status":"success","task":"task-0","trial_id":"careful.task-0.0-343faba4d883",'
            b'"variant":"careful"}\n'
        )


def test_what_is_not_committed_is_not_in_the_history(tmp_path: Path) -> None:
    with make_run(tmp_path) as store:
        store.commit([row(0)])
        before = list(history(store))
        store.record_dispatch(active(tmp_path, 1), started_at=0.0)
        store.record_attempt(completion(1, Status.AGENT_ERROR), counted=True)
        store.event("paused")
        store.set_control("paused")
        assert list(history(store)) == before
        assert len(before) == 1


def test_the_history_does_not_sort_the_whole_run_first(tmp_path: Path) -> None:
    asked: list[str] = []
    with make_run(tmp_path) as store:
        store._opened().set_trace_callback(asked.append)
        list(history(store))
        store._opened().set_trace_callback(None)
        (query,) = asked
        plan = [str(step[-1]) for step in store.query(f"EXPLAIN QUERY PLAN {query}")]
    assert plan[0].startswith("SCAN c")
    assert all(step.startswith("SEARCH") for step in plan[1:])
