"""The processes of the local backend: a host that forks workers, and the workers.

Theory of operation
  coordinator   holds a socket to the host, and one to each worker
  host          a small process that has loaded the package once, started the zygotes, one for each view, and forks
                workers on request: a new one is there in milliseconds. When the coordinator is gone it ends;
                workers live on
  worker        runs one attempt at a time with a sandbox of its own. From the coordinator come JSON lines: a folder
                to run, freeze, thaw, stop. To it go: started, beat, frozen, finished. When the coordinator is gone
                the worker ends its attempt as usual, deadline included, leaves completion.json, and exits
  keeper        of the worker's sandbox: ends with the worker, whatever ends that

A worker is in a session of its own, so that Ctrl-C is the coordinator's alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from sandbox_exec.clock import MonotonicClock
from sandbox_exec.containment import View, build_view
from sandbox_exec.contracts import TrialCompletion, TrialDispatch
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import wire
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.process import boot_zygote
from sandbox_exec.sandbox.provider import Provider, chosen
from sandbox_exec.sandbox.zygote import ZygoteLink
from sandbox_exec.store.folders import write_atomic
from sandbox_exec.trial.executor import Executor

BEAT_S = 0.25  # how often a worker says that it is alive; the coordinator gives up after many of these


def host(control_fd: int) -> None:
    """Fork a worker for every socket that comes, until the coordinator is gone."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are reaped by the kernel; pidfds tell of their end
    first = wire.receive_dict(control)
    if first is None:
        return
    settings = first[0]
    try:
        containment = chosen(settings["containment"])
    except SandboxUnavailable as error:
        wire.send_line(control, "failed", error)
        return
    views = {build_view(map(Path, readable), map(Path, hidden)) for readable, hidden in settings["views"]}
    with contextlib.ExitStack() as stack:
        zygotes = {}
        for view in views:
            zygotes[view] = boot_zygote(
                containment, view, slots=1, preload=settings["preload"], cgroups=None, scratch=None
            )
            stack.callback(zygotes[view].close)
        wire.send_line(control, "hosting")
        while (message := wire.receive_dict(control)) is not None:
            _, fds = message
            sockets = {view: zygote.connect() for view, zygote in zygotes.items()}
            pid = os.fork()
            if pid == 0:
                control.close()
                links = [(view, ZygoteLink(sockets[view], zygotes[view].pid, zygotes[view].landlock)) for view in views]
                for zygote in zygotes.values():
                    zygote.abandon()
                _work(fds[0], settings["containment"], links)
            for sock in sockets.values():
                sock.close()
            os.close(fds[0])
            pidfd = os.pidfd_open(pid)
            wire.send_line(control, "forked", pid, fds=(pidfd,))
            os.close(pidfd)


def _work(fd: int, containment: str, links: list[tuple[View, ZygoteLink]]) -> NoReturn:
    try:
        os.setsid()
        Worker(socket.socket(fileno=fd), containment, links).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


class Worker:
    """One at a time."""

    def __init__(self, channel: socket.socket, containment: str, links: list[tuple[View, ZygoteLink]]) -> None:
        self._channel = channel
        self._loop = Loop()
        self._clock = MonotonicClock()
        self._provider = Provider(self._loop, chosen(containment), 1, [], links)
        self._executor: Executor | None = None
        self._folder = Path()
        self._buffer = b""
        self._orphan = False  # the coordinator is gone
        self._beat_at_s = 0.0
        self._loop.add(channel.fileno(), self._read)

    def run(self) -> None:
        while self._executor is not None or not self._orphan:
            self._loop.run_once(self._wait_s())
            self._on_time()
        self._provider.close()

    def _wait_s(self) -> float | None:
        if self._executor is None:
            return BEAT_S
        due_s = self._beat_at_s
        supervisor = self._executor.supervisor
        if supervisor is not None and supervisor.due_s is not None:
            due_s = min(due_s, supervisor.due_s)
        return max(0.0, due_s - self._clock.now_s())

    def _on_time(self) -> None:
        now_s = self._clock.now_s()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + BEAT_S
            executor = self._executor
            beat: dict[str, Any] = {}
            if executor is not None:
                memory = executor.supervisor.memory_bytes if executor.supervisor else None
                beat = {"phase": executor.phase, "events": executor.recorder.events, "memory": memory}
            self._say(beat=beat)
        supervisor = self._executor.supervisor if self._executor else None
        if supervisor is not None and supervisor.due_s is not None and supervisor.due_s <= now_s:
            supervisor.on_time()

    def _read(self) -> None:
        try:
            data = self._channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._orphan = True
            self._loop.remove(self._channel.fileno())
            if self._executor is not None and self._executor.supervisor is not None:
                self._executor.supervisor.thaw()  # nobody else will
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, message: dict[str, Any]) -> None:
        supervisor = self._executor.supervisor if self._executor else None
        match message:
            case {"run": folder}:
                self._start(Path(folder))
            case {"freeze": label}:
                if supervisor is not None:
                    supervisor.freeze()
                self._say(frozen=label)
            case {"thaw": _}:
                if supervisor is not None:
                    supervisor.thaw()
            case {"stop": _}:
                if self._executor is not None:
                    self._executor.stop()

    def _start(self, folder: Path) -> None:
        self._folder = folder
        dispatch = TrialDispatch.model_validate_json((folder / "dispatch.json").read_bytes())
        self._say(started=True)
        self._executor = Executor(dispatch, folder, self._provider, self._clock, self._done)
        if self._early is not None:
            self._done(self._early)

    _early: TrialCompletion | None = None  # a completion that came before the executor was ours

    def _done(self, completion: TrialCompletion) -> None:
        if self._executor is None:
            self._early = completion
            return
        self._early = None
        self._executor = None
        write_atomic(self._folder / "completion.json", completion.model_dump_json().encode())
        self._say(finished=True)

    def _say(self, **message: Any) -> None:
        if not self._orphan:
            with contextlib.suppress(OSError):  # it is gone: we notice when we read
                self._channel.sendall(json.dumps(message).encode() + b"\n")
