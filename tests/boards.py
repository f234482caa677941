"""What the tests of the board and the scheduler share: boards in one line, and a coordinator in few."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sandbox_exec.contracts.experiment import Design, Experiment
from sandbox_exec.contracts.status import Status
from sandbox_exec.contracts.words import AgentSpec, Cell, Slot, Task, TaskProtocol, Variant
from sandbox_exec.orders import make_queue
from sandbox_exec.schedule.board import Board
from sandbox_exec.schedule.lanes import Lanes
from sandbox_exec.schedule.queues import TaskQueue, number
from sandbox_exec.schedule.scheduler import Decisions, Verdict, verdict_at_commit
from sandbox_exec.schedule.scheduler import decide as decide_with_lanes

NO_LANES = Lanes({}, ())
AGENT = AgentSpec(command=("true",))


def task(task_id: str, **fields: Any) -> Task:
    return Task(id=task_id, input=None, **fields)


def first(task_id: str, **fields: Any) -> Task:
    return task(task_id, protocol=TaskProtocol(serial="first"), **fields)


def alone(task_id: str, priority: int = 0, **fields: Any) -> Task:
    return task(task_id, protocol=TaskProtocol(serial="global", priority=priority), **fields)


def variant(variant_id: str, max_parallel_trials: int | None = None, **fields: Any) -> Variant:
    return Variant(id=variant_id, agent=AGENT, max_parallel_trials=max_parallel_trials, **fields)


def schedule(tasks: Iterable[Task], variants: Sequence[Variant], repeats: int = 1) -> tuple[Slot, ...]:
    cells = [(t.id, v.id, repeat) for t in tasks for v in variants for repeat in range(repeats)]
    return tuple(
        Slot(schedule_idx=idx, variant_id=variant_id, task_id=task_id, repeat=repeat)
        for idx, (task_id, variant_id, repeat) in enumerate(cells)
    )


def board(
    *tasks: Task | str,
    variants: Sequence[Variant] = (variant("a"),),
    repeats: int = 1,
    memory: int = 1,
    budget: int = 100,
    taken_from: TaskQueue | None = None,
    start_s: float = 0.0,
    submitted_s: Sequence[float] = (),
    committed: Sequence[Status] = (),
    active: Iterable[int] = (),
    withdrawn: Mapping[int, str] | None = None,
    blocked: int | None = None,
    max_concurrency: int = 100,
    **design: Any,
) -> Board:
    """Return a board of tasks x variants x repeats, with the queue that the design asks for."""
    rows = [task(each) if isinstance(each, str) else each for each in tasks]
    settings = Design(max_concurrency=max_concurrency, **design)
    return Board(
        schedule(rows, variants, repeats),
        {row.id: row for row in rows},
        {each.id: each for each in variants},
        settings,
        taken_from or queue_of(rows, variants, settings),
        memory,
        budget,
        start_s=start_s,
        submitted_s=submitted_s,
        committed=committed,
        active=active,
        withdrawn=withdrawn,
        blocked=blocked,
    )


def join(
    board: Board,
    *tasks: Task | str,
    variants: Sequence[Variant] = (variant("a"),),
    repeat: int = 0,
    submitted_s: float = 0.0,
    repeat_of: Mapping[int, int] | None = None,
) -> list[int]:
    """Let tasks join a board that `board` made, for each of the variants, and return their slots."""
    rows = [task(each) if isinstance(each, str) else each for each in tasks]
    assert isinstance(board._tasks, dict)  # the one that `board` made: the coordinator's grows too
    board._tasks.update({row.id: row for row in rows})
    slots = number([Cell(v.id, row.id, repeat) for row in rows for v in variants], len(board.slots))
    board.add(slots, submitted_s, repeat_of)
    return [slot.schedule_idx for slot in slots]


def queue_of(tasks: Sequence[Task], variants: Sequence[Variant], design: Design) -> TaskQueue:
    return make_queue(Experiment(name="e", tasks=tasks or [task("none")], variants=variants, design=design))


def decide(board: Board, now_s: float, capacity: int) -> Decisions:
    """Decide without lanes."""
    return decide_with_lanes(board, NO_LANES, now_s, capacity)


def dispatched(board: Board, now_s: float = 0.0, capacity: int = 100) -> list[int]:
    """Start what may start now, and return it."""
    board.advance(now_s)
    return list(decide(board, now_s, capacity).dispatch)


def skip_all(board: Board, now_s: float = 0.0) -> Decisions:
    """Skip what is to be skipped now, start nothing, and return the decisions."""
    board.advance(now_s)
    decisions = decide(board, now_s, 0)._replace(warnings=())
    for idx, reason in decisions.skip:
        board.skip(idx, reason)
    return decisions


def commit(board: Board, status: Status | None) -> Verdict:
    """Commit the slot whose turn it is, which ended as `status` (None: it was skipped)."""
    verdict = verdict_at_commit(board, board.next_to_commit, status)
    board.commit(board.next_to_commit, verdict.status)
    return verdict


def run_one(board: Board, status: Status) -> Verdict:
    """Run and commit the slot whose turn it is, which must be ready."""
    idx = board.next_to_commit
    board.start(idx)
    board.finish(idx)
    return commit(board, status)
