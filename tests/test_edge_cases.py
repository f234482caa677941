"""The twelve edge cases of a durable run, one test each, named after the case."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs_support import (
    Heard,
    KillAt,
    children,
    completions,
    events,
    experiment,
    history_of,
    in_child,
    reap_orphans,
    run_local,
    run_scripted,
    statuses,
    work_at,
)
from support import meetings, spin_until
from test_coordinator import COMPLETED, Steered, Then, control_of, dispatches, in_turn

from sandbox_exec import coordinator
from sandbox_exec.backends.base import Finished, Lost, Started, WorkerEvent, WorkerTicket
from sandbox_exec.contracts import Slot, Status, TrialDispatch
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.control import ask
from sandbox_exec.coordinator import PAUSE_S, Coordinator, RunCallback
from sandbox_exec.guest import kernel
from sandbox_exec.store import RunStore
from sandbox_exec.testing import HOLDS, ManualClock, Play, ScriptedBackend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "base"


def test_a_duplicate_completion_is_dropped(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 1})
    twice = Play(bells=(("finished", 0), ("finished", 0), ("finished", 3), ("lost", 5)))  # at once, later, contrary
    heard = Heard()
    end, backend = run_scripted(folder, one, in_turn(twice), callbacks=[heard])
    assert (end, statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 3)
    assert heard.of("on_trial_end") == [0, 1, 2]
    assert backend.asked == [("begin", 0, 1), ("begin", 1, 1), ("begin", 2, 1)]
    assert events(folder, "duplicate")


UNKNOWN: list[Callable[[WorkerTicket], WorkerTicket]] = [
    lambda known: WorkerTicket(7, known.trial_id, 1, known.worker, known.folder),
    lambda known: WorkerTicket(-1, known.trial_id, 1, known.worker, known.folder),
    lambda known: WorkerTicket(known.schedule_idx, "another", 1, known.worker, known.folder),
    lambda known: WorkerTicket(known.schedule_idx, known.trial_id, 2, known.worker, known.folder),
    lambda known: WorkerTicket(known.schedule_idx, known.trial_id, 0, known.worker, known.folder),
    lambda known: WorkerTicket(known.schedule_idx, known.trial_id, 1, "another", known.folder),
]


@pytest.mark.parametrize("event", [Started, Finished, lambda ticket: Lost(ticket, "")])
@pytest.mark.parametrize("unknown", UNKNOWN)
def test_an_unknown_ticket_is_a_protocol_fault_the_backend_is_quarantined_and_the_run_has_failed(
    base: Path,
    folder: Path,
    unknown: Callable[[WorkerTicket], WorkerTicket],
    event: Callable[[WorkerTicket], WorkerEvent],
) -> None:
    one = experiment(base, ["a", "b"], design={"max_concurrency": 1})
    clock = ManualClock()
    backend = ScriptedBackend(clock, 1, in_turn(HOLDS))

    def lie(run: Coordinator) -> None:
        (known,) = backend.running
        backend.say(event(unknown(known)))
        backend.say(Finished(known), late=1)  # what it says now is believed no more

    end = work_at(folder, one, backend, callbacks=[Then(lie)], clock=clock)
    assert end.status == "failed"
    assert "by a ticket that it never got" in end.reason
    assert (statuses(folder), control_of(folder)[0]) == ([], "failed")
    assert len(events(folder, "protocol_fault")) == 1
    assert [what for what, *_ in backend.asked] == ["begin", "stop"]  # nothing but to be closed
    assert run_scripted(folder, one)[0] == COMPLETED  # by another backend
    assert statuses(folder) == [Status.SUCCESS] * 2


def crash(folder: Path, one: Experiment, point: str, nth: int = 1) -> None:
    """Run in a process of its own, which is killed at that point."""

    def work() -> None:
        run_scripted(folder, one, at=KillAt(point, nth))

    assert in_child(work) == -signal.SIGKILL


def test_a_crash_after_the_attempts_files_and_before_the_commit(base: Path, folder: Path, tmp_path: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 3})
    crash(folder, one, "finished", nth=3)
    assert (statuses(folder), len(completions(folder))) == ([], 3)
    end, backend = run_scripted(folder, one)
    assert (end, backend.asked) == (COMPLETED, [])  # nothing is run again
    run_scripted(tmp_path / "calm", one)
    assert history_of(folder) == history_of(tmp_path / "calm")


def test_a_crash_after_the_commit_and_before_anything_else(base: Path, folder: Path, tmp_path: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 2})
    crash(folder, one, "committed")
    assert statuses(folder) == [Status.SUCCESS] * 2
    heard = Heard()
    end, backend = run_scripted(folder, one, callbacks=[heard])
    assert end == COMPLETED
    assert heard.of("on_trial_end") == [2]  # what was committed is neither committed nor run again
    assert {idx for _, idx, _ in backend.asked} == {2}
    run_scripted(tmp_path / "calm", one)
    assert history_of(folder) == history_of(tmp_path / "calm")


def test_a_pause_while_dispatching(base: Path, folder: Path) -> None:
    """It comes while trials are being chosen: those are begun and frozen, and nothing is chosen after them."""
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 2})
    run = Steered(folder, one, pause_while_dispatching=True)
    assert run.answer() == {"status": "paused", "frozen": 2}
    assert [call for call in run.backend.asked if call[0] != "begin"] == [("pause", 0, 1), ("pause", 1, 1)]
    run.ask(do="resume")
    run.finish_all()
    run.await_begun(3)
    run.finish_all()
    assert (run.end(), statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 3)


def test_a_pause_that_some_do_not_acknowledge_in_time(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 3})
    deaf = Play(bells=(("started", 0),), deaf=True)
    run = Steered(folder, one, lambda dispatch: deaf if dispatch.task.id == "b" else HOLDS)
    run.await_begun(3)
    survivor = dispatches(folder)[1].trial_id
    assert run.ask(do="pause") == {"status": "interrupted", "survivors": [survivor]}
    spin_until(lambda: len(run.backend.running) == 1, "the others have been killed")
    run.let_time_pass()  # what does not hear is not waited for for ever
    end = run.end()
    assert (end.status, statuses(folder)) == ("interrupted", [])
    assert f"these did not freeze in {PAUSE_S:g} s: {survivor}" in end.reason
    assert events(folder, "pause_failed") == [{"survivors": [survivor]}]
    assert control_of(folder)[1]["survivors"] == [survivor]
    with RunStore.open(folder, write=False) as store:
        assert [active.trial_id for active in store.active()] == [survivor]
    end, backend = run_scripted(folder, one, adopts=lambda active: Play())
    assert (end, statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 3)
    assert [call for call in backend.asked if call[1] == 1] == []  # it was alive, and is not run again


def test_a_pause_that_a_real_worker_does_not_acknowledge_in_time(
    base: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "PAUSE_S", 1.5)
    (tmp_path / "meeting").mkdir()
    answers: list[dict[str, Any]] = []

    class Stops(RunCallback):
        """When both trials are under way, stops the worker of the first, and asks for a pause."""

        def on_run_start(self, run: Coordinator) -> None:
            self._run, self._started = run, 0

        def on_trial_start(self, slot: Slot, attempt: int) -> None:
            self._started += 1
            if self._started == 2:
                ticket = self._run._trials[0].ticket
                assert ticket is not None
                os.kill(int(ticket.worker.partition("-")[0]), signal.SIGSTOP)
                asking.start()

    asking = threading.Thread(target=lambda: answers.append(ask(folder, do="pause")))
    for meeting in meetings(tmp_path / "meeting"):
        what = {"meet": [f"{meeting.folder}/up", f"{meeting.folder}/down"]}
        tasks = [{"id": name, "input": what} for name in "ab"]
        one = experiment(
            base, tasks, design={"max_concurrency": 2}, sandbox={"readable": [meeting.folder], "memory": "64MiB"}
        )
        end = run_local(folder, one, hung_s=2.0, callbacks=[Stops()])
        asking.join(60)
        survivor = dispatches(folder)[0].trial_id
        assert answers == [{"status": "interrupted", "survivors": [survivor]}]
        assert (end.status, statuses(folder), control_of(folder)[1]["survivors"]) == ("interrupted", [], [survivor])
        meeting.let_go(2)
        assert run_local(folder, one) == COMPLETED
        assert statuses(folder) == [Status.SUCCESS] * 2


def test_an_active_trial_is_recorded_but_its_folder_is_gone(base: Path, folder: Path, tmp_path: Path) -> None:
    one = experiment(base, ["a", "b"], design={"infra_retries": 0})
    crash(folder, one, "begun")
    for path in (folder / "trials").iterdir():
        shutil.rmtree(path)
    end, backend = run_scripted(folder, one)
    assert (end, statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 2)
    assert backend.asked == [("begin", 0, 2), ("begin", 1, 2)]
    run_scripted(tmp_path / "calm", one)
    assert history_of(folder) == history_of(tmp_path / "calm")


def test_a_malformed_result_or_grade_is_classified_and_committed(base: Path, folder: Path) -> None:
    base.mkdir()
    (base / "liar.py").write_text(
        "import os, sys\nopen(os.environ['SANDBOX_EXEC_OUT'] + '/result.json', 'w').write(sys.argv[1])\n"
    )
    lies = ["", "[1, 2]", '{"a": NaN}', '{"a": 1', "\\x00", "[" * 100_000]
    variants = [{"id": f"v{i}", "agent": {"command": ["python3", "liar.py", lie]}} for i, lie in enumerate(lies)]
    one = experiment(base, ["a"], [*variants, {"id": "nan", "agent": {"python": "agents:not_a_number"}}])
    assert run_local(folder, one) == COMPLETED
    lines = [json.loads(line) for line in history_of(folder)]
    assert {(line["status"], line["blame"], line["error_type"], line["result_digest"]) for line in lines} == {
        ("agent_error", "agent", "MalformedResult", None)
    }
    assert not list(folder.glob("trials/*/*/result.json"))
    graded = tmp_folder(folder)
    run_scripted(graded, experiment(base, ["a"]), in_turn(Play(Status.GRADE_ERROR, "MalformedGrade")))
    (line,) = map(json.loads, history_of(graded))
    assert (line["status"], line["blame"], line["error_type"]) == ("grade_error", "task", "MalformedGrade")


def tmp_folder(beside: Path) -> Path:
    return beside.with_name("graded")


def test_no_space_left_while_artifacts_are_written(base: Path, folder: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    one = experiment(
        base,
        [{"id": "small"}, {"id": "large", "input": {"writes_mib": 4}}, {"id": "last"}],
        design={"max_concurrency": 1},
    )
    folder.mkdir()

    def work() -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tiny", str(folder)], check=True)
        end = run_local(folder, one)
        assert end.status == "interrupted", end
        assert f"no room left in {folder}: free some there, then continue" in end.reason
        assert statuses(folder) == [Status.SUCCESS]
        assert not list(folder.glob("trials/*/attempt-1/out/large"))  # no half of a file
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        assert run_local(folder, one) == COMPLETED
        assert (folder / "trials" / dispatches(folder)[1].trial_id).exists()
        assert [path.stat().st_size for path in folder.glob("trials/*large*/*/out/large")] == [4 << 20]
        shutil.copytree(folder, tmp_path / "saved")

    known = children()
    assert in_child(work) == 0
    reap_orphans(known)
    run_local(tmp_path / "calm", one)
    assert history_of(tmp_path / "saved") == history_of(tmp_path / "calm")


def test_a_duplicate_delivery_is_told_by_run_slot_trial_and_attempt(base: Path, folder: Path) -> None:
    """An attempt is what it is by all four: the same slot's next attempt is another, and so is another run's."""
    one = experiment(base, [{"id": "a", "protocol": {"max_retries": 2}}, "b"], design={"max_concurrency": 1})
    fails = Play(Status.AGENT_ERROR, "ValueError", bells=(("finished", 0), ("finished", 1)))
    heard = Heard()
    end, backend = run_scripted(folder, one, in_turn(fails), callbacks=[heard])
    assert end == COMPLETED
    assert backend.asked == [("begin", 0, 1), ("begin", 0, 2), ("begin", 0, 3), ("begin", 1, 1)]
    assert {(event["trial_id"], event["attempt"]) for event in events(folder, "duplicate")} == {
        (dispatch.trial_id, dispatch.attempt) for dispatch in dispatches(folder) if dispatch.task.id == "a"
    }
    (known, *_) = dispatches(folder)
    stray = folder.parent / "other" / "trials" / known.trial_id / "attempt-2"
    stray.mkdir(parents=True)
    shutil.copy(folder / "trials" / known.trial_id / "attempt-1" / "completion.json", stray)

    def misplaced(dispatch: TrialDispatch) -> Play:
        target = folder.parent / "other" / "trials" / dispatch.trial_id / f"attempt-{dispatch.attempt}"
        if dispatch.task.id == "a" and dispatch.attempt == 2:
            return Play(None, bells=(("finished", 0),))  # what is in its folder is the first attempt's
        assert target.exists()
        return fails if dispatch.task.id == "a" else Play()

    run_scripted(folder.parent / "other", one, misplaced)
    assert len(events(folder.parent / "other", "attempt_lost")) == 1  # no completion of its own


def test_chain_overlap_is_impossible_under_concurrency(base: Path, folder: Path) -> None:
    tasks = [{"id": f"t{i}", "chain": f"chain-{i % 3}"} for i in range(18)]
    one = experiment(base, tasks, ["v", "w"], design={"max_concurrency": 32})
    clock = ManualClock()
    most = 0

    def script(dispatch: TrialDispatch) -> Play:
        nonlocal most
        running = [
            (one.variant.id, one.task.chain) for one in backend.running.values() if isinstance(one, TrialDispatch)
        ]
        mine = (dispatch.variant.id, dispatch.task.chain)
        assert mine not in running
        most = max(most, len(running) + 1)
        return Play(bells=(("finished", dispatch.slot.schedule_idx % 5),))

    backend = ScriptedBackend(clock, 32, script)
    assert work_at(folder, one, backend, clock=clock) == COMPLETED
    assert most == 6  # every chain of every variant at once, and no more
    order = [idx for _, idx, _ in backend.asked]
    for chain in range(3):
        for variant in range(2):
            of_chain = [idx for idx in order if idx // 2 % 3 == chain and idx % 2 == variant]
            assert of_chain == sorted(of_chain)


def test_max_concurrency_above_the_backends_capacity(base: Path, folder: Path) -> None:
    one = experiment(base, [f"t{i}" for i in range(9)], design={"max_concurrency": 32})
    clock = ManualClock()
    most = 0

    def script(dispatch: TrialDispatch) -> Play:
        nonlocal most
        most = max(most, len(backend.running) + 1)
        return Play(bells=(("finished", 1),))

    backend = ScriptedBackend(clock, 3, script)
    assert work_at(folder, one, backend, clock=clock) == COMPLETED
    assert most == 3
    assert events(folder, "warning") == [
        {"text": "max_concurrency is 32, but the backend runs 3 trials at once: 3 it is"}
    ]
