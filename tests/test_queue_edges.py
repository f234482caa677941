"""Queues where one thing meets another: a retry of a retry, a gate whose lane is shut, a purge before a submission."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from boards import alone, board, variant
from runs_support import events, experiment, statuses
from support import spin_until
from test_queue_runs import (
    COMPLETED,
    FAILED,
    FAILS,
    OK,
    ONE_BY_ONE,
    SKIPPED,
    Held,
    On,
    base,
    by_task,
    fates,
    folder,
    history_tasks,
    own_order,
    row,
    scheduled,
    stopped,
    work,
)

from sandbox_exec import runs
from sandbox_exec.contracts import ProviderUse, Status, TrialDispatch
from sandbox_exec.contracts.queue import LaneSettings
from sandbox_exec.control import ask
from sandbox_exec.coordinator import Coordinator, RunCallback
from sandbox_exec.errors import InvalidExperiment, InvalidValue, QueueFull
from sandbox_exec.ledger import SlotFilter
from sandbox_exec.report import report_of
from sandbox_exec.runs import continue_run, make_run, status_of
from sandbox_exec.schedule.lanes import Lanes
from sandbox_exec.schedule.scheduler import decide
from sandbox_exec.store import RunStore
from sandbox_exec.submission import dead_letters, drop_dead, purge, retry_dead, submit
from sandbox_exec.testing import HOLDS, ManualClock, Play, ScriptedBackend

__all__ = ["base", "folder"]  # fixtures


def needs(task_id: str, *names: str, **protocol: Any) -> dict[str, Any]:
    return {**row(task_id, **protocol), "depends_on": list(names)}


def dead(folder: Path, task_id: str) -> str:
    """The last dead letter of a task that has not been tried again."""
    return [one.trial_id for one in dead_letters(folder) if one.task_id == task_id and one.retried_as is None][-1]


# --- tries at tries ---


@pytest.mark.parametrize("live", [True, False])
def test_what_needs_others_can_be_retried_again_and_again(base: Path, folder: Path, live: bool) -> None:
    one = experiment(base, [row("a"), needs("b", "a")])

    def script(dispatch: TrialDispatch) -> Play:
        return FAILS if dispatch.task.id == "b" and dispatch.slot.repeat < 3 else Play()

    work(folder, one, script)
    for _ in range(3):
        if live:
            with Held(folder, None, script, keep_open=True) as run:
                before = status_of(folder).committed
                retry_dead(folder, [dead(folder, "b")])
                spin_until(lambda before=before: status_of(folder).committed > before, "it is tried")
                run.coordinator.drain("test")
        else:
            retry_dead(folder, [dead(folder, "b")])
            assert work(folder, None, script).end == COMPLETED
    assert statuses(folder) == [OK, FAILED, FAILED, FAILED, OK]


def test_the_last_try_counts_for_what_needs_it_and_what_was_skipped_for_it_comes_along(
    base: Path, folder: Path
) -> None:
    tasks = [row("a"), needs("b", "a"), needs("c", "b"), row("other"), needs("d", "other")]
    one = experiment(base, tasks, design={"repeats": 2})

    def script(dispatch: TrialDispatch) -> Play:
        fails = dispatch.task.id in ("a", "other") and dispatch.slot.repeat < 2
        return FAILS if fails else Play()

    work(folder, one, script)
    assert statuses(folder).count(SKIPPED) == 6
    first = next(one.trial_id for one in dead_letters(folder) if one.task_id == "a" and one.repeat == 1)
    done = retry_dead(folder, [first])
    assert [name.split(".")[1] for name in done] == ["a", "b", "c"]  # of that repeat
    submit(folder, [needs("e", "a")])  # of its repeats, one needs a try that failed and the other one that may succeed
    assert work(folder, None, script).end == COMPLETED
    assert statuses(folder)[10:] == [OK, OK, OK, SKIPPED, OK]
    (variant,) = report_of(folder).variants
    assert variant.by_status == {FAILED: 3, OK: 4, SKIPPED: 5}


def test_a_retry_that_was_purged_is_a_dead_letter_and_the_failure_counts(base: Path, folder: Path) -> None:
    work(folder, experiment(base, [row("a")]), fates(a=FAILS))
    retry_dead(folder, [dead(folder, "a")])
    assert len(purge(folder, SlotFilter())) == 1
    assert work(folder).end == COMPLETED
    (variant,) = report_of(folder).variants
    assert (variant.slots, variant.by_status) == (1, {FAILED: 1})
    retry_dead(folder, [dead(folder, "a")])
    assert work(folder).end == COMPLETED
    assert statuses(folder) == [FAILED, SKIPPED, OK]


def test_what_would_be_skipped_at_once_is_not_retried(base: Path, folder: Path) -> None:
    one = experiment(base, [row("a"), row("b")], design={**ONE_BY_ONE, "prune_after_failures": 1})
    work(folder, one, fates(a=FAILS))
    with pytest.raises(InvalidValue, match="variant v is pruned"):
        retry_dead(folder, [dead(folder, "a")])
    assert len(scheduled(folder)) == 2


def test_who_retries_what_is_being_retried_is_refused(base: Path, folder: Path) -> None:
    one = experiment(base, [row("a"), needs("b", "a")], design={"queue": {"failed_dependency": "block"}})
    work(folder, one, fates(a=FAILS))
    name = dead(folder, "a")
    with Held(folder, None, lambda _: HOLDS, keep_open=True) as run:
        for allowed in (True, False):
            answer = ask(folder, do="retry", trials=[name])
            assert ("error" not in answer) is allowed, answer
        run.finish("a")
        run.finish("b")
        run.coordinator.drain("test")
    assert statuses(folder) == [OK, OK]


# --- what blocks ---


def test_a_lost_trial_that_blocked_can_be_dropped_after_the_run_stopped(base: Path, folder: Path) -> None:
    design = {"infra_retries": 0, "queue": {"failed_dependency": "block"}}
    one = experiment(base, [row("a"), needs("b", "a")], design=design)
    work(folder, one, fates(a=Play(None, bells=(("lost", 1),))))
    assert status_of(folder).reason.startswith("blocked: ")
    drop_dead(folder, dead(folder, "a"))
    assert status_of(folder).reason == "there is more to do: continue the run"
    assert work(folder).end == COMPLETED
    assert statuses(folder) == [Status.WORKER_LOST, SKIPPED]


def test_of_two_that_one_needs_only_the_first_blocks(base: Path, folder: Path) -> None:
    design = {"queue": {"failed_dependency": "block"}}
    work(folder, experiment(base, [row("a"), row("b"), needs("c", "a", "b")], design=design), fates(a=FAILS, b=FAILS))
    drop_dead(folder, dead(folder, "a"))
    assert work(folder).end == COMPLETED
    assert statuses(folder) == [FAILED, FAILED, SKIPPED]


def test_at_the_end_of_its_time_a_run_stands_still_for_nobody(base: Path, folder: Path) -> None:
    design = {"queue": {"failed_dependency": "block"}, "max_duration_s": 100.0}
    one = experiment(base, [row("a"), needs("b", "a")], design=design)
    with Held(folder, one, fates(a=FAILS), keep_open=True) as run:
        spin_until(lambda: status_of(folder).reason.startswith("blocked: "), "it says what it stands still for")
        run.wait(101.0)
        spin_until(lambda: status_of(folder).committed == 2, "all is committed")
        for ask_for in (lambda: submit(folder, [row("c")]), lambda: retry_dead(folder, [dead(folder, "a")])):
            with pytest.raises(InvalidValue, match="over its max_duration_s"):
                ask_for()
        run.coordinator.drain("test")
    assert statuses(folder) == [FAILED, SKIPPED]


def test_the_end_of_a_runs_time_holds_while_it_is_drained(base: Path, folder: Path) -> None:
    one = experiment(base, [row("a"), row("b")], design={**ONE_BY_ONE, "max_duration_s": 100.0})
    with Held(folder, one, lambda _: HOLDS) as run:
        spin_until(lambda: run.running("a"), "a runs")
        run.coordinator.drain("test")
        run.wait(101.0)  # it would run for ever
    assert run.end is not None
    assert [what for what, *_ in run.backend.asked].count("stop") == 1


# --- room ---


def test_what_was_purged_takes_no_place(base: Path, folder: Path) -> None:
    design = {"queue": {"max_waiting": 3, "quotas": {"normal": 3}}}
    stopped(base, folder, [row("a"), row("b"), row("c")], design=design)
    with pytest.raises(QueueFull):
        submit(folder, [row("d")])
    purge(folder, SlotFilter(task="[ab]"))
    assert submit(folder, [row("d"), row("e")]).waiting == 3
    assert work(folder).started == ["c", "d", "e"]


@pytest.mark.parametrize("queue", [{"max_waiting": 2}, {"quotas": {"normal": 2}}])
def test_nobody_waits_for_room_that_there_will_never_be(base: Path, folder: Path, queue: dict[str, Any]) -> None:
    stopped(base, folder, [row("a")], design={"queue": queue})
    with pytest.raises(InvalidValue, match="submit them in parts"):
        submit(folder, [row(name) for name in "bcd"], wait_s=None)


def test_nothing_that_others_need_is_displaced(base: Path, folder: Path) -> None:
    tasks = [row("low", priority="low"), needs("high", "low", priority="high"), row("idle")]
    stopped(base, folder, tasks, design={"queue": {"max_waiting": 3, "when_full": "displace"}})
    got = submit(folder, [needs("new", "high", priority="high")])
    assert [name.split(".")[1] for name in got.displaced] == ["idle"]
    with pytest.raises(QueueFull, match="Only 0 of a lower priority"):
        submit(folder, [needs("newer", "high", priority="high")])
    assert [one.task_id for one in dead_letters(folder)] == ["idle"]  # at once, and not when its turn has come
    work(folder)
    assert by_task(folder) == dict.fromkeys(["low", "high", "new"], "success") | {"idle": "skipped"}


# --- requests ---


def test_a_queue_that_leaves_out_what_others_need_ends_the_run_which_can_go_on(base: Path, folder: Path) -> None:
    order = own_order(
        base,
        "order_forgetful",
        """
class Mine(SequentialQueue):
    def submit(self, tasks):
        return [cell for cell in super().submit(tasks) if cell.task_id != "forgotten"]
""",
    )
    one = experiment(base, [row("a"), row("forgotten")], design={"order": order})

    class Adds(RunCallback):
        def on_run_start(self, run: Coordinator) -> None:
            run.submit([row("fine"), needs("b", "forgotten")])

    done = work(folder, one, callbacks=[Adds()])
    assert done.end.status == "failed"
    assert "Mine: task 'b' depends on 'forgotten', which is not scheduled before it" in done.end.reason
    assert work(folder).end == COMPLETED
    assert history_tasks(folder) == ["a"]


@pytest.mark.parametrize(
    "request_",
    [
        {"do": "retry", "trials": [["x"]]},
        {"do": "retry", "trials": "x"},
        {"do": "give_up", "trials": [None]},
        {"do": "submit", "tasks": [], "inputs": 5},
        {"do": "submit", "tasks": [row("b")], "inputs": {"x": {}}},
        {"do": "submit", "tasks": [5], "inputs": {}},
        {"do": "purge", "filter": 5},
    ],
)
def test_a_request_of_another_shape_is_refused_and_harms_nobody(
    base: Path, folder: Path, request_: dict[str, Any]
) -> None:
    with Held(folder, experiment(base, [row("a")]), lambda _: HOLDS) as run:
        assert "error" in ask(folder, **request_)
        run.finish("a")
    assert (run.end, scheduled(folder)) == (COMPLETED, ["a"])


def test_a_field_that_is_misspelt_is_told_with_those_of_a_task(base: Path, folder: Path, tmp_path: Path) -> None:
    stopped(base, folder, [row("a")])
    wrong = {"id": "b", "inptu": 1}
    file = tmp_path / "more.jsonl"
    file.write_text(json.dumps(wrong))
    for given in ([row("c"), wrong], file):
        with pytest.raises((InvalidValue, InvalidExperiment), match=r"inptu: unknown field; did you mean 'input'\?"):
            submit(folder, given)


def test_the_same_row_twice_in_a_batch_is_one_task(base: Path, folder: Path) -> None:
    stopped(base, folder, [row("a")])
    assert submit(folder, [row("b"), row("b")]).tasks == ("b",)
    with pytest.raises(InvalidValue, match="'c'"):
        submit(folder, [row("c"), {**row("c"), "input": "another"}])


def test_tasks_can_be_added_before_the_first_trial(base: Path, tmp_path: Path) -> None:
    one = experiment(base, [row("a")], [{"id": "v", "agent": {"command": ["true"]}}], sandbox={"memory": "64MiB"})

    def add(run: Coordinator) -> None:
        run.submit([row("b")])

    summary = runs.run(one, runs=tmp_path, run_id="run", on_ready=add)
    assert summary.by_status == {OK: 2}


def test_who_continues_a_run_waits_for_who_adds_to_it(base: Path, folder: Path) -> None:
    stopped(base, folder, [row("a")])
    held = RunStore.open(folder)
    ended: list[Any] = []
    thread = threading.Thread(
        target=lambda: ended.append(continue_run(folder, backend=ScriptedBackend(ManualClock())).status)
    )
    thread.start()
    spin_until(lambda: status_of(folder).owner is not None, "it is held")
    assert ended == []
    held.close()
    thread.join()
    assert ended == ["completed"]


# --- lanes ---

A, B = variant("a", lane="x"), variant("b")


def test_others_do_not_wait_for_a_global_whose_lane_is_shut() -> None:
    b = board(alone("g"), "t0", "t1", variants=[A, B], active=[2])
    b.skip(1, "one is enough here")
    lanes = Lanes({"x": LaneSettings()}, [A, B])
    assert decide(b, lanes, 0.0, 100).dispatch == ()
    lanes.turned_away("a", 0.0, started_s=0.0, retry_after_s=30.0, jitter_s=0.0)
    b.finish(2)
    assert decide(b, lanes, 1.0, 100).dispatch == (3, 5)
    b.finish(3)
    assert decide(b, lanes, 30.0, 100).dispatch == ()  # its turn has come again
    b.finish(5)
    assert decide(b, lanes, 31.0, 100).dispatch == (0,)


def test_a_lane_hears_once_of_a_trial_that_waits_for_its_commit(base: Path, folder: Path) -> None:
    def script(dispatch: TrialDispatch) -> Play:
        return HOLDS if dispatch.task.id == "a" else Play()

    def figures() -> Any:
        return (status_of(folder).lanes or {})["x"]

    one = experiment(
        base,
        [row("a"), row("b")],
        [{"id": "v", "agent": {"python": "agents:play"}, "lane": "x", "tokens_per_trial": 200}],
        design={"max_concurrency": 2},
        lanes={"x": {"tpm": 100_000, "rpm": 1000}},
    )
    with Held(folder, one, script) as run:
        run.wait_until(lambda: status_of(folder).lifecycle["finished"] == 1)
        run.coordinator.kill("test")
    before = figures()
    with RunStore.open(folder, write=False) as store:
        (place,) = [one.folder for one in store.active() if one.slot.task_id == "b"]
    completion = json.loads((place / "completion.json").read_text())
    completion["provider"] = ProviderUse(tokens=10, requests=3).model_dump(mode="json")
    (place / "completion.json").write_text(json.dumps(completion))
    stopping = On(begin=lambda run: run.kill("test"))
    work(folder, None, script, callbacks=[stopping])
    assert figures()["tokens_in_window"] == before["tokens_in_window"] == 400


# --- what is told ---


def test_of_a_run_that_was_left_what_has_ended_is_finished_and_its_lanes_are_known(base: Path, folder: Path) -> None:
    one = experiment(
        base,
        [row("a"), row("b"), row("c")],
        [{"id": "v", "agent": {"python": "agents:play"}, "lane": "x"}],
        design={"max_concurrency": 2},
        lanes={"x": {"rpm": 100}},
    )

    def script(dispatch: TrialDispatch) -> Play:
        return HOLDS if dispatch.task.id == "a" else Play()

    with Held(folder, one, script) as run:
        run.wait_until(lambda: status_of(folder).lifecycle["finished"] == 2)
        run.coordinator.kill("test")
    with RunStore.open(folder) as store:
        store.set_control("running")  # as one that was killed leaves it
    status = status_of(folder)
    assert (status.status, status.reason) == ("interrupted", "its coordinator is gone")
    assert status.in_flight == ()
    assert {name: count for name, count in status.lifecycle.items() if count} == {"pending": 1, "finished": 2}
    assert status.lanes is not None
    assert status.lanes["x"]["starts_in_window"] == 3


def test_notes_are_in_order_and_have_their_time(base: Path, folder: Path) -> None:
    one = experiment(base, [row("a", max_retries=1)])
    work(folder, one, fates(a=[FAILS, Play(None, bells=(("started", 0), ("lost", 1))), Play()]))
    with RunStore.open(folder, write=False) as store:
        found = [(one.at, one.kind) for one in store.events() if "trial_id" in one.data]
    assert [kind for _, kind in found if kind != "executing"] == [
        "assigned", "retrying", "assigned", "attempt_lost", "retrying", "assigned", "completed"
    ]  # fmt: skip
    assert sorted(at for at, _ in found) == [at for at, _ in found]


def test_a_metrics_port_that_is_taken_leaves_no_run(base: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidValue):
        runs.run(experiment(base, [row("a")]), runs=tmp_path, run_id="r", metrics_port=taken.getsockname()[1])
    assert not (tmp_path / "r").exists()


def test_a_trial_that_is_frozen_is_not_stuck(base: Path, folder: Path) -> None:
    design = {"queue": {"alerts": {"stuck_s": 60.0}}}
    with Held(folder, experiment(base, [row("a")], design=design), lambda _: HOLDS) as run:
        spin_until(lambda: run.running("a"), "a runs")
        run.wait(50.0)
        ask(folder, do="pause")
        run.wait(1000.0)
        ask(folder, do="resume")
        assert ask(folder, do="status")["metrics"]["alerts"] == []
        run.wait(9.0)
        assert ask(folder, do="status")["metrics"]["alerts"] == []
        run.wait(2.0)
        spin_until(lambda: events(folder, "alert"), "it is stuck now")
        run.finish("a")
    assert [alert["state"] for alert in events(folder, "alert")] == ["raised", "cleared"]


# --- what agents see ---


def test_an_agent_sees_no_run_beside_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))  # as the folder of a script is
    (tmp_path / "runs" / "earlier").mkdir(parents=True)
    (tmp_path / "runs" / "earlier" / "answer").write_text("42")
    (tmp_path / "beside").write_text("hello")
    text = f"cat {tmp_path}/beside; cat {tmp_path}/runs/earlier/answer {tmp_path}/runs/*/*; true"
    one = experiment(
        tmp_path / "base",
        [row("a")],
        [{"id": "v", "agent": {"command": ["sh", "-c", text]}}],
        sandbox={"memory": "64MiB"},
    )
    summary = runs.run(one, runs=tmp_path / "runs", run_id="r")
    assert summary.by_status == {OK: 1}, [one.message for one in dead_letters(summary.folder)]
    (said,) = (summary.folder / "trials").glob("*/attempt-1/stdout.log")
    assert said.read_text() == "hello"


def test_where_runs_are_beside_what_agents_need_only_their_own_is_hidden(base: Path, tmp_path: Path) -> None:
    store, frozen = make_run(experiment(base, [row("a")]), tmp_path / "run")
    store.close()
    from sandbox_exec.dispatching import unseen_runs

    assert unseen_runs(frozen, store.folder) == store.folder
    assert unseen_runs(frozen, tmp_path / "runs" / "r") == tmp_path / "runs"
