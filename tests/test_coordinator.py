"""The coordinator against a scripted backend: what is committed, retried, called back, and obeyed."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs_support import (
    Heard,
    Script,
    completions,
    events,
    experiment,
    history_of,
    open_run,
    run_scripted,
    statuses,
    work_at,
)
from support import spin_until

from sandbox_exec import coordinator
from sandbox_exec.backends.base import Adoption, Traced, WorkerTicket
from sandbox_exec.contracts import ActiveTrial, Slot, Status, TrialCompletion, TrialDispatch
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.control import ask
from sandbox_exec.coordinator import STOP_S, Coordinator, RunCallback, RunEnd
from sandbox_exec.errors import RunNotActive, SandboxUnavailable, StoreFull
from sandbox_exec.store import RunStore
from sandbox_exec.testing import HOLDS, ManualClock, Play, ScriptedBackend

COMPLETED = RunEnd("completed")
FAILS = Play(Status.AGENT_ERROR, "ValueError")
TIMES_OUT = Play(Status.TASK_TIMEOUT)
LOST = Play(None, bells=(("lost", 0),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "base"


def dispatches(folder: Path, trial_id: str | None = None) -> list[TrialDispatch]:
    """What was dispatched, by trial and attempt."""
    found = sorted(folder.glob(f"trials/{trial_id or '*'}/attempt-*/dispatch.json"))
    return [TrialDispatch.model_validate_json(path.read_bytes()) for path in found]


def in_turn(*plays: Play) -> Script:
    """By attempt, the same for all trials; the last one for those that follow."""
    return lambda dispatch: plays[min(dispatch.attempt, len(plays)) - 1]


def control_of(folder: Path) -> tuple[str, dict[str, Any]]:
    with RunStore.open(folder, write=False) as store:
        control = store.control()
        return control.status, control.metadata


# --- commits ---


def test_every_slot_is_committed_in_the_order_of_the_schedule(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c"], ["v", "w"], design={"repeats": 2, "max_concurrency": 3})
    end, _ = run_scripted(folder, one)
    assert end == COMPLETED
    assert statuses(folder) == [Status.SUCCESS] * 12
    assert [json.loads(line)["slot"] for line in history_of(folder)] == list(range(12))
    assert control_of(folder)[0] == "completed"


@pytest.mark.parametrize("seed", range(20))
def test_the_history_does_not_depend_on_what_is_heard_when(base: Path, tmp_path: Path, seed: int) -> None:
    one = experiment(base, [f"t{i}" for i in range(12)], ["v", "w"], design={"max_concurrency": 6})

    def calm(dispatch: TrialDispatch) -> Play:
        fate = random.Random(dispatch.trial_id)
        return Play(fate.choice([Status.SUCCESS, Status.AGENT_ERROR]), result_sha256=f"{fate.random()}")

    def wild(dispatch: TrialDispatch) -> Play:
        fate = random.Random(f"{seed} {dispatch.trial_id}")
        bells: list[Any] = [("started", fate.randrange(9)), ("finished", fate.randrange(9))]
        bells += [("finished", fate.randrange(20)) for _ in range(fate.randrange(3))]  # again, late, after the commit
        bells += [("lost", bells[1][1] + fate.randrange(20))] * fate.randrange(2)
        play = calm(dispatch)
        return Play(play.status, result_sha256=play.result_sha256, bells=tuple(bells))

    run_scripted(tmp_path / "calm", one, calm, capacity=1)
    end, _ = run_scripted(tmp_path / "wild", one, wild, capacity=6, order=random.Random(seed))
    assert end == COMPLETED
    assert history_of(tmp_path / "wild") == history_of(tmp_path / "calm")
    assert all(len(attempts) == 1 for attempts in completions(tmp_path / "wild").values())


def test_a_slot_that_ends_early_waits_for_its_turn_and_is_read_from_its_file(base: Path, folder: Path) -> None:
    slots = 100  # more than are kept in memory
    one = experiment(base, [f"t{i:03}" for i in range(slots)], design={"max_concurrency": slots})
    script: Script = lambda dispatch: Play(  # noqa: E731
        bells=(("finished", 3 if dispatch.slot.schedule_idx == 0 else 0),),
        result_sha256=dispatch.trial_id,
    )
    heard = Heard()
    end, _ = run_scripted(folder, one, script, capacity=slots, callbacks=[heard])
    assert end == COMPLETED
    assert [json.loads(line)["result_digest"] for line in history_of(folder)] == [
        dispatch.trial_id for dispatch in dispatches(folder)
    ]
    assert heard.of("on_trial_end") == list(range(slots))


def test_a_message_is_only_a_bell_and_the_file_says_how_the_attempt_ended(base: Path, folder: Path) -> None:
    said_lost = Play(bells=(("finished", 9), ("lost", 0)))  # the file is there, whatever is heard of it
    no_file = Play(None, bells=(("finished", 0),))
    one = experiment(base, ["a", "b"], design={"infra_retries": 0})
    script: Script = lambda dispatch: said_lost if dispatch.task.id == "a" else no_file  # noqa: E731
    run_scripted(folder, one, script)
    assert statuses(folder) == [Status.SUCCESS, Status.WORKER_LOST]


# --- further attempts ---


def test_failed_attempts_are_tried_again_and_stay_on_disk_and_in_the_history(base: Path, folder: Path) -> None:
    one = experiment(base, [{"id": "a", "protocol": {"max_retries": 2}}])
    run_scripted(folder, one, in_turn(FAILS, FAILS, Play()))
    (line,) = map(json.loads, history_of(folder))
    assert [attempt["status"] for attempt in line["attempts"]] == ["agent_error", "agent_error", "success"]
    assert [[one.status.value for one in ended] for ended in completions(folder).values()] == [
        ["agent_error", "agent_error", "success"]
    ]


def test_a_trial_that_fails_too_often_is_committed_as_it_last_ended(base: Path, folder: Path) -> None:
    one = experiment(base, [{"id": "a", "protocol": {"max_retries": 1}}])
    end, backend = run_scripted(folder, one, in_turn(FAILS))
    assert (end, statuses(folder)) == (COMPLETED, [Status.AGENT_ERROR])
    assert backend.asked == [("begin", 0, 1), ("begin", 0, 2)]


def test_an_extended_trial_has_twice_the_time_each_time_also_when_the_run_was_continued(
    base: Path, folder: Path
) -> None:
    protocol = {"timeout_s": 2.0, "timeout_action": "extend", "max_retries": 3}
    one = experiment(base, [{"id": "a", "protocol": protocol}])
    run_scripted(folder, one, in_turn(TIMES_OUT, TIMES_OUT, HOLDS), callbacks=[Then(lambda run: run.kill("test"), 3)])
    end, _ = run_scripted(folder, one, in_turn(TIMES_OUT))
    assert (end, statuses(folder)) == (COMPLETED, [Status.TASK_TIMEOUT])
    assert [one.limits.timeout_s for one in dispatches(folder)] == [2.0, 4.0, 8.0, 8.0, 16.0]  # the third was killed


def test_a_lost_attempt_is_tried_again_after_a_wait_and_is_no_part_of_the_history(base: Path, folder: Path) -> None:
    one = experiment(base, ["a"], design={"infra_retries": 2})
    clock = ManualClock(1000.0)
    run_scripted(folder, one, in_turn(LOST, LOST, Play()), clock=clock)
    (line,) = map(json.loads, history_of(folder))
    assert [attempt["status"] for attempt in line["attempts"]] == ["success"]
    assert [event["attempt"] for event in events(folder, "attempt_lost")] == [1, 2]
    assert clock.now_s() - 1000.0 >= 0.5 + 1.0  # the least of the first and the second wait


def test_a_trial_that_is_lost_too_often_is_committed_as_lost_with_the_reason(base: Path, folder: Path) -> None:
    heard: list[TrialCompletion] = []
    one = experiment(base, ["a"], design={"infra_retries": 1})
    end, backend = run_scripted(folder, one, in_turn(LOST), callbacks=[Ends(heard)])
    assert (end, statuses(folder), len(backend.asked)) == (COMPLETED, [Status.WORKER_LOST], 2)
    assert [one.error and one.error.message for one in heard] == ["as the script says"]
    assert [json.loads(line)["attempts"] for line in history_of(folder)] == [[]]


def test_a_run_that_is_continued_has_the_whole_budget_for_losses_again(base: Path, folder: Path) -> None:
    one = experiment(base, ["a"], design={"infra_retries": 1})
    run_scripted(folder, one, in_turn(LOST, HOLDS), callbacks=[Then(lambda run: run.kill("test"))])
    end, _ = run_scripted(folder, one, in_turn(LOST, LOST, LOST, Play()))
    assert (end, statuses(folder)) == (COMPLETED, [Status.SUCCESS])


def test_a_trial_that_was_turned_away_waits_as_long_as_it_was_told_and_does_not_count(base: Path, folder: Path) -> None:
    away = Play(Status.RATE_LIMITED, retry_after_s=100.0)
    clock = ManualClock(1000.0)
    end, _ = run_scripted(folder, experiment(base, ["a"]), in_turn(away, away, Play()), clock=clock)
    assert (end, statuses(folder)) == (COMPLETED, [Status.SUCCESS])
    assert clock.now_s() >= 1200.0
    assert [len(json.loads(line)["attempts"]) for line in history_of(folder)] == [1]


def test_what_follows_a_failure_is_skipped_and_pruned_variants_are_an_event(base: Path, folder: Path) -> None:
    tasks = ["a", {"id": "b", "depends_on": ["a"]}, "c", "d"]
    one = experiment(base, tasks, design={"prune_after_failures": 2, "max_concurrency": 2})
    heard = Heard()
    run_scripted(folder, one, in_turn(FAILS), capacity=2, callbacks=[heard])
    failed, skipped = Status.AGENT_ERROR, Status.SKIPPED
    assert statuses(folder) == [failed, skipped, failed, skipped]
    assert events(folder, "pruned") == [{"variant": "v", "after_slot": 2}]
    assert ("on_queue_decision", ("skip", 1)) in heard.calls


# --- callbacks ---


class Then(RunCallback):
    """Does something when an attempt starts for the nth time."""

    def __init__(self, what: Callable[[Coordinator], object], nth: int = 1) -> None:
        self._what, self._left = what, nth

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run

    def on_trial_start(self, slot: Slot, attempt: int) -> None:
        self._left -= 1
        if self._left == 0:
            self._what(self._run)


class Ends(RunCallback):
    def __init__(self, heard: list[TrialCompletion]) -> None:
        self._heard = heard

    def on_trial_end(self, completion: TrialCompletion) -> None:
        self._heard.append(completion)


class Threads(RunCallback):
    """Notes who calls, and whether two do at once."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.inside = self.overlaps = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return self._note
        return super().__getattribute__(name)

    def _note(self, *_: object) -> None:
        self.inside += 1
        self.overlaps += self.inside > 1
        self.threads.add(threading.get_ident())
        self.inside -= 1


def test_results_are_called_back_in_the_order_of_commits_and_tasks_when_they_are_whole(
    base: Path, folder: Path
) -> None:
    one = experiment(base, ["a", "b"], ["v", "w"], design={"max_concurrency": 4})
    script: Script = lambda dispatch: Play(bells=(("started", 0), ("finished", 4 - dispatch.slot.schedule_idx)))  # noqa: E731
    heard = Heard()
    run_scripted(folder, one, script, callbacks=[heard])
    assert heard.calls[0] == ("on_run_start", None)
    assert heard.calls[-1] == ("on_run_end", "completed")
    assert heard.of("on_trial_selected") == heard.of("on_trial_start") == [(idx, 1) for idx in range(4)]
    assert [call for call in heard.calls if call[0] in ("on_trial_end", "on_task_end")] == [
        ("on_trial_end", 0),
        ("on_trial_end", 1),
        ("on_task_end", ("a", 2)),
        ("on_trial_end", 2),
        ("on_trial_end", 3),
        ("on_task_end", ("b", 2)),
    ]


def test_the_end_of_a_task_that_was_half_committed_before_is_told_with_all_of_it(base: Path, folder: Path) -> None:
    tasks = ["a", {"id": "b", "depends_on": ["a"]}]
    one = experiment(base, tasks, ["bad", "v", "w"], design={"max_concurrency": 1})

    def script(dispatch: TrialDispatch) -> Play:
        return FAILS if dispatch.variant.id == "bad" else Play()

    first, second = Heard(), Heard()
    run_scripted(folder, one, script, callbacks=[first, Then(lambda run: run.drain("test"), 4)])
    assert len(statuses(folder)) == 5  # of the second task, the first is skipped and the second has run
    run_scripted(folder, one, script, callbacks=[second])
    assert (first.of("on_task_end"), second.of("on_task_end")) == ([("a", 3)], [("b", 3)])
    assert (first.of("on_trial_end"), second.of("on_trial_end")) == ([0, 1, 2, 3, 4], [5])


def test_callbacks_are_called_by_the_coordinators_own_thread_one_at_a_time(base: Path, folder: Path) -> None:
    threads = Threads()
    run_scripted(folder, experiment(base, ["a", "b", "c"]), callbacks=[threads])
    assert (threads.threads, threads.overlaps) == ({threading.get_ident()}, 0)


@pytest.mark.parametrize(
    "name",
    [
        "on_run_start",
        "on_trial_selected",
        "on_trial_start",
        "on_trace",
        "on_trial_end",
        "on_task_end",
        "on_queue_decision",
        "on_run_end",
    ],
)
def test_a_callback_that_raises_is_reported_and_the_run_goes_on(base: Path, folder: Path, name: str) -> None:
    class Broken(RunCallback):
        pass

    def fail(*_: object) -> None:
        raise KeyError("mine")

    broken, heard = Broken(), Heard()
    setattr(broken, name, fail)
    one = experiment(base, ["a", {"id": "b", "depends_on": ["a"]}, "c"])
    clock = ManualClock()
    slow = Play(bells=(("started", 0), ("finished", 2)))
    backend = ScriptedBackend(clock, 4, lambda dispatch: FAILS if dispatch.task.id == "a" else slow)
    chatty = Then(lambda run: backend.say(Traced(next(iter(backend.running)), "agent", 3)))
    end = work_at(folder, one, backend, callbacks=[chatty, broken, heard], clock=clock)
    assert (end, len(statuses(folder))) == (COMPLETED, 3)
    assert {event["text"] for event in events(folder, "callback_failed")} == {f"Broken.{name}: KeyError: 'mine'"}
    assert heard.of("on_run_end") == ["completed"]


def test_a_start_that_is_heard_twice_is_called_back_once(base: Path, folder: Path) -> None:
    heard = Heard()
    play = Play(bells=(("started", 0), ("started", 1), ("finished", 2)))
    run_scripted(folder, experiment(base, ["a"]), in_turn(play), callbacks=[heard])
    assert heard.of("on_trial_start") == [(0, 1)]


# --- stopping ---


def test_a_run_that_is_drained_finishes_what_runs_starts_nothing_and_can_be_continued(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c", "d"], design={"max_concurrency": 2})
    script: Script = lambda dispatch: Play(bells=(("started", 0), ("finished", 1)))  # noqa: E731
    end, backend = run_scripted(folder, one, script, capacity=2, callbacks=[Then(lambda run: run.drain("enough"))])
    assert end == RunEnd("interrupted", "enough")
    assert statuses(folder) == [Status.SUCCESS] * 2
    assert backend.asked == [("begin", 0, 1), ("begin", 1, 1)]
    assert control_of(folder)[0] == "interrupted"
    end, backend = run_scripted(folder, one, script)
    assert (end, statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 4)
    assert [idx for _, idx, _ in backend.asked] == [2, 3]


def test_a_run_that_is_killed_commits_nothing_of_what_it_killed(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 2})
    script: Script = lambda dispatch: Play() if dispatch.task.id == "a" else HOLDS  # noqa: E731
    end, backend = run_scripted(folder, one, script, capacity=2, callbacks=[Then(lambda run: run.kill("now"), 3)])
    assert end == RunEnd("interrupted", "now")
    assert statuses(folder) == [Status.SUCCESS]
    assert [what for what in backend.asked if what[0] == "stop"] == [("stop", 1, 1), ("stop", 2, 1)]
    with RunStore.open(folder, write=False) as store:
        assert store.active() == []
    assert (run_scripted(folder, one)[0], statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 3)
    assert [len(json.loads(line)["attempts"]) for line in history_of(folder)] == [1, 1, 1]


def test_a_kill_after_a_drain_kills(base: Path, folder: Path) -> None:
    def both(run: Coordinator) -> None:
        run.drain("first")
        run.kill("second")
        run.drain("third")

    end, _ = run_scripted(folder, experiment(base, ["a"]), in_turn(HOLDS), callbacks=[Then(both)])
    assert end == RunEnd("interrupted", "second")


def test_what_cannot_be_killed_is_recorded_and_adopted_by_the_next(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b"])
    deaf = Play(bells=(("started", 0),), deaf=True)
    clock = ManualClock(1000.0)
    end, _ = run_scripted(folder, one, in_turn(deaf), callbacks=[Then(lambda run: run.kill("now"))], clock=clock)
    assert end == RunEnd("interrupted", "now; not all of it could be killed in 30 s")
    assert clock.now_s() == 1000.0 + STOP_S
    survivors = [dispatch.trial_id for dispatch in dispatches(folder)]
    assert control_of(folder)[1]["survivors"] == survivors
    end, backend = run_scripted(folder, one, adopts=lambda active: Play())
    assert (end, statuses(folder), backend.asked) == (COMPLETED, [Status.SUCCESS] * 2, [])
    assert [event["state"] for event in events(folder, "adopted")] == ["alive", "alive"]


def test_what_is_lost_while_a_run_is_killed_is_not_committed_as_lost(base: Path, folder: Path) -> None:
    one = experiment(base, ["a"], design={"infra_retries": 0})
    dies = Play(None, bells=(("started", 0), ("lost", 1)), deaf=True)
    end, _ = run_scripted(folder, one, in_turn(dies), callbacks=[Then(lambda run: run.kill("now"))])
    assert (end, statuses(folder)) == (RunEnd("interrupted", "now"), [])
    assert (run_scripted(folder, one)[0], statuses(folder)) == (COMPLETED, [Status.SUCCESS])


def test_attempts_that_a_closed_backend_cancelled_are_made_again(base: Path, folder: Path) -> None:
    class Broken(Exception):
        pass

    def fail(dispatch: TrialDispatch) -> Play:
        if dispatch.task.id == "b":
            raise Broken("of the backend")
        return HOLDS

    one = experiment(base, ["a", "b"])
    with pytest.raises(Broken):
        run_scripted(folder, one, fail)
    assert control_of(folder)[0] == "failed"
    assert "Broken: of the backend" in control_of(folder)[1]["reason"]
    assert [one.status for one in next(iter(completions(folder).values()))] == [Status.CANCELLED]
    assert (run_scripted(folder, one)[0], statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 2)


def test_a_run_without_workers_is_interrupted_and_says_why(base: Path, folder: Path) -> None:
    class NoWorkers(ScriptedBackend):
        def submit(self, dispatch: TrialDispatch, folder: Path) -> WorkerTicket:
            raise SandboxUnavailable("there are none")

    clock = ManualClock()
    end = work_at(folder, experiment(base, ["a"]), NoWorkers(clock), clock=clock)
    assert end == RunEnd("interrupted", "there are none")
    assert control_of(folder)[1]["reason"] == "there are none"
    assert run_scripted(folder, experiment(base, ["a"]))[0] == COMPLETED


def test_a_run_over_its_duration_skips_the_rest_and_time_used_before_counts(base: Path, folder: Path) -> None:
    clock = ManualClock(1000.0)
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 1, "max_duration_s": 100.0})

    def slow(dispatch: TrialDispatch) -> Play:
        clock.advance(60.0)
        return Play()

    end, _ = run_scripted(folder, one, slow, clock=clock, callbacks=[Then(lambda run: run.drain("test"))])
    assert (end.status, statuses(folder)) == ("interrupted", [Status.SUCCESS])
    clock.advance(1e6)  # of these, nobody worked at it
    end, _ = run_scripted(folder, one, slow, clock=clock)
    assert (end, statuses(folder)) == (COMPLETED, [Status.SUCCESS, Status.SUCCESS, Status.SKIPPED])


# --- steering ---


class Steered:
    """A run in a thread of its own, whose attempts hold until they are let go."""

    def __init__(
        self, folder: Path, one: Experiment, script: Script | None = None, *, pause_while_dispatching: bool = False
    ) -> None:
        self.folder, self.clock = folder, ManualClock(1000.0)
        capacity = one.design.max_concurrency
        self.backend = ScriptedBackend(self.clock, capacity, script or in_turn(HOLDS), waits=True)
        self._begun = Begun(self.ask if pause_while_dispatching else None)
        self._ended: list[RunEnd | BaseException] = []

        def work() -> None:
            try:
                self._ended.append(work_at(folder, one, self.backend, callbacks=[self._begun], clock=self.clock))
            except BaseException as error:
                self._ended.append(error)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def await_begun(self, count: int) -> None:
        for _ in range(count):
            assert self._begun.semaphore.acquire(timeout=60)

    def ask(self, **request: Any) -> dict[str, Any]:
        return ask(self.folder, **request)

    def answer(self) -> dict[str, Any]:
        """To what was asked while trials were being dispatched."""
        assert self._begun.answered.wait(60)
        return self._begun.answer

    def finish_all(self) -> None:
        for ticket in list(self.backend.running):
            self.backend.finish(ticket)
        self.backend.wake()

    def let_time_pass(self) -> None:
        """As much as is needed, until it ends: whatever it waits for will not come."""
        while self._thread.is_alive():
            self.clock.advance(STOP_S)
            self.backend.wake()
            self._thread.join(0.01)

    def end(self) -> RunEnd:
        self._thread.join(60)
        (end,) = self._ended
        assert isinstance(end, RunEnd), end
        return end


class Begun(RunCallback):
    """Counts what has begun; may ask for a pause when the first trial is chosen, from another thread."""

    def __init__(self, pause: Callable[..., dict[str, Any]] | None) -> None:
        self.semaphore, self.answered = threading.Semaphore(0), threading.Event()
        self.answer: dict[str, Any] = {}
        self._pause = pause

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run

    def on_trial_selected(self, slot: Slot, attempt: int) -> None:
        if self._pause is not None:
            threading.Thread(target=self._ask, args=[self._pause]).start()
            self._pause = None
            control = self._run._control
            spin_until(lambda: control is not None and not control.requests.empty(), "the request is there")

    def _ask(self, pause: Callable[..., dict[str, Any]]) -> None:
        self.answer = pause(do="pause")
        self.answered.set()

    def on_trial_start(self, slot: Slot, attempt: int) -> None:
        self.semaphore.release()


def test_a_paused_run_starts_nothing_and_its_time_stands_still(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 2, "max_duration_s": 100.0})
    run = Steered(folder, one)
    run.await_begun(2)
    assert run.ask(do="pause") == {"status": "paused", "frozen": 2}
    assert run.ask(do="pause") == {"status": "paused", "frozen": 2}
    assert control_of(folder)[0] == "paused"
    assert run.ask(do="status")["status"] == "paused"
    run.clock.advance(1000.0)
    assert run.ask(do="resume") == {"status": "running"}
    assert control_of(folder)[0] == "running"
    run.finish_all()
    run.await_begun(1)
    run.finish_all()
    assert (run.end(), statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 3)
    paused = [call for call in run.backend.asked if call[0] != "begin"]
    assert paused == [("pause", 0, 1), ("pause", 1, 1), ("resume", 0, 1), ("resume", 1, 1)]


def test_what_ends_while_a_run_is_paused_is_committed_and_nothing_takes_its_place(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 2})
    run = Steered(folder, one)
    run.await_begun(2)
    first = next(iter(run.backend.running))
    assert run.ask(do="pause")["status"] == "paused"
    run.backend.resume(first)  # as it had ended before it was frozen
    run.backend.finish(first)
    run.backend.wake()
    spin_until(lambda: len(run.ask(do="status")["in_flight"]) == 1, "it has ended")
    assert run.ask(do="status")["status"] == "paused"
    assert [call for call in run.backend.asked if call[0] == "begin"] == [("begin", 0, 1), ("begin", 1, 1)]
    assert statuses(folder) == [Status.SUCCESS]
    run.ask(do="resume")
    run.await_begun(1)
    run.finish_all()
    assert run.end() == COMPLETED


@pytest.mark.parametrize("now", [False, True])
def test_a_paused_run_can_be_stopped(base: Path, folder: Path, now: bool) -> None:
    run = Steered(folder, experiment(base, ["a", "b", "c"], design={"max_concurrency": 2}))
    run.await_begun(2)
    run.ask(do="pause")
    assert run.ask(do="stop", now=now) == {"status": "stopping"}
    if not now:
        assert "being stopped" in run.ask(do="pause")["error"]
        assert run.ask(do="resume") == {"status": "draining"}
        run.finish_all()
    assert run.end() == RunEnd("interrupted", "stopped on request")
    assert statuses(folder) == ([] if now else [Status.SUCCESS] * 2)


def test_a_status_says_what_runs_and_since_when(base: Path, folder: Path) -> None:
    run = Steered(folder, experiment(base, ["a"]))
    run.await_begun(1)
    (ticket,) = run.backend.running
    run.backend.say(Traced(ticket, "agent", 7, 4096))
    run.backend.wake()
    spin_until(lambda: run.ask(do="status")["in_flight"][0]["events"], "it is known how far it is")
    answer = run.ask(do="status")
    (found,) = answer["in_flight"]
    assert found.pop("age_s") >= 0
    assert answer["status"] == "running"
    assert found == {
        "trial_id": ticket.trial_id,
        "variant_id": "v",
        "task_id": "a",
        "repeat": 0,
        "attempt": 1,
        "phase": "agent",
        "events": 7,
        "memory_bytes": 4096,
    }
    assert "allowed" in run.ask(do="dance")["error"]
    run.finish_all()
    assert run.end() == COMPLETED
    with pytest.raises(RunNotActive, match="no coordinator holds the run"):
        run.ask(do="status")


def test_a_request_that_comes_too_late_is_answered(base: Path, folder: Path) -> None:
    class Asks(RunCallback):
        def on_run_start(self, run: Coordinator) -> None:
            self._run = run

        def on_trial_selected(self, slot: Slot, attempt: int) -> None:
            thread.start()
            assert self._run._control is not None
            spin_until(lambda: not self._run._control.requests.empty(), "the request is there")

    def fail(dispatch: TrialDispatch) -> Play:
        raise KeyError("the backend is broken")

    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(folder, do="status")))
    with pytest.raises(KeyError, match="the backend is broken"):
        run_scripted(folder, experiment(base, ["a"]), fail, callbacks=[Asks()])
    thread.join(60)
    assert answers == [{"error": "the coordinator has ended"}]


# --- adoption ---


def interrupted(folder: Path, one: Experiment) -> list[TrialDispatch]:
    """A run whose coordinator is gone, with all that it had begun still recorded as active."""
    with open_run(folder, one) as store:
        clock = ManualClock()
        backend = ScriptedBackend(clock, 4, in_turn(HOLDS), patience_s=0)
        with pytest.raises(RuntimeError, match="waits for ever"):
            Coordinator(store, one, backend, clock=clock).run()
    return dispatches(folder)


def test_what_a_backend_does_not_adopt_is_lost_and_costs_the_trial_nothing(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b"], design={"infra_retries": 0})
    interrupted(folder, one)

    class Forgetful(ScriptedBackend):
        def adopt(self, active: list[ActiveTrial]) -> list[Adoption]:
            return []

    clock = ManualClock()
    assert work_at(folder, one, Forgetful(clock), clock=clock) == COMPLETED
    assert statuses(folder) == [Status.SUCCESS] * 2
    assert [event["state"] for event in events(folder, "adopted")] == ["lost", "lost"]


def test_a_backend_that_adopts_what_it_was_not_asked_for_is_at_fault(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 2})
    interrupted(folder, one)
    stranger = TrialDispatch.model_validate(dispatches(folder)[0])

    class Greedy(ScriptedBackend):
        def adopt(self, active: list[ActiveTrial]) -> list[Adoption]:
            slot = Slot(schedule_idx=2, variant_id="v", task_id="c", repeat=0)
            other = active[0].model_copy(update={"slot": slot})
            return [*super().adopt(active), Adoption(other, "alive")]

    clock = ManualClock()
    end = work_at(folder, one, Greedy(clock), clock=clock)
    assert (end.status, stranger.attempt) == ("failed", 1)
    assert "of which it was not asked" in end.reason


def test_an_adopted_attempt_that_is_lost_costs_the_trial_nothing(base: Path, folder: Path) -> None:
    one = experiment(base, ["a"], design={"infra_retries": 0})
    interrupted(folder, one)
    end, backend = run_scripted(folder, one, adopts=lambda active: LOST)
    assert (end, statuses(folder), backend.asked) == (COMPLETED, [Status.SUCCESS], [("begin", 0, 2)])


def test_an_adopted_attempt_runs_to_its_end_and_is_not_made_again(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b", "c"], design={"max_concurrency": 2})
    interrupted(folder, one)
    late = Play(
        bells=(
            ("started", 0),
            ("finished", 5),
        )
    )
    ages: list[float] = []
    looks = Then(lambda run: ages.extend(one["age_s"] for one in run.in_flight()))
    end, backend = run_scripted(folder, one, capacity=2, adopts=lambda active: late, callbacks=[looks])
    assert (end, statuses(folder)) == (COMPLETED, [Status.SUCCESS] * 3)
    assert backend.asked == [("begin", 2, 1)]
    assert len(ages) == 2
    assert max(ages) < 600  # since it began, and not since 1970


# --- no room ---


class FullAt:
    """Says, as a store would, that there is no room: from the nth write on."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def __call__(self, point: str) -> None:
        if point.endswith(":before-begin"):
            self._left -= 1
            if self._left <= 0:
                raise StoreFull("no room left")


def test_a_full_disk_interrupts_the_run_at_any_write_and_it_continues_when_there_is_room(
    base: Path, tmp_path: Path
) -> None:
    one = experiment(base, [{"id": name, "protocol": {"max_retries": 1}} for name in "abcd"])

    def script(dispatch: TrialDispatch) -> Play:
        return FAILS if dispatch.task.id == "b" and dispatch.attempt == 1 else Play()

    run_scripted(tmp_path / "calm", one, script, capacity=2)
    ends = []
    for nth in itertools.count(2):  # the first is the making of the run
        folder = tmp_path / f"full-{nth}"
        end, _ = run_scripted(folder, one, script, capacity=2, at=FullAt(nth))
        ends.append(end)
        if end == COMPLETED:
            break
        assert end == RunEnd("interrupted", "no room left")
        assert run_scripted(folder, one, script, capacity=2)[0] == COMPLETED
        assert history_of(folder) == history_of(tmp_path / "calm")
        assert all(len(ended) == 1 + (name[2] == "b") for name, ended in completions(folder).items())
    assert len(ends) > 5


def test_an_attempt_that_found_no_room_interrupts_the_run_and_costs_the_trial_nothing(base: Path, folder: Path) -> None:
    one = experiment(base, ["a", "b"], design={"infra_retries": 0})
    no_room = Play(Status.ENVIRONMENT_ERROR, StoreFull.__name__)
    end, _ = run_scripted(folder, one, lambda dispatch: no_room if dispatch.task.id == "a" else Play())
    assert end.status == "interrupted"
    assert f"no room left in {folder}" in end.reason
    assert run_scripted(folder, one)[0] == COMPLETED
    assert statuses(folder) == [Status.SUCCESS] * 2
    assert [len(json.loads(line)["attempts"]) for line in history_of(folder)] == [1, 1]


def test_a_worker_that_had_no_room_even_to_say_so_interrupts_the_run(
    base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = experiment(base, ["a"], design={"infra_retries": 0})
    with monkeypatch.context() as full:
        full.setattr(coordinator, "has_room", lambda folder: False)
        end, _ = run_scripted(folder, one, in_turn(LOST))
    assert (end.status, statuses(folder)) == ("interrupted", [])
    assert (run_scripted(folder, one)[0], statuses(folder)) == (COMPLETED, [Status.SUCCESS])
