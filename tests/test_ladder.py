"""The choice of a rung: by trying, from the strongest down, with reasons for what could not be had."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S

from sandbox_exec import InvalidValue, Limits, Pool, Rung, SandboxUnavailable
from sandbox_exec.containment import Cgroups, Containment, all_rungs, choose, ladder
from sandbox_exec.guest import kernel

BOTH = Cgroups(homes={"memory": (1, Path("/m")), "pids": (2, Path("/p"))}, freezer=Path("/u"))
NONE = Cgroups(why={"memory": "cannot make a cgroup in /m: Read-only file system"})


class Probe:
    """Refuses some rungs, and notes which it was asked for."""

    def __init__(self, *refused: Rung) -> None:
        self.refused = refused
        self.asked: list[Rung] = []

    def __call__(self, containment: Containment) -> None:
        self.asked.append(containment.rung)
        if containment.rung in self.refused:
            raise SandboxUnavailable(f"clone: Operation not permitted ({containment.rung})")


@pytest.fixture(autouse=True)
def _as_root_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine of the test happens to be must not decide."""
    monkeypatch.setattr(ladder, "find", lambda: BOTH)
    monkeypatch.setattr(kernel, "SUPPORTED", True)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.mark.parametrize("refused", range(len(Rung)))
def test_each_rung_that_is_refused_takes_the_next(refused: int) -> None:
    order = list(Rung)
    probe = Probe(*order[:refused])
    assert choose(probe).rung is order[refused]
    assert probe.asked == order[: refused + 1]  # and the rest were not tried


def test_where_nothing_can_be_had_the_error_has_every_reason_and_what_to_do() -> None:
    with pytest.raises(SandboxUnavailable) as raised:
        choose(Probe(*Rung))
    text = str(raised.value)
    for rung in Rung:
        assert f"{rung}: clone: Operation not permitted ({rung})" in text
    assert "kernel.unprivileged_userns_clone" in text
    assert "systemd-run" in text


def test_a_rung_can_be_asked_for_by_name_and_no_other_is_tried() -> None:
    for rung in Rung:
        probe = Probe()
        assert choose(probe, str(rung)).rung is rung
        assert probe.asked == [rung]
    with pytest.raises(SandboxUnavailable, match="subreaper: clone"):
        choose(Probe(Rung.SUBREAPER), "subreaper")


def test_a_rung_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises((SandboxUnavailable, InvalidValue), match=r"'docker'.*root-namespaces.*process-group"):
        choose(Probe(), "docker")


def test_an_ordinary_user_is_not_offered_what_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    probe = Probe()
    assert choose(probe).rung is Rung.USER_NAMESPACES
    assert probe.asked == [Rung.USER_NAMESPACES]


def test_without_cgroups_that_rung_is_left_out_and_the_reason_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "find", lambda: NONE)
    probe = Probe(Rung.ROOT_NAMESPACES, Rung.USER_NAMESPACES)
    assert choose(probe).rung is Rung.SUBREAPER
    assert Rung.CGROUP not in probe.asked
    with pytest.raises(SandboxUnavailable, match="Read-only file system"):
        choose(Probe(), "cgroup")


@pytest.mark.parametrize(("platform", "supported"), [("darwin", True), ("linux", False)])
def test_on_other_systems_there_is_the_process_group(
    monkeypatch: pytest.MonkeyPatch, platform: str, supported: bool
) -> None:
    monkeypatch.setattr(kernel, "SUPPORTED", supported)
    monkeypatch.setattr(sys, "platform", platform)
    probe = Probe()
    assert choose(probe).rung is Rung.PROCESS_GROUP
    assert probe.asked == [Rung.PROCESS_GROUP]


def test_all_rungs_are_listed_with_why_they_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = all_rungs(Probe(Rung.USER_NAMESPACES))
    assert [containment.rung for containment, _ in found] == list(Rung)
    reasons = [reason for _, reason in found]
    assert "not root" in reasons[0]
    assert "Operation not permitted" in reasons[1]
    assert reasons[2:] == ["", "", ""]


# --- whose uid ---


def test_agents_of_root_have_a_uid_that_nobody_has_and_no_two_slots_the_same() -> None:
    containment = Containment(Rung.ROOT_NAMESPACES, NONE)
    uids = [containment.agent_uid(slot) for slot in range(64)]
    assert len(set(uids)) == 64
    assert all(1_800_000_000 < uid < 2**31 for uid in uids)
    assert containment.agent_gid(3) == uids[3]


def test_two_processes_do_not_give_the_same_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    containment = Containment(Rung.ROOT_NAMESPACES, NONE)
    seen: set[int] = set()
    for pid in (1000, 1001, 4_194_303):
        monkeypatch.setattr(ladder, "_OWNER", pid)
        uids = {containment.agent_uid(slot) for slot in range(64)}
        assert not uids & seen
        assert max(uids) < 2**32 - 2
        seen |= uids


def test_where_such_a_uid_is_not_mapped_it_is_one_that_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for root of a container that has a user namespace of its own."""
    monkeypatch.setattr(Path, "read_text", lambda self: "         0     100000      65536\n")
    containment = Containment(Rung.ROOT_NAMESPACES, NONE)
    assert 0 < containment.agent_uid(0) < 65536


@pytest.mark.parametrize("rung", list(Rung))
def test_an_ordinary_users_agents_have_that_users_uid(monkeypatch: pytest.MonkeyPatch, rung: Rung) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1001)
    containment = Containment(rung, NONE)
    assert containment.agent_uid(5) == 1000
    assert containment.agent_gid(5) == 1001


@pytest.mark.parametrize("reachable", [True, False])
def test_without_namespaces_root_drops_its_uid_only_if_the_interpreter_can_then_be_reached(
    monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    monkeypatch.setattr(ladder, "can_reach", lambda uid, paths: reachable)
    uid = Containment(Rung.SUBREAPER, NONE).agent_uid(0)
    assert (uid != 0) is reachable


# --- what is said to be in force ---


def isolation(rung: Rung, cgroups: Cgroups, **limits: Any) -> Any:
    return Containment(rung, cgroups).isolation(Limits(**limits), 7, 0)


def test_isolation_says_what_holds_each_ceiling() -> None:
    held = isolation(Rung.ROOT_NAMESPACES, BOTH, cpus=1)
    assert (held.memory, held.pids, held.cpu, held.freeze) == ("cgroup-v1", "cgroup-v2", "none", "cgroup-v2")
    assert held.notes == ("cpus is not held: there is no cpu controller here",)
    assert (held.filesystem, held.network, held.uid) == ("private", "none", 7)


def test_isolation_says_what_is_only_watched_and_what_is_not_even_that() -> None:
    watched = isolation(Rung.USER_NAMESPACES, NONE)
    assert (watched.memory, watched.pids, watched.freeze) == ("watched", "watched", "signals")
    unheld = isolation(Rung.PROCESS_GROUP, NONE)
    assert (unheld.memory, unheld.pids) == ("none", "none")
    assert (unheld.filesystem, unheld.network) == ("host", "host")
    assert "the network is open" in unheld.notes[0]


def test_a_ceiling_that_was_not_asked_for_is_not_claimed() -> None:
    free = isolation(Rung.ROOT_NAMESPACES, BOTH, memory=None, pids=None)
    assert (free.memory, free.pids, free.cpu) == ("none", "none", "none")
    assert isolation(Rung.ROOT_NAMESPACES, BOTH, network="host").network == "host"


# --- for real ---


@pytest.mark.parametrize("rung", list(Rung))
def test_every_rung_of_this_machine_runs_a_call_and_says_so(rung: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    try:
        pool = Pool(max_workers=1, containment=str(rung))
    except SandboxUnavailable as error:
        pytest.skip(f"not to be had here: {error}")
    with pool:
        for number in range(3):
            outcome = pool.submit(abs, -number).result(PATIENCE_S)
            assert outcome.unwrap() == number
            assert outcome.isolation is not None
            assert outcome.isolation.rung is rung
