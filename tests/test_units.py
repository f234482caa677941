from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec.errors import InvalidValue, SandboxExecError
from sandbox_exec.units import (
    GIB,
    KIB,
    MAX_BYTES,
    MAX_SECONDS,
    MIB,
    TIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)

unhurried = settings(deadline=None)  # a busy machine is no fault of the code


@pytest.mark.parametrize(
    ("given_value", "size"),
    [
        (0, 0),
        (1024, 1024),
        (1e9, 10**9),
        ("0", 0),
        ("1024", 1024),
        ("7B", 7),
        ("64 kB", 64_000),
        ("1MB", 10**6),
        ("2GB", 2 * 10**9),
        ("3TB", 3 * 10**12),
        ("1KiB", KIB),
        ("512MiB", 512 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        (".5TiB", TIB // 2),
        ("2.TiB", 2 * TIB),
        ("  8  MiB  ", 8 * MIB),
        ("512mib", 512 * MIB),
        ("64KB", 64_000),
        ("1.1GiB", 1_181_116_006),  # 1 181 116 006.4: a ceiling is never more than was asked
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_a_size_is_read_as_people_write_it(given_value: object, size: int) -> None:
    parsed = parse_bytes(given_value)
    assert parsed == size
    assert type(parsed) is int


@pytest.mark.parametrize(
    ("given_value", "seconds"),
    [
        (0, 0.0),
        (30, 30.0),
        (1.5, 1.5),
        ("1.5", 1.5),
        ("30s", 30.0),
        ("250ms", 0.25),
        ("0.1s", 0.1),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("5m", 300.0),
        ("1m30s", 90.0),
        ("1h 2m 3s 4ms", 3723.004),
        ("1h30m", 5400.0),
        ("90 S", 90.0),
        (MAX_SECONDS, MAX_SECONDS),
    ],
)
def test_a_duration_is_read_as_people_write_it(given_value: object, seconds: float) -> None:
    parsed = parse_seconds(given_value)
    assert parsed == seconds
    assert type(parsed) is float


NEITHER = [
    *("", " ", "lots", "-1", "-1s", "+1", "1e3", "0x10", "1_000", "1,5", "1.2.3", ".", "nan", "inf", "None"),
    *("\u0661", "1\n", "9" * 5000, b"1"),  # a digit that is not ASCII; too long; not text
    *(-1, -0.5, math.nan, math.inf, -math.inf, 10**400, Decimal(1), True, False, None, [1]),
]
NO_SIZE = ["1.5", 1.5, "512M", "1K", "1Gi", "1s", "5 foo", "9e9TB", "9999999TiB", MAX_BYTES + 1]
NO_DURATION = ["1x", "30s1m", "1s1s", "1m30", "s", "1MB", "1min", "99999999999", 1e10]


@pytest.mark.parametrize("value", [*NEITHER, *NO_SIZE])
def test_what_is_no_size_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(InvalidValue, match="512MiB") as caught:
        parse_bytes(value)
    assert isinstance(caught.value, SandboxExecError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [*NEITHER, *NO_DURATION])
def test_what_is_no_duration_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(InvalidValue, match="1m30s"):
        parse_seconds(value)


def test_a_refusal_shows_what_stood_there_but_not_all_of_a_flood() -> None:
    with pytest.raises(InvalidValue, match=r"^'12 parsecs' is not a size \(the unit 'parsecs' is not known\)"):
        parse_bytes("12 parsecs")
    with pytest.raises(InvalidValue) as caught:
        parse_seconds("x" * 10**6)
    assert len(str(caught.value)) < 400


def test_a_value_that_cannot_be_shown_is_still_refused() -> None:
    class Unshowable:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(InvalidValue, match="a value of type Unshowable is not a size"):
        parse_bytes(Unshowable())


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * MIB, "512 MiB"),
        (MIB - 1, "1 MiB"),
        (GIB - 1, "1 GiB"),
        (10 * GIB + GIB // 4, "10.2 GiB"),
        (5000 * TIB, "5000 TiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00235, "2.35 ms"),
        (0.25, "250 ms"),
        (0.9999, "1 s"),
        (1.5, "1.5 s"),
        (59.999, "1m"),
        (90, "1m 30s"),
        (3599.9, "1h"),
        (7500, "2h 5m"),
        (90000, "25h"),
    ],
)
def test_a_duration_is_shown_in_the_units_that_fit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_only_a_real_duration_is_shown(value: float) -> None:
    with pytest.raises(InvalidValue):
        format_seconds(value)


def test_only_a_real_size_is_shown() -> None:
    with pytest.raises(InvalidValue):
        format_bytes(-1)


@unhurried
@given(st.integers(0, MAX_BYTES // 2))
def test_a_shown_size_reads_back_as_itself_within_rounding(size: int) -> None:
    shown = format_bytes(size)
    back = parse_bytes(shown)
    assert abs(back - size) <= size * 0.006
    assert format_bytes(back) == shown


@unhurried
@given(st.floats(0, MAX_SECONDS * 0.99))
def test_a_shown_duration_reads_back_as_itself_within_rounding(seconds: float) -> None:
    shown = format_seconds(seconds)
    back = parse_seconds(shown)
    assert math.isclose(back, seconds, rel_tol=0.01, abs_tol=1e-5)
    assert format_seconds(back) in (shown, "0 s")


@unhurried
@given(st.integers(0, MAX_BYTES))
def test_a_number_is_the_same_size_as_its_digits(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size} B") == size


# Text that nearly is one, as arbitrary text hardly ever is.
NEARLY = st.text("0123456789. -+e_kKmMgGtTiIbBsShHdD\u0130\u2160\n\0", max_size=12)
ANYTHING = st.one_of(
    st.text(),
    NEARLY,
    st.binary(),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.integers()),
)


@unhurried
@given(ANYTHING)
def test_anything_is_either_a_size_or_refused(value: object) -> None:
    try:
        size = parse_bytes(value)
    except InvalidValue:
        return
    assert type(size) is int
    assert 0 <= size <= MAX_BYTES


@unhurried
@given(ANYTHING)
def test_anything_is_either_a_duration_or_refused(value: object) -> None:
    try:
        seconds = parse_seconds(value)
    except InvalidValue:
        return
    assert type(seconds) is float
    assert 0 <= seconds <= MAX_SECONDS
