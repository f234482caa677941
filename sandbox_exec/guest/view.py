"""The file system that an agent sees: a read-only system, and nothing of the caller's but what was asked for.

The zygote builds it once, in a mount namespace of its own, and lives in it; every trial starts from a copy
and adds only what is its own (`add_trial_mounts`). `OLD` is where the caller's root stands while building.
"""

from __future__ import annotations

import os

from . import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OLD = "/.old"
SCRATCH = "/.scratch"
TRACE = "/run/trace"
AGENT = "/agent"
# The places of a trial: where its agent sees them, and their names in the scratch folder.
WRITABLE = {"/tmp": "tmp", "/workspace": "workspace", "/out": "out", "/dev/shm": "shm"}
READ_ONLY = {"/in": "in", AGENT: "agent"}
# Those of its grader. What is only here was never in a view that an agent has been in, not even by name.
_GRADERS_OWN = {"/tmp": "tmp", "/dev/shm": "shm", "/grade": "grade"}
_LEFT = {"/workspace": "workspace", "/out": "out"}
_GIVEN = {"/in": "in", "/grading": "grading"}
AGENT_ROLE, GRADER_ROLE, WRITING_GRADER_ROLE = "agent", "grader", "grader-writable"
ALL_PLACES = (*WRITABLE, *READ_ONLY, *_GRADERS_OWN, *_GIVEN)


def places_of(role: str) -> tuple[dict[str, str], dict[str, str]]:
    """What who plays that role can write, and what it can only read."""
    if role == AGENT_ROLE:
        return WRITABLE, READ_ONLY
    if role == GRADER_ROLE:
        return _GRADERS_OWN, _GIVEN | _LEFT
    return _GRADERS_OWN | _LEFT, _GIVEN


def home_of(role: str) -> str:
    """Where it starts. A grader's own folder: what an agent left in /workspace must not be loaded by being there."""
    return "/workspace" if role == AGENT_ROLE else "/grading"


_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_KERNEL_SETTINGS = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi")
_SEALED = k.MOUNT_ATTR_RDONLY | k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NODEV


def become_user() -> None:
    """A user namespace in which an ordinary user may do all of the below, and nothing outside of it."""
    uid, gid = os.geteuid(), os.getegid()
    k.unshare(k.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter(view: dict[str, Any]) -> None:
    """Move this process into the view. `view` is made by `containment.view`."""
    k.unshare(k.CLONE_NEWNS)
    k.mount("none", "/", flags=k.MS_REC | k.MS_PRIVATE)
    base = next(path for path in ("/tmp", "/var/tmp", "/mnt") if os.path.isdir(path))
    k.mount("tmpfs", base, "tmpfs", k.MS_NOSUID, "mode=755,size=4m")
    os.mkdir(base + OLD)
    k.pivot_root(base, base + OLD)
    os.chdir("/")
    writable, read_only = places_of(view["role"])
    for folder in ("/proc", "/dev/pts", "/dev/mqueue", "/run", SCRATCH, *writable, *read_only):
        os.makedirs(folder)
    _touch(TRACE)
    # Kept below the trial's own /proc: a user namespace may mount one only where it sees a whole one.
    k.mount(OLD + "/proc", "/proc", flags=k.MS_BIND | k.MS_REC)
    for name in _DEVICES:
        if os.path.exists(f"{OLD}/dev/{name}"):
            _touch(f"/dev/{name}")
            k.mount(f"{OLD}/dev/{name}", f"/dev/{name}", flags=k.MS_BIND)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{name}")
    for path, target in view["links"]:
        os.symlink(target, path)
    for source, target in view["binds"]:
        _bind(OLD + source, target)
    if view["agent"]:
        _bind(OLD + view["agent"], AGENT)
    for path, text in view["files"].items():
        _cover(path, text)
    for path in view["hidden"]:
        _hide(path)
    k.umount(OLD)
    os.rmdir(OLD)
    k.set_mount_flags("/", k.MOUNT_ATTR_RDONLY | k.MOUNT_ATTR_NODEV, recursive=False)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _touch(target)
    k.mount(source, target, flags=k.MS_BIND | k.MS_REC)
    k.set_mount_flags(target, _SEALED)


def _cover(path: str, text: str) -> None:
    """Show our own text in place of a file of the system, where there is one."""
    if not os.path.exists(path):
        return
    own = "/.files" + path
    os.makedirs(os.path.dirname(own), mode=0o755, exist_ok=True)
    with open(own, "w") as file:
        file.write(text)
    k.mount(own, path, flags=k.MS_BIND)
    k.set_mount_flags(path, _SEALED)


def _hide(path: str) -> None:
    if os.path.isdir(path):
        k.mount("tmpfs", path, "tmpfs", k.MS_RDONLY | k.MS_NOSUID | k.MS_NODEV, "mode=755,size=4k")
    elif os.path.exists(path):
        k.mount("/dev/null", path, flags=k.MS_BIND)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def add_slot_mounts(size: int, inodes: int, uid: int, gid: int, view: dict[str, Any]) -> int:
    """In the keeper's own copy: /proc of its pid namespace, terminals, and all that its agents can write.

    That is one tmpfs with a size and a number of files, so that both limits hold whatever an agent does.
    Returns a handle on it, which outlives the mounts: with its last holder the data is gone.
    """
    flags = k.MS_NOSUID | k.MS_NODEV
    k.mount("tmpfs", SCRATCH, "tmpfs", flags, f"mode=755,size={size},nr_inodes={inodes}")
    writable, read_only = places_of(view["role"])
    fill_scratch(SCRATCH, uid, gid, view["role"])
    scratch = os.open(SCRATCH, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kept = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in view["late"]}
    for target, name in writable.items():
        k.mount(f"{SCRATCH}/{name}", target, flags=k.MS_BIND)
    for target, name in read_only.items():
        if target == AGENT and view["agent"]:
            continue  # the artifact is there
        k.mount(f"{SCRATCH}/{name}", target, flags=k.MS_BIND)
        k.set_mount_flags(target, k.MOUNT_ATTR_RDONLY, recursive=False)
    k.mount(f"{SCRATCH}/trace", TRACE, flags=k.MS_BIND)
    for path, fd in kept.items():  # what the agent may read below /tmp, which its own /tmp has just covered
        source = f"/proc/self/fd/{fd}"
        if os.path.isdir(source):
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _touch(path)
        k.mount(source, path, flags=k.MS_BIND | k.MS_REC)
        os.close(fd)
    k.umount(SCRATCH)
    k.mount("mqueue", "/dev/mqueue", "mqueue", flags | k.MS_NOEXEC)
    k.mount("devpts", "/dev/pts", "devpts", k.MS_NOSUID | k.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    k.mount("proc", "/proc", "proc", flags | k.MS_NOEXEC)
    if uid == 0:  # root in a user namespace of its own: the kernel still takes it for the owner of these
        for path in filter(os.path.exists, _KERNEL_SETTINGS):
            k.mount(path, path, flags=k.MS_BIND | k.MS_REC)
            k.set_mount_flags(path, k.MOUNT_ATTR_RDONLY)
    return scratch


PIPES = ("trace", "stdout", "stderr", "result")


def fill_scratch(path: str, uid: int, gid: int, role: str) -> None:
    """The folders, the pipes and the count of nanoseconds spent frozen, on every rung the same."""
    writable, read_only = places_of(role)
    for name in (*writable.values(), *read_only.values()):
        os.mkdir(f"{path}/{name}")
    with open(f"{path}/paused", "w") as file:
        file.write(f"{0:<20}")
    for name in PIPES:
        os.mkfifo(f"{path}/{name}", 0o600)
    if uid != os.geteuid():
        for name in (*writable.values(), "trace", "stdout", "stderr"):  # an agent may open /dev/stdout
            os.chown(f"{path}/{name}", uid, gid)


def remove_scratch(path: str) -> None:
    """Remove a scratch folder that an agent has written in: however deep, whatever it locked, through no link.

    Without recursion: each folder is first moved up to the top, so that no depth is too deep. What cannot be
    removed, as something that survived still writes there, stays.
    """
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        folders = _remove_files(top)
        for name in folders:  # grows while we go
            _remove_folder(top, name, folders)
    finally:
        os.close(top)
    _quietly(os.rmdir, path)


def _remove_folder(top: int, name: str, folders: list[str]) -> None:
    try:
        os.chmod(name, 0o700, dir_fd=top)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    except OSError:
        return
    for inner in _remove_files(fd):
        moved = f"{os.urandom(8).hex()}-{len(folders)}"
        _quietly(os.chmod, inner, 0o700, dir_fd=fd)  # a folder that cannot be written cannot be moved either
        if _quietly(os.rename, inner, moved, src_dir_fd=fd, dst_dir_fd=top):
            folders.append(moved)
    os.close(fd)
    _quietly(os.rmdir, name, dir_fd=top)


def _remove_files(fd: int) -> list[str]:
    """Remove all that is no folder; the names of those."""
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            _quietly(os.unlink, name, dir_fd=fd)
    return [name for name, is_folder in found if is_folder]


def _quietly(call: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        call(*args, **kwargs)
    except OSError:
        return False
    return True


def make_network() -> None:
    """Move into a net namespace with nothing but a loopback of its own."""
    k.unshare(k.CLONE_NEWNET)
    k.set_loopback_up()


class Cleanliness:
    """Tells whether a trial left anything in its slot that the next one could see.

    Namespaces and mounts are dear, so a keeper makes them for its slot and lends them to one trial after the
    other. A slot in which a file was written, a packet sent, or a queue, a segment or a semaphore left behind
    is not lent again: the keeper ends, and with it all of that.
    """

    _COUNTERS = ("/proc/self/net/dev", "/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")

    def __init__(self, scratch: int) -> None:
        self._scratch = scratch
        self._counters = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._COUNTERS]
        self._before = self._look()

    def is_lost(self) -> bool:
        return self._look() != self._before

    def _look(self) -> list[object]:
        room = os.statvfs(self._scratch)
        seen: list[object] = [room.f_bfree, room.f_ffree, os.listdir("/dev/mqueue")]
        seen += [os.pread(fd, 4096, 0) for fd in self._counters]
        seen += [os.stat(name, dir_fd=self._scratch).st_ctime_ns for name in WRITABLE.values()]
        return seen
