"""What users' tests and ours share: stand-ins for the parts that are passed in."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sandbox_exec.backends.base import (
    Adoption,
    Finished,
    Lost,
    PauseAck,
    Started,
    WorkerEvent,
    WorkerTicket,
)
from sandbox_exec.contracts import (
    ActiveTrial,
    AgentError,
    Experiment,
    Isolation,
    Phase,
    Rung,
    Slot,
    Status,
    TrialCompletion,
    TrialDispatch,
)
from sandbox_exec.errors import InvalidValue
from sandbox_exec.orders import first_schedule, make_queue
from sandbox_exec.sandbox.base import Ceiling, End, Launch, Listener, Stream
from sandbox_exec.store import begin_folder


def expand(experiment: Experiment) -> list[Slot]:
    """The schedule that a run of the experiment begins with."""
    return first_schedule(make_queue(experiment), experiment.tasks)


class ManualClock:
    """A clock that moves only when it is told to. Not for use from several threads at once."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`; a monotonic clock never moves back."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidValue(f"a clock advances by a finite number of seconds >= 0, not {seconds!r}")
        self._now_s += seconds


class FakeSandbox:
    """A `Sandbox` with no process in it: notes what its supervisor asks for, and says what it is told to say.

    `asked` has the names of the calls in their order. `write`, `exceed` and `end` play the agent. It does not
    hold anyone to the order of calls, and does nothing by itself: a `kill` ends it only when `end` is called.
    """

    def __init__(self, files: Mapping[str, bytes | Exception] | None = None) -> None:
        self.files = dict(files or {})  # what `read_file` finds; an exception is raised
        self.asked: list[str] = []
        self.paused_s = 0.0
        self.launch: Launch | None = None
        self._listener: Listener | None = None

    # --- the agent's part ---

    def write(self, stream: Stream, data: bytes) -> None:
        self._heard().on_output(stream, memoryview(data))

    def exceed(self, what: Ceiling) -> None:
        self._heard().on_exceeded(what)

    def end(self, exit_code: int | None = 0, **fields: Any) -> None:
        """No process is left; `fields` are those of `End`."""
        self._heard().on_ended(End(exit_code=exit_code, **{"proof": "there never was a process", **fields}))

    def _heard(self) -> Listener:
        if self._listener is None:
            raise InvalidValue("the sandbox has not been started: make its supervisor first")
        return self._listener

    # --- the sandbox's part ---

    @property
    def isolation(self) -> Isolation:
        return Isolation(
            rung=Rung.PROCESS_GROUP,
            memory="none",
            pids="none",
            cpu="none",
            freeze="none",
            filesystem="host",
            network="host",
        )

    keeper_pidfd = -1
    steps_s: Mapping[str, float] = MappingProxyType({})

    def start(self, launch: Launch, listener: Listener) -> None:
        self.launch, self._listener = launch, listener
        self.asked.append("start")
        listener.on_started()

    def terminate(self) -> None:
        self.asked.append("terminate")

    def kill(self) -> None:
        self.asked.append("kill")

    def kill_hard(self) -> None:
        self.asked.append("kill_hard")

    def freeze(self) -> None:
        self.asked.append("freeze")

    def thaw(self, paused_s: float) -> None:
        self.asked.append("thaw")
        self.paused_s = paused_s

    def peak_memory_bytes(self) -> int | None:
        return None

    def read_file(self, path: str, limit: int) -> bytes | None:
        found = self.files.get(path)
        if isinstance(found, Exception):
            raise found
        if found is not None and len(found) > limit:
            raise ValueError(f"{path} has {len(found)} bytes; {limit} are allowed")
        return found

    def open_folder(self, name: str) -> int:
        raise FileNotFoundError(f"there is no {name}: nothing was written")

    def give(self, name: str) -> None:
        self.asked.append("give")

    def close(self) -> None:
        self.asked.append("close")


Bells = tuple[tuple[Literal["started", "finished", "lost"], int], ...]


@dataclass(frozen=True)
class Play:
    """What becomes of a scripted attempt: how it ends, and what is heard of it.

    `status` None: it leaves no completion. `bells` are what is told of it, each with the number of polls by which it
    comes late: late enough, and it comes after the commit. Without any, it runs until it is stopped.
    """

    status: Status | None = Status.SUCCESS
    error: str | None = None
    result_sha256: str | None = None
    retry_after_s: float | None = None
    bells: Bells = (("started", 0), ("finished", 0))
    early: bool = True  # its completion is written when it begins; else when it is heard of
    deaf: bool = False  # it hears neither pause nor stop


HOLDS = Play(bells=(("started", 0),))


class ScriptedBackend:
    """A `WorkerBackend` with no process in it. Each attempt does what `script` says of its dispatch.

    A completion is there at once, or with the bell, which comes when the script says. `say` rings any bell,
    such as one for a ticket that never was. `order` shuffles what is heard at once. `poll` lets no time pass: it moves
    the clock; where nothing is to come, or with `waits` always, it waits for `wake`. `say` and `finish` may be called
    from any thread, the rest from one. `running` are the attempts that have begun and whose end was not yet heard;
    `asked` has the calls in their order. `adopts` says which attempts of a coordinator that died are alive; all others
    are what their folders say.
    """

    def __init__(
        self,
        clock: ManualClock,
        capacity: int = 4,
        script: Callable[[TrialDispatch], Play] = lambda dispatch: Play(),
        *,
        order: random.Random | None = None,
        adopts: Callable[[ActiveTrial], Play | None] = lambda active: None,
        waits: bool = False,
        patience_s: float = 30.0,
    ) -> None:
        self.running: dict[WorkerTicket, TrialDispatch | ActiveTrial] = {}
        self.asked: list[tuple[str, int, int]] = []  # what, slot, attempt
        self._clock, self._capacity, self._script = clock, capacity, script
        self._order, self._adopts, self._waits, self._patience_s = order, adopts, waits, patience_s
        self._reserved: dict[WorkerTicket, TrialDispatch] = {}
        self._plays: dict[WorkerTicket, Play] = {}
        self._unwritten: dict[WorkerTicket, tuple[Play, TrialDispatch | ActiveTrial]] = {}
        self._frozen: set[WorkerTicket] = set()
        self._bells: list[tuple[int, WorkerEvent]] = []
        self._polls = self._workers = 0
        self._woken = threading.Event()
        self._lock = threading.Lock()  # for the bells

    def say(self, event: WorkerEvent, late: int = 0) -> None:
        """Ring a bell, so many polls late."""
        with self._lock:
            self._bells.append((self._polls + late + 1, event))

    def finish(self, ticket: WorkerTicket, status: Status = Status.SUCCESS) -> None:
        """End an attempt that holds."""
        self._perform(ticket, Play(status, bells=(("finished", 0),)), self.running[ticket])

    # --- the backend's part ---

    def capacity(self) -> int:
        return self._capacity

    def submit(self, dispatch: TrialDispatch, folder: Path) -> WorkerTicket:
        if len(self._reserved) + len(self.running) >= self._capacity:
            raise InvalidValue(f"{self._capacity} attempts are under way: there is no worker for another")
        self._workers += 1
        name = f"scripted-{id(self)}-{self._workers}"
        ticket = WorkerTicket(dispatch.slot.schedule_idx, dispatch.trial_id, dispatch.attempt, name, folder)
        self._reserved[ticket] = dispatch
        return ticket

    def begin(self, ticket: WorkerTicket) -> None:
        self._ask("begin", ticket)
        dispatch = self._reserved.pop(ticket)
        begin_folder(ticket.folder, dispatch.model_dump_json().encode())
        self._perform(ticket, self._script(dispatch), dispatch)

    def poll(self, timeout_s: float | None) -> list[WorkerEvent]:
        if not self._is_due() and not self._woken.is_set():
            if timeout_s is not None and not self._waits:
                self._clock.advance(timeout_s)
            elif not self._woken.wait(self._patience_s):
                raise RuntimeError("the coordinator waits for ever: nothing is under way that it could hear of")
        self._woken.clear()
        heard = self._hear()
        for event in heard:
            if isinstance(event, Finished) and event.ticket in self._unwritten:
                _write_completion(event.ticket, *self._unwritten.pop(event.ticket))
            if isinstance(event, Finished | Lost):
                self.running.pop(event.ticket, None)
        return heard

    def _is_due(self) -> bool:
        with self._lock:
            return any(event.ticket not in self._frozen for _, event in self._bells)

    def _hear(self) -> list[WorkerEvent]:
        with self._lock:
            self._polls += 1
            audible = [bell for bell in self._bells if bell[1].ticket not in self._frozen]
            if audible:
                self._polls = max(self._polls, min(poll for poll, _ in audible))  # nothing comes sooner
            heard = [bell for bell in audible if bell[0] <= self._polls]
            self._bells = [bell for bell in self._bells if bell not in heard]
        if self._order is not None:
            self._order.shuffle(heard)
        return [event for _, event in heard]

    def wake(self) -> None:
        self._woken.set()

    def pause(self, tickets: Sequence[WorkerTicket], timeout_s: float) -> list[PauseAck]:
        acks = []
        for ticket in tickets:
            self._ask("pause", ticket)
            if not self._is_deaf(ticket):
                self._frozen.add(ticket)
            acks.append(PauseAck(ticket, not self._is_deaf(ticket)))
        if not all(ack.frozen for ack in acks):
            self._clock.advance(timeout_s)
        return acks

    def resume(self, ticket: WorkerTicket) -> None:
        self._ask("resume", ticket)
        self._frozen.discard(ticket)

    def stop(self, ticket: WorkerTicket, reason: str) -> None:
        self._ask("stop", ticket)
        if ticket in self.running and not self._is_deaf(ticket) and not (ticket.folder / "completion.json").exists():
            self._frozen.discard(ticket)
            self._perform(ticket, Play(Status.CANCELLED, bells=(("finished", 0),)), self.running[ticket])

    def adopt(self, active: list[ActiveTrial]) -> list[Adoption]:
        return [self._adopt(trial) for trial in active]

    def close(self) -> None:
        for ticket in list(self.running):
            self.stop(ticket, "closed")
        self.running.clear()
        self._reserved.clear()
        self._bells = []

    # --- parts ---

    def _ask(self, what: str, ticket: WorkerTicket) -> None:
        self.asked.append((what, ticket.schedule_idx, ticket.attempt))

    def _is_deaf(self, ticket: WorkerTicket) -> bool:
        return ticket in self._plays and self._plays[ticket].deaf

    def _perform(self, ticket: WorkerTicket, play: Play, of: TrialDispatch | ActiveTrial) -> None:
        self._plays[ticket], self.running[ticket] = play, of
        if any(bell == "finished" for bell, _ in play.bells):
            if play.early:
                _write_completion(ticket, play, of)
            else:
                self._unwritten[ticket] = (play, of)
        for bell, late in play.bells:
            match bell:
                case "started":
                    self.say(Started(ticket), late)
                case "finished":
                    self.say(Finished(ticket), late)
                case "lost":
                    self.say(Lost(ticket, "as the script says"), late)

    def _adopt(self, trial: ActiveTrial) -> Adoption:
        if (trial.folder / "completion.json").exists():
            return Adoption(trial, "finished")
        play = self._adopts(trial)
        if play is None:
            return Adoption(trial, "lost")
        ticket = WorkerTicket(trial.slot.schedule_idx, trial.trial_id, trial.attempt, trial.worker, trial.folder)
        self._perform(ticket, play, trial)
        return Adoption(trial, "alive", ticket)


def _write_completion(ticket: WorkerTicket, play: Play, of: TrialDispatch | ActiveTrial) -> None:
    if play.status is None:
        return
    completion = TrialCompletion(
        slot=of.slot,
        trial_id=of.trial_id,
        attempt=of.attempt,
        status=play.status,
        phase=Phase.AGENT,
        error=AgentError(type=play.error, message="as the script says") if play.error else None,
        result_sha256=play.result_sha256,
        retry_after_s=play.retry_after_s,
    )
    (ticket.folder / "completion.json").write_text(completion.model_dump_json())
