"""A pool of worker processes on this machine, one attempt at a time each. See `worker` for the other side."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

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
from sandbox_exec.contracts import ActiveTrial, Limits, TrialDispatch
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import entry, wire
from sandbox_exec.sandbox.loop import Loop

HUNG_S = 15.0  # without a beat; on a machine under load a beat can be seconds late
_START_S = 60.0
# What the caller can import, agents can, and what they can import they see: so not what the shell happens to be in.
_HOST = "import sys; sys.path[:] = {path!r}; from sandbox_exec.backends import worker; worker.host({fd})"


@dataclass(eq=False)
class _Worker:
    channel: socket.socket
    pidfd: int
    pid: int
    name: str
    ticket: WorkerTicket | None = None
    heard_s: float = 0.0
    buffer: bytes = b""
    frozen: set[str] = field(default_factory=set)
    reason: str = ""  # why we ended it


class LocalBackend:
    """See `WorkerBackend`. Workers are started when they are first needed.

    `limits`: what will be dispatched, so that the zygotes for their views are started once and shared.
    """

    def __init__(
        self,
        workers: int,
        *,
        limits: Iterable[Limits] = (),
        containment: str = "auto",
        preload: list[str] | None = None,
        hung_s: float = HUNG_S,
        clock: Clock | None = None,
    ) -> None:
        self._size, self._hung_s = workers, hung_s
        views = {(tuple(map(str, one.readable)), tuple(map(str, one.hidden))) for one in limits}
        self._settings = {
            "containment": containment,
            "views": list(views),
            "preload": [entry.__name__, *(preload or [])],
        }
        self._clock = clock or MonotonicClock()
        self._loop = Loop()
        self._workers: list[_Worker] = []
        self._adopted: dict[int, tuple[WorkerTicket, int]] = {}  # pidfd -> attempt of a coordinator that died
        self._events: deque[WorkerEvent] = deque()
        self._host: subprocess.Popen[bytes] | None = None
        self._count = 0
        self._awake, self._wake = socket.socketpair()
        for sock in (self._awake, self._wake):
            sock.setblocking(False)
        self._loop.add(self._awake.fileno(), self._on_wake)

    def capacity(self) -> int:
        return self._size

    def submit(self, dispatch: TrialDispatch, folder: Path) -> WorkerTicket:
        worker = next((w for w in self._workers if w.ticket is None and not w.reason), None) or self._start_worker()
        ticket = WorkerTicket(dispatch.slot.schedule_idx, dispatch.trial_id, dispatch.attempt, worker.name, folder)
        worker.ticket = ticket
        worker.heard_s = self._clock.now_s()
        return ticket

    def begin(self, ticket: WorkerTicket) -> None:
        worker = self._worker(ticket)
        if worker is not None:  # else: it died in between, and is reported as lost
            worker.heard_s = self._clock.now_s()
            self._tell(worker, run=str(ticket.folder))

    def poll(self, timeout_s: float | None) -> list[WorkerEvent]:
        if not self._events:
            self._loop.run_once(self._bounded(timeout_s))
            self._end_hung()
        events, self._events = list(self._events), deque()
        return events

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"w")

    def pause(self, ticket: WorkerTicket, timeout_s: float) -> PauseAck:
        worker = self._worker(ticket)
        if worker is None:
            return PauseAck(ticket, frozen=True)  # it has ended: nothing of it moves
        label = f"{ticket.trial_id}-{ticket.attempt}"
        self._tell(worker, freeze=label)
        until_s = self._clock.now_s() + timeout_s
        while label not in worker.frozen and worker.ticket is ticket:
            left_s = until_s - self._clock.now_s()
            if left_s <= 0:
                return PauseAck(ticket, frozen=False)
            self._loop.run_once(left_s)
        worker.frozen.discard(label)
        return PauseAck(ticket, frozen=True)

    def resume(self, ticket: WorkerTicket) -> None:
        worker = self._worker(ticket)
        if worker is not None:
            self._tell(worker, thaw=True)

    def stop(self, ticket: WorkerTicket, reason: str) -> None:
        worker = self._worker(ticket)
        if worker is not None:
            self._tell(worker, stop=reason)
            return
        for pidfd, (adopted, _) in list(self._adopted.items()):
            if adopted == ticket:  # we cannot speak to it; its keeper ends with it
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def adopt(self, active: list[ActiveTrial]) -> list[Adoption]:
        return [self._adopt(trial) for trial in active]

    def close(self) -> None:
        pidfds = []
        for worker in list(self._workers):
            worker.reason = "closed"
            with contextlib.suppress(OSError):
                self._tell(worker, stop="closed")
            self._loop.remove(worker.channel.fileno())
            worker.channel.close()
            self._loop.remove(worker.pidfd)
            pidfds.append(worker.pidfd)
        for pidfd in (*pidfds, *self._adopted):
            _wait_for(pidfd)
            os.close(pidfd)
        self._workers, self._adopted = [], {}
        if self._host is not None:
            self._control.close()
            self._host.wait()
            self._host = None
        self._loop.close()
        self._awake.close()
        self._wake.close()

    # --- workers ---

    def _start_worker(self) -> _Worker:
        self._ensure_host()
        ours, theirs = socket.socketpair()
        with theirs:
            wire.send_dict(self._control, {}, (theirs.fileno(),))
        kind, words, fds = self._hear_host()
        if kind != "forked":
            raise SandboxUnavailable(f"the host of the workers said {kind} {words}")
        self._count += 1
        pid = int(words)
        worker = _Worker(ours, fds[0], pid, _worker_name(pid))
        self._workers.append(worker)
        self._loop.add(ours.fileno(), lambda: self._read(worker))
        self._loop.add(worker.pidfd, lambda: self._gone(worker))
        return worker

    def _ensure_host(self) -> None:
        if self._host is not None and self._host.poll() is None:
            return
        ours, theirs = socket.socketpair()
        path = [os.path.abspath(entry) for entry in sys.path]
        with theirs:
            self._host = subprocess.Popen(
                [sys.executable, "-P", "-c", _HOST.format(path=path, fd=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.settimeout(_START_S)
        self._control, self._lines = ours, wire.Lines(ours)
        wire.send_dict(ours, self._settings)
        kind, words, _ = self._hear_host()
        if kind != "hosting":
            raise SandboxUnavailable(f"the workers cannot be started: {words}")

    def _hear_host(self) -> tuple[str, str, list[int]]:
        try:
            while (line := self._lines.next()) is None:
                if not self._lines.read():
                    raise SandboxUnavailable("the host of the workers ended; its error is above")
        except OSError as error:
            raise SandboxUnavailable(f"the host of the workers does not answer: {error}") from error
        return line

    def _tell(self, worker: _Worker, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it is dying: its pidfd will say so
            worker.channel.sendall(json.dumps(message).encode() + b"\n")

    def _read(self, worker: _Worker) -> None:
        try:
            data = worker.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return self._loop.remove(worker.channel.fileno())
        worker.heard_s = self._clock.now_s()
        *lines, worker.buffer = (worker.buffer + data).split(b"\n")
        for line in lines:
            self._hear(worker, json.loads(line))
        return None

    def _hear(self, worker: _Worker, message: dict[str, Any]) -> None:
        ticket = worker.ticket
        match message:
            case {"frozen": label}:
                worker.frozen.add(label)
            case {"started": _} if ticket:
                self._events.append(Started(ticket))
            case {"beat": {"phase": phase, "events": events, "memory": memory_bytes}} if ticket:
                self._events.append(Traced(ticket, phase, events, memory_bytes))
            case {"finished": _} if ticket:
                worker.ticket = None
                self._events.append(Finished(ticket))

    def _gone(self, worker: _Worker) -> None:
        self._loop.remove(worker.pidfd)
        os.close(worker.pidfd)
        fd = worker.channel.fileno()
        with contextlib.suppress(KeyError, ValueError):
            self._read(worker)  # what it said last
            self._loop.remove(fd)
        worker.channel.close()
        self._workers.remove(worker)
        if worker.ticket is not None:
            self._events.append(_ended(worker.ticket, worker.reason or "the worker died"))

    def _end_hung(self) -> None:
        now_s = self._clock.now_s()
        for worker in self._workers:
            if worker.ticket and not worker.reason and now_s - worker.heard_s > self._hung_s:
                worker.reason = f"the worker hung: nothing heard for {self._hung_s:g} s"
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _bounded(self, timeout_s: float | None) -> float | None:
        busy = [worker.heard_s for worker in self._workers if worker.ticket]
        if not busy:
            return timeout_s
        due_s = max(0.0, min(busy) + self._hung_s - self._clock.now_s()) + 0.001
        return due_s if timeout_s is None else min(timeout_s, due_s)

    def _worker(self, ticket: WorkerTicket) -> _Worker | None:
        return next((worker for worker in self._workers if worker.ticket == ticket), None)

    # --- after a crash ---

    def _adopt(self, trial: ActiveTrial) -> Adoption:
        ticket = WorkerTicket(trial.slot.schedule_idx, trial.trial_id, trial.attempt, trial.worker, trial.folder)
        pid = _pid_of(trial.worker)
        if pid is None:
            return Adoption(trial, "finished" if _has_completion(trial.folder) else "lost")
        pidfd = os.pidfd_open(pid)
        self._adopted[pidfd] = (ticket, pid)
        self._loop.add(pidfd, lambda: self._adopted_gone(pidfd))
        return Adoption(trial, "alive", ticket)

    def _adopted_gone(self, pidfd: int) -> None:
        """An adopted worker is nobody's child and says nothing; it exits once its attempt has ended."""
        ticket, _ = self._adopted.pop(pidfd)
        self._loop.remove(pidfd)
        os.close(pidfd)
        self._events.append(_ended(ticket, "the worker died"))

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(4096)


def _ended(ticket: WorkerTicket, reason: str) -> WorkerEvent:
    return Finished(ticket) if _has_completion(ticket.folder) else Lost(ticket, reason)


def _has_completion(folder: Path) -> bool:
    return (folder / "completion.json").exists()


def _worker_name(pid: int) -> str:
    """The pid alone may be given again; with its time of birth it is not."""
    return f"{pid}-{psutil.Process(pid).create_time():.2f}"


def _pid_of(name: str) -> int | None:
    """The pid of the worker of that name, if it lives."""
    pid = int(name.partition("-")[0])
    with contextlib.suppress(psutil.Error):
        if _worker_name(pid) == name and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return pid
    return None


def _wait_for(pidfd: int) -> None:
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
