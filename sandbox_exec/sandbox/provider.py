"""Process sandboxes for the slots of a pool: made when wanted, lent again while they are clean, replaced when not.

Owns the zygotes (one for each view), the cgroups of the slots and the scratch folders. A zygote that dies is
started anew when the next sandbox is wanted; keepers that it had forked live on.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sandbox_exec.containment import Containment, PoolCgroups, SlotCgroup, View, build_view, choose
from sandbox_exec.containment.ladder import UIDS_PER_PROCESS
from sandbox_exec.contracts import Limits, Rung
from sandbox_exec.errors import SandboxExecError, SandboxUnavailable
from sandbox_exec.guest.view import AGENT_ROLE
from sandbox_exec.sandbox.base import End, Launch, Sandbox
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.process import ProcessSandbox, Shape, boot_zygote, probe, scratch_base
from sandbox_exec.sandbox.zygote import ZygoteLink

_TRIES = 3  # at a sandbox for one trial, before the machine is to blame

OnReady = Callable[[ProcessSandbox], None]
OnFailure = Callable[[str], None]


@functools.cache
def _choose(wanted: str, uid: int) -> Containment:
    return choose(probe, wanted)


def chosen(wanted: str = "auto") -> Containment:
    """The containment of this machine: probed once for each process and user."""
    return _choose(wanted, os.geteuid())


_uids_taken = 0


def take_uids(count: int) -> range:
    """Numbers that go round: two pools of one process share an agent's uid only when there are many of them."""
    global _uids_taken
    first, _uids_taken = _uids_taken, (_uids_taken + count) % UIDS_PER_PROCESS
    return range(first, first + count)


class SlotPlaces:
    """Two slots of a provider, as `Places`: one for agents, lent again while it is clean, and one for graders."""

    def __init__(self, provider: Provider, agents: int = 0, graders: int = 1) -> None:
        self._provider, self._agents, self._graders = provider, agents, graders

    def acquire(self, launch: Launch, on_ready: Callable[[Sandbox], None], on_failure: Callable[[End], None]) -> None:
        def failed(reason: str) -> None:
            on_failure(End(fault=reason))

        def ready(sandbox: ProcessSandbox) -> None:
            # What is put into a grader's before it starts is not for the next trial to be graded by.
            sandbox.spent = sandbox.spent or launch.role != AGENT_ROLE
            on_ready(sandbox)

        slot = self._agents if launch.role == AGENT_ROLE else self._graders
        beside = launch.beside if isinstance(launch.beside, ProcessSandbox) else None
        self._provider.acquire(slot, launch.limits, ready, failed, agent=launch.agent, role=launch.role, beside=beside)

    def release(self, sandbox: Sandbox, then: Callable[[], None]) -> None:
        then()

    def close(self) -> None:
        self._provider.close()


class Provider:
    """All calls come from the thread of the loop."""

    def __init__(
        self,
        loop: Loop,
        containment: Containment,
        slots: int,
        preload: list[str],
        links: Iterable[tuple[View, ZygoteLink]] = (),
    ) -> None:
        """`links`: zygotes of another owner's, by view; should one end, one of our own takes its place."""
        self.containment = containment
        self._uids = take_uids(slots)
        self._loop, self._preload = loop, list(preload)
        self._generation = 0
        self._stack = contextlib.ExitStack()
        self._base: Path | None = self._stack.enter_context(scratch_base(containment))
        self._zygotes: dict[View, tuple[ZygoteLink, int]] = {}
        self._views: dict[tuple[object, ...], View] = {}
        self._sandboxes: dict[int, ProcessSandbox] = {}
        self._made_in: dict[ProcessSandbox, tuple[View, int]] = {}
        self._leaving: set[ProcessSandbox] = set()
        self._count = 0
        self._cgroups: PoolCgroups | None = None
        self._slot_cgroups: dict[int, SlotCgroup] = {}
        if containment.cgroups.homes or containment.cgroups.freezer:
            self._cgroups = PoolCgroups(containment.cgroups)
            self._stack.callback(self._cgroups.close)
        for view, link in links:
            self._watch(view, link)

    def acquire(
        self,
        slot: int,
        limits: Limits,
        on_ready: OnReady,
        on_failure: OnFailure,
        tries: int = _TRIES,
        agent: Path | None = None,
        role: str = AGENT_ROLE,
        beside: ProcessSandbox | None = None,
    ) -> None:
        """Call back with a sandbox for these limits and this artifact: at once if the slot's last one will do."""
        again = functools.partial(
            self._again, slot, limits, on_ready, on_failure, tries=tries - 1, agent=agent, role=role, beside=beside
        )
        try:
            view = self._view(limits, agent, role)
        except (OSError, SandboxExecError, Warning) as error:  # a path, or a warning that its caller made an error
            on_failure(str(error))
            return
        shape = Shape.of(limits, self.containment.cgroups, agent, role)
        sandbox = self._sandboxes.get(slot)
        if sandbox is not None:
            fits = sandbox.shape == shape and self._made_in[sandbox] == (view, self._generation)
            if sandbox.ready and not sandbox.spent and fits and beside is None:
                on_ready(sandbox)
                return
            self._retire(slot)

        def gone(sandbox: ProcessSandbox) -> None:
            never_ready = self._sandboxes.get(slot) is sandbox and not sandbox.was_ready
            self._forget(slot, sandbox)
            if never_ready:
                again(sandbox.failure or "the zygote ended")

        try:
            zygote = self._zygote(view)
            self._count += 1
            sandbox = ProcessSandbox(
                self._loop,
                zygote,
                self.containment,
                shape,
                slot=self._uids[slot],
                cgroup=self._cgroup(slot),
                scratch=self._base / str(self._count) if self._base else None,
                on_ready=on_ready,
                on_gone=gone,
                beside=beside,
            )
        except (OSError, SandboxUnavailable) as error:
            self._drop_zygote(view)
            again(str(error))
            return
        self._sandboxes[slot] = sandbox
        self._made_in[sandbox] = (view, self._generation)

    def _again(
        self, slot: int, limits: Limits, on_ready: OnReady, on_failure: OnFailure, reason: str, tries: int, **more: Any
    ) -> None:
        if tries < 1:
            on_failure(reason)
        else:
            self.acquire(slot, limits, on_ready, on_failure, tries, **more)

    def preload(self, module: str) -> None:
        """Load a module into the zygotes, for all sandboxes from now on."""
        if module not in self._preload:
            self._preload.append(module)
            self._generation += 1
            for zygote, _ in self._zygotes.values():
                with contextlib.suppress(OSError):
                    zygote.preload([module])

    def close(self) -> None:
        """Kill what runs, wait until all of it is gone, and clear away."""
        for slot in list(self._sandboxes):
            self._retire(slot)
        while self._leaving:
            self._loop.run_once(None)
        for cgroup in self._slot_cgroups.values():
            cgroup.close()
        for zygote, fd in self._zygotes.values():
            self._loop.remove(fd)
            zygote.close()
        self._zygotes = {}
        self._stack.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited, and touch nothing that is the parent's."""
        for sandbox in {*self._sandboxes.values(), *self._leaving}:
            sandbox.abandon()
        for zygote, _ in self._zygotes.values():
            zygote.abandon()
        self._stack.pop_all()

    def zygote_pids(self) -> list[int]:
        return [zygote.pid for zygote, _ in self._zygotes.values()]

    # --- parts ---

    def _view(self, limits: Limits, agent: Path | None, role: str) -> View:
        shown = agent if self.containment.rung.namespaced else None  # else it is seen where it is
        key = (limits.readable, limits.hidden, shown, role)
        if key not in self._views:
            self._views[key] = build_view(limits.readable, limits.hidden, shown, role)
        return self._views[key]

    def _zygote(self, view: View) -> ZygoteLink:
        if view in self._zygotes:
            return self._zygotes[view][0]
        zygote = boot_zygote(
            self.containment,
            view,
            slots=self._uids,
            preload=self._preload,
            cgroups=self._cgroups,
            scratch=self._base,
        )
        self._watch(view, zygote)
        return zygote

    def _watch(self, view: View, zygote: ZygoteLink) -> None:
        fd = zygote.control.fileno()
        self._zygotes[view] = (zygote, fd)
        self._loop.add(fd, lambda: self._drop_zygote(view))  # it never speaks again but by ending

    def _drop_zygote(self, view: View) -> None:
        entry = self._zygotes.pop(view, None)
        if entry is not None:
            self._loop.remove(entry[1])
            entry[0].close()

    def _cgroup(self, slot: int) -> SlotCgroup | None:
        if self._cgroups is None:
            return None
        if self.containment.rung is Rung.CGROUP and slot in self._slot_cgroups:
            self._slot_cgroups.pop(slot).close()  # a keeper that kills by cgroup must have one of its own
        if slot not in self._slot_cgroups:
            self._slot_cgroups[slot] = self._cgroups.slot(slot)
        return self._slot_cgroups[slot]

    def _retire(self, slot: int) -> None:
        sandbox = self._sandboxes.pop(slot)
        self._leaving.add(sandbox)
        sandbox.close()

    def _forget(self, slot: int, sandbox: ProcessSandbox) -> None:
        self._leaving.discard(sandbox)
        self._made_in.pop(sandbox, None)
        if self._sandboxes.get(slot) is sandbox:
            del self._sandboxes[slot]
