"""What to start and what to skip next, and what a slot is committed as. Pure: no clock, no I/O.

The committed history must be the same at any concurrency and in any order of completions. So whether a slot
counts is decided by its place in the schedule, never by how far it had got when the decision fell:

- A variant is pruned by a commit: the one that makes `prune_after_failures` commits in a row, of that variant
  and blamed on its agent. Success begins the row anew. Commits blamed on the task, the provider, the
  infrastructure or the run (a skipped slot) neither lengthen the row nor end it.
- Every slot of that variant with a higher `schedule_idx` is committed as `skipped`, and none with a lower one.
  Those that were not started never are. Those that were in flight or finished by then, as only happens at a
  higher concurrency, finish, their attempts stay on disk, and they are committed as `skipped` all the same.
- A slot whose dependency (same variant, same repeat) was committed as anything but success is committed as
  `skipped`. A dependency has a lower `schedule_idx`, and a slot starts only after its dependencies' commits.
- Where both hold, pruning is the reason; of several dependencies, the first in the task's own order.

`verdict_at_commit` applies this when a slot's turn has come, from what is committed before it and nothing else.
The skips that `decide` returns only spare a run the work: they say no more than what the verdict will say.

- A slot after the commit at which the queue said that no more is to be run is committed as `skipped`, like pruned ones.

The exceptions depend on time because they are about time: `max_duration_s` (when it has passed nothing is started any
more, no further attempt either, and every slot that waits is skipped, in order), and what somebody asked for while the
run went on: to purge slots, or to displace them by others. What was asked for is recorded before it is answered.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sandbox_exec.contracts.status import Status
from sandbox_exec.schedule.board import Board
from sandbox_exec.schedule.lanes import Lanes

OVER: Final = "the run is over its duration"


class Decisions(NamedTuple):
    """What the coordinator is to do: dispatch these slots, skip those and why, and look again at `wake_s`.

    Skips may free others, so it decides again when it has done them, and waits only if there was nothing to do.
    """

    dispatch: tuple[int, ...] = ()
    skip: tuple[tuple[int, str], ...] = ()
    wake_s: float | None = None
    warnings: tuple[str, ...] = ()


class Verdict(NamedTuple):
    """What a slot is to be committed as, and the reason if it is skipped."""

    status: Status
    reason: str | None


def decide(board: Board, lanes: Lanes, now_s: float, capacity: int) -> Decisions:
    """Return what to do at `now_s`, on a board that was advanced to it. What is to be dispatched is noted as started.

    `capacity` is how many trials the backend can hold at once, those in flight among them. Where it is below
    `max_concurrency` it counts, and a warning says so until the board is told that it was shown.
    """
    due_s = board.next_due_s
    if due_s is not None and due_s <= now_s:
        raise ValueError(f"a slot was due at {due_s}: call board.advance({now_s}) first")
    warnings: tuple[str, ...] = ()
    if capacity < board.max_concurrency and not board.capacity_warned:
        warnings = (
            f"max_concurrency is {board.max_concurrency}, but the backend runs {capacity} trials at once: "
            f"{capacity} it is",
        )
    if board.ends_s is not None and now_s >= board.ends_s:
        skip = tuple((idx, board.doomed.get(idx, OVER)) for idx in board.not_started())
        return Decisions(skip=skip, warnings=warnings)
    places = min(board.most_at_once, capacity) - len(board.in_flight)
    dispatch = _choose(board, lanes, now_s, places)
    wakes = [due_s]
    if len(dispatch) < places:  # else it is the end of a trial that is waited for
        wakes.append(lanes.opens_s(board.ready_variants(), now_s))
    if board.counts.waiting or board.in_flight:
        wakes.append(board.ends_s)
    return Decisions(
        dispatch=dispatch,
        skip=tuple(sorted(board.doomed.items())),
        wake_s=min((wake_s for wake_s in wakes if wake_s is not None), default=None),
        warnings=warnings,
    )


def _choose(board: Board, lanes: Lanes, now_s: float, places: int) -> tuple[int, ...]:
    chosen: list[int] = []
    while len(chosen) < places:
        idx = board.take(now_s, board.full | lanes.closed(now_s))
        if idx is None:
            break
        lanes.start(board.slots[idx].variant_id, now_s)
        chosen.append(idx)
    return tuple(chosen)


def verdict_at_commit(board: Board, idx: int, completion_status: Status | None) -> Verdict:
    """Return what the slot whose turn it is must be committed as, given how its last attempt ended.

    `completion_status` is None for a slot that was skipped.
    """
    if idx != board.next_to_commit or not board.committable:
        raise ValueError(f"slot {idx} cannot be committed now")
    reason = board.pruned(idx) or board.failed_dependency(idx) or board.skip_reason(idx)
    if reason is not None:
        return Verdict(Status.SKIPPED, reason)
    if completion_status is None:
        raise ValueError(f"slot {idx} was run: its completion has a status")
    return Verdict(completion_status, None)
