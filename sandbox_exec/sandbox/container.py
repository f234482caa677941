"""Making a container for a trial, with all that goes into it, and taking all of it away. Every call here may block."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import socket
import stat
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import docker.errors
import docker.types

from sandbox_exec.containment.ladder import nobodys_uid
from sandbox_exec.contracts import ContainerSpec, Isolation, Limits
from sandbox_exec.guest import kernel
from sandbox_exec.guest.view import AGENT_ROLE, GRADER_ROLE, TRACE, home_of
from sandbox_exec.sandbox import engine, owners
from sandbox_exec.sandbox.base import Launch
from sandbox_exec.sandbox.process import places
from sandbox_exec.sandbox.reaper import LABEL, remove_folder
from sandbox_exec.sandbox.scratch import fill, give, stage

_AFTER_DEADLINE_S: Final = 60.0  # what staging, the grace and a kill take at most; then nobody wants the container
_SHM_BYTES: Final = 64 << 20  # the engine's own default
_PIPE_BYTES: Final = 1 << 20
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # the engine's own


@dataclass
class Made:
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
    copied: bool = False  # the assets, as they are not to be read by everybody where they are
    committed: str = ""  # an image of the agent's file system
    env: dict[str, str | None] = field(default_factory=dict)  # in place of what the image says
    shared: Made | None = None  # what was made for the agent, whose /workspace and /out these are too
    steps_s: dict[str, float] = field(default_factory=dict)

    def give(self, name: str) -> None:
        """Make a folder of the box the agent's own."""
        uid, gid = self.user
        if uid is not None and os.geteuid() == 0:
            give(self.box, name, uid, gid if gid is not None else uid)
        elif uid is None or uid not in (0, os.geteuid()):
            _open_to_all(self.folder / "box" / name)  # who that user is, only the image knows


class Maker:
    """Makes containers on one engine, for the agents and graders of one worker."""

    def __init__(self, slot: int) -> None:
        """Raises `SandboxUnavailable` if no engine answers."""
        self.client: Any = engine.connect()
        self.info: dict[str, Any] = self.client.info()
        self._slot, self._owner = slot, owners.name_of(os.getpid())
        self._images: dict[str, dict[str, Any]] = {}

    def make(self, launch: Launch, like: Made | None = None, beside: Made | None = None) -> Made:
        """Make a container that can be started. `like`: of whose file system; `beside`: on whose network."""
        spec = launch.container
        assert spec is not None
        made = Made(owners.make_folder(owners.DOCKER_SCRATCH))
        lap = _Laps(made.steps_s)
        try:
            image = self._image(spec) if like is None else self._commit(made, like)
            made.image_id = image["Id"]
            lap("resolve")
            made.user = self._user(spec, launch.role)
            made.mounted = _make_box(made.folder, launch.limits)
            made.box = os.open(made.folder / "box", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._fill(made, launch)
            except OSError as error:  # told apart here: the SDK's errors are OSErrors too
                raise NotFilled(str(error)) from error
            lap("stage")
            made.container = self._create(made, launch, image, beside)
            lap("create")
            made.output = _attach(self.client, made.container)
            if engine.is_podman(self.info):  # which made the process for that: even a short life is seen whole
                made.by_podman = True
                made.pid = self.client.inspect_container(made.container)["State"]["Pid"]
            lap("attach")
        except BaseException:
            unmake(made, self.client)
            raise
        return made

    def _image(self, spec: ContainerSpec) -> dict[str, Any]:
        name = spec.image_id or spec.image
        if name not in self._images:
            self._images[name] = self.client.inspect_image(name)
        return self._images[name]

    def _commit(self, made: Made, like: Made) -> dict[str, Any]:
        """An image of the file system that an agent left, with the environment of the image that it began with."""
        client, container = self.client, like.container
        # Folders in place of whatever the agent put where ours will be mounted: a link would lead a mount elsewhere.
        client.put_archive(container, "/", _folders("grading", "grade"))
        made.committed = client.commit(container)["Id"]
        made.shared = like
        found: dict[str, Any] = client.inspect_image(made.committed)
        # What the agent's container was given is in it: None takes a variable away.
        made.env = dict.fromkeys(_environment(found)) | _environment(client.inspect_image(like.image_id))
        return found

    def _user(self, spec: ContainerSpec, role: str) -> tuple[int | None, int | None]:
        """Who the agent is, as a number if that can be known here."""
        if spec.user is None:
            if engine.is_rootless(self.info):
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

    def _fill(self, made: Made, launch: Launch) -> None:
        scratch = os.open(made.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in ("in", "agent" if launch.role == AGENT_ROLE else "grading"):
                os.mkdir(name, dir_fd=scratch)
                os.chmod(name, 0o755, dir_fd=scratch)  # whatever the umask is
            for path, data in launch.staged.items():
                stage(scratch, path, data)
            if launch.assets is not None and not _is_open(launch.assets):
                fill(scratch, "grading", launch.assets)
                _open_to_all(made.folder / "grading")  # it is mounted read-only
                made.copied = True
        finally:
            os.close(scratch)
        os.mkfifo(made.folder / "trace", 0o622)
        os.chmod(made.folder / "trace", 0o622)  # whatever the umask is
        # Both ends: a writer never waits for a reader, and what was written stays when the last writer is killed.
        made.trace = os.open(made.folder / "trace", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # refused to users with many pipes
            fcntl.fcntl(made.trace, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        for name in _box_folders(launch.role):
            os.mkdir(name, dir_fd=made.box)
        if launch.workspace is not None:
            fill(made.box, "workspace", launch.workspace)
        for name in _box_folders(launch.role):
            made.give(name)

    def _create(self, made: Made, launch: Launch, image: dict[str, Any], beside: Made | None) -> str:
        spec, limits, client = launch.container, launch.limits, self.client
        assert spec is not None
        uid, gid = made.user
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
            hostname="sandbox" if beside is None else None,
            network_disabled=False,
            healthcheck={"test": ["NONE"]},
            host_config=self._host_config(made, launch, image, beside),
        )
        config["StopTimeout"] = 0  # an engine that restarts stops what it finds: at once
        answer = client.create_container_from_config(config, name=name)
        return str(answer["Id"])

    def _host_config(self, made: Made, launch: Launch, image: dict[str, Any], beside: Made | None) -> dict[str, Any]:
        spec, limits, folder = launch.container, launch.limits, made.folder
        assert spec is not None
        is_agent, writes = launch.role == AGENT_ROLE, launch.role != GRADER_ROLE
        given = ("agent", launch.agent) if is_agent else ("grading", None if made.copied else launch.assets)
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
        more = "notmpcopyup" if engine.is_podman(self.info) else f"nr_inodes={limits.files}"
        room = f"rw,nosuid,nodev,exec,size={limits.disk},{more},mode=1777"
        # A volume that the image asks for would be a folder of the engine's without a limit, with a life of its own.
        # Where a place of ours is, none is made.
        taken = {"/tmp", *(bind["Target"] for bind in binds)}
        volumes = {os.path.normpath(path) for path in (image.get("Config") or {}).get("Volumes") or {}} - taken
        # What Podman would leave open in a root that is closed, without a size.
        closed = ("/run", "/var/tmp") if spec.read_only and engine.is_podman(self.info) else ()
        config: dict[str, Any] = self.client.create_host_config(
            mounts=binds,
            tmpfs={
                "/tmp": room,
                **dict.fromkeys(closed, "ro,nosuid,nodev,size=64k,notmpcopyup,mode=755"),
                **dict.fromkeys(sorted(volumes), room),
            },
            network_mode=spec.network if beside is None else f"container:{beside.container}",
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
            there = self.info.get("NCPU") or limits.cpus  # the engine refuses more than there are
            config["NanoCpus"] = int(min(limits.cpus, there) * 1e9)
        return config

    def isolation(self, launch: Launch, made: Made) -> Isolation:
        spec, limits = launch.container, launch.limits
        assert spec is not None
        uid, _ = made.user
        options = self.info.get("SecurityOptions", ())
        notes = []
        if not made.mounted:
            notes.append("the size of /workspace and /out is watched, not held: only root can give them a file system")
        if not spec.read_only:
            notes.append("what is written to the container's root is watched, not held: see sandbox.read_only")
        held = not engine.ignores_limits(self.info)
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


class NotFilled(Exception):
    """Why what a trial is given cannot be put into its places: no fault of the engine's."""


class _Laps:
    """How long each step took."""

    def __init__(self, steps_s: dict[str, float]) -> None:
        self._steps_s, self._since_s = steps_s, time.monotonic()

    def __call__(self, name: str) -> None:
        now_s = time.monotonic()
        self._steps_s[name], self._since_s = round(now_s - self._since_s, 4), now_s


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


def unmake(made: Made, client: Any) -> None:
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


@functools.lru_cache(maxsize=256)  # asked for every trial, and a run's assets do not change
def _is_open(assets: Path) -> bool:
    """Whether anybody could read all of a folder. Its own place does not matter: it is mounted elsewhere."""
    if not assets.is_dir():
        return False  # a file: what is mounted must be a folder
    for folder, _, files in os.walk(assets):
        modes = [os.lstat(folder).st_mode & 0o005 == 0o005]
        modes += [os.stat(path).st_mode & 0o004 != 0 for name in files if os.path.exists(path := f"{folder}/{name}")]
        if not all(modes):
            return False
    return True


def _open_to_all(top: Path) -> None:
    for folder, _, files in os.walk(top):
        os.chmod(folder, 0o777)
        for name in files:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                os.chmod(path, stat.S_IMODE(mode) | 0o666)


def is_not_in(client: Any, image_id: str | None, program: str) -> bool:
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
