"""An agent in a hurry, as a function: right about the usual, and it raises on the rest."""

from __future__ import annotations

from typing import Any

HOW = {
    "sum": sum,
    "median": lambda numbers: sorted(numbers)[len(numbers) // 2],
    "most common": lambda numbers: max(numbers, key=numbers.count),
    "mean": lambda numbers: sum(numbers) / len(numbers),  # of nothing: ZeroDivisionError
}


def solve(task: dict[str, Any]) -> dict[str, Any]:
    how = HOW[task["input"]["question"]]  # never heard of gaps: KeyError, also at the second attempt
    return {"answer": how(task["input"]["numbers"])}
