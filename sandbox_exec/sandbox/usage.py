"""What a container uses, as its cgroups and folders tell from outside. What cannot be seen is None, or 0."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Group:
    """The container's cgroups, as far as we see them."""

    peak: Path | None = None
    oom: Path | None = None
    pids: Path | None = None
    cpu: Path | None = None
    procs: Path | None = None
    thaw: tuple[Path, str] | None = None  # what to write where, so that what is frozen goes on


def cgroup_lines(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []


def find_group(lines: list[str]) -> Group:
    """The files of the container's cgroups that tell what it uses, of those that are here to be read."""
    found = Group()
    root = Path("/sys/fs/cgroup")
    for line in lines:
        _, names, path = line.split(":", 2)
        below = path.lstrip("/")
        if names == "":
            for top in (root, root / "unified"):
                group = top / below
                if (group / "cgroup.procs").exists():
                    found.procs = found.procs or group / "cgroup.procs"
                    found.peak = found.peak or _if_there(group / "memory.peak")
                    found.oom = found.oom or _if_there(group / "memory.events")
                    found.pids = found.pids or _if_there(group / "pids.events")
                    found.cpu = found.cpu or _if_there(group / "cpu.stat")
                    if (group / "cgroup.freeze").exists():
                        found.thaw = found.thaw or (group / "cgroup.freeze", "0")
        for name in names.split(","):
            group = root / name / below
            if name == "memory":
                found.peak = _if_there(group / "memory.max_usage_in_bytes")
                found.oom = _if_there(group / "memory.oom_control")
            elif name == "pids":
                found.pids = _if_there(group / "pids.events")
                found.procs = _if_there(group / "cgroup.procs")
            elif name == "freezer" and (group / "freezer.state").exists():
                found.thaw = group / "freezer.state", "THAWED"
            elif name == "cpuacct":
                found.cpu = _if_there(group / "cpuacct.usage")
    return found


def _if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def number(path: Path | None) -> int:
    try:
        return int(path.read_text()) if path is not None else 0
    except (OSError, ValueError):
        return 0


def count(path: Path | None, name: str) -> int:
    try:
        lines = path.read_text().splitlines() if path is not None else []
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def cpu_s(path: Path | None) -> float | None:
    if path is None:
        return None
    if path.name == "cpu.stat":
        return count(path, "usage_usec") / 1e6 or None
    return number(path) / 1e9 or None


def size_of(top: Path, most_files: int) -> int:
    """What a folder takes on the disk; more than any limit if it has too many files."""
    total = files = 0
    pending = [str(top)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    files += 1
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone while we looked
        except OSError:  # closed to us, or deeper than a path can say: what is in there would not count
            return 1 << 62
        if files > most_files:
            return 1 << 62
    return total


def root_size(client: Any, container: str) -> int:
    found = client.containers(filters={"id": container}, size=True)
    return int(found[0].get("SizeRw") or 0) if found else 0
