"""The schedule of an experiment: complete, always the same, and never waiting for what comes later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox_exec.contracts import AgentSpec, Design, Experiment, Slot, Task, Variant, derive_trial_id
from sandbox_exec.testing import expand


def experiment(needs: dict[str, list[str]], variants: str = "v", repeats: int = 1) -> Experiment:
    return Experiment(
        name="e",
        tasks=[Task(id=name, input=None, depends_on=tuple(depends_on)) for name, depends_on in needs.items()],
        variants=[Variant(id=name, agent=AgentSpec(command=("x",))) for name in variants],
        design=Design(repeats=repeats),
    )


def test_slots_go_by_task_then_variant_then_repeat() -> None:
    slots = expand(experiment({"b": [], "a": []}, "wv", 2))
    assert [(slot.task_id, slot.variant_id, slot.repeat) for slot in slots] == [
        ("b", "w", 0),
        ("b", "w", 1),
        ("b", "v", 0),
        ("b", "v", 1),
        ("a", "w", 0),
        ("a", "w", 1),
        ("a", "v", 0),
        ("a", "v", 1),
    ]
    assert [slot.schedule_idx for slot in slots] == list(range(8))
    assert slots[1] == Slot(schedule_idx=1, variant_id="w", task_id="b", repeat=1)


def test_a_task_comes_right_after_what_it_needs() -> None:
    slots = expand(experiment({"a": [], "b": ["d", "c"], "c": ["e"], "d": [], "e": [], "f": ["a"]}))
    assert [slot.task_id for slot in slots] == ["a", "d", "e", "c", "b", "f"]


def test_a_chain_of_needs_may_be_as_long_as_the_dataset() -> None:
    size = 5000  # far beyond what recursion can do
    needs = {str(n): [str(n + 1)] if n + 1 < size else [] for n in range(size)}
    assert [slot.task_id for slot in expand(experiment(needs))] == [str(n) for n in reversed(range(size))]


@st.composite
def needs_without_circles(draw: st.DrawFn) -> dict[str, list[str]]:
    order = draw(st.permutations(range(draw(st.integers(1, 12)))))
    needs = {
        str(task): [str(order[n]) for n in draw(st.sets(st.integers(0, max(0, rank - 1)))) if n < rank]
        for rank, task in enumerate(order)
    }
    return {name: needs[name] for name in sorted(needs)}


@given(needs_without_circles(), st.integers(1, 3), st.integers(1, 3))
def test_every_trial_is_there_once_and_after_what_it_needs(
    needs: dict[str, list[str]], variants: int, repeats: int
) -> None:
    given_experiment = experiment(needs, "uvw"[:variants], repeats)
    slots = expand(given_experiment)
    assert slots == expand(given_experiment)
    assert [slot.schedule_idx for slot in slots] == list(range(len(needs) * variants * repeats))
    assert len({derive_trial_id(slot) for slot in slots}) == len(slots)
    last = {slot.task_id: slot.schedule_idx for slot in slots}
    for slot in slots:
        assert all(last[needed] < slot.schedule_idx for needed in needs[slot.task_id])


@given(st.permutations(["a", "b", "c", "d"]))
def test_tasks_without_needs_keep_their_order(names: list[str]) -> None:
    assert [slot.task_id for slot in expand(experiment({name: [] for name in names}))] == names
