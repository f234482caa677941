"""No room left, in whatever words the kernel or SQLite say it, as one error."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sandbox_exec.errors import NO_ROOM, InvalidValue, StoreFull

_PROBE_BYTES: Final = 64 * 1024  # more than the 32 KiB by which SQLite grows its shared index
_PRIMARY: Final = 0xFF  # of an extended result code, the bits that name the class of error


@contextmanager
def one_error(folder: Path) -> Iterator[None]:
    """Raise `StoreFull` for anything inside that failed because `folder` has no room.

    A database that is none, or is damaged, becomes `InvalidValue`. All other errors pass as they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise _full(folder) from error
        raise
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & _PRIMARY
        if code == sqlite3.SQLITE_FULL:
            raise _full(folder) from error
        # SQLite knows ENOSPC of a write only. A quota, no more inodes, or no room for its shared index are an
        # I/O error or a file that cannot be opened, and it does not say which: ask the folder.
        if code in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN} and not has_room(folder):
            raise _full(folder) from error
        if code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
            raise InvalidValue(f"the database in {folder} is damaged, or is not one: {error}") from error
        raise


def has_room(folder: Path) -> bool:
    """Return whether a small file can be written in `folder`, by writing one without a name."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.errno not in NO_ROOM
    return True


def _full(folder: Path) -> StoreFull:
    return StoreFull(f"no room left in {folder}: free some there, then continue the run")
