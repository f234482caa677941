"""The examples, run as a reader runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
IS_INSTALLED = any((ROOT / ".venv" / name).exists() for name in ("installed", "installed-dev"))
QUICKSTART = {
    "variant": ["success", "agent_error", "task_timeout", "memory_exceeded"],
    "careful": ["10", "-", "-", "-"],
    "sloppy": ["6", "4", "-", "-"],
    "wild": ["6", "-", "2", "2"],
}
POOL = {
    "counts": "success",
    "careless": "success",
    "in_shell": "success",
    "slow_but_decent": "task_timeout",
    "hangs": "task_timeout",
    "leaves_a_daemon": "success",
    "eats_memory": "memory_exceeded",
    "raises": "agent_error",
}


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def cells(output: str, names: Collection[str]) -> dict[str, list[str]]:
    """The rows of a table that begin with these names."""
    words = [line.split() for line in output.splitlines()]
    return {name: rest for name, *rest in filter(None, words) if name in names}


@dataclass(frozen=True)
class Example:
    output: Future[str]
    folder: Path  # for what it leaves


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Example]:
    """By name. They run beside each other, and have ended when the first test begins."""
    folder = tmp_path_factory.mktemp("examples")
    python = (sys.executable, "-W", "error")
    experiment = ROOT / "examples" / "quickstart" / "experiment.yaml"
    with ThreadPoolExecutor(2) as threads:
        started = {
            "quickstart": threads.submit(run, *python, "-P", "-m", "sandbox_exec", "run", str(experiment), cwd=folder),
            "python_api": threads.submit(run, *python, "examples/python_api.py", str(folder)),
            "pool": threads.submit(run, *python, "examples/pool.py"),
            "asyncio_and_map": threads.submit(run, *python, "examples/asyncio_and_map.py"),
        }
        if IS_INSTALLED:
            started["script"] = threads.submit(run, "scripts/quickstart")
    return {name: Example(output, folder) for name, output in started.items()}


# --- quickstart: a run from the shell ---


@pytest.fixture(scope="module")
def quickstart(examples: dict[str, Example]) -> tuple[str, Path]:
    """What it prints, and the run's folder."""
    output = examples["quickstart"].output.result()
    (folder,) = (examples["quickstart"].folder / "runs").iterdir()
    return output, folder


def test_the_quickstart_shows_how_the_trials_of_each_variant_ended(quickstart: tuple[str, Path]) -> None:
    output, folder = quickstart
    assert cells(output, QUICKSTART) == QUICKSTART
    assert output.splitlines()[0] == f"runs/{folder.name}: 30 trials, 4 at once"
    assert output.splitlines()[-1].startswith("completed: 30 of 30 trials committed")


def test_the_answers_of_the_quickstart_are_in_its_folder(quickstart: tuple[str, Path]) -> None:
    _, folder = quickstart
    found = {path.parent.parent.name.rpartition("-")[0]: path.read_text() for path in folder.rglob("result.json")}
    assert found["careful.largest-gap.0"] == '{"answer":3}\n'
    assert found["careful.mean-of-nothing.1"] == '{"answer":null}\n'
    assert found["sloppy.median.0"] == '{"answer":3}\n'
    assert "sloppy.mean-of-nothing.0" not in found
    traces = [path.read_text() for path in folder.glob("trials/wild.median.*/attempt-1/trace.jsonl")]
    assert all('"hanging"' in trace for trace in traces)
    assert len(traces) == 2
    assert len([*folder.glob("trials/sloppy.largest-gap.*/attempt-2")]) == 2  # the task allows one retry


def test_the_readme_shows_what_the_quickstart_prints(quickstart: tuple[str, Path]) -> None:
    output, _ = quickstart
    shown = README[README.index("$ .venv/bin/sandbox-exec run") :].partition("```")[0]
    assert cells(shown, QUICKSTART) == QUICKSTART
    printed = {re.sub(r" +[\d.]+ m?s ", " ", line) for line in output.splitlines()}
    trials = [re.sub(r" +[\d.]+ m?s ", " ", line) for line in shown.splitlines() if "/30  " in line]
    assert len(trials) > 5
    assert set(trials) <= printed


@pytest.mark.skipif(not IS_INSTALLED, reason="would install packages: there is no .venv that scripts/test made")
def test_the_quickstart_script_says_the_command_that_it_runs(examples: dict[str, Example]) -> None:
    first, second, *rest = examples["script"].output.result().splitlines()
    assert first == "$ .venv/bin/sandbox-exec run examples/quickstart/experiment.yaml"
    assert cells("\n".join(rest), QUICKSTART) == QUICKSTART
    shutil.rmtree(ROOT / second.partition(":")[0])


# --- the others ---


@pytest.fixture(scope="module")
def pool(examples: dict[str, Example]) -> str:
    return examples["pool"].output.result()


def test_the_pool_shows_each_agent_with_its_status_and_score(pool: str) -> None:
    table = cells(pool, POOL)
    assert {name: row[0] for name, row in table.items()} == POOL
    assert {name: row[2] for name, row in table.items() if row[2] != "-"} == {
        "counts": "3/3",
        "careless": "1/3",
        "in_shell": "3/3",
        "slow_but_decent": table["slow_but_decent"][2],  # how far it came is a matter of speed
        "leaves_a_daemon": "3/3",
    }


def test_the_pool_leaves_nothing_and_says_what_held_its_agents(pool: str) -> None:
    assert "0 daemons, 0 other processes" in pool
    assert re.search(r"^Held by [a-z-]+: file system", pool, re.MULTILINE)


def test_the_pool_fits_a_hundred_columns(pool: str) -> None:
    assert max(map(len, pool.splitlines())) <= 100


def test_the_readme_shows_what_the_pool_prints() -> None:
    assert {name: row[0] for name, row in cells(README, POOL).items()} == POOL


def test_the_python_example_is_interrupted_and_continued(examples: dict[str, Example]) -> None:
    output = examples["python_api"].output.result()
    first, second = output.split("continue:\n")
    committed = re.search(r"interrupted \(seen enough for now\): (\d+) of 12 trials", first)
    assert committed is not None
    assert 4 <= int(committed[1]) < 12
    trial = re.compile(r"^  (three|four|none|many) +(careful|sloppy|sleepy) +(\w+)", re.MULTILINE)
    both = trial.findall(first) + trial.findall(second)
    assert len(trial.findall(first)) == int(committed[1])
    assert [task for task, _, _ in both] == [task for task in ("three", "four", "none", "many") for _ in range(3)]
    assert {(task, agent): how for task, agent, how in both if how != "success"} == {
        ("none", "sloppy"): "agent_error",
        ("many", "sleepy"): "task_timeout",
    }
    assert "completed: 12 of 12 trials" in second
    assert [*examples["python_api"].folder.glob("medians-*/run.db")]


def test_the_second_example_of_a_pool_maps_awaits_and_cancels(examples: dict[str, Example]) -> None:
    output = examples["asyncio_and_map"].output.result()
    assert re.findall(r"(\d+) is prime", output) == ["2", "3", "5", "7", "11"]
    assert "1: agent_error, StopIteration" in output
    assert "smallest factors of 91, 143, 221: 7 11 13" in output
    assert "cancelled, blame: run; it traced: ['waiting']" in output


def test_every_example_is_in_the_list_of_examples() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    found = {path.name for path in (ROOT / "examples").iterdir()} - {"README.md", "__pycache__"}
    assert found == set(re.findall(r"^\| \[([a-z_]+(?:\.py)?)\]\(", listed, re.MULTILINE))


@pytest.mark.parametrize("name", ["quickstart", "test", "_venv.sh"])
def test_a_script_is_sound_to_the_shell(name: str) -> None:
    subprocess.run(["bash", "-n", f"scripts/{name}"], cwd=ROOT, check=True)
    assert os.access(ROOT / "scripts" / name, os.X_OK) is not name.endswith(".sh")
