"""Ceilings that the kernel holds: cgroup v2 where a part of the tree is ours, v1 where it is writable.

Theory of operation. `find()` tries, for each controller, to make a cgroup below the one this process is in:
what can be made is used, what cannot is said (`Cgroups.why`). A pool makes one cgroup in every hierarchy in
use, and one below it for each slot. An agent's process joins its slot's before it loses its rights; the keeper
never does. A slot's cgroup serves one trial after the other: counters are read as differences, and it is made
anew when it still holds memory of the last one, or when this kernel cannot set the peak back.

Limits. A process that may write `cgroup.procs` can leave: agents have another uid, or no sight of the tree.
Memory counts pages in caches that only the agent's files filled, and the trial's tmpfs, which is what it wrote.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_exec.contracts import Limits
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest.zygote import remove_cgroup

CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "sandbox-exec"
_LEAF = f"{_PREFIX}-supervisor"
_STALE_BYTES = 1 << 20  # memory left in a slot's cgroup that would show in the next trial's peak
_CPU_PERIOD_US = 100_000
_counter = itertools.count()


@dataclass(frozen=True)
class Cgroups:
    """Where each controller can be had here: controller -> (version, folder of our own cgroup)."""

    homes: dict[str, tuple[int, Path]] = field(default_factory=dict)
    freezer: Path | None = None  # a v2 tree, with or without controllers: cgroup.freeze and cgroup.kill
    why: dict[str, str] = field(default_factory=dict)

    def version(self, controller: str) -> str:
        return f"cgroup-v{self.homes[controller][0]}" if controller in self.homes else "none"


def find() -> Cgroups:
    """What can be had on this machine, by trying it."""
    homes: dict[str, tuple[int, Path]] = {}
    why: dict[str, str] = {}
    v1, v2 = _own_cgroups()
    freezer = None
    if v2 is not None:
        reason = _try_mkdir(v2)
        if reason:
            why["v2"] = reason
        else:
            freezer = v2
            for controller in CONTROLLERS:
                reason = _enable(v2, controller)
                if reason:
                    why[controller] = reason
                else:
                    homes[controller] = (2, v2)
    for controller in CONTROLLERS:
        if controller in homes:
            continue
        if controller not in v1:
            why.setdefault(controller, f"no hierarchy with the {controller} controller is mounted")
            continue
        reason = _try_mkdir(v1[controller])
        if reason:
            why[controller] = reason
        else:
            homes[controller] = (1, v1[controller])
            why.pop(controller, None)
    return Cgroups(homes, freezer, why)


def _own_cgroups() -> tuple[dict[str, Path], Path | None]:
    """The folders of the cgroups that this process is in: by v1 controller, and in the v2 tree."""
    try:
        table = Path("/proc/self/mountinfo").read_text()
        membership = Path("/proc/self/cgroup").read_text()
    except OSError:
        return {}, None
    homes = _places(table, membership)
    v2 = homes.pop("", None)
    if v2 is not None and v2.name == _LEAF:  # we, or whoever forked us, stepped down into it
        v2 = v2.parent
    return homes, v2


def _places(table: str, membership: str) -> dict[str, Path]:
    """Where each v1 controller's cgroup is, and under the empty name that of v2. Takes what /proc says."""
    paths: dict[str, str] = {}
    for line in membership.splitlines():
        _number, names, path = line.split(":", 2)
        if not path.startswith("/.."):  # outside of what our cgroup namespace shows
            paths |= dict.fromkeys(names.split(","), path)
    found: dict[str, Path] = {}
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        root, mount_point = (text.encode().decode("unicode_escape") for text in left.split()[3:5])
        kind, _source, options = right.split(" ", 2)
        for name in [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []:
            # Of a mount that shows only a part of the tree, as in many containers, our path counts from there.
            below = os.path.relpath(paths.get(name, "/.."), root)
            if name in paths and not below.startswith(".."):
                found.setdefault(name, Path(mount_point, below))
    return found


def _try_mkdir(home: Path) -> str:
    probe = home / f"{_PREFIX}-probe-{os.getpid()}-{next(_counter)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"cannot make a cgroup in {home}: {error.strerror}"
    return ""


def _enable(home: Path, controller: str) -> str:
    """Let children of `home` have the controller; moves this process to a leaf if the kernel insists."""
    try:
        if controller not in (home / "cgroup.controllers").read_text().split():
            return f"the {controller} controller is not given to {home}"
        if controller in (home / "cgroup.subtree_control").read_text().split():
            return ""
        try:
            (home / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:
            reason = _step_down(home)
            if reason:
                return reason
            (home / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError as error:
        return f"cannot enable the {controller} controller in {home}: {error.strerror}"
    return ""


def _step_down(home: Path) -> str:
    """A v2 cgroup with processes cannot have children with controllers: step into a leaf, if we are alone."""
    others = [pid for pid in (home / "cgroup.procs").read_text().split() if int(pid) != os.getpid()]
    if others:
        return f"{home} holds other processes; start in a scope of your own: systemd-run --user --scope -p Delegate=yes"
    leaf = home / _LEAF
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    return ""


def make_room() -> None:
    """Before starting processes that will have pools of their own: they cannot step down while we stand there.

    Those processes inherit our leaf, and find its parent.
    """
    _, home = _own_cgroups()
    if home is not None:
        for controller in CONTROLLERS:
            _enable(home, controller)


def step_up() -> None:
    """Undo it, if nobody else needs it any more."""
    _, home = _own_cgroups()
    if home is not None:
        with contextlib.suppress(OSError):
            _step_up(home)


def _step_up(home: Path) -> None:
    leaf = home / _LEAF
    if not leaf.exists() or any(home.glob(f"{_PREFIX}-*-*")):
        return
    if any(int(pid) != os.getpid() for pid in (leaf / "cgroup.procs").read_text().split()):
        return  # the last one to leave does it
    for controller in CONTROLLERS:
        with contextlib.suppress(OSError):
            (home / "cgroup.subtree_control").write_text(f"-{controller}")
    (home / "cgroup.procs").write_text(str(os.getpid()))
    leaf.rmdir()


class PoolCgroups:
    """A pool's own cgroup in each hierarchy in use."""

    def __init__(self, cgroups: Cgroups) -> None:
        self.cgroups = cgroups
        self.name = f"{_PREFIX}-{os.getpid()}-{_pid_namespace()}-{next(_counter)}"
        self.parents: dict[Path, int] = {}
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        cgroups = self.cgroups
        homes = [home for _, home in cgroups.homes.values()] + ([cgroups.freezer] if cgroups.freezer else [])
        for home in dict.fromkeys(homes):
            sweep_stale(home)
            self.parents[home] = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            (home / self.name).mkdir()
        for controller, (version, home) in cgroups.homes.items():
            if version == 2:
                reason = _enable(home, controller)  # the end of the last pool has disabled it
                if reason:
                    raise SandboxUnavailable(reason)
                (home / self.name / "cgroup.subtree_control").write_text(f"+{controller}")

    def slot(self, index: int) -> SlotCgroup:
        return SlotCgroup(self, index)

    def close(self) -> None:
        for home, fd in self.parents.items():
            with contextlib.suppress(OSError):
                remove_cgroup(fd, self.name)
            os.close(fd)
            with contextlib.suppress(OSError):
                _step_up(home)
        self.parents = {}


def _pid_namespace() -> int:
    """A pid means something only in its own namespace, and containers can share a tree of cgroups."""
    return os.stat("/proc/self/ns/pid").st_ino


def sweep() -> None:
    """Remove what killed pools left, in every hierarchy that this process can use."""
    v1, v2 = _own_cgroups()
    for home in dict.fromkeys([*(v1[name] for name in CONTROLLERS if name in v1), *([v2] if v2 else [])]):
        sweep_stale(home)


def sweep_stale(home: Path) -> None:
    """Remove what a pool left whose process and zygote were both killed. Never one that lives."""
    for path in home.glob(f"{_PREFIX}-*-{_pid_namespace()}-*"):
        pid = path.name.removeprefix(f"{_PREFIX}-").split("-")[0]
        if pid.isdigit() and _has_ended(pid):
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                remove_cgroup(fd, path.name)
            os.close(fd)


def _has_ended(pid: str) -> bool:
    """A zombie has ended too: in a container without an init that reaps, it stays for ever."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True


class SlotCgroup:
    """The cgroups of one slot: ceilings, what reached them, what was used."""

    def __init__(self, pool: PoolCgroups, index: int) -> None:
        self._pool = pool
        self._index = str(index)
        self._ceilings: tuple[object, ...] = ()
        self._open()

    # --- one trial ---

    def prepare(self, limits: Limits) -> list[int]:
        """Set the ceilings and forget what was; the descriptors through which the agent joins."""
        ceilings = (limits.memory, limits.pids, limits.cpus)
        if self._is_stale():
            self._renew()
        if ceilings != self._ceilings:
            self._set(limits)
            self._ceilings = ceilings
        if "memory" in self._files:
            self._reset_peak()
        self._before = self._counts()
        return list(self._joins.values())

    @property
    def is_silent(self) -> bool:
        """Whether `events` leaves something out: a v1 cgroup counts refused forks, but tells nobody."""
        return self._pool.cgroups.version("pids") == "cgroup-v1"

    def exceeded(self) -> str | None:
        """The ceiling that was reached since `prepare`, if one was. Call when `events` is readable, or at the end."""
        for fd, _ in self.events.poll(0):
            if fd == self._oom_event:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
        for name, count in self._counts().items():
            if count > self._before[name]:
                return name
        return None

    def peak_memory_bytes(self) -> int | None:
        peak = self._files.get("peak")
        return int(_read(peak)) if peak is not None else None

    @property
    def freezer(self) -> Path | None:
        home = self._pool.cgroups.freezer
        return home / self._pool.name / self._index if home else None

    def freeze(self, frozen: bool) -> bool:
        """Stop or continue every process in here; false if this machine cannot."""
        if self.freezer is None:
            return False
        (self.freezer / "cgroup.freeze").write_text("1" if frozen else "0")
        return True

    def open_members(self) -> dict[str, int]:
        """For a keeper that must kill by cgroup: the list of members, and the v2 kill switch if there is one."""
        folder = next(iter(self._folders.values()))
        fds = {"procs": os.open(folder / "cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)}
        switch = self.freezer / "cgroup.kill" if self.freezer else None
        if switch and switch.exists():
            fds["kill"] = os.open(switch, os.O_WRONLY | os.O_CLOEXEC)
        return fds

    def is_empty(self) -> bool:
        return all(not (folder / "cgroup.procs").read_text() for folder in self._folders.values())

    def close(self) -> None:
        """Release all handles and remove the cgroups; they are empty by then."""
        self.events.close()
        for fd in {*self._files.values(), *self._joins.values(), self._oom_event}:
            if fd >= 0:
                os.close(fd)
        for folder in self._folders.values():
            with contextlib.suppress(OSError):
                folder.rmdir()

    # --- the files ---

    def _open(self) -> None:
        self._folders: dict[Path, Path] = {}
        self._joins: dict[Path, int] = {}
        self._files: dict[str, int] = {}
        self._oom_event = -1
        self.events = select.epoll()
        if self._pool.cgroups.freezer:
            self._make(self._pool.cgroups.freezer)
        for controller in ("memory", "pids"):
            if controller not in self._pool.cgroups.homes:
                continue
            version, home = self._pool.cgroups.homes[controller]
            folder = self._make(home)
            if controller == "memory":
                self._open_memory(version, folder)
            else:
                self._files["pids"] = _open(folder / "pids.events")
                self.events.register(self._files["pids"], select.EPOLLPRI)

    def _open_memory(self, version: int, folder: Path) -> None:
        if version == 2:
            self._files["memory"] = _open(folder / "memory.events")
            self.events.register(self._files["memory"], select.EPOLLPRI)
            if (folder / "memory.peak").exists():
                self._files["peak"] = _open_peak(folder / "memory.peak")
            return
        self._files["memory"] = _open(folder / "memory.oom_control")
        self._files["peak"] = os.open(folder / "memory.max_usage_in_bytes", os.O_RDWR | os.O_CLOEXEC)
        self._files["usage"] = _open(folder / "memory.usage_in_bytes")
        self._oom_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        (folder / "cgroup.event_control").write_text(f"{self._oom_event} {self._files['memory']}")
        self.events.register(self._oom_event, select.EPOLLIN)

    def _make(self, home: Path) -> Path:
        folder = home / self._pool.name / self._index
        if home not in self._folders:
            folder.mkdir(exist_ok=True)
            self._folders[home] = folder
            self._joins[home] = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        return folder

    def _set(self, limits: Limits) -> None:
        homes = self._pool.cgroups.homes
        if "memory" in homes:
            version, home = homes["memory"]
            _set_memory(version, self._make(home), limits.memory)
        if "pids" in homes:
            (self._make(homes["pids"][1]) / "pids.max").write_text(str(limits.pids or "max"))
        if "cpu" in homes and (limits.cpus is not None or self._ceilings[2:] not in ((), (None,))):
            version, home = homes["cpu"]
            _set_cpu(version, self._make(home), limits.cpus)

    def _reset_peak(self) -> None:
        if "peak" in self._files:
            with contextlib.suppress(OSError):
                os.pwrite(self._files["peak"], b"0", 0)

    def _is_stale(self) -> bool:
        if not self._ceilings:
            return False
        if "usage" in self._files:
            return int(_read(self._files["usage"])) > _STALE_BYTES
        if "peak" in self._files:
            try:
                os.pwrite(self._files["peak"], b"0", 0)
            except OSError:
                return True  # before Linux 6.12 the peak of a v2 cgroup only grows
            return int(_read(self._files["peak"])) > _STALE_BYTES
        return False

    def _renew(self) -> None:
        self.close()
        self._ceilings = ()
        self._open()

    def _counts(self) -> dict[str, int]:
        counts = {}
        if "memory" in self._files:
            counts["memory"] = _field(_read(self._files["memory"]), b"oom_kill")
        if "pids" in self._files:
            counts["pids"] = _field(_read(self._files["pids"]), b"max")
        return counts


def _set_memory(version: int, folder: Path, memory: int | None) -> None:
    if version == 2:
        (folder / "memory.max").write_text(str(memory or "max"))
        optional = {"memory.swap.max": "0", "memory.oom.group": "1"}
    else:
        value = str(memory or -1)
        if (folder / "memory.memsw.limit_in_bytes").exists():
            (folder / "memory.memsw.limit_in_bytes").write_text("-1")
        (folder / "memory.limit_in_bytes").write_text(value)
        optional = {"memory.memsw.limit_in_bytes": value, "memory.swappiness": "0"}
    for name, text in optional.items():
        if (folder / name).exists():
            with contextlib.suppress(OSError):
                (folder / name).write_text(text)


def _set_cpu(version: int, folder: Path, cpus: float | None) -> None:
    quota = max(1000, round(cpus * _CPU_PERIOD_US)) if cpus is not None else None
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota or 'max'} {_CPU_PERIOD_US}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota or -1))


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _open_peak(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:  # before Linux 6.12 it can only be read; root may open it all the same
        return _open(path)


def _read(fd: int) -> bytes:
    return os.pread(fd, 4096, 0)


def _field(text: bytes, name: bytes) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0
