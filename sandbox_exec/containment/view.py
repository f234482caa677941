"""Which paths an agent sees on the rungs with namespaces: the system, its Python, what was asked for, no more."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_exec.errors import InvalidValue
from sandbox_exec.guest.view import AGENT_ROLE, ALL_PLACES

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store",
)  # fmt: skip
_BROAD = frozenset(("/", "/tmp", "/var", "/var/tmp", "/home", "/run", "/dev", "/proc", "/sys"))
_TAKEN = frozenset(("/", "/proc", "/dev", "/dev/pts", "/dev/mqueue", "/run", *ALL_PLACES))
_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class View:
    """What `guest.view.enter` builds. Two calls with the same view can share a zygote."""

    binds: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    late: tuple[str, ...]
    agent: str = ""  # the unpacked artifact, shown at /agent
    role: str = AGENT_ROLE

    def for_guest(self, files: dict[str, str]) -> dict[str, Any]:
        """As marshal takes it. `files` are shown in place of the system's own."""
        return {
            "binds": self.binds,
            "links": self.links,
            "hidden": self.hidden,
            "late": self.late,
            "agent": self.agent,
            "role": self.role,
            "files": files,
        }


def build_view(
    readable: Iterable[Path], hidden: Iterable[Path], agent: Path | None = None, role: str = AGENT_ROLE
) -> View:
    """The view for this interpreter. Relative entries of sys.path are taken from the working directory of now."""
    wanted = [*SYSTEM, *python_paths(), *map(str, readable)]
    binds: dict[str, str] = {}
    links: dict[str, str] = {}
    for path in sorted(dict.fromkeys(wanted), key=lambda path: path.count("/")):
        if not os.path.exists(path):
            continue
        real = os.path.realpath(path)
        if path in SYSTEM and real != path:
            links[path] = os.readlink(path)  # /bin -> usr/bin
            continue
        for name in (path, real):  # a link may stand in a folder that is shown, and lead out of it
            if not _is_below(name, (*binds, *links)):
                binds[name] = real
    return View(
        binds=tuple((source, target) for target, source in binds.items()),
        links=tuple(links.items()),
        hidden=tuple(dict.fromkeys(name for path in hidden for name in _names_of(str(path), binds))),
        late=tuple(path for path in binds if _is_below(path, ALL_PLACES)),
        agent=os.path.realpath(agent) if agent is not None else "",
        role=role,
    )


def _names_of(path: str, binds: dict[str, str]) -> Iterator[str]:
    """All the names under which a path is seen in a view."""
    real = os.path.realpath(path)
    yield from (path, real)
    for target, source in binds.items():
        if _is_below(real, (source,)):
            yield target + real[len(source) :]


def check_readable(paths: Iterable[Path]) -> None:
    """Raise InvalidValue for a path that cannot be shown, as it is something else in a sandbox."""
    for path in paths:
        for name in {str(path), os.path.realpath(path)}:
            if name in _TAKEN or name.startswith("/proc/"):
                raise InvalidValue(f"readable has {path}, but {name} of a sandbox is its own; name what lies in it")


def python_paths() -> list[str]:
    """What a Python agent needs: the interpreter, its environment, and what the caller can import."""
    paths = [sys.base_prefix, sys.prefix, sys.base_exec_prefix, sys.exec_prefix, str(_PACKAGE)]
    paths += _links_of(sys.executable)
    for entry in sys.path:
        path = os.path.abspath(entry)
        if not os.path.exists(path):
            continue
        if _is_too_broad(path):
            warnings.warn(
                f"sys.path has {path}, which holds more than an agent may see, so agents cannot import from it; "
                f"name what they need in Limits(readable=[...])",
                stacklevel=2,
            )
            continue
        paths.append(path)
    return [path for path in paths if not _is_too_broad(path)]


def _links_of(executable: str) -> list[str]:
    """The files that an interpreter's path leads through, as in a virtual environment in another place."""
    links = []
    while os.path.islink(executable):
        links.append(executable)
        executable = os.path.normpath(os.path.join(os.path.dirname(executable), os.readlink(executable)))
    return [*links, executable]


def _is_too_broad(path: str) -> bool:
    """Whether a path is a home, by any name, or holds one."""
    names = {path, os.path.realpath(path)}
    return bool(names & _BROAD) or any(_is_below(home, names) for home in _homes())


def _homes() -> set[str]:
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(ImportError, KeyError):  # no such thing on this system; a uid without an account
        homes.add(_account_home(os.geteuid()))
    return homes | set(map(os.path.realpath, homes))


@functools.cache  # it may be asked for over a network
def _account_home(uid: int) -> str:
    import pwd

    return pwd.getpwuid(uid).pw_dir


def _is_below(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def can_reach(uid: int, paths: Iterable[str]) -> bool:
    """Whether a user in no group of ours can get at all of these, by the mode bits alone."""
    for path in paths:
        for part in (Path(path), *Path(path).parents):
            try:
                info = part.stat()
            except OSError:
                continue
            if info.st_uid != uid and not info.st_mode & 0o001 and part.is_dir():
                return False
    return True


def account_files(uids: Iterable[int], gid: int) -> dict[str, str]:
    """A passwd and a group in which the agent has a name and the machine's users have none."""
    agents = "".join(f"agent:x:{uid}:{gid or uid}:agent:/tmp:/bin/sh\n" for uid in uids)
    return {
        "/etc/passwd": f"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n{agents}",
        "/etc/group": f"root:x:0:\nnogroup:x:65534:\nagent:x:{gid}:\n",
    }
