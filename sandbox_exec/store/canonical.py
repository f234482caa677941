"""One way to write a JSON value: the same value gives the same bytes."""

from __future__ import annotations

import json
from typing import Any


def canonical(value: Any) -> str:
    """Return JSON in ASCII, keys sorted, no spaces. Floats are the shortest text that reads back the same.

    1 and 1.0 are two values, as are 0.0 and -0.0: nothing is rounded or made equal.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
