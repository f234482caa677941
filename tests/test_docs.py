"""What the documents say is held to what the code does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_exec.contracts import STATUS_TABLE, Limits, Rung
from sandbox_exec.guest import kernel
from sandbox_exec.units import format_bytes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
THREAT_MODEL = (ROOT / "docs" / "threat-model.md").read_text()
NOT_OURS = {".venv", ".git", ".pytest_cache", ".hypothesis", "node_modules", "build", "dist"}


def documents() -> list[Path]:
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(path for path in found if not NOT_OURS & set(path.parts))


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def rows(text: str, header: str) -> Iterator[list[str]]:
    """The cells of the table that begins with this header."""
    lines = iter(text[text.index(header) :].splitlines()[2:])
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- links and paths -------------------------------------------------------------------------------


def link_faults(path: Path, root: Path = ROOT) -> list[str]:
    """Relative links that lead nowhere. Links inside of code are not links."""
    text = re.sub(r"^```.*?^```", "", (root / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    faults = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (root / path.parent / file).resolve() if file else root / path
        if not there.exists():
            faults.append(f"{path}: {target} is not there")
        elif anchor and anchor not in anchors(there.read_text()):
            faults.append(f"{path}: {target} has no such heading")
    return faults


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=str)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert link_faults(path) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One two\n[x](b.md) [y](#one-two) [z](#three) [w](https://example.org)")
    assert link_faults(Path("a.md"), tmp_path) == ["a.md: b.md is not there", "a.md: #three has no such heading"]


@pytest.mark.parametrize("path", documents(), ids=str)
def test_every_script_that_is_named_exists_and_can_be_run(path: Path) -> None:
    for name in set(re.findall(r"\bscripts/[a-z_-]+\b", (ROOT / path).read_text())):
        assert os.access(ROOT / name, os.X_OK), name


def test_the_documents_that_users_are_promised_are_there() -> None:
    wanted = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/threat-model.md", "docs/architecture.md"}
    assert wanted <= {path.as_posix() for path in documents()}


# --- README ----------------------------------------------------------------------------------------


def test_the_readme_has_code_to_run() -> None:
    assert len(fenced(README, "python")) >= 2


@pytest.mark.parametrize("number", range(len(fenced(README, "python"))))
def test_the_code_in_the_readme_runs(number: int, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(fenced(README, "python")[number])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_opens_with_a_sentence_and_the_two_commands() -> None:
    title, sentence, commands, *_ = README.split("\n\n")
    assert title == "# sandbox-exec"
    assert sentence.endswith(".")
    assert re.findall(r"^    (scripts/\w+)", commands, re.MULTILINE) == ["scripts/quickstart", "scripts/test"]


def test_the_status_table_of_the_readme_is_that_of_the_code() -> None:
    said = [(names(status), blame) for status, blame, _ in rows(README, "| status | blame | when |")]
    assert said == [([str(status)], str(row.blame or "-")) for status, row in STATUS_TABLE.items()]


def test_the_limits_table_of_the_readme_is_that_of_the_code() -> None:
    said = {name: names(default) for cell, default, _ in rows(README, "| limit | default |") for name in names(cell)}
    assert said == {name: [_shown(name, field.default)] for name, field in Limits.model_fields.items()}


def _shown(name: str, default: object) -> str:
    if name in ("memory", "disk", "stdout", "stderr", "trace", "result") and isinstance(default, int):
        return format_bytes(default)
    return str(default)


# --- threat model ----------------------------------------------------------------------------------


def test_the_threat_model_promises_something_for_every_rung() -> None:
    header = next(line for line in THREAT_MODEL.splitlines() if line.startswith("| |"))
    assert [cell.strip() for cell in header.strip("|").split("|")][1:] == list(Rung)
    for rung in Rung:
        assert f"**{rung}.**" in THREAT_MODEL


def test_the_threat_model_names_every_system_call_that_is_refused() -> None:
    section = THREAT_MODEL[THREAT_MODEL.index("## System calls") : THREAT_MODEL.index("## Memory")]
    said = set(re.findall(r"\w+", section))
    refused = {name for name in kernel._NR if name not in kernel._ALLOWED}
    assert "keyctl" in refused
    assert refused - said == set()
