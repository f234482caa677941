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
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import psutil

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
    ContainerSpec,
    Limits,
    Phase,
    Slot,
    Status,
    Task,
    TrialCompletion,
    TrialDispatch,
    Variant,
    derive_seed,
    derive_trial_id,
)
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.control import ControlServer, Request
from sandbox_exec.errors import ProtocolFault, SandboxUnavailable, StoreFull
from sandbox_exec.graders import FUNCTIONS, Graders, hidden_from_agents
from sandbox_exec.schedule.board import Board
from sandbox_exec.schedule.retries import NextAttempt, RetryPolicy, timeout_factor
from sandbox_exec.schedule.scheduler import Decisions, decide, verdict_at_commit
from sandbox_exec.store import CommitRow, Committed, Control, RunStore, attempt_folder, read_completion
from sandbox_exec.store.folders import TRIALS
from sandbox_exec.store.room import has_room, one_error

PAUSE_S: Final = 10.0  # for all workers to freeze their trials
STOP_S: Final = 30.0  # for all workers to kill theirs; one that hangs is ended before
_KEPT: Final = 64  # completions in memory; the others are read again from their files when their turn comes
_BUDGET_SHARE: Final = 0.8  # of the machine's memory, where the design names no budget

Ending = Literal["completed", "interrupted", "failed"]
Mode = Literal["running", "draining", "killing", "paused"]


@dataclass(frozen=True)
class RunEnd:
    """How a coordinator's work at a run ended. Only `completed` is the end of the run itself."""

    status: Ending
    reason: str = ""


class RunCallback:
    """Override what you want to hear. Called by the coordinator alone, one at a time; results in commit order.

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
    ) -> None:
        self.store, self.experiment, self.backend = store, experiment, backend
        self._artifacts = artifacts or {}  # by variant
        self._images = images or {}  # what each name was at the start of the run
        self._answers = answers or {}  # by trial, where they are graded instead of what an agent leaves
        self._run_id = store.run().run_id
        self._graders = Graders(experiment, store.folder, self._images)
        self._callbacks = list(callbacks)
        self._clock = clock or MonotonicClock()
        self._at = at
        self._tasks = {task.id: task for task in experiment.tasks}
        self._variants = {variant.id: variant for variant in experiment.variants}
        self._limits_for = functools.cache(lambda timeout_s, variant_id: self._resolve(timeout_s, variant_id))
        self._hidden = (*hidden_from_agents(experiment), store.folder)  # and what other trials left
        self._policy = RetryPolicy(experiment.design.infra_retries)
        self._trials: dict[int, _Trial] = {}
        self._mode: Mode = "running"
        self._reason = ""
        self._began_s = 0.0  # when the run's time began
        self._paused_s: float | None = None  # since when it stands still, and what runs with it
        self._stop_until_s: float | None = None
        self._awake: list[str] = []  # trials that a pause did not reach
        self._task_so_far: list[TrialCompletion] = []
        self._control: ControlServer | None = None

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

    # --- the loop ---

    def run(self) -> RunEnd:
        """Until the run is completed, stopped, or cannot go on. What then still runs ends with the backend."""
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
            self.store.set_control(end.status, reason=end.reason, used_s=self._used_s(), survivors=survivors)
            self._call("on_run_end", end)

    def _run(self) -> RunEnd:
        self._recover()
        self.store.set_control("running", used_s=self._used_s())
        self._call("on_run_start", self)
        while True:
            self._obey_requests()
            wake_s = self._turn()
            if self.board.done:
                return RunEnd("completed")
            if self._mode in ("draining", "killing"):
                if not self.board.in_flight:
                    return RunEnd("interrupted", self._reason)
                wake_s = self._let_end()
            left_s = None if wake_s is None else max(0.0, wake_s - self._clock.now_s())
            if left_s == 0 and self._stop_until_s is not None:
                return RunEnd("interrupted", f"{self._reason}; not all of it could be killed in {STOP_S:g} s")
            for event in self.backend.poll(left_s):
                self._on_event(event)

    def _recover(self) -> None:
        """Take up what was committed, what has ended, and what still runs."""
        store = self.store
        slots, commits, since = tuple(store.slots()), list(store.commits()), store.active_since()
        active = [one for one, _ in since]
        for attempt in store.attempts(len(commits)):
            trial = self._trials.setdefault(attempt.schedule_idx, _Trial())
            trial.attempt = max(trial.attempt, attempt.attempt)
            if attempt.counted or attempt.status is Status.RATE_LIMITED:
                trial.ended[attempt.status] += 1
        for one, started_at in since:
            trial = self._trials.setdefault(one.slot.schedule_idx, _Trial())
            trial.attempt, trial.adopted, trial.since = one.attempt, True, started_at
        self._began_s = self._clock.now_s() - _used_before_s(store.control(), commits)
        design, memory = self.experiment.design, memory_of(self.experiment)
        self.board = Board(
            slots,
            self._tasks,
            self._variants,
            design,
            lambda slot: memory,
            design.memory_budget or int(psutil.virtual_memory().total * _BUDGET_SHARE),
            start_s=self._began_s,
            committed=[commit.status for commit in commits],
            active=[one.slot.schedule_idx for one in active],
        )
        self._take_up_task(commits)
        self._at("adopting")
        self._adopt(active)

    def _take_up_task(self, commits: Sequence[Committed]) -> None:
        """Of a task that is half committed: what its end will be told with."""
        slots, first = self.board.slots, len(commits)
        while first and len(commits) < len(slots) and slots[first - 1].task_id == slots[len(commits)].task_id:
            first -= 1
        known = {(one.schedule_idx, one.attempt): one.completion_json for one in self.store.attempts(first)}
        for commit in commits[first:]:
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
                self._on_event(Finished(ticket))
            elif adoption.state == "lost":
                self._on_event(Lost(ticket, "its worker was gone when the run was continued"))
        if adoptions:
            raise ProtocolFault(f"the backend adopted slots {sorted(adoptions)}, of which it was not asked")

    def _turn(self) -> float | None:
        """Commit what is ready and dispatch what may start: one transaction, one wait for the disk, for all of it."""
        tickets: list[WorkerTicket] = []
        committed: list[TrialCompletion] = []
        self._at("committing")
        with self.store.batch():
            while True:
                committed += self._commit_ready()
                decisions = self._decide()
                for idx, reason in decisions.skip:
                    self.board.skip(idx, reason)
                    self._call("on_queue_decision", "skip", self.board.slots[idx], reason)
                tickets += [self._dispatch(idx) for idx in decisions.dispatch]
                if not decisions.dispatch and not decisions.skip:
                    break
        if committed:
            self._at("committed")
        if tickets:
            self._at("dispatched")
        for ticket in tickets:
            self.backend.begin(ticket)
        if tickets:
            self._at("begun")
        for completion in committed:
            self._announce(completion)
        return decisions.wake_s

    def _decide(self) -> Decisions:
        if self._mode != "running":
            return Decisions()
        now_s = self._clock.now_s()
        self.board.advance(now_s)
        decisions = decide(self.board, now_s, self.backend.capacity())
        for warning in decisions.warnings:
            self.board.capacity_warned = True
            self.store.event("warning", text=warning)
        return decisions

    def _dispatch(self, idx: int) -> WorkerTicket:
        """Record it; its worker hears of it when the record is on the disk."""
        slot = self.board.slots[idx]
        self.board.start(idx)
        trial = self._trials.setdefault(idx, _Trial())
        trial.attempt += 1
        folder = attempt_folder(self.store.folder, derive_trial_id(slot), trial.attempt)
        dispatch = self._make_dispatch(slot, trial)
        trial.ticket = ticket = self.backend.submit(dispatch, folder)
        trial.adopted = trial.started = False
        trial.since, trial.phase, trial.events, trial.memory_bytes = time.time(), "", 0, None
        active = ActiveTrial(
            slot=slot, trial_id=dispatch.trial_id, attempt=trial.attempt, folder=folder, worker=ticket.worker
        )
        self.store.record_dispatch(active, trial.since)
        self._call("on_trial_selected", slot, trial.attempt)
        return ticket

    def _make_dispatch(self, slot: Slot, trial: _Trial) -> TrialDispatch:
        task, variant = self._tasks[slot.task_id], self._variants[slot.variant_id]
        trial_id = derive_trial_id(slot)
        limits, variant = self._limits_for(task.protocol.timeout_s, variant.id)
        factor = timeout_factor(task.protocol, trial.ended)
        if factor > 1 and limits.timeout_s is not None:
            limits = limits.model_copy(update={"timeout_s": limits.timeout_s * factor})
        function = variant.agent.function
        artifact = self._artifacts.get(variant.id)
        return TrialDispatch(
            slot=slot,
            trial_id=trial_id,
            attempt=trial.attempt,
            seed=derive_seed(self.experiment.seed, trial_id),
            task=task,
            variant=variant,
            limits=limits,
            base=self.experiment.base,
            payload=self.store.folder / FUNCTIONS / f"{function}.pkl" if isinstance(function, str) else None,
            artifact=artifact.folder if artifact else None,
            entrypoint=artifact.entrypoint if artifact else None,
            out_limit=self.experiment.sandbox.out_limit,
            run_id=self._run_id,
            container=self._container(task),
            grader=self._graders.of(task),
            answer=self._answers.get(trial_id),
        )

    def _container(self, task: Task) -> ContainerSpec | None:
        settings = self.experiment.sandbox
        if settings.kind != "docker":
            return None
        image = task.image or settings.image or ""
        return ContainerSpec(
            image=image,
            image_id=self._images.get(image),
            user=settings.user,
            network=settings.network,
            read_only=settings.read_only,
            runtime=settings.runtime,
        )

    def _resolve(self, timeout_s: float | None, variant_id: str) -> tuple[Limits, Variant]:
        """Once for each variant and timeout: thousands of tasks share them."""
        task = next(task for task in self.experiment.tasks if task.protocol.timeout_s == timeout_s)
        return resolve(self.experiment.limits(task), self._variants[variant_id], self.experiment.base, self._hidden)

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

    def _on_ended(self, slot: Slot, trial: _Trial, ticket: WorkerTicket, reason: str = "") -> None:
        """An attempt has ended, as its file says: another one, or wait for the slot's turn to be committed."""
        found = read_completion(ticket.folder)
        completion = found.value or _lost(slot, ticket, reason or f"no completion: {found.reason}")
        no_room = self._is_no_room(completion)
        trial.ticket = None
        following = self._following(trial, completion, no_room)
        if following is None and self._is_without_engine(completion):
            self._keep(completion)
            self.board.requeue(slot.schedule_idx, self._clock.now_s())
            assert completion.error is not None
            raise SandboxUnavailable(completion.error.message)
        if following is None:
            self.board.finish(slot.schedule_idx)
            if found.value is None or slot.schedule_idx - self.board.next_to_commit < _KEPT:
                trial.completion = completion
            self._at("finished")
            return
        self._keep(completion)
        self.board.requeue(slot.schedule_idx, self._clock.now_s() + following.after_s)
        self._at("requeued")
        if no_room and not trial.adopted:
            raise StoreFull(f"no room left in {self.store.folder}: free some there, then continue the run")

    def _following(self, trial: _Trial, completion: TrialCompletion, no_room: bool) -> NextAttempt | None:
        """The next attempt, or None if there is to be none."""
        status = completion.status
        lost_with_us = status.blame is Blame.INFRA and (trial.adopted or self._mode == "killing")
        if status is Status.CANCELLED or lost_with_us or no_room:
            return NextAttempt(0.0, 1)
        trial.ended[status] += 1
        return self._policy.next_attempt(
            status,
            self._tasks[completion.slot.task_id].protocol,
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
            self.store.record_attempt(completion, counted)
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
        while self.board.committable:
            idx = self.board.next_to_commit
            slot = self.board.slots[idx]
            completion = self._final(slot)
            verdict = verdict_at_commit(self.board, idx, completion.status if completion else None)
            if completion is None or verdict.status is Status.SKIPPED:
                completion = self._skipped(slot, verdict.reason or "")
            pruned = self.board.commit(idx, completion.status)
            if pruned is not None:
                self.store.event("pruned", variant=pruned, after_slot=idx)
            rows.append(CommitRow(completion, is_counted(completion.status), grade_digest=completion.grade_sha256))
        self.store.commit(rows)
        for row in rows:
            self._trials.pop(row.completion.slot.schedule_idx, None)
        return [row.completion for row in rows]

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
            error=AgentError(type="Skipped", message=reason),
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
                request.answer(status=self._mode, in_flight=self.in_flight())
            case _:
                request.answer(error="allowed: pause, resume, stop, status")

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
            if self.board.ends_s is not None:
                self.board.ends_s += stood_s
            for ticket in self._tickets():
                self.backend.resume(ticket)

    def _let_end(self) -> float | None:
        """What is in flight is to end: by itself, which nothing frozen does, or killed, and then until when."""
        if self._mode == "draining":
            self._thaw()
        elif self._stop_until_s is None:
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
            except Exception as error:
                text = f"{type(callback).__name__}.{name}: {type(error).__name__}: {error}"
                self.store.event("callback_failed", text=text)


def memory_of(experiment: Experiment) -> int:
    """What a trial may hold at once: its agent, then its grader; or both, where a service is graded."""
    agent, grading = experiment.sandbox.memory or 0, experiment.grading
    if grading is None:
        return agent
    grader = grading.memory or 0
    return agent + grader if grading.services == "keep" else max(agent, grader)


def limits_of(experiment: Experiment, hidden: Sequence[Path] = ()) -> list[Limits]:
    """The limits of all that an experiment will dispatch, retries with more time aside."""
    tasks, hidden = {experiment.limits(task) for task in experiment.tasks}, (*hidden_from_agents(experiment), *hidden)
    return [resolve(limits, variant, experiment.base, hidden)[0] for limits in tasks for variant in experiment.variants]


def is_counted(status: Status) -> bool:
    """Whether an attempt that ended so is the agent's own, and so in the history."""
    return status.blame not in (Blame.INFRA, Blame.PROVIDER, Blame.RUN)


def resolve(limits: Limits, variant: Variant, base: Path, hidden: Sequence[Path] = ()) -> tuple[Limits, Variant]:
    """Words of a command, and modules, that are files beside the experiment are shown to the agent; no other there.

    What belongs to the grading is hidden, unless the agent's own command or the experiment shows it by name.
    """
    agent = variant.agent
    shown: list[Path] = []
    if agent.command is not None:
        words = []
        for word in agent.command:
            path = base / word
            beside = word and not word.startswith("-") and os.path.isfile(path)  # which a word of any length may be
            words.append(str(path) if beside else word)
            if beside:
                shown.append(path)
        variant = variant.model_copy(update={"agent": agent.model_copy(update={"command": tuple(words)})})
    elif agent.python is not None:
        top = agent.python.partition(":")[0].split(".")[0]
        shown = [path for path in (base / f"{top}.py", base / top) if path.exists()]
    if shown:
        limits = limits.model_copy(update={"readable": tuple(dict.fromkeys([*limits.readable, *shown]))})
    unseen = [path for path in hidden if path not in limits.readable]
    if unseen:
        limits = limits.model_copy(update={"hidden": tuple(dict.fromkeys([*limits.hidden, *unseen]))})
    return limits, variant


def _used_before_s(control: Control, commits: Sequence[Committed]) -> float:
    """What the coordinators before us used. One that was killed worked at least until its last commit."""
    used_s = float(control.metadata.get("used_s", 0.0))
    if control.status == "running" and commits:
        used_s += max(0.0, commits[-1].committed_at - control.changed_at)
    return used_s


def _lost(slot: Slot, ticket: WorkerTicket, reason: str) -> TrialCompletion:
    return TrialCompletion(
        slot=slot,
        trial_id=ticket.trial_id,
        attempt=ticket.attempt,
        status=Status.WORKER_LOST,
        phase=Phase.AGENT,
        error=AgentError(type="WorkerLost", message=reason),
    )
