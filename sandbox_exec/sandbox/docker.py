"""The Docker sandbox: one container for one trial, on the engine of this machine.

Theory of operation
  engine        makes the container, and runs it with all capabilities dropped, no new privileges, its default filter
                of system calls, no network, ceilings of its own, and an init that reaps
  container     a pid namespace: when its first process ends, the kernel has killed all others in it
  worker        us. Holds a folder, the scratch, and mounts what is in it into the container:
                    in/            task.json, read-only                           -> /in
                    box/workspace  \\ one tmpfs of the trial's size and number of  -> /workspace
                    box/out        / files, mounted here, if we may               -> /out
                    trace          a FIFO that we hold open at both ends          -> /run/trace
                stdout and stderr come over a connection that is attached before the start. Nothing of a trial is in the
                engine's logs

Who tells us what. The engine's `wait` says that the container has ended, and how. A handle on its first process (a
pidfd) says the same, sooner, and also when the engine is gone or hangs: it is the proof. Its cgroups, read while it
runs and once more at its end, say what was exceeded and used. Each call of the engine blocks, and so has a thread.

Limits of the limits. Where we may not mount (an ordinary user), /workspace and /out are plain folders: their size is
looked at twice a second, and no file can be larger than all may be together. So it is with the container's root, where
that can be written and the image lets the agent's user do so. `Isolation.disk` says which.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import signal
import socket
import stat
import struct
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import docker.errors
import docker.types

from sandbox_exec.containment.ladder import nobodys_uid
from sandbox_exec.contracts import ContainerSpec, Isolation, Limits
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import kernel
from sandbox_exec.guest.view import AGENT_ROLE, GRADER_ROLE, TRACE, home_of
from sandbox_exec.sandbox import engine, owners
from sandbox_exec.sandbox.base import End, Launch, Listener, Sandbox, Stream
from sandbox_exec.sandbox.calls import Calls
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.process import places
from sandbox_exec.sandbox.reaper import LABEL, remove_folder
from sandbox_exec.sandbox.scratch import fill, give, is_full, open_folder, read_file, stage

_AFTER_DEADLINE_S: Final = 60.0  # what staging, the grace and a kill take at most; then nobody wants the container
_ROOT_LOOK_S: Final = 2.0  # between two looks at what was written to the container's root: the engine has to walk it
_BOX_LOOK_S: Final = 0.5  # and between those at plain folders
_EOF_S: Final = 2.0  # for the rest of the output, once the container has ended
_GONE_S: Final = 5.0  # for the engine to say how a container ended that has; it takes some milliseconds
_SHM_BYTES: Final = 64 << 20  # the engine's own default
_NOT_RUN: Final = (126, 127)  # what init exits with if it cannot start the program; and any program, if it likes
_NOT_RUN_BY_PODMAN: Final = (1, *_NOT_RUN)  # catatonit's, or of another init
_FRAME: Final = struct.Struct(">BxxxI")  # before each piece of output: which stream, how long
_STREAM: Final[dict[int, Stream]] = {1: "stdout", 2: "stderr"}
_CHUNK: Final = 1 << 16
_PIPE_BYTES: Final = 1 << 20
_F_SETPIPE_SZ: Final = 1031
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # the engine's own
_PROOF: Final = "init of the container's pid namespace is gone, and the kernel killed all in it first"
_UNPROVEN: Final = "none: the engine is gone, and its container is not ours to kill; `sandbox-exec reap` will"
_SAID: Final = "the engine says that the container has ended, and with it its pid namespace"


@dataclass
class _Made:
    """What was made for a trial, and must be taken away."""

    folder: Path
    mounted: bool = False
    box: int = -1
    trace: int = -1
    container: str = ""
    by_podman: bool = False
    pid: int = 0  # of its first process, if that is there before the start
    output: socket.socket | None = None
    image_id: str | None = None
    user: tuple[int | None, int | None] = (None, None)
    committed: str = ""  # an image of the agent's file system
    env: dict[str, str | None] = field(default_factory=dict)  # in place of what the image says
    shared: _Made | None = None  # what was made for the agent, whose /workspace and /out these are too
    steps_s: dict[str, float] = field(default_factory=dict)

    def give(self, name: str) -> None:
        """Make a folder of the box the agent's own."""
        uid, gid = self.user
        if uid is not None and os.geteuid() == 0:
            give(self.box, name, uid, gid if gid is not None else uid)
        elif uid is None or uid not in (0, os.geteuid()):
            _open_to_all(self.folder / "box" / name)  # who that user is, only the image knows


@dataclass
class _Group:
    """The container's cgroups, as far as we see them."""

    peak: Path | None = None
    oom: Path | None = None
    pids: Path | None = None
    cpu: Path | None = None
    procs: Path | None = None
    thaw: tuple[Path, str] | None = None  # what to write where, so that what is frozen goes on


class DockerSandboxes:
    """Where containers come from: one engine, for one trial after the other."""

    def __init__(self, loop: Loop, slot: int = 0) -> None:
        self._loop, self._slot = loop, slot
        self._calls = Calls(loop)
        self._owner = owners.name_of(os.getpid())
        self._client: Any = None
        self._info: dict[str, Any] = {}
        self._images: dict[str, dict[str, Any]] = {}

    def acquire(self, launch: Launch, on_ready: Callable[[Sandbox], None], on_failure: Callable[[End], None]) -> None:
        """Make a container for it and fill its places; tell of it when it can be started, or why not."""

        def then(made: _Made | None, error: BaseException | None) -> None:
            if made is not None:
                on_ready(DockerSandbox(self._loop, self._calls, self._client, made, self._isolation(launch, made)))
            elif error is not None:
                if engine.is_down(error):
                    self._forget_engine()
                on_failure(_failed(error, launch.container))

        self._calls.make(lambda: self._make(launch), then)

    def release(self, sandbox: Sandbox, then: Callable[[], None]) -> None:
        """Remove the container and all that was made for it. What cannot be removed now is left to the reaper."""
        assert isinstance(sandbox, DockerSandbox)
        sandbox.forget()

        def done(_: None, error: BaseException | None) -> None:
            if error is not None and engine.is_down(error):
                self._forget_engine()
            then()

        self._calls.make(lambda: _unmake(sandbox.made, self._client), done)

    def close(self) -> None:
        self._calls.close()
        self._forget_engine()

    # --- in a thread: all of it may block ---

    def _make(self, launch: Launch) -> _Made:
        spec = launch.container
        assert spec is not None
        if self._client is None:
            client = engine.connect()
            self._info = client.info()
            self._client = client
        made = _Made(owners.make_folder(owners.DOCKER_SCRATCH))
        lap = _Laps(made.steps_s)
        try:
            image = self._image(spec) if launch.like is None else self._commit(made, launch.like)
            made.image_id = image["Id"]
            lap("resolve")
            uid, gid = self._user(spec, launch.role)
            made.mounted = _make_box(made.folder, launch.limits)
            made.box = os.open(made.folder / "box", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._fill(made, launch, uid, gid)
            except OSError as error:  # told apart here: the SDK's errors are OSErrors too
                raise _NotFilled(str(error)) from error
            lap("stage")
            made.container = self._create(made, launch, image, uid, gid)
            lap("create")
            made.output = _attach(self._client, made.container)
            if engine.is_podman(self._info):  # which made the process for that: even a short life is seen whole
                made.by_podman = True
                made.pid = self._client.inspect_container(made.container)["State"]["Pid"]
            lap("attach")
        except BaseException:
            _unmake(made, self._client)
            raise
        return made

    def _image(self, spec: ContainerSpec) -> dict[str, Any]:
        name = spec.image_id or spec.image
        if name not in self._images:
            self._images[name] = self._client.inspect_image(name)
        return self._images[name]

    def _commit(self, made: _Made, like: Sandbox) -> dict[str, Any]:
        """An image of the file system that an agent left, with the environment of the image that it began with."""
        assert isinstance(like, DockerSandbox)
        client, container = self._client, like.made.container
        # Folders in place of whatever the agent put where ours will be mounted: a link would lead a mount elsewhere.
        client.put_archive(container, "/", _folders("grading", "grade"))
        made.committed = client.commit(container)["Id"]
        made.shared = like.made
        found: dict[str, Any] = client.inspect_image(made.committed)
        # What the agent's container was given is in it: None takes a variable away.
        made.env = dict.fromkeys(_environment(found)) | _environment(client.inspect_image(like.made.image_id))
        return found

    def _user(self, spec: ContainerSpec, role: str) -> tuple[int | None, int | None]:
        """Who the agent is, as a number if that can be known here."""
        if spec.user is None:
            if engine.is_rootless(self._info):
                return 0, 0  # which is us, outside
            slot = self._slot if role == AGENT_ROLE else self._slot + 1
            uid = nobodys_uid(slot) if os.geteuid() == 0 else os.geteuid()
            return uid, uid if os.geteuid() == 0 else os.getegid()
        uid_text, _, gid_text = spec.user.partition(":")
        if uid_text == "root":
            uid_text = "0"
        if uid_text.isdigit() and (gid_text or uid_text).isdigit():
            return int(uid_text), int(gid_text or uid_text)
        return None, None

    def _fill(self, made: _Made, launch: Launch, uid: int | None, gid: int | None) -> None:
        scratch = os.open(made.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in ("in", "agent" if launch.role == AGENT_ROLE else "grading"):
                os.mkdir(name, dir_fd=scratch)
                os.chmod(name, 0o755, dir_fd=scratch)  # whatever the umask is
            for path, data in launch.staged.items():
                stage(scratch, path, data)
        finally:
            os.close(scratch)
        os.mkfifo(made.folder / "trace", 0o622)
        os.chmod(made.folder / "trace", 0o622)  # whatever the umask is
        # Both ends: a writer never waits for a reader, and what was written stays when the last writer is killed.
        made.trace = os.open(made.folder / "trace", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            import fcntl

            fcntl.fcntl(made.trace, _F_SETPIPE_SZ, _PIPE_BYTES)
        made.user = (uid, gid)
        for name in _box_folders(launch.role):
            os.mkdir(name, dir_fd=made.box)
        if launch.workspace is not None:
            fill(made.box, "workspace", launch.workspace)
        for name in _box_folders(launch.role):
            made.give(name)

    def _create(self, made: _Made, launch: Launch, image: dict[str, Any], uid: int | None, gid: int | None) -> str:
        spec, limits, client = launch.container, launch.limits, self._client
        assert spec is not None
        labels = {f"{LABEL}{name}": value for name, value in launch.labels.items()}
        labels[f"{LABEL}owner"] = self._owner
        if limits.timeout_s is not None:
            labels[f"{LABEL}deadline"] = f"{time.time() + limits.timeout_s + limits.grace_s + _AFTER_DEADLINE_S:.0f}"
        env = {**made.env, "LANG": "C.UTF-8", **places("", launch.role), **launch.env}
        if limits.timeout_s is not None:
            env["SANDBOX_EXEC_DEADLINE_S"] = f"{limits.timeout_s:g}"
        name = "-".join(["sandbox-exec", launch.labels.get("trial", "trial"), made.folder.name.rpartition("-")[2]])
        config = client.create_container_config(
            image=image["Id"],
            command=None,
            entrypoint=list(launch.argv),
            environment=env,
            labels=labels,
            user=f"{uid}:{gid}" if uid is not None else spec.user,
            working_dir=home_of(launch.role),
            hostname="sandbox" if launch.beside is None else None,
            network_disabled=False,
            healthcheck={"test": ["NONE"]},
            host_config=self._host_config(made, launch, image),
        )
        config["StopTimeout"] = 0  # an engine that restarts stops what it finds: at once
        answer = client.create_container_from_config(config, name=name)
        return str(answer["Id"])

    def _host_config(self, made: _Made, launch: Launch, image: dict[str, Any]) -> dict[str, Any]:
        spec, limits, folder = launch.container, launch.limits, made.folder
        assert spec is not None
        is_agent, writes = launch.role == AGENT_ROLE, launch.role != GRADER_ROLE
        given = ("agent", launch.agent) if is_agent else ("grading", launch.assets)
        binds = [
            _bind(folder / "in", "/in", read_only=True),
            _bind(given[1] or folder / given[0], f"/{given[0]}", read_only=True),
            _bind((made.shared or made).folder / "box" / "workspace", "/workspace", read_only=not writes),
            _bind((made.shared or made).folder / "box" / "out", "/out", read_only=not writes),
            *([] if is_agent else [_bind(folder / "box" / "grade", "/grade")]),
            _bind(folder / "trace", TRACE),
            *(_bind(path, str(path), read_only=True) for path in limits.readable),
        ]
        # Podman knows no ceiling of names, and would copy in what the image has there.
        more = "notmpcopyup" if engine.is_podman(self._info) else f"nr_inodes={limits.files}"
        room = f"rw,nosuid,nodev,exec,size={limits.disk},{more},mode=1777"
        # A volume that the image asks for would be a folder of the engine's without a limit, with a life of its own.
        # Where a place of ours is, none is made.
        taken = {"/tmp", *(bind["Target"] for bind in binds)}
        volumes = {os.path.normpath(path) for path in (image.get("Config") or {}).get("Volumes") or {}} - taken
        # What Podman would leave open in a root that is closed, without a size.
        closed = ("/run", "/var/tmp") if spec.read_only and engine.is_podman(self._info) else ()
        config: dict[str, Any] = self._client.create_host_config(
            mounts=binds,
            tmpfs={
                "/tmp": room,
                **dict.fromkeys(closed, "ro,nosuid,nodev,size=64k,notmpcopyup,mode=755"),
                **dict.fromkeys(sorted(volumes), room),
            },
            network_mode=f"container:{launch.beside.made.container}"
            if isinstance(launch.beside, DockerSandbox)
            else spec.network,
            read_only=spec.read_only,
            cap_drop=["ALL"],
            cap_add=["DAC_OVERRIDE"] if made.shared else None,  # to see all that the agent left
            security_opt=["no-new-privileges"],
            init=True,
            log_config=docker.types.LogConfig(type="none"),
            ipc_mode="private",
            shm_size=min(limits.disk, _SHM_BYTES),
            ulimits=_ulimits(limits),
            runtime=spec.runtime,
            restart_policy={"Name": "no"},
        )
        if limits.memory is not None:
            config["Memory"] = config["MemorySwap"] = limits.memory
        if limits.pids is not None:
            config["PidsLimit"] = limits.pids + 1  # the init is ours
        if limits.cpus is not None:
            there = self._info.get("NCPU") or limits.cpus  # the engine refuses more than there are
            config["NanoCpus"] = int(min(limits.cpus, there) * 1e9)
        return config

    # ---

    def _isolation(self, launch: Launch, made: _Made) -> Isolation:
        spec, limits = launch.container, launch.limits
        assert spec is not None
        uid, _ = made.user
        options = self._info.get("SecurityOptions", ())
        notes = []
        if not made.mounted:
            notes.append("the size of /workspace and /out is watched, not held: only root can give them a file system")
        if not spec.read_only:
            notes.append("what is written to the container's root is watched, not held: see sandbox.read_only")
        held = not engine.ignores_limits(self._info)
        if not held:
            notes.append("no ceiling of memory, processes, processors; no ulimits, no freezing: Podman, rootless, v1")
        return Isolation(
            rung="container",
            memory="engine" if held and limits.memory is not None else "none",
            pids="engine" if held and limits.pids is not None else "none",
            cpu="engine" if held and limits.cpus is not None else "none",
            freeze="engine" if held else "none",
            filesystem="private",
            disk="tmpfs" if made.mounted else "watched",
            network=spec.network,
            uid=uid,
            seccomp=any("seccomp" in option for option in options),
            notes=tuple(notes),
        )

    def _forget_engine(self) -> None:
        """The next trial connects anew."""
        client, self._client = self._client, None
        self._images = {}
        if client is not None:
            client.close()


class DockerSandbox:
    """See `Sandbox`. One container, which is started once."""

    def __init__(self, loop: Loop, calls: Calls, client: Any, made: _Made, isolation: Isolation) -> None:
        self.isolation, self.made = isolation, made
        self._loop, self._calls, self._client = loop, calls, client
        self._listener: Listener | None = None
        self._limits = Limits()
        self._started = self._killing = self._paused = False
        self._pidfd = -1
        self._group = _Group()
        self._peak = 0
        self._cpu_s: float | None = None
        self._frames = b""
        self._output_open = True
        self._ended: dict[str, Any] | None = None  # what the engine said of its end
        self._gone = False  # what its pidfd says
        self._gone_at_s = 0.0
        self._fault = ""
        self._ended_at_s = 0.0
        self._next_look_s = {"root": 0.0, "box": 0.0}
        self._looking = False
        assert made.output is not None
        loop.add(made.output.fileno(), self._read_output)
        loop.add(made.trace, self._read_trace)

    @property
    def keeper_pidfd(self) -> int:
        """Of the container's first process."""
        return self._pidfd

    @property
    def steps_s(self) -> Mapping[str, float]:
        return self.made.steps_s

    # --- what the supervisor asks for ---

    def start(self, launch: Launch, listener: Listener) -> None:
        self._listener, self._limits, self._argv = listener, launch.limits, launch.argv
        began_s = time.monotonic()

        def then(_: None, error: BaseException | None) -> None:
            self.made.steps_s["start"] = round(time.monotonic() - began_s, 4)
            if error is not None:
                self._on_not_started(error)
            else:
                self._on_started()

        self._on_state({"Pid": self.made.pid}, None)
        self._calls.make(lambda: self._client.start(self.made.container), then)

    def terminate(self) -> None:
        if not self._signal_all(signal.SIGTERM):
            self._ask(lambda: self._client.kill(self.made.container, "SIGTERM"))

    def kill(self) -> None:
        self._killing = True
        if not self._started:
            return  # as soon as it is
        if self._paused:
            self._paused = False
            self._ask(lambda: self._client.unpause(self.made.container), self._kill_now)
        else:
            self._kill_now()

    def _kill_now(self) -> None:
        try:
            if self._pidfd < 0:
                raise PermissionError
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except OSError:  # not ours to kill, or not to be seen from here: the engine must do it
            self._ask(lambda: self._client.kill(self.made.container, "SIGKILL"))

    def _thaw_now(self) -> None:
        """Without the engine: on cgroup v1, what is frozen cannot even be killed."""
        if self._group.thaw is not None:
            path, word = self._group.thaw
            with contextlib.suppress(OSError):
                path.write_text(word)

    def kill_hard(self) -> None:
        """What the engine could not do in time: without it, if we may."""
        self._fault = self._fault or "the engine did not answer"
        self._thaw_now()
        self._kill_now()
        if self._gone:
            self._finish()

    def freeze(self) -> None:
        self._paused = True
        if self._started:
            self._pause()

    def _pause(self) -> None:
        # Not in a thread: who asks counts on its standing still when this returns.
        with contextlib.suppress(*engine.EngineErrors):
            self._client.pause(self.made.container)

    def thaw(self, paused_s: float) -> None:
        self._paused = False
        if self._started:
            with contextlib.suppress(*engine.EngineErrors):
                self._client.unpause(self.made.container)

    def peak_memory_bytes(self) -> int | None:
        self._look_at_usage()
        return self._peak or None

    def read_file(self, path: str, limit: int) -> bytes | None:
        return read_file(self.made.box, path, limit)

    def open_folder(self, name: str) -> int:
        shared = self.made.shared if name in ("workspace", "out") else None
        return open_folder((shared or self.made).box, name)

    def give(self, name: str) -> None:
        self.made.give(name)

    def close(self) -> None:
        self.kill()

    def forget(self) -> None:
        """Close all handles; what was made is somebody else's to take away."""
        if self.made.output is not None:
            if self._output_open:
                self._loop.remove(self.made.output.fileno())
            self.made.output.close()
            self.made.output = None
        if self.made.trace >= 0:
            self._loop.remove(self.made.trace)
            os.close(self.made.trace)
            self.made.trace = -1
        if self._pidfd >= 0:
            if not self._gone:
                self._loop.remove(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    # --- its life ---

    def _on_not_started(self, error: BaseException) -> None:
        end = _failed(error, None)
        self._end(End(setup=end.setup, fault=end.fault, proof="no process was started"))

    def _on_started(self) -> None:
        self._started = True
        if self._listener:
            self._listener.on_started()
        self._loop.add_look(self._look)
        self._calls.make(lambda: self._client.wait(self.made.container, timeout=None), self._on_waited)
        if self._pidfd < 0:
            self._calls.make(lambda: self._client.inspect_container(self.made.container)["State"], self._on_state)
        if self._killing:
            self.kill()
        elif self._paused:
            self._pause()

    def _on_state(self, state: dict[str, Any] | None, error: BaseException | None) -> None:
        """Its first process, if we can see it: the engine's pids are ours only on the same machine."""
        pid = state["Pid"] if state else 0
        if not pid or self._listener is None:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        lines = [line for line in _cgroup_lines(pid) if self.made.container in line]  # others: it is ending
        if not lines:
            os.close(pidfd)
            return
        self._pidfd, self._group = pidfd, _find_group(lines)
        self._loop.add(pidfd, self._on_gone)
        if self._killing:
            self._kill_now()

    def _on_gone(self) -> None:
        """All processes have ended. The engine will say how; if it can."""
        self._loop.remove(self._pidfd)
        self._gone, self._gone_at_s = True, time.monotonic()
        self._look_at_usage()  # before the engine removes the cgroup
        if self._fault:
            self._finish()

    def _on_waited(self, result: dict[str, Any] | None, error: BaseException | None) -> None:
        if self._listener is None:
            return
        if error is not None:
            self._on_engine_lost(error)
            return
        assert result is not None
        code = int(result["StatusCode"])

        def then(state: dict[str, Any] | None, error: BaseException | None) -> None:
            if self._listener is None:
                return
            self._ended = {"StatusCode": code, **(state or {})}
            self._ended_at_s = time.monotonic()
            self._loop.add_look(self._look)
            self._finish_if_quiet()

        self._calls.make(lambda: self._last_state(code), then)

    def _last_state(self, code: int) -> dict[str, Any]:
        state: dict[str, Any] = self._client.inspect_container(self.made.container)["State"]
        not_run = _NOT_RUN_BY_PODMAN if self.made.by_podman else _NOT_RUN
        if code in not_run and not self._killing and _is_not_in(self._client, self.made.image_id, self._argv[0]):
            state["NotInImage"], state["StatusCode"] = True, _NOT_RUN[-1]
        return state

    def _on_engine_lost(self, error: BaseException) -> None:
        """The container may live on without its engine: kill it ourselves, and wait for that; else say so."""
        self._fault = engine.explain(error)
        self._killing = True
        if self._gone:
            self._finish()
        elif self._pidfd >= 0:
            self._thaw_now()
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except OSError:
                self._finish()
        else:
            self._finish()

    def _finish_if_quiet(self) -> None:
        """All of the output is here, or will not come any more."""
        late = time.monotonic() - self._ended_at_s > _EOF_S
        if self._ended is not None and (not self._output_open or late):
            self._finish()

    def _finish(self) -> None:
        if self._listener is None:
            return
        self._drain()
        ended = self._ended
        if ended is not None and ended.get("OOMKilled"):
            self._listener.on_exceeded("memory")
        code = ended["StatusCode"] if ended is not None else None
        by_signal = code is not None and 128 < code <= 128 + signal.SIGRTMAX  # as init and every shell say it
        known = ended is not None or self._gone
        self._end(
            End(
                exit_code=None if by_signal else code,
                signal=code - 128 if by_signal and code is not None else None,
                setup=f"there is no program {self._argv[0]!r} in the image" if (ended or {}).get("NotInImage") else "",
                fault="" if ended is not None else self._fault,
                left=0 if known else 1,
                proof=_PROOF if self._gone else _SAID if known else _UNPROVEN,
                cpu_s=self._cpu_s,
                peak_memory_bytes=self._peak or None,
                disk_full=self.isolation.disk == "tmpfs" and is_full(self.made.box),
            )
        )

    def _end(self, end: End) -> None:
        listener, self._listener = self._listener, None
        self._loop.remove_look(self._look)
        if listener is not None:
            listener.on_ended(end)

    # --- what comes out of it ---

    def _read_output(self) -> None:
        output = self.made.output
        assert output is not None
        try:
            data = output.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove(output.fileno())
            self._output_open = False
            self._finish_if_quiet()
            return
        self._frames += data
        while len(self._frames) >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._frames)
            if len(self._frames) < _FRAME.size + size:
                break
            piece = self._frames[_FRAME.size : _FRAME.size + size]
            self._frames = self._frames[_FRAME.size + size :]
            if self._listener and kind in _STREAM:
                self._listener.on_output(_STREAM[kind], memoryview(piece))

    def _read_trace(self) -> int:
        try:
            count = os.readv(self.made.trace, [self._loop.buffer])
        except BlockingIOError:
            return 0
        if self._listener:
            self._listener.on_output("trace", memoryview(self._loop.buffer)[:count])
        return count

    def _drain(self) -> None:
        for _ in range(64):  # more than the pipe holds
            if not self._read_trace():
                break

    # --- what it uses ---

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._ended is not None:
            self._finish_if_quiet()
            return
        if self._gone:
            if now_s - self._gone_at_s > _GONE_S:
                self._fault = f"{engine.explain(TimeoutError())}; how the container ended is not known"
                self._finish()
            return
        self._look_at_usage()
        if self._looking or self._listener is None:
            return
        if self.isolation.disk == "watched" and now_s >= self._next_look_s["box"]:
            self._next_look_s["box"] = now_s + _BOX_LOOK_S
            self._look_later(functools.partial(_size_of, self.made.folder / "box", self._limits.files))
        elif now_s >= self._next_look_s["root"]:
            first = self._next_look_s["root"] == 0.0
            self._next_look_s["root"] = now_s + _ROOT_LOOK_S
            if not first:
                self._look_later(functools.partial(_root_size, self._client, self.made.container))

    def _look_later(self, size: Callable[[], int]) -> None:
        self._looking = True

        def then(found: int | None, error: BaseException | None) -> None:
            self._looking = False
            if found is not None and found > self._limits.disk and self._listener:
                self._listener.on_exceeded("disk")

        self._calls.make(size, then)

    def _look_at_usage(self) -> None:
        group = self._group
        self._peak = max(self._peak, _number(group.peak))
        cpu = _cpu_s(group.cpu)
        self._cpu_s = cpu if cpu is not None else self._cpu_s
        if self._listener:
            if _count(group.oom, "oom_kill"):
                self._listener.on_exceeded("memory")
            if _count(group.pids, "max"):
                self._listener.on_exceeded("pids")

    def _signal_all(self, number: int) -> bool:
        """Whether every process of the container got it, directly."""
        if self._group.procs is None or os.geteuid() != 0:
            return False
        try:
            pids = [int(pid) for pid in self._group.procs.read_text().split()]
        except (OSError, ValueError):
            return False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def _ask(self, call: Callable[[], Any], then: Callable[[], None] | None = None) -> None:
        def told(_: Any, error: BaseException | None) -> None:
            if error is not None and engine.is_down(error):
                self._on_engine_lost(error)
            elif then is not None:
                then()

        self._calls.make(call, told)


class _NotFilled(Exception):
    """Why what a trial is given cannot be put into its places: no fault of the engine's."""


class _Laps:
    """How long each step took."""

    def __init__(self, steps_s: dict[str, float]) -> None:
        self._steps_s, self._since_s = steps_s, time.monotonic()

    def __call__(self, name: str) -> None:
        now_s = time.monotonic()
        self._steps_s[name], self._since_s = round(now_s - self._since_s, 4), now_s


def _failed(error: BaseException, spec: ContainerSpec | None) -> End:
    """Whose fault it is that there is no container, or that it did not start."""
    if isinstance(error, SandboxUnavailable):
        return End(fault=str(error))
    if isinstance(error, _NotFilled):
        return End(setup=f"the sandbox cannot be filled: {error}")
    if spec is not None and engine.is_missing(error) and "image" in str(error).lower():
        return End(
            setup=f"there is no image {spec.image!r}: build it (sandbox-exec images build), or pull it (docker pull)"
        )
    if engine.is_down(error) or engine.is_full(error):
        return End(fault=engine.explain(error))
    if not engine.is_answer(error):  # no room for a folder of ours, no more descriptors
        return End(fault=f"the sandbox cannot be made: {type(error).__name__}: {error}")
    return End(setup=engine.explain(error))


def _environment(image: dict[str, Any]) -> dict[str, str | None]:
    pairs = [entry.partition("=") for entry in (image.get("Config") or {}).get("Env") or ()]
    return {name: value for name, _, value in pairs}


def _folders(*names: str) -> bytes:
    """An archive of empty folders."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(info)
    return data.getvalue()


def _box_folders(role: str) -> tuple[str, ...]:
    return ("workspace", "out") if role == AGENT_ROLE else ("workspace", "out", "grade")


def _make_box(folder: Path, limits: Limits) -> bool:
    """The place of what the agent writes. Whether it is a file system of its own, with a size that holds."""
    box = folder / "box"
    box.mkdir()
    try:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", str(box), "tmpfs", flags, f"mode=755,size={limits.disk},nr_inodes={limits.files}")
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise
        return False
    return True


def _unmake(made: _Made, client: Any) -> None:
    """Take it all away; if the engine cannot, all but the container, and raise."""
    try:
        if made.container and client is not None:
            began_s = time.monotonic()
            try:
                client.remove_container(made.container, v=True, force=True)
            except engine.EngineErrors as error:
                if not engine.is_missing(error):
                    raise
            made.steps_s["remove"] = round(time.monotonic() - began_s, 4)
    finally:
        if made.committed and client is not None:
            with contextlib.suppress(*engine.EngineErrors):  # an image without a name: `docker image prune` knows it
                client.remove_image(made.committed, force=True)
        if made.output is not None:
            made.output.close()
        for fd in (made.box, made.trace):
            if fd >= 0:
                os.close(fd)
        made.box = made.trace = -1
        remove_folder(made.folder)


def _attach(client: Any, container: str) -> socket.socket:
    """The raw connection that stdout and stderr will come over."""
    params = {"stdout": 1, "stderr": 1, "stream": 1}
    stream = client.attach_socket(container, params=params)
    raw: socket.socket = getattr(stream, "_sock", stream)
    own = socket.socket(fileno=os.dup(raw.fileno()))
    own.setblocking(False)
    response = getattr(stream, "_response", None)  # which holds the connection, whatever becomes of the stream
    if response is not None:
        response.close()
    stream.close()
    raw.close()
    return own


def _bind(source: Path, target: str, *, read_only: bool = False) -> Any:
    return docker.types.Mount(target, str(source), type="bind", read_only=read_only)


def _ulimits(limits: Limits) -> list[Any]:
    largest = limits.disk if limits.file_size is None else limits.file_size
    wanted = {"nofile": limits.open_files, "fsize": largest, "core": 0}
    if limits.address_space is not None:
        wanted["as"] = limits.address_space
    return [docker.types.Ulimit(name=name, soft=value, hard=value) for name, value in wanted.items()]


def _open_to_all(top: Path) -> None:
    for folder, _, files in os.walk(top):
        os.chmod(folder, 0o777)
        for name in files:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                os.chmod(path, stat.S_IMODE(mode) | 0o666)


def _size_of(top: Path, most_files: int) -> int:
    """What a folder takes on the disk; more than any limit if it has too many files."""
    total = files = 0
    pending = [str(top)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    files += 1
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone while we looked
        except OSError:  # closed to us, or deeper than a path can say: what is in there would not count
            return 1 << 62
        if files > most_files:
            return 1 << 62
    return total


def _is_not_in(client: Any, image_id: str | None, program: str) -> bool:
    """Whether an image has no such program. Asked of the image: what an agent did to its container is no evidence."""
    image = client.inspect_image(image_id)
    if program.startswith("/"):
        places = [program]
    elif "/" in program:
        return False  # of the working directory, which is the task's
    else:
        places = [f"{folder}/{program}" for folder in (_environment(image).get("PATH") or _PATH).split(":")]
    labels = {f"{LABEL}owner": owners.name_of(os.getpid())}
    config = client.create_container_config(image=image_id, command=None, entrypoint=["/"], labels=labels)
    container = client.create_container_from_config(config)["Id"]
    try:
        return not any(_is_there(client, container, place) for place in places)
    finally:
        client.remove_container(container, force=True)


def _is_there(client: Any, container: str, path: str) -> bool:
    try:
        stream, _ = client.get_archive(container, path)
    except docker.errors.NotFound:
        return False
    stream.close()
    return True


def _root_size(client: Any, container: str) -> int:
    found = client.containers(filters={"id": container}, size=True)
    return int(found[0].get("SizeRw") or 0) if found else 0


def _cgroup_lines(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []


def _find_group(lines: list[str]) -> _Group:
    """The files of the container's cgroups that tell what it uses, of those that are here to be read."""
    found = _Group()
    root = Path("/sys/fs/cgroup")
    for line in lines:
        _, names, path = line.split(":", 2)
        below = path.lstrip("/")
        if names == "":
            for top in (root, root / "unified"):
                group = top / below
                if (group / "cgroup.procs").exists():
                    found.procs = found.procs or group / "cgroup.procs"
                    found.peak = found.peak or _if_there(group / "memory.peak")
                    found.oom = found.oom or _if_there(group / "memory.events")
                    found.pids = found.pids or _if_there(group / "pids.events")
                    found.cpu = found.cpu or _if_there(group / "cpu.stat")
                    if (group / "cgroup.freeze").exists():
                        found.thaw = found.thaw or (group / "cgroup.freeze", "0")
        for name in names.split(","):
            group = root / name / below
            if name == "memory":
                found.peak = _if_there(group / "memory.max_usage_in_bytes")
                found.oom = _if_there(group / "memory.oom_control")
            elif name == "pids":
                found.pids = _if_there(group / "pids.events")
                found.procs = _if_there(group / "cgroup.procs")
            elif name == "freezer" and (group / "freezer.state").exists():
                found.thaw = group / "freezer.state", "THAWED"
            elif name == "cpuacct":
                found.cpu = _if_there(group / "cpuacct.usage")
    return found


def _if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def _number(path: Path | None) -> int:
    try:
        return int(path.read_text()) if path is not None else 0
    except (OSError, ValueError):
        return 0


def _count(path: Path | None, name: str) -> int:
    try:
        lines = path.read_text().splitlines() if path is not None else []
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _cpu_s(path: Path | None) -> float | None:
    if path is None:
        return None
    if path.name == "cpu.stat":
        return _count(path, "usage_usec") / 1e6 or None
    return _number(path) / 1e9 or None
