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
import pickle
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, NoReturn

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
from sandbox_exec.errors import NO_ROOM, InvalidValue
from sandbox_exec.guest import entry
from sandbox_exec.sandbox.base import End, Launch, Places, Role, Sandbox
from sandbox_exec.trial.collect import CollectLimits, collect, stays_inside
from sandbox_exec.trial.recorder import Recorder
from sandbox_exec.trial.supervisor import Supervisor
from sandbox_exec.trial.trace import parse_json
from sandbox_exec.units import MIB

MAX_GRADE_BYTES: Final = MIB  # it is also in the completion and in the database
ANSWER: Final = "answer.tar"  # what was graded: workspace/ and out/
REJECTED: Final = "grade.rejected"  # what a grader wrote that is no grade
_GRADE: Final = "grade/grade.json"
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
            self._launch = replace(build_grader(self._dispatch, self._about), like=self._like, beside=self._beside)
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
            if self._launch.role != "grader" and self._like is None:
                for name in ("workspace", "out"):
                    sandbox.give(name)
        except OSError as error:
            no_room = error.errno in NO_ROOM
            why = f"what the agent left does not fit the grader's sandbox: {error}" if no_room else str(error)
            self._fail("GraderSetupFailed", why)
            return
        self.supervisor = Supervisor(sandbox, self._launch, self._clock, self._ended, tee=self._log.feed)
        if self.frozen:
            self.supervisor.freeze()
        if self.stopped:
            self.supervisor.stop("cancelled")

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


def build_grader(dispatch: TrialDispatch, about: dict[str, Any]) -> Launch:
    """What to run for the grading of a dispatch."""
    spec = dispatch.grader
    assert spec is not None
    task = {
        "id": dispatch.task.id,
        "input": dispatch.task.input,
        "seed": dispatch.seed,
        "repeat": dispatch.slot.repeat,
        "agent": about,
    }
    role: Role = "grader-writable" if spec.writable or spec.in_ == "same" else "grader"
    common: dict[str, Any] = {
        "limits": spec.limits,
        "seed": dispatch.seed,
        "role": role,
        "assets": spec.assets,
        "container": spec.container,
        "staged": {"in/task.json": json.dumps(task).encode()},
        "labels": {"run": dispatch.run_id, "trial": dispatch.trial_id, "attempt": str(dispatch.attempt)},
    }
    if spec.command is not None:
        return Launch(argv=spec.command, **common)
    if spec.python is not None:
        module, _, function = spec.python.partition(":")
        call: tuple[Any, ...] = (entry.call, (str(dispatch.base), module, function, task), {})
        return Launch(payload=pickle.dumps(call), **common)
    assert spec.payload is not None
    call = (entry.call_pickled, (spec.payload.read_bytes(), task), {})
    return Launch(payload=pickle.dumps(call), **common)


def parse_grade(data: bytes) -> tuple[Grade | None, str]:
    """The grade in what a grader wrote, or the reason why there is none. Any bytes give an answer."""
    try:
        value = parse_json(data, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        return None, f"grade.json is malformed: {error}"
    try:
        return Grade.model_validate(value), ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return None, f"grade.json is malformed: {f'{where}: ' if where else ''}{first['msg']}"


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name[:40]!r} stands there twice")
    return members


# --- what there is to grade ---


def carry(agent: Sandbox, grader: Sandbox, names: tuple[str, ...], limits: CollectLimits) -> list[tuple[str, str]]:
    """Copy places of an agent's sandbox, which is empty of processes, into a grader's. What was left out, and why."""
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
            found = collect(source, target, limits, modes=True, links="keep-inside", names="exact")
        finally:
            os.umask(before)
            os.close(source)
            os.close(target)
        left_out += [(f"{name}/{path}", reason) for path, reason in found.left_out]
    return left_out


def keep_answer(grader: Sandbox, target: Path, limit: int) -> bool:
    """Archive what is there to grade, before anybody has run there; nothing, if it is more than `limit` bytes."""
    tops = {name: grader.open_folder(name) for name in ("workspace", "out")}
    try:
        roots = {name: f"/proc/self/fd/{fd}" for name, fd in tops.items()}
        if sum(_size(root) for root in roots.values()) > limit:
            return False
        with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
            for name, root in roots.items():
                for path in sorted(Path(root).rglob("*")):
                    info = archive.gettarinfo(path, f"{name}/{path.relative_to(root)}")
                    info.uid = info.gid = info.mtime = 0
                    info.uname = info.gname = ""
                    with contextlib.ExitStack() as stack:
                        archive.addfile(info, stack.enter_context(open(path, "rb")) if info.isreg() else None)
    finally:
        for fd in tops.values():
            os.close(fd)
    return True


def _size(root: str) -> int:
    return sum(path.lstat().st_size for path in Path(root).rglob("*") if not path.is_dir())


def put_answer(archive: Path, grader: Sandbox, limits: CollectLimits) -> None:
    """Put what is in an archive into a grader's sandbox. Raises InvalidValue for one that is not as `keep_answer`'s."""
    tops = {name: grader.open_folder(name) for name in ("workspace", "out")}
    room, count = limits.bytes, 0
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
    except tarfile.TarError as error:
        raise InvalidValue(f"{archive} cannot be read: {error}") from error
    finally:
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
