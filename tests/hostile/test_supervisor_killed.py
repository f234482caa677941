"""A supervisor that is killed takes its trial with it: whatever the agent has detached, nothing is left of either.

The driver kills itself with SIGKILL in the moment in which it hears that its agents are ready. What is left then is
counted by its warden, who is no part of the package: all orphans are its children.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import leftovers
import pytest

from hostile import places
from hostile.catalog import CATALOG
from hostile.places import PLACES, Trial

WHERE = (
    "root-namespaces",
    "user-namespaces",
    "user-namespaces with a cgroup",
    "cgroup",
    "subreaper",
    "process-group",
)
TRIALS = [Trial(place, row.name, "callable") for place in WHERE for row in CATALOG.values() if row.detaches]


def _groups(trials: list[Trial]) -> list[list[Trial]]:
    """What hangs can be killed together, once all of it is ready; what ends by itself must be killed at once."""
    together = [trial for trial in trials if CATALOG[trial.agent].kind == "hangs"]
    return [[trial] for trial in trials if trial not in together] + ([together] if together else [])


class Verdicts:
    """What the wardens said; all drivers of a place are run beside each other when one verdict is wanted."""

    def __init__(self, trials: list[Trial]) -> None:
        self._trials = trials
        self._verdicts: dict[Trial, dict[str, Any]] = {}

    def __getitem__(self, trial: Trial) -> dict[str, Any]:
        if reason := PLACES[trial.place].why_not():
            pytest.skip(reason)
        if trial not in self._verdicts:
            groups = _groups([each for each in self._trials if each.place == trial.place])
            with ThreadPoolExecutor(places.DRIVERS) as threads:
                for group, verdict in zip(groups, threads.map(_kill_supervisor, groups), strict=True):
                    self._verdicts |= dict.fromkeys(group, verdict)
        return self._verdicts[trial]


def _kill_supervisor(group: list[Trial]) -> dict[str, Any]:
    place = PLACES[group[0].place]
    is_racy = CATALOG[group[0].agent].racy_where(place.situation)
    patience_s = 0.1 if is_racy else leftovers.PATIENCE_S
    cases = [(trial.agent, trial.form) for trial in group]
    lines, verdict = places.drive(place, cases, patience_s, dies_when_ready=True)
    return {**verdict, "was_ready": lines == [{"ready": len(group)}]}


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    return Verdicts(places.selected(request))


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_nothing_is_left_of_a_trial_whose_supervisor_is_killed(trial: Trial, verdicts: Verdicts) -> None:
    verdict = verdicts[trial]
    assert verdict["was_ready"], "the agent was not ready before the kill"
    assert verdict["driver"] == "-9"
    if not CATALOG[trial.agent].racy_where(PLACES[trial.place].situation):
        assert verdict["left"] == []
        assert verdict["folders"] == []
        assert verdict["cgroups"] == []
