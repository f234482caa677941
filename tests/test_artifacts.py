"""Frozen artifacts: the same files give the same bytes, and no archive of another's hurts who unpacks it."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec import artifacts, cli
from sandbox_exec.artifacts import archive_digest, freeze, read_manifest, unpack, verify
from sandbox_exec.contracts import ArtifactFile, Manifest
from sandbox_exec.contracts.artifact import MAX_ENTRIES, MAX_UNPACKED_BYTES
from sandbox_exec.errors import InvalidArtifact, InvalidExperiment, StoreFull

AGENT = b"#!/bin/sh\necho done\n"
CONTENT = {"bin/agent": AGENT, "data/words.txt": b"one\ntwo\n", "empty": b"", "manifest.json": b"{}"}
# Of the tar archive: what compresses it may change, the format may not.
GOLDEN = "01b913a45599e780a168d987aa31989c7c35ab67e8acd1c9013e11e53f7b046f"


def fill(folder: Path, order: int = 1) -> Path:
    """An agent's folder; `order` is that in which its files are made."""
    for path, data in list(CONTENT.items())[::order]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "bin/agent").chmod(0o700 if order < 0 else 0o755)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "solver")


@pytest.fixture
def archive(tmp_path: Path, source: Path) -> Path:
    target = tmp_path / "solver.tar.gz"
    freeze(source, target, entrypoint="bin/agent")
    return target


@pytest.fixture(autouse=True)
def _no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)


# --- freezing ---


def test_the_manifest_says_what_is_in_the_archive(source: Path, tmp_path: Path) -> None:
    manifest = freeze(source, tmp_path / "a.tar.gz", entrypoint="./bin/agent")
    assert (manifest.schema_version, manifest.id, manifest.entrypoint) == ("agent_artifact_v1", "solver", "bin/agent")
    assert (manifest.platform, manifest.frozen_at, manifest.source_commit) == ("any", None, None)
    assert manifest.files == tuple(
        ArtifactFile(
            path=path,
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            mode="0755" if path == "bin/agent" else "0644",
        )
        for path, data in sorted(CONTENT.items())
    )
    assert read_manifest(tmp_path / "a.tar.gz") == verify(tmp_path / "a.tar.gz") == manifest


def test_any_tar_can_read_it_and_the_manifest_comes_first(source: Path, tmp_path: Path) -> None:
    long = "a" * 120 + "/" + "ü" * 100
    (source / long).parent.mkdir()
    (source / long).write_bytes(b"long")
    freeze(source, tmp_path / "a.tar.gz", entrypoint="bin/agent")
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        members = tar.getmembers()
        assert [one.name for one in members] == ["manifest.json", *(f"files/{p}" for p in sorted([*CONTENT, long]))]
        assert {(one.mtime, one.uid, one.gid, one.uname, one.gname) for one in members} == {(0, 0, 0, "", "")}
        assert {one.name: one.mode for one in members if one.mode != 0o644} == {"files/bin/agent": 0o755}
        content = tar.extractfile(f"files/{long}")
        assert content is not None
        assert content.read() == b"long"
    assert verify(tmp_path / "a.tar.gz").files[0].path == long


def test_the_same_files_give_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        other = fill(tmp_path / "elsewhere" / "solver", order=-1)
        os.utime(other / "empty", (1, 1))
        if os.geteuid() == 0:
            os.chown(other / "empty", 54_321, 54_321)
        for left_out in (".git", "data/__pycache__", "empty-folder"):
            (other / left_out).mkdir()
        (other / ".git" / "HEAD").write_text("not a repository")
        (other / "data" / "__pycache__" / "x.pyc").write_text("x")
        freeze(other, tmp_path / "b.tar.gz", entrypoint="bin/agent")
    finally:
        os.umask(before)
    assert (tmp_path / "b.tar.gz").read_bytes() == archive.read_bytes()
    assert archive_digest(archive) == f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"


def test_the_format_has_not_changed(archive: Path) -> None:
    assert hashlib.sha256(gzip.decompress(archive.read_bytes())).hexdigest() == GOLDEN
    assert archive.read_bytes()[:8] == b"\x1f\x8b\x08\0\0\0\0\0"  # no name, no time


def test_another_content_mode_or_id_gives_another_digest(archive: Path, source: Path, tmp_path: Path) -> None:
    digests = {archive_digest(archive)}
    other = tmp_path / "other.tar.gz"
    freeze(source, other, entrypoint="bin/agent", id="other")
    digests.add(archive_digest(other))
    (source / "empty").chmod(0o755)
    freeze(source, other, entrypoint="bin/agent")
    digests.add(archive_digest(other))
    (source / "empty").write_text("x")
    freeze(source, other, entrypoint="bin/agent")
    digests.add(archive_digest(other))
    assert len(digests) == 4


def test_a_link_to_a_file_in_the_folder_is_stored_as_that_file(source: Path, tmp_path: Path) -> None:
    (source / "run").symlink_to("bin/agent")
    manifest = freeze(source, tmp_path / "a.tar.gz", entrypoint="run")
    agent, run = (next(one for one in manifest.files if one.path == path) for path in ("bin/agent", "run"))
    assert (run.sha256, run.mode) == (agent.sha256, agent.mode)


@pytest.mark.parametrize(
    ("entry", "others", "platform"),
    [
        (None, [], "any"),
        (None, [62], "linux/amd64"),
        (None, [62, 183], "any"),
        (183, [62, 62], "linux/arm64"),
        (None, [9999], "linux/elf-9999"),
    ],
)
def test_the_platform_is_that_of_its_programs(
    source: Path, tmp_path: Path, entry: int | None, others: list[int], platform: str
) -> None:
    def elf(machine: int) -> bytes:
        return b"\x7fELF\x02\x01" + bytes(12) + machine.to_bytes(2, "little") + b"rest"

    if entry is not None:
        (source / "bin/agent").write_bytes(elf(entry))
    for number, machine in enumerate(others):
        (source / f"lib{number}.so").write_bytes(elf(machine))
    assert freeze(source, tmp_path / "a.tar.gz", entrypoint="bin/agent").platform == platform


def steps(*actions: Callable[[Path], object]) -> Callable[[Path], None]:
    def do_all(folder: Path) -> None:
        for action in actions:
            action(folder)

    return do_all


def make_socket(path: Path) -> None:
    sock = socket.socket(socket.AF_UNIX)
    before = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        sock.bind(path.name)
    finally:
        os.chdir(before)
        sock.close()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda f: (f / "out").symlink_to("/etc/passwd"), "'out' is a link that leaves the folder"),
        (lambda f: (f / "out").symlink_to("../solver-2"), "'out' is a link that leaves the folder"),
        (lambda f: (f / "dir").symlink_to("bin"), "'dir' is a link to a folder"),
        (lambda f: (f / "round").symlink_to("round"), "'round' is a link that leads nowhere"),
        (lambda f: (f / "gone").symlink_to("nothing"), "'gone' is a link that leads nowhere"),
        (lambda f: os.mkfifo(f / "pipe"), "'pipe' is neither a file nor a folder"),
        (
            steps(lambda f: os.mkfifo(f / "p"), lambda f: (f / "to-p").symlink_to("p")),
            "'to-p' is neither a file nor a folder",
        ),
        (lambda f: make_socket(f / "socket"), "'socket' is neither a file nor a folder"),
        (lambda f: (f / "empty").chmod(0o4755), "'empty' has the setuid or setgid bit"),
        (lambda f: (f / "a\nb").touch(), r"'a\\nb' cannot be stored: its name holds a control character; rename it"),
        (
            lambda f: os.close(os.open(os.fsencode(f) + b"/\xff", os.O_CREAT)),
            r"'\\udcff' cannot be stored: its name is not UTF-8",
        ),
        (lambda f: (f / "/".join("d" * 40)).mkdir(parents=True), "it is nested too deeply"),
        (lambda f: (f / "bin/agent").chmod(0o644), "the entrypoint 'bin/agent' is not executable; chmod"),
        (lambda f: (f / "bin/agent").unlink(), "the entrypoint 'bin/agent' is not there"),
        (
            steps(lambda f: (f / "bin/agent").unlink(), lambda f: (f / "bin/agent").mkdir()),
            "the entrypoint 'bin/agent' is a folder",
        ),
        (steps(shutil.rmtree, Path.mkdir), "there are no files in it"),
        (lambda f: shutil.rmtree(f), "'.' cannot be read: No such file"),
        (steps(shutil.rmtree, Path.touch), "'.' cannot be read: Not a directory"),
    ],
)
def test_what_cannot_be_frozen_is_refused(
    source: Path, tmp_path: Path, harm: Callable[[Path], object], reason: str
) -> None:
    harm(source)
    with pytest.raises(InvalidArtifact, match=r"solver' cannot be frozen:\n") as caught:
        freeze(source, tmp_path / "a.tar.gz", entrypoint="bin/agent")
    assert reason.replace("\\\\", "\\") in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if path != source] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_is_not_opened(source: Path, tmp_path: Path) -> None:
    os.mknod(source / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with pytest.raises(InvalidArtifact, match="'null' is neither a file nor a folder"):
        freeze(source, tmp_path / "a.tar.gz", entrypoint="bin/agent")


def test_all_that_is_wrong_is_told_at_once(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pipe")
    (source / "out").symlink_to("/etc")
    (source / "bin/agent").chmod(0o644)
    with pytest.raises(InvalidArtifact) as caught:
        freeze(source, source / "a.tar.gz", entrypoint="bin/agent")
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == ["'out'", "'pipe'", "the", "the"]
    assert "would be in the folder itself" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "reason"),
    [("nowhere/a.tar.gz", "there is no such folder"), ("", "it is a folder"), ("solver/sub.tar.gz", "in the folder")],
)
def test_an_archive_that_cannot_be_written_is_told(source: Path, tmp_path: Path, target: str, reason: str) -> None:
    with pytest.raises(InvalidArtifact, match=reason):
        freeze(source, tmp_path / target, entrypoint="bin/agent")


def test_a_file_that_cannot_be_read_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = artifacts._open_regular

    def refuse(path: Any, folder: int | None = None) -> Any:
        if str(path).endswith("words.txt"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return really(path, folder)

    monkeypatch.setattr(artifacts, "_open_regular", refuse)
    with pytest.raises(InvalidArtifact, match=r"'data/words\.txt' cannot be read: Permission denied"):
        freeze(source, tmp_path / "a.tar.gz", entrypoint="bin/agent")


@pytest.mark.parametrize("text", ["another", "longer than it was before", ""])
def test_a_file_that_changes_while_it_is_frozen_leaves_no_archive(
    archive: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    before = archive.read_bytes()
    really = artifacts._manifest_bytes

    def change(manifest: Manifest) -> bytes:
        (source / "data/words.txt").write_text(text)
        return really(manifest)

    monkeypatch.setattr(artifacts, "_manifest_bytes", change)
    with pytest.raises(InvalidArtifact, match="changed while it was being frozen"):
        freeze(source, archive, entrypoint="bin/agent")
    assert archive.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"solver", "solver.tar.gz"}


# --- where it is from ---


def git(folder: Path, *words: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env |= {"GIT_COMMITTER_DATE": "2024-05-06T07:08:09Z", "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(["git", "-C", folder, *words], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(source: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    (source.parent / ".gitignore").write_text("__pycache__\n*.o\n")
    git(source.parent, "init", "-q")
    git(source.parent, "add", "solver", ".gitignore")
    git(source.parent, "commit", "-q", "-m", "one")
    return source


def test_a_clean_checkout_gives_the_commit_and_its_time(checkout: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.tar.gz"
    (tmp_path / "beside").write_text("a change elsewhere is not one of the agent's")
    (checkout / "data/__pycache__").mkdir()
    (checkout / "data/__pycache__/x.pyc").touch()
    manifest = freeze(checkout, target, entrypoint="bin/agent")
    assert manifest.source_commit == git(checkout, "rev-parse", "HEAD")
    assert manifest.frozen_at == "2024-05-06T07:08:09Z"
    first = target.read_bytes()
    freeze(checkout, target, entrypoint="bin/agent")  # with the archive there, which git does not know
    assert target.read_bytes() == first
    assert verify(target) == manifest


@pytest.mark.parametrize("change", ["data/words.txt", "new", "ignored.o"])
def test_a_checkout_with_changes_gives_neither(checkout: Path, tmp_path: Path, change: str) -> None:
    (checkout / change).write_text("changed")
    manifest = freeze(checkout, tmp_path / "a.tar.gz", entrypoint="bin/agent")
    assert (manifest.frozen_at, manifest.source_commit) == (None, None)


def test_the_source_date_epoch_goes_before_the_commits_time(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    manifest = freeze(checkout, tmp_path / "a.tar.gz", entrypoint="bin/agent")
    assert manifest.frozen_at == "1970-01-02T00:00:00Z"
    assert manifest.source_commit is not None
    (checkout / "new").touch()
    manifest = freeze(checkout, tmp_path / "a.tar.gz", entrypoint="bin/agent")
    assert (manifest.frozen_at, manifest.source_commit) == ("1970-01-02T00:00:00Z", None)


@pytest.mark.parametrize("epoch", ["", "now", "-1", "1.5", "٣", "9" * 5000, "253402300800"])
def test_a_source_date_epoch_that_is_no_second_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    with pytest.raises(InvalidArtifact, match="SOURCE_DATE_EPOCH is"):
        freeze(source, tmp_path / "a.tar.gz", entrypoint="bin/agent")


def test_without_git_there_is_no_commit(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert freeze(checkout, tmp_path / "a.tar.gz", entrypoint="bin/agent").source_commit is None


# --- unpacking ---


def modes_below(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


def test_what_is_unpacked_is_there_and_read_only(archive: Path, tmp_path: Path) -> None:
    manifest = unpack(archive, tmp_path / "there")
    assert manifest == verify(archive)
    assert {path: (tmp_path / "there/files" / path).read_bytes() for path in CONTENT} == CONTENT
    assert modes_below(tmp_path / "there") == {
        "manifest.json": 0o444, "files": 0o555, "files/bin": 0o555, "files/data": 0o555, "files/bin/agent": 0o555,
        "files/data/words.txt": 0o444, "files/empty": 0o444, "files/manifest.json": 0o444,
    }  # fmt: skip
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o555
    assert {path.name for path in tmp_path.iterdir()} == {"solver", "solver.tar.gz", "there"}


def test_what_is_there_already_is_left_as_it_is(archive: Path, tmp_path: Path) -> None:
    unpack(archive, tmp_path / "there")
    before = (tmp_path / "there").stat()
    unpack(archive, tmp_path / "there")
    unpack(archive, tmp_path / "there", replace=True)
    assert (tmp_path / "there").stat() == before


def writable(folder: Path) -> Path:
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    return folder


@pytest.mark.parametrize(
    "touch",
    [
        lambda f: (f / "files/data/words.txt").write_bytes(b"one\nTWO\n"),
        lambda f: (f / "files/new").touch(),
        lambda f: (f / "files/new").mkdir(),
        lambda f: (f / "files/empty").unlink(),
        steps(lambda f: (f / "files/empty").unlink(), lambda f: (f / "files/empty").symlink_to("/dev/null")),
        steps(lambda f: (f / "files/empty").unlink(), lambda f: os.mkfifo(f / "files/empty")),
        lambda f: (f / "files/bin/agent").chmod(0o444),
        lambda f: (f / "manifest.json").write_text("{}"),
        lambda f: (f / "beside").touch(),
        steps(shutil.rmtree, Path.touch),
        steps(shutil.rmtree, lambda f: f.symlink_to("solver")),
    ],
)
def test_what_was_touched_is_refused_or_unpacked_again(
    archive: Path, tmp_path: Path, touch: Callable[[Path], object]
) -> None:
    there = tmp_path / "there"
    unpack(archive, there)
    clean = modes_below(there)
    writable(there)
    touch(there)
    for path in (there, *there.rglob("*")) if there.is_dir() and not there.is_symlink() else ():
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    with pytest.raises(InvalidArtifact, match="is there already, and is not"):
        unpack(archive, there)
    unpack(archive, there, replace=True)
    assert modes_below(there) == clean
    assert (there / "files/data/words.txt").read_bytes() == b"one\ntwo\n"
    assert {path.name for path in tmp_path.iterdir()} == {"solver", "solver.tar.gz", "there"}


def test_many_can_unpack_to_one_place_at_once(archive: Path, tmp_path: Path) -> None:
    place, found, gate = tmp_path / "place", [], threading.Barrier(6)
    place.mkdir()

    def work() -> None:
        gate.wait()
        found.append(unpack(archive, place / "there"))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert os.listdir(place) == ["there"]


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EROFS, InvalidArtifact)])
def test_a_disk_that_cannot_take_it_is_told_and_nothing_stays(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    def fail(path: str, top: int) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(artifacts, "_create", fail)
    with pytest.raises(kind, match="cannot unpack"):
        unpack(archive, tmp_path / "there")
    assert {path.name for path in tmp_path.iterdir()} == {"solver", "solver.tar.gz"}


# --- archives of others ---


def member(name: str, data: bytes = b"", mode: int = 0o644, kind: bytes = b"0", size: int | None = None) -> bytes:
    return artifacts._ustar(name.encode(), len(data) if size is None else size, mode, kind) + padded(data)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def manifest_bytes(**changes: Any) -> bytes:
    files = [("bin/agent", AGENT, "0755"), ("data", b"12", "0644")]
    fields: dict[str, Any] = {
        "schema_version": "agent_artifact_v1",
        "id": "x",
        "entrypoint": "bin/agent",
        "platform": "any",
        "files": [
            {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "mode": mode}
            for path, data, mode in files
        ],
        **changes,
    }
    return json.dumps(fields, indent=1).encode() + b"\n"


def entry(path: str, size: int = 0, mode: str = "0644") -> dict[str, Any]:
    return {"path": path, "sha256": hashlib.sha256(b"").hexdigest(), "size": size, "mode": mode}


GOOD = manifest_bytes()
FIRST, SECOND = member("files/bin/agent", AGENT, 0o755), member("files/data", b"12")
END = bytes(1024)


def packed(*parts: bytes) -> bytes:
    return gzip.compress(b"".join(parts), 1, mtime=0)


def with_manifest(data: bytes, *rest: bytes) -> bytes:
    return packed(member("manifest.json", data), *(rest or (FIRST, SECOND, END)))


def with_files(*files: dict[str, Any]) -> bytes:
    return with_manifest(manifest_bytes(files=[entry("bin/agent", mode="0755"), *files]))


def with_member(*parts: bytes) -> bytes:
    """Between the two files."""
    return with_manifest(GOOD, FIRST, *parts, SECOND, END)


VALID = with_manifest(GOOD)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is not gzip"),
    "text": (b"hello", "it is not gzip"),
    "tar without gzip": (gzip.decompress(VALID), "it is not gzip"),
    "gzip of nothing": (packed(), "it ends too early"),
    "gzip of noise": (packed(random.Random(1).randbytes(9999)), "does not begin with manifest.json"),
    "damaged": (VALID[:60] + b"\xff\xff\xff" + VALID[63:], "it is damaged"),
    "wrong checksum": (VALID[:-8] + bytes(4) + VALID[-4:], "it is damaged"),
    "wrong length": (VALID[:-4] + bytes(4), "it is damaged"),
    "trailing noise": (VALID + b"x", "something after its end"),
    "trailing zeros": (VALID + bytes(512), "something after its end"),
    "trailing gzip": (VALID + packed(b"x"), "something after its end"),
    "more after the end": (with_manifest(GOOD, FIRST, SECOND, END, bytes(512)), "something after its end"),
    "half an end": (with_manifest(GOOD, FIRST, SECOND, END[:512]), "it ends too early"),
    "end with something in it": (with_manifest(GOOD, FIRST, SECOND, END[:-1] + b"x"), "something after its end"),
    "no end": (with_manifest(GOOD, FIRST, SECOND), "it ends too early"),
    "tampered": (with_manifest(GOOD, FIRST, member("files/data", b"13"), END), "'data' is not what was frozen"),
    "something in the padding": (with_manifest(GOOD, FIRST, SECOND[:-1] + b"x", END), "between 'data' and"),
    "no manifest": (packed(FIRST, SECOND, END), "does not begin with manifest.json"),
    "manifest last": (packed(FIRST, SECOND, member("manifest.json", GOOD), END), "does not begin with manifest.json"),
    "manifest twice": (with_member(member("manifest.json", GOOD)), "manifest.json is in it twice"),
    "manifest in a folder": (packed(member("./manifest.json", GOOD), END), "does not begin with manifest.json"),
    "manifest as a link": (packed(member("manifest.json", kind=b"2"), END), "'manifest.json' is a link"),
    "manifest that is executable": (packed(member("manifest.json", GOOD, 0o755), FIRST, SECOND, END), "the header of"),
    "manifest too large": (packed(member("manifest.json", size=1 << 30), bytes(1 << 20)), "manifest.json is too large"),
    "manifest longer than the archive": (packed(member("manifest.json", GOOD, size=1 << 20)), "it ends too early"),
    "manifest empty": (with_manifest(b""), "manifest.json is malformed"),
    "manifest not JSON": (with_manifest(b"{"), "manifest.json is malformed"),
    "manifest not UTF-8": (with_manifest(b'{"id": "\xff"}'), "manifest.json is malformed"),
    "manifest nested deeply": (with_manifest(b"[" * 100_000), "manifest.json is malformed"),
    "manifest a list": (with_manifest(b"[]\n"), "manifest.json is malformed"),
    "manifest written otherwise": (with_manifest(GOOD.replace(b"\n", b"")), "it is not written as"),
    "manifest with a key twice": (with_manifest(GOOD.replace(b'"id"', b'"id": "y",\n "id"')), "it is not written as"),
    "unknown version": (with_manifest(manifest_bytes(schema_version="agent_artifact_v2")), "schema_version: Input"),
    "no version": (with_manifest(GOOD.replace(b"schema_version", b"scheme_version")), "scheme_version: Extra"),
    "unknown field": (with_manifest(manifest_bytes(more=1)), "more: Extra inputs"),
    "escape in a field": (with_manifest(manifest_bytes(**{"\x1b[31m": 1})), r"malformed: ?[31m: Extra"),
    "no files": (with_manifest(manifest_bytes(files=[])), "files: Tuple should have at least 1 item"),
    "entrypoint not there": (with_manifest(manifest_bytes(entrypoint="x")), "'x' is not among the files"),
    "entrypoint not executable": (with_manifest(manifest_bytes(entrypoint="data")), "'data' is not executable"),
    "entrypoint outside": (with_manifest(manifest_bytes(entrypoint="/bin/sh")), "it is an absolute path"),
    "named absolute": (with_files(entry("/etc/passwd")), "'/etc/passwd': it is an absolute path"),
    "named dot-dot": (with_files(entry("data/../../x")), "an empty part, '.' or '..'"),
    "named dot": (with_files(entry("data/./x")), "an empty part, '.' or '..'"),
    "named twice over": (with_files(entry("data//x")), "an empty part, '.' or '..'"),
    "named like a folder": (with_files(entry("data/")), "an empty part, '.' or '..'"),
    "named with nothing": (with_files(entry("")), "an empty part, '.' or '..'"),
    "named with NUL": (with_files(entry("da\0ta")), r"'da\x00ta': its name holds a control character"),
    "named with a newline": (with_files(entry("da\nta")), "its name holds a control character"),
    "named with an escape": (with_files(entry("\x1b]0;x\x07")), "its name holds a control character"),
    "named half a pair": (with_files(entry("\ud800")), "manifest.json is malformed"),
    "named too long": (with_files(entry("d" * 256)), "its path is too long"),
    "path too long": (with_files(entry("/".join(["d" * 200] * 6))), "its path is too long"),
    "path too deep": (with_files(entry("/".join("d" * 33))), "it is nested too deeply"),
    "named twice": (with_files(entry("data"), entry("data")), "'data' is there twice"),
    "not sorted": (with_files(entry("a")), "not sorted by path"),
    "a file as a folder": (with_files(entry("data"), entry("data/x")), "'data' is a file, and a folder"),
    "setuid in the manifest": (with_files(entry("data", mode="4755")), "mode: Input should be '0644' or '0755'"),
    "number as a mode": (with_files({**entry("data"), "mode": 420}), "mode: Input should be"),
    "negative size": (with_files(entry("data", -1)), "size: Input should be greater"),
    "one giant": (with_files(entry("data", MAX_UNPACKED_BYTES + 1)), "size: Input should be less"),
    "giants together": (with_files(entry("d", MAX_UNPACKED_BYTES), entry("e", 1)), "at most 4 GiB"),
    "too many": (with_files(*[entry(f"x{n:06}") for n in range(MAX_ENTRIES)]), "files: Tuple should have at most"),
    "too many folders": (
        with_files(*[entry(f"x{n:05}/" + "d/" * 29 + "e") for n in range(MAX_ENTRIES // 30)]),
        f"at most {MAX_ENTRIES} in all",
    ),
    "a size that is not there": (with_files(entry("data", MAX_UNPACKED_BYTES)), "are not what manifest.json says"),
    "not in the manifest": (with_member(member("files/extra")), "'files/extra' is not in manifest.json"),
    "beside the files": (with_member(member("data", b"12")), "'data' is not in manifest.json"),
    "one more": (with_manifest(GOOD, FIRST, SECOND, member("files/x"), END), "'files/x' is not in manifest.json"),
    "one missing": (with_manifest(GOOD, FIRST, END), "'data' is in manifest.json, and not in the archive"),
    "the first missing": (with_manifest(GOOD, SECOND, END), "'bin/agent' is in manifest.json, and not in"),
    "none there": (with_manifest(GOOD, END), "'bin/agent' is in manifest.json, and not in the archive"),
    "a file twice": (with_member(FIRST), "'files/bin/agent' is in it twice"),
    "symbolic link": (with_member(member("files/data", kind=b"2")), "'files/data' is a link"),
    "hard link": (with_member(member("files/data", kind=b"1")), "'files/data' is a link"),
    "character device": (with_member(member("files/data", kind=b"3")), "is a device or a pipe"),
    "block device": (with_member(member("files/data", kind=b"4")), "is a device or a pipe"),
    "folder": (with_member(member("files/data", kind=b"5")), "is no file: its type in the archive is '5'"),
    "pipe": (with_member(member("files/data", kind=b"6")), "is a device or a pipe"),
    "sparse": (with_member(member("files/data", kind=b"S")), "is a sparse file"),
    "volume": (with_member(member("files/data", kind=b"V")), "its type in the archive is 'V'"),
    "global header": (with_member(member("pax", b"20 path=/etc/passwd\n", kind=b"g")), "in the archive is 'g'"),
    "a name from pax": (with_member(member("pax", b"20 path=/etc/passwd\n", kind=b"x")), "in the archive is 'x'"),
    "a name from GNU": (with_member(member("././@LongLink", b"/etc/passwd\0", kind=b"L")), "in the archive is 'L'"),
    "giant pax": (with_member(member("pax", bytes(1 << 24), kind=b"x", size=1 << 32)), "in the archive is 'x'"),
    "absolute": (with_member(member("/etc/passwd")), "'/etc/passwd': it is an absolute path"),
    "dot-dot": (with_member(member("files/../../x")), "an empty part, '.' or '..'"),
    "odd name": (with_member(member("files/\x1b[31m")), "its name holds a control character"),
    "not UTF-8": (with_member(artifacts._ustar(b"files/\xff", 0, 0o644, b"0")), "its name is not UTF-8"),
    "setuid": (with_manifest(GOOD, member("files/bin/agent", AGENT, 0o4755), SECOND, END), "has the setuid"),
    "executable": (with_manifest(GOOD, FIRST, member("files/data", b"12", 0o755), END), "size or header of"),
    "another size": (with_manifest(GOOD, FIRST, member("files/data", b"123"), END), "size or header of 'files/data'"),
    "damaged header": (with_manifest(GOOD, FIRST, b"x" + SECOND[1:], END), "a header has a wrong checksum"),
    "negative number": (
        with_manifest(GOOD, FIRST, SECOND[:124] + b"\xff" * 12 + SECOND[136:], END),
        "a header has a wrong checksum",
    ),
    "bomb after the files": (with_manifest(GOOD, FIRST, SECOND, END, bytes(16 << 20)), "something after its end"),
    "bomb for a manifest": (packed(bytes(16 << 20)), "does not begin with manifest.json"),
}  # fmt: skip


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in which nothing but an archive may be."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


def put(folder: Path, data: bytes) -> Path:
    (folder / "a.tar.gz").write_bytes(data)
    return folder / "a.tar.gz"


def test_the_archive_that_the_hostile_ones_are_made_of_is_good(place: Path) -> None:
    assert verify(put(place, VALID)).id == "x"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(place: Path, name: str) -> None:
    data, reason = HOSTILE[name]
    archive = put(place, data)
    with pytest.raises(InvalidArtifact) as caught:
        unpack(archive, place / "there")
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()
    with pytest.raises(InvalidArtifact):
        verify(archive)
    assert os.listdir(place) == ["a.tar.gz"]


def test_an_archive_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "not a regular file"), (".", "not a regular file"), ("gone", "No such file")):
        for look in (verify, read_manifest, archive_digest):
            with pytest.raises(InvalidArtifact, match=reason):
                look(tmp_path / name)


def test_an_archive_cut_anywhere_is_refused(place: Path) -> None:
    archive = put(place, VALID)
    for cut in range(len(VALID) - 1, -1, -1):
        os.truncate(archive, cut)
        with pytest.raises(InvalidArtifact, match=r"trunc|not gzip|too early"):
            unpack(archive, place / "there")
    assert os.listdir(place) == ["a.tar.gz"]


def outcome(place: Path, data: bytes) -> Manifest | None:
    """A manifest, or nothing; whatever else is raised fails the test, and so does anything that is left."""
    try:
        return unpack(put(place, data), place / "there")
    except InvalidArtifact:
        return None
    finally:
        if (place / "there").exists():
            shutil.rmtree(writable(place / "there"))
        assert os.listdir(place) == ["a.tar.gz"]


FUZZ = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@FUZZ
@given(data=st.binary(max_size=2000))
def test_no_bytes_are_worse_than_refused(place: Path, data: bytes) -> None:
    assert outcome(place, data) is None
    assert outcome(place, gzip.compress(data, 1)) is None
    assert outcome(place, gzip.compress(member("manifest.json", data) + END, 1)) is None


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.binary(max_size=4)), min_size=1, max_size=3))
def test_no_change_of_the_compressed_bytes_is_worse_than_refused(place: Path, changes: list[tuple[int, bytes]]) -> None:
    outcome(place, mutated(VALID, changes))


TAR = gzip.decompress(VALID)


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, len(TAR) - 1), st.binary(max_size=4)), min_size=1, max_size=3))
def test_what_is_unpacked_of_a_changed_archive_is_what_its_manifest_says(
    place: Path, changes: list[tuple[int, bytes]]
) -> None:
    data = mutated(TAR, changes)
    manifest = outcome(place, gzip.compress(data, 1))
    if manifest is not None:  # a change of the id, say: what else is in the archive follows from the manifest
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            found = {one.name.removeprefix("files/"): tar.extractfile(one) for one in tar.getmembers()[1:]}
            digests = {name: hashlib.sha256(file.read()).hexdigest() for name, file in found.items() if file}
        assert digests == {file.path: file.sha256 for file in manifest.files}


def mutated(data: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    changed = bytearray(data)
    for at, piece in changes:
        changed[at : at + len(piece)] = piece  # and for an empty piece nothing: the good archive is among them
    return bytes(changed)


# --- the command ---


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sandbox-exec", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capsys.readouterr()

    return call


def test_freeze_writes_an_archive_and_says_its_digest(call: Call, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.tar.gz"
    code, out, err = call("freeze", source, "-o", target, "--entrypoint", "bin/agent", "--id", "mine")
    assert (code, err) == (0, "")
    assert out == f"{target}: mine, 4 files, 30 B, platform any\n{archive_digest(target)}\n"
    assert verify(target).id == "mine"


def test_freeze_for_programs_is_one_object(call: Call, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.tar.gz"
    code, out, _ = call("freeze", source, "-o", target, "--entrypoint", "bin/agent", "--json")
    said = json.loads(out)
    assert (code, said["digest"], said["archive"]) == (0, archive_digest(target), str(target))
    assert Manifest.model_validate(said["manifest"]) == verify(target)


def test_a_folder_that_cannot_be_frozen_is_bad_usage(call: Call, source: Path, tmp_path: Path) -> None:
    (source / "out").symlink_to("/etc/passwd")
    code, out, err = call("freeze", source, "-o", tmp_path / "a.tar.gz", "--entrypoint", "nothing")
    assert (code, out) == (2, "")
    assert err.startswith("sandbox-exec: ")
    assert "'out' is a link that leaves the folder" in err
    assert "the entrypoint 'nothing' is not there" in err
    assert issubclass(InvalidArtifact, InvalidExperiment)


def test_the_help_of_freeze_has_examples(call: Call) -> None:
    code, out, _ = call("freeze", "--help")
    assert code == 0
    assert "sandbox-exec freeze my-agent -o my-agent.tar.gz --entrypoint bin/agent" in out


def test_the_schema_of_a_manifest_can_be_had(call: Call) -> None:
    _, out, _ = call("schema", "Manifest")
    assert json.loads(out)["properties"]["schema_version"]["const"] == "agent_artifact_v1"
