"""The folder of an attempt: `trials/<trial_id>/attempt-N` below the run's.

The worker makes and writes it, `dispatch.json` first and `completion.json` last. What was copied out of a sandbox
(`result.json`, `grade.json`) is hostile: it is opened without following a link or waiting on a pipe, must be a regular
file, and is read up to a limit. Reading never raises for what stands there: it answers with a reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from sandbox_exec.contracts.words import Grade, TrialCompletion
from sandbox_exec.errors import InvalidValue
from sandbox_exec.store.room import one_error
from sandbox_exec.trial.trace import parse_json
from sandbox_exec.units import MIB

TRIALS: Final = "trials"
DISPATCH: Final = "dispatch.json"
COMPLETION: Final = "completion.json"
RESULT: Final = "result.json"
GRADE: Final = "grade.json"

MAX_RESULT_BYTES: Final = 16 * MIB  # larger things are files in out/
MAX_GRADE_BYTES: Final = MIB  # it is also in the completion and in the database
MAX_COMPLETION_BYTES: Final = 16 * MIB  # ours: a grade and a traceback at most, even if every byte is escaped

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Found(NamedTuple, Generic[T]):
    """What was read, or None and the reason."""

    value: T | None
    reason: str = ""


def attempt_folder(run: Path, trial_id: str, attempt: int) -> Path:
    """Return where the folder of an attempt is, or will be."""
    if trial_id in {"", ".", ".."} or "/" in trial_id or attempt < 1:
        raise InvalidValue(f"trial {trial_id!r}, attempt {attempt}: not a folder's name and a number from 1")
    return run / TRIALS / trial_id / f"attempt-{attempt}"


def begin_folder(folder: Path, dispatch: bytes) -> None:
    """Make the folder of an attempt, with what it was dispatched with.

    Not synced: an attempt whose folder a power cut took is a lost one, and runs again.
    """
    with one_error(folder.parent.parent):
        # In this order: most trials have one attempt, and what fails costs as much as what does not.
        with contextlib.suppress(FileExistsError):
            folder.parent.mkdir(parents=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        (folder / DISPATCH).write_bytes(dispatch)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or not at all, whatever kills us, and stays once this has returned.

    A writer that is killed can leave a hidden file beside it, which nothing reads. A power cut before this returns
    can leave a torn one: nobody has been told of it yet.
    """
    temporary = path.parent / f".{path.name}.{threading.get_native_id()}.tmp"
    with one_error(path.parent):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o644), "wb") as file:
                file.write(data)
                file.flush()
                temporary.rename(path)
                # After the renaming: a journal that has the new file has its name, and one wait is enough for both.
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # it may be whole, or an older one, but nobody knows that it stays
            raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_completion(folder: Path) -> Found[TrialCompletion]:
    """Return the completion of the attempt that `folder` belongs to. One of another attempt is refused."""
    found = _read_model(folder, COMPLETION, MAX_COMPLETION_BYTES, TrialCompletion)
    if found.value is None:
        return found
    own = (folder.parent.name, folder.name)
    if (found.value.trial_id, f"attempt-{found.value.attempt}") != own:
        return Found(None, f"{COMPLETION} is of {found.value.trial_id!r}, attempt {found.value.attempt}, not of {own}")
    return found


def read_grade(folder: Path) -> Found[Grade]:
    """Return what the grader wrote, validated."""
    return _read_model(folder, GRADE, MAX_GRADE_BYTES, Grade)


def read_json(folder: Path, name: str = RESULT, limit: int = MAX_RESULT_BYTES) -> Found[Any]:
    """Return any JSON value with finite numbers. A value of null is found, with an empty reason."""
    data, reason = read_file(folder, name, limit)
    if data is None:
        return Found(None, reason)
    try:
        return Found(parse_json(data, finite=True))
    except (ValueError, RecursionError) as error:
        return Found(None, f"{name} is malformed: {error}")


def digest_of(folder: Path, name: str, limit: int = MAX_RESULT_BYTES) -> str | None:
    """Return the SHA-256 of a file's bytes in hex; None if it is not there or `read_file` refuses it."""
    data = read_file(folder, name, limit).value
    return None if data is None else hashlib.sha256(data).hexdigest()


def read_file(folder: Path, name: str, limit: int) -> Found[bytes]:
    """Return the bytes of a regular file directly in `folder`, if they are no more than `limit`.

    Links in the path of `folder` itself are followed: that path is ours.
    """
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Without O_NONBLOCK, opening a pipe waits for its writer for ever.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return Found(None, f"{name} is not a regular file")
        with open(fd, "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return Found(None, f"{name} is not there")
    except OSError as error:
        return Found(None, f"{name} cannot be read: {error.strerror}")
    if len(data) > limit:
        return Found(None, f"{name} is larger than {limit} bytes")
    return Found(data)


def _read_model(folder: Path, name: str, limit: int, model: type[M]) -> Found[M]:
    data, reason = read_file(folder, name, limit)
    if data is None:
        return Found(None, reason)
    try:
        return Found(model.model_validate_json(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return Found(None, f"{name} is malformed: {f'{where}: ' if where else ''}{first['msg']}")
