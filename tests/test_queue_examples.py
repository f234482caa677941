"""The examples of queues and lanes, run as a reader runs them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shell import Done

EXAMPLES = Path(__file__).parent.parent / "examples"


class Shell:
    """The command line, in a folder of its own."""

    def __init__(self, call: Callable[..., Done]) -> None:
        self._call = call

    def __call__(self, *words: str) -> str:
        done = self._call(*words)
        assert done.code == 0, done
        return done.out

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def history(self, run_id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self("history", run_id).splitlines()]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Done]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(call)


def test_queues(shell: Shell) -> None:
    summary = shell.json("run", str(EXAMPLES / "queues/experiment.yaml"), "--run-id", "queues")
    assert summary["by_status"] == {"success": 6, "agent_error": 1, "skipped": 1}
    order = [line["task"] for line in shell.history("queues")]
    assert order[:3] == ["warm-up", "release", "notes"]
    assert order[-1] == "nightly"

    added = shell.json("submit", "queues", str(EXAMPLES / "queues/more.jsonl"))
    assert (added["tasks"], added["merged"]) == (["urgent", "after-usual"], {"usual-again": "usual"})
    assert shell.json("continue", "queues")["by_status"]["success"] == 8
    assert [line["task"] for line in shell.history("queues")][-2:] == ["urgent", "after-usual"]
    (dead,) = shell.json("dead", "list", "queues")
    assert (dead["task_id"], len(dead["attempts"])) == ("broken", 2)
    assert '"tasks": 2' in shell("events", "queues", "--kind", "submitted", "--json")


def test_a_queue_of_ones_own_changes_when_trials_run_and_not_the_history(shell: Shell, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "queues", tmp_path / "own")
    file = tmp_path / "own/experiment.yaml"
    for run_id, order in (("plain", "sequential"), ("own", "shortest:ShortestFirst")):
        file.write_text(file.read_text().replace("order: priority", f'order: "{order}"'))
        shell("run", str(file), "--run-id", run_id, "--workers", "1")
        file.write_text(file.read_text().replace(f'order: "{order}"', "order: priority"))
    assert shell.history("own") == shell.history("plain")
    begun = [json.loads(line)["data"] for line in shell("events", "own", "--kind", "assigned", "--json").splitlines()]
    lengths = [len(one["trial_id"].split(".")[1]) for one in begun if one["attempt"] == 1]
    assert lengths[0] == len("warm-up")  # it goes first, whatever the queue says
    free = [length for length in lengths[1:] if length != len("notes")]  # that one waits for another
    assert free == sorted(free)


def test_lanes(shell: Shell) -> None:
    summary = shell.json("run", str(EXAMPLES / "lanes/experiment.yaml"), "--run-id", "lanes")
    assert summary["by_status"] == {"success": 12}
    lanes = shell.json("status", "lanes")["lanes"]
    assert lanes["large-provider"]["turned_away"] == 0
    small = lanes["small-provider"]
    assert small["tokens_per_trial"]["busy"] < 150  # what trials traced
    refused = [
        json.loads(line)["data"] for line in shell("events", "lanes", "--kind", "rate_limited", "--json").splitlines()
    ]
    assert small["turned_away"] == len(refused)
    assert all(one["trial_id"].startswith("busy.") for one in refused)
    assert all(len(line["attempts"]) == 1 for line in shell.history("lanes"))


def test_adaptive(shell: Shell) -> None:
    summary = shell.json("run", str(EXAMPLES / "adaptive/experiment.yaml"), "--run-id", "adaptive")
    assert summary["status"] == "completed"
    novice, expert = shell.json("status", "adaptive")["queue"]
    for found, ability in ((novice, -1.0), (expert, 1.5)):
        assert found["ended"] == "standard_error"
        assert found["tasks"] < 30
        assert abs(found["ability"] - ability) < 2 * found["standard_error"]


def test_every_folder_here_is_run_by_a_test() -> None:
    found = {entry.name for entry in os.scandir(EXAMPLES) if entry.is_dir()}
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert {name for name in found if f"{name}/" not in tests and f'"{name}"' not in tests} == set()
