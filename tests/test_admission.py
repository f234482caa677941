"""What a submission may add, what makes room for it, and what is the same as what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.contracts.queue import QueueSettings
from sandbox_exec.contracts.words import Task, TaskProtocol
from sandbox_exec.errors import InvalidValue
from sandbox_exec.schedule.admission import (
    Admitted,
    Merged,
    Pressure,
    Refused,
    Waiting,
    Watermarks,
    admit,
    content_digest,
    merge,
    pressure,
)

unhurried = settings(deadline=None, max_examples=100)  # a busy machine is no fault of the code


def decided(bounds: Mapping[str, Any], waiting: Sequence[int], new: Sequence[int]) -> Admitted | Refused:
    """Submit slots of these priorities to those that wait, which are numbered from the oldest on."""
    slots = sorted((Waiting(idx, priority) for idx, priority in enumerate(waiting)), key=lambda w: w[1])
    return admit(QueueSettings(**bounds), Counter(waiting), Counter(new), lambda: slots)


def never() -> Iterable[Waiting]:
    pytest.fail("nothing was to be displaced")


# Room


@pytest.mark.parametrize(
    ("bounds", "waiting", "new", "displaced"),
    [
        ({}, [0] * 50, [0] * 50, ()),  # without bounds
        ({"max_waiting": 5}, [0, 0, 0], [0, 0], ()),  # up to the bound
        ({"max_waiting": 5}, [0] * 7, [], ()),  # nothing is always welcome: all of it was merged
        ({"quotas": {"low": 2}}, [-10], [-10, 0, 0, 0], ()),  # the others have no quota
        ({"quotas": {"low": 2}}, [-10, -10, -10], [0], ()),  # what is over its quota holds up nobody else
        ({"max_waiting": 3, "when_full": "displace"}, [0, 0, 0], [1], (0,)),  # the oldest
        ({"max_waiting": 3, "when_full": "displace"}, [2, 0, 1], [3, 3], (1, 2)),  # the lowest
        ({"max_waiting": 3, "when_full": "displace"}, [0, 0], [1, 1], (0,)),  # no more than must
        ({"max_waiting": 3, "when_full": "displace"}, [0, 0], [5, 0], (0,)),  # for the 5; the 0 has the free place
        ({"max_waiting": 2, "when_full": "displace"}, [1, 0], [1, 2], (1, 0)),  # the 0 for the 1, the 1 for the 2
        ({"max_waiting": 2, "when_full": "displace"}, [0] * 5, [1], (0,)),  # over already: as many as come
    ],
)
def test_what_is_admitted(
    bounds: dict[str, Any], waiting: list[int], new: list[int], displaced: tuple[int, ...]
) -> None:
    assert decided(bounds, waiting, new) == Admitted(displaced)


@pytest.mark.parametrize(
    ("bounds", "waiting", "new", "reason"),
    [
        (
            {"max_waiting": 5},
            [0] * 4,
            [9, 9],
            "max_waiting is 5: 4 trials wait, so there is room for 1 and not for 2; "
            "submit fewer, or again once some began.",
        ),
        (
            {"max_waiting": 5},
            [],
            [0] * 6,
            "max_waiting is 5: 0 trials wait, so there is room for 5 and not for 6; submit them in parts.",
        ),
        (
            {"max_waiting": 3, "when_full": "displace"},
            [0, 1, 1],
            [1, 1],
            "max_waiting is 3: 3 trials wait, so there is room for 0 and not for 2; submit fewer, or again once some "
            "began. Only 1 of a lower priority could make room; 2 must.",
        ),
        (
            {"max_waiting": 3, "when_full": "displace"},
            [0],
            [1, 1, 1, 1],
            "max_waiting is 3: 1 trials wait, so there is room for 2 and not for 4; submit them in parts. "
            "Only 1 of a lower priority could make room; 2 must.",
        ),
        (
            {"quotas": {"normal": 2, "7": 1}, "when_full": "displace", "max_waiting": 100},
            [0, 7, -10],
            [0, 0, 7],
            "the quota of priority 0 (normal) is 2: 1 trials wait, so there is room for 1 and not for 2; submit fewer, "
            "or again once some began. Within one priority nothing makes room for anything else.\n"
            "the quota of priority 7 is 1: 1 trials wait, so there is room for 0 and not for 1; submit fewer, "
            "or again once some began. Within one priority nothing makes room for anything else.",
        ),
    ],
)
def test_what_is_refused_and_what_the_submitter_is_told(
    bounds: dict[str, Any], waiting: list[int], new: list[int], reason: str
) -> None:
    assert decided(bounds, waiting, new) == Refused(reason, never="in parts" in reason)


def test_nobody_is_asked_to_go_where_there_is_room_or_no_way() -> None:
    roomy = QueueSettings(max_waiting=10, when_full="displace")
    assert admit(roomy, {0: 5}, {1: 5}, never) == Admitted()
    assert isinstance(admit(QueueSettings(max_waiting=3), {0: 3}, {1: 1}, never), Refused)
    no_quota_left = QueueSettings(max_waiting=3, quotas={"1": 1}, when_full="displace")
    assert isinstance(admit(no_quota_left, {0: 2, 1: 1}, {1: 1}, never), Refused)


priorities = st.lists(st.integers(0, 3), max_size=6)


@unhurried
@given(waiting=priorities, new=priorities, most=st.integers(1, 8))
def test_a_batch_is_admitted_exactly_if_each_that_goes_can_go_for_a_higher_one(
    waiting: list[int], new: list[int], most: int
) -> None:
    go = min(max(0, len(waiting) + len(new) - most), len(new))
    possible = any(
        all(goer < comer for goer, comer in zip(sorted(goers), sorted(comers), strict=True))
        for goers in combinations(waiting, go)
        for comers in combinations(new, go)
    )
    found = decided({"max_waiting": most, "when_full": "displace"}, waiting, new)
    assert isinstance(found, Admitted) == possible
    if isinstance(found, Admitted):
        by_age = sorted(range(len(waiting)), key=lambda idx: (waiting[idx], idx))
        assert list(found.displaced) == by_age[:go]


@unhurried
@given(waiting=priorities, new=priorities, most=st.integers(1, 8), quota=st.integers(1, 4))
def test_no_bound_is_passed_by_what_is_admitted(waiting: list[int], new: list[int], most: int, quota: int) -> None:
    for when_full in ("refuse", "displace"):
        bounds = {"max_waiting": most, "quotas": {"1": quota}, "when_full": when_full}
        found = decided(bounds, waiting, new)
        if isinstance(found, Admitted) and new:
            after = Counter([*new, *(each for idx, each in enumerate(waiting) if idx not in found.displaced)])
            assert after.total() <= max(most, len(waiting))
            assert after[1] <= quota or 1 not in new


# Warnings


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ({}, ()),
        ({0: 79}, ()),
        ({0: 80}, (Pressure("max_waiting", 80, 80, 100),)),
        ({0: 90, 1: 4}, (Pressure("max_waiting", 80, 94, 100),)),
        ({0: 95}, (Pressure("max_waiting", 95, 95, 100),)),
        ({0: 300}, (Pressure("max_waiting", 95, 300, 100),)),
        ({20: 7}, ()),
        ({20: 8}, (Pressure("quota of priority 20 (critical)", 80, 8, 9),)),
        (
            {20: 9, 0: 90},
            (Pressure("max_waiting", 95, 99, 100), Pressure("quota of priority 20 (critical)", 95, 9, 9)),
        ),
    ],
)
def test_pressure_begins_at_80_percent(waiting: dict[int, int], expected: tuple[Pressure, ...]) -> None:
    bounds = QueueSettings(max_waiting=100, quotas={"critical": 9})
    assert pressure(bounds, waiting) == expected


def test_a_bound_that_is_no_whole_number_of_percents_is_not_rounded() -> None:
    bounds = QueueSettings(max_waiting=3)
    assert pressure(bounds, {0: 2}) == ()
    assert [each.percent for each in pressure(bounds, {0: 3})] == [95]
    assert str(pressure(bounds, {0: 3})[0]) == "max_waiting: 3 of 3 trials wait, 95 % or more"


def test_without_bounds_there_is_no_pressure() -> None:
    assert pressure(QueueSettings(), {0: 10**9}) == ()


def test_a_warning_comes_once_and_again_only_after_it_was_below() -> None:
    marks = Watermarks(QueueSettings(max_waiting=100))
    depths = [10, 80, 81, 94, 95, 99, 85, 96, 79, 80, 79, 100, 80, 0]
    said = [[each.percent for each in marks.update({0: depth})] for depth in depths]
    assert said == [[], [80], [], [], [95], [], [], [95], [], [80], [], [95], [], []]


def test_each_bound_has_warnings_of_its_own() -> None:
    marks = Watermarks(QueueSettings(max_waiting=100, quotas={"low": 10}))
    assert [each.what for each in marks.update({-10: 8})] == ["quota of priority -10 (low)"]
    assert [each.what for each in marks.update({-10: 8, 0: 75})] == ["max_waiting"]
    assert marks.update({-10: 8, 0: 75}) == ()


# Duplicates


def task(task_id: str, says: Any = None, **fields: Any) -> Task:
    return Task(id=task_id, input=says, **fields)


Policy = Literal["merge", "reject", "keep"]
POLICIES: tuple[Policy, ...] = ("merge", "reject", "keep")


def merged(new: Sequence[Task], known: Sequence[Task] = (), policy: Policy = "merge") -> Merged:
    digests = {each.id: content_digest(each) for each in known}
    return merge(policy, new, digests, {digest: task_id for task_id, digest in digests.items()})


def conflicts(new: Sequence[Task], known: Sequence[Task] = (), policy: Policy = "merge") -> list[str]:
    with pytest.raises(InvalidValue) as caught:
        merged(new, known, policy)
    return str(caught.value).split("\n  ")


def test_a_digest_is_of_everything_but_the_id() -> None:
    says = {"b": 1, "a": [1.5, "\u00e9"]}
    assert content_digest(task("x", says)) == content_digest(task("y", {"a": [1.5, "\u00e9"], "b": 1}))
    others = [
        task("x", {"b": 1, "a": [1.5, "e"]}),
        task("x", says, image="i"),
        task("x", says, chain="c"),
        task("x", says, depends_on=("d",)),
        task("x", says, workspace="w"),
        task("x", says, protocol=TaskProtocol(priority=1)),
        task("x", says, protocol=TaskProtocol(tags=("t",))),
    ]
    digests = {content_digest(each) for each in [task("x", says), *others]}
    assert len(digests) == len(others) + 1
    assert all(len(each.removeprefix("sha256:")) == 64 for each in digests)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_that_is_submitted_again_adds_nothing(policy: Policy) -> None:
    batch = [task("x", 1), task("y", 2, depends_on=("x",))]
    first = merged(batch, policy=policy)
    assert first == Merged(tuple(batch), {each.id: content_digest(each) for each in batch}, {})
    assert merged(batch, batch, policy) == Merged((), {}, {"x": "x", "y": "y"})
    assert merged([*batch, task("x", 1)], policy=policy).tasks == tuple(batch)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_id_that_is_taken_by_another_content_is_refused_with_any_policy(policy: Policy) -> None:
    assert conflicts([task("x", 1), task("y", 2), task("y", 3)], [task("x", 0)], policy) == [
        "2 of 3 tasks cannot be added, so none was:",
        "'x' is the id of another task of the run: give this one an id of its own",
        "'y' is the id of another task of the same submission: give this one an id of its own",
    ]


def test_the_same_content_under_another_id_is_merged() -> None:
    batch = [task("x2", 1), task("y", 2), task("y2", 2), task("z", 3), task("x2", 1)]
    found = merged(batch, [task("x", 1)])
    assert [each.id for each in found.tasks] == ["y", "z"]
    assert found.same == {"x2": "x", "y2": "y"}


def test_the_same_content_under_another_id_is_refused_where_the_policy_says_so() -> None:
    assert conflicts([task("x2", 1), task("y", 2), task("y2", 2)], [task("x", 1)], "reject") == [
        "2 of 3 tasks cannot be added, so none was:",
        "'x2' says the same as 'x': leave it out",
        "'y2' says the same as 'y': leave it out",
    ]


def test_the_same_content_under_another_id_is_kept_where_the_policy_says_so() -> None:
    batch = (task("x2", 1), task("y", 2), task("y2", 2))
    assert merged(batch, [task("x", 1)], "keep").tasks == batch


def test_an_id_that_was_merged_away_is_taken_for_the_rest_of_the_batch() -> None:
    assert conflicts([task("x2", 1), task("x2", 5)], [task("x", 1)])[1:] == [
        "'x2' is the id of another task of the same submission: give this one an id of its own"
    ]


def test_who_depends_on_a_merged_task_depends_on_the_one_that_stays() -> None:
    batch = [task("after", 2, depends_on=("x2", "x", "other")), task("x2", 1)]
    known = [task("x", 1), task("other", 9)]
    found = merged(batch, known)
    assert [(each.id, each.depends_on) for each in found.tasks] == [("after", ("x", "other"))]
    assert found.digests == {"after": content_digest(found.tasks[0])}
    again = merged(batch, [*known, *found.tasks])
    assert again == Merged((), {}, {"x2": "x", "after": "after"})


def test_what_is_added_keeps_the_order_of_the_batch() -> None:
    batch = (task("after", 1, depends_on=("x",)), task("x", 2), task("y", 3))
    assert merged(batch).tasks == batch


def test_tasks_that_say_the_same_because_their_dependencies_do_are_merged() -> None:
    batch = [task("last", 3, depends_on=("b2",)), task("b2", 2, depends_on=("a2",)), task("a2", 1)]
    found = merged(batch, [task("a", 1), task("b", 2, depends_on=("a",))])
    assert [(each.id, each.depends_on) for each in found.tasks] == [("last", ("b",))]


def test_a_circle_is_refused_with_its_tasks() -> None:
    circle = [task("a", depends_on=("b",)), task("b", depends_on=("c",)), task("c", depends_on=("a",))]
    [text] = conflicts(circle)
    head, _, names = text.rpartition(": ")
    assert head == "a task of the submission depends on itself"
    assert names in {"'a' -> 'b' -> 'c' -> 'a'", "'b' -> 'c' -> 'a' -> 'b'", "'c' -> 'a' -> 'b' -> 'c'"}
    long = [task(f"t{at}", depends_on=(f"t{(at + 1) % 5000}",)) for at in range(5000)]
    assert len(conflicts(long)[0]) < 500


def test_of_very_many_conflicts_the_first_are_told_and_the_others_counted() -> None:
    lines = conflicts([task(f"t{at}") for at in range(1001)], policy="reject")
    assert (lines[0], lines[-1]) == ("1000 of 1001 tasks cannot be added, so none was:", "... and 800 more")
    assert len(lines) == 202


@unhurried
@given(known=st.lists(st.integers(0, 3), unique=True), batch=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5))))
def test_after_merging_everything_submitted_is_there_once_and_in_order(
    known: list[int], batch: list[tuple[int, int]]
) -> None:
    there = [task(f"known{says}", says) for says in known]
    new = [task(f"t{number}", says) for number, says in batch]
    if len({number for number, _ in batch}) != len(set(batch)):
        conflicts(new, there)
        return
    found = merged(new, there)
    after = {each.id: each.input for each in [*there, *found.tasks]}
    assert sorted(map(repr, after.values())) == sorted({repr(each.input) for each in [*there, *new]})
    assert all(after[found.same.get(each.id, each.id)] == each.input for each in new)
    assert list(found.tasks) == sorted(found.tasks, key=new.index)
