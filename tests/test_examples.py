"""The examples, run as a reader runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUICKSTART = {
    "counts": "success",
    "careless": "success",
    "in_shell": "success",
    "slow_but_decent": "task_timeout",
    "hangs": "task_timeout",
    "leaves_a_daemon": "success",
    "eats_memory": "memory_exceeded",
    "raises": "agent_error",
}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def cells(output: str) -> dict[str, list[str]]:
    """The rows of the table of outcomes, by agent."""
    words = [line.split() for line in output.splitlines()]
    return {name: rest for name, *rest in filter(None, words) if name in QUICKSTART}


@pytest.fixture(scope="module")
def quickstart() -> str:
    return run(sys.executable, "-W", "error", "examples/quickstart.py")


def test_the_quickstart_shows_each_agent_with_its_status_and_score(quickstart: str) -> None:
    table = cells(quickstart)
    assert {name: row[0] for name, row in table.items()} == QUICKSTART
    assert {name: row[2] for name, row in table.items() if row[2] != "-"} == {
        "counts": "3/3",
        "careless": "1/3",
        "in_shell": "3/3",
        "slow_but_decent": table["slow_but_decent"][2],  # how far it came is a matter of speed
        "leaves_a_daemon": "3/3",
    }


def test_the_quickstart_leaves_nothing_and_says_what_held_its_agents(quickstart: str) -> None:
    assert "0 daemons, 0 other processes" in quickstart
    assert re.search(r"^Held by [a-z-]+: file system", quickstart, re.MULTILINE)


def test_the_quickstart_fits_a_hundred_columns(quickstart: str) -> None:
    assert max(map(len, quickstart.splitlines())) <= 100


def test_the_readme_shows_what_the_quickstart_prints() -> None:
    assert {name: row[0] for name, row in cells((ROOT / "README.md").read_text()).items()} == QUICKSTART


def test_the_second_example_maps_awaits_and_cancels() -> None:
    output = run(sys.executable, "-W", "error", "examples/asyncio_and_map.py")
    assert re.findall(r"(\d+) is prime", output) == ["2", "3", "5", "7", "11"]
    assert "1: agent_error, StopIteration" in output
    assert "smallest factors of 91, 143, 221: 7 11 13" in output
    assert "cancelled, blame: run; it traced: ['waiting']" in output


def test_every_example_is_in_the_list_of_examples() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    files = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert files == set(re.findall(r"^\| \[([a-z_]+\.py)\]\(\1\)", listed, re.MULTILINE))


def test_the_quickstart_script_says_the_command_that_it_runs() -> None:
    stamps = [ROOT / ".venv" / name for name in ("installed", "installed-dev")]
    if not any(stamp.exists() for stamp in stamps):
        pytest.skip("would install packages: there is no .venv that scripts/test made")
    first, *rest = run("scripts/quickstart").splitlines()
    assert first == "$ .venv/bin/python examples/quickstart.py"
    assert cells("\n".join(rest)).keys() == QUICKSTART.keys()


@pytest.mark.parametrize("name", ["quickstart", "test", "_venv.sh"])
def test_a_script_is_sound_to_the_shell(name: str) -> None:
    subprocess.run(["bash", "-n", f"scripts/{name}"], cwd=ROOT, check=True)
    assert os.access(ROOT / "scripts" / name, os.X_OK) is not name.endswith(".sh")
