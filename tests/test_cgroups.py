"""Ceilings by cgroup: against the machine's own tree where it can be had, and against a model of v2.

No machine has the controllers in v1 and in v2 at once, and a tree of v2 with controllers needs a delegation that
tests cannot count on. So what differs in v2 (who may have children, which file says what) is tested on `Tree`: a
folder of plain files with the kernel's rules for mkdir, cgroup.procs and cgroup.subtree_control. What a model
cannot show, such as a real kill at memory.max, is shown by tests/test_limits_held.py wherever it runs.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
from support import spin_until, wait_readable

from sandbox_exec import Limits, SandboxUnavailable
from sandbox_exec.containment import Cgroups, PoolCgroups, SlotCgroup, cgroups
from sandbox_exec.containment.cgroups import find, sweep_stale

MIB = 1 << 20
MACHINE = find()
needs_cgroups = pytest.mark.skipif("memory" not in MACHINE.homes or "pids" not in MACHINE.homes, reason="none here")


# --- where we are ---

V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_MEMBER = "4:memory:/user.slice/a\n2:cpu,cpuacct:/\n1:name=systemd:/init\n0::/user.slice\n"
V2 = "25 1 0:23 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def places(table: str, membership: str) -> dict[str, str]:
    return {name: str(path) for name, path in cgroups._places(table, membership).items()}


def test_our_cgroup_is_found_in_every_hierarchy() -> None:
    assert places(V1, V1_MEMBER) == {
        "memory": "/sys/fs/cgroup/memory/user.slice/a",
        "cpu": "/sys/fs/cgroup/cpu,cpuacct",
        "cpuacct": "/sys/fs/cgroup/cpu,cpuacct",
        "": "/sys/fs/cgroup/unified/user.slice",
    }
    scope = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope"
    assert places(V2, f"0::{scope}\n") == {"": f"/sys/fs/cgroup{scope}"}


def test_a_mount_that_shows_a_part_of_the_tree_is_counted_from_there() -> None:
    """As in a container that has the host's cgroup namespace: its root is somewhere down in the tree."""
    table = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert places(table, "4:memory:/docker/abc\n") == {"memory": "/sys/fs/cgroup/memory"}
    assert places(table, "4:memory:/docker/abc/inner\n") == {"memory": "/sys/fs/cgroup/memory/inner"}
    assert places(table, "4:memory:/docker/abcdef\n") == {}
    assert places(V2, "0::/../outside\n") == {}


def test_the_mount_in_which_we_can_be_found_is_taken_and_its_name_is_read_as_it_is_written() -> None:
    table = (
        "34 31 0:32 /other /mnt/elsewhere rw - cgroup cgroup rw,memory\n"
        "35 31 0:32 / /sys/fs/c\\040group rw - cgroup cgroup rw,memory\n"
        "36 31 0:32 / /mnt/again rw - cgroup cgroup rw,memory\n"
    )
    assert places(table, "4:memory:/here\n") == {"memory": "/sys/fs/c group/here"}


@pytest.mark.parametrize(("table", "membership"), [("", ""), ("", V1_MEMBER), (V1, ""), (V2, "1:name=systemd:/\n")])
def test_a_machine_without_cgroups_has_none(table: str, membership: str) -> None:
    assert places(table, membership) == {}


# --- a model of v2 ---


class Node(PosixPath):
    """A path in a `Tree`. The rules are the kernel's; the files are real, so that handles can be opened."""

    FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "memory.peak", "pids.max", "cpu.max", "cgroup.freeze")

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if exist_ok and self.is_dir():
            return
        given = (self.parent / "cgroup.subtree_control").read_text().split()
        PosixPath(self).mkdir(mode)
        self.fill(given)

    def fill(self, controllers: list[str]) -> None:
        write = {"cgroup.controllers": " ".join(controllers), "cgroup.subtree_control": "", "cgroup.procs": ""}
        write |= {"memory.events": "oom 0\noom_kill 0\n", "pids.events": "max 0\n"}
        write |= {name: "0" for name in self.FILES if name.split(".")[0] in (*controllers, "cgroup")}
        for name, text in write.items():
            PosixPath(self, name).write_text(text)

    def rmdir(self) -> None:
        if (self / "cgroup.procs").read_text().split() or any(path.is_dir() for path in PosixPath(self).iterdir()):
            raise OSError(errno.EBUSY, "Device or resource busy")
        for path in PosixPath(self).iterdir():
            path.unlink()
        PosixPath(self).rmdir()

    def write_text(self, data: str, *args: Any, **kwargs: Any) -> int:
        if self.name == "cgroup.subtree_control":
            self._enable(data)
        elif self.name == "cgroup.procs":
            self._move(data)
        elif not self.exists():
            raise OSError(errno.ENOENT, "No such file or directory")
        else:
            PosixPath(self).write_text(data)
        return len(data)

    def _enable(self, data: str) -> None:
        sign, name = data[0], data[1:]
        now = self.read_text().split()
        if sign == "-":
            now = [other for other in now if other != name]
        elif name not in (self.parent / "cgroup.controllers").read_text().split():
            raise OSError(errno.ENOENT, "No such file or directory")
        elif (self.parent / "cgroup.procs").read_text().split():
            raise OSError(errno.EBUSY, "Device or resource busy")  # no processes beside children with controllers
        else:
            now.append(name)
        PosixPath(self).write_text(" ".join(now))
        for child in PosixPath(self.parent).iterdir():
            if child.is_dir():
                (child / "cgroup.controllers").write_text(" ".join(now))

    def _move(self, pid: str) -> None:
        if (self.parent / "cgroup.subtree_control").read_text().split():
            raise OSError(errno.EBUSY, "Device or resource busy")
        for procs in Tree.top.rglob("cgroup.procs"):
            left = [other for other in procs.read_text().split() if other != pid]
            procs.write_text("\n".join(left))
        PosixPath(self).write_text("\n".join([*self.read_text().split(), pid]))


class Tree:
    """A cgroup of v2 that this process is in, delegated to it, with the controllers that are named."""

    top: PosixPath

    def __init__(self, folder: Path, *controllers: str, others: tuple[int, ...] = ()) -> None:
        self.home = Node(folder / "scope")
        PosixPath(self.home).mkdir()
        Tree.top = PosixPath(folder)
        self.home.fill(list(controllers))
        PosixPath(self.home, "cgroup.procs").write_text("\n".join(map(str, (os.getpid(), *others))))

    def place(self) -> Node:
        """Where this process is now."""
        (procs,) = [path for path in Tree.top.rglob("cgroup.procs") if str(os.getpid()) in path.read_text().split()]
        return Node(procs.parent)

    def folders(self) -> list[str]:
        return sorted(path.name for path in PosixPath(self.home).iterdir() if path.is_dir())


class NoEvents:
    """In place of an epoll, which takes no plain files."""

    def register(self, fd: int, events: int) -> None: ...

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        return []

    def close(self) -> None: ...


def remove(parent: int, name: str) -> None:
    folder = Node(os.readlink(f"/proc/self/fd/{parent}")) / name
    for child in list(PosixPath(folder).iterdir()):
        if child.is_dir():
            Node(child).rmdir()
    folder.rmdir()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tree]:
    def make(*controllers: str, others: tuple[int, ...] = ()) -> Tree:
        tree = Tree(tmp_path, *controllers, others=others)

        def own() -> tuple[dict[str, Path], Path | None]:
            place = tree.place()
            return {}, place.parent if place.name == cgroups._LEAF else place

        monkeypatch.setattr(cgroups, "_own_cgroups", own)
        monkeypatch.setattr(cgroups, "remove_cgroup", remove)
        monkeypatch.setattr(select, "epoll", NoEvents)
        return tree

    return make


def test_v2_gives_the_controllers_that_it_was_given(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids")
    found = find()
    assert {name: version for name, (version, _) in found.homes.items()} == {"memory": 2, "pids": 2}
    assert found.freezer == scope.home
    assert "cpu controller is not given" in found.why["cpu"]
    assert (found.version("memory"), found.version("cpu")) == ("cgroup-v2", "none")


def test_v2_without_controllers_still_freezes(tree: Callable[..., Tree]) -> None:
    scope = tree()
    found = find()
    assert (found.homes, found.freezer) == ({}, scope.home)
    assert set(found.why) == {"memory", "pids", "cpu"}
    assert scope.place() == scope.home  # nobody was moved for nothing


def test_a_process_that_is_alone_steps_into_a_leaf_so_that_its_cgroup_can_have_children(
    tree: Callable[..., Tree],
) -> None:
    scope = tree("memory", "pids", "cpu")
    find()
    assert scope.place() == scope.home / "sandbox-exec-supervisor"
    assert (scope.home / "cgroup.subtree_control").read_text().split() == ["memory", "pids", "cpu"]


def test_a_process_with_others_beside_it_moves_nobody_and_says_what_to_do(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids", others=(1,))
    found = find()
    assert found.homes == {}
    assert "holds other processes" in found.why["memory"]
    assert "systemd-run" in found.why["memory"]
    assert scope.place() == scope.home
    assert scope.folders() == []


def test_looking_again_from_the_leaf_finds_the_same(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids")
    first = find()
    assert find() == first
    assert scope.folders() == ["sandbox-exec-supervisor"]


def test_the_leaf_of_this_process_or_of_its_parent_is_not_taken_for_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/self/mountinfo": V2, "/proc/self/cgroup": "0::/run-1.scope/sandbox-exec-supervisor\n"}
    monkeypatch.setattr(Path, "read_text", lambda self: texts[str(self)])
    assert cgroups._own_cgroups() == ({}, Path("/sys/fs/cgroup/run-1.scope"))


def test_a_pool_on_v2_leaves_everything_as_it_was_and_the_next_one_can_start(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids", "cpu")
    found = find()
    for _ in range(3):
        pool = PoolCgroups(found)
        assert (scope.home / pool.name / "cgroup.subtree_control").read_text().split() == ["memory", "pids", "cpu"]
        slot = pool.slot(0)
        slot.prepare(Limits(memory="64MiB", pids=5, cpus=0.5))
        slot.close()
        pool.close()
        assert scope.folders() == []
        assert scope.place() == scope.home
        assert (scope.home / "cgroup.subtree_control").read_text() == ""


def test_who_makes_room_for_processes_of_its_own_is_found_by_them_and_leaves_last(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids")
    cgroups.make_room()
    leaf = scope.home / "sandbox-exec-supervisor"
    assert scope.place() == leaf
    PosixPath(leaf, "cgroup.procs").write_text(f"{os.getpid()}\n1\n")  # a host that was started here
    pool = PoolCgroups(find())
    assert set(pool.cgroups.homes) == {"memory", "pids"}
    pool.close()
    cgroups.step_up()
    assert scope.place() == leaf  # or the host's next pool would find somebody in its way
    assert (scope.home / "cgroup.subtree_control").read_text().split() == ["memory", "pids"]
    PosixPath(leaf, "cgroup.procs").write_text(f"{os.getpid()}\n")
    cgroups.step_up()
    assert (scope.place(), scope.folders()) == (scope.home, [])


def test_a_pool_that_ends_while_another_is_open_leaves_the_leaf_alone(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids")
    first, second = PoolCgroups(find()), PoolCgroups(find())
    first.close()
    assert scope.place() == scope.home / "sandbox-exec-supervisor"
    assert (scope.home / "cgroup.subtree_control").read_text().split() == ["memory", "pids"]
    second.close()
    assert scope.place() == scope.home


def test_a_pool_that_cannot_have_its_controllers_any_more_says_so_and_leaves_nothing(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids")
    found = find()
    PoolCgroups(found).close()
    procs = PosixPath(scope.home, "cgroup.procs")
    procs.write_text(f"{os.getpid()}\n1")  # somebody has come
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxUnavailable, match="holds other processes"):
        PoolCgroups(found)
    assert scope.folders() == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_ceilings_are_written_as_v2_has_them(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids", "cpu")
    pool = PoolCgroups(find())
    slot = pool.slot(3)
    folder = scope.home / pool.name / "3"

    def files(*names: str) -> list[str]:
        return [(folder / name).read_text() for name in names]

    slot.prepare(Limits(memory="64MiB", pids=5, cpus=1.5))
    assert files("memory.max", "memory.swap.max", "memory.oom.group") == [str(64 * MIB), "0", "1"]
    assert files("pids.max", "cpu.max") == ["5", "150000 100000"]
    slot.prepare(Limits(memory=None, pids=None, cpus=None))
    assert files("memory.max", "pids.max", "cpu.max") == ["max", "max", "max 100000"]
    slot.prepare(Limits(cpus=0.0001))
    assert files("cpu.max") == ["1000 100000"]  # the least that the kernel takes
    slot.close()
    pool.close()


def test_counters_of_v2_are_read_as_differences(tree: Callable[..., Tree]) -> None:
    scope = tree("memory", "pids")
    pool = PoolCgroups(find())
    slot = pool.slot(0)
    folder = PosixPath(scope.home, pool.name, "0")
    for total, name, text in (
        (1, "memory", "low 0\noom 1\noom_kill 1\n"),
        (2, "memory", "low 0\noom 5\noom_kill 4\n"),
        (1, "pids", "max 3\n"),
    ):
        slot.prepare(Limits())
        assert slot.exceeded() is None, total
        (folder / f"{name}.events").write_text(text)
        assert slot.exceeded() == name
    slot.close()
    pool.close()


def test_a_peak_that_cannot_be_set_back_means_a_new_cgroup_for_each_trial(
    tree: Callable[..., Tree], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.12 memory.peak is read-only, and an ordinary user cannot even open it to write."""
    real_open = os.open

    def opens(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("memory.peak") and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, flags, *args, **kwargs)

    scope = tree("memory", "pids")
    pool = PoolCgroups(find())
    monkeypatch.setattr(os, "open", opens)
    slot = pool.slot(0)
    folder = PosixPath(scope.home, pool.name, "0")
    slot.prepare(Limits(memory="64MiB"))
    (folder / "memory.peak").write_text(str(50 * MIB))
    assert slot.peak_memory_bytes() == 50 * MIB
    slot.prepare(Limits(memory="64MiB"))
    assert slot.peak_memory_bytes() == 0
    assert (folder / "memory.max").read_text() == str(64 * MIB)  # set anew, though it had not changed
    slot.close()
    pool.close()


def test_freezing_is_a_word_in_a_file(tree: Callable[..., Tree]) -> None:
    scope = tree()
    pool = PoolCgroups(find())
    slot = pool.slot(0)
    file = scope.home / pool.name / "0" / "cgroup.freeze"
    assert slot.freeze(True)
    assert file.read_text() == "1"
    assert slot.freeze(False)
    assert file.read_text() == "0"
    slot.close()
    pool.close()


# --- what was left by others ---


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_only_cgroups_whose_pool_has_ended_are_swept(tmp_path: Path) -> None:
    namespace, dead = os.stat("/proc/self/ns/pid").st_ino, dead_pid()
    zombie = os.fork()
    if zombie == 0:
        os._exit(0)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    stale = [f"sandbox-exec-{dead}-{namespace}-0", f"sandbox-exec-{zombie}-{namespace}-7"]
    kept = [
        f"sandbox-exec-{os.getpid()}-{namespace}-0",
        f"sandbox-exec-1-{namespace}-0",
        f"sandbox-exec-{dead}-{namespace + 1}-0",  # another container's: there the pid may live
        f"sandbox-exec-x-{namespace}-0",
        "sandbox-exec-supervisor",
        "somebody-elses",
    ]
    for name in (*stale, *kept):
        (tmp_path / name / "0").mkdir(parents=True)
        (tmp_path / name / "1").mkdir()
    sweep_stale(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    os.waitpid(zombie, 0)


def test_what_cannot_be_removed_does_not_stop_the_sweep(tmp_path: Path) -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    names = [f"sandbox-exec-{dead_pid()}-{namespace}-{number}" for number in range(3)]
    for name in names:
        (tmp_path / name / "0").mkdir(parents=True)
    (tmp_path / names[1] / "0" / "busy").mkdir()
    sweep_stale(tmp_path)
    assert os.listdir(tmp_path) == [names[1]]


# --- the machine's own ---


@pytest.fixture
def pool() -> Iterator[PoolCgroups]:
    pool = PoolCgroups(MACHINE)
    yield pool
    pool.close()


@pytest.fixture
def slot(pool: PoolCgroups) -> Iterator[SlotCgroup]:
    slot = pool.slot(0)
    yield slot
    slot.close()


class Member:
    """A child in a slot's cgroups, which does what it is told when it is told to."""

    def __init__(self, joins: list[int], does: Callable[[], object]) -> None:
        go, self._go = os.pipe()
        self._ready, ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for fd in joins:
                    os.write(fd, b"0")
                os.write(ready, b".")
                os.read(go, 1)
                does()
            finally:
                os._exit(0)
        os.close(go)
        os.close(ready)
        wait_readable(self._ready)

    def start(self) -> None:
        os.write(self._go, b".")

    def end(self) -> int:
        os.close(self._go)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._ready)
        return os.waitstatus_to_exitcode(status)


def hog(size: int) -> Callable[[], object]:
    return lambda: bytearray(size)


@needs_cgroups
def test_a_member_that_is_killed_for_its_memory_is_told_by_an_event_and_counted_once(slot: SlotCgroup) -> None:
    joins = slot.prepare(Limits(memory="32MiB"))
    assert slot.exceeded() is None
    member = Member(joins, hog(200 * MIB))
    member.start()
    wait_readable(slot.events.fileno())
    assert member.end() == -signal.SIGKILL
    assert slot.exceeded() == "memory"
    slot.prepare(Limits(memory="32MiB"))
    assert slot.exceeded() is None
    assert slot.is_empty()


@needs_cgroups
def test_a_fork_that_is_refused_is_counted(slot: SlotCgroup) -> None:
    def forks() -> None:
        for _ in range(4):
            try:
                if os.fork() == 0:
                    signal.pause()
            except BlockingIOError:
                return

    joins = slot.prepare(Limits(pids=2))
    member = Member(joins, forks)
    member.start()
    spin_until(lambda: slot.exceeded() == "pids", "a refused fork")
    os.kill(member.pid, signal.SIGKILL)
    fds = slot.open_members()
    for pid in map(int, os.pread(fds["procs"], 4096, 0).split()):
        os.kill(pid, signal.SIGKILL)
    for fd in fds.values():
        os.close(fd)
    member.end()
    spin_until(slot.is_empty, "an empty cgroup")
    for pid in {child for child in _zombies() if child != member.pid}:
        os.waitpid(pid, 0)


def _zombies() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


@needs_cgroups
def test_the_peak_is_that_of_the_trial_and_not_of_the_one_before(slot: SlotCgroup) -> None:
    for size in (40 * MIB, 4096):
        member = Member(slot.prepare(Limits(memory="128MiB")), hog(size))
        member.start()
        assert member.end() == 0
        peak = slot.peak_memory_bytes()
        assert peak is not None
        assert size <= peak < size + 20 * MIB


@needs_cgroups
def test_a_slot_that_still_holds_memory_is_made_anew(slot: SlotCgroup, tmp_path: Path) -> None:
    with open("/dev/shm/sandbox-exec-test", "wb") as shared:
        os.unlink(shared.name)

        def writes() -> None:
            os.write(shared.fileno(), bytes(8 * MIB))

        joins = slot.prepare(Limits(memory="64MiB"))
        home = MACHINE.homes["memory"][1]
        folder = slot._folders[home]
        before = folder.stat().st_ino
        assert slot.prepare(Limits(memory="64MiB")) == joins  # it holds nothing: the same again
        assert folder.stat().st_ino == before
        member = Member(joins, writes)
        member.start()
        assert member.end() == 0
        slot.prepare(Limits(memory="64MiB"))
        assert folder.stat().st_ino != before
        peak = slot.peak_memory_bytes()
        assert peak is not None
        assert peak < MIB


@pytest.mark.skipif(MACHINE.freezer is None, reason="no v2 tree here")
def test_a_frozen_slot_does_nothing_until_it_is_thawed(slot: SlotCgroup) -> None:
    assert slot.freezer is not None
    member = Member(slot.prepare(Limits()), lambda: None)
    events = slot.freezer / "cgroup.events"
    assert slot.freeze(True)
    spin_until(lambda: "frozen 1" in events.read_text(), "frozen")
    member.start()
    assert os.waitpid(member.pid, os.WNOHANG) == (0, 0)
    assert slot.freeze(False)
    assert member.end() == 0


def test_a_pool_leaves_no_cgroup_and_no_descriptor(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    pool = PoolCgroups(MACHINE)
    homes = list(pool.parents)
    slots = [pool.slot(index) for index in range(3)]
    for slot in slots:
        slot.prepare(Limits(cpus=1))
        slot.close()
    pool.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [path for home in homes for path in home.glob(f"{pool.name}*")]


def test_without_any_cgroup_nothing_is_made() -> None:
    pool = PoolCgroups(Cgroups())
    assert pool.parents == {}
    pool.close()
