"""The folder of an attempt: written whole or not at all, and read as what a hostile agent may have left."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import completion

from sandbox_exec.contracts import Grade
from sandbox_exec.errors import InvalidValue, StoreFull
from sandbox_exec.store.folders import (
    attempt_folder,
    begin_folder,
    digest_of,
    read_completion,
    read_file,
    read_grade,
    read_json,
    write_atomic,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = attempt_folder(tmp_path, completion(0).trial_id, 1)
    place.mkdir(parents=True)
    return place


# Writing


def test_an_attempts_folder_is_named_after_its_trial_and_number(tmp_path: Path) -> None:
    place = attempt_folder(tmp_path, "careful.t1.0-5f", 2)
    assert place == tmp_path / "trials" / "careful.t1.0-5f" / "attempt-2"
    begin_folder(place, b"{}")
    assert os.listdir(place) == ["dispatch.json"]
    begin_folder(place, b"{ }")
    assert (place / "dispatch.json").read_bytes() == b"{ }"


@pytest.mark.parametrize(
    ("trial_id", "attempt"), [("", 1), ("..", 1), (".", 1), ("../../etc", 1), ("a/b", 1), ("a", 0)]
)
def test_a_name_that_leads_elsewhere_makes_no_folder(tmp_path: Path, trial_id: str, attempt: int) -> None:
    with pytest.raises(InvalidValue, match="not a folder's name"):
        attempt_folder(tmp_path, trial_id, attempt)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_then_named_and_both_are_on_the_disk_in_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size}")
        fsync(fd)

    def renamed(source: Path, target: Path) -> None:
        steps.append("name")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    write_atomic(folder / "completion.json", b"whole")
    assert steps == ["name", "file of 5"]
    assert (folder / "completion.json").read_bytes() == b"whole"
    assert os.listdir(folder) == ["completion.json"]


def test_a_file_is_replaced_as_a_whole(folder: Path) -> None:
    write_atomic(folder / "x", b"a longer one")
    write_atomic(folder / "x", b"short")
    assert (folder / "x").read_bytes() == b"short"


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, OSError)]
)
def test_a_write_that_fails_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, error: type[Exception]
) -> None:

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(error, match="no room left" if error is StoreFull else "Input/output"):
            write_atomic(folder / "x", b"new")
    assert os.listdir(folder) == []


@pytest.mark.parametrize(("call", "due"), [("open", b"old"), ("rename", b"old"), ("fsync", b"new")])
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, due: bytes
) -> None:
    write_atomic(folder / "x", b"old")
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_atomic(folder / "x", b"new")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (folder / "x").read_bytes() == due
    write_atomic(folder / "x", b"newer")
    assert (folder / "x").read_bytes() == b"newer"


def test_a_full_disk_while_a_folder_is_made_is_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(StoreFull):
        begin_folder(attempt_folder(tmp_path, "a", 1), b"{}")


# Completions


def test_a_completion_is_read_as_it_was_written(folder: Path) -> None:
    write_atomic(folder / "completion.json", completion(0).model_dump_json().encode())
    assert read_completion(folder) == (completion(0), "")


WHOLE = completion(0).model_dump_json()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is malformed: Invalid JSON: EOF"),
        (WHOLE[:-1].encode(), "is malformed: Invalid JSON: EOF"),
        (b"null", "is malformed"),
        (b"\xff" + WHOLE.encode(), "is malformed: Invalid JSON"),
        (WHOLE.replace('"attempt":1', '"attempt":0').encode(), "is malformed: attempt: Input should be greater"),
        (WHOLE.replace('"attempt":1', '"attempt":2').encode(), "attempt 2, not of"),
        (WHOLE.replace('"attempt":1', '"attempt":1,"reward":1').encode(), "is malformed: reward: Extra"),
        (WHOLE.replace('"blame":null', '"blame":"agent"').encode(), "blame is 'agent', but status success"),
        (completion(1).model_dump_json().encode(), "is of 'careful.task-0.1"),
        (b"[" * 100_000, "is malformed: Invalid JSON: recursion limit"),
    ],
    ids=["empty", "torn", "null", "not text", "no attempt", "other attempt", "extra", "blame", "other trial", "deep"],
)
def test_a_malformed_completion_is_none_with_the_reason(folder: Path, text: bytes, reason: str) -> None:
    (folder / "completion.json").write_bytes(text)
    found = read_completion(folder)
    assert found.value is None
    assert reason in found.reason


def test_a_completion_that_is_not_there_is_none_even_if_the_folder_is_gone(folder: Path) -> None:
    assert read_completion(folder) == (None, "completion.json is not there")
    folder.rmdir()
    assert read_completion(folder) == (None, "completion.json is not there")


# What came out of a sandbox


def secret_link(path: Path) -> None:
    secret = path.parent.parent / "secret.json"
    secret.write_text('{"score": 1}')
    path.symlink_to(secret)


def dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def pipe_without_a_writer(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a socket's path has a limit, and that of a test is long


def device_without_end(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("making a device needs root")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # zero


def giant(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse: it costs the agent nothing


HOSTILE = [
    (secret_link, "cannot be read"),
    (dangling_link, "cannot be read"),
    (pipe_without_a_writer, "is not a regular file"),
    (directory, "is not a regular file"),
    (listening_socket, "cannot be read"),
    (device_without_end, "is not a regular file"),
    (giant, "is larger than"),
]


@pytest.mark.parametrize(("plant", "reason"), HOSTILE, ids=lambda value: getattr(value, "__name__", None))
def test_nothing_but_a_regular_file_of_some_size_is_read(
    folder: Path, plant: Callable[[Path], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name in ("result.json", "grade.json", "completion.json"):
        plant(folder / name)
    for found in (read_json(folder), read_grade(folder), read_completion(folder)):
        assert found.value is None
        assert reason in found.reason
    assert digest_of(folder, "result.json") is None


def test_a_file_is_read_up_to_its_limit_and_not_beyond(folder: Path) -> None:
    (folder / "x").write_bytes(b"12345")
    assert read_file(folder, "x", 5) == (b"12345", "")
    assert read_file(folder, "x", 4) == (None, "x is larger than 4 bytes")


def test_a_result_is_any_json_and_its_digest_that_of_its_bytes(folder: Path) -> None:
    data = b' {"answer": [1, 2.5, null, "\\ud83d\\ude00"]}\n'
    (folder / "result.json").write_bytes(data)
    assert read_json(folder) == ({"answer": [1, 2.5, None, "😀"]}, "")
    assert digest_of(folder, "result.json") == hashlib.sha256(data).hexdigest()
    (folder / "result.json").write_bytes(b"null")
    assert read_json(folder) == (None, "")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"NaN", b'{"a": Infinity}', b"\xff\xfe", b"[" * 100_000, b"[" * 1000 + b"]" * 1000, b"9" * 10_000],
    ids=["empty", "torn", "NaN", "infinity", "not text", "deep", "deep and whole", "too many digits"],
)
def test_a_malformed_result_is_none_with_the_reason(folder: Path, text: bytes) -> None:
    (folder / "result.json").write_bytes(text)
    found = read_json(folder)
    assert found.value is None
    assert found.reason.startswith("result.json is malformed: ")


def test_a_grade_is_read_and_validated(folder: Path) -> None:
    (folder / "grade.json").write_text('{"score": 1, "metrics": {"lines": 3}}')
    assert read_grade(folder) == (Grade(score=1.0, metrics={"lines": 3.0}), "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{}", "score: Field required"),
        (b'{"score": "1"}', "score: Input should be a valid number"),
        (b'{"score": NaN}', "score: Input should be a finite number"),
        (b'{"score": 1, "details": NaN}', "details: Value error, nan is not JSON"),
        (b'{"score": 1, "reward": 1}', "reward: Extra inputs"),
        (b'{"score": 1', "Invalid JSON: EOF"),
        (b"[" * 100_000, "Invalid JSON: recursion limit"),
    ],
)
def test_a_malformed_grade_is_none_with_the_reason(folder: Path, text: bytes, reason: str) -> None:
    (folder / "grade.json").write_bytes(text)
    found = read_grade(folder)
    assert found.value is None
    assert reason in found.reason
