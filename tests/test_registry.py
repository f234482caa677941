"""The registry of a trial's components: names, what is gathered, and what is streamed."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.guest import ComponentRegistry, TrialTimeout, registry
from sandbox_exec.guest.context import TrialContext, context, set_context
from sandbox_exec.guest.registry import CONFIG, MAX_SNAPSHOT, STREAM_ROOM, TRACES, as_json, watch_trace
from sandbox_exec.trial.trace import MAX_LINE_BYTES, parse_object


class Component:
    def __init__(self, traces: Any = None, config: Any = None) -> None:
        self.traces, self.config = traces, config

    def gather_traces(self) -> Any:
        return self.traces

    def gather_config(self) -> Any:
        return self.config


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def gather_traces(self) -> Any:
        raise self.error

    gather_config = gather_traces


class Events(list[tuple[str, dict[str, Any]]]):
    """What a registry emits."""

    def __call__(self, type: str, /, **data: Any) -> None:
        self.append((type, data))

    def last(self, type: str) -> Any:
        return next(data for kind, data in reversed(self) if kind == type)


# --- names ---


def test_the_same_registration_again_does_nothing() -> None:
    one, found = Component({"n": 1}), ComponentRegistry()
    found.register("tools", "search", one)
    found.register("tools", "search", one)
    assert found.gather_traces() == {"tools": {"search": {"n": 1}}}
    assert one in found
    assert found.category_of(one) == "tools"
    assert Component() not in found


@pytest.mark.parametrize("second", [("tools", "other"), ("agents", "search")])
def test_a_second_name_or_category_for_a_component_is_an_error(second: tuple[str, str]) -> None:
    one, found = Component({"n": 1}), ComponentRegistry()
    found.register("tools", "search", one)
    with pytest.raises(ValueError, match=f"{second[0]}/{second[1]} is registered already, as tools/search"):
        found.register(*second, one)
    assert found.gather_traces() == {"tools": {"search": {"n": 1}}}


def test_another_component_under_a_taken_name_is_an_error_though_it_is_equal() -> None:
    class Equal(Component):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]  # as of many a component

    found = ComponentRegistry()
    found.register("tools", "search", Equal())
    with pytest.raises(ValueError, match="another component is registered as tools/search"):
        found.register("tools", "search", Equal())


@pytest.mark.parametrize("names", [("", "a"), ("a", ""), ("a", 1), (None, "a")])
def test_category_and_name_are_text(names: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="are text, and not empty"):
        ComponentRegistry().register(*names, Component())


# --- gathering ---


def test_each_component_is_asked_for_what_it_can_say() -> None:
    class OnlyConfig:
        def gather_config(self) -> Any:
            return {"model": "m"}

    found = ComponentRegistry()
    found.register("agents", "a", Component([1], {"x": 2}))
    found.register("agents", "b", OnlyConfig())
    found.register("tools", "none", object())
    assert found.gather_traces() == {"agents": {"a": [1]}}
    assert found.gather_config() == {"agents": {"a": {"x": 2}, "b": {"model": "m"}}}


def test_one_that_raises_is_recorded_and_spoils_nothing() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Exiting(Exception):
        def __str__(self) -> str:
            raise SystemExit("now")

    class Odd:
        @property
        def gather_traces(self) -> Any:
            raise OSError("no such method")

    found = ComponentRegistry()
    found.register("tools", "bad", Raising(KeyError("x")))
    found.register("tools", "worse", Raising(Unprintable()))
    found.register("tools", "exits", Raising(SystemExit("enough")))
    found.register("tools", "exits twice", Raising(Exiting()))
    found.register("tools", "odd", Odd())
    found.register("tools", "good", Component("fine", "too"))
    assert found.gather_traces()["tools"] == {
        "bad": {"error": "KeyError: 'x'"},
        "worse": {"error": "Unprintable: <Unprintable: RuntimeError while printing it>"},
        "exits": {"error": "SystemExit: enough"},
        "exits twice": {"error": "Exiting: <Exiting: SystemExit while printing it>"},
        "odd": {"error": "OSError: no such method"},
        "good": "fine",
    }
    assert found.gather_config()["tools"]["good"] == "too"


def test_the_deadline_is_not_taken_for_an_error_of_a_component() -> None:
    found = ComponentRegistry()
    found.register("tools", "slow", Raising(TrialTimeout()))
    with pytest.raises(TrialTimeout):
        found.gather_traces()


def test_what_json_lacks_is_its_repr() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    said = as_json({1: (1, {2}), "nan": float("nan"), "odd": Odd(), None: b"x", "huge": 10**400})
    assert said == {
        "1": [1, "{2}"],
        "nan": "nan",
        "odd": "<Odd: RuntimeError while printing it>",
        "None": "b'x'",
        "huge": repr(10**400),
    }


def test_a_circle_ends_and_a_tangle_is_an_error_of_its_component() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert json.dumps(as_json(circle)).startswith("[[[[")
    tangle: list[Any] = [1]
    for _ in range(60):
        tangle = [tangle, tangle]
    found = ComponentRegistry()
    found.register("tools", "tangled", Component(tangle))
    assert "ValueError: more than" in found.gather_traces()["tools"]["tangled"]["error"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(values)
def test_any_value_becomes_json_that_a_reader_of_traces_takes(value: Any) -> None:
    line = json.dumps({"data": as_json(value)}, allow_nan=False).encode()
    assert parse_object(line) is not None


# --- snapshots ---


def test_a_snapshot_streams_what_is_new_and_only_that() -> None:
    emitted, one = Events(), Component({"n": 1}, {"model": "m"})
    found = ComponentRegistry(emitted)
    found.register("agents", "a", one)
    found.snapshot()
    assert emitted == [
        (CONFIG, {"category": "agents", "name": "a", "data": {"model": "m"}}),
        (TRACES, {"category": "agents", "name": "a", "data": {"n": 1}}),
    ]
    found.snapshot()
    assert len(emitted) == 2
    one.traces = {"n": 2}
    found.snapshot()
    assert emitted[2:] == [(TRACES, {"category": "agents", "name": "a", "data": {"n": 2}})]


def test_a_registry_outside_of_a_trial_streams_to_nobody() -> None:
    found = ComponentRegistry()
    found.register("agents", "a", Component({"n": 1}))
    found.snapshot()


def test_a_large_snapshot_comes_in_parts_below_the_line_limit() -> None:
    emitted = Events()
    found = ComponentRegistry(emitted)
    large = {"text": '"\\' * 400_000}  # what takes the most room when it is escaped
    found.register("agents", "a", Component(large))
    found.snapshot()
    parts = [data for kind, data in emitted if kind == TRACES]
    assert [(one["part"], one["parts"]) for one in parts] == [(n, len(parts)) for n in range(len(parts))]
    assert json.loads("".join(one["text"] for one in parts)) == large
    assert max(len(json.dumps(one)) for one in parts) < MAX_LINE_BYTES - 1000


def test_a_giant_is_said_to_be_one() -> None:
    emitted = Events()
    found = ComponentRegistry(emitted)
    found.register("agents", "a", Component("x" * (MAX_SNAPSHOT + 1)))
    found.snapshot()
    assert "too large" in emitted.last(TRACES)["data"]["error"]


def test_snapshots_leave_room_in_the_trace_and_the_last_one_finds_some() -> None:
    emitted, one = Events(), Component()
    found = ComponentRegistry(emitted)
    found.register("agents", "a", one)
    for number in range(STREAM_ROOM // 200_000 + 20):
        one.traces = f"{number:08}" + "x" * 200_000
        found.snapshot()
    sent = sum(len(data["data"]) for kind, data in emitted if kind == TRACES)
    assert STREAM_ROOM - 400_000 < sent <= STREAM_ROOM
    assert emitted.last(TRACES)["data"] != one.traces
    found.final()
    assert emitted.last(TRACES)["data"] == one.traces


# --- the agent's own events take snapshots along ---


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A trial in this process; what is returned is the end of its trace that is read."""
    monkeypatch.setattr(sys.modules[TrialContext.__module__], "_current", None)
    reading, writing = os.pipe()
    set_context(TrialContext(seed=0, deadline_s=None, trace_fd=writing))
    yield reading
    os.close(reading)
    os.close(writing)


def types(reading: int) -> list[str]:
    return [json.loads(line)["type"] for line in os.read(reading, 65536).splitlines()]


def test_an_event_takes_a_snapshot_along_if_the_last_one_is_a_while_ago(
    trace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(registry, "time", SimpleNamespace(monotonic=lambda: now_s))
    found = ComponentRegistry(context().trace)
    one = Component({"n": 1})
    found.register("agents", "a", one)
    watch_trace(found)
    context().trace("step")
    assert types(trace) == ["step"]
    now_s += 2
    context().trace("step")
    assert types(trace) == ["step", CONFIG, TRACES]
    one.traces = {"n": 2}
    now_s += 0.5
    context().trace("step")
    assert types(trace) == ["step"]


def test_what_a_component_traces_while_it_is_asked_asks_nobody_again(
    trace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    class Talking:
        def gather_traces(self) -> Any:
            nonlocal now_s
            now_s += 2
            context().trace("asked")
            return None

    monkeypatch.setattr(registry, "time", SimpleNamespace(monotonic=lambda: now_s))
    found = ComponentRegistry(context().trace)
    found.register("agents", "a", Talking())
    watch_trace(found)
    found.snapshot()
    assert types(trace) == ["asked", TRACES]


def test_another_thread_takes_no_snapshots_along(trace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(registry, "time", SimpleNamespace(monotonic=lambda: now_s))
    found = ComponentRegistry(context().trace)
    found.register("agents", "a", Component({"n": 1}))
    watch_trace(found)
    now_s += 2
    other = threading.Thread(target=context().trace, args=("elsewhere",))
    other.start()
    other.join()
    assert types(trace) == ["elsewhere"]


def test_a_forked_child_takes_no_snapshots_along(trace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ComponentRegistry(context().trace)
    found.register("agents", "a", Component({"n": 1}))
    watch_trace(found)
    monkeypatch.setattr(registry, "time", SimpleNamespace(monotonic=lambda: float("inf")))
    monkeypatch.setattr(registry, "os", SimpleNamespace(getpid=lambda: -1))
    context().trace("elsewhere")
    assert types(trace) == ["elsewhere"]
