"""Each finding of preflight, by an experiment that is broken in one way; and none, of one that is not."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from shell import Done

from sandbox_exec import artifacts
from sandbox_exec.contracts import Experiment, Rung
from sandbox_exec.errors import InvalidExperiment, InvalidValue
from sandbox_exec.preflight import Finding, Machine, Preflight, cache_folder, preflight, quick_check, smoke
from sandbox_exec.preflight.files import Files
from sandbox_exec.units import GIB, TIB

MACHINE = Machine(memory_bytes=8 * GIB, cpus=4, architecture="amd64", pids=32768)
GRADE = """
if [ -e "$SANDBOX_EXEC_OUT/answer" ]; then passed=true score=1; else passed=false score=0; fi
echo "{\\"score\\": $score, \\"passed\\": $passed}" >"$SANDBOX_EXEC_GRADE"
"""
AGENT = {"id": "v", "agent": {"command": ["sh", "solve.sh"]}}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's agents have that user's own rights")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return files_in(tmp_path / "experiment")


def files_in(base: Path) -> Path:
    """The files of an experiment of which nothing is found."""
    for folder in ("ws", "grading", "ref/out"):
        (base / folder).mkdir(parents=True)
    (base / "ws" / "question").write_text("what is the answer to everything?\n")
    (base / "grading" / "grade.sh").write_text(GRADE)
    (base / "ref" / "out" / "answer").write_text("42\n")
    (base / "solve.sh").write_text('echo 42 >"$SANDBOX_EXEC_OUT/answer"\n')
    return base


def clean(base: Path, **fields: Any) -> Experiment:
    task = {"id": "t", "input": {}, "workspace": "ws", "reference": "ref"}
    sandbox = {"memory": "64MiB", "out_limit": "1MiB", **fields.pop("sandbox", {})}
    grading = {"command": ["sh", "grade.sh"], "assets": "grading", "timeout_s": 20, **fields.pop("grading", {})}
    given = {"tasks": [task], "variants": [AGENT], "design": {"max_concurrency": 2}, **fields}
    return Experiment(name="test", base=base, sandbox=sandbox, grading=grading, **given)


def task(**fields: Any) -> dict[str, Any]:
    return {"tasks": [{"id": "t", "input": {}, **fields}]}


def variant(**fields: Any) -> dict[str, Any]:
    return {"variants": [{**AGENT, **fields}]}


def command(*words: str) -> dict[str, Any]:
    return variant(agent={"command": list(words)})


def told(findings: list[Finding] | tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.level, finding.place) for finding in findings]


def the_one(findings: list[Finding] | tuple[Finding, ...], level: str, place: str, words: str) -> Finding:
    """The only finding at that place, which says so."""
    (found,) = [finding for finding in findings if finding.place == place]
    assert found.level == level
    assert words in found.what
    assert found.todo
    return found


# --- static ---


def nothing(base: Path) -> None: ...


class Broken(NamedTuple):
    level: str
    place: str
    words: str
    fields: dict[str, Any]
    prepare: Callable[[Path], object] = nothing
    machine: Machine = MACHINE


def script(name: str, text: str, mode: int = 0o755) -> Callable[[Path], object]:
    def prepare(base: Path) -> None:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
        (base / name).chmod(mode)

    return prepare


BROKEN: dict[str, Broken] = {
    "a workspace that is not there": Broken("error", "task 't': workspace", "cannot find", task(workspace="no")),
    "a reference that is not there": Broken("error", "task 't': reference", "cannot find", task(reference="no")),
    "a reference of another form": Broken("error", "task 't': reference", "neither workspace/", task(reference="ws")),
    "assets of a task that are not there": Broken(
        "error", "task 't': grading.assets", "cannot find", task(grading={"assets": "no"})
    ),
    "assets that are not there": Broken("error", "grading.assets", "cannot find", {"grading": {"assets": "no"}}),
    "an artifact that is not there": Broken(
        "error", "variant 'v': agent.artifact", "cannot find", variant(agent={"artifact": "no.tar.gz"})
    ),
    "an artifact that is none": Broken(
        "error",
        "variant 'v': agent.artifact",
        "not gzip",
        variant(agent={"artifact": "x.tar.gz"}),
        script("x.tar.gz", "hello"),
    ),
    "a readable path that is not there": Broken(
        "warning", "sandbox.readable", "cannot find", {"sandbox": {"readable": ["no"]}}
    ),
    "no such program": Broken("error", "variant 'v': agent.command", "'no-such-program'", command("no-such-program")),
    "no such program by its path": Broken("error", "variant 'v': agent.command", "/no/such", command("/no/such")),
    "a program that is not executable": Broken(
        "error", "variant 'v': agent.command", "is not executable", command("solve.sh")
    ),
    "a program that only its owner may run": Broken(
        "error",
        "variant 'v': agent.command",
        "not executable for others",
        command("own.sh"),
        script("own.sh", "#!/bin/sh\n", 0o744),
    ),
    "a script without its interpreter": Broken(
        "error", "variant 'v': agent.command", "#!/no/such", command("odd.sh"), script("odd.sh", "#!/no/such\n")
    ),
    "a program of no workspace": Broken("error", "variant 'v': agent.command", "neither", command("./bin/solve")),
    "a script that is nowhere": Broken("warning", "variant 'v': agent.command", "'lost.py'", command("sh", "lost.py")),
    "a file that agents may not read": Broken(
        "error", "variant 'v': agent", "owner only", command("sh", "own.sh"), script("own.sh", ":", 0o600)
    ),
    "a module that is not there": Broken(
        "error", "variant 'v': agent.python", "no module", variant(agent={"python": "no_such_module_of_ours:f"})
    ),
    "a grader that is not there": Broken(
        "error", "task 't': grading.command", "'no-such-grader'", {"grading": {"command": ["no-such-grader"]}}
    ),
    "a grader's script that is nowhere": Broken(
        "error", "task 't': grading.command", "'lost.sh'", {"grading": {"command": ["sh", "lost.sh"]}}
    ),
    "a grader's module that is not there": Broken(
        "error",
        "task 't': grading.python",
        "no module",
        {"grading": {"command": None, "python": "no_such_module_of_ours:f"}},
    ),
    "more memory than there is": Broken("error", "sandbox.memory", "more than this", {"sandbox": {"memory": "9GiB"}}),
    "more memory than the budget": Broken("error", "sandbox.memory", "all together", {"sandbox": {"memory": "7GiB"}}),
    "a grader with more memory than there is": Broken(
        "error", "grading.memory", "more than this", {"grading": {"memory": "9GiB"}}
    ),
    "no memory ceiling": Broken("warning", "sandbox.memory", "no memory ceiling", {"sandbox": {"memory": None}}),
    "a budget above the machine": Broken(
        "warning", "design.memory_budget", "more than this", {"design": {"memory_budget": "9GiB", "max_concurrency": 1}}
    ),
    "more trials than memory": Broken(
        "warning",
        "design.max_concurrency",
        "more than the budget",
        {"sandbox": {"memory": "4GiB"}, "design": {"max_concurrency": 4, "repeats": 4}},
    ),
    "more processors than there are": Broken("warning", "sandbox.cpus", "gives 4", {"sandbox": {"cpus": 5.0}}),
    "processors that are shared": Broken(
        "note", "sandbox.cpus", "share 4", {"sandbox": {"cpus": 3.0}, "design": {"max_concurrency": 2, "repeats": 2}}
    ),
    "more processes than there can be": Broken(
        "warning", "sandbox.pids", "than this machine can have", {"sandbox": {"pids": 40000}}
    ),
    "no deadline": Broken("warning", "task 't': timeout_s", "for ever", {"sandbox": {"timeout_s": None}}),
    "ids that look the same": Broken(
        "warning",
        "task 'T': id",
        "differs from 't'",
        {"tasks": [{"id": "t", "input": 1}, {"id": "T", "input": 1}]},
    ),
    "variants that look the same": Broken(
        "warning", "variant 'V': id", "differs from 'v'", {"variants": [AGENT, {**AGENT, "id": "V"}]}
    ),
    "chains that look the same": Broken(
        "warning",
        "chain 'C'",
        "differs from 'c'",
        {"tasks": [{"id": f"{n}{c}", "input": 1, "chain": c} for n in "xy" for c in "cC"]},
    ),
    "a chain of one": Broken(
        "note",
        "chain 'c'",
        "only one task",
        {"tasks": [{"id": "t", "input": 1, "chain": "c"}, {"id": "u", "input": 1}]},
    ),
    "a variable that every sandbox has": Broken("note", "variant 'v': env.HOME", "HOME", variant(env={"HOME": "/x"})),
    "a secret that is named twice": Broken(
        "note", "variant 'v': pass_env", "twice", variant(pass_env=["LANGUAGE_OF_TESTS", "LANGUAGE_OF_TESTS"])
    ),
    "assets in a workspace": Broken(
        "error",
        "task 't': workspace",
        "the grading assets",
        {**task(workspace="all"), "grading": {"assets": "all/grading"}},
        script("all/grading/grade.sh", GRADE),
    ),
    "assets that are the workspace": Broken(
        "error", "task 't': workspace", "the grading assets", task(workspace="grading")
    ),
    "assets in a workspace by a link": Broken(
        "error",
        "task 't': workspace",
        "the grading assets",
        task(workspace="link"),
        lambda base: (base / "link").symlink_to("grading"),
    ),
    "a reference in a workspace": Broken(
        "error",
        "task 't': workspace",
        "the reference solution",
        task(workspace="all", reference="all/ref"),
        script("all/ref/out/answer", "42"),
    ),
    "a grader's program in a workspace": Broken(
        "error",
        "task 't': workspace",
        "the grader's program",
        {**task(workspace="all"), "grading": {"command": ["sh", "all/check.sh"]}},
        script("all/check.sh", GRADE),
    ),
    "assets that agents may read": Broken(
        "error", "sandbox.readable", "the grading assets", {"sandbox": {"readable": ["grading"]}}
    ),
    "a part of the assets that agents may read": Broken(
        "error", "sandbox.readable", "the grading assets", {"sandbox": {"readable": ["grading/grade.sh"]}}
    ),
    "assets below what agents may read": Broken(
        "warning", "sandbox.readable", "not its name", {"sandbox": {"readable": ["."]}}
    ),
    "an agent that is in the assets": Broken(
        "error",
        "variant 'v': agent.command",
        "the grading assets",
        command("sh", "grading/agent.sh"),
        script("grading/agent.sh", ":"),
    ),
    "an agent in the file of the grader": Broken(
        "warning",
        "variant 'v': agent.python",
        "the grader's program",
        {**variant(agent={"python": "both:solve"}), "grading": {"command": None, "python": "both:grade"}},
        script("both.py", ""),
    ),
    "a secret that is not there": Broken(
        "error", "variant 'v': pass_env", "NO_SUCH_SECRET", variant(pass_env=["NO_SUCH_SECRET"])
    ),
    "a secret that is empty": Broken("warning", "variant 'v': pass_env", "EMPTY", variant(pass_env=["EMPTY"])),
    "no room for one trial": Broken("error", "sandbox.out_limit", "one trial", {"sandbox": {"out_limit": 900 * TIB}}),
    "a lane": Broken("note", "variant 'v': lane", "nothing is said of lane", variant(lane="provider")),
    "a priority": Broken("note", "task 't': protocol", "no effect", task(protocol={"priority": 3})),
    "an image of a task": Broken("warning", "task 't': image", "no effect", task(image="x:1")),
    "an image of all": Broken("warning", "sandbox.image", "no effect", {"sandbox": {"image": "x:1"}}),
    "an image of the grader": Broken("warning", "grading.image", "no effect", {"grading": {"image": "x:1"}}),
    "a function in docker": Broken(
        "error",
        "variant 'v': agent",
        "process sandbox only",
        {"sandbox": {"kind": "docker", "image": "x:1"}, **variant(agent={"python": "json:dumps"})},
    ),
    "another image for the agent's own": Broken(
        "warning",
        "grading.image",
        "not in another image",
        {"sandbox": {"kind": "docker", "image": "x:1"}, "grading": {"in": "same", "image": "y:1"}},
    ),
    "assets below what containers may read": Broken(
        "error",
        "sandbox.readable",
        "the grading assets",
        {"sandbox": {"kind": "docker", "image": "x:1", "readable": ["."]}},
    ),
    "grading on what the agent left": Broken(
        "warning", "grading.in", "that the agent left", {"grading": {"in": "same"}}
    ),
}
OF_ROOT = ("a program that only its owner may run", "a file that agents may not read")


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_root) if n in OF_ROOT else n for n in BROKEN])
def test_a_broken_experiment_is_told_where_and_why(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("LANGUAGE_OF_TESTS", "en")
    broken = BROKEN[name]
    broken.prepare(base)
    found = quick_check(clean(base, **broken.fields), runs=tmp_path, machine=broken.machine)
    the_one(found, broken.level, broken.place, broken.words)


def test_of_a_clean_experiment_nothing_is_found(base: Path, tmp_path: Path) -> None:
    assert quick_check(clean(base), runs=tmp_path / "runs" / "not-yet", machine=MACHINE) == []


def test_without_grading_there_is_a_note(base: Path, tmp_path: Path) -> None:
    one = Experiment(name="test", base=base, tasks=[{"id": "t", "input": 1}], variants=[AGENT])
    the_one(quick_check(one, runs=tmp_path, machine=MACHINE), "note", "grading", "nothing is graded")


def test_a_task_without_a_grader_among_others(base: Path, tmp_path: Path) -> None:
    grading = {"command": ["sh", "grade.sh"], "assets": "grading"}
    tasks = [{"id": "t", "input": 1, "grading": grading}, {"id": "u", "input": 1}]
    one = Experiment(name="test", base=base, tasks=tasks, variants=[AGENT])
    the_one(quick_check(one, runs=tmp_path, machine=MACHINE), "warning", "task 'u': grading", "no grader")


def test_a_path_that_may_not_be_read(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = os.access  # root may read all
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("ws") and usual(path, mode))
    the_one(quick_check(clean(base), runs=tmp_path, machine=MACHINE), "error", "task 't': workspace", "may not be read")


def test_a_folder_for_runs_that_may_not_be_written(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0 and usual(path, mode))
    the_one(quick_check(clean(base), machine=MACHINE), "error", "--runs", "may not be written")


def test_little_room_for_all_trials(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = clean(base, design={"max_concurrency": 2, "repeats": 2000})
    usual = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usual._replace(free=5 << 20))
    the_one(quick_check(one, runs=tmp_path, machine=MACHINE), "warning", "sandbox.out_limit", "2000 trials")


def test_a_rung_without_namespaces_shows_assets_to_agents(base: Path, tmp_path: Path) -> None:
    found = quick_check(clean(base), runs=tmp_path, machine=MACHINE, containment=Rung.SUBREAPER)
    the_one(found, "warning", "sandbox.kind", "read the grading assets")


def test_a_containment_that_is_required_and_not_there(base: Path, tmp_path: Path) -> None:
    one = clean(base, sandbox={"require": "namespaces"})
    found = quick_check(one, runs=tmp_path, machine=MACHINE, containment=Rung.SUBREAPER)
    the_one(found, "error", "sandbox.require", "cannot be met")


def test_a_service_that_cannot_be_graded_here(base: Path, tmp_path: Path) -> None:
    one = clean(base, grading={"services": "keep"})
    found = quick_check(one, runs=tmp_path, machine=MACHINE, containment=Rung.SUBREAPER)
    the_one(found, "error", "grading.services", "in docker only")


def test_tasks_that_share_a_finding_share_a_line(base: Path, tmp_path: Path) -> None:
    tasks = [{"id": f"t{number}", "input": 1, "workspace": "no"} for number in range(5)]
    (found,) = quick_check(clean(base, tasks=tasks), runs=tmp_path, machine=MACHINE)
    assert found.place == "tasks 't0', 't1', 't2' and 2 more: workspace"


def test_many_findings_of_one_kind_end_with_their_number(base: Path, tmp_path: Path) -> None:
    tasks = [{"id": f"t{number}", "input": 1, "workspace": f"no{number}"} for number in range(50)]
    found = quick_check(clean(base, tasks=tasks), runs=tmp_path, machine=MACHINE)
    assert len(found) == 21
    assert found[-1].what == "30 more findings of this kind"


def test_errors_come_first(base: Path, tmp_path: Path) -> None:
    one = clean(base, grading={"in": "same"}, **variant(pass_env=["NO_SUCH_SECRET"], env={"HOME": "/x"}))
    levels = [finding.level for finding in quick_check(one, runs=tmp_path, machine=MACHINE)]
    assert levels == ["error", "warning", "note"]


def test_ten_thousand_tasks_take_no_time(base: Path, tmp_path: Path) -> None:
    one = clean(base, tasks=[{"id": f"t{number}", "input": 1, "workspace": "ws"} for number in range(10_000)])
    quick_check(clean(base), runs=tmp_path, machine=MACHINE)  # the containment is found once
    began_s = time.process_time()
    assert quick_check(one, runs=tmp_path, machine=MACHINE) == []
    assert time.process_time() - began_s < 1.0  # measured: 0.2 s, on a slow machine


# --- artifacts ---


def frozen(base: Path, text: str = "#!/bin/sh\n", **files: str) -> dict[str, Any]:
    folder = base.parent / "agent"
    folder.mkdir()
    for name, content in {"run": text, **files}.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    artifacts.freeze(folder, base / "agent.tar.gz", entrypoint="run")
    return variant(agent={"artifact": "agent.tar.gz"})


def test_an_artifact_for_another_machine(base: Path, tmp_path: Path) -> None:
    folder = base.parent / "agent"
    folder.mkdir()
    shutil.copy(os.path.realpath(sys.executable), folder / "run")
    manifest = artifacts.freeze(folder, base / "agent.tar.gz", entrypoint="run")
    one = clean(base, **variant(agent={"artifact": "agent.tar.gz"}))
    own = replace(MACHINE, architecture=manifest.platform.removeprefix("linux/"))
    assert quick_check(one, runs=tmp_path, machine=own) == []
    found = quick_check(one, runs=tmp_path, machine=replace(MACHINE, architecture="s390x"))
    the_one(found, "error", "variant 'v': agent.artifact", "linux/s390x")


def test_an_artifact_that_is_damaged_after_its_manifest(base: Path) -> None:
    one = clean(base, **frozen(base, filler=os.urandom(1 << 16).hex()))
    archive = base / "agent.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-1000])
    the_one(look(one).findings, "error", "variant 'v': agent.artifact", "")


def test_an_artifact_without_its_interpreter(base: Path) -> None:
    found = look(clean(base, **frozen(base, "#!/no/such\n"))).findings
    the_one(found, "error", "variant 'v': agent.artifact", "#!/no/such")


def test_an_artifact_that_holds_the_assets(base: Path) -> None:
    found = look(clean(base, **frozen(base, check=GRADE))).findings
    the_one(found, "error", "variant 'v': agent.artifact", "grade.sh")


def test_what_agents_are_given_anyway_is_no_secret(base: Path) -> None:
    (base / "ws" / "example.sh").write_text(GRADE)
    assert [*Files(clean(base, **frozen(base, check=GRADE))).look()] == []


def test_a_workspace_that_does_not_fit(base: Path) -> None:
    with open(base / "ws" / "large", "wb") as file:
        file.truncate(300 << 20)  # a hole
    the_one(look(clean(base)).findings, "error", "task 't': workspace", "do not fit")


def test_a_function_that_cannot_be_pickled(base: Path) -> None:
    lock = threading.Lock()
    one = clean(base, **variant(agent={"function": lambda task: lock.locked()}))
    the_one(look(one).findings, "error", "function", "cannot be pickled")


# --- smoke ---


def look(one: Experiment, **more: Any) -> Preflight:
    return preflight(one, **{"runs": one.base.parent, "cache": None, **more})


def grader(base: Path, text: str) -> None:
    (base / "grading" / "grade.sh").write_text(text)


class Looked(NamedTuple):
    """An experiment of which nothing was found, and what is kept of that."""

    one: Experiment
    found: Preflight
    lines: list[str]
    cache: Path


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    folder = tmp_path_factory.mktemp("looked")
    one, lines = clean(files_in(folder / "experiment")), list[str]()
    return Looked(one, look(one, cache=folder / "cache", say=lines.append), lines, folder / "cache")


def test_of_a_clean_experiment_nothing_is_found_by_trials_either(looked: Looked) -> None:
    assert looked.found.findings == ()  # its agent would pass: it is not started
    assert looked.found.ok
    assert looked.found.checked[-1] == "smoke: null agent x 1, reference solution x 1"
    assert looked.lines[0] == "4 trials of 2 kinds, 2 at once"


# Of each task, its own grader; of "function", the experiment's.
GRADERS = {
    "good": GRADE,
    "lax": """echo '{"score": 0.5, "passed": true}' >"$SANDBOX_EXEC_GRADE" """,
    "full": """echo '{"score": 1}' >"$SANDBOX_EXEC_GRADE" """,
    "strict": """echo '{"score": 0, "passed": false}' >"$SANDBOX_EXEC_GRADE" """,
    "varies": """echo "{\\"score\\": 0.$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}" >"$SANDBOX_EXEC_GRADE" """,
    "fails": "exit 3",
}


@pytest.fixture(scope="module")
def badly_graded(tmp_path_factory: pytest.TempPathFactory) -> Preflight:
    """One look at many graders: a look begins its own workers, which takes longer than a trial."""
    base = files_in(tmp_path_factory.mktemp("graders") / "experiment")
    tasks: list[dict[str, Any]] = [{"id": "function", "input": 1}]
    for name, text in GRADERS.items():
        (base / "grading" / f"{name}.sh").write_text(text)
        more = {"reference": "ref"} if name == "strict" else {}
        tasks.append({"id": name, "input": 1, "grading": {"command": ["sh", f"{name}.sh"]}, **more})
    grading = {"command": None, "function": lambda task: {"score": 1.0}}
    return look(clean(base, tasks=tasks, grading=grading))


def test_each_grader_is_tried(badly_graded: Preflight) -> None:
    places = " ".join(finding.place for finding in badly_graded.findings)
    assert {name for name in ("function", *GRADERS) if f"'{name}'" not in places} == {"good"}
    assert not badly_graded.ok


@pytest.mark.parametrize(
    ("name", "level", "where", "words"),
    [
        pytest.param("lax", "error", "grading", "does nothing (score 0.5)", id="passes an agent that does nothing"),
        pytest.param("full", "error", "grading", "does nothing (score 1)", id="full score, which is a pass"),
        pytest.param("function", "error", "grading", "does nothing (score 1)", id="a function"),
        pytest.param("strict", "error", "reference", "not pass the reference", id="does not pass the reference"),
        pytest.param("varies", "warning", "grading", "flaky", id="score varies"),
        pytest.param("fails", "error", "grading", "fails on an agent that did nothing: NoGrade", id="fails on nothing"),
    ],
)
def test_a_bad_grader(name: str, level: str, where: str, words: str, badly_graded: Preflight) -> None:
    (found,) = [one for one in badly_graded.findings if f"'{name}'" in one.place and words in one.what]
    assert (found.level, found.place.rpartition(": ")[2]) == (level, where)
    assert found.todo


def test_a_grader_whose_verdict_varies(base: Path) -> None:
    # Two that run do not see each other: only chance can tell them apart, and so takes some turns.
    grader(
        base,
        "if [ $(od -An -N1 -tu1 /dev/urandom) -lt 128 ]; then passed=null; else passed=false; fi\n"
        'echo "{\\"score\\": 0, \\"passed\\": $passed}" >"$SANDBOX_EXEC_GRADE"\n',
    )
    own = [{"grading": {"command": ["sh", "grade.sh", str(turn)]}} for turn in range(4)]
    one = clean(base, tasks=[{"id": f"t{turn}", "input": 1, **more} for turn, more in enumerate(own)])
    first = next(findings[0] for _ in range(20) if (findings := look(one).findings))
    assert (first.level, first.place.rpartition(": ")[2]) == ("error", "grading")
    assert "flaky: of an agent that does nothing, it said passed" in first.what


def test_of_very_many_only_some_are_tried(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "_MAX_TRIED", 1)
    one = clean(base, variants=[AGENT, {**AGENT, "id": "w"}])
    the_one(look(one).findings, "note", "smoke", "1 of 2 pairs")


@needs_root
def test_a_reference_does_not_serve(base: Path) -> None:
    found = look(clean(base, grading={"services": "keep"}))
    the_one(found.findings, "note", "grading.services", "files do not serve")
    assert found.checked[-1] == "smoke: null agent x 1"


def test_with_errors_no_trial_is_tried(base: Path) -> None:
    found = look(clean(base, **variant(pass_env=["NO_SUCH_SECRET"]))).findings
    the_one(found, "note", "smoke", "no trial was tried")


# --- what is kept ---


def test_the_second_time_nothing_is_tried_again(looked: Looked) -> None:
    again = look(looked.one, cache=looked.cache)
    assert (looked.found.from_cache, again.from_cache) == (0, 2)
    assert again.findings == looked.found.findings == ()


def test_a_grader_that_changed_is_tried_again_and_an_error_is_never_kept(tmp_path: Path, looked: Looked) -> None:
    cache = shutil.copytree(looked.cache, tmp_path / "cache")
    grader(looked.one.base, """echo '{"score": 1}' >"$SANDBOX_EXEC_GRADE" """)
    try:
        found = [look(looked.one, cache=cache) for _ in range(2)]
    finally:
        grader(looked.one.base, GRADE)
    assert [one.ok for one in found] == [False, False]
    assert [one.from_cache for one in found] == [0, 1]  # the reference passes


def test_a_grader_that_is_slow_is_a_warning_which_is_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "_SLOW_SHARE", 0.2 / 20)
    grader(base, f"sleep 0.25\n{GRADE}")
    first, again = (look(clean(base, **task()), cache=tmp_path / "cache") for _ in range(2))
    (found,) = first.findings
    the_one([found], "warning", "task 't': grading.timeout_s", "more than half")
    assert (again.findings, again.from_cache) == (first.findings, 1)


def test_what_is_old_or_damaged_was_never_there(tmp_path: Path, looked: Looked) -> None:
    cache = shutil.copytree(looked.cache, tmp_path / "cache")
    damaged, old = looked_at = sorted(cache.iterdir())
    shutil.copy(old, cache / "other.json")
    damaged.write_text("{")
    for file in (old, cache / "other.json"):
        os.utime(file, (0, 0))
    assert look(looked.one, cache=cache).from_cache == 0
    assert sorted(cache.iterdir()) == looked_at
    assert old.stat().st_mtime > 0
    assert look(looked.one, cache=cache).from_cache == 2


def test_the_cache_is_where_the_users_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sandbox-exec" / "preflight"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "sandbox-exec" / "preflight"


# --- the shell ---


Shell = Callable[..., Done]


@pytest.fixture
def shell(base: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Done]) -> Shell:
    """Call the command line in this process, beside the experiment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(base.parent / "caches"))
    monkeypatch.chdir(base)
    return partial(call, "preflight")


def in_file(base: Path, **more: Any) -> None:
    content = {
        "name": "test",
        "tasks": [{"id": "t", "input": 1}],
        "variants": [AGENT],
        "sandbox": {"memory": "64MiB", "out_limit": "1MiB"},
        "design": {"max_concurrency": 1},
        "grading": {"command": ["sh", "grade.sh"], "assets": "grading"},
        **more,
    }
    (base / "e.yaml").write_text(json.dumps(content))


def test_the_shell_says_that_all_is_well(base: Path, shell: Shell) -> None:
    in_file(base)
    done = shell("e.yaml")
    assert (done.code, done.out.splitlines()[-1].partition(";")[0]) == (0, "nothing found")
    assert "trial 2 of 2" in done.err


def test_errors_are_exit_code_3_and_a_table(base: Path, shell: Shell) -> None:
    in_file(base, variants=[{**AGENT, "pass_env": ["NO_SUCH_SECRET"]}])
    done = shell("e.yaml", "--quick")
    assert done.code == 3
    assert "error  variant 'v': pass_env" in done.out
    assert "-> export NO_SUCH_SECRET" in done.out


def test_json_is_the_contract(base: Path, shell: Shell) -> None:
    in_file(base, variants=[{**AGENT, "lane": "x"}])
    done = shell("e.yaml", "--quick", "--json")
    assert done.code == 0
    found = Preflight.model_validate_json(done.out)
    assert found.quick
    assert told(found.findings) == [("note", "variant 'v': lane")]


def test_no_such_containment_is_bad_usage(base: Path) -> None:
    with pytest.raises(InvalidValue, match="no containment 'ropes'"):
        preflight(clean(base), containment="ropes")


def test_a_file_that_is_no_experiment_is_bad_usage(base: Path, shell: Shell) -> None:
    (base / "e.yaml").write_text("name: x")
    assert shell("e.yaml").code == 2
    with pytest.raises(InvalidExperiment):
        preflight(base / "e.yaml")
