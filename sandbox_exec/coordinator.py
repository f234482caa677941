"""The coordinator: the one owner of a run. `run` and `continue` are the same loop; a fresh run has nothing committed.

Theory of operation. One thread. Each turn: obey who steers; ask the scheduler what may start, record it, and only then
let the workers hear of it; commit, in the order of the schedule, all that is ready and contiguous; wait for the next
event of the backend. An event is only a bell: how an attempt ended is read from its folder.

What a crash can interrupt, and what then holds:
  recorded, not begun      the worker never heard of it, and has gone with us: the attempt is lost
  begun, not finished      the worker ends it by itself; `adopt` waits for it
  finished, not recorded   completion.json is there: it is read again, and nothing is run again
  recorded, not committed  the same: an attempt that was not the last one is in the database, the last one is not
  committed                the transaction is there or it is not; what comes next follows from it

An attempt that infrastructure lost does not count as the agent's: it is in the run's events, not in its history. It
uses up the trial's budget for that, but not if it was lost with a coordinator, killed on request, or left without room
on the disk: then it is as if it had never begun. A run that is continued has the whole budget again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import ValidationError

from sandbox_exec.artifacts import Unpacked
from sandbox_exec.backends.base import (
    Adoption,
    Finished,
    Lost,
    Started,
    Traced,
    WorkerBackend,
    WorkerEvent,
    WorkerTicket,
)
from sandbox_exec.clock import Clock, MonotonicClock
from sandbox_exec.contracts import (
    ActiveTrial,
    AgentError,
    Answer,
    Blame,
    Phase,
    Slot,
    Status,
    Task,
    TrialCompletion,
    derive_seed,
    derive_trial_id,
)
from sandbox_exec.contracts.experiment import Experiment, faults_of
from sandbox_exec.control import ControlServer, Request, ask
from sandbox_exec.dispatching import Dispatches, images_in
from sandbox_exec.errors import (
    InvalidExperiment,
    InvalidValue,
    ProtocolFault,
    QueueFull,
    RunNotActive,
    SandboxExecError,
    SandboxUnavailable,
    StoreFull,
)
from sandbox_exec.ledger import Ledger, Submitted, request_to_submit
from sandbox_exec.metrics import Metrics, prometheus
from sandbox_exec.schedule.admission import Watermarks
from sandbox_exec.schedule.board import Board
from sandbox_exec.schedule.retries import NextAttempt, RetryPolicy, timeout_factor
from sandbox_exec.schedule.scheduler import OVER, Decisions, decide, verdict_at_commit
from sandbox_exec.store import CommitRow, RunStore, attempt_folder, read_completion
from sandbox_exec.store.folders import TRIALS
from sandbox_exec.store.room import has_room, one_error

PAUSE_S: Final = 10.0  # for all workers to freeze their trials
STOP_S: Final = 30.0  # for all workers to kill theirs; one that hangs is ended before
_KEPT: Final = 64  # completions in memory; the others are read again from their files when their turn comes
_NOTE_S: Final = 1.0  # that a note of what happened may wait for a transaction of others'
_REFUSED: Final = (InvalidExperiment, InvalidValue, QueueFull)  # what is wrong with a request, not with the run

Ending = Literal["completed", "interrupted", "failed"]
Mode = Literal["running", "draining", "killing", "paused"]


@dataclass(frozen=True)
class RunEnd:
    """How a coordinator's work at a run ended. Only `completed` is the end of the run itself."""

    status: Ending
    reason: str = ""


class RunCallback:
    """Override what you want to hear. Called by the coordinator alone, one at a time; results in commit order.

    A task ends with the last of its slots that stand together: in an order that mixes them, it ends several times.
    One that raises is reported in the run's events and does not end the run.
    """

    def on_run_start(self, run: Coordinator) -> None: ...
    def on_trial_selected(self, slot: Slot, attempt: int) -> None: ...
    def on_trial_start(self, slot: Slot, attempt: int) -> None: ...
    def on_trace(self, slot: Slot, phase: str, events: int) -> None: ...
    def on_trial_end(self, completion: TrialCompletion) -> None: ...
    def on_task_end(self, task_id: str, completions: Sequence[TrialCompletion]) -> None: ...
    def on_queue_decision(self, kind: str, slot: Slot, reason: str) -> None: ...
    def on_run_end(self, end: RunEnd) -> None: ...


@dataclass(slots=True)
class _Trial:
    """What is known of a trial between its first dispatch and its commit."""

    ended: Counter[Status] = field(default_factory=Counter)  # attempts that use up a budget
    attempt: int = 0  # the last that was dispatched
    ticket: WorkerTicket | None = None  # of an attempt that has not ended
    adopted: bool = False  # it was begun by a coordinator that died
    started: bool = False
    since: float = 0.0
    began_s: float = 0.0  # by the clock, as lanes count
    waits_since_s: float | None = None  # since when it waits for another attempt
    phase: str = ""
    events: int = 0
    memory_bytes: int | None = None
    completion: TrialCompletion | None = None  # of the last attempt, if its turn is near; else it waits as a file


class Coordinator:
    """Runs what is not committed of a run. `at` is told the name of each step that a crash could follow."""

    def __init__(
        self,
        store: RunStore,
        experiment: Experiment,
        backend: WorkerBackend,
        *,
        callbacks: Iterable[RunCallback] = (),
        clock: Clock | None = None,
        at: Callable[[str], None] = lambda point: None,
        artifacts: Mapping[str, Unpacked] | None = None,
        images: Mapping[str, str] | None = None,
        answers: Mapping[str, Answer] | None = None,
        keep_open: bool = False,
    ) -> None:
        """`artifacts`, `images`, `answers`: see `Dispatches`. `keep_open`: wait for more tasks until it is stopped."""
        self.store, self.backend = store, backend
        self._clock = clock or MonotonicClock()
        self.ledger = Ledger(store, experiment, self._clock.now_s)
        self._dispatches = Dispatches(
            self.ledger.experiment, store.folder, store.run().run_id, artifacts or {}, images or {}, answers or {}
        )
        self._callbacks = list(callbacks)
        self._at = at
        self._keep_open = keep_open
        self._policy = RetryPolicy(experiment.design.infra_retries)
        self._metrics = Metrics(experiment.design.queue.alerts, self._tags, self._clock.now_s())
        self._watermarks = Watermarks(experiment.design.queue)
        self._notes: list[tuple[float, str, dict[str, Any]]] = []  # events that wait for the next transaction
        self._notes_due_s: float | None = None
        self._counted = self.board.next_to_commit  # slots that the metrics know of, or need not
        self._thread = threading.get_ident()  # whose calls need not go through the socket
        self._trials: dict[int, _Trial] = {}
        self._mode: Mode = "running"
        self._reason = ""
        self._over = False  # its duration has passed, and what was in flight has been told to end
        self._began_s = 0.0  # when the run's time began
        self._paused_s: float | None = None  # since when it stands still, and what runs with it
        self._stop_until_s: float | None = None
        self._awake: list[str] = []  # trials that a pause did not reach
        self._task_so_far: list[TrialCompletion] = []
        self._control: ControlServer | None = None

    @property
    def experiment(self) -> Experiment:
        """With the tasks that were added to the run."""
        return self.ledger.experiment

    @property
    def board(self) -> Board:
        return self.ledger.board

    @property
    def mode(self) -> Mode:
        """What it is at: for people who watch."""
        return self._mode

    # --- from outside: a signal handler, or the thread that listens ---

    def drain(self, reason: str) -> None:
        """Start nothing more, finish what runs, then stop."""
        if self._mode != "killing":
            self._mode, self._reason = "draining", reason
        self.backend.wake()

    def kill(self, reason: str) -> None:
        """Kill what runs, commit nothing of it, and stop."""
        self._mode, self._reason = "killing", reason
        self.backend.wake()

    def submit(self, tasks: Iterable[Task | Mapping[str, Any]]) -> Submitted:
        """Add tasks to the run, from any thread: they are on the disk when this returns. See `Ledger.submit`."""
        request = request_to_submit(self.experiment, self.ledger.tasks, tasks)
        here = threading.get_ident() == self._thread
        return submitted_by(self._change(request) if here else ask(self.store.folder, **request))

    # --- the loop ---

    def run(self) -> RunEnd:
        """Until the run is completed, stopped, or cannot go on. What then still runs ends with the backend."""
        self._thread = threading.get_ident()
        try:
            with one_error(self.store.folder):
                self._control = ControlServer(self.store.folder, self.backend.wake)
            end = self._run()
        except (StoreFull, SandboxUnavailable) as error:
            end = RunEnd("interrupted", str(error))
            self._stop_all()
        except ProtocolFault as error:
            end = RunEnd("failed", str(error))
        except BaseException as error:
            status: Ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self._close(RunEnd(status, f"{type(error).__name__}: {error}"))
            raise
        self._close(end)
        return end

    def _close(self, end: RunEnd) -> None:
        if self._control is not None:
            self._control.close()
        with contextlib.suppress(StoreFull):  # the next `continue` finds the run as it was left
            survivors = sorted({*self._awake, *(ticket.trial_id for ticket in self._tickets())})
            with self.store.batch():
                self._write_notes()
                self.store.set_control(
                    end.status, reason=end.reason, used_s=self._used_s(), survivors=survivors, last=self.figures()
                )
            self._call("on_run_end", end)

    def _run(self) -> RunEnd:
        self._recover()
        self.store.set_control("running", used_s=self._used_s())
        self._call("on_run_start", self)
        while True:
            self._obey_requests()
            wake_s = self._turn()
            if self.board.done and not (self._keep_open and self._mode in ("running", "paused")):
                return RunEnd("completed")
            if self._mode in ("draining", "killing"):
                if not self.board.in_flight:
                    return RunEnd("interrupted", self._reason)
                wake_s = self._let_end()
            elif self.board.stuck and not self._keep_open:
                return RunEnd("interrupted", self._why_stuck())
            left_s = None if wake_s is None else max(0.0, wake_s - self._clock.now_s())
            if left_s == 0 and self._stop_until_s is not None:
                return RunEnd("interrupted", f"{self._reason}; not all of it could be killed in {STOP_S:g} s")
            for event in self.backend.poll(left_s):
                self._on_event(event)

    def _recover(self) -> None:
        """Take up what was committed, what has ended, and what still runs."""
        store = self.store
        since = store.active_since()
        active = [one for one, _ in since]
        for attempt in store.attempts(self.board.next_to_commit):
            trial = self._trials.setdefault(attempt.schedule_idx, _Trial())
            trial.attempt = max(trial.attempt, attempt.attempt)
            slot = self.board.slots[attempt.schedule_idx]
            before = attempt.attempt <= self.ledger.forgiven.get(derive_trial_id(slot), 0)
            if (attempt.counted or attempt.status is Status.RATE_LIMITED) and not before:
                trial.ended[attempt.status] += 1
        now_s = self._clock.now_s()
        for one, started_at in since:
            trial = self._trials.setdefault(one.slot.schedule_idx, _Trial())
            age_s = max(0.0, time.time() - started_at)
            trial.attempt, trial.adopted, trial.since, trial.began_s = one.attempt, True, started_at, now_s - age_s
            self.ledger.lanes.adopt(one.slot.variant_id)
            self._metrics.adopted(one.trial_id, one.slot.variant_id, age_s, now_s)
        self._began_s = self.ledger.began_s
        self._take_up_task()
        self._at("adopting")
        self._adopt(active)

    def _take_up_task(self) -> None:
        """Of a task that is half committed: what its end will be told with."""
        slots, due = self.board.slots, self.board.next_to_commit
        first = due
        while first and due < len(slots) and slots[first - 1].task_id == slots[due].task_id:
            first -= 1
        known = {(one.schedule_idx, one.attempt): one.completion_json for one in self.store.attempts(first)}
        for commit in list(self.store.commits(first)):
            if commit.status is Status.SKIPPED:
                self._task_so_far.append(self._skipped(slots[commit.schedule_idx], ""))
            else:
                completion = known[commit.schedule_idx, commit.attempt]
                self._task_so_far.append(TrialCompletion.model_validate_json(completion))

    def _adopt(self, active: list[ActiveTrial]) -> None:
        adoptions = {one.active.slot.schedule_idx: one for one in self.backend.adopt(active)}
        for one in active:
            idx = one.slot.schedule_idx
            adoption = adoptions.pop(idx, None) or Adoption(one, "lost")
            ticket = adoption.ticket or WorkerTicket(idx, one.trial_id, one.attempt, one.worker, one.folder)
            self._trials[idx].ticket = ticket
            self.store.event("adopted", trial_id=one.trial_id, attempt=one.attempt, state=adoption.state)
            if adoption.state == "finished":
                self._on_ended(one.slot, self._trials[idx], ticket, heard_before=True)
            elif adoption.state == "lost":
                self._on_event(Lost(ticket, "its worker was gone when the run was continued"))
        if adoptions:
            raise ProtocolFault(f"the backend adopted slots {sorted(adoptions)}, of which it was not asked")

    def _turn(self) -> float | None:
        """Commit what is ready and dispatch what may start: one transaction, one wait for the disk, for all of it."""
        tickets: list[WorkerTicket] = []
        committed: list[TrialCompletion] = []
        told: list[tuple[Any, ...]] = []  # to callbacks, which may submit: that must not wait for our transaction
        self._at("committing")
        with self.store.batch():
            while True:
                committed += self._commit_ready()
                now_s = self._clock.now_s()
                decisions = self._decide(now_s)
                for idx, reason in decisions.skip:
                    self.board.skip(idx, reason)
                    told.append(("on_queue_decision", "skip", self.board.slots[idx], reason))
                for idx in decisions.dispatch:
                    tickets.append(self._dispatch(idx, now_s))
                    told.append(("on_trial_selected", self.board.slots[idx], tickets[-1].attempt))
                if not decisions.dispatch and not decisions.skip:
                    break
            self._watch()
            if committed or tickets or (self._notes_due_s is not None and self._notes_due_s <= self._clock.now_s()):
                self._write_notes()
                self.ledger.save_lanes()
        if committed:
            self._at("committed")
        if tickets:
            self._at("dispatched")
        for what in told:
            self._call(*what)
        for ticket in tickets:
            self.backend.begin(ticket)
        if tickets:
            self._at("begun")
        for completion in committed:
            self._announce(completion)
        check_s = self._metrics.next_check_s() if self._paused_s is None else None
        wakes = (decisions.wake_s, check_s, self._notes_due_s)
        return min((wake_s for wake_s in wakes if wake_s is not None), default=None)

    def _decide(self, now_s: float) -> Decisions:
        if self._mode in ("running", "draining"):
            self._end_at_duration(now_s)
        if self._mode != "running":
            return Decisions()
        self.board.advance(now_s)
        decisions = decide(self.board, self.ledger.lanes, now_s, self.backend.capacity())
        for warning in decisions.warnings:
            self.board.capacity_warned = True
            self.store.event("warning", text=warning)
        return decisions

    def _end_at_duration(self, now_s: float) -> None:
        if self.board.ends_s is None or now_s < self.board.ends_s:
            return
        if self.board.blocked is not None:  # nobody can retry it any more
            self.ledger.give_up([self.board.blocked])
        if not self._over:
            self._over = True
            for ticket in self._tickets():
                self.backend.stop(ticket, OVER)

    def _watch(self) -> None:
        """Tell what a person should look at: of how much waits, and of what has not gone well."""
        now_s = self._clock.now_s()
        self._metrics.submitted(len(self.board.slots) - self._counted)
        self._counted = len(self.board.slots)
        self._metrics.set_depth(self.board.depth)
        self._metrics.set_capacity(self.backend.capacity(), now_s)
        for alert in self._metrics.check(now_s) if self._paused_s is None else ():
            self.store.event("alert", **alert)
        for pressure in self._watermarks.update(self.board.depth):
            self.store.event("queue_filling", **pressure._asdict())

    def _note(self, kind: str, **data: Any) -> None:
        """Note what happened to a trial: it is written with what happens next, or a little later by itself."""
        self._notes.append((self.store.now(), kind, data))
        if self._notes_due_s is None:
            self._notes_due_s = self._clock.now_s() + _NOTE_S

    def _write_notes(self) -> None:
        for at, kind, data in self._notes:
            self.store.event(kind, at, **data)
        self._notes, self._notes_due_s = [], None

    def _dispatch(self, idx: int, now_s: float) -> WorkerTicket:
        """Record it; its worker hears of it when the record is on the disk."""
        slot = self.board.slots[idx]
        task = self.ledger.tasks[slot.task_id]
        trial = self._trials.setdefault(idx, _Trial())
        trial.attempt += 1
        folder = attempt_folder(self.store.folder, derive_trial_id(slot), trial.attempt)
        dispatch = self._dispatches.make(slot, task, trial.attempt, timeout_factor(task.protocol, trial.ended))
        trial.ticket = ticket = self.backend.submit(dispatch, folder)
        trial.adopted = trial.started = False
        trial.since, trial.phase, trial.events, trial.memory_bytes = time.time(), "", 0, None
        trial.began_s = now_s
        active = ActiveTrial(
            slot=slot, trial_id=dispatch.trial_id, attempt=trial.attempt, folder=folder, worker=ticket.worker
        )
        self.store.record_dispatch(active, trial.since)
        since_s = self.board.submitted_s(idx) if trial.waits_since_s is None else trial.waits_since_s
        waited_s = max(0.0, now_s - since_s)
        self._metrics.assigned(dispatch.trial_id, slot.variant_id, waited_s, now_s)
        self._note("assigned", trial_id=dispatch.trial_id, attempt=trial.attempt)
        return ticket

    # --- what the workers say ---

    def _on_event(self, event: WorkerEvent) -> None:
        ticket = event.ticket
        trial = self._trials.get(ticket.schedule_idx)
        if trial is None or trial.ticket != ticket:
            self._on_stray(event)
            return
        slot = self.board.slots[ticket.schedule_idx]
        match event:
            case Started():
                if not trial.started:
                    trial.started = True
                    self._metrics.executing(ticket.trial_id)
                    self._note("executing", trial_id=ticket.trial_id, attempt=ticket.attempt)
                    self._call("on_trial_start", slot, ticket.attempt)
            case Traced(_, phase, events, memory_bytes):
                trial.phase, trial.events, trial.memory_bytes = phase, events, memory_bytes
                self._call("on_trace", slot, phase, events)
            case Finished():
                self._on_ended(slot, trial, ticket)
            case Lost(_, reason):
                self._on_ended(slot, trial, ticket, reason)

    def _on_stray(self, event: WorkerEvent) -> None:
        """Late, or a second time: it has been dealt with. Of an attempt that was never dispatched: a fault."""
        ticket = event.ticket
        if not self._was_dispatched(ticket):
            text = f"the backend spoke of {ticket.trial_id!r}, attempt {ticket.attempt}, by a ticket that it never got"
            self.store.event("protocol_fault", text=text)
            raise ProtocolFault(text)
        if isinstance(event, Finished | Lost):
            self.store.event("duplicate", trial_id=ticket.trial_id, attempt=ticket.attempt)

    def _was_dispatched(self, ticket: WorkerTicket) -> bool:
        idx, slots = ticket.schedule_idx, self.board.slots
        if not 0 <= idx < len(slots) or derive_trial_id(slots[idx]) != ticket.trial_id:
            return False
        trial = self._trials.get(idx)
        if trial is not None:
            is_current = trial.ticket is not None and trial.ticket.attempt == ticket.attempt
            return 1 <= ticket.attempt <= trial.attempt and not is_current
        committed = self.store.query("SELECT attempt FROM commits WHERE schedule_idx = ?", idx)
        return any(1 <= ticket.attempt <= attempt for (attempt,) in committed)

    def _on_ended(
        self, slot: Slot, trial: _Trial, ticket: WorkerTicket, reason: str = "", *, heard_before: bool = False
    ) -> None:
        """An attempt has ended, as its file says: another one, or wait for the slot's turn to be committed."""
        found = read_completion(ticket.folder)
        completion = found.value or _lost(slot, ticket, reason or f"no completion: {found.reason}")
        no_room = self._is_no_room(completion)
        trial.ticket = None
        self._tell_lane(slot, trial, completion, heard_before=heard_before)
        following = self._following(trial, completion, no_room)
        if following is None and self._is_without_engine(completion):
            self._keep(completion)
            self.board.requeue(slot.schedule_idx, self._clock.now_s())
            assert completion.error is not None
            raise SandboxUnavailable(completion.error.message)
        if following is None:
            self._metrics.finished(completion.trial_id, self._clock.now_s())
            self.board.finish(slot.schedule_idx)
            if found.value is None or slot.schedule_idx - self.board.next_to_commit < _KEPT:
                trial.completion = completion
            self._at("finished")
            return
        self._keep(completion)
        trial.waits_since_s = self._clock.now_s()
        self._metrics.retrying(completion.trial_id, trial.waits_since_s)
        self._note("retrying", trial_id=completion.trial_id, attempt=completion.attempt, status=completion.status.value)
        self.board.requeue(slot.schedule_idx, self._clock.now_s() + following.after_s)
        self._call("on_queue_decision", "retry", slot, f"attempt {completion.attempt} ended as {completion.status}")
        self._at("requeued")
        if no_room and not trial.adopted:
            raise StoreFull(f"no room left in {self.store.folder}: free some there, then continue the run")

    def _tell_lane(self, slot: Slot, trial: _Trial, completion: TrialCompletion, *, heard_before: bool) -> None:
        """`heard_before`: by a coordinator before us, perhaps; that a lane is blocked may be told twice, no more."""
        lanes, now_s, provider = self.ledger.lanes, self._clock.now_s(), completion.provider
        if completion.status is Status.RATE_LIMITED or (provider is not None and provider.turned_away):
            seed = derive_seed(self.experiment.seed, f"{completion.trial_id} {completion.attempt}")
            lanes.turned_away(
                slot.variant_id,
                now_s,
                started_s=trial.began_s,
                retry_after_s=completion.retry_after_s or 0.0,
                jitter_s=seed / 2**32,
            )
            self._note("rate_limited", trial_id=completion.trial_id, retry_after_s=completion.retry_after_s)
        lanes.end(
            slot.variant_id,
            now_s,
            started_s=trial.began_s,
            success=completion.ok and not heard_before,
            tokens=provider.tokens if provider is not None and not heard_before else None,
            requests=provider.requests if provider is not None and not heard_before else None,
        )

    def _following(self, trial: _Trial, completion: TrialCompletion, no_room: bool) -> NextAttempt | None:
        """The next attempt, or None if there is to be none."""
        status = completion.status
        lost_with_us = status.blame is Blame.INFRA and (trial.adopted or self._mode == "killing")
        if status is Status.CANCELLED or lost_with_us or no_room:
            return NextAttempt(0.0, 1)
        trial.ended[status] += 1
        return self._policy.next_attempt(
            status,
            self.ledger.tasks[completion.slot.task_id].protocol,
            trial.ended,
            seed=derive_seed(self.experiment.seed, completion.trial_id),
            retry_after_s=completion.retry_after_s,
        )

    def _is_without_engine(self, completion: TrialCompletion) -> bool:
        """Whether every trial would end so: an engine that is away is no verdict on anybody."""
        return (
            self.experiment.sandbox.kind == "docker"
            and completion.status is Status.ENVIRONMENT_ERROR
            and completion.error is not None
            and completion.error.type in ("SandboxUnavailable", "SandboxLost")
        )

    def _is_no_room(self, completion: TrialCompletion) -> bool:
        """Whether there was none for what the attempt left. A worker that could not even say so was lost."""
        if completion.status is Status.WORKER_LOST:
            return not has_room(self.store.folder)
        return (
            completion.status is Status.ENVIRONMENT_ERROR
            and completion.error is not None
            and completion.error.type == StoreFull.__name__
        )

    def _keep(self, completion: TrialCompletion) -> None:
        """Record an attempt that is not the last one."""
        counted = is_counted(completion.status)
        with self.store.batch():
            self._write_notes()
            self.store.record_attempt(completion, counted)
            self.ledger.save_lanes()
            if not counted:
                self.store.event(
                    "attempt_lost",
                    trial_id=completion.trial_id,
                    attempt=completion.attempt,
                    status=completion.status.value,
                    reason=completion.error.message if completion.error else "",
                )

    def _commit_ready(self) -> list[TrialCompletion]:
        rows: list[CommitRow] = []
        now_s = self._clock.now_s()
        while self.board.committable:
            idx = self.board.next_to_commit
            slot = self.board.slots[idx]
            completion = self._final(slot)
            verdict = verdict_at_commit(self.board, idx, completion.status if completion else None)
            if completion is not None and self.ledger.blocks(idx, verdict.status):
                self._block(idx, completion)
                break
            if completion is None or verdict.status is Status.SKIPPED:
                completion = self._skipped(slot, verdict.reason or "")
            pruned = self.board.commit(idx, completion.status)
            if pruned is not None:
                self.store.event("pruned", variant=pruned, after_slot=idx)
            rows.append(CommitRow(completion, is_counted(completion.status), grade_digest=completion.grade_sha256))
            self.ledger.observe(completion)
            self._metrics.committed(completion, now_s)
            kind = {Status.SUCCESS: "completed", Status.SKIPPED: "skipped"}.get(completion.status, "failed")
            more = {"reason": verdict.reason} if verdict.reason else {}
            self._note(
                kind, trial_id=completion.trial_id, attempt=completion.attempt, status=completion.status.value, **more
            )
        if rows:
            self.store.commit(rows)
            self.ledger.save_queue()
        for row in rows:
            self._trials.pop(row.completion.slot.schedule_idx, None)
        return [row.completion for row in rows]

    def _block(self, idx: int, completion: TrialCompletion) -> None:
        self._keep(completion)
        self.ledger.block(idx)
        self.store.event("blocked", trial_id=completion.trial_id, status=completion.status.value)

    def _why_stuck(self) -> str:
        assert self.board.blocked is not None
        trial_id = derive_trial_id(self.board.slots[self.board.blocked])
        return (
            f"blocked: {trial_id} failed, and others need it. `sandbox-exec dead retry {self.store.folder} {trial_id}` "
            "tries it again, `dead drop` in its place gives it up; the run can go on then"
        )

    def _final(self, slot: Slot) -> TrialCompletion | None:
        """The last attempt's completion. It waited as a file: only the number of the attempt is kept in memory."""
        trial = self._trials.get(slot.schedule_idx)
        if trial is None or self.board.skip_reason(slot.schedule_idx) is not None:
            return None
        if trial.completion is not None:
            return trial.completion
        trial_id = derive_trial_id(slot)
        folder = self.store.folder / TRIALS / trial_id / f"attempt-{trial.attempt}"
        found = read_completion(folder)
        if found.value is not None:
            return found.value
        for recorded in self.store.attempts(slot.schedule_idx, slot.schedule_idx):  # one that was lost, and blocked
            if recorded.attempt == trial.attempt:
                return TrialCompletion.model_validate_json(recorded.completion_json)
        ticket = WorkerTicket(slot.schedule_idx, trial_id, trial.attempt, "", folder)
        return _lost(slot, ticket, f"no completion: {found.reason}")

    def _skipped(self, slot: Slot, reason: str) -> TrialCompletion:
        trial = self._trials.get(slot.schedule_idx)
        return TrialCompletion(
            slot=slot,
            trial_id=derive_trial_id(slot),
            attempt=max(1, trial.attempt if trial else 1),
            status=Status.SKIPPED,
            phase=Phase.STAGE,
            error=AgentError(type=self.ledger.skip_type(slot.schedule_idx), message=reason),
        )

    def _announce(self, completion: TrialCompletion) -> None:
        if not self._callbacks:
            return
        self._call("on_trial_end", completion)
        self._task_so_far.append(completion)
        slots, following = self.board.slots, completion.slot.schedule_idx + 1
        task_id = completion.slot.task_id
        if following == len(slots) or slots[following].task_id != task_id:  # a schedule goes task by task
            together, self._task_so_far = tuple(self._task_so_far), []
            self._call("on_task_end", task_id, together)

    # --- steering ---

    def _obey_requests(self) -> None:
        while self._control is not None and not self._control.requests.empty():
            request = self._control.requests.get()
            try:
                self._obey(request)
            except _REFUSED as error:
                request.answer(error=str(error), type=type(error).__name__)
            except ValidationError as error:
                faults = [str(fault) for fault in faults_of(error)]
                request.answer(error="; ".join(faults), type=InvalidValue.__name__)
            except Exception as error:
                request.answer(error=f"{type(error).__name__}: {error}")
                raise

    def _obey(self, request: Request) -> None:
        match request.content:
            case {"do": "pause"}:
                self._pause(request)
            case {"do": "resume"}:
                self._resume()
                request.answer(status=self._mode)
            case {"do": "stop", **rest}:
                (self.kill if rest.get("now") else self.drain)("stopped on request")
                request.answer(status="stopping")
            case {"do": "status"}:
                reason = self._why_stuck() if self.board.stuck else ""
                request.answer(status=self._mode, reason=reason, in_flight=self.in_flight(), **self.figures())
            case {"do": "metrics"}:
                labels = {"run": self.store.folder.name}
                request.answer(text=prometheus(self._metrics.snapshot(self._clock.now_s()), labels))
            case {"do": "submit" | "purge" | "retry" | "give_up"}:
                request.answer(**self._change(request.content))
            case _:
                request.answer(error="allowed: pause, resume, stop, status, metrics, submit, purge, retry, give_up")

    def _change(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Change what there is to do: the ledger does, and what is known here of it is brought in line."""
        blocked = self.board.blocked
        answer = self.ledger.obey(request)
        if "submitted" in answer:
            added = [self.ledger.tasks[one] for one in answer["submitted"]["tasks"]]
            self._dispatches.add(added, images_in(request.get("inputs") or {}))
        if blocked is not None and self.board.blocked is None and request["do"] == "retry":
            self._trials[blocked].ended.clear()
            self._trials[blocked].completion = None
        self._watch()
        self.backend.wake()  # where a callback asked for it, the turn is over, and there may be nothing else to hear of
        self._at("changed")
        return answer

    def _pause(self, request: Request) -> None:
        """Stop dispatching first, then freeze what runs. Who does not freeze in time ends the run as interrupted."""
        if self._mode in ("draining", "killing"):
            request.answer(error="the run is being stopped")
            return
        tickets = self._tickets()
        if self._paused_s is None:
            self._mode, self._paused_s = "paused", self._clock.now_s()
            awake = [ack.ticket.trial_id for ack in self.backend.pause(tickets, PAUSE_S) if not ack.frozen]
            if awake:
                self._awake = awake
                self.kill(f"these did not freeze in {PAUSE_S:g} s: {', '.join(awake)}")
                self.store.event("pause_failed", survivors=awake)
                request.answer(status="interrupted", survivors=awake)
                return
            frozen = [ticket.trial_id for ticket in tickets]
            self.store.set_control("paused", used_s=self._used_s(), frozen=frozen)
        request.answer(status="paused", frozen=len(tickets))

    def _resume(self) -> None:
        if self._mode == "paused":
            self._thaw()
            self._mode = "running"
            self.store.set_control("running", used_s=self._used_s())

    def _thaw(self) -> None:
        if self._paused_s is not None:
            stood_s, self._paused_s = self._clock.now_s() - self._paused_s, None
            self._began_s += stood_s
            self._metrics.stood_still(stood_s)
            if self.board.ends_s is not None:
                self.board.ends_s += stood_s
            for ticket in self._tickets():
                self.backend.resume(ticket)

    def _let_end(self) -> float | None:
        """What is in flight is to end: by itself, which nothing frozen does, or killed, and then until when."""
        if self._mode == "draining":
            self._thaw()
            return None if self._over else self.board.ends_s
        if self._stop_until_s is None:
            self._stop_until_s = self._clock.now_s() + STOP_S
            self._stop_all()
        return self._stop_until_s

    def _stop_all(self) -> None:
        for ticket in self._tickets():
            self.backend.stop(ticket, self._reason)

    def _tickets(self) -> list[WorkerTicket]:
        return [trial.ticket for trial in self._trials.values() if trial.ticket is not None]

    def _used_s(self) -> float:
        """Of the run's duration, which stands still while it is paused."""
        now_s = self._clock.now_s() if self._paused_s is None else self._paused_s
        return max(0.0, now_s - self._began_s)

    def figures(self) -> dict[str, Any]:
        """How the run does, in numbers: metrics, lanes, and what the queue has learnt."""
        self._metrics.set_depth(self.board.depth)
        metrics = self._metrics.snapshot(self._clock.now_s())
        for name in ("wait_s", "latency_s"):
            del metrics[name]["buckets"]  # they are for Prometheus
        return {"metrics": metrics, **self.ledger.figures()}

    def _tags(self, task_id: str) -> Sequence[str]:
        return self.ledger.tasks[task_id].protocol.tags

    def in_flight(self) -> list[dict[str, Any]]:
        """What runs now, for people who watch; in the order of the schedule."""
        now = time.time()
        found = []
        for idx in sorted(self.board.in_flight):
            slot, trial = self.board.slots[idx], self._trials[idx]
            found.append(
                {
                    "trial_id": derive_trial_id(slot),
                    "variant_id": slot.variant_id,
                    "task_id": slot.task_id,
                    "repeat": slot.repeat,
                    "attempt": trial.attempt,
                    "phase": trial.phase,
                    "age_s": round(now - trial.since, 3),
                    "events": trial.events,
                    "memory_bytes": trial.memory_bytes,
                }
            )
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, name)(*arguments)
            except ProtocolFault:  # of what it called: the run cannot go on
                raise
            except Exception as error:
                text = f"{type(callback).__name__}.{name}: {type(error).__name__}: {error}"
                self.store.event("callback_failed", text=text)


def submitted_by(answer: Mapping[str, Any]) -> Submitted:
    """What a coordinator answered to a submission; raises what it refused it for."""
    if "submitted" in answer:
        return Submitted.model_validate(answer["submitted"])
    raise refusal(answer)


def refusal(answer: Mapping[str, Any]) -> SandboxExecError:
    """The error that a coordinator answered with."""
    kinds = {kind.__name__: kind for kind in _REFUSED}
    return kinds.get(answer.get("type", ""), RunNotActive)(str(answer.get("error", "the coordinator said nothing")))


def is_counted(status: Status) -> bool:
    """Whether an attempt that ended so is the agent's own, and so in the history."""
    return status.blame not in (Blame.INFRA, Blame.PROVIDER, Blame.RUN)


def _lost(slot: Slot, ticket: WorkerTicket, reason: str) -> TrialCompletion:
    return TrialCompletion(
        slot=slot,
        trial_id=ticket.trial_id,
        attempt=ticket.attempt,
        status=Status.WORKER_LOST,
        phase=Phase.AGENT,
        error=AgentError(type="WorkerLost", message=reason),
    )
