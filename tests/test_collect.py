"""Copying what an agent left, which may be anything; and recording what it said, as much as it may be."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs_support import fork, in_child

from sandbox_exec.contracts import Limits
from sandbox_exec.errors import InvalidValue
from sandbox_exec.guest import kernel
from sandbox_exec.sandbox.base import Stream
from sandbox_exec.trial import collect as module
from sandbox_exec.trial.collect import Collected, CollectLimits, collect, safe_name, stays_inside
from sandbox_exec.trial.recorder import Recorder
from sandbox_exec.trial.trace import MAX_LINE_BYTES

PLENTY = CollectLimits(1 << 30)
SECRET = b"the host's own"
UNKNOWN_UID = 54_321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What the agent left."""
    folder = tmp_path / "left"
    folder.mkdir()
    return folder


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder of the host's, with a canary: `key`."""
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "key").write_bytes(SECRET)
    return folder


def copy(left: Path, target: Path, limits: CollectLimits = PLENTY, **options: Any) -> Collected:
    fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return collect(fd, target, limits, **options)
    finally:
        os.close(fd)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def reasons(found: Collected) -> dict[str, str]:
    return dict(found.left_out)


# --- what comes over ---


def test_files_and_folders_come_over_and_what_is_skipped_does_not(left: Path, tmp_path: Path) -> None:
    (left / "a").write_bytes(b"1")
    (left / "below" / "b").mkdir(parents=True)
    (left / "below" / "b" / "c").write_bytes(b"23")
    (left / "below" / "result.json").write_bytes(b"4")
    (left / "result.json").write_bytes(b"{}")
    found = copy(left, tmp_path / "out", skip=frozenset(["result.json"]))
    assert files(tmp_path / "out") == {"a": b"1", "below/b/c": b"23", "below/result.json": b"4"}
    assert found == Collected(files=3, folders=2, bytes=4)


def test_empty_folders_come_over(left: Path, tmp_path: Path) -> None:
    (left / "empty" / "folders").mkdir(parents=True)
    assert copy(left, tmp_path / "out") == Collected(folders=2)
    assert (tmp_path / "out" / "empty" / "folders").is_dir()


def test_of_nothing_nothing_is_made(left: Path, tmp_path: Path) -> None:
    assert copy(left, tmp_path / "out") == Collected()
    (left / "link").symlink_to("nowhere")
    assert copy(left, tmp_path / "out").left_out == [("link", "a symbolic link")]
    assert not (tmp_path / "out").exists()


def test_a_handle_can_be_collected_from_twice(left: Path, tmp_path: Path) -> None:
    (left / "a").touch()
    fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert collect(fd, tmp_path / "1", PLENTY) == collect(fd, tmp_path / "2", PLENTY) == Collected(files=1)
    finally:
        os.close(fd)


def test_a_target_may_be_an_empty_folder_and_nothing_else(left: Path, tmp_path: Path) -> None:
    (left / "a").touch()
    target = tmp_path / "out"
    target.mkdir()
    assert copy(left, target).files == 1
    with pytest.raises(OSError, match="not empty"):
        copy(left, target)
    (tmp_path / "link").symlink_to(left)
    with pytest.raises(NotADirectoryError):
        copy(left, tmp_path / "link")
    with pytest.raises(NotADirectoryError):
        copy(left, left / "a")


@pytest.mark.parametrize(("modes", "mode"), [(False, 0o644), (True, 0o755)])
def test_of_modes_only_the_right_to_execute_comes_over_where_it_is_asked_for(
    left: Path, tmp_path: Path, modes: bool, mode: int
) -> None:
    for name, its in (("program", 0o6711), ("data", 0o2666)):
        (left / name).touch()
        os.chmod(left / name, its)
    (left / "folder").mkdir()
    os.chmod(left / "folder", 0o3777)
    os.utime(left / "data", (1, 1))
    before = os.umask(0o022)
    try:
        copy(left, tmp_path / "out", modes=modes)
    finally:
        os.umask(before)
    found = {path.name: path.stat() for path in (tmp_path / "out").iterdir()}
    assert {name: stat.S_IMODE(info.st_mode) for name, info in found.items()} == {
        "program": mode,
        "data": 0o644,
        "folder": 0o755,
    }
    assert {info.st_uid for info in found.values()} == {os.geteuid()}
    assert found["data"].st_mtime != 1


@pytest.mark.parametrize("broken", [[], ["copy_file_range"], ["copy_file_range", "sendfile"]])
@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, (3 << 20) + 7])
def test_bytes_come_over_whatever_way_the_kernel_refuses(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: list[str], size: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EXDEV, "refused")

    for name in broken:
        monkeypatch.setattr(os, name, refuse)
    content = os.urandom(size)
    (left / "file").write_bytes(content)
    assert copy(left, tmp_path / "out") == Collected(files=1, bytes=size)
    assert (tmp_path / "out" / "file").read_bytes() == content


def test_the_report_is_what_collected_json_holds() -> None:
    found = Collected(files=2, folders=1, bytes=3, left_out=[("a", "why")], left_out_more=4)
    assert json.loads(json.dumps(found.report())) == {
        "files": 2,
        "bytes": 3,
        "left_out": [{"path": "a", "reason": "why"}],
        "left_out_more": 4,
    }


# --- what is neither a file nor a folder ---


def test_symbolic_links_are_left_out_and_never_followed(left: Path, host: Path, tmp_path: Path) -> None:
    (left / "absolute").symlink_to(host / "key")
    (left / "relative").symlink_to("../host/key")
    (left / "folder").symlink_to(host)
    (left / "dangling").symlink_to("nowhere")
    (left / "loop").symlink_to("loop")
    (left / "good").write_bytes(b"1")
    (left / "inside").symlink_to("good")
    found = copy(left, tmp_path / "out")
    assert files(tmp_path / "out") == {"good": b"1"}
    assert found.left_out == [
        (name, "a symbolic link") for name in ("absolute", "dangling", "folder", "inside", "loop", "relative")
    ]


def test_pipes_and_sockets_are_left_out_and_nothing_waits_for_them(left: Path, tmp_path: Path) -> None:
    os.mkfifo(left / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(left / "socket"))
    (left / "good").write_bytes(b"1")
    found = copy(left, tmp_path / "out")
    assert files(tmp_path / "out") == {"good": b"1"}
    assert found.left_out == [("pipe", "a FIFO"), ("socket", "a socket")]


@needs_root
def test_devices_are_left_out(left: Path, tmp_path: Path) -> None:
    os.mknod(left / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(left / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    os.mknod(left / "loop", stat.S_IFBLK | 0o666, os.makedev(7, 0))
    os.mknod(left / "nobody's", stat.S_IFCHR | 0o666, os.makedev(4000, 1))
    found = copy(left, tmp_path / "out")
    assert found.left_out == [(name, "a device") for name in ("loop", "nobody's", "null", "zero")]


def test_nothing_is_opened_for_reading_before_it_is_known_to_be_a_file(
    left: Path, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(left / "pipe")
    (left / "link").symlink_to(host / "key")
    (left / "folder").mkdir()
    (left / "file").touch()
    opened = []
    real = os.open

    def watched(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        opened.append((str(path), flags))
        return real(path, flags, *args, **kwargs)

    fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
    monkeypatch.setattr(os, "open", watched)
    try:
        collect(fd, tmp_path / "out", PLENTY)
    finally:
        monkeypatch.undo()
        os.close(fd)
    by_name = [flags for path, flags in opened if path in ("pipe", "link", "folder", "file") and not flags & os.O_CREAT]
    assert len(by_name) == 4
    assert all(flags & os.O_PATH and flags & os.O_NOFOLLOW for flags in by_name)
    assert sum(path.startswith("/proc/self/fd/") for path, _ in opened) == 1
    assert all(flags & os.O_CLOEXEC for _, flags in opened)


# --- links that are kept ---


@pytest.mark.parametrize(
    ("link", "depth", "inside"),
    [
        ("a", 0, True),
        ("a/b", 0, True),
        ("./a//b/.", 0, True),
        (".", 0, True),
        ("..", 0, False),
        ("..", 1, True),
        ("../..", 1, False),
        ("./../a", 1, True),
        ("../../x/y", 2, True),
        ("a/..", 5, False),
        ("../a/../b", 5, False),
        ("/", 5, False),
        ("/a", 5, False),
        ("...", 0, True),
        ("..a/b..", 0, True),
    ],
)
def test_a_link_stays_inside_if_it_climbs_real_folders_only(link: str, depth: int, inside: bool) -> None:
    assert stays_inside(link, depth) is inside


def test_links_that_stay_inside_can_be_kept(left: Path, host: Path, tmp_path: Path) -> None:
    (left / "bin").mkdir()
    (left / "lib").mkdir()
    (left / "lib" / "tool").write_bytes(b"1")
    (left / "bin" / "tool").symlink_to("../lib/tool")
    (left / "lib64").symlink_to("lib")
    (left / "loop").symlink_to("loop")
    (left / "dangling").symlink_to("nowhere")
    (left / "absolute").symlink_to(host / "key")
    (left / "out").symlink_to("../host/key")
    (left / "bin" / "up").symlink_to("..")
    (left / "through").symlink_to("bin/up/../host/key")  # reads as bin/host/key, and leads out
    assert (left / "through").read_bytes() == SECRET
    found = copy(left, tmp_path / "kept" / "out", links="keep-inside")
    target = tmp_path / "kept" / "out"
    kept = {str(path.relative_to(target)): os.readlink(path) for path in target.rglob("*") if path.is_symlink()}
    assert kept == {"bin/tool": "../lib/tool", "bin/up": "..", "dangling": "nowhere", "lib64": "lib", "loop": "loop"}
    assert (target / "bin" / "tool").read_bytes() == b"1"
    assert (found.files, found.links) == (1, 5)
    assert found.left_out == [(name, "a symbolic link that may lead out") for name in ("absolute", "out", "through")]


# --- limits ---


def test_a_file_that_does_not_fit_is_left_out_and_smaller_ones_come(left: Path, tmp_path: Path) -> None:
    for name, size in (("a", 60), ("b", 60), ("c", 40)):
        (left / name).write_bytes(bytes(size))
    found = copy(left, tmp_path / "out", CollectLimits(100))
    assert {name: len(data) for name, data in files(tmp_path / "out").items()} == {"a": 60, "c": 40}
    assert found.left_out == [("b", "60 bytes do not fit the 100 that are kept")]


def test_a_sparse_giant_costs_nothing_and_a_small_one_comes(left: Path, tmp_path: Path) -> None:
    for name, size in (("giant", 1 << 40), ("small", 1 << 20)):
        with open(left / name, "wb") as file:
            file.truncate(size)
    began_s = time.monotonic()
    found = copy(left, tmp_path / "out")
    assert time.monotonic() - began_s < 5
    assert files(tmp_path / "out") == {"small": bytes(1 << 20)}
    assert [name for name, _ in found.left_out] == ["giant"]


def test_space_beyond_the_end_of_a_file_counts(left: Path, tmp_path: Path) -> None:
    fd = os.open(left / "hoard", os.O_WRONLY | os.O_CREAT)
    try:
        keep_size = 1
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(fd, keep_size, ctypes.c_long(0), ctypes.c_long(1 << 20)) != 0:
            pytest.skip("no fallocate here")
    finally:
        os.close(fd)
    (left / "plain").write_bytes(b"1")
    found = copy(left, tmp_path / "out", CollectLimits(1000, files=10))
    assert files(tmp_path / "out") == {"plain": b"1"}
    assert "bytes as allocated do not fit the 1000" in reasons(found)["hoard"]


def test_of_many_entries_those_with_the_smallest_names_are_looked_at(left: Path, tmp_path: Path) -> None:
    for number in reversed(range(9)):
        (left / str(number)).touch()
    found = copy(left, tmp_path / "out", CollectLimits(100, files=3))
    assert (sorted(files(tmp_path / "out")), found.files) == (["0", "1", "2"], 3)
    assert found.left_out == [(".", "6 of its entries: only 3 are looked at")]


def test_folders_count_and_the_shallow_come_first(left: Path, tmp_path: Path) -> None:
    for folder in "ab":
        (left / folder).mkdir()
        for number in range(3):
            (left / folder / str(number)).touch()
    (left / "c").touch()
    found = copy(left, tmp_path / "out", CollectLimits(100, files=5))
    assert sorted(files(tmp_path / "out")) == ["a/0", "a/1", "c"]
    assert (found.files, found.folders) == (3, 2)
    assert [path for path, _ in found.left_out] == ["a", "b"]


def test_neither_links_nor_names_beyond_the_limit_are_looked_at_one_by_one(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1300):
        (left / str(number)).symlink_to("x")
    found = copy(left, tmp_path / "out", CollectLimits(100, files=1200))
    assert (len(found.left_out), found.left_out_more) == (1000, 201)
    monkeypatch.setattr(module, "_MAX_SCANNED", 500)
    found = copy(left, tmp_path / "out", CollectLimits(100, files=1200))
    assert len(found.left_out) == 500


def make_deep(left: Path, name: str, levels: int) -> None:
    """By handle: the path may be longer than the kernel takes."""
    here = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("deep", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)


def remove_deep(left: Path, name: str, levels: int) -> None:
    """shutil.rmtree recurses: lift the tree up until it does not matter."""
    while levels > 100:
        piece = "/".join([name] * 100)
        os.rename(left / piece, left / "lifted")
        shutil.rmtree(left / name)
        os.rename(left / "lifted", left / name)
        levels -= 100


def test_folders_are_followed_only_so_deep(left: Path, tmp_path: Path) -> None:
    make_deep(left, "d", 4000)
    (left / "shallow").write_bytes(b"1")
    try:
        found = copy(left, tmp_path / "out")
        most = copy(left, tmp_path / "most", CollectLimits(10, depth=module.MAX_DEPTH))
    finally:
        remove_deep(left, "d", 4000)
    assert files(tmp_path / "out") == {"shallow": b"1"}
    assert (found.folders, most.folders) == (64, module.MAX_DEPTH)
    assert found.left_out == [("/".join("d" * 65), "deeper than 64 folders")]


def test_a_path_that_is_too_long_for_the_target_is_left_out(left: Path, tmp_path: Path) -> None:
    make_deep(left, "d" * 100, 25)
    found = copy(left, tmp_path / "out")
    assert files(tmp_path / "out") == {}
    assert (found.folders, [reason for _, reason in found.left_out]) == (20, ["its path is longer than 2048 bytes"])


def test_names_are_bounded(left: Path, tmp_path: Path) -> None:
    for name in ("x" * 10, "x" * 11, "é" * 6):
        (left / name).touch()
    found = copy(left, tmp_path / "out", CollectLimits(10, name_bytes=10))
    assert list(files(tmp_path / "out")) == ["x" * 10]
    assert {reason for _, reason in found.left_out} == {"its name is longer than 10 bytes"}


def test_a_depth_for_which_there_are_no_descriptors_is_refused() -> None:
    with pytest.raises(InvalidValue, match="from 0 to 200"):
        CollectLimits(1, depth=201)


# --- names ---


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("plain-name_1.txt", "plain-name_1.txt"),
        ("a b", "a%20b"),
        ("line\nbreak", "line%0Abreak"),
        ("\x1b[31m", "%1B[31m"),
        ("100%", "100%25"),
        ("back\\slash", "back%5Cslash"),
        ("é", "%C3%A9"),
        ("...", "..."),
        (os.fsdecode(b"\xff"), "%FF"),
    ],
)
def test_odd_names_are_written_so_that_nothing_stumbles_over_them(
    left: Path, tmp_path: Path, name: str, safe: str
) -> None:
    assert safe_name(name) == safe
    (left / name).write_bytes(b"1")
    assert copy(left, tmp_path / "out").files == 1
    assert files(tmp_path / "out") == {safe: b"1"}
    copy(left, tmp_path / "exact", names="exact")
    assert os.listdir(tmp_path / "exact") == [name]


def test_unlike_names_stay_unlike_also_those_that_are_the_safe_form_of_another(left: Path, tmp_path: Path) -> None:
    names = ["x" * 255, "x" * 254 + "y", "\n" * 255, "\n" * 254 + "\t", "a b", "a%20b", "a%2520b"]
    names += [safe_name(name) for name in names[:4]]
    for name in names:
        (left / name).write_text(name)
    assert copy(left, tmp_path / "out").files == len(names)
    found = files(tmp_path / "out")
    assert sorted(found.values()) == sorted(name.encode() for name in names)
    assert max(map(len, found)) <= 143


@given(st.lists(st.binary(min_size=1, max_size=255), min_size=2, unique=True))
def test_no_two_names_have_one_safe_form(raw: list[bytes]) -> None:
    names = [os.fsdecode(one) for one in raw]
    names += [safe_name(name) for name in names]
    assert len({safe_name(name) for name in names}) == len({*names})


# --- the host's files ---


def test_a_hard_link_to_a_file_of_the_host_is_left_out(left: Path, host: Path, tmp_path: Path) -> None:
    os.link(host / "key", left / "mine")
    os.link(host / "key", left / "too")
    found = copy(left, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    reason = "a hard link: 1 of the file's 3 names are not in here"
    assert found.left_out == [("mine", reason), ("too", reason)]


def test_hard_links_among_what_is_collected_come_over_each_as_a_file(left: Path, tmp_path: Path) -> None:
    (left / "a").mkdir()
    (left / "a" / "1").write_bytes(b"1")
    os.link(left / "a" / "1", left / "2")
    os.link(left / "a" / "1", left / "result.json")
    found = copy(left, tmp_path / "out", skip=frozenset(["result.json"]))
    assert files(tmp_path / "out") == {"2": b"1", "a/1": b"1"}
    assert found == Collected(files=2, folders=1, bytes=2)
    assert (tmp_path / "out" / "2").stat().st_nlink == 1


@needs_root
def test_what_is_not_the_agents_is_left_out_and_of_its_own_links_may_lead_elsewhere(
    left: Path, host: Path, tmp_path: Path
) -> None:
    (left / "theirs").write_bytes(b"1")
    os.chown(left / "theirs", UNKNOWN_UID, UNKNOWN_UID)
    os.link(left / "theirs", tmp_path / "in-workspace")
    os.rename(host / "key", left / "moved-in")
    (left / "folder").mkdir()
    (left / "folder" / "file").touch()
    found = copy(left, tmp_path / "out", owner=UNKNOWN_UID)
    assert files(tmp_path / "out") == {"theirs": b"1"}
    assert found.left_out == [("folder", "not the agent's"), ("moved-in", "not the agent's")]


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "bind", "file"])
def test_what_is_mounted_below_is_left_out(left: Path, host: Path, tmp_path: Path, kind: str) -> None:
    (left / "folder").mkdir()
    (left / "file").touch()
    (left / "good").write_bytes(b"1")

    def work() -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        if kind == "tmpfs":
            kernel.mount("tmpfs", str(left / "folder"), "tmpfs")
            (left / "folder" / "key").write_bytes(SECRET)
        elif kind == "bind":  # st_dev is the same
            kernel.mount(str(host), str(left / "folder"), flags=kernel.MS_BIND)
        else:
            kernel.mount(str(host / "key"), str(left / "file"), flags=kernel.MS_BIND)
        found = copy(left, tmp_path / "out")
        assert found.left_out == [("file" if kind == "file" else "folder", "on another mount")]
        assert SECRET not in files(tmp_path / "out").values()
        assert (tmp_path / "out" / "good").exists()

    assert in_child(work) == 0


@needs_root
def test_what_we_may_not_read_is_left_out(left: Path, tmp_path: Path) -> None:
    (left / "file").touch()
    (left / "folder").mkdir()
    for name in ("file", "folder"):
        os.chmod(left / name, 0)
    (left / "good").write_bytes(b"1")
    place = tmp_path / "place"
    place.mkdir()
    os.chown(place, UNKNOWN_UID, UNKNOWN_UID)

    def work() -> None:
        fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
        os.chdir(place)
        os.setgroups([])
        os.setresgid(UNKNOWN_UID, UNKNOWN_UID, UNKNOWN_UID)
        os.setresuid(UNKNOWN_UID, UNKNOWN_UID, UNKNOWN_UID)
        found = collect(fd, Path("out"), PLENTY)
        assert found.left_out == [("file", "Permission denied"), ("folder", "Permission denied")]

    assert in_child(work) == 0
    assert files(place / "out") == {"good": b"1"}


# --- while something still runs ---


@contextlib.contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do that over and over, in a process of its own, until the block ends."""
    here, there = os.pipe()

    def loop() -> None:
        work()
        os.write(there, b"1")
        while True:
            work()

    pid = fork(loop)
    os.close(there)
    try:
        assert os.read(here, 1) == b"1"
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(here)


def exchange(one: Path, other: Path) -> None:
    here, exchanged = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchanged) == 0


@pytest.mark.parametrize("links", ["leave-out", "keep-inside"])
def test_what_is_swapped_for_a_link_a_pipe_or_a_device_leads_nowhere(
    left: Path, host: Path, tmp_path: Path, links: str
) -> None:
    own = bytes(len(SECRET))
    traps = tmp_path / "traps"  # beside it, so that a name is one thing or the other
    traps.mkdir()
    (left / "folder").mkdir()
    for name in ("file", "folder/key", "pipe", "device"):
        (left / name).write_bytes(own)
    (traps / "file").symlink_to(host / "key")
    (traps / "folder").symlink_to(host)
    os.mkfifo(traps / "pipe")
    if os.geteuid() == 0:
        os.mknod(traps / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    for path in (left / "file", left / "folder" / "key", host / "key"):
        os.utime(path, (1, 1))  # nothing but its bytes tells the canary from the agent's file
    names = os.listdir(traps)

    def swap() -> None:
        for name in names:
            exchange(left / name, traps / name)

    came = left_out = 0
    with meanwhile(swap):
        for number in range(150):
            target = tmp_path / f"out-{number}"
            found = copy(left, target, links=links)
            assert {*files(target).values()} <= {own}
            assert not [path for path in target.rglob("*") if path.is_symlink()]
            came, left_out = came + found.files, left_out + len(found.left_out)
            shutil.rmtree(target, ignore_errors=True)
    assert came > 0
    assert left_out > 0


def test_a_lease_that_somebody_holds_is_not_waited_for(left: Path, tmp_path: Path) -> None:
    (left / "file").touch()
    held: list[BinaryIO] = []

    def hold() -> None:
        if held:
            signal.pause()
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        held.append(open(left / "file", "r+b"))  # noqa: SIM115 until this process is killed
        fcntl.fcntl(held[0], fcntl.F_SETLEASE, fcntl.F_WRLCK)

    with meanwhile(hold):
        found = copy(left, tmp_path / "out")
    assert found.left_out == [("file", "Resource temporarily unavailable")]


def test_what_comes_and_goes_meanwhile_harms_nobody(left: Path, tmp_path: Path) -> None:
    def churn() -> None:
        (left / "folder").mkdir()
        for number in range(10):
            (left / "folder" / str(number)).write_bytes(bytes(100))
        shutil.rmtree(left / "folder")

    with meanwhile(churn):
        for number in range(100):
            copy(left, tmp_path / f"out-{number}")


def test_a_name_that_is_listed_twice_comes_over_once(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (left / "folder").mkdir()
    (left / "folder" / "file").touch()
    real = os.scandir

    @contextlib.contextmanager
    def twice(fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with real(fd) as entries:
            yield iter([*entries] * 2)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", twice)
        assert copy(left, tmp_path / "out") == Collected(files=1, folders=1)


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("change", ["grows", "shrinks", "is rewritten"])
def test_a_file_that_changes_while_it_is_copied_is_not_kept(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, change: str
) -> None:
    (left / "file").write_bytes(bytes(size))
    (left / "good").write_bytes(b"1")
    real = module._copy_bytes
    copied = []

    def changing(source: int, target: int, promised: int) -> int:
        if promised == size:
            with open(left / "file", "r+b") as file:
                file.seek({"grows": size, "shrinks": 0, "is rewritten": 0}[change])
                if change == "shrinks":
                    file.truncate(5)
                else:
                    file.write(b"more")
            os.utime(left / "file", (1, 1))  # the clock of the kernel is coarse
        copied.append(real(source, target, promised))
        return copied[-1]

    monkeypatch.setattr(module, "_copy_bytes", changing)
    found = copy(left, tmp_path / "out")
    assert copied[0] == (5 if change == "shrinks" else size)
    assert files(tmp_path / "out") == {"good": b"1"}
    assert found == Collected(files=1, bytes=1, left_out=[("file", "changed while it was copied")])


def test_a_file_that_grows_all_the_time_is_read_to_what_was_promised(left: Path, tmp_path: Path) -> None:
    def grow() -> None:
        with open(left / "file", "ab") as file:
            file.write(bytes(1 << 12))
            if file.tell() > 1 << 24:
                file.truncate(0)

    with meanwhile(grow):
        for number in range(30):
            found = copy(left, tmp_path / f"out-{number}")
            assert sum(map(len, files(tmp_path / f"out-{number}").values())) == found.bytes
            shutil.rmtree(tmp_path / f"out-{number}", ignore_errors=True)


# --- our own side ---


@needs_root
@pytest.mark.parametrize("options", ["size=256k", "size=1m,nr_inodes=4"])
def test_where_there_is_no_room_it_fails_and_no_half_of_a_file_stays(left: Path, tmp_path: Path, options: str) -> None:
    (left / "a").write_bytes(b"1")
    (left / "b").write_bytes(bytes(1 << 20))
    (left / "c").touch()
    disk = tmp_path / "disk"
    disk.mkdir()

    def work() -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tiny", str(disk)], check=True)
        with pytest.raises(OSError, match="No space left"):
            copy(left, disk / "out")
        assert files(disk / "out") == {"a": b"1"}

    assert in_child(work) == 0


def test_a_lack_of_descriptors_is_ours_and_fails(left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (left / "a").touch()
    real = os.open

    def short(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == "a":
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", short)
    with pytest.raises(OSError, match="Too many open files"):
        copy(left, tmp_path / "out")


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_target_that_cannot_be_written_fails_and_a_source_that_cannot_be_read_is_left_out(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    (left / "a").write_bytes(bytes(size))
    for name in ("copy_file_range", "sendfile", "pread"):
        monkeypatch.setattr(os, name, fail)
    assert copy(left, tmp_path / "1") == Collected(left_out=[("a", "Input/output error")])
    monkeypatch.undo()
    for name in ("copy_file_range", "sendfile", "write"):
        monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="Input/output error"):
        copy(left, tmp_path / "2")
    assert os.listdir(tmp_path / "2") == []


# --- any tree ---

_NAMES = st.binary(min_size=1, max_size=20).filter(lambda raw: not {0, 47} & {*raw} and raw not in (b".", b".."))
_LEAVES = st.one_of(st.binary(max_size=50), st.sampled_from(["pipe", "link", "inner link", "hard link"]))
_TREES = st.recursive(
    st.dictionaries(_NAMES, _LEAVES, max_size=5),
    lambda below: st.dictionaries(_NAMES, st.one_of(_LEAVES, below), max_size=5),
    max_leaves=20,
)


def make_tree(place: bytes, tree: dict[bytes, Any], key: bytes) -> None:
    for name, what in tree.items():
        path = os.path.join(place, name)
        match what:
            case bytes():
                with open(path, "wb") as file:
                    file.write(what)
            case "pipe":
                os.mkfifo(path)
            case "link":
                os.symlink(key, path)
            case "inner link":
                os.symlink(b"x", path)
            case "hard link":
                os.link(key, path)
            case _:
                os.mkdir(path)
                make_tree(path, what, key)


def expected(tree: dict[bytes, Any], below: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, what in tree.items():
        path = below + safe_name(os.fsdecode(name))
        if isinstance(what, dict):
            found |= expected(what, f"{path}/")
        elif isinstance(what, bytes):
            found[path] = what
    return found


@given(_TREES, st.integers(0, 300), st.integers(0, 20), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_of_any_tree_what_comes_over_is_what_was_there_within_the_limits(
    tree: dict[bytes, Any], size: int, count: int, depth: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        left, key = Path(place, "left"), Path(place, "key")
        key.write_bytes(SECRET)
        left.mkdir()
        make_tree(os.fsencode(left), tree, os.fsencode(key))
        whole = copy(left, Path(place, "whole"))
        there = expected(tree)
        assert files(Path(place, "whole")) == there
        assert (whole.files, whole.bytes) == (len(there), sum(map(len, there.values())))

        limits = CollectLimits(size, files=count, depth=depth)
        some, again = copy(left, Path(place, "some"), limits), copy(left, Path(place, "again"), limits)
        came = files(Path(place, "some"))
        assert came.items() <= there.items()
        assert (some, came) == (again, files(Path(place, "again")))
        assert sum(map(len, came.values())) == some.bytes <= size
        assert some.files + some.folders == len([*Path(place, "some").rglob("*")]) <= count
        assert all(path.count("/") <= depth for path in came)
        assert json.loads(json.dumps(some.report())) == some.report()


def print_times() -> None:
    """`PYTHONPATH=tests python -c "import test_collect; test_collect.print_times()"`: no test, as machines differ."""

    def measure(what: str, source: str, target: str, make: Callable[[Path], object]) -> None:
        with tempfile.TemporaryDirectory(dir=source) as left, tempfile.TemporaryDirectory(dir=target) as out:
            make(Path(left))
            took_s = []
            for number in range(5):
                began_s = time.perf_counter()
                copy(Path(left), Path(out, str(number)))
                took_s.append(time.perf_counter() - began_s)
                shutil.rmtree(Path(out, str(number)))
            print(f"{what}, {source} to {target}: best {min(took_s) * 1e3:.0f} ms, worst {max(took_s) * 1e3:.0f} ms")

    for source, target in (("/dev/shm", "/dev/shm"), ("/dev/shm", tempfile.gettempdir())):
        measure("1000 files", source, target, lambda left: [(left / str(n)).write_bytes(b"x") for n in range(1000)])
        measure("100 MB", source, target, lambda left: (left / "large").write_bytes(bytes(100_000_000)))


# --- the recorder ---


def record(folder: Path, *said: tuple[Stream, bytes], **limits: Any) -> Recorder:
    recorder = Recorder(folder, Limits(**limits))
    for stream, data in said:
        recorder.feed(stream, memoryview(data))
    recorder.close()
    return recorder


def test_what_is_said_is_in_files_while_it_is_said_and_a_file_that_is_not_needed_is_not_made(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, Limits())
    recorder.feed("stdout", memoryview(b"one\n"))
    assert files(tmp_path) == {"stdout.log": b"one\n"}
    recorder.feed("stdout", memoryview(b"two\n"))
    recorder.feed("trace", memoryview(b'{"a":1}\n'))
    recorder.feed("result", memoryview(b"never"))
    assert files(tmp_path) == {"stdout.log": b"one\ntwo\n", "trace.jsonl": b'{"a":1}\n'}
    recorder.close()


def test_of_logs_the_beginning_is_kept(tmp_path: Path) -> None:
    record(
        tmp_path, ("stdout", b"12345"), ("stdout", b"67890"), ("stdout", b"!"), ("stderr", b"e" * 9), stdout=7, stderr=3
    )
    assert files(tmp_path) == {"stdout.log": b"1234567", "stderr.log": b"eee"}


def test_a_trace_has_whole_events_only(tmp_path: Path) -> None:
    said = b'{"n":1}\nnot json\n[2]\n\n{"n":NaN}\n{"n":3}\n{"torn":'
    recorder = record(tmp_path, *[("trace", bytes([byte])) for byte in said])
    assert files(tmp_path) == {"trace.jsonl": b'{"n":1}\n{"n":3}\n'}
    assert recorder.events == 2


def test_a_giant_line_is_dropped_with_its_end(tmp_path: Path) -> None:
    giant = b'{"x":"' + b"x" * MAX_LINE_BYTES
    record(tmp_path, ("trace", giant), ("trace", b'","y":'), ("trace", b'{"n":1}\n{"n":2}\n'))
    assert files(tmp_path) == {"trace.jsonl": b'{"n":2}\n'}


def test_a_trace_over_its_limit_is_a_beginning_without_gaps(tmp_path: Path) -> None:
    lines = [json.dumps({"n": "x" * size}).encode() + b"\n" for size in (1, 50, 1, 1)]
    recorder = record(tmp_path, ("trace", lines[0]), ("trace", b"".join(lines[1:])), trace=40)
    assert files(tmp_path) == {"trace.jsonl": lines[0]}
    assert recorder.events == 1


def test_a_flood_of_tiny_events_costs_no_more_than_its_bytes(tmp_path: Path) -> None:
    flood: tuple[Stream, bytes] = ("trace", b"{}\n" * 80_000)
    recorder = record(tmp_path, flood, flood, flood, trace=9)  # quadratic, it would take minutes
    assert (files(tmp_path), recorder.events) == ({"trace.jsonl": b"{}\n" * 3}, 3)


def test_what_cannot_be_written_ends_the_recording_and_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").symlink_to("/dev/full")
    recorder = record(tmp_path, ("stdout", b"1"), ("stdout", b"2"), ("stderr", b"3"))
    assert recorder.failure is not None
    assert "No space left" in str(recorder.failure)
    assert not (tmp_path / "stderr.log").exists()
