"""The library's door to durable runs: real runs of a few trials, and what is refused before there is one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import Meeting, meetings

import sandbox_exec
from sandbox_exec import Experiment, RunCallback, continue_run, run, runs
from sandbox_exec.backends.local import LocalBackend
from sandbox_exec.containment import Cgroups, Containment
from sandbox_exec.contracts import Rung, Slot, Status, TrialCompletion
from sandbox_exec.coordinator import Coordinator
from sandbox_exec.dispatching import limits_of
from sandbox_exec.errors import InvalidExperiment, InvalidValue, RunLocked, SandboxUnavailable
from sandbox_exec.runs import RunSummary, find_run, new_run_id, status_of
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.store import RunStore, history, holder

Task = dict[str, Any]


def double(task: Task) -> dict[str, Any]:
    return {"doubled": task["input"] * 2, "seed": task["seed"]}


def fails_on_one(task: Task) -> dict[str, Any]:
    if task["input"] == 1:
        raise ValueError("one is not for me")
    return double(task)


def experiment(base: Path, **changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "name": "numbers",
        "seed": 3,
        "tasks": [{"id": f"t{n}", "input": n} for n in range(3)],
        "variants": [
            {"id": "good", "agent": {"function": double}},
            {"id": "bad", "agent": {"function": fails_on_one}},
        ],
        "design": {"max_concurrency": 2},
        "sandbox": {"timeout_s": 20, "memory": "128MiB"},
        "base": base,
    }
    return Experiment(**{**fields, **changes})


def command(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": "shell", "agent": {"command": ["sh", "-c", text]}, **fields}


def history_of(folder: Path) -> bytes:
    with RunStore.open(folder, write=False) as store:
        return b"".join(history(store))


class Teller(RunCallback):
    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.ended: list[TrialCompletion] = []

    def on_run_start(self, run: Coordinator) -> None:
        self.heard.append("run")

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self.ended.append(completion)

    def on_task_end(self, task_id: str, completions: Sequence[TrialCompletion]) -> None:
        self.heard.append((task_id, len(completions)))

    def on_run_end(self, end: Any) -> None:
        self.heard.append(end.status)


@pytest.fixture
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meeting]:
    yield from meetings(tmp_path_factory.mktemp("meeting"))


# --- a run from beginning to end ---


class Done:
    def __init__(self, base: Path) -> None:
        self.experiment, self.teller = experiment(base), Teller()
        self.summary = run(self.experiment, runs=base / "runs", callbacks=[self.teller])
        self.folder = self.summary.folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run of two functions that was not disturbed."""
    return Done(tmp_path_factory.mktemp("done"))


def test_a_run_is_completed_and_summed_up(done: Done) -> None:
    summary = done.summary
    assert (summary.status, summary.reason, summary.slots, summary.committed) == ("completed", "", 6, 6)
    assert summary.by_status == {Status.SUCCESS: 5, Status.AGENT_ERROR: 1}
    assert summary.by_variant == {
        "good": {Status.SUCCESS: 3},
        "bad": {Status.SUCCESS: 2, Status.AGENT_ERROR: 1},
    }
    assert RunSummary.model_validate_json(summary.model_dump_json()) == summary


def test_a_run_is_a_folder_below_runs_with_a_name_of_its_own(done: Done) -> None:
    assert done.folder.parent.name == "runs"
    assert done.folder.name == done.summary.run_id
    assert re.fullmatch(r"numbers-\d{8}-\d{6}-[0-9a-f]{4}", done.summary.run_id)
    attempts = {path.parent.parent.name for path in done.folder.glob("trials/*/attempt-1/completion.json")}
    assert attempts == {completion.trial_id for completion in done.teller.ended}


def test_results_are_announced_in_the_order_of_the_schedule(done: Done) -> None:
    assert [completion.slot.schedule_idx for completion in done.teller.ended] == [0, 1, 2, 3, 4, 5]
    assert done.teller.heard == ["run", ("t0", 2), ("t1", 2), ("t2", 2), "completed"]


def test_what_a_function_returned_is_its_result(done: Done) -> None:
    last = done.teller.ended[-2]
    result = json.loads((done.folder / "trials" / last.trial_id / "attempt-1" / "result.json").read_text())
    assert result["doubled"] == 4


def test_functions_are_frozen_into_the_run(done: Done) -> None:
    frozen = {path.name for path in (done.folder / "functions").iterdir()}
    with RunStore.open(done.folder, write=False) as store:
        stored = Experiment.model_validate_json(store.run().experiment_json)
    assert frozen == {f"{variant.agent.function}.pkl" for variant in stored.variants}
    assert all(name.startswith("sha256:") for name in frozen)


def test_a_run_has_no_owner_when_it_has_ended(done: Done) -> None:
    assert holder(done.folder) is None
    assert not (done.folder / "control.sock").exists()


def test_a_completed_run_can_be_continued_and_nothing_happens(done: Done) -> None:
    before, teller = history_of(done.folder), Teller()
    again = continue_run(done.folder, callbacks=[teller])
    assert (again.status, again.committed, teller.ended) == ("completed", 6, [])
    assert history_of(done.folder) == before


def test_the_same_experiment_has_the_same_history_whatever_its_folder_and_workers(done: Done, tmp_path: Path) -> None:
    again = run(experiment(tmp_path), runs=tmp_path / "runs", run_id="again", workers=1)
    assert again.folder == tmp_path / "runs" / "again"
    assert history_of(again.folder) == history_of(done.folder)


def test_no_warning_is_given_where_there_are_fewer_trials_than_workers(tmp_path: Path) -> None:
    one = experiment(tmp_path, tasks=[{"id": "t", "input": 1}], variants=[command("true")])
    summary = run(one, runs=tmp_path, workers=9)
    with RunStore.open(summary.folder, write=False) as store:
        assert [event for event in store.events() if event.kind == "warning"] == []


def test_a_file_is_run_as_an_experiment_is(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "one", "input": 5}\n')
    (tmp_path / "agent.py").write_text("def solve(task):\n    return {'got': task['input']}\n")
    (tmp_path / "experiment.yaml").write_text(
        "name: file\ntasks: tasks.jsonl\nvariants:\n  - {id: a, agent: {python: 'agent:solve'}}\n"
        "  - {id: b, agent: {command: [sh, agent.sh]}}\nsandbox: {timeout_s: 20}\n"
    )
    (tmp_path / "agent.sh").write_text('ls "$(dirname "$0")"; echo "{\\"got\\": 6}" > "$SANDBOX_EXEC_OUT/result.json"')
    summary = run(tmp_path / "experiment.yaml", runs=tmp_path / "runs")
    assert summary.by_status == {Status.SUCCESS: 2}
    results = {path.parent.parent.name[0]: json.loads(path.read_text()) for path in summary.folder.rglob("result.json")}
    assert results == {"a": {"got": 5}, "b": {"got": 6}}
    if chosen().rung.namespaced:  # of what is beside the experiment, an agent sees what its variant names
        (seen,) = [path.read_text() for path in summary.folder.rglob("stdout.log")]
        assert seen.split() == ["agent.sh"]


def test_a_secret_reaches_the_agent_and_no_file_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_API_KEY", "s3cr3t-s3cr3t")
    tells = command(
        'echo "{\\"length\\": ${#MODEL_API_KEY}}" > "$SANDBOX_EXEC_OUT/result.json"', pass_env=["MODEL_API_KEY"]
    )
    summary = run(experiment(tmp_path, tasks=[{"id": "t", "input": 1}], variants=[tells]), runs=tmp_path)
    (result,) = summary.folder.rglob("result.json")
    assert json.loads(result.read_text()) == {"length": 13}
    files = [path for path in summary.folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if b"s3cr3t" in path.read_bytes()] == []


# --- interruption and continuation ---


class Drains(RunCallback):
    """Asks to stop when some trials are committed."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run

    def on_trial_end(self, completion: TrialCompletion) -> None:
        if completion.slot.schedule_idx + 1 == self._after:
            self._run.drain("enough")


def test_a_drained_run_continues_to_the_same_history(done: Done, tmp_path: Path) -> None:
    first = run(experiment(tmp_path), runs=tmp_path, workers=1, callbacks=[Drains(2)])
    assert (first.status, first.reason) == ("interrupted", "enough")
    assert 2 <= first.committed < 6  # and what was in flight
    assert status_of(first.folder).status == "interrupted"
    teller = Teller()
    second = continue_run(first.folder, callbacks=[teller])
    assert (second.status, second.committed) == ("completed", 6)
    assert [completion.slot.schedule_idx for completion in teller.ended] == [*range(first.committed, 6)]
    assert history_of(first.folder) == history_of(done.folder)


def test_a_run_that_is_drained_before_it_begins_has_run_nothing(done: Done, tmp_path: Path) -> None:
    first = run(experiment(tmp_path), runs=tmp_path, on_ready=lambda coordinator: coordinator.drain("not today"))
    assert (first.status, first.committed) == ("interrupted", 0)
    assert not (first.folder / "trials").exists()
    continue_run(first.folder)
    assert history_of(first.folder) == history_of(done.folder)


def waits(meeting: Meeting) -> Callable[[Task], dict[str, Any]]:
    def agent(task: Task) -> dict[str, Any]:
        meeting.announce(task["id"])  # type: ignore[attr-defined]  # its agent's end
        meeting.wait()  # type: ignore[attr-defined]
        return double(task)

    return agent


def test_an_exception_frees_the_run_kills_its_trials_and_commits_nothing_false(
    tmp_path: Path, meeting: Meeting
) -> None:
    held = experiment(
        tmp_path,
        variants=[{"id": "v", "agent": {"function": waits(meeting)}}],
        sandbox={"timeout_s": 60, "readable": [meeting.folder]},
    )

    class Interrupted(RunCallback):
        started = 0

        def on_trial_start(self, slot: Slot, attempt: int) -> None:
            self.started += 1
            if self.started == 2:
                meeting.expect("t0", "t1")
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(held, runs=tmp_path, run_id="one", callbacks=[Interrupted()])
    folder = tmp_path / "one"
    assert holder(folder) is None
    assert (status_of(folder).status, status_of(folder).reason) == ("interrupted", "KeyboardInterrupt: ")
    meeting.let_go(3)
    assert continue_run(folder).by_status == {Status.SUCCESS: 3}
    again = [json.loads(line)["attempts"] for line in history_of(folder).splitlines()]
    assert again == [[{"blame": None, "error_type": None, "status": "success"}]] * 3


class Broken:
    """A backend that cannot be had, or breaks at the first word; notes that it was closed."""

    closed = 0

    def __getattr__(self, name: str) -> Any:
        if name == "wake":
            return lambda: None
        raise ZeroDivisionError(name)

    def close(self) -> None:
        self.closed += 1


def test_backend_and_store_are_closed_whatever_happens(tmp_path: Path) -> None:
    backend: Any = Broken()
    with pytest.raises(ZeroDivisionError):
        run(experiment(tmp_path), runs=tmp_path, run_id="one", backend=backend)
    assert backend.closed == 1
    assert holder(tmp_path / "one") is None


def test_a_run_whose_workers_cannot_be_had_can_be_continued_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = experiment(tmp_path)
    backend = LocalBackend(1, limits=limits_of(one), containment="magic")
    summary = run(one, runs=tmp_path, backend=backend)
    assert (summary.status, summary.committed) == ("interrupted", 0)
    assert "there is no containment 'magic'" in summary.reason
    assert capfd.readouterr().err == ""


# --- what is refused ---


def interrupted(base: Path, **changes: Any) -> Path:
    """A run with nothing committed, made of files."""
    (base / "tasks.jsonl").write_text('{"id": "one", "input": 5, "workspace": "files"}\n')
    (base / "files").mkdir()
    (base / "files" / "a").write_text("a")
    (base / "solve.sh").write_text("true\n")
    (base / "experiment.yaml").write_text(
        "name: file\ntasks: tasks.jsonl\nvariants:\n  - {id: a, agent: {command: [sh, solve.sh]}}\n"
    )
    stop: Callable[[Coordinator], None] = lambda coordinator: coordinator.drain("")  # noqa: E731
    return run(base / "experiment.yaml", runs=base / "runs", on_ready=stop).folder


def test_changed_inputs_are_refused_with_what_changed(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    (tmp_path / "solve.sh").write_text("false\n")
    (tmp_path / "files" / "b").write_text("b")
    (tmp_path / "tasks.jsonl").unlink()
    with pytest.raises(InvalidExperiment) as caught:
        continue_run(folder)
    assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == [
        "files has changed",
        "solve.sh has changed",
        "tasks.jsonl is gone",
    ]
    assert holder(folder) is None
    (tmp_path / "solve.sh").write_text("true\n")
    (tmp_path / "files" / "b").unlink()
    (tmp_path / "tasks.jsonl").write_text('{"id": "one", "input": 5, "workspace": "files"}\n')
    assert continue_run(folder).by_status == {Status.SUCCESS: 1}


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"another")], ids=["gone", "another"])
def test_a_function_that_is_not_the_frozen_one_is_refused(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    first = run(experiment(tmp_path), runs=tmp_path, on_ready=lambda coordinator: coordinator.drain(""))
    harm(min((first.folder / "functions").iterdir()))
    with pytest.raises(InvalidExperiment, match=r"the function of variant '(good|bad)' is gone from the run's folder"):
        continue_run(first.folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sandbox": {"kind": "docker", "image": "x"}}, "variant 'good': a function runs in the process sandbox only"),
        (
            {"variants": [{"id": "v", "agent": {"artifact": "a.tar.gz"}}]},
            "variant 'v': agent.artifact: '.*/a.tar.gz' is not a frozen artifact that can be used: it is not gzip",
        ),
        ({"variants": [command("true", pass_env=["NO_SUCH_KEY"])]}, "variant 'shell': pass_env names NO_SUCH_KEY"),
    ],
    ids=["function in docker", "artifact", "missing secret"],
)
def test_what_cannot_be_run_is_refused_before_there_is_a_run(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(InvalidExperiment, match=message):
        run(experiment(tmp_path, **changes), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_order_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="'backwards' is no order; allowed: sequential, priority, adaptive"):
        experiment(tmp_path, design={"order": "backwards"})


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="nowhere"):
        run(experiment(tmp_path, tasks=[{"id": "t", "input": 1, "workspace": "nowhere"}]), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_containment_that_this_machine_does_not_give_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(wanted: str) -> Containment:
        raise SandboxUnavailable(f"no {wanted} here")

    monkeypatch.setattr(runs, "chosen", unavailable)
    with pytest.raises(SandboxUnavailable, match="no user-namespaces here"):
        run(experiment(tmp_path), runs=tmp_path / "runs", containment="user-namespaces")
    assert not (tmp_path / "runs").exists()


def test_a_weaker_containment_than_is_required_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "chosen", lambda wanted: Containment(Rung.SUBREAPER, Cgroups()))
    with pytest.raises(SandboxUnavailable, match="require='namespaces' cannot be met"):
        run(experiment(tmp_path, sandbox={"require": "namespaces"}), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"containment": "magic"}, "there is no containment 'magic'; allowed: auto, root-namespaces"),
        ({"run_id": "../x"}, "'../x' is not a run's id"),
        ({"run_id": ".hidden"}, "is not a run's id"),
        ({"run_id": "-option"}, "is not a run's id"),
        ({"run_id": ""}, "is not a run's id"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(message)):
        run(experiment(tmp_path), runs=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_a_second_run_of_one_name_is_refused(done: Done) -> None:
    with pytest.raises(InvalidValue, match=r"there is a run in .* already: continue it, or name another"):
        run(done.experiment, runs=done.folder.parent, run_id=done.folder.name)


def test_a_run_that_another_holds_is_refused_and_it_is_said_who(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_MOMENT_S", 0.0)
    with RunStore.open(done.folder), pytest.raises(RunLocked, match=f"held by process {os.getpid()} on "):
        continue_run(done.folder)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"there is no run in .*: it has no run\.db"):
        continue_run(tmp_path)


# --- names, and looking at a run ---


@pytest.mark.parametrize("name", ["quick start", "../../etc", "-rf", "…", "x" * 200, ".", "a\nb"])
def test_a_name_for_a_run_is_safe_as_a_folder(name: str) -> None:
    made = new_run_id(name)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*-\d{8}-\d{6}-[0-9a-f]{4}", made)
    assert len(made) < 80


def test_a_run_is_found_by_its_folder_and_by_its_id(done: Done) -> None:
    name, below = done.folder.name, done.folder.parent
    assert find_run(done.folder) == done.folder
    assert find_run(name, below) == done.folder
    with pytest.raises(InvalidValue, match=f"there is no run in nowhere, nor in .*; runs in .*: .*{name}"):
        find_run("nowhere", below)
    with pytest.raises(InvalidValue, match="there are no runs in"):
        find_run("nowhere", done.folder)


def test_the_status_of_a_completed_run(done: Done) -> None:
    status = status_of(done.folder)
    assert (status.run_id, status.status, status.owner) == (done.summary.run_id, "completed", None)
    assert (status.slots, status.committed, status.by_status) == (6, 6, done.summary.by_status)
    assert status.in_flight == ()
    (failure,) = status.last_failures
    assert (failure.status, failure.error_type) == (Status.AGENT_ERROR, "ValueError")
    assert failure.trial_id.startswith("bad.t1.0-")


def test_the_status_of_a_run_that_is_worked_at(tmp_path: Path, meeting: Meeting) -> None:
    seen = []

    class Looks(RunCallback):
        def on_trial_start(self, slot: Slot, attempt: int) -> None:
            meeting.expect("t0")
            seen.append(status_of(tmp_path / "one"))
            meeting.let_go(1)

    held = experiment(
        tmp_path,
        tasks=[{"id": "t0", "input": 1}],
        variants=[{"id": "v", "agent": {"function": waits(meeting)}}],
        sandbox={"timeout_s": 60, "readable": [meeting.folder]},
    )
    # The callback is in the coordinator's own thread, which cannot answer: what the database says must do.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "STATUS_S", 0.01)
        run(held, runs=tmp_path, run_id="one", callbacks=[Looks()])
    (status,) = seen
    assert status.status == "running"
    assert status.owner is not None
    assert status.owner.pid == os.getpid()
    (one,) = status.in_flight
    assert (one.variant_id, one.task_id, one.attempt, one.events) == ("v", "t0", 1, None)
    assert one.age_s >= 0


def test_the_names_are_in_the_package() -> None:
    assert sandbox_exec.run is runs.run
    assert sandbox_exec.continue_run is runs.continue_run
    assert sandbox_exec.Experiment is Experiment
    assert sandbox_exec.RunCallback is RunCallback
