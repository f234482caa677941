"""The coordinator: the one owner of a run. `run` and `continue` are the same loop; a fresh run has nothing committed.

Theory of operation. One thread. Each turn: obey who steers; ask the scheduler what may start, record it, and only then
let the workers hear of it; commit, in the order of the schedule, all that is ready and contiguous; wait for the next
event of the backend. An event is only a bell: how an attempt ended is read from its folder.

What a crash can interrupt, and what then holds:
  recorded, not begun      the worker never heard of it: it has gone with us, and the attempt is `worker_lost`
  begun, not finished      the worker ends it by itself; `adopt` waits for it
  finished, not recorded   completion.json is there: it is read again, and nothing is run again
  recorded, not committed  the same: an attempt that was not the last one is in the database, the last one is not
  committed                the transaction is there or it is not; what comes next follows from it

An attempt that infrastructure lost does not count as the agent's: it is in the run's events, not in its history.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from sandbox_exec.backends.base import Finished, Lost, Started, Traced, WorkerBackend, WorkerEvent, WorkerTicket
from sandbox_exec.clock import Clock, MonotonicClock
from sandbox_exec.contracts import (
    ActiveTrial,
    AgentError,
    Blame,
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
from sandbox_exec.errors import ProtocolFault, StoreFull
from sandbox_exec.schedule.board import Board
from sandbox_exec.schedule.retries import RetryPolicy, timeout_factor
from sandbox_exec.schedule.scheduler import Decisions, decide, verdict_at_commit
from sandbox_exec.store import CommitRow, RunStore, attempt_folder, read_completion
from sandbox_exec.store.folders import TRIALS

PAUSE_S: Final = 10.0  # for one worker to freeze its trial
FUNCTIONS: Final = "functions"  # in the run's folder: the pickled functions of agents that are functions
_KEPT: Final = 64  # completions in memory; the others are read again from their files when their turn comes
_BUDGET_SHARE: Final = 0.8  # of the machine's memory, where the design names no budget

Ending = Literal["completed", "interrupted", "failed"]


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


@dataclass
class _Trial:
    """What is known of a trial between its first dispatch and its commit."""

    ended: Counter[Status] = field(default_factory=Counter)
    attempt: int = 0  # the last that was dispatched
    ticket: WorkerTicket | None = None
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
    ) -> None:
        self.store, self.experiment, self.backend = store, experiment, backend
        self._callbacks = list(callbacks)
        self._clock = clock or MonotonicClock()
        self._at = at
        self._tasks = {task.id: task for task in experiment.tasks}
        self._variants = {variant.id: variant for variant in experiment.variants}
        self._limits_for = functools.cache(lambda timeout_s, variant_id: self._resolve(timeout_s, variant_id))
        self._policy = RetryPolicy(experiment.design.infra_retries)
        self._trials: dict[int, _Trial] = {}
        self._mode: Literal["running", "draining", "killing", "paused"] = "running"
        self._reason = ""
        self._frozen = False  # what runs stands still
        self._by_task: dict[str, list[TrialCompletion]] = {}
        self._task_slots = Counter[str]()
        self._control: ControlServer | None = None

    @property
    def mode(self) -> Literal["running", "draining", "killing", "paused"]:
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
        """Until the run is completed, stopped, or cannot go on."""
        try:
            self._control = ControlServer(self.store.folder, self.backend.wake)
            end = self._run()
        except StoreFull as error:
            end = RunEnd("interrupted", str(error))
            self._stop_all()
        except ProtocolFault as error:
            end = RunEnd("failed", str(error))
        finally:
            if self._control is not None:
                self._control.close()
        try:
            self.store.set_control(end.status, reason=end.reason, survivors=[t.trial_id for t in self.store.active()])
        except StoreFull:
            pass  # the next `continue` finds the run as it was left
        self._call("on_run_end", end)
        return end

    def _run(self) -> RunEnd:
        self._recover()
        self.store.set_control("running")
        self._call("on_run_start", self)
        while True:
            self._obey_requests()
            if self._frozen and self._mode == "draining":
                self._thaw()  # or what is to finish never would
            wake_s = self._turn()
            if self.board.done:
                return RunEnd("completed")
            if self._mode == "killing":
                self._stop_all()
            if self._mode in ("draining", "killing") and not self.board.in_flight:
                return RunEnd("interrupted", self._reason)
            timeout_s = None if wake_s is None else max(0.0, wake_s - self._clock.now_s())
            for event in self.backend.poll(timeout_s):
                self._on_event(event)

    def _recover(self) -> None:
        """Take up what was committed, what has ended, and what still runs."""
        store, design = self.store, self.experiment.design
        committed = [commit.status for commit in store.commits()]
        active = store.active()
        for attempt in store.attempts(len(committed)):
            trial = self._trials.setdefault(attempt.schedule_idx, _Trial())
            trial.ended[attempt.status] += 1
            trial.attempt = max(trial.attempt, attempt.attempt)
        for one in active:
            trial = self._trials.setdefault(one.slot.schedule_idx, _Trial())
            trial.attempt = max(trial.attempt, one.attempt)
        budget = design.memory_budget or int(psutil.virtual_memory().total * _BUDGET_SHARE)
        self.board = Board(
            tuple(store.slots()),
            self._tasks,
            self._variants,
            design,
            lambda slot: self.experiment.sandbox.memory or 0,
            budget,
            start_s=self._clock.now_s() - float(store.control().metadata.get("used_s", 0.0)),
            committed=committed,
            active=[one.slot.schedule_idx for one in active],
        )
        self._task_slots = Counter(slot.task_id for slot in self.board.slots)
        self._at("adopting")
        for adoption in self.backend.adopt(active):
            one = adoption.active
            ticket = adoption.ticket or WorkerTicket(
                one.slot.schedule_idx, one.trial_id, one.attempt, one.worker, one.folder
            )
            self._trials[one.slot.schedule_idx].ticket = ticket
            store.event("adopted", trial_id=one.trial_id, attempt=one.attempt, state=adoption.state)
            if adoption.state == "finished":
                self._on_event(Finished(ticket))
            elif adoption.state == "lost":
                self._on_event(Lost(ticket, "its worker was gone when the run was continued"))

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
        (folder / "dispatch.json").write_text(dispatch.model_dump_json())
        trial.ticket = ticket = self.backend.submit(dispatch, folder)
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
            out_limit=self.experiment.sandbox.out_limit,
        )

    def _resolve(self, timeout_s: float | None, variant_id: str) -> tuple[Limits, Variant]:
        """Once for each variant and timeout: thousands of tasks share them."""
        task = next(task for task in self.experiment.tasks if task.protocol.timeout_s == timeout_s)
        return resolve(self.experiment.limits(task), self._variants[variant_id], self.experiment.base)

    # --- what the workers say ---

    def _on_event(self, event: WorkerEvent) -> None:
        ticket = event.ticket
        trial = self._trials.get(ticket.schedule_idx)
        if trial is None or trial.ticket != ticket:
            self._check_known(ticket)
            return  # late, or a second time: it has been dealt with
        slot = self.board.slots[ticket.schedule_idx]
        match event:
            case Started():
                self._call("on_trial_start", slot, ticket.attempt)
            case Traced(_, phase, events, memory_bytes):
                trial.phase, trial.events, trial.memory_bytes = phase, events, memory_bytes
                self._call("on_trace", slot, phase, events)
            case Finished():
                self._on_finished(slot, trial, ticket)
            case Lost(_, reason):
                self._on_attempt(slot, trial, _lost(slot, ticket, reason))

    def _check_known(self, ticket: WorkerTicket) -> None:
        idx = ticket.schedule_idx
        known = 0 <= idx < len(self.board.slots) and derive_trial_id(self.board.slots[idx]) == ticket.trial_id
        dispatched = (
            self._trials[idx].attempt if idx in self._trials else (0 if idx >= self.board.next_to_commit else 1)
        )
        if not known or ticket.attempt > max(dispatched, 1) or dispatched == 0:
            raise ProtocolFault(
                f"the backend spoke of {ticket.trial_id!r}, attempt {ticket.attempt}, which it never got"
            )
        self.store.event("duplicate", trial_id=ticket.trial_id, attempt=ticket.attempt)

    def _on_finished(self, slot: Slot, trial: _Trial, ticket: WorkerTicket) -> None:
        found = read_completion(ticket.folder)
        completion = found.value or _lost(slot, ticket, f"no completion: {found.reason}")
        self._on_attempt(slot, trial, completion)

    def _on_attempt(self, slot: Slot, trial: _Trial, completion: TrialCompletion) -> None:
        """An attempt has ended: another one, or wait for the slot's turn to be committed."""
        idx, status = slot.schedule_idx, completion.status
        trial.ticket = None
        trial.ended[status] += 1
        if not is_counted(status):
            error = completion.error.message if completion.error else ""
            self.store.event("attempt_lost", trial_id=completion.trial_id, attempt=completion.attempt, reason=error)
        cancelled = status is Status.CANCELLED  # by us, or by one before us: nothing of the agent's
        following = self._policy.next_attempt(
            status,
            self._tasks[slot.task_id].protocol,
            trial.ended,
            seed=derive_seed(self.experiment.seed, completion.trial_id),
            retry_after_s=completion.retry_after_s,
        )
        if cancelled or following is not None:
            self.store.record_attempt(completion, is_counted(status))
            self.board.requeue(idx, self._clock.now_s() + (following.after_s if following else 0.0))
            self._at("requeued")
            return
        self.board.finish(idx)
        if idx - self.board.next_to_commit < _KEPT:
            trial.completion = completion
        self._at("finished")

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
            rows.append(CommitRow(completion, is_counted(completion.status)))
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
        self._call("on_trial_end", completion)
        task_id = completion.slot.task_id
        together = self._by_task.setdefault(task_id, [])
        together.append(completion)
        if len(together) == self._task_slots[task_id]:
            self._call("on_task_end", task_id, tuple(self._by_task.pop(task_id)))

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
        self._mode, self._frozen = "paused", True
        tickets = [trial.ticket for trial in self._trials.values() if trial.ticket is not None]
        awake = [t for t in tickets if not self.backend.pause(t, PAUSE_S).frozen]
        if awake:
            names = [ticket.trial_id for ticket in awake]
            self.kill(f"these did not freeze in {PAUSE_S:g} s: {', '.join(names)}")
            self.store.event("pause_failed", survivors=names)
            request.answer(status="interrupted", survivors=names)
            return
        self.store.set_control("paused", frozen=[ticket.trial_id for ticket in tickets])
        request.answer(status="paused", frozen=len(tickets))

    def _resume(self) -> None:
        if self._mode == "paused":
            self._thaw()
            self._mode = "running"
            self.store.set_control("running")

    def _thaw(self) -> None:
        self._frozen = False
        for trial in self._trials.values():
            if trial.ticket is not None:
                self.backend.resume(trial.ticket)

    def _stop_all(self) -> None:
        for trial in self._trials.values():
            if trial.ticket is not None:
                self.backend.stop(trial.ticket, self._reason)

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


def limits_of(experiment: Experiment) -> list[Limits]:
    """The limits of all that an experiment will dispatch, retries with more time aside."""
    tasks = {experiment.limits(task) for task in experiment.tasks}
    return [resolve(limits, variant, experiment.base)[0] for limits in tasks for variant in experiment.variants]


def is_counted(status: Status) -> bool:
    """Whether an attempt that ended so is the agent's own, and so in the history."""
    return status.blame not in (Blame.INFRA, Blame.PROVIDER, Blame.RUN)


def resolve(limits: Limits, variant: Variant, base: Path) -> tuple[Limits, Variant]:
    """Words of a command, and modules, that are files beside the experiment are shown to the agent; no other there."""
    agent = variant.agent
    shown: list[Path] = []
    if agent.command is not None:
        words = []
        for word in agent.command:
            path = base / word
            beside = word and not word.startswith("-") and path.is_file()
            words.append(str(path) if beside else word)
            if beside:
                shown.append(path)
        variant = variant.model_copy(update={"agent": agent.model_copy(update={"command": tuple(words)})})
    elif agent.python is not None:
        top = agent.python.partition(":")[0].split(".")[0]
        shown = [path for path in (base / f"{top}.py", base / top) if path.exists()]
    if shown:
        limits = limits.model_copy(update={"readable": tuple(dict.fromkeys([*limits.readable, *shown]))})
    return limits, variant


def _lost(slot: Slot, ticket: WorkerTicket, reason: str) -> TrialCompletion:
    return TrialCompletion(
        slot=slot,
        trial_id=ticket.trial_id,
        attempt=ticket.attempt,
        status=Status.WORKER_LOST,
        phase=Phase.AGENT,
        error=AgentError(type="WorkerLost", message=reason),
    )


__all__ = ["Coordinator", "RunCallback", "RunEnd", "Task", "is_counted", "limits_of", "resolve"]
