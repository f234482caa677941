"""Frozen artifacts: an agent as one archive that depends on its files alone, and the way back, which trusts nothing.

An archive is gzip of tar: `manifest.json`, then each file below `files/`, in the manifest's order. There is nothing
else in it: no folders, no links, no owners, no times. So the manifest determines every header, and reading is
comparing: the header that must come next is made from the manifest, and what differs from it by one byte is refused.
Names, sizes and modes are only ever taken from a manifest that has been validated, never from a header.

Reading counts what comes out of the decompressor, so that no header and no ratio can make it take more memory or disk
than the limits in `contracts.artifact`. Unpacking goes into a new folder that nobody else can enter, and that is
renamed to its place when all of it was right.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import posixpath
import re
import secrets
import stat
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, Self

from pydantic import ValidationError

from sandbox_exec.contracts.artifact import (
    MAX_UNPACKED_BYTES,
    ArtifactFile,
    Manifest,
    Mode,
    path_fault,
    shown_path,
)
from sandbox_exec.errors import NO_ROOM, InvalidArtifact, StoreFull
from sandbox_exec.guest.view import remove_scratch
from sandbox_exec.units import KIB, MIB, format_bytes

MANIFEST: Final = "manifest.json"
FILES: Final = "files"
MAX_MANIFEST_BYTES: Final = 48 * MIB  # what 100 000 files with long names need

_LEFT_OUT: Final = frozenset((".git", "__pycache__"))
_LEVEL: Final = 6  # fixed: the bytes depend on it
_GZIP: Final = 31  # for zlib: a gzip header (without a time or a name) and checksum, and the largest window
_BLOCK: Final = 512  # of tar
_PIECE: Final = 256 * KIB  # what is held in memory at a time
_END: Final = bytes(2 * _BLOCK)
_MAX_TOLD: Final = 20  # problems in one message
_MAX_FAULT_CHARS: Final = 300
_GIT_S: Final = 20.0  # for a checkout on a slow disk
_LAST_SECOND: Final = 253402300799  # of the year 9999
_UNPACKED_MODES: Final[dict[int, Mode]] = {0o444: "0644", 0o555: "0755"}
_FOREIGN: Final = 0o7000  # setuid, setgid, sticky
# Of an ELF header; the names are those that Docker and OCI images use.
_MACHINES: Final = {3: "386", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "amd64", 183: "arm64", 243: "riscv64"}


# --- freezing --------------------------------------------------------------------------------------


def freeze(folder: Path, target: Path, *, entrypoint: str, id: str | None = None) -> Manifest:
    """Write `folder` as an archive to `target`, whole or not at all, and return its manifest.

    The same files give the same bytes: times, owners, the order on disk and the umask have no part in it. A link to a
    file in the folder is stored as that file. `.git`, `__pycache__` and empty folders are left out. Another version
    of zlib may compress otherwise; the manifest is the same then too.

    Raises `InvalidArtifact` with all that is wrong with the folder.
    """
    top, target = os.path.realpath(folder), Path(os.path.abspath(target))
    scan = _Scan(top)
    entrypoint = posixpath.normpath(entrypoint)
    problems = [*scan.problems, *_target_problems(top, target), *scan.entrypoint_problems(entrypoint)]
    frozen_at, commit = None, None
    try:
        frozen_at, commit = _source(top, os.environ)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        _refuse_folder(folder, problems)
    try:
        manifest = Manifest(
            id=os.path.basename(top) if id is None else id,
            entrypoint=entrypoint,
            platform=scan.platform(entrypoint),
            files=tuple(file for file, _ in scan.sorted()),
            frozen_at=frozen_at,
            source_commit=commit,
        )
    except ValidationError as error:
        _refuse_folder(folder, [_first_fault(error)])
    try:
        _write_archive(target, manifest, [source for _, source in scan.sorted()])
    except OSError as error:
        _fail(error, f"cannot write {str(target)!r}")
    return manifest


class _Scan:
    """What is in a folder, each file read once, and what is wrong with it."""

    def __init__(self, top: str) -> None:
        self.problems: list[str] = []
        self._top = top
        self._found: dict[str, tuple[ArtifactFile, str]] = {}
        self._machines: dict[str, str] = {}
        self._refused: set[str] = set()
        self._walk("")
        if not self._found and not self.problems:
            self.problems.append("there are no files in it")

    def sorted(self) -> list[tuple[ArtifactFile, str]]:
        return [self._found[path] for path in sorted(self._found)]

    def platform(self, entrypoint: str) -> str:
        """That of the entrypoint, or the one that all programs are for; "any" if there is none, or more than one."""
        machines = {*self._machines.values()} - {""}
        machine = self._machines.get(entrypoint) or (machines.pop() if len(machines) == 1 else "")
        return f"linux/{machine}" if machine else "any"

    def entrypoint_problems(self, path: str) -> Iterator[str]:
        name = f"the entrypoint {shown_path(path)}"
        if path in self._refused:
            return  # told already
        if path not in self._found:
            if not _LEFT_OUT.isdisjoint(path.split("/")):
                yield f"{name} is in a folder that is left out"
            elif os.path.isdir(os.path.join(self._top, path)):
                yield f"{name} is a folder; name the file that is to be run"
            else:
                yield f"{name} is not there; name a file relative to the folder, such as bin/agent"
        elif not self._found[path][0].is_executable:
            yield f"{name} is not executable; chmod +x it"

    def _walk(self, below: str) -> None:
        try:
            with os.scandir(os.path.join(self._top, below)) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self._refuse(below or ".", f"cannot be read: {error.strerror}")
            return
        for entry in found:
            if entry.name in _LEFT_OUT:
                continue
            path = f"{below}/{entry.name}" if below else entry.name
            if fault := path_fault(path):
                self._refuse(path, f"cannot be stored: {fault}; rename it")
            elif entry.is_dir(follow_symlinks=False):
                self._walk(path)
            elif entry.is_symlink():
                self._follow(path)
            else:
                self._take(path, entry.path)

    def _follow(self, path: str) -> None:
        real = os.path.realpath(os.path.join(self._top, path))
        if not real.startswith(self._top.rstrip("/") + "/"):
            self._refuse(path, "is a link that leaves the folder; put a copy of what it leads to there")
        elif not os.path.exists(real):
            self._refuse(path, "is a link that leads nowhere; remove it")
        elif os.path.isdir(real):
            self._refuse(path, "is a link to a folder; put a copy of the folder there")
        else:
            self._take(path, real)

    def _take(self, path: str, source: str) -> None:
        if not os.path.isfile(source):  # before it is opened: a device may do something then
            self._refuse(path, "is neither a file nor a folder (a pipe, a socket or a device); remove it")
            return
        try:
            with _open_regular(source) as file:
                mode = os.fstat(file.fileno()).st_mode
                if mode & (stat.S_ISUID | stat.S_ISGID):
                    self._refuse(path, "has the setuid or setgid bit, which no agent gets; chmod ug-s it")
                    return
                self._machines[path] = _machine_of(file.peek(20)[:20])
                digest, size = hashlib.sha256(), 0
                for piece in _pieces(file):
                    digest.update(piece)
                    size += len(piece)
                    if size > MAX_UNPACKED_BYTES:
                        self._refuse(path, f"is larger than {format_bytes(MAX_UNPACKED_BYTES)}")
                        return
        except (OSError, ValueError) as error:
            self._refuse(path, f"cannot be read: {_reason(error)}")
            return
        file_mode: Mode = "0755" if mode & stat.S_IXUSR else "0644"
        self._found[path] = ArtifactFile(path=path, sha256=digest.hexdigest(), size=size, mode=file_mode), source

    def _refuse(self, path: str, why: str) -> None:
        self._refused.add(path)
        self.problems.append(f"{shown_path(path)} {why}")


def _target_problems(top: str, target: Path) -> Iterator[str]:
    parent = os.path.realpath(target.parent)
    if not os.path.isdir(parent):
        yield f"the archive cannot be written to {str(target)!r}: there is no such folder"
    elif target.is_dir():
        yield f"the archive cannot be written to {str(target)!r}: it is a folder"
    elif f"{parent}/".startswith(f"{top.rstrip('/')}/"):
        yield f"the archive {str(target)!r} would be in the folder itself; name a file elsewhere"


def _refuse_folder(folder: Path, problems: Sequence[str]) -> NoReturn:
    lines = [*problems[:_MAX_TOLD]]
    if len(problems) > _MAX_TOLD:
        lines.append(f"... and {len(problems) - _MAX_TOLD} more")
    raise InvalidArtifact("\n  ".join([f"{str(folder)!r} cannot be frozen:", *lines]))


def _machine_of(start: bytes) -> str:
    """The machine that an ELF file is for, by its first bytes; empty for another file."""
    if len(start) < 20 or not start.startswith(b"\x7fELF"):
        return ""
    (number,) = struct.unpack_from(">H" if start[5] == 2 else "<H", start, 18)
    return _MACHINES.get(number, f"elf-{number}")


def _source(top: str, environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """When and from which commit: what is known without looking at a clock, so that it is the same the next time."""
    epoch = environ.get("SOURCE_DATE_EPOCH")
    if epoch is not None and not (re.fullmatch("[0-9]{1,12}", epoch) and int(epoch) <= _LAST_SECOND):
        raise ValueError(f"SOURCE_DATE_EPOCH is {shown_path(epoch)}; needed: seconds since 1970, a whole number")
    commit, second = _commit(top, environ)
    second = int(epoch) if epoch is not None else second
    when = None if second is None else f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return when, commit


def _commit(top: str, environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Of the git checkout that the folder is in, if all of the folder is as it was committed.

    What git ignores counts as a change: it would be in the archive, and not in the commit.
    """
    env = {name: value for name, value in environ.items() if not name.startswith("GIT_")}
    git = ["git", "-C", top, "-c", "core.fsmonitor=false"]
    left_out = [f":(exclude,glob)**/{name}/**" for name in sorted(_LEFT_OUT)]
    status = ["status", "--porcelain", "--ignored", "--untracked-files=all", "--", ".", *left_out]
    try:
        changes, log = (
            subprocess.run(
                [*git, *words], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S, check=True
            ).stdout
            for words in (status, ["log", "-1", "--format=%H %ct"])
        )
    except (OSError, subprocess.SubprocessError):
        return None, None  # no git, no checkout, no commit, or one of another owner's
    if changes:
        return None, None
    commit, second = log.decode().split()
    return commit, int(second)


def _write_archive(target: Path, manifest: Manifest, sources: Sequence[str]) -> None:
    temporary = target.parent / f".{target.name[:200]}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as out:
            gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
            data = _manifest_bytes(manifest)
            out.write(gzip.compress(_header(MANIFEST, len(data), 0o644) + data + _padding(len(data))))
            for file, source in zip(manifest.files, sources, strict=True):
                out.write(gzip.compress(_header_of(file)))
                _compress_file(file, source, lambda piece: out.write(gzip.compress(piece)))
                out.write(gzip.compress(_padding(file.size)))
            out.write(gzip.compress(_END) + gzip.flush())
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _compress_file(file: ArtifactFile, source: str, write: Callable[[bytes], object]) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with _open_regular(source) as content:
            for piece in _pieces(content):
                size += len(piece)
                if size > file.size:
                    break
                digest.update(piece)
                write(piece)
    except (OSError, ValueError) as error:
        raise InvalidArtifact(f"{source!r} could be read once, but not again: {error}") from error
    if (size, digest.hexdigest()) != (file.size, file.sha256):
        raise InvalidArtifact(f"{source!r} changed while it was being frozen; try again when nothing writes it")


# --- the format ------------------------------------------------------------------------------------


def _manifest_bytes(manifest: Manifest) -> bytes:
    return json.dumps(manifest.model_dump(mode="json", exclude_none=True), indent=1).encode() + b"\n"


def _header_of(file: ArtifactFile) -> bytes:
    return _header(f"{FILES}/{file.path}", file.size, int(file.mode, 8))


def _header(path: str, size: int, mode: int) -> bytes:
    """What stands before a file's content: a ustar header, and before it, for a long name, a record of POSIX's pax."""
    name = path.encode()
    if len(name) <= 100:
        return _ustar(name, size, mode, b"0")
    record = b" path=" + name + b"\n"
    length = len(record) + len(str(len(record) + 4))  # names have 100 to 1030 bytes: the digits are 3 or 4
    record = b"%d" % length + record
    return (
        _ustar(b"././@PaxHeader", len(record), 0o644, b"x")
        + record
        + _padding(len(record))
        + _ustar(name[:100], size, mode, b"0")
    )


def _ustar(name: bytes, size: int, mode: int, kind: bytes) -> bytes:
    nobody, zero, blank = b"0000000\0", b"00000000000\0", b" " * 8
    fields = (name, b"%07o\0" % mode, nobody, nobody, b"%011o\0" % size, zero, blank, kind, b"", b"ustar\x0000")
    block = struct.pack("100s8s8s8s12s12s8s1s100s8s247x", *fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


# --- reading ---------------------------------------------------------------------------------------


class Unpacked(NamedTuple):
    """An artifact that can be shown to agents: the folder with its files, and which of them is run."""

    folder: Path
    entrypoint: str


def archive_digest(archive: Path) -> str:
    """Return the digest of the archive's bytes, as "sha256:..."."""
    with _open_archive(archive) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def read_manifest(archive: Path) -> Manifest:
    """Return an archive's manifest. Nothing after it is looked at: see `verify`."""
    with _Reader(archive) as reader:
        return reader.manifest


def verify(archive: Path) -> Manifest:
    """Return an archive's manifest, once all of the archive was found to be as it says."""
    with _Reader(archive) as reader:
        for file in reader.manifest.files:
            reader.copy(file, lambda piece: None)
        reader.finish()
        return reader.manifest


def unpack(archive: Path, target: Path, *, replace: bool = False) -> Manifest:
    """Verify an archive and put it at `target`, whole or not at all: its manifest.json, and its files below files/.

    All of it ends read-only. A `target` whose files are there already, all of them read and the same, is left as it
    is, and of the archive only the manifest is looked at. One that holds something else is refused, or with `replace`
    removed first. The folder that it is in must exist.

    Raises `InvalidArtifact`, or `StoreFull` if there is no room; nothing stays behind then.
    """
    target = Path(os.path.abspath(target))
    with _Reader(archive) as reader:
        manifest = reader.manifest
        if os.path.lexists(target):  # before a look into it: another process may be about to put it there
            if _holds(target, manifest):
                return manifest
            if not replace:
                raise InvalidArtifact(f"{str(target)!r} is there already, and is not {str(archive)!r}; remove it")
        temporary = target.parent / f".{target.name[:200]}.{secrets.token_hex(4)}.tmp"
        try:
            os.mkdir(temporary, 0o700)
            try:
                _fill(temporary, reader)
                if replace:
                    _remove(target)
                _put(temporary, target, manifest)
            except BaseException:
                remove_scratch(str(temporary))
                raise
        except OSError as error:
            _fail(error, f"cannot unpack {str(archive)!r} to {str(target)!r}")
    return manifest


def _fill(folder: Path, reader: _Reader) -> None:
    """Write into a folder that nobody else can enter. There is no link in it, as none is ever made."""
    os.mkdir(folder / FILES, 0o700)
    top = os.open(folder / FILES, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        folders = sorted(reader.manifest.folders)  # each after the one that it is in
        for path in folders:
            os.mkdir(path, 0o700, dir_fd=top)
        for file in reader.manifest.files:
            with _create(file.path, top) as out:
                reader.copy(file, out.write)
                os.fchmod(out.fileno(), 0o555 if file.is_executable else 0o444)
        reader.finish()
        for path in reversed(folders):
            os.chmod(path, 0o555, dir_fd=top)
        os.fchmod(top, 0o555)
    finally:
        os.close(top)
    with open(folder / MANIFEST, "xb") as out:
        out.write(_manifest_bytes(reader.manifest))
        os.fchmod(out.fileno(), 0o444)
    os.chmod(folder, 0o555)


def _create(path: str, top: int) -> BufferedWriter:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600, dir_fd=top), "wb")


def _put(temporary: Path, target: Path, manifest: Manifest) -> None:
    try:
        os.rename(temporary, target)
    except OSError as error:
        # Another process was faster; what it put there must be the same.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not _holds(target, manifest):
            raise
        remove_scratch(str(temporary))


def _remove(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        remove_scratch(str(target))
    else:
        target.unlink(missing_ok=True)


def _holds(target: Path, manifest: Manifest) -> bool:
    """Whether a folder is what `_fill` makes of this manifest: all of it is read, and nothing else is there."""
    found: list[ArtifactFile] = []
    folders: set[str] = set()
    try:
        if sorted(os.listdir(target)) != [FILES, MANIFEST]:
            return False
        with _open_regular(target / MANIFEST) as file:
            if file.read(MAX_MANIFEST_BYTES + 1) != _manifest_bytes(manifest):
                return False
        for root, names, files, fd in os.fwalk(target / FILES):
            below = os.path.relpath(root, target / FILES)
            prefix = "" if below == "." else f"{below}/"
            if stat.S_IMODE(os.fstat(fd).st_mode) != 0o555:
                return False
            folders.update(prefix + name for name in names)
            for name in files:
                with _open_regular(name, fd) as file:
                    info = os.fstat(file.fileno())
                    mode = _UNPACKED_MODES[stat.S_IMODE(info.st_mode)]
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    found.append(ArtifactFile(path=prefix + name, sha256=digest, size=info.st_size, mode=mode))
    except (OSError, ValueError, KeyError):  # not there, a link, a pipe, a mode or a name that is not ours
        return False
    return folders == manifest.folders and sorted(found, key=lambda one: one.path) == list(manifest.files)


class _Reader:
    """An archive under way: the manifest, then its files in their order, then the end."""

    def __init__(self, archive: Path) -> None:
        self._name = str(archive)
        self._seen: set[str] = set()
        self._file = _open_archive(archive)
        try:
            self._stream = _Stream(self._file, self._refuse)
            self.manifest = self._read_manifest()
        except OSError as error:
            self._file.close()
            self._refuse(f"cannot be read: {error.strerror}")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def copy(self, file: ArtifactFile, write: Callable[[bytes], object]) -> None:
        """Take the next file, which must be this one."""
        self._take_header(file.path, _header_of(file))
        digest = hashlib.sha256()
        for piece in self._stream.pieces(file.size):
            digest.update(piece)
            write(piece)
        if digest.hexdigest() != file.sha256:
            self._refuse(f"{shown_path(file.path)} is not what was frozen: its digest is another; freeze it again")
        self._take_padding(file.path, file.size)
        self._seen.add(file.path)

    def finish(self) -> None:
        """Nothing may be left but the end."""
        if (block := self._stream.read(_BLOCK)).strip(b"\0"):
            self._refuse(self._about(block, None))
        if self._stream.read(_BLOCK).strip(b"\0"):
            self._refuse("there is something after its end")
        self._stream.finish()

    def _read_manifest(self) -> Manifest:
        block = self._stream.read(_BLOCK)
        info = _parsed(block)
        if info is None or info.name != MANIFEST:
            self._refuse(f"it does not begin with {MANIFEST}: it was not made by `sandbox-exec freeze`")
        if not 0 <= info.size <= MAX_MANIFEST_BYTES:
            self._refuse(f"{MANIFEST} is too large: at most {format_bytes(MAX_MANIFEST_BYTES)}")
        if block != _header(MANIFEST, info.size, 0o644):
            self._refuse(_oddity(info) or f"the header of {MANIFEST} is not as `sandbox-exec freeze` writes it")
        data = b"".join(self._stream.pieces(info.size))
        self._take_padding(MANIFEST, info.size)
        try:
            manifest = Manifest.model_validate_json(data)
        except ValidationError as error:
            self._refuse(f"{MANIFEST} is malformed: {_first_fault(error)}")
        if data != _manifest_bytes(manifest):
            self._refuse(f"{MANIFEST} is malformed: it is not written as `sandbox-exec freeze` does it")
        return manifest

    def _take_header(self, path: str, expected: bytes) -> None:
        block = self._stream.read(_BLOCK)
        if block != expected[:_BLOCK]:
            self._refuse(self._about(block, path))
        if self._stream.read(len(expected) - _BLOCK) != expected[_BLOCK:]:
            self._refuse(f"the header of {shown_path(path)} is not what {MANIFEST} says")

    def _take_padding(self, path: str, size: int) -> None:
        if self._stream.read(-size % _BLOCK).strip(b"\0"):
            self._refuse(f"there is something between {shown_path(path)} and what follows it")

    def _about(self, block: bytes, due: str | None) -> str:
        """What is wrong with a header that is not that of the file which is due."""
        missing = f"{shown_path(due)} is in {MANIFEST}, and not in the archive" if due is not None else ""
        if not block.strip(b"\0"):
            return missing
        info = _parsed(block)
        if info is None:
            return "it is damaged: a header has a wrong checksum"
        name = shown_path(info.name)
        if oddity := _oddity(info):
            return oddity
        path = info.name.removeprefix(f"{FILES}/")
        if info.name == MANIFEST:
            return f"{MANIFEST} is in it twice"
        if path in self._seen:
            return f"{name} is in it twice"
        if info.name == path or path not in {file.path for file in self.manifest.files}:
            return f"{name} is not in {MANIFEST}"
        if path != due:
            return missing
        return f"size or header of {name} are not what {MANIFEST} says"

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidArtifact(f"{self._name!r} is not a frozen artifact that can be used: {why}")


class _Stream:
    """What a gzip file holds, a bounded piece at a time. A stream that ends early, or is damaged, is refused."""

    def __init__(self, file: BufferedReader, refuse: Callable[[str], NoReturn]) -> None:
        self._file, self._refuse = file, refuse
        self._gzip = zlib.decompressobj(_GZIP)
        self._buffer = memoryview(b"")
        if file.read(2) != b"\x1f\x8b":
            refuse("it is not gzip")
        file.seek(0)

    def read(self, size: int) -> bytes:
        """Exactly so many bytes; for what is small."""
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[bytes]:
        """Exactly so many bytes."""
        while size:
            if not self._buffer:
                self._buffer = memoryview(self._more())
                if not self._buffer:
                    self._refuse("it ends too early: it is truncated, or its parts are")
            piece, self._buffer = bytes(self._buffer[:size]), self._buffer[size:]
            size -= len(piece)
            yield piece

    def finish(self) -> None:
        if self._buffer or self._more():
            self._refuse("there is something after its end")
        if self._gzip.unused_data or self._file.read(1):
            self._refuse("there is something after its end")

    def _more(self) -> bytes:
        """The next bytes; none if it has come to its end, and its checksum was right."""
        while not self._gzip.eof:
            data = self._gzip.unconsumed_tail or self._file.read(_PIECE)
            try:
                piece = self._gzip.decompress(data, _PIECE)
            except zlib.error as error:
                self._refuse(f"it is damaged: {error}")
            if piece:
                return piece
            if not data and not self._gzip.eof:
                self._refuse("it is truncated: the end of the gzip stream is missing")
        return b""


def _parsed(block: bytes) -> tarfile.TarInfo | None:
    """A header, only to say what is wrong with it; None if it is none."""
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None


def _oddity(info: tarfile.TarInfo) -> str:
    """What of a header is never right, whatever the manifest says; empty if nothing is."""
    name = shown_path(info.name)
    if info.issym() or info.islnk():
        return f"{name} is a link"
    if info.ischr() or info.isblk() or info.isfifo():
        return f"{name} is a device or a pipe"
    if info.type == tarfile.GNUTYPE_SPARSE:
        return f"{name} is a sparse file"
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return f"{name} is no file: its type in the archive is {info.type.decode('latin-1')!a}"
    if fault := path_fault(info.name):
        return f"{name}: {fault}"
    if info.mode & _FOREIGN:
        return f"{name} has the setuid, setgid or sticky bit"
    return ""


# --- parts -----------------------------------------------------------------------------------------


def _open_archive(archive: Path) -> BufferedReader:
    try:
        file = _open_regular(archive)
    except (OSError, ValueError) as error:
        raise InvalidArtifact(f"{str(archive)!r} cannot be read: {_reason(error)}") from error
    # What cannot be compressed grows a little; anything beyond that is no archive of ours.
    if os.fstat(file.fileno()).st_size > MAX_UNPACKED_BYTES + 4 * MAX_MANIFEST_BYTES:
        file.close()
        raise InvalidArtifact(f"{str(archive)!r} is too large: at most {format_bytes(MAX_UNPACKED_BYTES)} unpacked")
    return file


def _open_regular(path: str | Path, folder: int | None = None) -> BufferedReader:
    """Open a file to read it. Raises ValueError for what is none: a pipe would have us wait for its writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if folder else 0), dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it is not a regular file")
    return open(fd, "rb")


def _pieces(file: BufferedReader) -> Iterator[bytes]:
    return iter(lambda: file.read(_PIECE), b"")


def _first_fault(error: ValidationError) -> str:
    """The first thing that pydantic found, without anything that a terminal would obey."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    text = f"{where}: {what}" if where else what
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_FAULT_CHARS])


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _fail(error: OSError, what: str) -> NoReturn:
    if error.errno in NO_ROOM:
        raise StoreFull(f"{what}: no room left; free some there, then try again") from error
    raise InvalidArtifact(f"{what}: {error.strerror or error}") from error
