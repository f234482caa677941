"""Every hostile agent on the rungs with namespaces: nothing survives, nobody is harmed, nothing is seen or reached."""

from __future__ import annotations

import os
import sys

import pytest
from hostile import places, runner
from hostile.agents import (
    connects_to_abstract_socket,
    connects_to_loopback,
    finds_marks,
    leaves_marks,
    listens_for_other_trials,
    snoops_environment,
)
from hostile.agents._ready import ready
from hostile.catalog import CATALOG
from hostile.places import NAMESPACED, PLACES, Trial

from sandbox_exec import Command, Limits, Pool

KILLED = ("task_timeout", "memory_exceeded", "pids_exceeded", "output_exceeded")
TRIALS = [Trial(place.name, row.name, form) for place in NAMESPACED for row in CATALOG.values() for form in row.runs_as]
RUNGS = [
    pytest.param(place.situation.rung, id=place.name, marks=pytest.mark.skipif(bool(place.why_not()), reason=place.why_not()))
    for place in NAMESPACED
    if not place.is_driver or os.geteuid() != 0
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> places.Results:
    return places.Results(places.selected(request))


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_a_hostile_agent_is_held(trial: Trial, results: places.Results) -> None:
    place, row, result = PLACES[trial.place], CATALOG[trial.agent], results[trial]
    report = result.report
    assert report is not None, f"no report: the driver ended with {result.driver}"
    situation = result.seen(place.situation)
    assert report.is_ready, f"the attack did not take place: {report}"
    assert report.survivors == ()
    assert report.answers, "the pool no longer answers"
    assert report.status in row.allowed(situation), report.account
    assert report.has_escaped == row.escapes_where(situation), report.account
    assert report.isolation["rung"] == situation.rung
    if report.status in KILLED or row.detaches:
        assert "pid namespace" in report.proof
    assert (result.driver, result.left, result.folders, result.cgroups) == ("0", [], [], [])
    assert not result.has_exploded, "code of the agent's has run in the supervisor"


# --- two trials ------------------------------------------------------------------------------------


@pytest.fixture(params=RUNGS)
def rung(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_marks_of_one_trial_are_not_found_by_the_next_in_the_same_slot(rung: str) -> None:
    limits = Limits(timeout_s=20)
    with Pool(1, containment=rung, limits=limits) as pool:
        left = pool.submit(leaves_marks.attack, ready).result()
        found = pool.submit(finds_marks.attack, ready).result()
    assert left.ok
    assert {"shm", "msg", "/tmp", "/dev/shm"} <= set(left.value["detail"])
    assert found.unwrap() == {"escaped": False, "detail": []}


def test_a_clean_trial_gets_the_sandbox_of_the_one_before(rung: str) -> None:
    """Without this, the test above would say nothing of a slot that is lent again."""
    limits = Limits(timeout_s=20)
    with Pool(1, containment=rung, limits=limits) as pool:
        namespaces = [pool.submit(os.readlink, "/proc/self/ns/pid").result().unwrap() for _ in range(3)]
    assert len(set(namespaces)) == 1


def test_nothing_of_a_trial_is_in_the_memory_that_the_next_is_forked_from(rung: str) -> None:
    secret = os.urandom(16).hex()
    with Pool(1, containment=rung, limits=Limits(timeout_s=20), env={"KEY": "of-all-trials"}) as pool:
        first = pool.submit(len, [secret] * 1000).result()
        second = pool.submit(find_in_own_memory, secret[:16], secret[16:]).result()
    assert first.unwrap() == 1000
    assert second.unwrap() == {"control": True, "found": False}


def find_in_own_memory(head: str, tail: str) -> dict[str, bool]:
    """Whether head and tail stand together in this process, where they never did. `control`: a search that must find."""
    there = (b"control-" * 8, b"there")
    kept = b"".join(there)
    found = {"control": False, "found": False}
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            bounds, rights, *_ = line.split()
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            try:
                memory.seek(start)
                data = memory.read(end - start) if "r" in rights else b""
            except (OSError, OverflowError):
                continue  # of the kernel's own
            found["control"] |= stand_together(data, *there)
            found["found"] |= stand_together(data, head.encode(), tail.encode())
    del kept
    return found


def stand_together(data: bytes, head: bytes, tail: bytes) -> bool:
    at = data.find(head)
    while at >= 0:
        if data[at + len(head) : at + len(head) + len(tail)] == tail:
            return True
        at = data.find(head, at + 1)
    return False


def test_trials_beside_each_other_cannot_meet(rung: str) -> None:
    limits = Limits(timeout_s=1.0, grace_s=0.1)
    with Pool(3, containment=rung, limits=limits) as pool:
        listener = pool.submit(listens_for_other_trials.attack, ready, target="47113")
        callers = [
            pool.submit(connects_again_and_again, attack, "47113")
            for attack in (connects_to_abstract_socket.attack, connects_to_loopback.attack)
        ]
        answers = [caller.result().unwrap() for caller in callers]
        heard = listener.result()
    assert runner.events(heard, "ready")[0]["listening"] == ["abstract", "tcp"]
    assert answers == [False, False]


def connects_again_and_again(attack: object, target: str) -> bool:
    """For as long as the other one surely listens."""
    from sandbox_exec.guest import context

    assert callable(attack)
    while context().remaining > 0.3:
        if attack(lambda _: None, target=target)["escaped"]:
            return True
    return False


def test_a_trial_cannot_read_the_environment_and_arguments_of_another(rung: str) -> None:
    secret = os.urandom(16).hex()
    waits = [sys.executable, "-S", "-E", "-c", "import os, time; print('up', flush=True); time.sleep(300)", secret]
    with Pool(2, containment=rung) as pool:
        holder = pool.submit(Command(waits, env={"KEY": secret}), limits=Limits(timeout_s=1.0, grace_s=0.1))
        snoops = pool.submit(snoops_again_and_again, secret, limits=Limits(timeout_s=20))
        found = snoops.result().unwrap()
        held = holder.result()
    assert held.stdout == "up\n"
    assert found == []


def snoops_again_and_again(secret: str) -> list[object]:
    import time

    end_s = time.monotonic() + 0.7
    while time.monotonic() < end_s:
        answer = snoops_environment.attack(lambda _: None, secret)
        if answer["escaped"]:
            return [answer]
    return []


def test_pools_of_one_process_do_not_mix_what_their_trials_write(rung: str) -> None:
    """They read at the same time, each in a thread of its own."""
    pools = [Pool(1, containment=rung) for _ in range(4)]
    try:
        futures = [(i, pool.submit(writes_much_of, str(i))) for _ in range(3) for i, pool in enumerate(pools)]
        for i, future in futures:
            outcome = future.result()
            assert set(outcome.stdout) == {str(i)}
            assert {event["mark"] for event in outcome.trace} == {str(i)}
            assert outcome.value == str(i) * 100_000
    finally:
        for pool in pools:
            pool.shutdown()


def writes_much_of(mark: str) -> str:
    from sandbox_exec.guest import context

    for _ in range(50):
        os.write(1, mark.encode() * 60_000)
        context().trace("mark", mark=mark)
    return mark * 100_000
