"""Copying what an agent left, which may be anything; and recording what it said, as much as it may be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from runs_support import in_child

from sandbox_exec.contracts import Limits
from sandbox_exec.guest import kernel
from sandbox_exec.sandbox.base import Stream
from sandbox_exec.trial import collect as module
from sandbox_exec.trial.collect import Collected, collect, safe_name
from sandbox_exec.trial.recorder import Recorder
from sandbox_exec.trial.trace import MAX_LINE_BYTES

PLENTY = 1 << 30


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What the agent left."""
    folder = tmp_path / "left"
    folder.mkdir()
    return folder


def copy(left: Path, target: Path, limit: int = PLENTY, skip: frozenset[str] = frozenset()) -> Collected:
    fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return collect(fd, target, limit, skip)
    finally:
        os.close(fd)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_files_and_folders_come_over_and_what_is_skipped_does_not(left: Path, tmp_path: Path) -> None:
    (left / "a").write_bytes(b"1")
    (left / "below" / "b").mkdir(parents=True)
    (left / "below" / "b" / "c").write_bytes(b"23")
    (left / "below" / "result.json").write_bytes(b"4")
    (left / "result.json").write_bytes(b"{}")
    found = copy(left, tmp_path / "out", skip=frozenset(["result.json"]))
    assert files(tmp_path / "out") == {"a": b"1", "below/b/c": b"23", "below/result.json": b"4"}
    assert (found.files, found.bytes, found.left_out) == (3, 4, [])


def test_of_nothing_nothing_is_made(left: Path, tmp_path: Path) -> None:
    (left / "empty" / "folders").mkdir(parents=True)
    assert copy(left, tmp_path / "out") == Collected()
    assert not (tmp_path / "out").exists()


def test_links_pipes_sockets_and_devices_are_left_out_and_never_followed(left: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"mine")
    (left / "link").symlink_to(secret / "key")
    (left / "folder").symlink_to(secret)
    (left / "dangling").symlink_to("nowhere")
    os.mkfifo(left / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(left / "socket"))
    (left / "good").write_bytes(b"1")
    found = copy(left, tmp_path / "out")
    assert files(tmp_path / "out") == {"good": b"1"}
    reason = "neither a regular file nor a folder"
    assert found.left_out == [(name, reason) for name in ("dangling", "folder", "link", "pipe", "socket")]


def test_a_file_that_does_not_fit_is_left_out_and_smaller_ones_come(left: Path, tmp_path: Path) -> None:
    for name, size in (("a", 60), ("b", 60), ("c", 40)):
        (left / name).write_bytes(bytes(size))
    with open(left / "sparse", "wb") as file:
        file.truncate(1 << 40)
    found = copy(left, tmp_path / "out", limit=100)
    assert {name: len(data) for name, data in files(tmp_path / "out").items()} == {"a": 60, "c": 40}
    assert [name for name, _ in found.left_out] == ["b", "sparse"]
    assert "60 bytes do not fit the 100 that are kept" in found.left_out[0][1]


def test_no_more_files_come_than_a_person_can_look_at(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_FILES", 3)
    monkeypatch.setattr(module, "_MAX_LISTED", 2)
    for number in range(9):
        (left / str(number)).touch()
    found = copy(left, tmp_path / "out")
    assert (len(files(tmp_path / "out")), found.files) == (3, 3)
    assert found.left_out == [("3", "more than 3 files"), ("4", "more than 3 files")]
    assert found.left_out_more == 4


def test_folders_are_followed_only_so_deep(left: Path, tmp_path: Path) -> None:
    here = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(40):  # by handle: the path may be longer than the kernel takes
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("deep", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)
    (left / "shallow").write_bytes(b"1")
    found = copy(left, tmp_path / "out")
    assert files(tmp_path / "out") == {"shallow": b"1"}
    assert [reason for _, reason in found.left_out] == ["deeper than 32 folders"]


def test_a_path_that_is_too_long_for_the_target_is_left_out(left: Path, tmp_path: Path) -> None:
    here = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(25):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("deep", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)
    found = copy(left, tmp_path / "out")
    assert files(tmp_path / "out") == {}
    assert [reason for _, reason in found.left_out] == ["File name too long"]


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
        (os.fsdecode(b"\xff"), "%FF"),
    ],
)
def test_odd_names_are_written_so_that_nothing_stumbles_over_them(name: str, safe: str) -> None:
    assert safe_name(name) == safe


def test_unlike_names_stay_unlike_however_long_they_are() -> None:
    long = ["x" * 255, "x" * 254 + "y", "\n" * 255, "\n" * 254 + "\t"]
    names = [*map(safe_name, long), "a%20b", safe_name("a b"), safe_name("a%20b")]
    assert len({*names}) == 6  # of the last three, the first two are one
    assert max(map(len, names)) <= 200


def test_of_names_that_are_made_to_collide_the_second_is_left_out(left: Path, tmp_path: Path) -> None:
    long = "x" * 255
    (left / long).write_bytes(b"second")
    (left / safe_name(long)).write_bytes(b"first")
    found = copy(left, tmp_path / "out")
    assert files(tmp_path / "out") == {safe_name(long): b"first"}
    assert found.left_out == [(safe_name(long), "File exists")]


def test_where_there_is_no_room_it_fails_and_no_half_of_a_file_stays(left: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    (left / "a").write_bytes(b"1")
    (left / "b").write_bytes(bytes(1 << 20))
    disk = tmp_path / "disk"
    disk.mkdir()

    def work() -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tiny", str(disk)], check=True)
        with pytest.raises(OSError, match="No space left"):
            copy(left, disk / "out")
        assert files(disk / "out") == {"a": b"1"}

    assert in_child(work) == 0


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
