"""Where the catalog is run: each place is a rung and a user, and how to get there. `run` runs trials in many places.

The places of root's are this process. Those of an ordinary user, and all on the rungs without namespaces, are
drivers in a pid namespace of their own (see `ordinary_user`), where what escapes meets nobody.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import leftovers
import ordinary_user
import pytest

from hostile import runner
from hostile.catalog import CATALOG, Ceilings, Situation
from sandbox_exec.guest import kernel

DRIVERS = 6  # at a time: most of them wait for a deadline most of the time
A_DRIVERS_WORTH = 10  # trials: for fewer, it takes longer to start one more than to wait for it


@dataclass(frozen=True)
class Place:
    name: str
    situation: Situation
    is_driver: bool = True

    @functools.cache  # noqa: B019 - a place lives as long as the session
    def why_not(self) -> str:
        """Why this machine, or this user, has no such place; empty if it has."""
        if sys.platform != "linux" or not kernel.SUPPORTED:
            return "not Linux on x86_64 or aarch64"
        if (self.situation.as_root or self.situation.delegated) and os.geteuid() != 0:
            return "only for root"
        if self.situation.landlock and kernel.landlock_abi() < kernel.SCOPING_ABI:
            return "this kernel's Landlock does not scope signals"
        if self.situation.delegated:
            with contextlib.suppress(OSError), ordinary_user.DelegatedCgroups(leftovers.cgroup_homes()[:1], 0):
                return ""
            return "no cgroup can be made"
        return ""


def _as_root(name: str, *, rung: str, shares_uid: bool) -> Place:
    situation = Situation(rung=rung, as_root=True, shares_uid=shares_uid, ceilings="cgroup")
    return Place(name, situation, is_driver=False)


def _as_user(name: str, *, rung: str, ceilings: Ceilings, delegated: bool = False, landlock: bool = False) -> Place:
    situation = Situation(
        rung=rung, as_root=False, shares_uid=True, ceilings=ceilings, delegated=delegated, landlock=landlock
    )
    return Place(name, situation)


NAMESPACED = (
    _as_root("root-namespaces", rung="root-namespaces", shares_uid=False),
    _as_root("user-namespaces as root", rung="user-namespaces", shares_uid=True),
    _as_user("user-namespaces", rung="user-namespaces", ceilings="watched"),
    _as_user("user-namespaces with a cgroup", rung="user-namespaces", ceilings="cgroup", delegated=True),
)
WEAKER = (
    _as_user("cgroup", rung="cgroup", ceilings="cgroup", delegated=True, landlock=True),
    _as_user("cgroup without landlock", rung="cgroup", ceilings="cgroup", delegated=True),
    Place(
        "cgroup as root",
        Situation(rung="cgroup", as_root=True, shares_uid=False, ceilings="cgroup", delegated=True, landlock=True),
    ),
    _as_user("subreaper", rung="subreaper", ceilings="watched", landlock=True),
    _as_user("subreaper without landlock", rung="subreaper", ceilings="watched"),
    _as_user("process-group", rung="process-group", ceilings="none", landlock=True),
    _as_user("process-group without landlock", rung="process-group", ceilings="none"),
)
PLACES = {place.name: place for place in (*NAMESPACED, *WEAKER)}


class Trial(NamedTuple):
    place: str
    agent: str
    form: str

    def __str__(self) -> str:
        return f"{self.agent}-{self.form}-{self.place.replace(' ', '_')}"


@dataclass
class Result:
    """What a trial's report says, and in what state its driver and surroundings were found when it had ended."""

    report: runner.Report | None = None
    driver: str = "0"  # how it ended
    left: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    cgroups: list[str] = field(default_factory=list)
    has_exploded: bool = False

    def seen(self, expected: Situation) -> Situation:
        """The situation as the outcome records it: a machine without controllers has watched ceilings."""
        if self.report is None or not self.report.isolation:
            return expected
        held = self.report.isolation["memory"]
        ceilings: Ceilings = "cgroup" if held.startswith("cgroup") else "watched" if held == "watched" else "none"
        return replace(expected, ceilings=ceilings)


def selected(request: pytest.FixtureRequest) -> list[Trial]:
    """The trials of the requesting module that this session is to run."""
    items = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    found = [item.callspec.params.get("trial") for item in items if hasattr(item, "callspec")]
    return [trial for trial in found if isinstance(trial, Trial)]


class Results:
    """The results of many trials. All of them are run, beside each other, when the first is wanted."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = trials
        self._done: dict[Trial, Result] = {}

    def __getitem__(self, trial: Trial) -> Result:
        """Skips the test if there is no such place."""
        if reason := PLACES[trial.place].why_not():
            pytest.skip(reason)
        if not self._done:
            self._done = {each: Result() for each in self._trials}
            _run([each for each in self._trials if not PLACES[each.place].why_not()], self._done)
        return self._done[trial]


def _run(trials: Sequence[Trial], results: dict[Trial, Result]) -> None:
    """In turns, as many at a time as pay: what is long goes first."""
    by_place = {place: [trial for trial in trials if trial.place == place.name] for place in PLACES.values()}
    with ThreadPoolExecutor(DRIVERS) as threads, runner.Surroundings() as around:
        done = [
            threads.submit(_run_batch, place, batch, results) if place.is_driver
            else threads.submit(_run_here, place, batch, results, around)
            for place, own in by_place.items()
            for batch in _batches(place, own)
        ]  # fmt: skip
        for one in done:
            one.result()
        for trial in trials:
            results[trial].has_exploded = around.has_exploded and not PLACES[trial.place].is_driver


def _batches(place: Place, trials: Sequence[Trial]) -> list[list[Trial]]:
    """What runs in one process: all that harms nobody, if a pid namespace tells the trials apart."""
    if place.situation.namespaced:
        return [list(trials)] if trials else []
    alone = [trial for trial in trials if CATALOG[trial.agent].harms_where(place.situation)]
    rest = sorted(set(trials) - set(alone), key=trials.index)
    count = min(DRIVERS, 1 + len(rest) // A_DRIVERS_WORTH)
    return [batch for i in range(count) if (batch := rest[i::count])] + [[trial] for trial in alone]


def _run_here(place: Place, trials: Sequence[Trial], results: dict[Trial, Result], around: runner.Surroundings) -> None:
    for report in runner.run_beside(place.situation.rung, _cases(trials), around):
        results[Trial(place.name, report.name, report.form)].report = report


def _run_batch(place: Place, trials: Sequence[Trial], results: dict[Trial, Result]) -> None:
    is_harmed = CATALOG[trials[0].agent].harms_where(place.situation)
    lines, verdict = drive(place, _cases(trials), 0.1 if is_harmed else leftovers.PATIENCE_S)
    for line in lines:
        report = runner.Report.from_json(line)
        results[Trial(place.name, report.name, report.form)].report = report
    for trial in trials:
        results[trial].driver, results[trial].left = verdict["driver"], verdict["left"]
        results[trial].folders, results[trial].cgroups = verdict["folders"], verdict["cgroups"]


def drive(
    place: Place, cases: Sequence[runner.Case], patience_s: float = leftovers.PATIENCE_S, **spec: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Start a driver for these cases in this place, and wait for it: what it said, and the warden's verdict."""
    situation = place.situation
    spec |= {"rung": situation.rung, "cases": list(cases), "outer_pidns": os.readlink("/proc/self/ns/pid")}
    if not situation.namespaced:
        spec |= {"landlock": situation.landlock, "alone": {name: _patience_s(name, situation) for name, _ in cases}}
    uid = None if situation.as_root else ordinary_user.new_uid()
    homes = leftovers.cgroup_homes() if situation.delegated or situation.as_root else []
    with ordinary_user.DelegatedCgroups(homes, uid or 0) as cgroups:
        with runner.STARTING:
            driver = ordinary_user.start(
                "hostile.driver", spec, uid=uid, cgroups=cgroups.folders, patience_s=patience_s
            )
        try:
            lines = list(driver.lines())
        finally:
            driver.close()
    return lines, {"driver": "gone", "left": [], "folders": [], **driver.verdict, "cgroups": cgroups.left}


def _patience_s(name: str, situation: Situation) -> float:
    """How long to wait for the end of what is left: no longer than a moment where it is known to stay."""
    row = CATALOG[name]
    return 0.3 if row.survives_where(situation) or row.racy_where(situation) else leftovers.PATIENCE_S


def _cases(trials: Iterable[Trial]) -> list[runner.Case]:
    return [(trial.agent, trial.form) for trial in trials]


def has_memory_controller() -> bool:
    """Whether a cgroup made by root here can hold memory: not so in a v2 tree without that controller."""
    names = ("memory.limit_in_bytes", "memory.max")
    with ordinary_user.DelegatedCgroups(leftovers.cgroup_homes(), 0) as cgroups:
        return any(Path(folder, name).exists() for folder in cgroups.folders for name in names)
