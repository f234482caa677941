"""The folder that a trial's places are in, seen from our side: filled before the agent, read after it.

All calls start from a handle on it. What an agent has been at is hostile: no link is followed, no pipe waited on.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(scratch: int, name: str) -> int:
    return os.open(name, _READ | os.O_DIRECTORY, dir_fd=scratch)


def read_file(scratch: int, path: str, limit: int) -> bytes | None:
    """See `Sandbox.read_file`."""
    folder, name = path.split("/")
    parent = open_folder(scratch, folder)
    try:
        fd = os.open(name, _READ | os.O_NONBLOCK, dir_fd=parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    finally:
        os.close(parent)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{name} is not a regular file")
        if info.st_size > limit:
            raise ValueError(f"{name} has {info.st_size} bytes; {limit} are allowed")
        with open(fd, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(fd)


def stage(scratch: int, path: str, data: bytes) -> None:
    """Put a file into one of its folders."""
    folder, name = path.split("/")
    parent = open_folder(scratch, folder)
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=parent)
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o644)  # whatever the umask is: the agent is another user
            file.write(data)
    finally:
        os.close(parent)


def fill(scratch: int, name: str, source: Path) -> None:
    """Copy a folder, or a file, into one of the places, before anybody is there. Links stay links."""
    target = f"/proc/self/fd/{scratch}/{name}"
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def give(scratch: int, name: str, uid: int, gid: int) -> None:
    """Make a place, and all in it, somebody's."""
    if uid == os.geteuid():
        return
    top = f"/proc/self/fd/{scratch}/{name}"
    for folder, folders, files in os.walk(top):
        for inner in (*folders, *files):
            os.chown(os.path.join(folder, inner), uid, gid, follow_symlinks=False)
    os.chown(top, uid, gid)


def is_full(scratch: int) -> bool:
    """Whether a file system of its own has no room left, or no names."""
    room = os.fstatvfs(scratch)
    return room.f_bfree == 0 or room.f_ffree == 0
