"""Copying what an agent left. Everything below the handle is hostile: links, pipes, devices, giants, odd names.

How an entry is looked at
  1. its name is opened with O_PATH and O_NOFOLLOW below the handle of its folder: no driver, pipe or link acts on that
  2. the mount of that descriptor is compared with the root's, before the file system is asked anything
  3. fstat says what it is; only then a regular file or a folder is opened for reading, through that same descriptor
So a name that is swapped for a link, a device or another folder at any moment leads nowhere: what was judged is what
is read. Nothing of the agent's should run by now, but on a weak rung something may have survived.

What each guard is against
  O_PATH first      opening a device acts on it (a watchdog starts, a tape rewinds), opening a FIFO waits
  O_NONBLOCK        a lease that a survivor holds on a file: it is left out instead of waited for
  same mount        a host folder or a stuck file system mounted below. The mount is compared and not st_dev, which a
                    bind mount shares with its source, and which differs within one overlay
  links and owner   a hard link to a file of the host, where agent and host share a file system and the kernel's
                    protected_hardlinks is off: a file with more names than are below the handle is left out. Where
                    the agent has a uid of its own, that its file belongs to it says more: see `collect`
  size, then bytes  a sparse file counts with its apparent size: one of 1 TB does not fit and costs nothing, a small
                    one comes over with its holes filled. Space beyond the end of a file is seen in what is allocated
  promised size     a file that grows is read to the size that was promised; one that changed is not kept
  entries           `files` bounds what is looked at, not only what is kept: of a folder with a million links, neither
                    memory nor time is spent on each. The smallest names are kept, so the same tree gives the same
  fresh modes       setuid, setgid, sticky, ACLs, capabilities, owner and times do not come over

Not promised: a read that ends if the file system *at* the handle is stuck (a dead NFS or FUSE below the sandbox's own
place), a target that takes `A` and `a` for one name, and against a survivor that moves its link to a host's file
around while names are counted: then only `owner` helps.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import itertools
import os
import stat
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from sandbox_exec.errors import NO_ROOM, InvalidValue

MAX_DEPTH: Final = 200  # up to two handles are held for each level, and 1024 is what a process usually has
_MAX_LISTED = 1000  # of what was left out: a million links make no report
_MAX_SCANNED = 1_000_000  # names: a survivor that makes them as fast as they are read does not hold us
_MAX_PATH = 2048  # half of what the kernel takes: the other half is for the place where the target lies
_MAX_SAFE_NAME = 143  # what every file system takes: eCryptfs has no more
_BLOCK = 4096  # by that much a small file is larger on a disk than it says
_SMALL = 1 << 16  # up to here, one read and one write are quicker than to ask the kernel for a copy
_CHUNK = 1 << 20

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # what we lack is no reason to leave something out

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True)
class CollectLimits:
    """How much is copied at most. What is over a limit is left out, and smaller things still come."""

    bytes: int
    """Of all files by their apparent size. As allocated, they may have a block more each: a file of one byte has."""
    files: int = 10_000
    """Files, folders and whatever else is looked at. More inodes than that a trial, and a run of thousands fills a
    disk that has room; it is also more than anyone looks through."""
    depth: int = 64
    """Folders in each other. The deepest that tools make by themselves are about half of it."""
    name_bytes: int = 255
    """Of one name. The default is all that Linux has; what is long for the target is shortened, not left out."""

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= MAX_DEPTH:
            raise InvalidValue(f"depth is {self.depth}; it must be from 0 to {MAX_DEPTH}")

    @property
    def allocated(self) -> int:
        return self.bytes + self.files * _BLOCK


@dataclass
class Collected:
    """What came over, and what did not. Paths are in the safe form, whatever the names in the target are."""

    files: int = 0
    folders: int = 0
    links: int = 0
    bytes: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    left_out_more: int = 0

    def leave_out(self, path: str, reason: str) -> None:
        if len(self.left_out) < _MAX_LISTED:
            self.left_out.append((path, reason))
        else:
            self.left_out_more += 1

    def report(self) -> dict[str, Any]:
        """What `collected.json` holds."""
        return {
            "files": self.files,
            "bytes": self.bytes,
            "left_out": [{"path": path, "reason": reason} for path, reason in self.left_out],
            "left_out_more": self.left_out_more,
        }


def collect(
    source: int,
    target: Path | int,
    limits: CollectLimits,
    skip: frozenset[str] = frozenset(),
    *,
    owner: int | None = None,
    modes: bool = False,
    links: Literal["leave-out", "keep-inside"] = "leave-out",
    names: Literal["safe", "exact"] = "safe",
) -> Collected:
    """Copy what is below the handle `source` into `target`: regular files, and folders, empty ones too.

    `target` is made, unless nothing comes over; if it is there, or is a handle, it must be an empty folder, and stay
    ours alone until this returns. Names in `skip` are passed over at the top. Files arrive as 0644, folders as 0755,
    less our umask, owned by us.

    `owner`: the agent's uid, where nobody else has it and all that the agent was given belongs to it; what belongs
    to another is left out. None, where the agent shares a uid with others: then a file is left out if it has more
    names than were found below the handle.
    `modes`: what its owner may execute arrives as 0755.
    `links`: "keep-inside" makes symbolic links anew that cannot lead out of the target, whatever other links they
    pass through. They may dangle, or run in a circle.
    `names`: "exact" is for a target that only a sandbox sees, where an agent's files must have the names it gave.

    Raises OSError if the target cannot be written, or if we are short of room, descriptors or memory: none of that is
    the agent's doing, and what came over is not all of it. A file that came over is whole.
    """
    collected = Collected()
    if _is_empty(source, skip):  # most trials leave nothing, and making a folder for that is the dearest part
        return collected
    made = isinstance(target, Path) and _make(target)
    into = os.open(target, _FOLDER) if isinstance(target, Path) else os.dup(target)
    try:
        if os.listdir(into):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))
        copy = _Copy(source, into, limits, collected, owner, modes, links == "keep-inside")
        walk = _Walk(source, limits, collected, skip, owner, exact=names == "exact")
        with contextlib.closing(walk.entries()) as entries:
            for entry in entries:
                try:
                    copy.take(entry)
                except _LeftOut as why:
                    collected.leave_out(entry.path, str(why))
    finally:
        os.close(into)
    if made and isinstance(target, Path) and not (collected.files or collected.folders or collected.links):
        target.rmdir()
    return collected


def _is_empty(source: int, skip: frozenset[str]) -> bool:
    with os.scandir(source) as entries:
        return all(entry.name in skip for entry in itertools.islice(entries, len(skip) + 1))


def _make(target: Path) -> bool:
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


class _LeftOut(Exception):
    """Why an entry does not come over."""


class _Entry(NamedTuple):
    """Something below the handle that has been looked at, and not been opened for reading."""

    fd: int  # O_PATH
    info: os.stat_result
    path: str  # for the report
    target: str  # below the target
    depth: int  # folders above it


# --- looking: a tree in the order of its names, without recursion ----------------------------------


class _Folder(NamedTuple):
    fd: int
    path: str
    target: str
    names: list[str]  # that are still to be looked at, the next one last


class _Walk:
    """Everything below a handle that may be looked at. What may not is listed in `collected`.

    The names of a folder count against `limits.files` as soon as it is listed: what waits in memory is bounded by it.
    """

    def __init__(
        self,
        source: int,
        limits: CollectLimits,
        collected: Collected,
        skip: frozenset[str],
        owner: int | None,
        exact: bool,
    ) -> None:
        self._source, self._limits, self._collected = source, limits, collected
        self._skip, self._owner, self._exact = skip, owner, exact
        self._mount = _mount_of(source)
        self._room, self._scans = limits.files, _MAX_SCANNED
        self._stack: list[_Folder] = []

    def entries(self) -> Generator[_Entry, None, None]:
        """Folders come before what is in them. An entry's descriptor is closed when the next one is asked for."""
        try:
            self._enter(self._source, "", "")
            while self._stack:
                folder = self._stack[-1]
                if not folder.names:
                    os.close(self._stack.pop().fd)
                    continue
                name = folder.names.pop()
                safe = safe_name(name)
                path = _join(folder.path, safe)
                try:
                    fd = self._look(folder, name)
                except _LeftOut as why:
                    self._collected.leave_out(path, str(why))
                    continue
                try:
                    yield from self._judge(fd, path, _join(folder.target, name if self._exact else safe))
                except _LeftOut as why:
                    self._collected.leave_out(path, str(why))
                finally:
                    os.close(fd)
        finally:
            for folder in self._stack:
                os.close(folder.fd)

    def _look(self, folder: _Folder, name: str) -> int:
        if len(os.fsencode(name)) > self._limits.name_bytes:
            raise _LeftOut(f"its name is longer than {self._limits.name_bytes} bytes")
        return _open(name, _LOOK, folder.fd)

    def _judge(self, fd: int, path: str, target: str) -> Iterator[_Entry]:
        if _mount_of(fd) != self._mount:
            raise _LeftOut("on another mount")
        try:
            info = os.fstat(fd)
        except OSError as error:
            raise _left_out(error) from None
        if self._owner is not None and info.st_uid != self._owner:
            raise _LeftOut("not the agent's")
        if len(os.fsencode(target)) > _MAX_PATH:
            raise _LeftOut(f"its path is longer than {_MAX_PATH} bytes")
        depth = len(self._stack) - 1
        if not stat.S_ISDIR(info.st_mode):
            yield _Entry(fd, info, path, target, depth)
        elif depth < self._limits.depth:
            yield _Entry(fd, info, path, target, depth)
            self._enter(fd, path, target)
        else:
            raise _LeftOut(f"deeper than {self._limits.depth} folders")

    def _enter(self, fd: int, path: str, target: str) -> None:
        try:
            folder = _Folder(_open(".", _FOLDER, fd), path, target, [])
            self._stack.append(folder)
            names, more = self._list(folder.fd)
        except _LeftOut as why:
            self._collected.leave_out(path or ".", str(why))
            return
        folder.names.extend(reversed(names))
        if more:
            reason = f"{more} of its entries: only {self._limits.files} are looked at"
            self._collected.leave_out(path or ".", reason)

    def _list(self, fd: int) -> tuple[list[str], int]:
        """The smallest names of a folder for which there is room, sorted; and how many more there are."""
        skip = self._skip if len(self._stack) == 1 else frozenset()
        seen = 0

        def each() -> Iterator[str]:
            nonlocal seen
            for entry in itertools.islice(entries, self._scans):
                if entry.name not in skip:
                    seen += 1
                    yield entry.name

        try:
            with os.scandir(fd) as entries:
                names = each()
                kept = heapq.nsmallest(self._room, names)
                for _ in names:  # nsmallest(0) does not look
                    pass
        except OSError as error:
            raise _left_out(error) from None
        self._room -= len(kept)
        self._scans -= seen
        # A name that goes and comes while it is listed can be there twice, and would be in its own way.
        return [*dict.fromkeys(kept)], seen - len(kept)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _open(name: str, flags: int, folder: int | None = None) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise _left_out(error) from None


def _left_out(error: OSError) -> Exception:
    return error if error.errno in _OURS else _LeftOut(error.strerror or str(error))


def _mount_of(fd: int) -> bytes:
    """Which mount a descriptor is on. The root's handle holds its mount, so that no other can get its number."""
    info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _, _, rest = os.read(info, 1024).partition(b"mnt_id:")
    finally:
        os.close(info)
    return rest.split(None, 1)[0]


# --- copying: what has been looked at --------------------------------------------------------------


@dataclass
class _Copy:
    """Takes one entry after the other into the target, within the limits."""

    source: int
    target: int
    limits: CollectLimits
    collected: Collected
    owner: int | None
    modes: bool
    keep_links: bool
    allocated: int = 0
    names: Counter[tuple[int, int]] | None = None  # how often each file that has several was found

    def take(self, entry: _Entry) -> None:
        kind = stat.S_IFMT(entry.info.st_mode)
        if kind == stat.S_IFDIR:
            os.mkdir(entry.target, 0o755, dir_fd=self.target)
            self.collected.folders += 1
        elif kind == stat.S_IFREG:
            self._take_file(entry)
        elif kind == stat.S_IFLNK and self.keep_links:
            self._take_link(entry)
        else:
            raise _LeftOut(_KINDS.get(kind, "neither a regular file nor a folder"))

    def _take_file(self, entry: _Entry) -> None:
        info, limits = entry.info, self.limits
        allocated = info.st_blocks * 512
        if self.collected.bytes + info.st_size > limits.bytes:
            raise _LeftOut(f"{info.st_size} bytes do not fit the {limits.bytes} that are kept")
        if self.allocated + allocated > limits.allocated:
            raise _LeftOut(f"{allocated} bytes as allocated do not fit the {limits.bytes} that are kept")
        if info.st_nlink > 1 and self.owner is None:
            self._check_names(info)
        # Through the descriptor that was judged: the name may be another file's by now.
        fd = _open(f"/proc/self/fd/{entry.fd}", _READ)
        try:
            self._copy_file(fd, entry)
        finally:
            os.close(fd)
        self.collected.files += 1
        self.collected.bytes += info.st_size
        self.allocated += allocated

    def _copy_file(self, fd: int, entry: _Entry) -> None:
        mode = 0o755 if self.modes and entry.info.st_mode & stat.S_IXUSR else 0o644
        into = os.open(entry.target, _CREATE, mode, dir_fd=self.target)
        try:
            copied = _copy_bytes(fd, into, entry.info.st_size)
            if copied < entry.info.st_size or _version(os.fstat(fd)) != _version(entry.info):
                raise _LeftOut("changed while it was copied")
        except BaseException:
            os.unlink(entry.target, dir_fd=self.target)  # half of a file says something that the agent did not
            raise
        finally:
            os.close(into)

    def _check_names(self, info: os.stat_result) -> None:
        if self.names is None:
            walk = _Walk(self.source, self.limits, Collected(), frozenset(), None, exact=True)
            with contextlib.closing(walk.entries()) as entries:
                found = (entry.info for entry in entries)
                self.names = Counter((one.st_dev, one.st_ino) for one in found if one.st_nlink > 1)
        more = info.st_nlink - self.names[info.st_dev, info.st_ino]
        if more > 0:
            raise _LeftOut(f"a hard link: {more} of the file's {info.st_nlink} names are not in here")

    def _take_link(self, entry: _Entry) -> None:
        try:
            link = os.readlink("", dir_fd=entry.fd)
        except OSError as error:
            raise _left_out(error) from None
        if not stays_inside(link, entry.depth):
            raise _LeftOut("a symbolic link that may lead out")
        os.symlink(link, entry.target, dir_fd=self.target)
        self.collected.links += 1


def stays_inside(link: str, depth: int) -> bool:
    """Whether a symbolic link, `depth` folders below the top, cannot lead above the top.

    Dots lead up only before the first name: from there they climb real folders. After a name, which may be another
    link, they climb from wherever that leads: with `a/up -> ..`, `a/up/..` is outside, though it reads as `a`.
    """
    parts = [part for part in link.split("/") if part not in ("", ".")]
    up = len(list(itertools.takewhile("..".__eq__, parts)))
    return not link.startswith("/") and up <= depth and ".." not in parts[up:]


def _version(info: os.stat_result) -> tuple[int, int]:
    return info.st_size, info.st_mtime_ns


def _copy_bytes(source: int, target: int, size: int) -> int:
    """Copy that many bytes from the start of a file, or fewer if it ends; by the quickest way that works here.

    The kernel's own copies do not say which side failed: where one fails, the next takes over, and the last one tells.
    """
    ways = (_copy_range, _send, _copy_chunk) if size > _SMALL else (_copy_chunk,)
    done = 0
    for way in ways:
        try:
            while done < size and (count := way(source, target, done, size - done)):
                done += count
        except OSError as error:
            if error.errno in NO_ROOM or way is _copy_chunk:
                raise
    return done


def _copy_range(source: int, target: int, done: int, count: int) -> int:
    return os.copy_file_range(source, target, count, offset_src=done)


def _send(source: int, target: int, done: int, count: int) -> int:
    return os.sendfile(target, source, done, count)


def _copy_chunk(source: int, target: int, done: int, count: int) -> int:
    try:
        data = os.pread(source, min(count, _CHUNK), done)
    except OSError as error:
        raise _left_out(error) from None
    return os.write(target, data)


def safe_name(name: str) -> str:
    """A name that no terminal and no file system stumbles over; unlike names stay unlike.

    What is not plain ASCII is written as %XX, and so is the percent sign. What would be long is cut, with a digest of
    the whole behind `%~`, which no other safe form has.
    """
    raw = os.fsencode(name)
    odd = raw.translate(None, _PLAIN)
    safe = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw) if odd else name
    if len(safe) <= _MAX_SAFE_NAME:
        return safe
    return f"{safe[:100]}%~{hashlib.sha256(raw).hexdigest()[:40]}"


_PLAIN = bytes(byte for byte in range(0x21, 0x7F) if byte not in b"%\\/")
