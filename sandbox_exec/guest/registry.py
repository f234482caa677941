"""The parts of a benchmark inside a trial: environment, user, agents, tools; what each says of itself, streamed.

Snapshots go into the trace as they are made, so that a trial that is killed leaves those before. All of it is said by
the agent's own process: for the author to read, and no proof of anything.
"""

from __future__ import annotations

import _thread
import os
import time

from .context import context, json_encoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TRACES, CONFIG, FAULT = "component_traces", "component_config", "component_fault"  # types of events
ANSWER, LEFT = "answer.json", "traces.json"  # in /out: what the evaluation reads
MAX_LEFT = 4 << 20  # bytes of each: hostile JSON is some thirty times as large in an evaluator's memory
MAX_SNAPSHOT = 4 << 20  # characters of JSON of one component; more is said to be too much
STREAM_ROOM = 16 << 20  # characters in a trial: a quarter of what is kept of a trace, so that other events find room
PART = 256 << 10  # of a snapshot in one event: escaped, it is at most twice as long, and a line may have 1 MiB
_EVERY_S = 1.0  # between two snapshots that nobody asked for
_MAX_DEPTH = 64  # readers of a trace refuse what is nested 128 deep
_MAX_VALUES = 500_000  # in one snapshot: references that share values can be written out for ever
_MAX_REPR = 10_000
MAX_DIGITS = 300  # as everywhere: readers refuse more
_MAX_INT = 10**MAX_DIGITS

_encode = json_encoder()


class ComponentRegistry:
    """Which components a trial has. Those with `gather_traces` or `gather_config` are asked for what they return.

    `emit` takes the type of an event and its fields; by default snapshots go nowhere.
    """

    def __init__(self, emit: Callable[..., None] | None = None) -> None:
        self._emit = emit
        self._components: dict[tuple[str, str], Any] = {}
        self._names: dict[int, tuple[str, str]] = {}  # by id: they are all held here, so none is used twice
        self._sent: dict[tuple[str, str, str], str] = {}
        self._room = STREAM_ROOM
        self._owner = _who()
        self._busy = False
        self._last_s = time.monotonic()

    def register(self, category: str, name: str, component: Any) -> None:
        """Add a component under its one name. The same again does nothing."""
        given: tuple[Any, Any] = (category, name)
        if not all(isinstance(one, str) and one for one in given):
            raise ValueError(f"category and name are text, and not empty; given: {category!r}, {name!r}")
        known = self._names.get(id(component))
        if known == (category, name):
            return
        if known is not None:
            raise ValueError(f"{_named(category, name)} is registered already, as {_named(*known)}: keep one name")
        if (category, name) in self._components:
            raise ValueError(f"another component is registered as {_named(category, name)}: give this one its own name")
        self._components[category, name] = component
        self._names[id(component)] = (category, name)

    def __contains__(self, component: object) -> bool:
        return id(component) in self._names

    def category_of(self, component: object) -> str | None:
        """The category that it is registered in; None if it is not."""
        return self._names.get(id(component), (None, ""))[0]

    def gather_traces(self) -> dict[str, dict[str, Any]]:
        """By category and name, what each component traced, as JSON. One that raises is {"error": ...}."""
        return self._gather("gather_traces")

    def gather_config(self) -> dict[str, dict[str, Any]]:
        """By category and name, how each component is configured, as JSON."""
        return self._gather("gather_config")

    def snapshot(self) -> None:
        """Stream what is new of each component. Call it after a step: what a kill then leaves is up to here."""
        self._snapshot(0)

    def final(self) -> dict[str, dict[str, Any]]:
        """The last snapshot, which finds room even if the ones before have used it up; returns the traces."""
        return self._snapshot(-MAX_SNAPSHOT)

    def tick(self) -> None:
        """A snapshot, if the last one is a while ago, and nobody can change what is gathered meanwhile."""
        if time.monotonic() - self._last_s >= _EVERY_S and not self._busy and _who() == self._owner:
            self._snapshot(0)

    # --- parts ---

    def _gather(self, method: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for (category, name), component in list(self._components.items()):
            try:
                gather = getattr(component, method, None)
                if not callable(gather):
                    continue
                said = as_json(gather())
            except (Exception, SystemExit) as error:
                said = {"error": f"{type(error).__name__}: {_text(str, error)}"}
            found.setdefault(category, {})[name] = said
        return found

    def _snapshot(self, down_to: int) -> dict[str, dict[str, Any]]:
        self._busy = True  # what gathers may trace, and tracing takes snapshots
        try:
            config, traces = self.gather_config(), self.gather_traces()
            for type_, gathered in ((CONFIG, config), (TRACES, traces)):
                for category, of in gathered.items():
                    for name, data in of.items():
                        self._stream(type_, category, name, data, down_to)
            return traces
        finally:
            self._busy = False
            self._last_s = time.monotonic()

    def _stream(self, type_: str, category: str, name: str, data: Any, down_to: int) -> None:
        text = _encode(data)
        if len(text) > MAX_SNAPSHOT:
            data = {"error": f"too large for a snapshot: {len(text)} characters; {MAX_SNAPSHOT} are allowed"}
            text = _encode(data)
        if self._emit is None or self._sent.get((type_, category, name)) == text or self._room - len(text) < down_to:
            return
        self._room -= len(text)
        self._sent[type_, category, name] = text
        if len(text) <= PART:
            self._emit(type_, category=category, name=name, data=data)
            return
        parts = [text[at : at + PART] for at in range(0, len(text), PART)]
        for number, part in enumerate(parts):
            self._emit(type_, category=category, name=name, part=number, parts=len(parts), text=part)


def watch_trace(registry: ComponentRegistry) -> None:
    """Let the agent's own events take snapshots along, at most one a second."""
    trial = context()
    plain = trial.trace

    def trace(type: str, /, **data: Any) -> None:
        plain(type, **data)
        registry.tick()

    trial.trace = trace  # type: ignore[method-assign]  # of this one trial's context


def as_json(value: Any) -> Any:
    """The value with what JSON lacks as its repr. Raises ValueError if it is too large to be written out."""
    left = _MAX_VALUES

    def clean(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {_MAX_VALUES} values")
        if value is None or isinstance(value, str | bool):
            return value
        if isinstance(value, int):
            return value if -_MAX_INT < value < _MAX_INT else _text(repr, value)
        if isinstance(value, float):
            return value if value - value == 0 else repr(value)
        if depth < _MAX_DEPTH:
            if isinstance(value, dict):
                return {_text(str, key): clean(item, depth + 1) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [clean(item, depth + 1) for item in value]
        return _text(repr, value)

    return clean(value, 0)


def _who() -> tuple[int, int]:
    return os.getpid(), _thread.get_ident()  # a child that the agent forked has components of its own


def _text(how: Callable[[Any], str], value: Any) -> str:
    try:
        return how(value)[:_MAX_REPR]
    except (Exception, SystemExit) as error:
        return f"<{type(value).__name__}: {type(error).__name__} while printing it>"


def _named(category: str, name: str) -> str:
    return f"{category}/{name}"
