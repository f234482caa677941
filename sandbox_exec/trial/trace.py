"""Reading what an agent wrote. Any bytes give an answer, and none gives an exception."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_LINE_BYTES = 1 << 20  # one event; a line without end must not become a buffer without end
MAX_LINES = 400_000  # parsed in one go, at about 2 us each, and a flood of short ones would be a flood of objects
MAX_DEPTH = 128  # of lists and objects; readers of JSON, pydantic's among them, refuse to follow much further


class TraceReader:
    """Collects events, one JSON object a line, up to `limit` bytes and MAX_LINES; counts what it does not keep.

    Lines are kept as they came and parsed at the end: an agent that is killed leaves what it wrote, and a
    flood costs no more than its bytes.
    """

    def __init__(self, limit: int) -> None:
        self._room = limit
        self._lines: list[bytes] = []
        self._tail = b""
        self._lost = 0  # bytes so far of a line that is too long to keep; 0 outside of one
        self.dropped_bytes = 0
        self.dropped_events = 0
        self.malformed = 0

    def feed(self, data: bytes | memoryview) -> None:
        if self._room <= 0:
            self._drop(bytes(data))
            return
        head, newline, tail = (self._tail + bytes(data)).rpartition(b"\n")
        if newline:
            self._take(head.split(b"\n"), len(head) + 1)
        self._tail = tail
        if len(tail) > min(MAX_LINE_BYTES, self._room):
            self.dropped_bytes += len(tail)
            self._lost += len(tail)
            self._tail = b""

    def _take(self, lines: list[bytes], size: int) -> None:
        if self._lost:
            size -= len(lines[0]) + 1
            if self._lost + len(lines[0]) + 1 > self._room:
                self._room = 0  # as below: how the bytes came in must not decide what is kept
            self._lost = 0
            self._lose(lines.pop(0))
        fits = size <= min(self._room, MAX_LINE_BYTES)  # nearly always: no line of these can be too long
        if fits and len(self._lines) + len(lines) <= MAX_LINES:
            self._room -= size
            self._lines += lines
            return
        for line in lines:
            if len(line) + 1 > self._room or len(self._lines) == MAX_LINES:
                self._room = 0  # what is kept is a beginning, without gaps but for giants
            if self._room == 0 or len(line) > MAX_LINE_BYTES:
                self._lose(line)
            else:
                self._room -= len(line) + 1
                self._lines.append(line)

    def _lose(self, line: bytes) -> None:
        self.dropped_bytes += len(line) + 1
        self.dropped_events += 1

    def _drop(self, data: bytes) -> None:
        """Past the limit: only count, and remember whether a line is open."""
        self.dropped_bytes += len(data)
        self.dropped_events += data.count(b"\n")
        if data:
            self._lost = 0 if data.endswith(b"\n") else 1

    def finish(self) -> tuple[tuple[dict[str, Any], ...], int]:
        """The events, and how many torn lines stood at the end (0 or 1)."""
        torn = int(bool(self._tail) or self._lost > 0)
        self.dropped_bytes += len(self._tail)
        self._tail = b""
        events = []
        for line in self._lines:
            event = parse_object(line)
            if event is not None:
                events.append(event)
            elif line.strip():
                self.malformed += 1
        self._lines = []
        return tuple(events), torn


def parse_object(line: bytes, *, finite: bool = False) -> dict[str, Any] | None:
    """A JSON object in UTF-8 without NaN and infinities, or None. `finite`: nor a number that is read as one."""
    try:
        value = parse_json(line, constants=False, finite=finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class TooDeep(ValueError):
    """JSON that is nested deeper than MAX_DEPTH."""


def parse_json(
    data: bytes,
    *,
    constants: bool = True,
    finite: bool = False,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """What a guest wrote, as a value that can be written out and read again, but for NaN and infinities.

    `constants=False`: refuse those too, which Python reads and JSON has not; `finite`: and numbers so large that they
    become one. Halves of surrogate pairs, which are no text, are replaced. Raises ValueError or RecursionError.
    """
    value = json.loads(
        data.decode(),
        parse_constant=None if constants and not finite else _finite,
        parse_float=_finite if finite else None,
        object_pairs_hook=object_pairs_hook,
    )
    if isinstance(value, dict | list) and data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if b"\\ud" in data or b"\\uD" in data:  # nearly never, but for emoji and the end of Hangul
        text = json.dumps(value, ensure_ascii=False)
        if not text.isascii():
            value = json.loads(text.encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            below += item.values() if isinstance(item, dict) else item
        level = [item for item in below if isinstance(item, dict | list)]
        if not level:
            return
    raise TooDeep(f"nested deeper than {MAX_DEPTH} lists and objects")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not JSON" if not text[-1:].isdigit() else f"{text} is too large")
    return number


class Tail:
    """The last `limit` bytes of a stream, and how many came before."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self.total = 0

    def feed(self, data: memoryview) -> None:
        self.total += len(data)
        if self._limit == 0:
            return
        chunk = bytes(data[-self._limit :])
        self._chunks.append(chunk)
        self._held += len(chunk)
        while self._held - len(self._chunks[0]) >= self._limit:
            self._held -= len(self._chunks.popleft())

    @property
    def dropped(self) -> int:
        return max(0, self.total - self._limit)

    def text(self) -> str:
        """What a person reads: undecodable bytes are escaped."""
        if not self._limit:
            return ""
        return b"".join(self._chunks)[-self._limit :].decode("utf-8", "backslashreplace")
