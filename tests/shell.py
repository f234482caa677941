"""How a command that the fixture `call` ran came out."""

from __future__ import annotations

from typing import NamedTuple


class Done(NamedTuple):
    code: int
    out: str
    err: str
