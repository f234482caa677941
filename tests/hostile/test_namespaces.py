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
)
from hostile.agents._pairs import (
    connects_again_and_again,
    find_in_own_memory,
    snoops_again_and_again,
    writes_much_of,
)
from hostile.agents._ready import ready
from hostile.catalog import CATALOG
from hostile.places import NAMESPACED, PLACES, Place, Trial
from sandbox_exec import Command, Limits, Pool

KILLED = ("task_timeout", "memory_exceeded", "pids_exceeded", "output_exceeded")
FULLY = ("root-namespaces", "user-namespaces")  # elsewhere a command is run only of what detaches
TRIALS = [
    Trial(place.name, row.name, form)
    for place in NAMESPACED
    for row in CATALOG.values()
    for form in (row.runs_as if row.detaches or place.name in FULLY else row.runs_as[:1])
]
HERE = [place for place in NAMESPACED if not place.is_driver]  # rungs that this process can use itself


pytestmark = pytest.mark.timeout(300)  # seconds: the first test runs the trials of all


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


@pytest.fixture(params=HERE, ids=lambda place: place.name.replace(" ", "_"))
def rung(request: pytest.FixtureRequest) -> str:
    place: Place = request.param
    if place.situation.rung == "root-namespaces" and place.why_not():
        pytest.skip(place.why_not())
    return place.situation.rung


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
