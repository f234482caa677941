"""Experiments from files and plain data: what is accepted, and how all that is wrong is told at once."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticSerializationError

from sandbox_exec.contracts import (
    AgentSpec,
    Design,
    Experiment,
    GradingSettings,
    SandboxSettings,
    Task,
    Variant,
)
from sandbox_exec.contracts.experiment import MAX_SLOTS
from sandbox_exec.errors import InvalidExperiment
from sandbox_exec.experiment import (
    MAX_YAML_CHARS,
    changed_inputs,
    check_files,
    experiment_from,
    freeze_functions,
    input_digests,
    load_experiment,
)
from sandbox_exec.units import MIB

# The file of the design, with an order that is built.
WHOLE = """\
name: quickstart
seed: 7
tasks: tasks.jsonl              # or a list
variants:
  - id: careful
    agent: {command: [python3, solve.py]}
    env: {MODE: careful}
    pass_env: [MODEL_API_KEY]
    max_parallel_trials: 2
    lane: my-provider
  - id: packed
    agent: {artifact: solver.tar.gz}
  - id: called
    agent: {python: "agents.solve:main"}
design:
  repeats: 3
  max_concurrency: 4
  order: sequential
  max_duration_s: 3600
  prune_after_failures: 5
  memory_budget: 6GiB
sandbox:
  kind: process
  image: sandbox-exec/python:3.11
  timeout_s: 60
  memory: 512MiB
  pids: 128
  cpus: 1
  out_limit: 64MiB
  network: none
  require: namespaces
grading:
  command: [python3, grade.py]
  assets: grading/
  timeout_s: 60
  in: same
"""
ROWS = """\
{"id": "sum-01", "input": {"numbers": [1, 2]}}

{"id": "sum-02", "input": 3, "workspace": "ws", "depends_on": ["sum-01"], "protocol": {"timeout_s": "5s"}}
"""
SMALL = "name: small\ntasks: [{id: a, input: 1}]\nvariants: [{id: v, agent: {command: [x]}}]\n"
DATA: dict[str, Any] = {
    "name": "small",
    "tasks": [{"id": "a", "input": 1}],
    "variants": [{"id": "v", "agent": {"command": ["x"]}}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "experiment.yaml": WHOLE,
        "tasks.jsonl": ROWS,
        "solve.py": "print(1)\n",
        "solver.tar.gz": "packed",
        "agents/solve.py": "def main(): ...\n",
        "grading/grade.py": "print(2)\n",
        "ws/data.csv": "1,2\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "e.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problems(folder: Path, text: str | bytes) -> list[str]:
    """What is wrong with an experiment of this text, without the folder and the spaces before each line."""
    with pytest.raises(InvalidExperiment) as caught:
        load_experiment(written(folder, text))
    header, *lines = str(caught.value).replace(f"{folder}/", "").split("\n")
    assert header.startswith(f"{len(lines)} problem")
    return [line.strip() for line in lines]


# What is accepted


def test_the_file_of_the_design_is_read(folder: Path) -> None:
    experiment = load_experiment(folder / "experiment.yaml")
    assert (experiment.name, experiment.seed, experiment.base) == ("quickstart", 7, folder)
    assert [task.id for task in experiment.tasks] == ["sum-01", "sum-02"]
    careful, packed, called = experiment.variants
    assert careful == Variant(
        id="careful",
        agent=AgentSpec(command=("python3", "solve.py")),
        env={"MODE": "careful"},
        pass_env=("MODEL_API_KEY",),
        max_parallel_trials=2,
        lane="my-provider",
    )
    assert packed.agent.artifact == Path("solver.tar.gz")
    assert called.agent.python == "agents.solve:main"
    assert experiment.design == Design(
        repeats=3,
        max_concurrency=4,
        max_duration_s=3600,
        prune_after_failures=5,
        memory_budget=6 * 1024**3,
    )
    assert experiment.grading == GradingSettings(command=("python3", "grade.py"), assets=Path("grading"), in_="same")
    assert experiment.sources == (folder / "experiment.yaml", folder / "tasks.jsonl")


def test_an_experiment_is_the_same_after_json(folder: Path) -> None:
    experiment = load_experiment(folder / "experiment.yaml")
    text = experiment.model_dump_json()
    assert Experiment.model_validate_json(text) == experiment
    assert json.loads(text)["grading"]["in"] == "same"


def test_the_same_comes_from_plain_data_and_from_objects(folder: Path) -> None:
    read = load_experiment(written(folder, SMALL))
    made = Experiment(
        name="small",
        tasks=[Task(id="a", input=1)],
        variants=[Variant(id="v", agent=AgentSpec(command=("x",)))],
        base=folder,
    )
    assert experiment_from(DATA, folder) == made
    assert read.model_copy(update={"sources": ()}) == made


def test_what_is_left_out_has_a_default(folder: Path) -> None:
    experiment = load_experiment(written(folder, SMALL))
    assert experiment.design.repeats == 1
    assert experiment.design.max_concurrency == len(os.sched_getaffinity(0))
    assert experiment.design.infra_retries == 3
    assert experiment.sandbox == SandboxSettings()
    assert experiment.grading is None


def test_anchors_and_merge_keys_work(folder: Path) -> None:
    text = """
name: merged
tasks:
  - &first {id: a, input: 1, chain: c, protocol: &p {max_retries: 2, priority: 1}}
  - {<<: *first, id: b, protocol: {<<: [{priority: 5}, *p], timeout_s: 3}}
variants: [{id: v, agent: {command: &argv [x]}}, {id: w, agent: {command: *argv}}]
"""
    experiment = load_experiment(written(folder, text))
    second = experiment.tasks[1]
    assert (second.id, second.input, second.chain) == ("b", 1, "c")
    assert (second.protocol.priority, second.protocol.max_retries, second.protocol.timeout_s) == (5, 2, 3)
    assert experiment.variants[1].agent.command == ("x",)


def test_dates_and_keys_are_text_as_they_stand_there(folder: Path) -> None:
    text = SMALL.replace("input: 1", "input: {on: 2024-01-02, 1: =, when: 2001-13-45}")
    assert load_experiment(written(folder, text)).tasks[0].input == {
        "on": "2024-01-02",
        "1": "=",
        "when": "2001-13-45",
    }


def test_paths_may_leave_the_folder(folder: Path) -> None:
    (folder / "inner").mkdir()
    path = folder / "inner" / "e.yaml"
    path.write_text(SMALL.replace("[{id: a, input: 1}]", "../tasks.jsonl").replace("tasks: ", "tasks: "))
    (folder / "inner" / "ws").mkdir()
    assert len(load_experiment(path).tasks) == 2


def test_an_experiment_is_read_through_a_relative_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    experiment = load_experiment(Path(folder.name) / "experiment.yaml")
    monkeypatch.chdir("/")
    assert experiment.base == folder
    assert experiment.sources == (folder / "experiment.yaml", folder / "tasks.jsonl")
    check_files(experiment)


def test_a_secret_is_in_no_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_API_KEY", "s3cret-value")
    experiment = load_experiment(folder / "experiment.yaml")
    assert experiment.variants[0].pass_env == ("MODEL_API_KEY",)
    assert "s3cret-value" not in experiment.model_dump_json() + repr(experiment) + str(input_digests(experiment))


def test_a_secret_in_the_wrong_form_is_not_shown(folder: Path) -> None:
    for form in ("pass_env: {KEY: s3cret}", "env: [KEY, s3cret]", "env: {KEY: [s3cret]}", "pass_env: s3cret"):
        (problem,) = problems(folder, SMALL.replace("{id: v,", f"{{id: v, {form},"))
        assert "s3cret" not in problem


# Limits and grading of a task


def test_limits_are_those_of_the_sandbox_but_for_the_tasks_own_timeout() -> None:
    settings = SandboxSettings(timeout_s=60, memory=256 * MIB, pids=7, cpus=0.5, network="host")
    limits = settings.limits(Task(id="a", input=1))
    assert (limits.timeout_s, limits.memory, limits.pids, limits.cpus) == (60, 256 * MIB, 7, 0.5)
    assert limits.network == "host"
    hasty = Task.model_validate({"id": "b", "input": 1, "protocol": {"timeout_s": 5}})
    assert settings.limits(hasty).timeout_s == 5


def test_paths_of_the_sandbox_start_from_the_experiments_folder(folder: Path) -> None:
    text = SMALL + "sandbox: {readable: [ws, /usr/share], hidden: ['~/keys']}\n"
    experiment = load_experiment(written(folder, text))
    limits = experiment.limits(experiment.tasks[0])
    assert limits.readable == (folder / "ws", Path("/usr/share"))
    assert limits.hidden == (Path.home() / "keys",)


def test_there_is_room_for_what_is_kept_of_out() -> None:
    settings = SandboxSettings(out_limit=1024 * MIB)
    assert settings.limits(Task(id="a", input=1)).disk == 1024 * MIB


def test_what_may_be_written_is_what_the_sandbox_says() -> None:
    assert SandboxSettings.model_validate({"disk": "2GiB"}).limits(Task(id="a", input=1)).disk == 2048 * MIB
    with pytest.raises(ValueError, match="too little"):
        SandboxSettings.model_validate({"disk": 1})


def test_a_tasks_grading_goes_before_the_experiments(folder: Path) -> None:
    rows = ROWS + '{"id": "own", "input": 1, "grading": {"command": ["sh", "g.sh"]}}\n'
    (folder / "tasks.jsonl").write_text(rows)
    experiment = load_experiment(folder / "experiment.yaml")
    plain, _, own = experiment.tasks
    assert experiment.grading_of(plain) == experiment.grading
    assert experiment.grading_of(own) == GradingSettings(command=("sh", "g.sh"), assets=Path("grading"), in_="same")


# What is refused, and how it is told


def test_everything_wrong_is_told_at_once(folder: Path) -> None:
    (folder / "bad.jsonl").write_text(
        '{"id": "a", "input": 1, "protocol": {"timeout": 3}}\n'
        "\n"
        '{"id": "b", "input": 1, "depends_on": ["c"]}\n'
        '{"id": "c", "input": 1, "depends_on": ["b"]}\n'
        '{"id": "a", "workspace": "nowhere"}\n'
    )
    text = """\
name: bad
tasks: bad.jsonl
variants:
  - id: v
    agnt: {command: [x]}
  - id: w
    agent:
      artifact: gone.tar.gz
design:
  repeats: 0
  order: backwards
sandbox:
  memory: 512M
  kind: dcoker
extra: 1
"""
    found = problems(folder, text)
    expected = [
        r"e\.yaml:4: variants\[0\]\.agent: is missing",
        r"e\.yaml:5: variants\[0\]\.agnt: unknown field; did you mean 'agent'\? allowed: id, agent, env, .*",
        r"e\.yaml:8: variants\[1\]\.agent\.artifact: cannot find 'gone\.tar\.gz': No such file or directory",
        r"e\.yaml:10: design\.repeats: Input should be greater than or equal to 1; found 0",
        r"e\.yaml:11: design\.order: 'backwards' is no order; allowed: sequential, priority, adaptive, or .*",
        r"e\.yaml:13: sandbox\.memory: '512M' is not a size .*; allowed: a whole number of bytes .*",
        r"e\.yaml:14: sandbox\.kind: Input should be 'process' or 'docker'; found 'dcoker'",
        r"e\.yaml:15: extra: unknown field; allowed: name, seed, tasks, variants, lanes, design, sandbox, grading",
        r"bad\.jsonl:1: protocol\.timeout: unknown field; did you mean 'timeout_s'\? allowed: timeout_s, .*",
        r"bad\.jsonl:3: depends_on: depends on itself: 'b' -> 'c' -> 'b'",
        r"bad\.jsonl:5: id: 'a' is already the id of line 1",
        r"bad\.jsonl:5: workspace: cannot find 'nowhere': No such file or directory",
        r"bad\.jsonl:5: input: is missing",
    ]
    for problem, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, problem), (problem, pattern)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "e.yaml: an experiment is a mapping with name, tasks and variants; found None"),
        ("- 1\n", "e.yaml:1: an experiment is a mapping with name, tasks and variants; found [1]"),
        ("a: 1\nb: [\n", "e.yaml:3: not YAML: while parsing a flow node, expected the node content, but found "),
        ("a: 1\n---\nb: 1\n", "e.yaml:2: not YAML: expected a single document in the stream, but found another"),
        ("a: *b\n", "e.yaml:1: not YAML: found undefined alias 'b'"),
        ("a: 1\nb: \x01\n", r"e.yaml:2: not YAML: the character '\x01' is not allowed"),
        (b"a: 1\nb: \xff\n", "e.yaml:2: not UTF-8: invalid start byte"),
        ('a: "\\UFFFFFFFF"', "e.yaml: not YAML: Python int too large to convert to C int"),
        ("[" * 5000, "e.yaml: nested too deeply, or an alias that holds itself"),
        (SMALL + "design: &a {x: *a}\n", "e.yaml: nested too deeply, or an alias that holds itself"),
        (SMALL + "design: &a {<<: *a}\n", "e.yaml: nested too deeply, or an alias that holds itself"),
        (SMALL + "seed: 1\n# one\nseed: 2\n", "e.yaml:6: seed: stands there twice; first in line 4"),
        (SMALL + "seed: !!python/name:os.system x\n", "e.yaml:4: seed: the tag 'tag:yaml.org,2002:python/"),
        (SMALL + "seed: !!set {a}\n", "e.yaml:4: seed: the tag 'tag:yaml.org,2002:set' is not allowed"),
        (SMALL + "seed: !!bool perhaps\n", "e.yaml:4: seed: 'perhaps' is no bool"),
        (SMALL + f"seed: 0x{'f' * 500}\n", "e.yaml:4: seed: '0xfffffffff"),
        (SMALL + "? [a]\n: 1\n", "e.yaml:4: a key is text, not a list or a mapping"),
        (SMALL + "design: {<<: 3}\n", "e.yaml:4: design: << takes a mapping, or a list of mappings"),
        (SMALL + "seed: -1\n", "e.yaml:4: seed: Input should be greater than or equal to 0; found -1"),
        (SMALL + "seed: true\n", "e.yaml:4: seed: Input should be a valid integer; found True"),
        (SMALL + "base: /tmp\n", "e.yaml:4: base: unknown field"),
        (SMALL + "self: 1\n", "e.yaml:4: self: unknown field; allowed: name, seed"),
        (SMALL + "design: [1]\n", "e.yaml:4: design: should be a mapping; found [1]"),
        (SMALL + "design: {repeats: 2000000}\n", "e.yaml:4: design.repeats: 2000000 trials are too many; allow"),
        (SMALL + "design:\n  order: by luck\n", "e.yaml:5: design.order: 'by luck' is no order; allowed:"),
        (SMALL + "sandbox: {memory: 1kB}\n", "e.yaml:4: sandbox.memory: Input should be greater than or equal to "),
        (SMALL + "sandbox: {readable: [/a], hidden: [/a]}\n", "e.yaml:4: sandbox: both readable and hidden: /a"),
        (SMALL + "sandbox: {hidden: [~nobody-of-that-name/x]}\n", "e.yaml:4: sandbox: '~nobody-of-that-name/x' n"),
        (SMALL + "sandbox: {kind: docker}\n", "e.yaml:2: tasks[0]: has no image, which docker needs; name one here"),
        (SMALL + "grading: {command: []}\n", "e.yaml:4: grading.command: Tuple should have at least 1 item"),
        (
            SMALL + "grading: {command: [x], in_: same, comand: 1}\n",
            "e.yaml:4: grading.comand: unknown field; did you mean",
        ),
        (SMALL + "grading: {command: [x], assets: none}\n", "e.yaml:4: grading.assets: cannot find 'none': No such"),
        (SMALL.replace("[x]", "x"), "e.yaml:3: variants[0].agent.command: should be a list; found 'x'"),
        (SMALL.replace("[x]", "[sleep, 3]"), "e.yaml:3: variants[0].agent.command[1]: should be text; found 3: put"),
        (SMALL.replace("id: v", "id: v, env: {A: on}"), "e.yaml:3: variants[0].env.A: should be text; found a value"),
        (SMALL.replace("command: [x]", "artifact: ''"), "e.yaml:3: variants[0].agent.artifact: '' is not a path"),
        (SMALL.replace("command: [x]", "artifact: ."), "e.yaml:3: variants[0].agent.artifact: '.' is not a file"),
        (SMALL.replace("command: [x]", f"function: 'sha256:{'0' * 64}'"), "e.yaml:3: variants[0].agent.function: is"),
        (SMALL.replace("input: 1", "input: [.inf]"), "e.yaml:2: tasks[0].input[0]: Input should be a finite number"),
        (SMALL.replace("input: 1", f"input: {'[' * 120}{']' * 120}"), "e.yaml:2: tasks[0].input: nested too deeply"),
        (SMALL.replace("input: 1", "input: 1, chian: c"), "e.yaml:2: tasks[0].chian: unknown field; did you mean 'c"),
        (SMALL.replace("input: 1", "input: 1, depends_on: [b]"), "e.yaml:2: tasks[0].depends_on[0]: there is no ta"),
        (SMALL.replace("input: 1", "input: 1, depends_on: [a]"), "e.yaml:2: tasks[0]: task 'a' depends on itself"),
        (SMALL.replace("input: 1", "input: 1, grading: {assets: .}"), "e.yaml:2: tasks[0].grading: has no command"),
        (SMALL.replace("[{id: a, input: 1}]", "[]"), "e.yaml:2: tasks: Tuple should have at least 1 item"),
        (SMALL.replace("[{id: a, input: 1}]", "{}"), "e.yaml:2: tasks: should be the path of a JSONL file, or a li"),
        (SMALL.replace("[{id: a, input: 1}]", "no.jsonl"), "e.yaml:2: tasks: cannot read 'no.jsonl': No such file or"),
        (SMALL.replace("[{id: a, input: 1}]", "."), "e.yaml:2: tasks: cannot read "),
        (SMALL.replace("[{id: a, input: 1}]", '"a\\0b"'), "e.yaml:2: tasks: cannot read 'a\\x00b': embedded null byte"),
        (SMALL.replace("tasks: [{id: a, input: 1}]\n", ""), "e.yaml:1: tasks: is missing"),
        (SMALL.replace("name: small", "name: ''"), "e.yaml:1: name: String should have at least 1 character"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(folder: Path, text: str | bytes, problem: str) -> None:
    (found,) = problems(folder, text)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("", "e.yaml:2: tasks: 't.jsonl' is empty; needed: one task as a JSON object a line"),
        ("\n \n", "e.yaml:2: tasks: 't.jsonl' is empty; needed: one task as a JSON object a line"),
        ("\n{'id': 1}\n", "t.jsonl:2: not a JSON object: Expecting property name enclosed in double quotes at colum"),
        ("[1]\n", "t.jsonl:1: should be a mapping; found [1]"),
        ('{"id": "a", "input": 1, "id": "b"}\n', "t.jsonl:1: the key 'id' stands there twice"),
        ('{"id": "a", "input": NaN}\n', "t.jsonl:1: NaN is not JSON: numbers are finite"),
        ('{"id": "a", "input": 1e999}\n', "t.jsonl:1: input: Input should be a finite number; found inf"),
        (f'{{"id": "a", "input": {"9" * 5000}}}\n', "t.jsonl:1: Exceeds the limit"),
        (f'{{"id": "a", "input": {"9" * 500}}}\n', "t.jsonl:1: input: a number has too many digits: at most 300"),
        ('{"id": "a", "input": ["\\ud800"]}\n', r"t.jsonl:1: input: '\ud800' holds half of a surrogate pair"),
        ('{"id": "a", "input": {"\\ud800": 1}}\n', r"t.jsonl:1: input: '\ud800' holds half of a surrogate pair"),
        ('{"id": "\\ud800", "input": 1}\n', "t.jsonl:1: id: Input should be a valid string"),
        ('{"id": "a", "input": 1, "workspace": "\\ud800"}\n', r"t.jsonl:1: workspace: '\ud800' holds half of a"),
        ('{"id": "a", "input": 1, "workspace": "\\u0000"}\n', r"t.jsonl:1: workspace: '\x00' is not a path"),
        ('{"id": "a", "input": 1, "workspace": 3}\n', "t.jsonl:1: workspace: should be a path; found 3"),
        ('{"id": "a", "input": ' + "[" * 99999 + "\n", "t.jsonl:1: nested too deeply"),
        ('{"id": "a", "input": ' + "[" * 300 + "]" * 300 + "}\n", "t.jsonl:1: input"),
        (b'{"id": "a", "input": "\xff"}\n', "t.jsonl:1: not UTF-8: invalid start byte at byte 22"),
        ('\n{"id": "a"}\n', "t.jsonl:2: input: is missing"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(folder: Path, rows: str | bytes, problem: str) -> None:
    (folder / "t.jsonl").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    (found,) = problems(folder, SMALL.replace("[{id: a, input: 1}]", "t.jsonl"))
    assert found.startswith(problem)


def test_a_row_that_cannot_be_read_hides_no_other_problem_and_makes_none(folder: Path) -> None:
    (folder / "t.jsonl").write_text('{"id": "a"\n{"id": "b", "input": 1, "depends_on": ["a"]}\n{"id": "c"}\n')
    text = SMALL.replace("[{id: a, input: 1}]", "t.jsonl") + "seed: x\nseed: 1\n"
    found = problems(folder, text)
    assert [problem.partition(": ")[0] for problem in found] == ["e.yaml:4", "e.yaml:5", "t.jsonl:1", "t.jsonl:3"]


def test_ids_that_stand_twice_are_told_with_the_first(folder: Path) -> None:
    text = """\
name: twice
tasks:
  - {id: a, input: 1}
  - {id: b, input: 1}
  - {id: a, input: 2}
variants:
  - {id: v, agent: {command: [x]}}
  - {id: v, agent: {command: [y]}}
"""
    assert problems(folder, text) == [
        "e.yaml:5: tasks[2].id: 'a' is already the id of tasks[0] (line 3)",
        "e.yaml:8: variants[1].id: 'v' is already the id of variants[0] (line 7)",
    ]


def test_every_circle_is_printed_once() -> None:
    needs = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": [], "x": ["y", "a"], "y": ["x"]}
    tasks = [{"id": name, "input": 1, "depends_on": depends_on} for name, depends_on in needs.items()]
    with pytest.raises(InvalidExperiment) as caught:
        experiment_from({**DATA, "tasks": tasks})
    assert str(caught.value).splitlines()[1:] == [
        "  tasks[0].depends_on: depends on itself: 'a' -> 'b' -> 'c' -> 'a'",
        "  tasks[4].depends_on: depends on itself: 'x' -> 'y' -> 'x'",
    ]


def test_a_circle_as_long_as_the_dataset_is_found_and_cut_short() -> None:
    size = 5000  # far beyond what recursion can do
    tasks = [{"id": str(n), "input": 1, "depends_on": [str((n + 1) % size)]} for n in range(size)]
    with pytest.raises(InvalidExperiment, match=r"'9' -> \.\.\. -> '4990' -> .* -> '4999' -> '0'$"):
        experiment_from({**DATA, "tasks": tasks})


def test_very_many_problems_are_counted() -> None:
    tasks = [{"id": str(n)} for n in range(1000)]
    with pytest.raises(InvalidExperiment) as caught:
        experiment_from({**DATA, "tasks": tasks})
    lines = str(caught.value).splitlines()
    assert (lines[0], lines[-1]) == ("1000 problems in the experiment:", "  ... and 800 more")


@pytest.mark.timeout(15)  # a second is enough, unless the time grows with the square
def test_a_large_file_full_of_mistakes_is_refused_without_delay(folder: Path) -> None:
    rows = (f'{{"id": "t{n}", "depends_on": ["x{n}"], "workspace": "w{n}"}}\n' for n in range(20_000))
    (folder / "t.jsonl").write_text("".join(rows))
    with pytest.raises(InvalidExperiment, match=r"^60000 problems"):
        load_experiment(written(folder, SMALL.replace("[{id: a, input: 1}]", "t.jsonl")))


def test_objects_that_contradict_each_other_are_refused_all_at_once() -> None:
    task = Task(id="a", input=1, depends_on=("{b}",))
    with pytest.raises(InvalidExperiment) as caught:
        Experiment(name="", tasks=[task, task], variants=[], design={"repeats": "x"})
    assert len(str(caught.value).splitlines()) == 1 + 3
    with pytest.raises(InvalidExperiment, match=r"there is no task '\{b\}'"):
        Experiment(name="n", tasks=[task], variants=[Variant(id="v", agent=AgentSpec(command=("x",)))])


def test_a_run_of_as_many_trials_as_allowed_is_accepted() -> None:
    experiment_from({**DATA, "design": {"repeats": MAX_SLOTS}})


@pytest.mark.parametrize("data", [{3: 4}, {"tasks": b"x"}, {"tasks": {"a"}}, {"variants": 3}])
def test_odd_plain_data_is_refused(data: Any) -> None:
    with pytest.raises(InvalidExperiment):
        experiment_from({**DATA, **data})


def test_plain_data_that_holds_itself_is_refused() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(InvalidExperiment, match="input"):
        experiment_from({**DATA, "tasks": [{"id": "a", "input": knot}]})


@pytest.mark.parametrize("path", ["no/such.yaml", ".", "a\0b", "/dev/zero"])
def test_what_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(InvalidExperiment, match="cannot be read"):
        load_experiment(path)


def test_a_pipe_is_refused_and_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(InvalidExperiment, match="it is not a file"):
        load_experiment(folder / "pipe")
    assert "it is not a file" in problems(folder, SMALL.replace("[{id: a, input: 1}]", "pipe"))[0]
    assert "neither a file nor a folder" in problems(folder, SMALL.replace("input: 1", "input: 1, workspace: pipe"))[0]


def test_a_file_of_200_megabytes_is_refused_unread(folder: Path) -> None:
    path = written(folder, SMALL)
    os.truncate(path, 200 * MIB)
    with pytest.raises(InvalidExperiment, match="is larger than 1 MiB; put tasks into a JSONL file"):
        load_experiment(path)


def bomb(levels: int, join: str, leaf: str) -> str:
    rest = (f"l{n}: &l{n} {join.format(', '.join([f'*l{n - 1}'] * 10))}" for n in range(1, levels))
    return "\n".join([f"l0: &l0 {leaf}", *rest])


@pytest.mark.parametrize(
    "text",
    [
        bomb(9, "[{}]", "lol"),
        bomb(9, "{{<<: [{}]}}", "{a: 1}"),
        bomb(9, "{{<<: [{}]}}", "{}"),
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 2000)}]",
    ],
    ids=["lists", "merges", "empty merges", "one long text 200 MB often"],
)
def test_aliases_that_expand_without_end_are_refused(folder: Path, text: str) -> None:
    assert problems(folder, text) == ["e.yaml: its aliases expand to more than 1 MiB"]


def test_a_file_just_below_the_bound_is_read(folder: Path) -> None:
    text = SMALL.replace("input: 1", "input: ''")
    text = text.replace("''", "'" + "x" * (MAX_YAML_CHARS - len(text)) + "'")
    assert len(text) == MAX_YAML_CHARS
    assert len(str(load_experiment(written(folder, text)).tasks[0].input)) > MAX_YAML_CHARS - 200


# Any text


def is_experiment_or_refusal(path: Path) -> bool:
    try:
        experiment = load_experiment(path)
    except InvalidExperiment as refused:
        assert len(str(refused).splitlines()) >= 2  # noqa: PT017  # both ways out are looked at
        return False
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment
    return True


YAML_CHARS = "[]{}:,-&*<>!|?%@#'\"~.\\ \n\ta0x_1"
fuzz = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(st.one_of(st.text(), st.text(YAML_CHARS), st.binary()))
@example("&a [*a]")
@example("{<<: &a {<<: *a}}")
@example("%YAML 1." + "9" * 5000)
@example("!!int ''")
@example("1:" * 60000 + "1")
def test_any_text_is_an_experiment_or_refused(tmp_path: Path, text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    is_experiment_or_refusal(written(tmp_path, data))


@fuzz
@given(st.data())
def test_any_change_to_a_good_file_is_an_experiment_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(WHOLE)))
    end = data.draw(st.integers(start, min(len(WHOLE), start + 40)))
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "input": 1}')
    text = WHOLE[:start] + data.draw(st.text(YAML_CHARS, max_size=8)) + WHOLE[end:]
    is_experiment_or_refusal(written(tmp_path, text))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [*Experiment.model_fields, *Task.model_fields, *Variant.model_fields, *Design.model_fields]


@fuzz
@given(st.dictionaries(st.sampled_from(FIELDS), json_values), st.lists(json_values | st.text()))
def test_any_value_in_any_field_is_an_experiment_or_refused(
    tmp_path: Path, fields: Mapping[str, Any], rows: list[Any]
) -> None:
    lines = [row if isinstance(row, str) else json.dumps({**fields, "input": row}) for row in rows]
    (tmp_path / "t.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    is_experiment_or_refusal(written(tmp_path, json.dumps({**DATA, **fields})))
    is_experiment_or_refusal(written(tmp_path, json.dumps({**DATA, **fields, "tasks": "t.jsonl"})))


@fuzz
@given(json_values)
def test_an_input_that_json_can_hold_is_kept_as_it_is(tmp_path: Path, value: Any) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"id": "a", "input": value}))
    path = written(tmp_path, SMALL.replace("[{id: a, input: 1}]", "t.jsonl"))
    if is_experiment_or_refusal(path):
        assert load_experiment(path).tasks[0].input == value
    else:
        assert any(odd in json.dumps(value) for odd in ("NaN", "Infinity", "\\ud"))


# Agents that are callables


def with_agent(function: Any) -> Experiment:
    return experiment_from({**DATA, "variants": [{"id": "v", "agent": {"function": function}}]})


def test_an_agent_may_be_a_callable_in_python() -> None:
    assert with_agent(math.sqrt).variants[0].agent.function is math.sqrt
    with pytest.raises(InvalidExperiment, match=r"variants\[0\].agent.function: 3 is not a callable"):
        with_agent(3)


def test_json_cannot_hold_a_callable_until_it_is_frozen() -> None:
    experiment = with_agent(lambda task: 2 * task["input"])
    with pytest.raises(PydanticSerializationError, match="use freeze_functions"):
        experiment.model_dump_json()
    frozen, pickles = freeze_functions(experiment)
    (digest,) = pickles
    assert frozen.variants[0].agent.function == digest
    assert Experiment.model_validate_json(frozen.model_dump_json()) == frozen
    assert freeze_functions(frozen) == (frozen, {})


def test_a_frozen_callable_does_what_it_did() -> None:
    import pickle

    _, pickles = freeze_functions(with_agent(lambda task: 2 * task["input"]))
    (payload,) = pickles.values()
    assert pickle.loads(payload)({"input": 21}) == 42


def test_a_callable_that_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidExperiment, match=r"the agent of variant 'v' cannot be pickled: .*lock"):
        freeze_functions(with_agent(lambda task: lock))


def test_every_contract_of_an_experiment_has_a_json_schema() -> None:
    schema = Experiment.model_json_schema()
    assert {"Task", "Variant", "AgentSpec", "Design", "SandboxSettings", "GradingSettings"} <= set(schema["$defs"])
    assert "in" in schema["$defs"]["GradingSettings"]["properties"]


# Digests


def test_every_input_has_a_digest(folder: Path) -> None:
    digests = input_digests(load_experiment(folder / "experiment.yaml"))
    assert set(digests) == {
        "experiment.yaml",
        "tasks.jsonl",
        "solve.py",
        "solver.tar.gz",
        "agents",
        "grading",
        "ws",
        "variant 'careful'",
        "variant 'packed'",
        "variant 'called'",
        *(f"the experiment's {n}" for n in ("name", "seed", "tasks", "variants", "design", "sandbox", "grading")),
    }
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in digests.values())


def changes() -> Iterator[tuple[str, Any, list[str]]]:
    yield (
        "edit the experiment",
        lambda f: (f / "experiment.yaml").write_text(WHOLE + "#"),
        ["experiment.yaml has changed"],
    )
    yield "edit an agent", lambda f: (f / "solve.py").write_text("print(3)\n"), ["solve.py has changed"]
    yield "delete an agent", lambda f: (f / "solve.py").unlink(), ["solve.py is gone"]
    yield "delete an artifact", lambda f: (f / "solver.tar.gz").unlink(), ["solver.tar.gz is gone"]
    yield "add beside an agent", lambda f: (f / "grade.py").write_text("x"), ["grade.py is new"]
    yield "edit a module", lambda f: (f / "agents/solve.py").write_text("x"), ["agents has changed"]
    yield "edit a workspace", lambda f: (f / "ws/data.csv").write_text("1,3\n"), ["ws has changed"]
    yield "make executable", lambda f: (f / "ws/data.csv").chmod(0o755), ["ws has changed"]
    yield "rename in a workspace", lambda f: (f / "ws/data.csv").rename(f / "ws/b.csv"), ["ws has changed"]
    yield "add an empty folder", lambda f: (f / "ws/empty").mkdir(), ["ws has changed"]
    yield "add a link", lambda f: (f / "grading/l").symlink_to("/etc"), ["grading has changed"]
    yield "change times", lambda f: os.utime(f / "ws/data.csv", (1, 1)), []
    yield "run a grader", lambda f: (f / "grading/__pycache__").mkdir(), []
    yield "add what nobody names", lambda f: (f / "notes.txt").write_text("x"), []


@pytest.mark.parametrize(("act", "told"), [c[1:] for c in changes()], ids=[c[0] for c in changes()])
def test_what_changed_is_told(folder: Path, act: Any, told: list[str]) -> None:
    experiment = load_experiment(folder / "experiment.yaml")
    frozen = Experiment.model_validate_json(experiment.model_dump_json())  # as a run holds it
    before = input_digests(experiment)
    act(folder)
    assert changed_inputs(before, input_digests(frozen)) == told


def test_what_a_link_in_a_folder_points_at_is_seen_but_not_followed(folder: Path) -> None:
    link = folder / "ws" / "link"
    link.symlink_to("/nowhere/a")
    experiment = load_experiment(folder / "experiment.yaml")
    before = input_digests(experiment)
    link.unlink()
    link.symlink_to("/nowhere/b")
    assert changed_inputs(before, input_digests(experiment)) == ["ws has changed"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 8}, ["the experiment's seed has changed"]),
        ({"name": "n"}, ["the experiment's name has changed"]),
        ({"design": {"repeats": 2}}, ["the experiment's design has changed"]),
        ({"design": {"max_concurrency": 1}}, []),
        ({"design": {"repeats": 1}}, []),
        ({"sandbox": {"memory": "1GiB"}}, ["the experiment's sandbox has changed"]),
        ({"tasks": [{"id": "a", "input": 2}]}, ["the experiment's tasks has changed"]),
        ({"variants": [{"id": "v", "agent": {"command": ["y"]}}]}, ["variant 'v' has changed"]),
        (
            {"variants": [{"id": "w", "agent": {"command": ["x"]}}]},
            ["the experiment's variants has changed", "variant 'v' is gone", "variant 'w' is new"],
        ),
    ],
)
def test_what_changed_in_plain_data_is_told(change: dict[str, Any], told: list[str]) -> None:
    before = input_digests(experiment_from(DATA))
    assert changed_inputs(before, input_digests(experiment_from({**DATA, **change}))) == told


def test_the_digest_of_a_callable_is_that_of_its_pickle() -> None:
    first, second = (input_digests(with_agent(lambda task, by=by: by)) for by in (1, 2))
    assert changed_inputs(first, second) == ["variant 'v' has changed"]


def test_the_folder_is_no_part_of_what_an_experiment_is(tmp_path: Path) -> None:
    assert input_digests(experiment_from(DATA, tmp_path)) == input_digests(experiment_from(DATA, "/"))


def test_an_argument_that_is_no_path_is_no_input(tmp_path: Path) -> None:
    agent = {"command": ["sh", "-c", "x" * 100_000, ".", "", "/etc/passwd"]}
    experiment = experiment_from({**DATA, "variants": [{"id": "v", "agent": agent}]}, tmp_path)
    assert not [name for name in input_digests(experiment) if "experiment" not in name and "variant" not in name]


def test_files_of_an_experiment_made_of_objects_are_checked_when_asked(folder: Path) -> None:
    made = Experiment(
        name="n",
        tasks=[Task(id="a", input=1, workspace=Path("ws")), Task(id="b", input=1, workspace=Path("sw"))],
        variants=[Variant(id="v", agent=AgentSpec(command=("x",)))],
        base=folder,
    )
    with pytest.raises(InvalidExperiment, match=r"tasks\[1\].workspace: cannot find '.*/sw': No such file"):
        check_files(made)
