"""What holds every process of a sandbox: the rungs of the ladder, and what this machine gives."""

from __future__ import annotations

from sandbox_exec.containment.cgroups import Cgroups, PoolCgroups, SlotCgroup
from sandbox_exec.containment.ladder import Containment, all_rungs, choose, require
from sandbox_exec.containment.view import View, build_view, check_readable

__all__ = [
    "Cgroups",
    "Containment",
    "PoolCgroups",
    "SlotCgroup",
    "View",
    "all_rungs",
    "build_view",
    "check_readable",
    "choose",
    "require",
]
