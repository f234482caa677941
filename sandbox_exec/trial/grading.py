"""The grading phase: from what an agent left to a grade, or to the reason why there is none.

Begins when the agent's sandbox is proven empty. The grader gets a sandbox of its own, of a zygote or a container in
which no agent has been, under another uid; into that go copies of /workspace and /out, made by the collector of hostile
output, and the assets. Its verdict is `grade.json`, or what a Python grader returns: nothing else is asked, neither its
exit code nor what it printed. What it graded is kept as an archive, so that it can be graded again.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from pydantic import ValidationError

from sandbox_exec.clock import Clock
from sandbox_exec.contracts import (
    AgentError,
    Grade,
    GraderSpec,
    GradingReport,
    Outcome,
    Status,
    TrialDispatch,
)
from sandbox_exec.errors import NO_ROOM, InvalidValue, StoreFull
from sandbox_exec.experiment import without_repeats
from sandbox_exec.sandbox.base import End, Places, Sandbox
from sandbox_exec.trial.collect import Collected, CollectLimits, collect, stays_inside
from sandbox_exec.trial.launches import build_grader
from sandbox_exec.trial.recorder import Recorder
from sandbox_exec.trial.supervisor import Supervisor
from sandbox_exec.trial.trace import parse_json
from sandbox_exec.units import MIB

MAX_GRADE_BYTES: Final = MIB  # it is also in the completion and in the database
ANSWER: Final = "answer.tar"  # what was graded: workspace/ and out/
REJECTED: Final = "grade.rejected"  # what a grader wrote that is no grade
_GRADE: Final = "grade/grade.json"
_ROOM_FILES: Final = 1000  # that must be left for assets and a grade
_SPARE_BYTES: Final = 32 * MIB  # of what a grader may write of its own: what copies may be larger by
_WHY: Final = {
    Status.TASK_TIMEOUT: ("GraderTimeout", "the grader was killed at its deadline"),
    Status.MEMORY_EXCEEDED: ("GraderMemoryExceeded", "the grader was killed at its memory ceiling"),
    Status.PIDS_EXCEEDED: ("GraderPidsExceeded", "the grader was killed for its number of processes"),
    Status.OUTPUT_EXCEEDED: ("GraderOutputExceeded", "the grader was killed for what it printed or returned"),
    Status.DISK_EXCEEDED: ("GraderDiskExceeded", "the grader filled its disk"),
}


@dataclass(frozen=True)
class Graded:
    """What came of it. `status` is that of the trial, if its agent succeeded."""

    status: Status
    report: GradingReport
    grade: Grade | None = None
    raw: bytes | None = None  # what the grader wrote


class Grading:
    """One grading phase, from `start`. `left` puts what there is to grade into a sandbox; `on_done` is called once."""

    def __init__(
        self,
        dispatch: TrialDispatch,
        folder: Path,
        places: Places,
        clock: Clock,
        left: Callable[[Sandbox], None],
        about: dict[str, Any],
        on_done: Callable[[Graded], None],
        like: Sandbox | None = None,
        beside: Sandbox | None = None,
    ) -> None:
        """`about`: how the agent ended, for the grader to read. `like`: whose file system the grader's is to be.

        `beside`: an agent that still runs, whose network the grader is to share.
        """
        assert dispatch.grader is not None
        self._spec: GraderSpec = dispatch.grader
        self._dispatch, self._folder, self._places, self._clock = dispatch, folder, places, clock
        self._left, self._about, self._on_done, self._like = left, about, on_done, like
        self._beside = beside
        self._log = Recorder(folder, self._spec.limits, {"stdout": "grader.log", "stderr": "grader.log"})
        self._sandbox: Sandbox | None = None
        self.supervisor: Supervisor | None = None
        self.stopped = self.frozen = False

    def start(self) -> None:
        try:
            self._launch = build_grader(self._dispatch, self._about, like=self._like, beside=self._beside)
        except (OSError, InvalidValue) as error:
            self._fail("GraderSetupFailed", str(error))
            return
        self._places.acquire(self._launch, self._begin, self._refused)

    def _refused(self, end: End) -> None:
        if end.fault:
            self._done(Graded(Status.ENVIRONMENT_ERROR, self._report("SandboxUnavailable", end.fault)))
        else:
            self._fail("GraderSetupFailed", end.setup)

    def _begin(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        try:
            self._left(sandbox)
            if self._like is None and self._dispatch.answer is None:
                disk, agents = self._spec.limits.disk, self._dispatch.limits.disk
                _check_room(sandbox, disk, disk - agents - _SPARE_BYTES)  # a full disk leaves all of the difference
            if self._launch.role != "grader" and self._like is None:
                for name in ("workspace", "out"):
                    sandbox.give(name)
        except (OSError, InvalidValue, _DoesNotFit) as error:
            self._not_filled(error)
            return
        self.supervisor = Supervisor(sandbox, self._launch, self._clock, self._ended, tee=self._log.feed)
        if self.frozen:
            self.supervisor.freeze()
        if self.stopped:
            self.supervisor.stop("cancelled")

    def _not_filled(self, error: Exception) -> None:
        """Whose doing it is: a `grade_error` would count for nobody, so no agent may have one for the asking."""
        if isinstance(error, _DoesNotFit):
            self._done(Graded(Status.DISK_EXCEEDED, self._report("DiskExceeded", str(error))))
        elif isinstance(error, OSError) and error.errno in NO_ROOM:
            why = f"no room left in {self._folder}: {error.strerror}"
            self._done(Graded(Status.ENVIRONMENT_ERROR, self._report(StoreFull.__name__, why)))
        else:
            self._fail("GraderSetupFailed", str(error))

    def _ended(self, outcome: Outcome) -> None:
        sandbox = self._sandbox
        assert sandbox is not None
        raw: bytes | None = None
        reason, grade = "", None
        if outcome.status in (Status.ENVIRONMENT_ERROR, Status.CANCELLED):
            error = outcome.error or AgentError(type="Cancelled", message="the grader was stopped")
            self._done(Graded(outcome.status, self._report_of(outcome, error)))
            return
        if outcome.status in _WHY:
            error = AgentError(type=_WHY[outcome.status][0], message=_WHY[outcome.status][1])
            self._done(Graded(Status.GRADE_ERROR, self._report_of(outcome, error)))
            return
        if outcome.status is Status.SETUP_FAILED or (not self._launch.argv and not outcome.ok):
            said = outcome.error or AgentError(type="NoAnswer", message="the grader ended without returning")
            error = AgentError(type="GraderFailed", message=f"{said.type}: {said.message}", traceback=said.traceback)
            self._done(Graded(Status.GRADE_ERROR, self._report_of(outcome, error)))
            return
        if self._launch.argv:
            try:
                raw = sandbox.read_file(_GRADE, MAX_GRADE_BYTES)
            except (ValueError, OSError) as fault:
                reason = str(fault)
        else:
            raw = json.dumps(outcome.value).encode()  # NaN among it is refused below, as from everybody
            if len(raw) > MAX_GRADE_BYTES:
                reason, raw = f"the grade has {len(raw)} bytes; {MAX_GRADE_BYTES} are allowed", None
        if raw is not None:
            grade, reason = parse_grade(raw)
        elif not reason:
            code = f"exit code {outcome.exit_code}" if outcome.signal is None else f"signal {outcome.signal}"
            reason = f"the grader ended with {code} and wrote no grade.json; what it printed is in grader.log"
        if grade is None:
            error = AgentError(type="MalformedGrade" if raw is not None else "NoGrade", message=reason)
            self._done(Graded(Status.GRADE_ERROR, self._report_of(outcome, error), raw=raw))
        else:
            self._done(Graded(Status.SUCCESS, self._report_of(outcome, None), grade, raw))

    def _fail(self, kind: str, message: str) -> None:
        self._done(Graded(Status.GRADE_ERROR, self._report(kind, message)))

    def _report(self, kind: str, message: str) -> GradingReport:
        error = AgentError(type=kind, message=message)
        return GradingReport(ok=False, error=error, grader_digest=self._spec.digest)

    def _report_of(self, outcome: Outcome, error: AgentError | None) -> GradingReport:
        return GradingReport(
            ok=error is None,
            error=error,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            usage=outcome.usage,
            kill=outcome.kill,
            isolation=outcome.isolation,
            grader_digest=self._spec.digest,
        )

    def _done(self, graded: Graded) -> None:
        self._log.close()
        self.supervisor = None
        if self._sandbox is None:
            self._on_done(graded)
        else:
            self._places.release(self._sandbox, lambda: self._on_done(graded))


def parse_grade(data: bytes) -> tuple[Grade | None, str]:
    """The grade in what a grader wrote, or the reason why there is none. Any bytes give an answer."""
    try:
        value = parse_json(data, constants=False, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        return None, f"grade.json is malformed: {error}"
    try:
        return Grade.model_validate(value), ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return None, f"grade.json is malformed: {f'{where}: ' if where else ''}{first['msg']}"


# --- what there is to grade ---


class _DoesNotFit(Exception):
    """What an agent left is more than its disk held: files with holes, which copies have not."""


def carry(agent: Sandbox, grader: Sandbox, names: tuple[str, ...], limits: CollectLimits) -> list[tuple[str, str]]:
    """Copy places of an agent's sandbox, which is empty of processes, into a grader's. What was left out, and why.

    Raises _DoesNotFit if there is no room for it and a grade. `limits` are all that the grader's sandbox has.
    """
    left_out: list[tuple[str, str]] = []
    for name in names:
        try:
            source = agent.open_folder(name)
        except OSError as error:  # the agent put something else there
            left_out.append((name, error.strerror or str(error)))
            continue
        target = grader.open_folder(name)
        before = os.umask(0o022)  # the grader has another uid, and must be able to read it
        try:
            found = _copy(source, target, limits)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise _DoesNotFit(_TOO_LARGE) from error
        finally:
            os.umask(before)
            os.close(source)
            os.close(target)
        left_out += [(f"{name}/{path}", reason) for path, reason in found.left_out]
    return left_out


def _copy(source: int, target: int, limits: CollectLimits) -> Collected:
    """Into a folder that may hold something already: below /tmp stand places of what else a sandbox is shown."""
    taken = frozenset(os.listdir(target))
    if not taken:
        return collect(source, target, limits, modes=True, links="keep-inside", names="exact")
    own = f".{os.urandom(8).hex()}"
    os.mkdir(own, 0o755, dir_fd=target)
    inner = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
    try:
        found = collect(source, inner, limits, taken, modes=True, links="keep-inside", names="exact")
        for name in os.listdir(inner):
            os.rename(name, name, src_dir_fd=inner, dst_dir_fd=target)
    finally:
        os.close(inner)
    os.rmdir(own, dir_fd=target)
    return found


_TOO_LARGE: Final = "what the agent left does not fit the disk that it and a grade are given"


def _check_room(grader: Sandbox, disk: int, needed: int) -> None:
    """Assets and a grade must find room, whatever came before them. `disk`: all that the grader's sandbox has."""
    folder = grader.open_folder("workspace")
    try:
        room = os.fstatvfs(folder)
    finally:
        os.close(folder)
    is_own = room.f_blocks * room.f_frsize < disk + room.f_frsize  # else it is a folder of the host's
    if is_own and (room.f_bavail * room.f_frsize < needed or room.f_favail < _ROOM_FILES):
        raise _DoesNotFit(_TOO_LARGE)


def keep_answer(grader: Sandbox, names: Sequence[str], target: Path, limit: int) -> bool:
    """Archive what is there to grade, before anybody has run there; nothing, if it is more than `limit` bytes."""
    tops = {name: grader.open_folder(name) for name in names}
    try:
        roots = {name: f"/proc/self/fd/{fd}" for name, fd in tops.items()}
        if sum(_size(root) for root in roots.values()) > limit:
            return False
        with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
            for name, root in roots.items():
                for path in sorted(_below(root)):
                    info = archive.gettarinfo(path, f"{name}/{path.relative_to(root)}")
                    info.uid = info.gid = info.mtime = 0
                    info.uname = info.gname = ""
                    with contextlib.ExitStack() as stack:
                        archive.addfile(info, stack.enter_context(open(path, "rb")) if info.isreg() else None)
    except OSError:
        target.unlink(missing_ok=True)  # half of it is no answer, and takes the room in which to say so
        raise
    finally:
        for fd in tops.values():
            os.close(fd)
    return True


def _size(root: str) -> int:
    infos = (path.lstat() for path in _below(root))
    return sum(info.st_size for info in infos if not stat.S_ISDIR(info.st_mode))


def _below(root: str) -> Iterator[Path]:
    """Not `rglob`: that asks where each link leads, and fails at one whose target's name no file could have."""
    for folder, folders, files in os.walk(root):
        yield from (Path(folder, name) for name in (*folders, *files))


def put_answer(archive: Path, grader: Sandbox, limits: CollectLimits) -> None:
    """Put what is in an archive into a grader's sandbox. Raises InvalidValue for one that is not as `keep_answer`'s."""
    tops = {name: grader.open_folder(name) for name in ("workspace", "out")}
    with contextlib.suppress(FileNotFoundError):  # of the agent's in `same`; containers have none to keep
        tops["tmp"] = grader.open_folder("tmp")
    room, count = limits.bytes, 0
    before = os.umask(0o022)  # as in `carry`
    try:
        with tarfile.open(archive, "r:") as source:
            for info in source:
                top, _, below = info.name.partition("/")
                path = PurePosixPath(below)
                if top not in tops or not path.parts or path.is_absolute() or ".." in path.parts:
                    raise InvalidValue(f"{archive}: {info.name!r} is not in workspace/ or out/")
                count, room = count + 1, room - info.size
                if count > limits.files or room < 0:
                    raise InvalidValue(f"{archive}: more than {limits.files} files or {limits.bytes} bytes")
                _put(source, info, Path(f"/proc/self/fd/{tops[top]}", path), len(path.parts) - 1)
    except (tarfile.TarError, UnicodeError, EOFError) as error:
        raise InvalidValue(f"{archive} cannot be read: {error}") from error
    except OSError as error:
        if error.errno in NO_ROOM:  # of the sandbox, not of the disk that the run is on
            raise InvalidValue(f"what is in {archive} does not fit the grader's sandbox") from error
        raise
    finally:
        os.umask(before)
        for fd in tops.values():
            os.close(fd)


def _put(source: tarfile.TarFile, info: tarfile.TarInfo, target: Path, depth: int) -> None:
    if info.isdir():
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        target.chmod(0o755)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if info.issym() and stays_inside(info.linkname, depth):
        os.symlink(info.linkname, target)
    elif info.isreg():
        data: IO[bytes] | None = source.extractfile(info)
        assert data is not None
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as file:
            while chunk := data.read(MIB):
                file.write(chunk)
        target.chmod(0o755 if info.mode & 0o100 else 0o644)
    else:
        raise InvalidValue(f"{info.name!r} is neither a file, a folder, nor a link that stays inside")
