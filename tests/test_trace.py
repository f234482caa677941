"""The trace reader and the tail: any bytes, cut anywhere, give the same answer and never an exception."""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox_exec.contracts import Outcome, Usage
from sandbox_exec.contracts.status import Status
from sandbox_exec.trial import trace
from sandbox_exec.trial.trace import MAX_DEPTH, MAX_LINE_BYTES, MAX_LINES, Tail, TraceReader, parse_object

SHORT_LINE = 24  # stands in for MAX_LINE_BYTES, so that small examples have giants

LINES = st.sampled_from(
    [b"{}", b'{"a":1}', b'{"type":"step","n":12}', b"", b"   ", b"[1]", b"null", b'{"a":', b"NaN", b'{"a":NaN}',
     b"\xff\xfe", b"\0", b"{}\0", b"x" * SHORT_LINE, b"x" * (SHORT_LINE + 1), b"{}" + b" " * (SHORT_LINE - 2)]
)  # fmt: skip
STREAMS = st.one_of(
    st.binary(max_size=200),
    st.lists(st.one_of(LINES, st.binary(max_size=30)), max_size=12).map(b"\n".join),
    st.lists(LINES, max_size=12).map(lambda lines: b"".join(line + b"\n" for line in lines)),
)


class Read(NamedTuple):
    events: tuple[dict[str, Any], ...]
    torn: int
    dropped_bytes: int
    dropped_events: int
    malformed: int


def read(chunks: list[bytes], limit: int) -> Read:
    reader = TraceReader(limit)
    for chunk in chunks:
        reader.feed(memoryview(chunk))
    events, torn = reader.finish()
    return Read(events, torn, reader.dropped_bytes, reader.dropped_events, reader.malformed)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


def split(stream: bytes) -> tuple[list[bytes], bytes]:
    """Whole lines, and what stands after the last of them."""
    *lines, rest = stream.split(b"\n")
    return lines, rest


@given(STREAMS, st.lists(st.integers(0, 400), max_size=8), st.integers(0, 120))
@example(b"x" * 15 + b"\n{}\n", [15], 10)  # a line that does not fit, cut before its end
@example(b"x" * 30 + b"\n{}\n", [27], 40)
@example(b"\n", [0, 0, 1, 1], 0)
def test_how_the_bytes_are_cut_does_not_change_what_is_read(stream: bytes, places: list[int], limit: int) -> None:
    with mock.patch.object(trace, "MAX_LINE_BYTES", SHORT_LINE):
        assert read(cut(stream, places), limit) == read([stream], limit)


@given(STREAMS, st.integers(0, 250))
def test_every_byte_is_either_kept_or_counted_and_what_is_kept_fits_the_limit(stream: bytes, limit: int) -> None:
    with mock.patch.object(trace, "MAX_LINE_BYTES", SHORT_LINE):
        seen = read([stream], limit)
    lines, rest = split(stream)
    kept_bytes = len(stream) - seen.dropped_bytes
    assert 0 <= kept_bytes <= limit
    assert seen.torn == bool(rest)
    blank = sum(not line.strip() for line in lines)
    assert len(seen.events) + seen.malformed + seen.dropped_events <= len(lines)
    assert len(seen.events) + seen.malformed + seen.dropped_events >= len(lines) - blank


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(0, 400))
def test_what_is_kept_is_the_beginning_of_what_was_written(numbers: list[int], limit: int) -> None:
    events = [{"n": number} for number in numbers]
    stream = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    seen = read([stream], limit)
    kept = len(seen.events)
    assert list(seen.events) == events[:kept]
    assert seen.dropped_events == len(events) - kept
    rest = [len(json.dumps(event)) + 1 for event in events[kept:]]
    assert seen.dropped_bytes == sum(rest)
    assert not rest or len(stream) - sum(rest) + rest[0] > limit  # it stopped because the next did not fit


@given(st.lists(LINES, max_size=10), st.binary(min_size=1, max_size=30).filter(lambda tail: b"\n" not in tail))
def test_a_torn_last_line_is_dropped_and_counted_whatever_stood_before(lines: list[bytes], tail: bytes) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    with_tail, without = read([whole + tail], 10_000), read([whole], 10_000)
    assert (with_tail.torn, without.torn) == (1, 0)
    assert with_tail.events == without.events
    assert with_tail.dropped_bytes == without.dropped_bytes + len(tail)


def test_a_torn_line_that_would_be_an_event_is_no_event() -> None:
    assert read([b'{"type":"paid","amount":1}\n{"type":"paid","amount":10}'], 1000) == Read(
        events=({"type": "paid", "amount": 1},), torn=1, dropped_bytes=27, dropped_events=0, malformed=0
    )


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"[" * 100_000, id="deep lists"),
        pytest.param(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, id="deep objects"),
        pytest.param(b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", id="deeper than JSON readers go"),
        pytest.param(b'{"a":NaN}', id="NaN"),
        pytest.param(b'{"a":-Infinity}', id="infinity"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", id="a huge int"),
        pytest.param(b'{"a":"\xff"}', id="invalid utf-8"),
        pytest.param(b'{"a":1}\0', id="NUL after an object"),
        pytest.param(b"\0\0\0\0", id="NULs"),
        pytest.param(b'{"a":"\x01"}', id="a control character"),
        pytest.param('{"a":1}'.encode("utf-16"), id="another encoding"),
        pytest.param(b"\xef\xbb\xbf{}", id="a byte order mark"),
        pytest.param(b'["type","step"]', id="a list"),
        pytest.param(b'"type"', id="a string"),
        pytest.param(b"1e400", id="a number"),
    ],
)
def test_what_is_no_json_object_is_counted_as_malformed_and_hides_nothing(line: bytes) -> None:
    seen = read([b'{"first":1}\n' + line + b'\n{"last":1}\n'], 1 << 22)
    assert seen == Read(({"first": 1}, {"last": 1}), torn=0, dropped_bytes=0, dropped_events=0, malformed=1)


@pytest.mark.parametrize("chunk", [1 << 22, 1 << 16, 100_003])
def test_a_line_of_two_mebibytes_is_dropped_and_the_next_is_read(chunk: int) -> None:
    giant = b'{"a":"' + b"x" * (2 << 20) + b'"}'
    stream = b'{"n":1}\n' + giant + b'\n{"n":2}\n'
    chunks = [stream[start : start + chunk] for start in range(0, len(stream), chunk)]
    assert read(chunks, 8 << 20) == Read(
        ({"n": 1}, {"n": 2}), torn=0, dropped_bytes=len(giant) + 1, dropped_events=1, malformed=0
    )


def test_a_line_without_end_is_not_buffered() -> None:
    reader = TraceReader(1 << 30)
    chunk = b"x" * 65536
    for _ in range(64):
        reader.feed(chunk)
        assert len(reader._tail) <= MAX_LINE_BYTES
    assert reader.finish() == ((), 1)
    assert reader.dropped_bytes == 64 * len(chunk)


def test_a_flood_of_short_lines_does_not_become_a_flood_of_objects() -> None:
    reader = TraceReader(64 << 20)
    for _ in range(10):
        reader.feed(b"{}\n" * 100_000)
    events, torn = reader.finish()
    assert (len(events), torn) == (MAX_LINES, 0)
    assert reader.dropped_events == 1_000_000 - MAX_LINES
    assert reader.dropped_bytes == 3 * reader.dropped_events


@given(STREAMS, st.lists(st.integers(0, 400), max_size=8), st.integers(0, 5))
def test_how_the_bytes_are_cut_does_not_change_how_many_lines_are_kept(
    stream: bytes, places: list[int], most: int
) -> None:
    with mock.patch.object(trace, "MAX_LINES", most):
        assert read(cut(stream, places), 120) == read([stream], 120)
        assert len(read([stream], 120).events) <= most


@given(st.text())
def test_any_text_in_an_event_can_be_written_out_and_read_again(text: str) -> None:
    _writes_out({"text": text})


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(rb'{"name":"\udcff"}', id="a lone surrogate in a value"),
        pytest.param(rb'{"\uD800":1}', id="a lone surrogate in a key"),
        pytest.param(b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}", id="as deep as is allowed"),
        pytest.param(b'{"a":' + b'{"a":' * 99 + b"9" * 4000 + b"}" * 100, id="a large int, deep down"),
    ],
)
def test_what_only_python_can_say_does_not_break_what_reads_the_outcome_later(line: bytes) -> None:
    event = parse_object(line)
    assert event is not None
    _writes_out(event)


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_object(rb'{"face":"\ud83d\ude00","word":"\uD55C"}') == {"face": "😀", "word": "한"}


def _writes_out(event: dict[str, Any]) -> None:
    parsed = parse_object(json.dumps(event).encode())
    assert parsed == event
    outcome = Outcome(status=Status.SUCCESS, value=event, trace=(event,), usage=Usage(wall_s=0))
    again = Outcome.model_validate_json(outcome.model_dump_json())
    assert (again.value, again.trace) == (event, (event,))


@given(st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=8), st.integers(0, 64))
def test_the_tail_is_exactly_the_last_bytes_for_any_cutting(stream: bytes, places: list[int], limit: int) -> None:
    tail = Tail(limit)
    for chunk in cut(stream, places):
        tail.feed(memoryview(chunk))
    last = stream[max(0, len(stream) - limit) :]
    assert tail.text() == last.decode("utf-8", "backslashreplace")
    assert tail.dropped == len(stream) - len(last)


def test_the_tail_holds_no_more_than_it_keeps_of_a_long_stream_in_small_pieces() -> None:
    tail = Tail(1000)
    for _ in range(10_000):
        tail.feed(memoryview(b"0123456789"))
    assert sum(map(len, tail._chunks)) <= 1010
    assert tail.text() == "0123456789" * 100
    assert tail.dropped == 99_000
