"""Every hostile agent on the rungs without namespaces: exactly what the catalog says survives, harms or escapes.

Each trial runs in a driver that has a pid namespace, a /tmp and an ipc namespace of its own: what gets away, gets
away from us and not from the test.
"""

from __future__ import annotations

import pytest

from hostile import places
from hostile.catalog import CATALOG, HostileAgent
from hostile.places import PLACES, WEAKER, Place, Trial


def _is_told_apart(row: HostileAgent, place: Place) -> bool:
    """Where only Landlock or the uid is another, only the agents that can tell are run again."""
    same_but = [other for other in WEAKER if other.situation.rung == place.situation.rung and other is not place]
    columns = (row.harms_where, row.survives_where, row.escapes_where, row.otherwise_where)
    return row.detaches or any(
        column(place.situation) != column(other.situation) for other in same_but for column in columns
    )


def _trials() -> list[Trial]:
    trials = []
    for place in WEAKER:
        is_main = place.situation.landlock and not place.situation.as_root
        for row in CATALOG.values():
            if is_main or _is_told_apart(row, place):
                forms = row.runs_as if row.detaches and is_main else row.runs_as[:1]
                trials += [Trial(place.name, row.name, form) for form in forms]
    return trials


pytestmark = pytest.mark.timeout(300)  # seconds: the first test runs the trials of all


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> places.Results:
    return places.Results(places.selected(request))


@pytest.mark.parametrize("trial", _trials(), ids=str)
def test_a_hostile_agent_gains_what_the_catalog_says_and_no_more(trial: Trial, results: places.Results) -> None:
    place, row, result = PLACES[trial.place], CATALOG[trial.agent], results[trial]
    report, situation = result.report, result.seen(place.situation)
    if row.harms_where(situation):
        assert report is None
        assert result.driver in ("stopped", "-9"), "the supervisor is unharmed: take it out of the catalog"
        return
    assert report is not None, f"no report: the driver ended with {result.driver}"
    assert report.is_ready, f"the attack did not take place: {report}"
    assert report.isolation["rung"] == situation.rung
    assert (report.isolation["landlock"] > 0) == situation.landlock
    assert (report.isolation["uid"] == 0) == (situation.as_root and situation.shares_uid)
    if not row.racy_where(situation):
        assert bool(report.survivors) == row.survives_where(situation), report
    assert report.outlived == (), "it outlived its pool"
    assert report.answers, "the pool no longer answers"
    assert report.status in row.allowed(situation), report.account
    assert report.has_escaped == row.escapes_where(situation), report.account
    assert (result.driver, result.left) == ("0", [])
    assert (result.folders, result.cgroups) == ([], [])


@pytest.mark.skipif(bool(PLACES["cgroup"].why_not()), reason=PLACES["cgroup"].why_not())
def test_an_ordinary_user_with_a_cgroup_has_ceilings_that_the_kernel_holds() -> None:
    if not places.has_memory_controller():
        pytest.skip("no memory controller")
    for name, held in (("cgroup", "cgroup"), ("subreaper", "watched"), ("process-group", "none")):
        lines, _ = places.drive(PLACES[name], [("reads_stdin", "callable")])
        assert lines[0]["isolation"]["memory"].startswith(held)
