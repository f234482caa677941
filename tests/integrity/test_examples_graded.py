"""The examples with graders, run as a reader runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integrity.trials import ended, leaks
from sandbox_exec.contracts import Status

ROOT = Path(__file__).parent.parent.parent
COMMAND = (sys.executable, "-W", "error", "-P", "-m", "sandbox_exec")


def shell(*words: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, cwd=cwd, timeout=100, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def said_in(file: Path) -> list[list[str]]:
    """The commands that an example's opening comment tells its reader to run."""
    lines = re.findall(r"^#   sandbox-exec (.*)$", file.read_text(), re.MULTILINE)
    return [line.split() for line in lines]


def copied(name: str, place: Path) -> Path:
    """An example of our own, so that what it makes is not left among the files of the project."""
    ignore = shutil.ignore_patterns("runs", "*.tar.gz", "__pycache__")
    shutil.copytree(ROOT / "examples" / name, place / "examples" / name, ignore=ignore)
    return place


# --- graded: pure Python, and an agent that cheats ---


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Where it ran, and what each of its commands printed, by the first word."""
    place = copied("graded", tmp_path_factory.mktemp("graded"))
    commands = said_in(place / "examples" / "graded" / "experiment.yaml")
    assert [words[0] for words in commands] == ["preflight", "run", "report", "grade"]
    return place, {words[0]: shell(*words, cwd=place) for words in commands}


def scores(folder: Path) -> dict[str, float | None]:
    return {name: end.grade.score if end.grade else None for name, end in ended(folder).items()}


def test_the_solver_scores_what_it_solved_and_the_cheat_nothing(graded: tuple[Path, dict[str, str]]) -> None:
    place, printed = graded
    found = ended(place / "runs" / "graded")
    assert {end.status for end in found.values()} == {Status.SUCCESS}
    due = {"solver/totals": 1.0, "cheat/totals": 0.0, "solver/longest": 0.5, "cheat/longest": 0.0}
    assert scores(place / "runs" / "graded") == due
    assert leaks(place / "runs" / "graded", '"due"') == []
    assert "completed: 8 of 8 trials committed" in printed["run"]


def test_preflight_has_nothing_against_it(graded: tuple[Path, dict[str, str]]) -> None:
    _, printed = graded
    assert "error" not in printed["preflight"].replace("0 errors", "")


def test_the_report_has_a_row_for_each_variant(graded: tuple[Path, dict[str, str]]) -> None:
    _, printed = graded
    assert re.search(r"^solver .*\b2/4\b", printed["report"], re.MULTILINE)
    assert re.search(r"^cheat .*\b0/4\b", printed["report"], re.MULTILINE)


def test_the_strict_grader_grades_the_same_answers_otherwise(graded: tuple[Path, dict[str, str]]) -> None:
    place, printed = graded
    again = place / "runs" / "graded" / "gradings" / "1"
    due = {"solver/totals": 1.0, "cheat/totals": 0.0, "solver/longest": 0.0, "cheat/longest": 0.0}
    assert scores(again) == due
    assert scores(place / "runs" / "graded")["solver/longest"] == 0.5
    assert "2 grades are others than before" in printed["grade"]
    lines = [json.loads(line) for line in shell("history", "graded", "--grading", "1", cwd=place).splitlines()]
    assert len(lines) == 8


# --- containers: an image for each task ---


def test_the_containers_example_counts_right_in_each_image(tmp_path: Path, busybox_image: str, engine: Any) -> None:
    place = copied("containers", tmp_path)
    commands = said_in(place / "examples" / "containers" / "experiment.yaml")
    tags = [words[-1] for words in commands if "--tag" in words]
    known = {tag for image in engine.images() for tag in image["RepoTags"] or ()}
    assert [words[0] for words in commands] == ["images", "images", "images", "freeze", "run"]
    try:
        for words in commands:
            printed = shell(*words, cwd=place)
    finally:
        for tag in set(tags) - known:  # what was there before stays
            engine.remove_image(tag, force=True)
    assert "completed: 4 of 4 trials committed" in printed
    (folder,) = (place / "runs").iterdir()
    found = ended(folder)
    assert {name: end.grade.score if end.grade else None for name, end in found.items()} == {
        "shell/lines": 1.0,
        "shell/words": 1.0,
    }
    assert len({end.image_id for end in found.values()}) == 2
