"""Which paths an agent sees on the rungs with namespaces: the system, its Python, what was asked for, no more."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_exec.guest.view import READ_ONLY, WRITABLE

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store",
)  # fmt: skip
_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class View:
    """What `guest.view.enter` builds. Two calls with the same view can share a zygote."""

    binds: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    late: tuple[str, ...]

    def for_guest(self, files: dict[str, str]) -> dict[str, Any]:
        """As marshal takes it. `files` are shown in place of the system's own."""
        return {
            "binds": self.binds,
            "links": self.links,
            "hidden": self.hidden,
            "late": self.late,
            "files": files,
        }


def build_view(readable: Iterable[Path], hidden: Iterable[Path]) -> View:
    """The view for this interpreter. Relative entries of sys.path are taken from the working directory of now."""
    wanted = [*SYSTEM, *python_paths(), *map(str, readable)]
    binds: dict[str, str] = {}
    links: dict[str, str] = {}
    for path in sorted(dict.fromkeys(wanted), key=lambda path: path.count("/")):
        if not os.path.exists(path) or _is_below(path, binds):
            continue
        real = os.path.realpath(path)
        if path in SYSTEM and real != path:
            links[path] = os.readlink(path)  # /bin -> usr/bin
            continue
        binds[path] = real
        if real != path and not _is_below(real, binds):
            binds[real] = real
    return View(
        binds=tuple((source, target) for target, source in binds.items()),
        links=tuple(links.items()),
        hidden=tuple(map(str, hidden)),
        late=tuple(path for path in binds if _is_below(path, (*WRITABLE, *READ_ONLY))),
    )


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
    homes = {os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))}
    if path in ("/", "/tmp", "/var", "/var/tmp", "/home", "/run", "/dev", "/proc", "/sys"):
        return True
    return any(home == path or home.startswith(path.rstrip("/") + "/") for home in homes)


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
