"""The shell's door: what is printed, where, and with which exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from shell import Done

import sandbox_exec
from sandbox_exec import cli, doctor
from sandbox_exec.containment import Cgroups, Containment
from sandbox_exec.contracts import Rung
from sandbox_exec.doctor import Diagnosis, RungReport, diagnose
from sandbox_exec.errors import (
    InvalidExperiment,
    InvalidValue,
    PreflightFailed,
    RunLocked,
    SandboxExecError,
    SandboxUnavailable,
)
from sandbox_exec.sandbox import provider

ROOT = Path(__file__).parent.parent
NOWHERE = "unix:///nonexistent/engine.sock"


Run = Callable[..., Done]


@pytest.fixture
def run(call: Run) -> Run:
    return call


@pytest.fixture
def diagnosis(monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    """A machine of which the doctor knows all without a look."""
    found = diagnose(lambda _: None, docker_host=NOWHERE)
    monkeypatch.setattr(doctor, "diagnose", lambda: found)
    return found


# --- as a program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["-m", "sandbox_exec"], ["-c", "from sandbox_exec.cli import main; main()"]])
def test_it_can_be_started_as_a_module_and_as_a_script(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"sandbox-exec {sandbox_exec.__version__}\n", "")


def test_the_doctor_examines_this_machine_without_a_word_on_stderr() -> None:
    command = [sys.executable, "-W", "error", "-P", "-m", "sandbox_exec", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"DOCKER_HOST": NOWHERE})
    assert done.stderr == ""
    assert Diagnosis.model_validate_json(done.stdout).chosen is provider.chosen().rung


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == sandbox_exec.__version__
    assert project["scripts"]["sandbox-exec"] == "sandbox_exec.cli:main"


def test_help_does_not_load_what_only_the_doctor_needs() -> None:
    code = (
        "import sys; from sandbox_exec import cli; sys.exit(bool({'docker', 'sandbox_exec.pool'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- usage -----------------------------------------------------------------------------------------


def test_help_has_examples(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    assert "sandbox-exec run experiment.yaml" in done.out


def test_without_a_command_help_is_shown_and_it_is_bad_usage(run: Run) -> None:
    done = run()
    assert done.code == 2
    assert "Commands:" in done.out + done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["operate"], "No such command"),
        (["doctor", "--loud"], "No such option"),
        (["doctor", "now"], "unexpected extra argument"),
        (["doctor", "--require"], "requires an argument"),
        (["doctor", "--require", "magic"], "'magic' is not one of namespaces+cgroup, namespaces, cgroup, subreaper"),
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_was_wrong(run: Run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidValue("12 parsecs is not a duration"), 2),
        (InvalidExperiment("no tasks"), 2),
        (PreflightFailed("no disk"), 3),
        (SandboxUnavailable("no sandbox"), 3),
        (RunLocked("another runs"), 5),
        (SandboxExecError("something else"), 5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_ours_is_one_message_and_an_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: SandboxExecError, code: int
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(doctor, "diagnose", fails)
    assert run("doctor") == Done(code, "", f"sandbox-exec: {error}\n")


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(doctor, "diagnose", fails)
    monkeypatch.setattr(sys, "argv", ["sandbox-exec", "doctor"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()


# --- doctor ----------------------------------------------------------------------------------------


def test_json_is_the_whole_diagnosis(run: Run, diagnosis: Diagnosis) -> None:
    done = run("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == diagnosis.model_dump(mode="json")


def test_people_see_every_rung_and_every_limit(run: Run, diagnosis: Diagnosis) -> None:
    done = run("doctor")
    assert (done.code, done.err) == (0, "")
    first = {line.split()[0] for line in done.out.splitlines() if line.strip()}
    assert {*(rung.rung for rung in diagnosis.rungs), *(limit.name for limit in diagnosis.limits), "docker"} <= first
    assert f"A Pool takes here: {diagnosis.chosen}" in done.out


def test_without_a_terminal_there_are_no_colours_no_lines_and_a_hundred_columns(
    run: Run, diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = run("doctor").out.splitlines()
    assert 80 < max(map(len, lines)) <= 100
    assert all(line.isascii() and line == line.rstrip() for line in lines)
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_there_are_colours_and_at_most_a_hundred_columns(
    run: Run, diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    out = run("doctor").out
    assert "\x1b[32m" in out
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in out.splitlines()) <= 100


def test_advice_is_given_once_with_all_that_it_is_good_for(
    run: Run, diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = tuple(limit.model_copy(update={"to_get": "be root"}) for limit in diagnosis.limits[:2])
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis.model_copy(update={"limits": limits}))
    out = run("doctor").out
    assert re.search(r"^memory, pids +be root$", out, re.MULTILINE)
    assert out.count("be root") == 1


def test_what_other_programs_said_is_shown_and_not_obeyed(
    run: Run, diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = RungReport(rung=Rung.CGROUP, available=False, chosen=False, why_not="[red]:bug:[/]", how_found="seen")
    changed = diagnosis.model_copy(update={"rungs": (rung,), "notes": ("[bold]note",)})
    monkeypatch.setattr(doctor, "diagnose", lambda: changed)
    out = run("doctor").out
    assert "seen: [red]:bug:[/]" in out
    assert "Note: [bold]note" in out


def test_a_machine_that_gives_nothing_is_exit_code_3_after_the_diagnosis(
    run: Run, diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    ill = diagnosis.model_copy(update={"chosen": None, "limits": ()})
    monkeypatch.setattr(doctor, "diagnose", lambda: ill)
    for arguments in (["doctor"], ["doctor", "--json"]):
        done = run(*arguments)
        assert done.code == 3
        assert "root-namespaces" in done.out
        assert done.err.startswith("sandbox-exec: no sandbox can be had here")


@pytest.mark.parametrize(
    ("rung", "require", "code"),
    [
        (Rung.USER_NAMESPACES, "namespaces", 0),
        (Rung.USER_NAMESPACES, "namespaces+cgroup", 3),
        (Rung.SUBREAPER, "namespaces", 3),
        (Rung.SUBREAPER, "subreaper", 0),
        (Rung.PROCESS_GROUP, "process-group", 0),
    ],
)
def test_a_machine_that_gives_less_than_is_required_is_exit_code_3(
    run: Run, diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch, rung: Rung, require: str, code: int
) -> None:
    monkeypatch.setattr(provider, "chosen", lambda: Containment(rung, Cgroups()))
    done = run("doctor", "--require", require)
    assert done.code == code
    assert "A Pool takes here" in done.out
    assert bool(code) is done.err.startswith(f"sandbox-exec: require='{require}' cannot be met")
