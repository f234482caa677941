"""The phases of one attempt, with real sandboxes: what is in its folder, and what its completion says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from sandbox_exec.clock import MonotonicClock
from sandbox_exec.contracts import (
    AgentSpec,
    Limits,
    Phase,
    ProviderUse,
    Slot,
    Status,
    Task,
    TrialCompletion,
    TrialDispatch,
    Variant,
    derive_trial_id,
)
from sandbox_exec.dispatching import resolve
from sandbox_exec.sandbox.base import Sandbox
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.provider import Provider, SlotPlaces, chosen
from sandbox_exec.trial.executor import Executor

AGENTS = """
import os
import signal
import sys
import time

from sandbox_exec.guest import RateLimited, context

OUT = os.environ.get("SANDBOX_EXEC_OUT")


def echo(task):
    return task


def nothing(task):
    pass


def speaks(task):
    print("to stdout")
    print("to stderr", file=sys.stderr)
    context().trace("spoke", n=1)


def leaves(task):
    os.mkdir(OUT + "/below")
    with open(OUT + "/below/file", "w") as file:
        file.write("left")
    os.symlink("/etc/passwd", OUT + "/link")


def shows_env(task):
    return {name: os.environ.get(name) for name in task["input"]}


def reads_workspace(task):
    with open("given") as file:
        return file.read()


def hangs(task):
    signal.pause()


def hangs_deaf(task):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def replaces_out(task):
    os.rename(OUT, "/tmp/elsewhere")
    os.symlink("/etc", OUT)


def infinity(task):
    return [float("inf")]


def turned_away(task):
    context().usage(tokens=5)
    context().rate_limited(retry_after_s=30)
    match task["input"]:
        case "hangs":
            signal.pause()
        case "floods":
            while True:
                print("x" * 1000)
        case "fills its trace":
            context().trace("noise", text="x" * 3000)
            context().rate_limited(retry_after_s=50)
        case "closes its trace":
            os.closerange(4, 100)
    raise RateLimited(retry_after_s=40)
"""


class Bench:
    """Runs one attempt after the other, each in a folder of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.base = tmp_path / "base"
        self.base.mkdir()
        (self.base / "agents.py").write_text(AGENTS)
        self._loop, self._clock, self._count = Loop(), MonotonicClock(), 0
        self._provider = Provider(self._loop, chosen(), 2, [])
        self.folder = tmp_path

    def close(self) -> None:
        self._provider.close()
        self._loop.close()

    def dispatch(self, agent: str | AgentSpec, *, env: Any = (), pass_env: Any = (), **fields: Any) -> TrialDispatch:
        spec = AgentSpec(python=f"agents:{agent}") if isinstance(agent, str) else agent
        variant = Variant(id="v", agent=spec, env=dict(env), pass_env=pass_env)
        limits = fields.pop("limits", Limits(timeout_s=60.0, grace_s=0.2))
        out_limit, payload = fields.pop("out_limit", 1 << 20), fields.pop("payload", None)
        limits, variant = resolve(limits, variant, self.base)
        task = Task(id="t", **{"input": 7, **fields})
        slot = Slot(schedule_idx=0, variant_id="v", task_id="t", repeat=2)
        return TrialDispatch(
            slot=slot,
            trial_id=derive_trial_id(slot),
            attempt=1,
            seed=42,
            task=task,
            variant=variant,
            limits=limits,
            base=self.base,
            out_limit=out_limit,
            payload=payload,
        )

    def run(self, dispatch: TrialDispatch, meanwhile: Callable[[Executor], None] | None = None) -> TrialCompletion:
        """`meanwhile` is called right after the start, when no sandbox is there yet."""
        self._count += 1
        self.folder = self.folder.parent / f"attempt-{self._count}" if self._count > 1 else self.folder / "attempt-1"
        self.folder.mkdir()
        done: list[TrialCompletion] = []
        self.started: list[Sandbox] = []
        places = SlotPlaces(self._provider)
        executor = Executor(dispatch, self.folder, lambda kind: places, self._clock, self.started.append, done.append)
        executor.start()
        if meanwhile is not None:
            meanwhile(executor)
        while not done:
            left_s = None if executor.due_s is None else max(0.0, executor.due_s - self._clock.now_s())
            self._loop.run_once(left_s)
            if executor.due_s is not None and executor.due_s <= self._clock.now_s():
                executor.on_time()
        return done[0]

    def files(self) -> dict[str, bytes]:
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in found}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_an_agent_is_given_its_task_and_its_result_is_a_file_with_a_digest(bench: Bench) -> None:
    completion = bench.run(bench.dispatch("echo"))
    result = b'{"id":"t","input":7,"repeat":2,"seed":42}\n'
    assert bench.files() == {"result.json": result}
    assert (completion.status, completion.phase) == (Status.SUCCESS, Phase.AGENT)
    assert completion.result_sha256 == hashlib.sha256(result).hexdigest()
    assert completion.usage is not None
    assert completion.isolation is not None
    assert len(bench.started) == 1


def test_an_agent_that_returns_nothing_leaves_no_result(bench: Bench) -> None:
    completion = bench.run(bench.dispatch("nothing"))
    assert (completion.status, completion.result_sha256, bench.files()) == (Status.SUCCESS, None, {})


def test_a_command_reads_its_task_and_leaves_its_result_in_files(bench: Bench) -> None:
    (bench.base / "solve.sh").write_text('cp "$SANDBOX_EXEC_IN/task.json" "$SANDBOX_EXEC_OUT/result.json"\necho done\n')
    completion = bench.run(bench.dispatch(AgentSpec(command=("sh", "solve.sh"))))
    assert completion.status is Status.SUCCESS
    assert bench.files() == {
        "result.json": b'{"id":"t","input":7,"repeat":2,"seed":42}\n',
        "stdout.log": b"done\n",
    }


def test_an_agent_that_is_a_pickled_function_is_called_with_its_task(bench: Bench, tmp_path: Path) -> None:
    payload = tmp_path / "function.pkl"
    payload.write_bytes(cloudpickle.dumps(lambda task: task["input"] * 6))
    digest = f"sha256:{hashlib.sha256(payload.read_bytes()).hexdigest()}"
    completion = bench.run(bench.dispatch(AgentSpec(function=digest), payload=payload))
    assert (completion.status, bench.files()) == (Status.SUCCESS, {"result.json": b"42\n"})


def test_what_an_agent_says_is_in_logs_and_trace(bench: Bench) -> None:
    bench.run(bench.dispatch("speaks"))
    found = bench.files()
    assert (found["stdout.log"], found["stderr.log"]) == (b"to stdout\n", b"to stderr\n")
    (event,) = map(json.loads, found["trace.jsonl"].splitlines())
    assert (event["type"], event["n"]) == ("spoke", 1)


def test_what_an_agent_leaves_is_copied_and_what_is_not_is_listed(bench: Bench) -> None:
    completion = bench.run(bench.dispatch("leaves"))
    found = bench.files()
    assert completion.status is Status.SUCCESS
    assert found.pop("out/below/file") == b"left"
    assert json.loads(found.pop("collected.json")) == {
        "files": 1,
        "bytes": 4,
        "left_out": [{"path": "link", "reason": "a symbolic link"}],
        "left_out_more": 0,
    }
    assert found == {}


def test_more_than_out_limit_is_left_out(bench: Bench) -> None:
    bench.run(bench.dispatch("leaves", out_limit=3))
    assert "out/below/file" not in bench.files()
    assert "4 bytes do not fit the 3 that are kept" in bench.files()["collected.json"].decode()


def test_an_agent_that_puts_something_else_in_the_place_of_out_harms_nobody(bench: Bench) -> None:
    completion = bench.run(bench.dispatch("replaces_out"))
    assert completion.status in (Status.SUCCESS, Status.AGENT_ERROR)  # it may not even be allowed to
    assert not any(name.startswith("out/") for name in bench.files())
    assert bench.run(bench.dispatch("echo")).status is Status.SUCCESS


def test_a_secret_reaches_the_agent_and_no_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    monkeypatch.setenv("OTHER", "not passed")
    dispatch = bench.dispatch(
        "shows_env", env={"MODE": "careful"}, pass_env=["MY_KEY"], input=["MY_KEY", "MODE", "OTHER"]
    )
    assert "s3cret" not in dispatch.model_dump_json()
    bench.run(dispatch)
    assert json.loads(bench.files()["result.json"]) == {"MY_KEY": "s3cret", "MODE": "careful", "OTHER": None}


def test_a_secret_that_is_not_there_is_a_fault_of_the_setup_and_the_agent_is_not_started(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    completion = bench.run(bench.dispatch("echo", pass_env=["MY_KEY"]))
    assert (completion.status, completion.phase, bench.started) == (Status.SETUP_FAILED, Phase.STAGE, [])
    assert completion.error is not None
    assert "pass_env names MY_KEY" in completion.error.message


def test_the_working_directory_is_filled_from_the_tasks_workspace(bench: Bench) -> None:
    (bench.base / "space").mkdir()
    (bench.base / "space" / "given").write_text("by the task")
    bench.run(bench.dispatch("reads_workspace", workspace="space"))
    assert bench.files() == {"result.json": b'"by the task"\n'}


@pytest.mark.parametrize("size", [None, 32 << 20])
def test_a_workspace_that_is_missing_or_too_large_is_a_fault_of_the_setup(bench: Bench, size: int | None) -> None:
    if size is not None:
        (bench.base / "space").mkdir()
        (bench.base / "space" / "large").write_bytes(bytes(size))
    completion = bench.run(bench.dispatch("echo", workspace="space", limits=Limits(disk="16MiB")))
    assert completion.status is Status.SETUP_FAILED
    assert bench.run(bench.dispatch("echo")).status is Status.SUCCESS


def test_a_frozen_artifact_cannot_be_run_here_and_it_is_said_so(bench: Bench) -> None:
    completion = bench.run(bench.dispatch(AgentSpec(artifact=Path("solver.tar.gz"))))
    assert (completion.status, completion.phase) == (Status.SETUP_FAILED, Phase.STAGE)


@pytest.mark.parametrize("agent", ["hangs", "hangs_deaf"])
def test_the_error_of_a_timeout_has_one_type_whether_or_not_the_agent_had_a_last_word(bench: Bench, agent: str) -> None:
    completion = bench.run(bench.dispatch(agent, limits=Limits(timeout_s=0.3, grace_s=0.2)))
    assert completion.status is Status.TASK_TIMEOUT
    assert completion.error is not None
    assert completion.error.type == "TrialTimeout"
    assert completion.kill is not None


def test_a_result_that_is_not_json_is_malformed(bench: Bench) -> None:
    completion = bench.run(bench.dispatch("infinity"))
    assert (completion.status, bench.files()) == (Status.AGENT_ERROR, {})
    assert completion.error is not None
    assert completion.error.type == "MalformedResult"


@pytest.mark.parametrize("does", ["raises", "fills its trace", "closes its trace"])
def test_an_agent_that_gives_up_because_it_was_turned_away_is_heard(bench: Bench, does: str) -> None:
    completion = bench.run(bench.dispatch("turned_away", input=does, limits=Limits(timeout_s=60.0, trace=3000)))
    assert (completion.status, completion.exit_code) == (Status.RATE_LIMITED, 75)
    assert completion.retry_after_s == 40.0
    assert completion.provider == ProviderUse(tokens=5, requests=1, turned_away=1)


@pytest.mark.parametrize(
    ("does", "status", "limits"),
    [
        ("hangs", Status.TASK_TIMEOUT, Limits(timeout_s=0.3, grace_s=0.2)),
        ("floods", Status.OUTPUT_EXCEEDED, Limits(timeout_s=60.0, output_ceiling=100_000)),
    ],
)
def test_one_that_was_turned_away_and_ended_for_another_reason_is_that(
    bench: Bench, does: str, status: Status, limits: Limits
) -> None:
    completion = bench.run(bench.dispatch("turned_away", input=does, limits=limits))
    assert (completion.status, completion.retry_after_s) == (status, None)
    if does == "floods":  # the other one may have been late before its first word
        assert completion.provider == ProviderUse(tokens=5, requests=1, turned_away=1)


def test_an_attempt_that_is_stopped_before_its_sandbox_is_there_is_cancelled(bench: Bench) -> None:
    completion = bench.run(bench.dispatch("hangs"), meanwhile=lambda executor: executor.stop())
    assert completion.status is Status.CANCELLED
    assert completion.error is not None
    assert completion.error.type == "Cancelled"


def test_an_attempt_that_is_frozen_before_its_sandbox_is_there_has_no_deadline_until_it_is_thawed(bench: Bench) -> None:
    frozen: list[float | None] = []

    def meanwhile(executor: Executor) -> None:
        executor.freeze()
        while not has_begun(executor):
            bench._loop.run_once(None)
        frozen.append(executor.due_s)
        executor.thaw()
        frozen.append(executor.due_s)

    completion = bench.run(bench.dispatch("echo", limits=Limits(timeout_s=60.0)), meanwhile)
    assert completion.status is Status.SUCCESS
    assert frozen[0] is None
    assert frozen[1] is not None


def has_begun(executor: Executor) -> bool:
    return executor.phase is not Phase.STAGE


@pytest.mark.parametrize(
    ("agent", "name"), [("speaks", "stdout.log"), ("speaks", "trace.jsonl"), ("echo", "result.json")]
)
def test_where_there_is_no_room_for_what_it_says_the_attempt_is_not_the_agents(
    bench: Bench, tmp_path: Path, agent: str, name: str
) -> None:
    def fill(executor: Executor) -> None:
        (executor.folder / name).symlink_to("/dev/full")

    completion = bench.run(bench.dispatch(agent), fill)
    assert completion.status is Status.ENVIRONMENT_ERROR
    assert completion.error is not None
    assert completion.error.type == "StoreFull"
