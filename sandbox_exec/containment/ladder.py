"""The kill ladder: five ways to hold an agent, strongest first, and how to find out which this machine gives.

  root-namespaces   root: pid, mount, ipc, net and uts namespaces, another uid, all capabilities dropped
  user-namespaces   the same for an ordinary user, through a user namespace. The agent keeps the caller's uid
                    outside of it: what protects the caller's files is that the agent does not see them
  cgroup            no namespaces: killed by cgroup. The agent sees the caller's files and processes; as the
                    caller's uid it can leave the cgroup or attack its supervisor, unless Landlock holds it
  subreaper         orphans become the keeper's children and are killed until none is left; as above
  process-group     other systems: what leaves its process group, and is not found by walking the tree of
                    processes before it does, survives

On each of them ceilings are held by cgroups where they can be had, and else watched by the keeper.
A rung is probed by starting it: a zygote boots, a keeper starts, a trial runs. No name of a system is asked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sandbox_exec.containment.cgroups import Cgroups, find
from sandbox_exec.containment.view import can_reach, python_paths
from sandbox_exec.contracts import Isolation, Limits, Rung
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import kernel

_UID_BASE = 1_880_000_000  # in a range that no distribution gives to anybody
UIDS_PER_PROCESS = 64
_OWNER = os.getpid()  # of who loaded this: workers that are forked from it take different slots of the same uids
_HOW_TO: dict[Rung, str] = {
    Rung.ROOT_NAMESPACES: "run as root",
    Rung.USER_NAMESPACES: "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "user.max_user_namespaces > 0, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0), or run as root",
    Rung.CGROUP: "run as root, or below a delegated cgroup: systemd-run --user --scope -p Delegate=yes COMMAND",
    Rung.SUBREAPER: "run on Linux 5.12 or later, on x86_64 or aarch64",
    Rung.PROCESS_GROUP: "",
}


@dataclass(frozen=True)
class Containment:
    """A rung as it can be had here, with the cgroups that go with it."""

    rung: Rung
    cgroups: Cgroups

    @property
    def mode(self) -> str:
        return "namespaces" if self.rung.namespaced else str(self.rung)

    def agent_uid(self, slot: int) -> int:
        """The uid of the agents of a slot: no two slots of a machine share one, where we may choose."""
        if os.geteuid() != 0 or self.rung is Rung.USER_NAMESPACES:
            return os.geteuid()  # the only one that can be had
        if not self.rung.namespaced and not self._drops_uid:
            return os.geteuid()  # another could not reach the interpreter
        return nobodys_uid(slot)

    def agent_gid(self, slot: int) -> int:
        uid = self.agent_uid(slot)
        return os.getegid() if uid == os.geteuid() else uid

    @cached_property
    def _drops_uid(self) -> bool:
        return can_reach(_UID_BASE, python_paths())

    def isolation(self, limits: Limits, uid: int, landlock: int) -> Isolation:
        """What is in force for a trial with these limits."""
        watched = "watched" if self.rung is not Rung.PROCESS_GROUP else "none"
        private = self.rung.namespaced
        notes = []
        if not private and limits.network == "none":
            notes.append("the network is open: only the rungs with namespaces can close it")
        if not private and uid == 0:
            notes.append("the agent runs as root: no other user can reach the interpreter")
        if limits.cpus is not None and "cpu" not in self.cgroups.homes:
            notes.append("cpus is not held: there is no cpu controller here")
        return Isolation(
            rung=self.rung,
            memory=self._held("memory", watched) if limits.memory is not None else "none",
            pids=self._held("pids", watched) if limits.pids is not None else "none",
            cpu=self._held("cpu", "none") if limits.cpus is not None else "none",
            freeze="cgroup-v2" if self.cgroups.freezer else "signals",
            filesystem="private" if private else "host",
            disk="tmpfs" if private else "none",
            network=limits.network if private else "host",
            uid=uid,
            seccomp=kernel.SUPPORTED,
            landlock=landlock,
            notes=tuple(notes),
        )

    def _held(self, controller: str, otherwise: str) -> str:
        return self.cgroups.version(controller) if controller in self.cgroups.homes else otherwise


def nobodys_uid(slot: int) -> int:
    """A uid that no account has, for the agents of a slot of this process."""
    uid = _UID_BASE + _OWNER % 4_000_000 * UIDS_PER_PROCESS + slot % UIDS_PER_PROCESS
    return uid if _is_mapped(uid) else 65533


def _is_mapped(uid: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, _, count = map(int, line.split())
            if first <= uid < first + count:
                return True
    return False


def candidates(cgroups: Cgroups) -> list[tuple[Rung, str]]:
    """Each rung, with the reason why it need not be tried; empty if it must be."""
    linux = "" if kernel.SUPPORTED and sys.platform == "linux" else "this is not Linux on x86_64 or aarch64"
    root = linux or ("" if os.geteuid() == 0 else "this is not root")
    by_cgroup = linux or ("" if cgroups.freezer or cgroups.homes else next(iter(cgroups.why.values()), "no cgroups"))
    return [
        (Rung.ROOT_NAMESPACES, root),
        (Rung.USER_NAMESPACES, linux),
        (Rung.CGROUP, by_cgroup),
        (Rung.SUBREAPER, linux),
        (Rung.PROCESS_GROUP, ""),
    ]


Probe = Callable[[Containment], None]  # raises SandboxUnavailable


def all_rungs(probe: Probe) -> list[tuple[Containment, str]]:
    """Every rung, with why it cannot be had here; empty if it can."""
    cgroups = find()
    found = []
    for rung, reason in candidates(cgroups):
        containment = Containment(rung, cgroups)
        found.append((containment, reason or _try(probe, containment)))
    return found


def choose(probe: Probe, wanted: str = "auto") -> Containment:
    """The strongest rung of this machine, or the one that is asked for. Raises SandboxUnavailable."""
    cgroups = find()
    reasons = []
    for rung, known in candidates(cgroups):
        if wanted not in ("auto", rung):
            continue
        containment = Containment(rung, cgroups)
        reason = known or _try(probe, containment)
        if not reason:
            return containment
        reasons.append(f"{rung}: {reason}; to get it: {_HOW_TO[rung]}")
    if not reasons:
        names = ", ".join(Rung)
        raise SandboxUnavailable(f"there is no containment {wanted!r}; choose auto or one of {names}")
    raise SandboxUnavailable("no containment can be had here:\n  " + "\n  ".join(reasons))


def _try(probe: Probe, containment: Containment) -> str:
    try:
        probe(containment)
    except (SandboxUnavailable, OSError) as error:
        return str(error)
    return ""


def how_to_get(rung: Rung) -> str:
    return _HOW_TO[rung]


def require(containment: Containment, limits: Limits) -> None:
    """Refuse limits that ask for a stronger containment than there is."""
    wanted = limits.require
    if wanted is None:
        return
    missing = []
    if "namespaces" in wanted and not containment.rung.namespaced:
        missing.append(f"this machine gives {containment.rung}; to get namespaces: {_HOW_TO[Rung.USER_NAMESPACES]}")
    if "cgroup" in wanted:
        lacking = [name for name in ("memory", "pids") if name not in containment.cgroups.homes]
        why = [containment.cgroups.why.get(name, "not found") for name in lacking]
        if lacking:
            missing.append(
                f"no cgroup for {' and '.join(lacking)} ({'; '.join(why)}); to get them: {_HOW_TO[Rung.CGROUP]}"
            )
    if wanted == "subreaper" and not containment.rung.at_least(Rung.SUBREAPER):
        missing.append(f"this machine gives {containment.rung}; to get better: {_HOW_TO[Rung.SUBREAPER]}")
    if missing:
        raise SandboxUnavailable(
            f"require={wanted!r} cannot be met: " + "; and ".join(missing) + ". See `sandbox-exec doctor`."
        )
