"""Sizes and durations as people write them: "512MiB", "1m30s", or a plain number.

Upper and lower case mean the same. Bare "K", "M" and "G" are refused: some tools read them as 1000, others as
1024. Digits are ASCII, without separators or exponents.
"""

from __future__ import annotations

import math
import os
import re
from fractions import Fraction
from typing import Final, NoReturn

from sandbox_exec.errors import InvalidValue

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4

MAX_BYTES: Final = 2**63 - 1  # what the kernel's limits can hold
MAX_SECONDS: Final = 1e9  # about 31 years: beyond it, timeouts overflow in system calls

_MAX_TEXT: Final = 64  # longer text is no number a person wrote, and big integers are slow to parse

_BYTE_UNITS: Final = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_SECOND_UNITS: Final = {
    "d": Fraction(86400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 1000),
}

_NUMBER: Final = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIZE: Final = re.compile(_NUMBER + r"[ ]*([a-z]*)")
_DURATION: Final = re.compile(rf"(?:{_NUMBER}[ ]*(?:ms|[dhms])[ ]*)+")
_DURATION_PART: Final = re.compile(_NUMBER + r"[ ]*(ms|[dhms])")

_BYTES_ALLOWED: Final = (
    "a whole number of bytes (1024), or a number with one of B, kB, MB, GB, TB (powers of 1000), "
    'KiB, MiB, GiB, TiB (powers of 1024), such as "512MiB"'
)
_SECONDS_ALLOWED: Final = 'a number of seconds (30, 1.5), or numbers with d, h, m, s, ms, such as "250ms" or "1m30s"'


def parse_bytes(value: object) -> int:
    """Return a number of bytes from "512MiB", "64 kB", "1024" or a whole number.

    A fraction of a byte that a unit leaves ("1.1GiB") is cut off, so a ceiling is never more than was asked.
    Raises `InvalidValue` for anything else, and for sizes below 0 or above 2**63 - 1.
    """
    if type(value) is int and 0 <= value <= MAX_BYTES:  # nearly always: a fraction is dear
        return value
    size = _bytes_from_text(value) if isinstance(value, str) else _number(value, "size", _BYTES_ALLOWED)
    if size.denominator != 1:
        _refuse("size", value, _BYTES_ALLOWED, "not a whole number of bytes")
    if size > MAX_BYTES:
        _refuse("size", value, _BYTES_ALLOWED, "larger than 2**63 - 1 bytes")
    return int(size)


def parse_seconds(value: object) -> float:
    """Return seconds from "30s", "1m30s", "250ms", "2h", "1.5" or a number.

    In a compound, units go from large to small and none twice. Raises `InvalidValue` for anything else, and
    for durations below 0 or above 1e9 seconds.
    """
    if type(value) in (int, float) and 0 <= value <= MAX_SECONDS:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    seconds = _seconds_from_text(value) if isinstance(value, str) else _number(value, "duration", _SECONDS_ALLOWED)
    if seconds > MAX_SECONDS:
        _refuse("duration", value, _SECONDS_ALLOWED, "longer than 1e9 seconds")
    return float(seconds)


def format_bytes(size: int) -> str:
    """Return a size for people, such as "512 MiB": rounded to three digits or more."""
    if size < 0:
        _refuse("size", size, _BYTES_ALLOWED, "below 0")
    if size < KIB:
        return f"{size} B"
    for unit, factor in (("KiB", KIB), ("MiB", MIB), ("GiB", GIB)):
        if round(size / factor) < 1024:
            return f"{_three_digits(size / factor)} {unit}"
    return f"{_three_digits(size / TIB)} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration for people: "2.35 ms", "1.5 s", "1m 30s", "2h 5m". Rounded to what the form shows."""
    if not 0 <= seconds < math.inf:
        _refuse("duration", seconds, _SECONDS_ALLOWED, "not a finite number >= 0")
    if seconds == 0:
        return "0 s"
    # Each step asks about the rounded value, so that 59.999 becomes "1m" and not "60 s".
    if round(seconds * 1000) < 1000:
        return f"{_three_digits(seconds * 1000)} ms"
    if round(seconds, 2) < 60:
        return f"{_plain(seconds, 2)} s"
    if round(seconds) < 3600:
        return _compound(round(seconds), "m", "s")
    return _compound(round(seconds / 60), "h", "m")


def _bytes_from_text(text: str) -> Fraction:
    match = _SIZE.fullmatch(_folded(text, "size", _BYTES_ALLOWED))
    if match is None:
        _refuse("size", text, _BYTES_ALLOWED)
    number, unit = match.groups()
    if not unit:
        return Fraction(number)
    if unit not in _BYTE_UNITS:
        _refuse("size", text, _BYTES_ALLOWED, f"the unit {unit!r} is not known")
    return Fraction(int(Fraction(number) * _BYTE_UNITS[unit]))


def _seconds_from_text(text: str) -> Fraction:
    folded = _folded(text, "duration", _SECONDS_ALLOWED)
    if re.fullmatch(_NUMBER, folded):
        return Fraction(folded)
    if _DURATION.fullmatch(folded) is None:
        _refuse("duration", text, _SECONDS_ALLOWED)
    parts = [(Fraction(number), _SECOND_UNITS[unit]) for number, unit in _DURATION_PART.findall(folded)]
    scales = [scale for _, scale in parts]
    if scales != sorted(set(scales), reverse=True):
        _refuse("duration", text, _SECONDS_ALLOWED, "units go from large to small, none twice")
    return sum((number * scale for number, scale in parts), Fraction(0))


def _folded(text: str, what: str, allowed: str) -> str:
    if len(text) > _MAX_TEXT:
        _refuse(what, text, allowed, f"longer than {_MAX_TEXT} characters")
    return text.strip(" ").lower()


def _number(value: object, what: str, allowed: str) -> Fraction:
    # bool is an int in Python, but `memory=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(what, value, allowed)
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(what, value, allowed, "not finite")
    if value < 0:
        _refuse(what, value, allowed, "below 0")
    return Fraction(value)


def _refuse(what: str, value: object, allowed: str, why: str = "") -> NoReturn:
    raise InvalidValue(f"{_shown(value)} is not a {what}{f' ({why})' if why else ''}; allowed: {allowed}")


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except Exception:  # an object whose repr fails, or an integer with too many digits to print
        shown = f"a value of type {type(value).__name__}"
    return shown if len(shown) <= _MAX_TEXT else shown[:_MAX_TEXT] + "..."


def _three_digits(number: float) -> str:
    return _plain(number, 2 if number < 10 else 1 if number < 100 else 0)


def _plain(number: float, decimals: int) -> str:
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _compound(total: int, large: str, small: str) -> str:
    first, rest = divmod(total, 60)
    return f"{first}{large} {rest}{small}" if rest else f"{first}{large}"


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
