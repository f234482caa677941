"""What this machine gives: every rung, every limit and what holds it, cgroups, Docker, and how to get more.

Nothing is guessed from a name: a rung is offered because a trial ran in it, a ceiling because it was set on a
cgroup made for it, Docker because an engine answered. What is made for that is removed again. Limits: it looks
with the rights and from the cgroup of whoever calls it, so another user or a service may get another answer.
"""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import os
import platform
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import psutil
from pydantic import Field

from sandbox_exec.containment import Cgroups, Containment, PoolCgroups, all_rungs
from sandbox_exec.containment.cgroups import CONTROLLERS
from sandbox_exec.containment.ladder import Probe, candidates, how_to_get
from sandbox_exec.contracts import Contract, Isolation, Limits, Rung
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import kernel
from sandbox_exec.sandbox import process
from sandbox_exec.units import processors

ENGINE_TIMEOUT_S: Final = 2.0  # an engine on this machine answers in milliseconds, a busy one within a second
DEFAULT_ENGINE: Final = "unix:///var/run/docker.sock"
_MAX_TEXT: Final = 400  # of a reason that another program gave
_CAP_SYS_ADMIN: Final = 21


class MachineReport(Contract):
    """Where this was asked."""

    sandbox_exec: str = Field(description="Version of the package.")
    system: str
    kernel: str
    architecture: str
    python: str
    executable: str
    cores: int = Field(ge=1, description="Processors that this process may use.")
    memory_bytes: int = Field(ge=0)
    uid: int = Field(description="Of the caller; -1 where there are none.")


class RungReport(Contract):
    """One way to hold an agent: whether it can be had here."""

    rung: Rung
    available: bool
    chosen: bool = Field(description="Whether it is the strongest here, so that a Pool takes it.")
    why_not: str = ""
    how_found: str
    to_get: str = Field(default="", description="What to do to have it.")


class LimitReport(Contract):
    """One limit, and what holds it on the chosen rung."""

    name: str
    held_by: str = Field(description="In the words of `Outcome.isolation`; none: nothing holds it.")
    meaning: str
    how_found: str
    to_get: str = Field(default="", description="What to do to have it held better, if anything is.")


class HierarchyReport(Contract):
    """A mounted tree of cgroups."""

    version: Literal[1, 2]
    mount_point: str


class ControllerReport(Contract):
    """Where the kernel would count and bound one thing for us."""

    name: str
    held_by: str = Field(description="cgroup-v2, cgroup-v1 or none.")
    folder: str = Field(default="", description="The cgroup below which ours are made.")
    why_not: str = ""
    how_found: str
    to_get: str = ""


class CgroupReport(Contract):
    hierarchies: tuple[HierarchyReport, ...]
    controllers: tuple[ControllerReport, ...]
    freezer: str = Field(default="", description="The v2 cgroup below which ours are frozen and killed as one.")
    failure: str = Field(default="", description="What went wrong when a ceiling was set, if something did.")


class EngineReport(Contract):
    """The Docker engine, if there is one: `sandbox.kind: docker` needs it, and nothing else does."""

    state: Literal["answers", "absent", "denied", "too-old", "silent", "odd"]
    address: str
    version: str = ""
    api_version: str = ""
    why_not: str = ""
    how_found: str
    to_get: str = ""


class Diagnosis(Contract):
    """All of it. `format` changes when a reader of the JSON would have to."""

    format: Literal[1] = 1
    machine: MachineReport
    chosen: Rung | None = Field(description="What a Pool takes here; None: nothing can be had.")
    rungs: tuple[RungReport, ...]
    limits: tuple[LimitReport, ...]
    cgroups: CgroupReport
    docker: EngineReport
    notes: tuple[str, ...] = Field(default=(), description="What else a user should know.")


def diagnose(
    probe: Probe = process.probe,
    docker_host: str | None = None,
    engine_timeout_s: float = ENGINE_TIMEOUT_S,
    proc: Path = Path("/proc"),
) -> Diagnosis:
    """Find out all of it, in about a second. Whatever is broken is in the answer, and is no exception.

    docker_host: the engine to ask; by default what DOCKER_HOST says, or the usual socket.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = all_rungs(functools.partial(_ask, probe))
    cgroups = found[0][0].cgroups
    failure = _set_ceilings(cgroups)
    chosen = next((containment for containment, reason in found if not reason), None)
    everywhere = found[-1][1]  # why not even the weakest can be had: no stronger one is to blame for that
    return Diagnosis(
        machine=_machine(),
        chosen=chosen.rung if chosen else None,
        rungs=tuple(_rung(containment, reason, chosen, everywhere, proc) for containment, reason in found),
        limits=tuple(_limits(chosen, failure)) if chosen else (),
        cgroups=_cgroups(cgroups, failure, proc),
        docker=ask_engine(docker_host, engine_timeout_s),
        notes=tuple(dict.fromkeys(_shortened(str(each.message)) for each in caught if _is_for_users(each))),
    )


def _is_for_users(warning: warnings.WarningMessage) -> bool:
    return warning.category is UserWarning


def _ask(probe: Probe, containment: Containment) -> None:
    try:
        probe(containment)
    except SandboxUnavailable:
        raise
    except Exception as error:  # a doctor who falls ill says of what, and looks at the next
        raise SandboxUnavailable(f"{type(error).__name__}: {error}") from error


def _machine() -> MachineReport:
    return MachineReport(
        sandbox_exec=_version(),
        system=platform.system(),
        kernel=platform.release(),
        architecture=platform.machine(),
        python=platform.python_version(),
        executable=sys.executable,
        cores=processors(),
        memory_bytes=psutil.virtual_memory().total,
        uid=os.geteuid() if hasattr(os, "geteuid") else -1,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("sandbox-exec")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a folder


# --- rungs -----------------------------------------------------------------------------------------


def _rung(containment: Containment, reason: str, chosen: Containment | None, everywhere: str, proc: Path) -> RungReport:
    rung = containment.rung
    known = dict(candidates(containment.cgroups))[rung]
    how = "known without a try" if known else "a trial was tried in it" if reason else "a trial ran in it"
    mendable = reason and reason != everywhere
    return RungReport(
        rung=rung,
        available=not reason,
        chosen=chosen is not None and rung is chosen.rung,
        why_not=_shortened(reason),
        how_found=how,
        to_get=_how_to_get(rung, bool(known), containment.cgroups, proc) if mendable else "",
    )


def _how_to_get(rung: Rung, known: bool, cgroups: Cgroups, proc: Path) -> str:
    """The general advice, or what stands in the way on this machine where that can be read."""
    if known and rung is not Rung.CGROUP:
        return how_to_get(rung)
    if rung is Rung.ROOT_NAMESPACES and not _has_capability(_CAP_SYS_ADMIN, proc):
        return "root lacks CAP_SYS_ADMIN here; a container started with --privileged has it"
    if rung is Rung.USER_NAMESPACES:
        return "; ".join(_forbidding_settings(proc)) or (
            f"{how_to_get(rung)}. In a container, its own limits forbid it: "
            "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
        )
    if rung is Rung.CGROUP:
        return _how_to_get_cgroups(next(iter(cgroups.why.values()), ""))
    return how_to_get(rung)


def _forbidding_settings(proc: Path) -> list[str]:
    """The settings of this kernel that keep ordinary users from making namespaces, and how to change them."""
    settings = (
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
        ("user/max_user_namespaces", "0", "15000"),
    )
    found = []
    for path, forbids, allows in settings:
        if _read(proc / "sys" / path) == forbids:
            name = path.replace("/", ".")
            found.append(f"{name} is {forbids} here: as root, sysctl -w {name}={allows}")
    return found


def _has_capability(number: int, proc: Path) -> bool:
    for line in _read(proc / "self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- limits ----------------------------------------------------------------------------------------

_COUNTED: Final = "the kernel holds it, whatever the agent forks"
_WATCHED: Final = {
    "memory": "the keeper looks every 20 ms: not at a short excess, nor at memory that no process maps",
    "pids": "the keeper looks every 20 ms: a short excess is not seen",
}
_UNHELD: Final = "nothing holds it"
_BY_RUNG: Final = "follows from the rung, in which a trial ran"


def _limits(chosen: Containment, failure: str) -> Iterator[LimitReport]:
    """What holds each limit for a call that asks for all of them."""
    uid = chosen.agent_uid(0)
    abi = kernel.landlock_abi()
    in_force = abi if not chosen.rung.namespaced and abi >= kernel.SCOPING_ABI else 0
    isolation = chosen.isolation(Limits(cpus=1.0), uid, in_force)
    for name, held_by in (("memory", isolation.memory), ("pids", isolation.pids), ("cpu", isolation.cpu)):
        yield _ceiling(name, held_by, chosen.cgroups, failure)
    yield _freeze(isolation, chosen.cgroups)
    yield from _places(isolation, uid)
    yield LimitReport(
        name="seccomp",
        held_by="filter" if isolation.seccomp else "none",
        meaning="rare and dangerous system calls answer EPERM" if isolation.seccomp else _UNHELD,
        how_found="the trial that ran installed it" if isolation.seccomp else _BY_RUNG,
        to_get="" if isolation.seccomp else how_to_get(Rung.SUBREAPER),
    )
    yield _landlock(chosen.rung, abi, in_force)


def _ceiling(name: str, held_by: str, cgroups: Cgroups, failure: str) -> LimitReport:
    by_cgroup = held_by.startswith("cgroup")
    meanings = {"watched": _WATCHED.get(name, ""), "none": _UNHELD}
    return LimitReport(
        name=name,
        held_by=held_by,
        meaning=meanings.get(held_by, _COUNTED),
        how_found=_by_cgroup(failure) if by_cgroup else f"no cgroup: {cgroups.why.get(name, 'none was found')}",
        to_get="" if by_cgroup else _how_to_get_cgroups(cgroups.why.get(name, "")),
    )


def _freeze(isolation: Isolation, cgroups: Cgroups) -> LimitReport:
    by_cgroup = isolation.freeze.startswith("cgroup")
    return LimitReport(
        name="freeze",
        held_by=isolation.freeze,
        meaning="all processes stop as one" if by_cgroup else "SIGSTOP to each process: an agent can undo it",
        how_found="a cgroup was made" if by_cgroup else cgroups.why.get("v2", "no cgroup v2 tree is mounted"),
        to_get="" if by_cgroup else _how_to_get_cgroups(cgroups.why.get("v2", "")),
    )


def _places(isolation: Isolation, uid: int) -> Iterator[LimitReport]:
    """What follows from namespaces, or from their absence."""
    private = isolation.filesystem == "private"
    to_get = "" if private else f"namespaces: {how_to_get(Rung.USER_NAMESPACES)}"
    tmpfs = "tmpfs" if private else "none"
    held = {
        "disk": (tmpfs, "a file system of its own with a size"),
        "files": (tmpfs, "a file system of its own with a number of files"),
        "network": (isolation.network, "a loopback of its own, no way out"),
        "filesystem": (isolation.filesystem, "the system and its Python, read-only; not the caller's files"),
    }
    if not private:
        held = {
            "disk": (tmpfs, f"{_UNHELD}; file_size bounds each file"),
            "files": (tmpfs, _UNHELD),
            "network": (isolation.network, "the caller's own"),
            "filesystem": (isolation.filesystem, "the caller's own"),
        }
    for name, (held_by, meaning) in held.items():
        yield LimitReport(name=name, held_by=held_by, meaning=meaning, how_found=_BY_RUNG, to_get=to_get)
    dropped = uid != (os.geteuid() if hasattr(os, "geteuid") else uid)
    yield LimitReport(
        name="uid",
        held_by="own" if dropped else "caller's",
        meaning=f"such as {uid}, which nobody else has" if dropped else f"{uid}, without any capability",
        how_found=_BY_RUNG,
        to_get="" if dropped else how_to_get(Rung.ROOT_NAMESPACES),
    )


def _landlock(rung: Rung, abi: int, in_force: int) -> LimitReport:
    has = f"ABI {abi} is here" if abi else "not here"
    if in_force:
        meaning = f"ABI {in_force}: signals and abstract sockets of agents stay among themselves"
    elif rung.namespaced:
        meaning = f"{has}, and not needed: namespaces hold more"
    else:
        meaning = f"{has}: an agent with the caller's uid can signal the caller's processes"
    needed = not in_force and not rung.namespaced
    return LimitReport(
        name="landlock",
        held_by="scopes" if in_force else "none",
        meaning=meaning,
        how_found=f"the kernel says ABI {abi}" if abi else "the kernel does not have it",
        to_get=f"Linux 6.12 or later, with Landlock (ABI {kernel.SCOPING_ABI})" if needed else "",
    )


# --- cgroups ---------------------------------------------------------------------------------------


def _cgroups(cgroups: Cgroups, failure: str, proc: Path) -> CgroupReport:
    return CgroupReport(
        hierarchies=tuple(_hierarchies(proc)),
        controllers=tuple(_controller(name, cgroups, failure) for name in CONTROLLERS),
        freezer=str(cgroups.freezer or ""),
        failure=failure,
    )


def _controller(name: str, cgroups: Cgroups, failure: str) -> ControllerReport:
    if name in cgroups.homes:
        return ControllerReport(
            name=name,
            held_by=cgroups.version(name),
            folder=str(cgroups.homes[name][1]),
            how_found=_by_cgroup(failure),
        )
    why = cgroups.why.get(name) or cgroups.why.get("v2") or "no cgroup tree was found"
    return ControllerReport(
        name=name,
        held_by="none",
        why_not=why,
        how_found="it was tried" if "cannot" in why else "read from the tree",
        to_get=_how_to_get_cgroups(why),
    )


def _by_cgroup(failure: str) -> str:
    return f"a cgroup was made, but setting ceilings failed: {failure}" if failure else "a ceiling was set on a cgroup"


def _how_to_get_cgroups(why: str) -> str:
    if os.strerror(errno.EROFS) in why:  # as in most containers
        return "the tree is read-only: mount it writable; a container started with --privileged has it so"
    return how_to_get(Rung.CGROUP)


def _hierarchies(proc: Path) -> Iterator[HierarchyReport]:
    for line in _read(proc / "self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind = right.partition(" ")[0]
        if kind in ("cgroup", "cgroup2"):
            yield HierarchyReport(version=2 if kind == "cgroup2" else 1, mount_point=left.split()[4])


def _set_ceilings(cgroups: Cgroups) -> str:
    """Set each ceiling on a cgroup made for it; what went wrong, if something did."""
    if not cgroups.homes and cgroups.freezer is None:
        return ""
    try:
        pool = PoolCgroups(cgroups)
        try:
            slot = pool.slot(0)
            try:
                slot.prepare(Limits(cpus=1.0))
            finally:
                slot.close()
        finally:
            pool.close()
    except OSError as error:
        return _shortened(str(error))
    return ""


# --- Docker ----------------------------------------------------------------------------------------


def ask_engine(host: str | None = None, timeout_s: float = ENGINE_TIMEOUT_S) -> EngineReport:
    """Ask the Docker engine for its version. Waits for it no longer than half again `timeout_s`; never raises."""
    import docker  # noqa: F401  # late: it takes longer to load than all else here; and not within the timeout

    address = host or os.environ.get("DOCKER_HOST") or DEFAULT_ENGINE
    answers: list[EngineReport] = []
    # The package's own timeout is for each read, and does not bound an ssh connection or a slow name server.
    asking = threading.Thread(target=lambda: answers.append(_ask_engine(address, timeout_s)), daemon=True)
    asking.start()
    asking.join(timeout_s * 1.5)  # so that where its own timeout holds, that is what speaks
    return answers[0] if answers else _silent(address, timeout_s)


def _ask_engine(address: str, timeout_s: float) -> EngineReport:
    import docker

    try:
        _knock(address, timeout_s)
        client = docker.from_env(timeout=timeout_s, environment={**os.environ, "DOCKER_HOST": address})
        try:
            said = client.version()
        finally:
            client.close()
        return EngineReport(
            state="answers",
            address=address,
            version=_shortened(str(said["Version"]), 40),
            api_version=_shortened(str(said["ApiVersion"]), 40),
            how_found=_ENGINE_ASKED,
        )
    except Exception as error:  # whatever stands at that address may say anything
        return _engine_failure(address, error, timeout_s)


def _knock(address: str, timeout_s: float) -> None:
    """Connect to a socket in the file system, only to raise what that raises: the package leaks one that it cannot."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout_s)
            sock.connect(address.removeprefix("unix://"))


_ENGINE_ASKED: Final = "the engine was asked for its version"


def _engine_failure(address: str, error: Exception, timeout_s: float) -> EngineReport:
    from docker.errors import InvalidVersion
    from requests.exceptions import Timeout

    causes = list(_causes(error))

    def any_is(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if any_is(Timeout, TimeoutError):
        return _silent(address, timeout_s)
    if any_is(InvalidVersion):
        return _no_engine("too-old", address, str(error), "install Docker 20.10 or later")
    if any_is(PermissionError):
        why = "the socket is there, but this user may not use it"
        return _no_engine("denied", address, why, "add the user to the group of the socket, or run as root")
    if any_is(FileNotFoundError, ConnectionRefusedError):
        why = "there is no such socket" if any_is(FileNotFoundError) else "nobody listens there"
        return _no_engine("absent", address, why, "start a Docker engine, or name one in DOCKER_HOST")
    return _no_engine("odd", address, str(error), "check what DOCKER_HOST names")


def _silent(address: str, timeout_s: float) -> EngineReport:
    why = f"it did not answer within {timeout_s:g} s"
    return _no_engine("silent", address, why, "check that the engine is well: docker info")


def _no_engine(
    state: Literal["absent", "denied", "too-old", "silent", "odd"], address: str, why: str, to_get: str
) -> EngineReport:
    return EngineReport(state=state, address=address, why_not=_shortened(why), how_found=_ENGINE_ASKED, to_get=to_get)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it was raised from; some packages only carry that in their arguments."""
    waiting, seen = [error], set()
    while waiting:
        cause = waiting.pop()
        if id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            below = (cause.__cause__, cause.__context__, *cause.args, getattr(cause, "reason", None))
            waiting += [each for each in below if isinstance(each, BaseException)]


def _shortened(text: str, most: int = _MAX_TEXT) -> str:
    """Text of another program's, as one line that a terminal can be shown."""
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= most else line[: most - 3] + "..."
