"""The process sandbox: a keeper and the agents it forks, held by a rung of the ladder.

Our side of what `guest.keeper` describes. A sandbox is one slot: it is lent to one trial after the other while
they leave it as they found it, and is given up (`spent`) when one did not, when the keeper dies, or when the next
trial wants another `Shape`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import psutil

from sandbox_exec.containment import Cgroups, Containment, PoolCgroups, SlotCgroup, View
from sandbox_exec.containment.view import account_files
from sandbox_exec.contracts import Isolation, Limits, Rung
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import keeper, wire
from sandbox_exec.guest.view import AGENT, AGENT_ROLE, PIPES, remove_scratch
from sandbox_exec.sandbox import owners
from sandbox_exec.sandbox.base import Ceiling, End, Launch, Listener, Stream
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.scratch import fill, give, is_full, open_folder, read_file, stage
from sandbox_exec.sandbox.zygote import Zygote, ZygoteLink

_DRAIN = 64  # reads of a pipe after the end; more than it holds, unless a survivor still writes
_TRACE_PIPE_BYTES = 1 << 20  # fewer turns between guest and supervisor; refused to users with many pipes
_RLIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "file_size": resource.RLIMIT_FSIZE,
    "address_space": resource.RLIMIT_AS,
}


@dataclass(frozen=True)
class Shape:
    """What is fixed when a keeper starts; trials of another shape need another keeper."""

    timeout_s: float | None
    disk: int
    files: int
    network: str
    memory: int | None  # watched by the keeper, where no cgroup does
    pids: int | None
    agent: Path | None = None  # the unpacked artifact
    role: str = AGENT_ROLE

    @classmethod
    def of(cls, limits: Limits, cgroups: Cgroups, agent: Path | None = None, role: str = AGENT_ROLE) -> Shape:
        return cls(
            timeout_s=limits.timeout_s,
            disk=limits.disk,
            files=limits.files,
            network=limits.network,
            memory=None if "memory" in cgroups.homes else limits.memory,
            pids=None if "pids" in cgroups.homes else limits.pids,
            agent=agent,
            role=role,
        )


def boot_zygote(
    containment: Containment,
    view: View,
    *,
    slots: range,
    preload: list[str],
    cgroups: PoolCgroups | None,
    scratch: Path | None,
) -> Zygote:
    uids = {containment.agent_uid(slot) for slot in slots}
    boot = {
        "mode": containment.mode,
        "user_namespace": containment.rung is Rung.USER_NAMESPACES,
        "view": view.for_guest(account_files(uids, containment.agent_gid(slots[0]))),
        "preload": preload,
        "cgroups": [cgroups.name] * len(cgroups.parents) if cgroups else [],
        "scratch": str(scratch) if scratch else None,
        "python": {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "prefix": sys.prefix,
            "exec_prefix": sys.exec_prefix,
        },
        "env": base_environment() | (places("", view.role) if containment.rung.namespaced else {}),
    }
    return Zygote(boot, tuple(cgroups.parents.values()) if cgroups else ())


def base_environment() -> dict[str, str]:
    """All that an agent's environment has, but for the places of its sandbox and what its caller names."""
    own = [os.path.dirname(sys.executable), os.path.join(sys.base_prefix, "bin")]
    system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return {"PATH": ":".join(dict.fromkeys([*own, *system])), "LANG": "C.UTF-8"}


def places(base: str, role: str = AGENT_ROLE) -> dict[str, str]:
    """The contract's names for the places of a sandbox; `base` is empty where they are at the root."""
    names = {
        "HOME": f"{base}/tmp",
        "SANDBOX_EXEC_IN": f"{base}/in",
        "SANDBOX_EXEC_WORKSPACE": f"{base}/workspace",
        "SANDBOX_EXEC_OUT": f"{base}/out",
        "SANDBOX_EXEC_TRACE": f"{base}/trace" if base else "/run/trace",
    }
    if role == AGENT_ROLE:
        return names | {"SANDBOX_EXEC_AGENT": f"{base}{AGENT}"}
    return names | {
        # Not /tmp: an interpreter loads what is in its user's home, and in `same` an agent has been in /tmp.
        "HOME": f"{base}/grade",
        "SANDBOX_EXEC_GRADING": f"{base}/grading",
        "SANDBOX_EXEC_GRADE": f"{base}/grade/grade.json",
    }


class ProcessSandbox:
    """See `Sandbox`. `on_ready` is called once its keeper is there, `on_gone` when it is no more."""

    steps_s: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        loop: Loop,
        zygote: ZygoteLink,
        containment: Containment,
        shape: Shape,
        *,
        slot: int,
        cgroup: SlotCgroup | None,
        scratch: Path | None,
        on_ready: Callable[[ProcessSandbox], None],
        on_gone: Callable[[ProcessSandbox], None],
        beside: ProcessSandbox | None = None,
    ) -> None:
        """`beside`: whose network it shares."""
        self.shape = shape
        self.zygote = zygote
        self.spent = False
        self.ready = self.was_ready = False
        self.keeper_pid = 0
        self._loop, self._containment, self._cgroup = loop, containment, cgroup
        self._on_ready, self._on_gone = on_ready, on_gone
        self._uid, self._gid = containment.agent_uid(slot), containment.agent_gid(slot)
        self._folder = scratch
        self._listener: Listener | None = None
        self._limits = Limits()
        self._isolations: dict[tuple[object, ...], Isolation] = {}
        self._fault = ""
        self._pidfd = self._scratch = -1
        self._pipes: dict[int, Stream] = {}
        self._cpu_before = self._cpu_s = 0.0
        self._peak = 0
        self._paused = False
        self._killing = False
        fds = cgroup.open_members() if cgroup and containment.rung is Rung.CGROUP else {}
        if beside is not None:
            fds["network"] = os.open(f"/proc/{beside.keeper_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        watched = {"memory": shape.memory, "pids": shape.pids}
        request: dict[str, Any] = {
            "uid": self._uid,
            "gid": self._gid,
            "network": shape.network,
            "disk": shape.disk,
            "files": shape.files,
            "watched": watched if any(value is not None for value in watched.values()) else None,
            "scratch": str(scratch) if scratch else None,
            "env": _places_and_deadline(scratch, shape),
        }
        try:
            self._channel = zygote.fork_keeper(request, fds)
        finally:
            for fd in fds.values():
                os.close(fd)
        self._lines = wire.Lines(self._channel)
        loop.add(self._channel.fileno(), self._read_channel)

    @property
    def isolation(self) -> Isolation:
        key = (self._limits.memory, self._limits.pids, self._limits.cpus, self._limits.network)
        if key not in self._isolations:
            landlock = self.zygote.landlock
            self._isolations[key] = self._containment.isolation(self._limits, self._uid, landlock)
        return self._isolations[key]

    @property
    def keeper_pidfd(self) -> int:
        """A handle on the keeper, with whose end nothing is left in here; -1 where there is none."""
        return self._pidfd

    @property
    def failure(self) -> str:
        """What of ours went wrong in it, if something did."""
        return self._fault

    # --- what the supervisor asks for ---

    def start(self, launch: Launch, listener: Listener) -> None:
        self._listener, self._limits = listener, launch.limits
        self._peak, self._paused, self._killing = 0, False, False
        try:
            for path, data in launch.staged.items():
                stage(self._scratch, path, data)
            if launch.workspace is not None:
                fill(self._scratch, "workspace", launch.workspace)
                self.give("workspace")
            if launch.assets is not None:
                fill(self._scratch, "grading", launch.assets)
                self.give("grading")
            self.spent = self.spent or bool(launch.staged) or launch.workspace is not None
        except OSError as error:  # such as an input that is larger than the trial's disk
            self._refuse(setup=f"the sandbox cannot be filled: {error}")
            return
        try:
            joins = self._cgroup.prepare(launch.limits) if self._cgroup else []
        except OSError as error:
            self._refuse(fault=f"the ceilings cannot be set: {error}")
            return
        if self._cgroup:
            self._loop.add(self._cgroup.events.fileno(), self._read_events)
            self._events = self._cgroup.events.fileno()
            if self._cgroup.is_silent:
                self._loop.add_look(self._read_events)
        request = _request_file(launch, self._argv(launch))
        try:
            wire.send_bytes(self._channel, keeper.START, (request, *joins))
        except OSError as error:  # the keeper is dying: its end is on its way to us
            self._fault = f"the keeper does not answer: {error}"
        finally:
            os.close(request)
        listener.on_started()

    def _argv(self, launch: Launch) -> tuple[str, ...]:
        """Where nothing can be mounted, the places are not at the root: the artifact is where it was unpacked."""
        if self._folder is None:
            return launch.argv
        words = []
        for word in launch.argv:
            if launch.agent is not None and word.startswith(f"{AGENT}/"):
                word = str(launch.agent / word.removeprefix(f"{AGENT}/"))
            elif launch.role != AGENT_ROLE and word.startswith("/grading/"):
                word = str(self._folder) + word
            words.append(word)
        return tuple(words)

    def _refuse(self, *, setup: str = "", fault: str = "") -> None:
        """Nothing has been started, and nothing will be in this sandbox."""
        listener, self._listener, self.spent = self._listener, None, True
        if listener:
            listener.on_ended(End(proof="no process was started", setup=setup, fault=fault))

    def terminate(self) -> None:
        self._tell(keeper.TERM)

    def kill(self) -> None:
        self._killing = True
        if self._cgroup and self._paused:
            self._cgroup.freeze(False)
        if self._containment.rung is Rung.PROCESS_GROUP:
            self._kill_tree()
        self._tell(keeper.KILL)

    def kill_hard(self) -> None:
        self._fault = "" if self._containment.rung.namespaced else "the keeper did not answer"
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif self.keeper_pid:
            os.kill(self.keeper_pid, signal.SIGKILL)

    def freeze(self) -> None:
        self._paused = True
        self.spent = True  # its clock has been set: not for another trial
        if not (self._cgroup and self._cgroup.freeze(True)):
            self._tell(keeper.FREEZE)

    def thaw(self, paused_s: float) -> None:
        fd = os.open("paused", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._scratch)
        os.write(fd, f"{int(paused_s * 1e9):<20}".encode())
        os.close(fd)
        self._paused = False
        if not (self._cgroup and self._cgroup.freeze(False)):
            self._tell(keeper.THAW)

    def open_folder(self, name: str) -> int:
        return open_folder(self._scratch, name)

    def read_file(self, path: str, limit: int) -> bytes | None:
        return read_file(self._scratch, path, limit)

    def give(self, name: str) -> None:
        give(self._scratch, name, self._uid, self._gid)

    def close(self) -> None:
        """Closing the channel is the word: the keeper kills all and ends. `on_gone` follows."""
        if self._channel.fileno() >= 0:
            self._loop.remove(self._channel.fileno())
            self._channel.close()
        if self._pidfd < 0:
            self._gone()

    def abandon(self) -> None:
        """In a forked child: close what was inherited, and nothing else."""
        for fd in (self._pidfd, self._scratch, *self._pipes):
            if fd >= 0:
                os.close(fd)
        if self._channel.fileno() >= 0:
            os.close(self._channel.detach())

    # --- what the keeper says ---

    def _tell(self, command: bytes) -> None:
        with contextlib.suppress(OSError):  # gone: its end is on its way to us
            self._channel.send(command)

    def _read_channel(self) -> None:
        try:
            alive = self._lines.read()
        except OSError:
            alive = False
        while (line := self._lines.next()) is not None:
            self._on_line(*line)
        if not alive and self._channel.fileno() >= 0:
            self.close()

    def _on_line(self, kind: str, words: str, fds: list[int]) -> None:
        match kind:
            case "forked":
                self.keeper_pid = int(words)
                if fds:
                    self._pidfd = fds[0]
                    self._loop.add(self._pidfd, self._gone)
            case "kept":
                self._take(fds)
            case "ended":
                self._on_ended(words)
            case "exceeded":
                what, peak = words.split()
                self._peak = max(self._peak, int(peak))
                if self._listener:
                    self._listener.on_exceeded(cast(Ceiling, what))
            case "usage":
                cpu_s, peak = words.split()
                self._cpu_s, self._peak = float(cpu_s), max(self._peak, int(peak))
            case "failed":
                self._fault = words

    def _take(self, fds: list[int]) -> None:
        self._scratch, *reads = fds
        self._pipes = dict(zip(reads, cast(tuple[Stream, ...], PIPES), strict=True))
        for fd, stream in self._pipes.items():
            if stream == "trace" and hasattr(fcntl, "F_SETPIPE_SZ"):
                with contextlib.suppress(OSError):
                    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _TRACE_PIPE_BYTES)
            self._loop.add(fd, functools.partial(self._read_pipe, fd, stream))
        self._sizes = self._pipe_sizes()
        self.ready = self.was_ready = True
        self._on_ready(self)

    def _pipe_sizes(self) -> list[int]:
        if not hasattr(fcntl, "F_GETPIPE_SZ"):
            return []
        return [fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) for fd in self._pipes]

    def _read_pipe(self, fd: int, stream: Stream) -> int:
        try:
            count = os.readv(fd, [self._loop.buffer])
        except BlockingIOError:
            return 0
        if count == 0:  # the keeper is gone, and with it the last writer
            self._loop.remove(fd)
            os.close(fd)
            del self._pipes[fd]
        elif self._listener:
            self._listener.on_output(stream, memoryview(self._loop.buffer)[:count])
        return count

    def _drain(self) -> None:
        for fd, stream in list(self._pipes.items()):
            for _ in range(_DRAIN):
                if not self._read_pipe(fd, stream):
                    break

    def _read_events(self) -> None:
        assert self._cgroup is not None
        what = self._cgroup.exceeded()
        if what and self._listener:
            self._listener.on_exceeded(cast(Ceiling, what))

    def _on_ended(self, words: str) -> None:
        status, left, spent, cpu_s, peak, swept, sweep_s, *rest = words.split(" ", 7)
        code = None if status == "None" else int(status)
        self.spent = self.spent or spent == "1" or self._sizes != self._pipe_sizes()
        cpu, self._cpu_before = float(cpu_s) - self._cpu_before, float(cpu_s)
        self._peak = max(self._peak, int(peak))
        self._finish(
            End(
                exit_code=code if code is not None and code >= 0 else None,
                signal=-code if code is not None and code < 0 else None,
                setup=rest[0] if rest else "",
                left=int(left),
                swept=int(swept),
                sweep_s=float(sweep_s),
                proof=self._proof(int(left)),
                cpu_s=cpu,
                peak_memory_bytes=self.peak_memory_bytes(),
                disk_full=self._is_full(),
            )
        )

    def _proof(self, left: int) -> str:
        if left:
            return f"none: {left} processes could not be killed"
        match self._containment.rung:
            case Rung.ROOT_NAMESPACES | Rung.USER_NAMESPACES:
                return "init of the pid namespace killed all in it and reaped its last child"
            case Rung.CGROUP:
                return "the cgroup is empty and the keeper has no child left"
            case Rung.SUBREAPER:
                return "the keeper, a subreaper, has no child left"
        return "the process group is empty; what left it was not seen"

    def peak_memory_bytes(self) -> int | None:
        peak = self._cgroup.peak_memory_bytes() if self._cgroup else None
        return peak if peak is not None else self._peak or None

    def _is_full(self) -> bool:
        return self._containment.rung.namespaced and is_full(self._scratch)

    def _finish(self, end: End) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self._listener = listener
        if self._cgroup:
            if self._paused:
                self._cgroup.freeze(False)  # the slot's next trial joins the same cgroup
            self._loop.remove(self._events)
            self._loop.remove_look(self._read_events)
            self._read_events()  # a child killed for its memory, while the agent went on to exit 0
        self._drain()
        self._listener = None
        listener.on_ended(end)

    def _gone(self) -> None:
        """The keeper has ended: by our word, or by itself, and then so has its trial."""
        if self._pidfd >= 0:
            self._loop.remove(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._channel.fileno() >= 0:
            self._read_channel()  # what it said last
            if self._channel.fileno() >= 0:
                self._loop.remove(self._channel.fileno())
                self._channel.close()
        self.spent, self.ready = True, False
        if self._listener:
            self._finish(self._lost())
        for fd in list(self._pipes):
            self._loop.remove(fd)
            os.close(fd)
        self._pipes = {}
        self._lines.close()
        if self._scratch >= 0:
            os.close(self._scratch)
            self._scratch = -1
        if self._folder:
            remove_scratch(str(self._folder))
        self._on_gone(self)

    def _lost(self) -> End:
        fault = self._fault or "the keeper ended before its trial did"
        if self._containment.rung.namespaced:
            proof = "init of the pid namespace is gone, and the kernel killed all in it first"
            return End(fault="" if self._killing else fault, proof=proof, peak_memory_bytes=self.peak_memory_bytes())
        left = self._kill_orphans()
        return End(fault=fault, left=left, proof="none: the keeper was lost; its orphans were looked for and killed")

    def _kill_tree(self) -> None:
        """Where the keeper can see no more than its process group: what is below it in the tree of processes."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.keeper_pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _kill_orphans(self) -> int:
        """Of a keeper that an agent killed: its orphans are the zygote's children, or were last seen below it."""
        if self._cgroup and self._containment.rung is Rung.CGROUP and self._cgroup.freezer:
            with contextlib.suppress(OSError):
                (self._cgroup.freezer / "cgroup.kill").write_text("1")
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(self.zygote.pid).children(recursive=True)
            orphans = [process for process in below if process.name() not in ("sx-keeper", "sx-zygote")]
            for process in orphans:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            return len(psutil.wait_procs(orphans, timeout=1)[1])
        return 0


def _places_and_deadline(scratch: Path | None, shape: Shape) -> dict[str, str]:
    """What of the environment is the same for all trials of a slot. Nothing of one trial's own is in it."""
    env = places(str(scratch), shape.role) if scratch else {}
    if scratch and shape.agent is not None:
        env["SANDBOX_EXEC_AGENT"] = str(shape.agent)
    if shape.timeout_s is not None:
        env["SANDBOX_EXEC_DEADLINE_S"] = f"{shape.timeout_s:g}"
    return env


def _request_file(launch: Launch, argv: tuple[str, ...]) -> int:
    """The request as a file in memory: only the agent's process reads it."""
    limits = launch.limits
    rlimits = [(kind, getattr(limits, name)) for name, kind in _RLIMITS.items() if getattr(limits, name) is not None]
    request = {
        "argv": argv,
        "env": launch.env,
        "rlimits": rlimits,
        "seed": launch.seed,
        "deadline_s": limits.timeout_s,
        "trusted_results": launch.trusted_results,
    }
    return wire.dict_file(request, launch.payload)


class _Probe:
    """A listener that only wants to know how it ended."""

    end: End | None = None
    answer = b""

    def on_output(self, stream: Stream, data: memoryview) -> None:
        if stream == "result":
            self.answer += bytes(data)

    def on_started(self) -> None: ...
    def on_exceeded(self, what: Ceiling) -> None: ...

    def on_ended(self, end: End) -> None:
        self.end = end


def probe(containment: Containment) -> None:
    """Run one trial in it, for real. Raises SandboxUnavailable with what went wrong."""
    from sandbox_exec.containment import build_view

    loop, listener = Loop(), _Probe()
    limits = Limits(timeout_s=_PROBE_S)
    gone: list[ProcessSandbox] = []
    view = build_view((), ())
    with scratch_base(containment) as base:
        zygote = boot_zygote(containment, view, slots=range(1), preload=[], cgroups=None, scratch=base)
        try:
            shape = Shape.of(limits, Cgroups())
            sandbox = ProcessSandbox(
                loop, zygote, containment, shape, slot=0, cgroup=None, scratch=base / "0" if base else None,
                on_ready=lambda _: None, on_gone=gone.append,
            )  # fmt: skip
            until_s = time.monotonic() + _PROBE_S
            while not sandbox.ready and not gone and time.monotonic() < until_s:
                loop.run_once(_PROBE_S)
            if sandbox.ready:
                launch = Launch(limits, payload=pickle.dumps((len, ("probe",), {})))
                sandbox.start(launch, listener)
                while listener.end is None and not gone and time.monotonic() < until_s:
                    loop.run_once(_PROBE_S)
            if not gone:
                if listener.end is None:
                    sandbox.kill_hard()
                sandbox.close()
            while not gone:
                loop.run_once(_PROBE_S)
            failure = sandbox.failure or (listener.end and (listener.end.setup or listener.end.fault))
            if failure or listener.answer != b'{"value":5}\n':
                raise SandboxUnavailable(failure or f"a first trial answered {listener.answer!r}")
        finally:
            zygote.close()
            loop.close()


_PROBE_S = 10.0


@contextlib.contextmanager
def scratch_base(containment: Containment) -> Any:
    """A folder for the scratch folders of the rungs that have no mounts of their own; None on the others."""
    if containment.rung.namespaced:
        yield None
        return
    base = owners.make_folder(owners.PROCESS_SCRATCH)
    base.chmod(0o755)
    try:
        yield base
    finally:
        remove_scratch(str(base))
