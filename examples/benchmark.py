"""A benchmark in Python: an environment, a simulated user, two agents, and an evaluator that knows what was wanted.

    .venv/bin/python examples/benchmark.py [RUNS]

RUNS is the folder for the run; by default a temporary one. Each trial runs in a sandbox. Its evaluation runs in another
one, and only there is what a task says in "evaluation". One task's shop is broken, and the report says that it was the
shop, and not the agent.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from sandbox_exec import Benchmark

Task = dict[str, Any]  # id, input, seed, repeat

# --- what the agents deal with ---------------------------------------------------------------------------


class Shop:
    """The environment. What its methods raise is its own fault, whoever called them."""

    def __init__(self, shelf: list[str], prices: dict[str, int]) -> None:
        self.shelf, self.prices = shelf, prices
        self.sold: list[dict[str, Any]] = []

    def buy(self, item: str) -> None:
        self.sold.append({"item": item, "price": self.prices[item]})

    def gather_traces(self) -> Any:
        return {"sold": self.sold}

    def gather_config(self) -> Any:
        return {"shelf": self.shelf}


class Customer:
    """The simulated user, who says what is wanted when asked."""

    def __init__(self, wish: str) -> None:
        self.wish = wish
        self.asked = 0

    def ask(self, question: str) -> str:
        self.asked += 1
        return f"I would like: {self.wish}"

    def gather_traces(self) -> Any:
        return {"asked": self.asked}


class Asking:
    """An agent that finds out what is wanted."""

    def shop(self, shop: Shop, customer: Customer) -> str:
        wish = customer.ask("What can I do for you?").removeprefix("I would like: ")
        item = next(item for item in shop.shelf if wish in item)
        shop.buy(item)
        return item


class Guessing:
    """An agent that buys whatever comes first."""

    def shop(self, shop: Shop, customer: Customer) -> str:
        shop.buy(shop.shelf[0])
        return shop.shelf[0]


# --- the benchmark ---------------------------------------------------------------------------------------


class Shopping(Benchmark):
    def setup_environment(self, task: Task) -> Shop:
        return Shop(task["input"]["shelf"], task["input"]["prices"])

    def setup_user(self, task: Task, environment: Shop) -> Customer:
        return Customer(task["input"]["wish"])

    def setup_agents(self, task: Task, environment: Shop, user: Customer) -> Any:
        return Asking() if self.agent_data["asks"] else Guessing()

    def run_agents(self, task: Task, agents: dict[str, Any], environment: Shop, user: Customer) -> str:
        answer: str = agents["agent"].shop(environment, user)
        return answer

    def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: dict[str, Any]) -> dict[str, Any]:
        right = answer == task["evaluation"]
        return {"score": float(right), "passed": right, "questions": questions(traces)}


def questions(traces: Mapping[str, Any]) -> Any:
    """How often the customer was asked. The agent's process says so, and an agent can make it say anything."""
    said = traces.get("user", {}).get("user")
    return said.get("asked") if isinstance(said, dict) else None


TASKS = [
    {
        "id": "tea",
        "input": {"shelf": ["green tea", "cup"], "prices": {"green tea": 3, "cup": 5}, "wish": "tea"},
        "evaluation": "green tea",
    },
    {
        "id": "lamp",
        "input": {"shelf": ["rug", "desk lamp"], "prices": {"rug": 40, "desk lamp": 20}, "wish": "lamp"},
        "evaluation": "desk lamp",
    },
    {
        "id": "ghost",  # of the lamp, the shop has lost the price
        "input": {"shelf": ["rug", "ghost lamp"], "prices": {"rug": 40}, "wish": "lamp"},
        "evaluation": "ghost lamp",
    },
]
AGENTS = {"asking": {"data": {"asks": True}}, "guessing": {"data": {"asks": False}}}


def main(runs: str) -> None:
    reports = Shopping().run(TASKS, variants=AGENTS, max_workers=2, sandbox={"memory": "128MiB"}, runs=runs)
    print("task   agent     status             score  questions")
    for report in reports:
        score = f"{report.eval['score']:g}" if report.eval is not None else "-"
        asked = questions(report.traces)
        why = f"  {report.error.component}: {report.error.type} {report.error.message}" if report.error else ""
        print(f"  {report.task_id:<6} {report.variant_id:<9} {report.status:<18} {score:>3}  {asked}{why}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
