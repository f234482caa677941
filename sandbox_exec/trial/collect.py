"""Copying what an agent left. Everything below the handle is hostile: links, pipes, devices, giants, odd names.

Regular files and folders only, opened without following a link below a directory handle, so that a folder that is
swapped for a link while we look leads nowhere. What is left out is listed with the reason.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_exec.errors import NO_ROOM

_MAX_DEPTH = 32
_MAX_FILES = 10_000
_MAX_LISTED = 1000  # of what was left out: a million links make no report
_CHUNK = 1 << 20


@dataclass
class Collected:
    """What came over, and what did not."""

    files: int = 0
    bytes: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    left_out_more: int = 0

    def leave_out(self, path: str, reason: str) -> None:
        if len(self.left_out) < _MAX_LISTED:
            self.left_out.append((path, reason))
        else:
            self.left_out_more += 1


def collect(source: int, target: Path, limit: int, skip: frozenset[str] = frozenset()) -> Collected:
    """Copy what is below the handle `source` into `target`, which is made if there is anything to copy.

    Raises OSError if there is no room for it: that is not the agent's doing, and what came over is not all of it.
    """
    collected = Collected()
    _copy_folder(source, target, limit, "", 0, collected, skip)
    return collected


def _copy_folder(
    source: int, target: Path, limit: int, below: str, depth: int, collected: Collected, skip: frozenset[str]
) -> None:
    with os.scandir(source) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        safe = safe_name(name)
        path = f"{below}{safe}"
        if not below and name in skip:
            continue
        if collected.files >= _MAX_FILES:
            collected.leave_out(path, f"more than {_MAX_FILES} files")
            continue
        try:
            _copy_entry(source, name, target / safe, limit, path, depth, collected)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            collected.leave_out(path, error.strerror or str(error))


def _copy_entry(source: int, name: str, target: Path, limit: int, path: str, depth: int, collected: Collected) -> None:
    kind = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if stat.S_ISDIR(kind):
        if depth >= _MAX_DEPTH:
            collected.leave_out(path, f"deeper than {_MAX_DEPTH} folders")
            return
        fd = os.open(name, flags | os.O_DIRECTORY, dir_fd=source)
        try:
            _copy_folder(fd, target, limit, f"{path}/", depth + 1, collected, frozenset())
        finally:
            os.close(fd)
        return
    if not stat.S_ISREG(kind):
        collected.leave_out(path, "neither a regular file nor a folder")
        return
    fd = os.open(name, flags, dir_fd=source)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            collected.leave_out(path, "neither a regular file nor a folder")
        elif collected.bytes + info.st_size > limit:
            collected.leave_out(path, f"{info.st_size} bytes do not fit the {limit} that are kept")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            collected.bytes += _copy_file(fd, target, info.st_size)
            collected.files += 1
    finally:
        os.close(fd)


def _copy_file(fd: int, target: Path, size: int) -> int:
    copied = 0
    with open(target, "xb") as file:
        try:
            while copied < size and (chunk := os.read(fd, min(_CHUNK, size - copied))):
                file.write(chunk)
                copied += len(chunk)
            file.flush()
        except OSError:
            target.unlink()  # half of a file says something that the agent did not
            raise
    return copied


def safe_name(name: str) -> str:
    """A name that no terminal, shell or file system stumbles over; unlike names stay unlike."""
    raw = os.fsencode(name)
    plain = all(0x20 < byte < 0x7F and byte not in b"%\\/" for byte in raw)
    if plain and len(raw) <= 200:
        return name
    safe = "".join(chr(byte) if 0x20 < byte < 0x7F and byte not in b"%\\/" else f"%{byte:02X}" for byte in raw)
    if len(safe) <= 200:
        return safe
    return f"{safe[:150]}-{hashlib.sha256(raw).hexdigest()[:16]}"
