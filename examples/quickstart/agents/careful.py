"""A good agent, as a program: its task is in task.json, its answer goes into result.json, and it traces its way."""

from __future__ import annotations

import itertools
import json
import os
import statistics


def answer(question: str, numbers: list[int]) -> float | None:
    if not numbers:
        return None  # there is no such number, and that is an answer
    match question:
        case "sum":
            return sum(numbers)
        case "median":
            return statistics.median(numbers)
        case "most common":
            return statistics.mode(numbers)
        case "mean":
            return statistics.mean(numbers)
        case "largest gap":
            ordered = sorted(numbers)
            return max(b - a for a, b in itertools.pairwise(ordered))
    return None


def trace(**event: object) -> None:
    """One JSON object a line; a shell could `echo` it."""
    with open(os.environ["SANDBOX_EXEC_TRACE"], "w") as pipe:
        pipe.write(json.dumps(event) + "\n")


def main() -> None:
    with open(f"{os.environ['SANDBOX_EXEC_IN']}/task.json") as file:
        task = json.load(file)
    trace(type="read", task=task["id"], numbers=len(task["input"]["numbers"]))
    found = answer(**task["input"])
    with open(f"{os.environ['SANDBOX_EXEC_OUT']}/result.json", "w") as file:
        json.dump({"answer": found}, file)
    trace(type="answered", answer=found)


if __name__ == "__main__":
    main()
