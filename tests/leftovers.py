"""What a test may leave behind, and how to tell: a picture before, a picture after, and a wait for what is ending.

Looks at the kernel's own lists only, never at what the package believes. A test process that calls
`adopt_orphans` is the parent of every orphan below it, so that a process of ours cannot hide by losing its own.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import select
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "sandbox-exec"
THREAD = "sandbox-exec"  # the name of a pool's manager
PATIENCE_S = 5.0  # bounds a failing test; what ends as it should does so in milliseconds
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# --- one kind each ---------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass  # ended while we looked
    return found


def descendants(root: int | None = None) -> set[int]:
    """Every process below `root` (this one, if None), zombies among them."""
    found: set[int] = set()
    queue = [root or os.getpid()]
    while queue:
        below = children(queue.pop())
        found.update(below)
        queue += below
    return found


def describe(pid: int) -> str:
    """A line for a person: the pid, its name, its state and whose child it is."""
    try:
        status = fields(pid)
    except OSError:
        return f"{pid} (ended)"
    return f"{pid} {status['Name']} [{status['State']}] child of {status['PPid']}, uid {status['Uid'].split()[0]}"


def fields(pid: int) -> dict[str, str]:
    """/proc/PID/status. Raises OSError if there is no such process any more."""
    with open(f"/proc/{pid}/status", errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


CONTROLLERS = ("memory", "pids", "cpu", "")  # and v2, whose hierarchy has no name


def cgroup_homes() -> list[Path]:
    """The folders of the cgroups that this process is in, in each hierarchy that can be of use to us."""
    return list(_homes(Path("/proc/self/cgroup").read_text()))


@functools.lru_cache(maxsize=1)  # asked for before every test; hierarchies are not mounted in the middle of a session
def _homes(own_cgroups: str) -> tuple[Path, ...]:
    mounted: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _source, options = right.split(" ", 2)
        if kind == "cgroup2":
            mounted[""] = Path(left.split()[4])
        elif kind == "cgroup":
            mounted |= dict.fromkeys(options.split(","), Path(left.split()[4]))
    homes: dict[Path, None] = {}
    for line in own_cgroups.splitlines():
        _number, names, path = line.split(":", 2)
        for name in names.split(","):
            if name in mounted and name in CONTROLLERS:
                homes[mounted[name] / path.lstrip("/")] = None
    return tuple(home for home in homes if home.is_dir())


def cgroups(homes: Iterable[Path]) -> set[str]:
    """The cgroups that can be ours. One whose pool is a living process that is not below us is another's."""
    return {
        entry.path
        for home in homes
        for entry in os.scandir(home)
        if entry.name.startswith(f"{PREFIX}-") and entry.is_dir() and not _is_anothers(entry.name)
    }


def _is_anothers(name: str) -> bool:
    """By the pid in it, and the pid namespace in which that pid means something."""
    pid, namespace, *_ = (*name.removeprefix(f"{PREFIX}-").removeprefix("delegated-").split("-"), "", "")
    return _is_living_other(pid, namespace)


def _is_living_other(pid: str, namespace: str) -> bool:
    is_here = namespace == str(os.stat("/proc/self/ns/pid").st_ino)
    return is_here and pid != str(os.getpid()) and os.path.exists(f"/proc/{pid}")


_own_folders: list[str] = []
ANOTHERS_MOUNT = re.compile(
    r"/(overlay2/[^/]+/merged|rootfs/overlayfs/[^/]+|containers/[^/]+/mounts/shm|netns/[0-9a-f]{12})$"  # a container's
    rf"|/{PREFIX}-(engine-[0-9a-f]+|tests-[^/]+)(/|$)"  # those of scripts/docker-engine, and of another's tests
)
SCRATCH = re.compile(rf"/{PREFIX}-docker-(?P<pid>\d+)-\d+-[^-/]+-(?P<namespace>\d+)-")  # its name says whose it is


def own_mounts_below(*folders: str) -> None:
    """Whatever is mounted in these folders from now on is ours, whatever its name."""
    _own_folders.extend(f"{os.path.realpath(folder)}/" for folder in folders)


def mounts() -> set[str]:
    """The mounts that can be ours: in our folders, or with our name. Others may mount what they like meanwhile."""
    with open("/proc/self/mountinfo") as file:
        return {line for line in file if _is_our_mount(line.split(" ", 5)[4])}


def _is_our_mount(path: str) -> bool:
    for folder in _own_folders:
        if path.startswith(folder):
            return not ANOTHERS_MOUNT.search(path, len(folder) - 1)
    if PREFIX not in path or ANOTHERS_MOUNT.search(path):
        return False
    owner = SCRATCH.search(path)
    return owner is None or not _is_living_other(owner["pid"], owner["namespace"])


def folders() -> set[str]:
    place = tempfile.gettempdir()
    return {f"{place}/{name}" for name in os.listdir(place) if name.startswith(f"{PREFIX}-")}


def descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            pass  # that of listdir itself
    return found


def managers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


# --- all of them -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """What there is of ours at one moment."""

    processes: set[int]
    cgroups: set[str]
    mounts: set[str]
    folders: set[str]
    descriptors: set[str]
    threads: set[threading.Thread]
    homes: tuple[Path, ...]

    @classmethod
    def take(cls, homes: Iterable[Path] = ()) -> Picture:
        homes = tuple(homes) or tuple(cgroup_homes())
        return cls(
            processes=descendants(),
            cgroups=cgroups(homes),
            mounts=mounts(),
            folders=folders(),
            descriptors=descriptors(),
            threads=set(managers()),
            homes=homes,
        )

    def left(self, patience_s: float = PATIENCE_S) -> list[str]:
        """What is there now and was not then, in words; waits for what is just ending.

        Beside a pool that was open then and still is, only what cannot be that pool's is looked at: processes
        that are neither its zygote nor a keeper, and mounts. The rest is checked where the pool is closed.
        """
        deadline_s = time.monotonic() + patience_s
        for thread in set(managers()) - self.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        is_shared = bool(self.threads & set(managers()))
        found = self._processes_left(deadline_s, is_shared)
        while (others := self._others_left(is_shared)) and time.monotonic() < deadline_s:
            gc.collect()  # a socket in a cycle of the test's own is no leak of ours
            threading.Event().wait(0.01)  # another program may be removing what looks like ours: there is no handle
        return found + others

    def _others_left(self, is_shared: bool) -> list[str]:
        now = Picture.take(self.homes)
        found = [f"mount: {line.strip()}" for line in now.mounts - self.mounts]
        if not is_shared:
            found += [f"thread: {thread.name}" for thread in now.threads - self.threads]
            found += [f"cgroup: {path}" for path in now.cgroups - self.cgroups]
            found += [f"folder: {path}" for path in now.folders - self.folders]
            found += [f"descriptor: {text}" for text in now.descriptors - self.descriptors]
        return found

    def _processes_left(self, deadline_s: float, is_shared: bool) -> list[str]:
        while new := descendants() - self.processes:
            if is_shared:
                new = {pid for pid in new if not _is_ours(pid)}
            if not new or not wait_for_end_of_one(new, deadline_s):
                break
        return [f"process: {describe(pid)}" for pid in sorted(new)]


def _is_ours(pid: int) -> bool:
    """A zygote, or the first process of a slot. On the rungs without namespaces a name must do."""
    try:
        status = fields(pid)
    except OSError:
        return True
    pids = status.get("NSpid", "").split()
    return status["Name"] == "sx-zygote" or (status["Name"] == "sx-keeper" and pids[-1:] in (["1"], [str(pid)]))


def wait_for_end_of_one(pids: Iterable[int], deadline_s: float) -> bool:
    """Wait until one of these processes has ended and is reaped; false if the time is over before.

    A zombie counts as there: its parent is at fault. One that has ended can be seen for a moment before its
    parent has reaped it, and there is no handle to wait for that: it is looked at again, ever later.
    """
    poller, open_fds = select.poll(), []
    pause_s = 0.0005
    try:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                return True
            open_fds.append(fd)
            poller.register(fd, select.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if poller.poll(left_s * 1000) and any(not os.path.exists(f"/proc/{pid}") for pid in pids):
                return True
            threading.Event().wait(min(pause_s, left_s))
            pause_s *= 2
        return False
    finally:
        for fd in open_fds:
            os.close(fd)
