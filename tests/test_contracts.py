from __future__ import annotations

import ast
import inspect
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sandbox_exec import contracts
from sandbox_exec.contracts import (
    STATUS_TABLE,
    ActiveTrial,
    AgentError,
    AgentSpec,
    Blame,
    Contract,
    Dropped,
    Grade,
    Isolation,
    KillReport,
    Limits,
    Outcome,
    Phase,
    Retry,
    Rung,
    Slot,
    Status,
    Task,
    TaskProtocol,
    TrialCompletion,
    TrialDispatch,
    Usage,
    Variant,
    derive_seed,
    derive_trial_id,
)
from sandbox_exec.errors import AgentFailed
from sandbox_exec.units import GIB, MIB

unhurried = settings(deadline=None)  # a busy machine is no fault of the code

USAGE = Usage(wall_s=1.5, cpu_s=0.5, peak_memory_bytes=MIB)
ISOLATION = Isolation(
    rung=Rung.ROOT_NAMESPACES,
    memory="cgroup-v1",
    pids="cgroup-v1",
    cpu="none",
    freeze="cgroup-v1",
    filesystem="private",
    network="none",
    uid=65534,
    seccomp=True,
    landlock=7,
    notes=("cpus: no controller",),
)
KILL = KillReport(reason="deadline", latency_s=0.003, proof="pid namespace is empty", grace_used=True)
SLOT = Slot(schedule_idx=3, variant_id="careful", task_id="sum-01", repeat=2)
TASK = Task(id="sum-01", input={"numbers": [1, 2]})
VARIANT = Variant(id="careful", agent=AgentSpec(command=("python3", "solve.py")))


# Every contract


CONTRACTS = [c for c in vars(contracts).values() if inspect.isclass(c) and issubclass(c, Contract)]


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_is_frozen_refuses_unknown_fields_and_says_what_it_is(contract: type[Contract]) -> None:
    assert contract.model_config["frozen"] is True
    assert contract.model_config["extra"] == "forbid"
    assert contract.model_config["allow_inf_nan"] is False
    assert contract.__doc__


def test_a_contract_cannot_be_changed() -> None:
    limits = Limits()
    with pytest.raises(ValidationError, match="frozen"):
        limits.pids = 5
    with pytest.raises(ValidationError, match="Extra inputs"):
        Limits(timeout=5)  # type: ignore[call-arg]  # that it is refused is the test


# Status, blame and retry


def test_the_status_table_is_the_design() -> None:
    agent, task, infra, run = Blame.AGENT, Blame.TASK, Blame.INFRA, Blame.RUN
    assert {str(status): tuple(row) for status, row in STATUS_TABLE.items()} == {
        "success": (None, Retry.NEVER),
        "agent_error": (agent, Retry.MAX_RETRIES),
        "task_timeout": (agent, Retry.TIMEOUT_ACTION),
        "memory_exceeded": (agent, Retry.NEVER),
        "pids_exceeded": (agent, Retry.NEVER),
        "output_exceeded": (agent, Retry.NEVER),
        "disk_exceeded": (agent, Retry.NEVER),
        "setup_failed": (task, Retry.MAX_RETRIES),
        "grade_error": (task, Retry.MAX_RETRIES),
        "rate_limited": (Blame.PROVIDER, Retry.AFTER_RETRY_AFTER),
        "environment_error": (infra, Retry.INFRA_BUDGET),
        "worker_lost": (infra, Retry.INFRA_BUDGET),
        "cancelled": (run, Retry.NEVER),
        "skipped": (run, Retry.NEVER),
    }


@pytest.mark.parametrize("status", Status)
def test_every_status_has_its_row_and_only_success_is_nobodys_fault(status: Status) -> None:
    assert (status.blame, status.retry) == STATUS_TABLE[status]
    assert (status.blame is None) == (status is Status.SUCCESS)


@pytest.mark.parametrize("status", Status)
def test_blame_is_written_out_and_reads_back(status: Status) -> None:
    outcome = Outcome(status=status, usage=USAGE)
    assert json.loads(outcome.model_dump_json())["blame"] == outcome.blame == status.blame
    assert Outcome.model_validate_json(outcome.model_dump_json()) == outcome
    assert outcome.ok == (status is Status.SUCCESS)


@pytest.mark.parametrize("blame", ["infra", None, [], 7])
def test_a_blame_that_contradicts_its_status_is_refused(blame: object) -> None:
    with pytest.raises(ValidationError, match="but status task_timeout means 'agent'"):
        Outcome.model_validate({"status": "task_timeout", "blame": blame, "usage": {"wall_s": 1}})


@pytest.mark.parametrize("status", ["splendid", [], {}, None, 7])
def test_a_status_that_does_not_exist_is_refused_with_or_without_blame(status: object) -> None:
    for data in ({"status": status}, {"status": status, "blame": "agent"}):
        with pytest.raises(ValidationError, match="Input should be 'success'"):
            Outcome.model_validate({**data, "usage": {"wall_s": 1}})


# Limits


def test_limits_take_what_people_write_and_hold_numbers() -> None:
    limits = Limits(timeout_s="1m30s", memory="1.5GiB", disk=2 * MIB, pids=None, cpus=1)
    assert (limits.timeout_s, limits.memory, limits.disk) == (90.0, 3 * GIB // 2, 2 * MIB)
    assert (limits.pids, limits.cpus, limits.grace_s) == (None, 1.0, 0.5)
    assert Limits(timeout_s=None, memory=None).memory is None


def test_limits_are_the_same_after_json() -> None:
    limits = Limits(memory="1GiB", readable=["/usr/share/dict"], hidden=["~/.ssh"], require="namespaces")
    assert Limits.model_validate_json(limits.model_dump_json()) == limits


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("timeout_s", 0, "greater than 0"),
        ("timeout_s", -1, "below 0"),
        ("timeout_s", "soon", 'such as "250ms"'),
        ("timeout_s", math.nan, "not finite"),
        ("grace_s", "-1s", 'such as "250ms"'),
        ("grace_s", None, 'such as "250ms"'),
        ("memory", "4095KiB", "at least 4 MiB, or no interpreter starts"),
        ("memory", "lots", 'such as "512MiB"'),
        ("memory", True, 'such as "512MiB"'),
        ("address_space", 1, "at least 4 MiB"),
        ("disk", 0, "at least 1 MiB"),
        ("files", 0, "greater than or equal to 16"),
        ("open_files", 3, "greater than or equal to 16"),
        ("pids", 0, "greater than or equal to 1"),
        ("pids", True, "valid integer"),
        ("pids", 1.5, "valid integer"),
        ("cpus", 0, "greater than 0"),
        ("cpus", math.inf, "finite"),
        ("stdout", -1, "below 0"),
        ("network", "some", "'none' or 'host'"),
        ("require", "prayer", "'namespaces\\+cgroup'"),
        ("readable", "/etc", "is one path; give a list"),
        ("readable", [""], "not empty"),
        ("hidden", ["a\0b"], "without NUL"),
        ("hidden", [b"/etc"], "is not a path"),
        ("hidden", ["~no-such-user-at-all/x"], "names a home that is not known"),
    ],
)
def test_a_bad_limit_is_refused_with_its_field_and_what_is_allowed(field: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        Limits.model_validate({field: value})
    assert caught.value.errors()[0]["loc"][0] == field


def test_paths_become_absolute_and_links_stay_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/somebody")
    limits = Limits(readable=["data", Path("../link")], hidden=("~/.ssh",))
    assert limits.readable == (tmp_path / "here" / "data", tmp_path / "link")
    assert limits.hidden == (Path("/somebody/.ssh"),)


def test_a_path_cannot_be_both_readable_and_hidden() -> None:
    with pytest.raises(ValidationError, match="both readable and hidden: /a;"):
        Limits(readable=["/a", "/b"], hidden=["/a/c", "/x/../a"])


def test_the_schema_of_limits_describes_every_field() -> None:
    properties = Limits.model_json_schema()["properties"]
    assert set(properties) == set(Limits.model_fields)
    assert [name for name, field in properties.items() if not field.get("description")] == []
    size, none = properties["memory"]["anyOf"]
    assert size["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    assert none == {"type": "null"}


def test_type_checkers_see_every_limit_that_there_is() -> None:
    tree = ast.parse(inspect.getsource(Limits))
    (init,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    assert [arg.arg for arg in init.args.kwonlyargs] == list(Limits.model_fields)


def test_rungs_are_ordered_by_strength_not_by_name() -> None:
    names = ["root-namespaces", "user-namespaces", "cgroup", "subreaper", "process-group"]
    assert [str(rung) for rung in Rung] == names
    assert [rung.namespaced for rung in Rung] == [True, True, False, False, False]
    for i, strong in enumerate(Rung):
        assert [strong.at_least(other) for other in Rung] == [i <= j for j in range(len(Rung))]


# Outcome


def test_an_outcome_holds_any_value_and_the_very_events_it_was_given() -> None:
    value, events = object(), [{"type": "step", "n": i} for i in range(3)]
    outcome = Outcome(status=Status.SUCCESS, value=value, usage=USAGE, trace=tuple(events))
    assert outcome.unwrap() is value
    assert all(held is event for held, event in zip(outcome.trace, events, strict=True))
    assert outcome.dropped == Dropped()


def test_a_whole_outcome_is_the_same_after_json_and_pickle() -> None:
    outcome = Outcome(
        status=Status.TASK_TIMEOUT,
        value={"partial": [1, 2.5, None]},
        error=AgentError(type="TrialTimeout", message="time is up", traceback="Traceback ..."),
        exit_code=1,
        trace=({"type": "step"},),
        stdout="out",
        stderr="err",
        dropped=Dropped(stdout_bytes=10, trace_torn=1),
        usage=USAGE,
        kill=KILL,
        isolation=ISOLATION,
    )
    assert Outcome.model_validate_json(outcome.model_dump_json()) == outcome
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_unwrap_raises_with_all_that_a_person_needs() -> None:
    outcome = Outcome(
        status=Status.AGENT_ERROR,
        error=AgentError(type="ZeroDivisionError", message="division by zero", traceback="File solve.py, line 3\n"),
        stderr="x" * 5000 + "the last words\n",
        usage=USAGE,
    )
    with pytest.raises(AgentFailed) as caught:
        outcome.unwrap()
    first, *_ = str(caught.value).splitlines()
    assert first == "agent_error: ZeroDivisionError: division by zero"
    assert "File solve.py, line 3" in str(caught.value)
    assert str(caught.value).endswith("the last words")
    assert len(str(caught.value)) < 3000
    assert caught.value.outcome is outcome


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ({"exit_code": 3}, "agent_error: exit code 3"),
        ({"signal": 11}, "agent_error: ended by signal 11"),
        ({}, "agent_error"),
    ],
)
def test_unwrap_says_how_an_agent_without_an_exception_ended(ending: dict[str, int], message: str) -> None:
    outcome = Outcome.model_validate({"status": "agent_error", "usage": USAGE, **ending})
    with pytest.raises(AgentFailed, match=f"^{message}$"):
        outcome.unwrap()


def test_the_exception_of_unwrap_survives_pickle() -> None:
    failed = AgentFailed("task_timeout", Outcome(status=Status.TASK_TIMEOUT, usage=USAGE))
    copy = pickle.loads(pickle.dumps(failed))
    assert (str(copy), copy.outcome) == (str(failed), failed.outcome)


@pytest.mark.parametrize("usage", [{"wall_s": -1}, {"wall_s": math.nan}, {"wall_s": 1, "cpu_s": math.inf}])
def test_usage_is_finite_and_not_negative(usage: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Usage.model_validate(usage)


# Tasks, variants, slots


def test_a_task_row_is_read_as_the_design_writes_it() -> None:
    row = {
        "id": "sum-01",
        "input": {"a": [1, None, "x"]},
        "image": "img:1",
        "workspace": "ws",
        "grading": {"assets": "g", "command": ["python3", "grade.py"]},
        "protocol": {
            "timeout_s": "2m",
            "timeout_action": "extend",
            "max_retries": 2,
            "priority": -1,
            "tags": ["t"],
        },
        "depends_on": ["sum-00"],
        "chain": "sums",
    }
    task = Task.model_validate_json(json.dumps(row))
    assert task.protocol == TaskProtocol(
        timeout_s=120.0, timeout_action="extend", max_retries=2, priority=-1, tags=("t",)
    )
    assert task.grading is not None
    assert task.grading.command == ("python3", "grade.py")
    assert Task.model_validate_json(task.model_dump_json()) == task


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "", "input": 1}, "at least 1 character"),
        ({"id": "a"}, "Field required"),
        ({"id": "a", "input": 1, "colour": "red"}, "Extra inputs"),
        ({"id": "a", "input": object()}, "valid JSON"),
        ({"id": "a", "input": {"deep": [math.nan]}}, "finite"),
        ({"id": "a", "input": 1, "depends_on": ["b", "a"]}, "task 'a' depends on itself"),
        ({"id": "a", "input": 1, "protocol": {"timeout_s": 0}}, "greater than 0"),
        ({"id": "a", "input": 1, "protocol": {"max_retries": -1}}, "greater than or equal to 0"),
        ({"id": "a", "input": 1, "protocol": {"timeout_action": "wait"}}, "'skip', 'retry' or 'extend'"),
        ({"id": "a", "input": 1, "grading": {"command": []}}, "at least 1 item"),
    ],
)
def test_a_bad_task_row_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Task.model_validate(row)


@pytest.mark.parametrize(
    "spec",
    [{"command": ["python3", "solve.py"]}, {"artifact": "a.tar.gz"}, {"python": "agents.solve:Solver.main"}],
)
def test_an_agent_comes_from_one_place(spec: dict[str, Any]) -> None:
    assert AgentSpec.model_validate(spec).model_dump(exclude_none=True, mode="json") == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "given: none"),
        ({"command": ["x"], "python": "a:b"}, "given: command, python"),
        ({"command": []}, "at least 1 item"),
        ({"command": ["a\0b"]}, "holds a NUL"),
        ({"python": "solve"}, '"module:function"'),
        ({"python": "solve.py:main()"}, '"module:function"'),
        ({"python": ":main"}, '"module:function"'),
    ],
)
def test_an_agent_from_nowhere_or_two_places_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AgentSpec.model_validate(spec)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"env": {"A=B": "1"}}, "without '='"),
        ({"env": {"": "1"}}, "not empty"),
        ({"env": {"A": "x\0"}}, "holds a NUL"),
        ({"env": {"SANDBOX_EXEC_OUT": "/etc"}}, "is reserved"),
        ({"pass_env": ["SANDBOX_EXEC_IN"]}, "is reserved"),
        ({"env": {"KEY": "1"}, "pass_env": ["KEY"]}, "both in env and in pass_env: KEY"),
        ({"max_parallel_trials": 0}, "greater than or equal to 1"),
    ],
)
def test_a_bad_variant_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Variant.model_validate({"id": "v", "agent": {"command": ["x"]}, **more})


def test_a_trial_id_and_a_seed_never_change_between_versions() -> None:
    assert derive_trial_id(SLOT) == "careful.sum-01.2-6a91944b3b12"
    assert derive_seed(7, "careful.sum-01.2") == 154660278


def test_a_trial_id_does_not_depend_on_the_order_of_the_schedule() -> None:
    assert derive_trial_id(SLOT.model_copy(update={"schedule_idx": 99})) == derive_trial_id(SLOT)


IDS = st.text(min_size=1, max_size=256)
SLOTS = st.builds(Slot, schedule_idx=st.integers(0, 9), variant_id=IDS, task_id=IDS, repeat=st.integers(0, 10**6))


@unhurried
@given(SLOTS)
def test_a_trial_id_is_safe_as_the_name_of_a_folder(slot: Slot) -> None:
    name = derive_trial_id(slot)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)
    assert len(name) < 200


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b.1", 1), ("a.b", "1", 1)),
        (("a/b", "t", 0), ("a:b", "t", 0)),
        (("A", "t", 0), ("a", "t", 0)),
        (("v", "x" * 200, 0), ("v", "x" * 201, 0)),
        (("v", "\u00e9", 0), ("v", "\u00e8", 0)),
    ],
)
def test_slots_that_look_alike_have_different_trials(one: tuple[str, str, int], other: tuple[str, str, int]) -> None:
    ids = {derive_trial_id(Slot(schedule_idx=0, variant_id=v, task_id=t, repeat=r)).lower() for v, t, r in (one, other)}
    assert len(ids) == 2


@unhurried
@given(st.integers(), st.text())
def test_a_seed_fits_every_generator(seed: int, trial_id: str) -> None:
    assert 0 <= derive_seed(seed, trial_id) < 2**32


def test_seeds_differ_between_trials_and_between_experiments() -> None:
    assert len({derive_seed(seed, trial) for seed in range(20) for trial in ("a", "b", "c")}) == 60


# Grades and messages


def test_a_grade_is_read_as_a_grader_writes_it() -> None:
    raw = b'{"score": 1, "passed": true, "metrics": {"steps": 3}, "details": {"why": ["ok", null]}}'
    grade = Grade.model_validate_json(raw)
    assert (grade.score, grade.passed, grade.metrics) == (1.0, True, {"steps": 3.0})
    assert Grade.model_validate_json(grade.model_dump_json()) == grade


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"score": NaN}',
        b'{"score": 1e999}',
        b'{"score": "1"}',
        b'{"score": true}',
        b'{"score": 1, "passed": 1}',
        b'{"score": 1, "extra": 1}',
        b'{"score": 1, "metrics": {"a": Infinity}}',
        b'{"score": 1, "details": [[NaN]]}',
        b'{"score": 1, "details": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"score": ' + b"9" * 10_000 + b"}",
    ],
)
def test_a_malformed_grade_is_refused(raw: bytes) -> None:
    with pytest.raises(ValidationError):
        Grade.model_validate_json(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda j: st.lists(j) | st.dictionaries(st.text(), j),
)


@unhurried
@given(
    st.binary()
    | st.fixed_dictionaries({"score": JSON}, optional={"metrics": JSON, "details": JSON}).map(
        lambda data: json.dumps(data).encode()
    )
)
def test_any_bytes_of_a_grader_are_a_grade_or_refused(raw: bytes) -> None:
    try:
        grade = Grade.model_validate_json(raw)
    except ValidationError:
        return
    assert math.isfinite(grade.score)
    assert Grade.model_validate(json.loads(grade.model_dump_json())) == grade


def test_the_messages_about_a_trial_are_the_same_after_json() -> None:
    trial: dict[str, Any] = {"slot": SLOT, "trial_id": derive_trial_id(SLOT), "attempt": 1}
    messages = [
        TrialDispatch(**trial, seed=9, task=TASK, variant=VARIANT, limits=Limits(memory="1GiB"), base=Path("/e")),
        TrialCompletion(
            **trial,
            status=Status.SUCCESS,
            phase=Phase.TEARDOWN,
            grade=Grade(score=0.5),
            usage=USAGE,
            kill=KILL,
            isolation=ISOLATION,
        ),
        TrialCompletion(**trial, status=Status.RATE_LIMITED, phase=Phase.AGENT, retry_after_s=2.5),
        ActiveTrial(**trial, folder=Path("/runs/r/trials/t/attempt-1"), worker="123@456"),
    ]
    for message in messages:
        assert type(message).model_validate_json(message.model_dump_json()) == message


def test_a_message_about_another_trial_than_its_slots_is_refused() -> None:
    with pytest.raises(ValidationError, match="but this slot's trial is 'careful"):
        ActiveTrial(slot=SLOT, trial_id="another", attempt=1, folder=Path("/x"), worker="w")


def test_a_dispatch_of_another_task_than_its_slots_is_refused() -> None:
    other = TASK.model_copy(update={"id": "sum-02"})
    with pytest.raises(ValidationError, match="but the dispatch holds 'careful' and 'sum-02'"):
        TrialDispatch(
            slot=SLOT,
            trial_id=derive_trial_id(SLOT),
            attempt=1,
            seed=1,
            task=other,
            variant=VARIANT,
            limits=Limits(),
            base=Path("/e"),
        )


def test_attempts_count_from_one() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        ActiveTrial(slot=SLOT, trial_id=derive_trial_id(SLOT), attempt=0, folder=Path("/x"), worker="w")
