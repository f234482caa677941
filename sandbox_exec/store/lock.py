"""The owner's lock of a run: an flock on `run.lock`, which says who holds it.

The kernel drops the lock with the last descriptor of the open file, so a killed owner's is free at once. That is
also why a forked child must `forget()` it: a descriptor it inherited would hold the run for a dead owner. The
file is never deleted: a second process could then hold a lock on a file that has no name any more.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from sandbox_exec.errors import RunLocked
from sandbox_exec.store.canonical import canonical

LOCK_NAME: Final = "run.lock"

_MAX_BYTES: Final = 4096  # of what the file says; far more than a name of a host


class Holder(NamedTuple):
    """Who holds a run. All None in the instant before a new owner has signed."""

    pid: int | None
    host: str | None
    since: str | None

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that has just taken it"
        return f"process {self.pid} on {self.host}, since {self.since}"


class OwnerLock:
    """Held from its making to `release()`. Raises `RunLocked`, which names the holder, if it is taken."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if not _take(self._fd):
                raise RunLocked(f"the run in {folder} is held by {_signed(self._fd)}; only one may write it")
            _sign(self._fd)
        except BaseException:
            self.forget()
            raise

    def release(self) -> None:
        """Give the run free. Does nothing the second time."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            self.forget()

    def forget(self) -> None:
        """Close this process's descriptor only. In a forked child: the owner, its parent, keeps the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def holder(folder: Path) -> Holder | None:
    """Return who holds the run in `folder`, or None. It can change as soon as this has returned."""
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return None if _try(fd, fcntl.LOCK_SH) else _signed(fd)
    finally:
        os.close(fd)


def wait_until_free(folder: Path) -> None:
    """Return once nobody holds the run in `folder`; at once if nobody does."""
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _take(fd: int) -> bool:
    # `holder` shares the lock for an instant, which must not look like an owner: only an owner refuses a share.
    while not _try(fd, fcntl.LOCK_EX):
        if not _try(fd, fcntl.LOCK_SH):
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.sched_yield()
    return True


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(fd: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = canonical({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
    os.ftruncate(fd, 0)  # a killed owner's name
    os.pwrite(fd, text.encode(), 0)


def _signed(fd: int) -> Holder:
    try:
        said = json.loads(os.pread(fd, _MAX_BYTES, 0))
        return Holder(int(said["pid"]), str(said["host"]), str(said["since"]))
    except (ValueError, TypeError, KeyError):
        return Holder(None, None, None)
