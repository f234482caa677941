"""The processes of the local backend: a host that forks workers, and the workers.

Theory of operation
  coordinator   holds a socket to the host, and one to each worker
  host          a small process that has loaded the package once, started the zygotes, one for each view, and forks
                workers on request: a new one is there in milliseconds. When the coordinator is gone, it waits until
                its workers are, clears away what they shared or left, and ends
  worker        runs one attempt at a time with a sandbox of its own. Both sides send lines of words (`guest.wire`).
                From the coordinator: run, with a file in memory that holds the attempt's folder and its dispatch;
                freeze, thaw, stop. To it: started, with a handle on the keeper; beat; frozen; finished. When the
                coordinator is gone the worker thaws its attempt, ends it as usual, deadline included, leaves
                completion.json, and exits
  keeper        of the worker's sandbox: ends with the worker, whatever ends that

Nothing here waits for the coordinator: one that does not read hears of things later, and of some beats never. All
are in sessions of their own, so that Ctrl-C is the coordinator's alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import NoReturn

from sandbox_exec.clock import MonotonicClock
from sandbox_exec.containment import View, build_view
from sandbox_exec.containment.cgroups import sweep
from sandbox_exec.containment.ladder import UIDS_PER_PROCESS
from sandbox_exec.contracts import TrialCompletion, TrialDispatch
from sandbox_exec.errors import SandboxExecError, StoreFull
from sandbox_exec.guest import wire
from sandbox_exec.sandbox import reaper
from sandbox_exec.sandbox.base import Places, Sandbox
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.process import boot_zygote
from sandbox_exec.sandbox.provider import Provider, SlotPlaces, chosen, take_uids
from sandbox_exec.sandbox.zygote import Zygote, ZygoteLink
from sandbox_exec.store.folders import COMPLETION, begin_folder, write_atomic
from sandbox_exec.trial.executor import Executor

BEAT_S = 0.25  # how often a busy worker says that it is alive; the coordinator gives up after many of these


def host(control_fd: int) -> None:
    """Fork a worker for every socket that comes, until the coordinator is gone."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are reaped by the kernel; pidfds tell of their end
    first = wire.receive_dict(control)
    if first is None:
        return
    settings, _ = first
    with contextlib.ExitStack() as stack:
        zygotes = dict[View, Zygote]()
        try:
            if settings["docker"]:
                importlib.import_module("sandbox_exec.sandbox.docker")  # its SDK takes half a second: once for all
            if settings["views"] or not settings["docker"]:
                containment = chosen(settings["containment"])
            for readable, hidden, role in settings["views"]:
                view = build_view(map(Path, readable), map(Path, hidden), None, role)
                if view in zygotes:
                    continue
                zygotes[view] = boot_zygote(
                    containment,
                    view,
                    slots=range(UIDS_PER_PROCESS),
                    preload=settings["preload"],
                    cgroups=None,
                    scratch=None,
                )
                stack.callback(zygotes[view].close)
        except (SandboxExecError, OSError) as error:
            wire.send_line(control, "failed", error)
            return
        wire.send_line(control, "hosting")
        ended, lives = os.pipe()  # each worker holds `lives`: the end of the pipe is that of the last of them
        while (message := wire.receive_dict(control)) is not None:
            (channel,) = message[1]
            try:
                links = {view: zygote.connect() for view, zygote in zygotes.items()}
            except OSError as error:  # with the next host come others; the workers that there are do without
                wire.send_line(control, "failed", f"a zygote of the host's has ended: {error}")
                break
            pid = os.fork()
            if pid == 0:
                control.close()
                os.close(ended)
                _work(channel, settings["containment"], zygotes, links)
            take_uids(2)  # those of this worker's agents; the next one is forked with the numbers after them
            for link in links.values():
                link.close()
            os.close(channel)
            _tell_of(control, pid)
        os.close(lives)
        os.read(ended, 1)
    sweep()
    _reap(settings["docker"])


def _reap(docker: bool) -> None:
    """The folders and containers of workers that were killed; what cannot be removed now, the next run removes."""
    reaper.reap_folders()
    if docker:
        from sandbox_exec.sandbox import engine

        quiet = contextlib.suppress(SandboxExecError, *engine.EngineErrors)
        with quiet, contextlib.closing(engine.connect()) as client:
            reaper.reap(client)


def _tell_of(control: socket.socket, pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        wire.send_line(control, "failed", "a worker ended as soon as it was there")
        return
    wire.send_line(control, "forked", pid, fds=(pidfd,))
    os.close(pidfd)


def _work(channel: int, containment: str, zygotes: dict[View, Zygote], links: dict[View, socket.socket]) -> NoReturn:
    try:
        os.setsid()
        shared = [(view, ZygoteLink(links[view], zygote.pid, zygote.landlock)) for view, zygote in zygotes.items()]
        for zygote in zygotes.values():
            zygote.abandon()
        Worker(socket.socket(fileno=channel), containment, shared).run()
    except StoreFull:
        os._exit(1)  # no completion: the coordinator sees why, and says so
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


class Worker:
    """One attempt at a time, until the coordinator is gone."""

    def __init__(self, channel: socket.socket, containment: str, links: list[tuple[View, ZygoteLink]]) -> None:
        self._channel = channel
        self._loop = Loop()
        self._clock = MonotonicClock()
        self._containment, self._links = containment, links
        self._places: dict[str, Places] = {}  # by kind, made when first wanted
        self._executor: Executor | None = None
        self._lines = wire.Lines(channel)
        self._unsaid: deque[tuple[str, tuple[object, ...], tuple[int, ...]]] = deque()
        self._orphan = False  # the coordinator is gone
        self._beat_at_s = 0.0
        channel.setblocking(False)
        self._loop.add(channel.fileno(), self._read)

    def run(self) -> None:
        while self._executor is not None or not self._orphan:
            self._loop.run_once(self._wait_s())
            self._on_time()
        for places in self._places.values():
            places.close()

    # --- time ---

    def _wait_s(self) -> float | None:
        if self._executor is None and not self._unsaid:
            return None
        due_s = self._executor.due_s if self._executor is not None else None
        next_s = self._beat_at_s if due_s is None else min(due_s, self._beat_at_s)
        return max(0.0, next_s - self._clock.now_s())

    def _on_time(self) -> None:
        now_s = self._clock.now_s()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + BEAT_S
            self._beat()
        executor = self._executor
        if executor is not None and executor.due_s is not None and executor.due_s <= now_s:
            executor.on_time()

    def _beat(self) -> None:
        self._flush()
        executor = self._executor
        if executor is not None and not self._unsaid:
            sandbox = executor.sandbox
            self._say("beat", executor.phase, executor.recorder.events, sandbox and sandbox.peak_memory_bytes())

    # --- what the coordinator says ---

    def _read(self) -> None:
        try:
            alive = self._lines.read()
        except BlockingIOError:
            return
        except OSError:
            alive = False
        while (line := self._lines.next()) is not None:
            self._obey(*line)
        if not alive:
            self._on_orphaned()

    def _on_orphaned(self) -> None:
        self._orphan = True
        self._unsaid.clear()
        self._loop.remove(self._channel.fileno())
        if self._executor is not None:
            self._executor.thaw()  # nobody is left to do it

    def _obey(self, kind: str, words: str, fds: list[int]) -> None:
        executor = self._executor
        match kind:
            case "run":
                self._start(*fds)
            case "freeze":
                if executor is not None:
                    executor.freeze()
                self._say("frozen")
            case "thaw" if executor is not None:
                executor.thaw()
            case "stop" if executor is not None:
                executor.stop()

    def _start(self, request: int) -> None:
        content, data = wire.read_dict_file(request)
        os.close(request)
        folder = Path(content["folder"])
        begin_folder(folder, data)
        dispatch = TrialDispatch.model_validate_json(data)
        self._beat_at_s = self._clock.now_s() + BEAT_S
        self._executor = Executor(dispatch, folder, self._places_for, self._clock, self._started, self._done)
        self._executor.start()

    def _places_for(self, kind: str) -> Places:
        if kind not in self._places:
            if kind == "docker":
                from sandbox_exec.sandbox.docker import DockerSandboxes  # the SDK takes half a second to load

                self._places[kind] = DockerSandboxes(self._loop, next(iter(take_uids(1))))
            else:
                provider = Provider(self._loop, chosen(self._containment), 2, [], self._links)
                self._places[kind] = SlotPlaces(provider)
        return self._places[kind]

    # --- what it hears ---

    def _started(self, sandbox: Sandbox) -> None:
        pidfd = sandbox.keeper_pidfd
        self._say("started", fds=(os.dup(pidfd),) if pidfd >= 0 else ())

    def _done(self, completion: TrialCompletion) -> None:
        assert self._executor is not None
        folder, self._executor = self._executor.folder, None
        write_atomic(folder / COMPLETION, completion.model_dump_json().encode())
        self._say("finished")

    def _say(self, kind: str, *words: object, fds: tuple[int, ...] = ()) -> None:
        self._unsaid.append((kind, words, fds))
        self._flush()

    def _flush(self) -> None:
        while self._unsaid:
            kind, words, fds = self._unsaid[0]
            try:
                wire.send_line(self._channel, kind, *words, fds=fds)  # short: as a whole, or not at all
            except BlockingIOError:
                return
            except OSError:
                pass  # it is gone: we notice when we read
            self._unsaid.popleft()
            for fd in fds:
                os.close(fd)
