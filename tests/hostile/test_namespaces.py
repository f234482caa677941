"""Every hostile agent on the rungs with namespaces: nothing survives, nobody is harmed, nothing is seen or reached."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

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
from hostile.places import NAMESPACED, PLACES, Result, Trial

from sandbox_exec import Command, Limits, Outcome, Pool

KILLED = ("task_timeout", "memory_exceeded", "pids_exceeded", "output_exceeded")
TRIALS = [Trial(place.name, row.name, form) for place in NAMESPACED for row in CATALOG.values() for form in row.runs_as]
RUNGS = [
    pytest.param(place.situation.rung, id=place.name, marks=pytest.mark.skipif(bool(place.why_not()), reason=place.why_not()))
    for place in NAMESPACED
    if not place.is_driver or os.geteuid() != 0
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[Trial, Result]:
    return places.run(places.selected(request))


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_a_hostile_agent_is_held(trial: Trial, results: dict[Trial, Result]) -> None:
    place, row, result = PLACES[trial.place], CATALOG[trial.agent], results[trial]
    if place.why_not():
        pytest.skip(place.why_not())
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
