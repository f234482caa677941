"""A pool of worker processes on this machine, one attempt at a time each. See `worker` for the other side."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_exec.backends.base import (
    Adoption,
    Finished,
    Lost,
    PauseAck,
    Started,
    Traced,
    WorkerEvent,
    WorkerTicket,
)
from sandbox_exec.clock import Clock, MonotonicClock
from sandbox_exec.containment.cgroups import make_room, step_up, sweep
from sandbox_exec.contracts import ActiveTrial, Limits, TrialDispatch
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import entry, wire
from sandbox_exec.guest.view import AGENT_ROLE
from sandbox_exec.sandbox import owners, reaper
from sandbox_exec.sandbox.calls import Calls
from sandbox_exec.sandbox.handles import socket_pair
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.store.folders import COMPLETION, DISPATCH

MOST_AROUND_S = 60.0  # for what is before and after the agent: an engine under load, a large workspace
HUNG_S = 15.0  # without a beat; on a machine under load a beat can be seconds late
_START_S = 60.0  # for a host; it takes half a second, and what the user preloads
_CLOSE_S = 10.0  # for workers and hosts to end: a kill takes milliseconds, and copying what was in /out some more
# What the caller can import, agents can, and what they can import they see: so not what the shell happens to be in.
_HOST = "import sys; sys.path[:] = {path!r}; from sandbox_exec.backends import worker; worker.host({fd})"
_TRIES = 2  # at a worker: a host that was killed is noticed when it is asked for one


@dataclass(eq=False)
class _Host:
    process: subprocess.Popen[bytes]
    control: socket.socket
    lines: wire.Lines


@dataclass(eq=False)
class _Worker:
    channel: socket.socket
    pidfd: int
    name: str
    lines: wire.Lines
    heard_s: float
    keeper: int = -1  # a handle on the keeper of its sandbox
    ticket: WorkerTicket | None = None
    dispatch: TrialDispatch | None = None  # what it is to begin
    frozen: WorkerTicket | None = None
    reason: str = ""  # why we ended it


@dataclass(eq=False)
class _Adopted:
    """A worker of a coordinator that died. Nobody can speak to it; it exits once its attempt has ended."""

    pidfd: int
    ticket: WorkerTicket
    due_s: float | None  # when even an attempt that uses all of its time has ended


class LocalBackend:
    """See `WorkerBackend`. Workers are started when they are first needed.

    `limits`: what will be dispatched, and `graders` with their roles, so that the zygotes for their views are started
    once and shared. `docker`: that containers may be: they do not end with their worker, and so are removed when one is
    found dead. An adopted attempt cannot be frozen, and `stop` kills its worker: it ends as lost, not as cancelled.
    """

    def __init__(
        self,
        workers: int,
        *,
        limits: Iterable[Limits] = (),
        graders: Iterable[tuple[Limits, str]] = (),
        docker: bool = False,
        containment: str = "auto",
        preload: list[str] | None = None,
        hung_s: float = HUNG_S,
        clock: Clock | None = None,
    ) -> None:
        self._size, self._hung_s = workers, hung_s
        wanted = [*((one, AGENT_ROLE) for one in limits), *graders]
        views = {(tuple(map(str, one.readable)), tuple(map(str, one.hidden)), role) for one, role in wanted}
        self._settings = {
            "containment": str(containment),  # a member of an enum is refused on the wire
            "views": list(views),
            "preload": [entry.__name__, *(preload or [])],
            "docker": docker,
        }
        self._clock = clock or MonotonicClock()
        self._loop = Loop()
        self._hosts: list[_Host] = []  # the last one forks; those before it wait for workers of theirs
        self._workers: list[_Worker] = []
        self._dying: list[_Worker] = []  # ended themselves; their sandboxes not yet
        self._adopted: list[_Adopted] = []
        self._events: list[WorkerEvent] = []
        self._awake, self._wake = socket_pair()
        for sock in (self._awake, self._wake):
            sock.setblocking(False)
        self._loop.add(self._awake.fileno(), self._on_wake)
        self._calls = Calls(self._loop) if docker else None

    def capacity(self) -> int:
        return self._size

    def submit(self, dispatch: TrialDispatch, folder: Path) -> WorkerTicket:
        worker = next((w for w in self._workers if w.ticket is None and not w.reason), None) or self._start_worker()
        ticket = WorkerTicket(dispatch.slot.schedule_idx, dispatch.trial_id, dispatch.attempt, worker.name, folder)
        worker.ticket, worker.dispatch = ticket, dispatch
        worker.heard_s = self._clock.now_s()
        return ticket

    def begin(self, ticket: WorkerTicket) -> None:
        worker = self._worker(ticket)
        if worker is None or worker.dispatch is None:
            return  # it died in between, and is reported as lost
        worker.heard_s = self._clock.now_s()
        request = wire.dict_file({"folder": str(ticket.folder)}, worker.dispatch.model_dump_json().encode())
        worker.dispatch = None
        self._tell(worker, "run", fds=(request,))
        os.close(request)

    def poll(self, timeout_s: float | None) -> list[WorkerEvent]:
        if not self._events:
            self._loop.run_once(self._bounded(timeout_s))
            self._end_hung()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"w")

    def pause(self, tickets: Sequence[WorkerTicket], timeout_s: float) -> list[PauseAck]:
        for ticket in tickets:
            worker = self._worker(ticket)
            if worker is not None:
                worker.frozen = None
                self._tell(worker, "freeze")
        until_s = self._clock.now_s() + timeout_s
        while (moving := {t for t in tickets if self._is_moving(t)}) and (left_s := until_s - self._clock.now_s()) > 0:
            self._loop.run_once(left_s)
        return [PauseAck(ticket, ticket not in moving) for ticket in tickets]

    def resume(self, ticket: WorkerTicket) -> None:
        worker = self._worker(ticket)
        if worker is not None:
            self._tell(worker, "thaw")

    def stop(self, ticket: WorkerTicket, reason: str) -> None:
        worker = self._worker(ticket)
        if worker is not None:
            self._tell(worker, "stop")
        for adopted in self._adopted:
            if adopted.ticket == ticket:
                _kill(adopted.pidfd)

    def adopt(self, active: list[ActiveTrial]) -> list[Adoption]:
        sweep()
        return [self._adopt(trial) for trial in active]

    def close(self) -> None:
        for worker in self._workers:
            if worker.ticket is not None:
                self._tell(worker, "stop")
            self._close_channel(worker)  # which is the word to exit
        for adopted in self._adopted:
            _kill(adopted.pidfd)
        ending = [worker.pidfd for worker in self._workers] + [adopted.pidfd for adopted in self._adopted]
        _wait_for(ending, _CLOSE_S, then_kill=True)
        for adopted in self._adopted if self._calls is not None else ():  # their host is not ours to wait for
            with contextlib.suppress(Exception):  # the next sweep will
                reap_owner(adopted.ticket.worker)
        _wait_for([worker.keeper for worker in (*self._workers, *self._dying) if worker.keeper >= 0], _CLOSE_S)
        for fd in (*ending, *(worker.keeper for worker in (*self._workers, *self._dying))):
            if fd >= 0:
                os.close(fd)
        for host in self._hosts:
            host.control.close()
            _wait_for_process(host.process)
        self._hosts, self._workers, self._dying, self._adopted = [], [], [], []
        if self._calls is not None:
            self._calls.close()
        self._loop.close()
        self._awake.close()
        self._wake.close()
        sweep()
        step_up()

    # --- workers ---

    def _start_worker(self) -> _Worker:
        for left in reversed(range(_TRIES)):
            try:
                return self._fork_worker(self._host())
            except (OSError, SandboxUnavailable) as error:
                if self._hosts:
                    self._hosts[-1].control.close()  # it ends once its workers have
                if not left:
                    raise SandboxUnavailable(f"no worker can be had: {error}") from error
        raise AssertionError

    def _host(self) -> _Host:
        if self._hosts and self._hosts[-1].control.fileno() >= 0 and self._hosts[-1].process.poll() is None:
            return self._hosts[-1]
        make_room()
        ours, theirs = socket_pair()
        path = [os.path.abspath(entry) for entry in sys.path]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _HOST.format(path=path, fd=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # that of the caller may be read by a program
                start_new_session=True,
            )
        host = _Host(process, ours, wire.Lines(ours))
        self._hosts.append(host)
        ours.settimeout(_START_S)
        wire.send_dict(ours, self._settings)
        _hear(host, "hosting")
        return host

    def _fork_worker(self, host: _Host) -> _Worker:
        ours, theirs = socket_pair()
        try:
            with theirs:
                wire.send_dict(host.control, {}, (theirs.fileno(),))
            words, (pidfd,) = _hear(host, "forked")
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        worker = _Worker(ours, pidfd, owners.name_of(int(words)), wire.Lines(ours), self._clock.now_s())
        self._workers.append(worker)
        self._loop.add(ours.fileno(), lambda: self._read(worker))
        self._loop.add(pidfd, lambda: self._gone(worker))
        return worker

    def _tell(self, worker: _Worker, word: str, fds: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):  # it is dying, or hangs: its pidfd or its silence will say so
            wire.send_line(worker.channel, word, fds=fds)  # short: as a whole, or not at all

    def _read(self, worker: _Worker) -> None:
        try:
            is_open = worker.lines.read()
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        worker.heard_s = self._clock.now_s()
        while (line := worker.lines.next()) is not None:
            self._on_line(worker, *line)
        if not is_open:
            self._close_channel(worker)

    def _on_line(self, worker: _Worker, kind: str, words: str, fds: list[int]) -> None:
        ticket = worker.ticket
        if kind == "started" and fds:
            if worker.keeper >= 0:
                os.close(worker.keeper)
            (worker.keeper,) = fds
        if ticket is None:
            return
        match kind:
            case "started":
                self._events.append(Started(ticket))
            case "beat":
                phase, events, memory = words.split()
                self._events.append(Traced(ticket, phase, int(events), int(memory) if memory != "None" else None))
            case "frozen":
                worker.frozen = ticket
            case "finished":
                worker.ticket = None
                self._events.append(Finished(ticket))

    def _gone(self, worker: _Worker) -> None:
        """A worker has ended. Its attempt is lost once its sandbox has ended too, which it does by itself."""
        self._loop.remove(worker.pidfd)
        os.close(worker.pidfd)
        if worker.channel.fileno() >= 0:
            self._read(worker)  # what it said last
            self._close_channel(worker)
        self._workers.remove(worker)
        if worker.keeper >= 0:
            self._dying.append(worker)
            self._loop.add(worker.keeper, lambda: self._sandbox_gone(worker))
        elif self._calls is not None:
            self._dying.append(worker)
            self._calls.make(lambda: reap_owner(worker.name), lambda _, error: self._containers_gone(worker, error))
        elif worker.ticket is not None:
            self._events.append(_ended(worker.ticket, worker.reason))

    def _sandbox_gone(self, worker: _Worker) -> None:
        self._loop.remove(worker.keeper)
        os.close(worker.keeper)
        self._dying.remove(worker)
        sweep()
        if worker.ticket is not None:
            self._events.append(_ended(worker.ticket, worker.reason))

    def _containers_gone(self, worker: _Worker, error: BaseException | None) -> None:
        self._dying.remove(worker)
        if worker.ticket is not None:
            left = f"; its container may be left: {error}" if error is not None else ""
            self._events.append(_ended(worker.ticket, f"{worker.reason or 'the worker died'}{left}"))

    def _close_channel(self, worker: _Worker) -> None:
        if worker.channel.fileno() >= 0:
            self._loop.remove(worker.channel.fileno())
            worker.channel.close()
            worker.lines.close()

    def _end_hung(self) -> None:
        now_s = self._clock.now_s()
        for worker in self._workers:
            if worker.ticket and not worker.reason and now_s - worker.heard_s > self._hung_s:
                worker.reason = f"the worker hung: nothing heard for {self._hung_s:g} s"
                _kill(worker.pidfd)
        for adopted in self._adopted:
            if adopted.due_s is not None and now_s > adopted.due_s:
                _kill(adopted.pidfd)

    def _bounded(self, timeout_s: float | None) -> float | None:
        """How long to wait, so that who hangs is noticed in time."""
        due_s = [worker.heard_s + self._hung_s for worker in self._workers if worker.ticket and not worker.reason]
        due_s += [adopted.due_s for adopted in self._adopted if adopted.due_s is not None]
        if not due_s:
            return timeout_s
        left_s = max(0.0, min(due_s) - self._clock.now_s()) + 0.001  # right after it, and not right before
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _worker(self, ticket: WorkerTicket) -> _Worker | None:
        return next((worker for worker in self._workers if worker.ticket == ticket), None)

    def _is_moving(self, ticket: WorkerTicket) -> bool:
        worker = self._worker(ticket)
        if worker is not None:
            return worker.frozen != ticket
        return ticket in (one.ticket for one in self._dying) or ticket in (one.ticket for one in self._adopted)

    # --- after a crash ---

    def _adopt(self, trial: ActiveTrial) -> Adoption:
        if _has_completion(trial.folder):  # though its worker may live: it may have gone on to another
            return Adoption(trial, "finished")
        pidfd = owners.find(trial.worker)
        if pidfd is None:
            return Adoption(trial, "finished" if _has_completion(trial.folder) else "lost")
        ticket = WorkerTicket(trial.slot.schedule_idx, trial.trial_id, trial.attempt, trial.worker, trial.folder)
        longest_s = _longest_s(trial.folder)
        due_s = self._clock.now_s() + longest_s + self._hung_s if longest_s is not None else None
        adopted = _Adopted(pidfd, ticket, due_s)
        self._adopted.append(adopted)
        self._loop.add(pidfd, lambda: self._adopted_gone(adopted))
        return Adoption(trial, "alive", ticket)

    def _adopted_gone(self, adopted: _Adopted) -> None:
        self._adopted.remove(adopted)
        self._loop.remove(adopted.pidfd)
        os.close(adopted.pidfd)
        sweep()
        if self._calls is None:
            self._events.append(_ended(adopted.ticket, ""))
        else:
            owner = adopted.ticket.worker
            self._calls.make(lambda: reap_owner(owner), lambda *_: self._events.append(_ended(adopted.ticket, "")))

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(4096)


def _hear(host: _Host, due: str) -> tuple[str, list[int]]:
    try:
        while (line := host.lines.next()) is None:
            if not host.lines.read():
                raise SandboxUnavailable("the host of the workers ended; if it said why, that is above")
    except OSError as error:
        raise SandboxUnavailable(f"the host of the workers does not answer: {error}") from error
    kind, words, fds = line
    if kind != due:
        raise SandboxUnavailable(words)
    return words, fds


def _ended(ticket: WorkerTicket, reason: str) -> WorkerEvent:
    return Finished(ticket) if _has_completion(ticket.folder) else Lost(ticket, reason or "the worker died")


def _has_completion(folder: Path) -> bool:
    return (folder / COMPLETION).exists()


def _longest_s(folder: Path) -> float | None:
    """How long the attempt of that folder can take; None: for ever, or nobody knows."""
    with contextlib.suppress(OSError, ValueError):
        limits = TrialDispatch.model_validate_json((folder / DISPATCH).read_bytes()).limits
        return None if limits.timeout_s is None else limits.timeout_s + limits.grace_s + MOST_AROUND_S
    return None


def reap_owner(owner: str) -> None:
    """Remove the containers and folders of a worker that has ended. Raises, where the engine does not do its part."""
    from sandbox_exec.sandbox import engine  # the SDK takes half a second to load

    try:
        client = engine.connect()
    except SandboxUnavailable:
        reaper.reap_owner(None, owner)
        raise
    with contextlib.closing(client):
        reaped = reaper.reap_owner(client, owner)
    if reaped.failed:
        raise SandboxUnavailable("; ".join(f"{left.name}: {left.why}" for left in reaped.failed))


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _wait_for(pidfds: Iterable[int], timeout_s: float, *, then_kill: bool = False) -> bool:
    """Whether all of these processes have ended in time; the rest may be killed, and waited for."""
    clock, left = MonotonicClock(), set(pidfds)
    until_s = clock.now_s() + timeout_s
    poller = select.poll()
    for pidfd in left:
        poller.register(pidfd, select.POLLIN)
    while left:
        left_s = until_s - clock.now_s()
        if left_s < 0 and then_kill:
            for pidfd in left:
                _kill(pidfd)
        for pidfd, _ in poller.poll(None if left_s < 0 and then_kill else max(0.0, left_s) * 1000):
            left.discard(pidfd)
            poller.unregister(pidfd)
        if left and left_s < 0 and not then_kill:
            return False
    return True


def _wait_for_process(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
