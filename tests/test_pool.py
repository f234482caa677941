"""`Pool` as its users meet it, on the strongest containment of this machine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S, Meeting, Script

from sandbox_exec import AgentFailed, Blame, Command, InvalidValue, Limits, Pool, PoolClosed, Status
from sandbox_exec.contracts import Rung
from sandbox_exec.guest import context


def shell(text: str, **rest: Any) -> Command:
    return Command(["sh", "-c", text], **rest)


# --- calls and what comes of them ---


def test_a_call_gives_its_value(pool: Pool) -> None:
    outcome = pool.submit(divmod, 17, 5).result(PATIENCE_S)
    assert outcome.status is Status.SUCCESS
    assert outcome.blame is None
    assert outcome.value == [3, 2]
    assert outcome.unwrap() == [3, 2]
    assert outcome.exit_code == 0
    assert outcome.kill is None
    assert outcome.isolation is not None
    assert Rung(outcome.isolation.rung).namespaced


def test_arguments_by_name_reach_the_function(pool: Pool) -> None:
    def agent(first: int, *rest: int, named: str, **others: int) -> list[Any]:
        return [first, rest, named, others]

    assert pool.submit(agent, 1, 2, 3, named="x", other=4).result().unwrap() == [1, [2, 3], "x", {"other": 4}]


def test_an_exception_is_an_outcome_with_the_guests_traceback_as_text(pool: Pool) -> None:
    def inner(number: int) -> None:
        raise ValueError(f"no good: {number}")

    def agent() -> None:
        inner(41)

    outcome = pool.submit(agent).result()
    assert (outcome.status, outcome.blame, outcome.value) == (Status.AGENT_ERROR, Blame.AGENT, None)
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.message) == ("ValueError", "no good: 41")
    traceback = outcome.error.traceback
    assert traceback.startswith("Traceback (most recent call last):")
    assert "in agent" in traceback
    assert "in inner" in traceback
    assert "run_call" not in traceback  # our own frames say nothing to a user
    with pytest.raises(AgentFailed, match="no good: 41") as raised:
        outcome.unwrap()
    assert raised.value.outcome is outcome


def test_an_exception_of_the_agents_own_class_is_named_with_its_module(pool: Pool) -> None:
    outcome = pool.submit(json.loads, "{").result()
    assert outcome.error is not None
    assert outcome.error.type == "json.decoder.JSONDecodeError"


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (3, 3), (None, 0), ("so long", 1)])
def test_an_agent_that_exits_has_not_returned(pool: Pool, code: object, exit_code: int) -> None:
    outcome = pool.submit(sys.exit, code).result()
    assert (outcome.status, outcome.exit_code) == (Status.AGENT_ERROR, exit_code)
    assert outcome.error is not None
    assert outcome.error.type == "SystemExit"


def test_an_agent_that_kills_itself_is_said_to_have_ended_by_that_signal(pool: Pool) -> None:
    outcome = pool.submit(os.abort).result()
    assert (outcome.status, outcome.signal, outcome.exit_code) == (Status.AGENT_ERROR, signal.SIGABRT, None)
    assert outcome.kill is None


def test_a_value_that_json_lacks_is_an_error_that_says_what_to_do(pool: Pool) -> None:
    outcome = pool.submit(set, [1]).result()
    assert outcome.status is Status.AGENT_ERROR
    assert outcome.error is not None
    assert "set" in outcome.error.message
    assert "trusted_results" in outcome.error.message


@pytest.mark.parametrize(
    "value", [None, True, 0, -1.5, 10**30, "", "ä😀\0\n", [], [[1, [2]]], {}, {"a": {"b": [None]}}, "\u2028"]
)
def test_what_json_can_say_comes_back_as_it_was(pool: Pool, value: object) -> None:
    def agent() -> object:
        return value

    assert pool.submit(agent).result().unwrap() == value


def test_a_value_of_several_mebibytes_comes_back_whole(pool: Pool) -> None:
    def agent(size: int) -> str:
        return "x" * size

    assert len(pool.submit(agent, 8 << 20).result().unwrap()) == 8 << 20


def test_an_argument_of_several_mebibytes_arrives_whole(pool: Pool) -> None:
    assert pool.submit(len, b"x" * (12 << 20)).result().unwrap() == 12 << 20


def test_what_was_printed_and_traced_is_in_the_outcome(pool: Pool) -> None:
    def agent() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os.write(1, b"\xff raw\n")
        context().trace("step", number=1)
        context().trace("step", number=2)

    outcome = pool.submit(agent).result()
    assert outcome.stdout == "to stdout\n\\xff raw\n"
    assert outcome.stderr == "to stderr\n"
    assert [(event["type"], event["number"]) for event in outcome.trace] == [("step", 1), ("step", 2)]


def test_usage_is_measured_from_outside(pool: Pool) -> None:
    def agent() -> None:
        held = bytearray(48 << 20)
        while os.times().user < 0.05:
            held[0] ^= 1

    usage = pool.submit(agent).result().usage
    assert usage.wall_s >= 0.05
    assert usage.cpu_s is not None
    assert usage.cpu_s >= 0.05
    assert usage.peak_memory_bytes is not None
    assert 48 << 20 <= usage.peak_memory_bytes < 128 << 20


def test_usage_of_one_call_does_not_show_in_the_next() -> None:
    def agent(size: int) -> None:
        bytearray(size)

    with Pool(max_workers=1) as pool:
        large = pool.submit(agent, 64 << 20).result().usage
        small = pool.submit(agent, 1).result().usage
    assert large.peak_memory_bytes is not None
    assert small.peak_memory_bytes is not None
    assert large.peak_memory_bytes > 64 << 20
    assert small.peak_memory_bytes < 16 << 20


def test_an_agent_that_hangs_is_late_and_what_it_said_is_kept(pool: Pool) -> None:
    def agent() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        context().trace("ready")
        print("waiting")
        while True:
            signal.pause()

    outcome = pool.submit(agent, limits=Limits(timeout_s=0.3, grace_s=0.05)).result(PATIENCE_S)
    assert outcome.status is Status.TASK_TIMEOUT
    assert [event["type"] for event in outcome.trace] == ["ready"]
    assert outcome.stdout == "waiting\n"
    assert outcome.kill is not None
    assert outcome.kill.reason == "deadline"
    assert outcome.kill.grace_used
    assert "pid namespace" in outcome.kill.proof
    assert outcome.usage.wall_s >= 0.35


def test_limits_of_a_call_hold_for_that_call_only() -> None:
    def agent() -> float | None:
        return context().deadline_s

    with Pool(max_workers=1, limits=Limits(timeout_s=30)) as pool:
        assert pool.submit(agent).result().unwrap() == 30
        assert pool.submit(agent, limits=Limits(timeout_s=20)).result().unwrap() == 20
        assert pool.submit(agent, limits=Limits(timeout_s=None)).result().unwrap() is None
        assert pool.submit(agent).result().unwrap() == 30


def test_one_agents_failure_does_not_touch_the_others(pool: Pool) -> None:
    def agent(number: int) -> int:
        if number % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number % 3 == 1:
            raise ValueError
        return number

    outcomes = [future.result() for future in [pool.submit(agent, number) for number in range(30)]]
    assert [outcome.value for outcome in outcomes[2::3]] == list(range(2, 30, 3))
    assert {outcome.status for outcome in (*outcomes[::3], *outcomes[1::3])} == {Status.AGENT_ERROR}


# --- what can be called ---


def test_lambdas_closures_and_partials_can_be_called(pool: Pool) -> None:
    import functools

    factor = 3

    def closure(number: int) -> int:
        return number * factor

    assert pool.submit(lambda number: number + 1, 1).result().unwrap() == 2
    assert pool.submit(closure, 5).result().unwrap() == 15
    assert pool.submit(functools.partial(closure, 7)).result().unwrap() == 21


def test_a_function_that_was_typed_into_a_notebook_can_be_called(pool: Pool) -> None:
    module = types.ModuleType("__main__")  # as a cell runs: in a namespace that no file could be imported for
    cell = "base = 40\ndef helper(x):\n    return base + x\ndef solve(x):\n    return helper(x)\n"
    exec(compile(cell, "<cell>", "exec"), module.__dict__)
    assert pool.submit(module.solve, 2).result().unwrap() == 42


def test_functions_and_classes_of_a_script_can_be_called(tmp_path: Path) -> None:
    with Script(
        tmp_path,
        """
        from dataclasses import dataclass
        from sandbox_exec import Pool

        @dataclass
        class Task:
            number: int

        def double(task):
            return Twice().of(task)

        class Twice:
            def of(self, task):
                return task.number * 2

        with Pool(1) as pool:
            print(pool.submit(double, Task(21)).result().unwrap())
            print(pool.submit(Twice().of, Task(4)).result().unwrap())
        """,
    ) as script:
        code, stdout, stderr = script.end()
    assert (code, stdout.split(), stderr) == (0, ["42", "8"], "")


def test_a_script_without_a_main_guard_is_not_run_again_by_its_agents(tmp_path: Path) -> None:
    with Script(
        tmp_path,
        """
        print("top")
        from sandbox_exec import Pool
        pool = Pool(1)
        print(pool.submit(lambda: __name__).result().value)
        """,
    ) as script:
        code, stdout, stderr = script.end()
    assert (code, stdout.split(), stderr) == (0, ["top", "__main__"], "")


def test_a_call_that_cannot_be_pickled_is_an_error_where_it_is_made(pool: Pool) -> None:
    with pytest.raises(TypeError, match="pickle"):
        pool.submit(len, threading.Lock())
    assert pool.submit(len, "abc").result().unwrap() == 3


def test_what_cannot_be_called_is_an_error_where_it_is_made(pool: Pool) -> None:
    with pytest.raises(InvalidValue, match="neither a function nor a Command"):
        pool.submit("rm -rf /")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="a list of words"):
        Command("echo hello")
    with pytest.raises(InvalidValue, match="a list of words"):
        Command([])
    with pytest.raises(InvalidValue, match="takes no arguments"):
        pool.submit(Command(["true"]), 1)


def test_an_argument_whose_unpickling_fails_in_the_guest_is_an_outcome(pool: Pool) -> None:
    outcome = pool.submit(len, FailsToLoad()).result()
    assert outcome.status is Status.AGENT_ERROR
    assert outcome.error is not None
    assert "cannot be loaded" in outcome.error.message


class FailsToLoad:
    def __reduce__(self) -> tuple[Any, ...]:
        return fail_to_load, ()


def fail_to_load() -> None:
    raise RuntimeError("cannot be loaded")


# --- trust ---


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_trusted_results_may_be_any_object() -> None:
    def agent() -> Any:
        return {1, 2}, complex(1, 2), b"bytes", {(1, 2): [None]}

    with Pool(max_workers=1, trusted_results=True) as pool:
        assert pool.submit(agent).result().unwrap() == ({1, 2}, complex(1, 2), b"bytes", {(1, 2): [None]})
        assert pool.submit(Point, 7).result().unwrap().x == 7


def test_by_default_what_an_agent_sends_is_never_unpickled(pool: Pool, tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    def agent(bomb_maker: type[Bomb]) -> None:
        import base64

        import cloudpickle

        frame = {"pickle": base64.b64encode(cloudpickle.dumps(bomb_maker())).decode()}
        os.write(3, json.dumps(frame).encode() + b"\n")  # the pipe on which results go
        os._exit(0)

    outcome = pool.submit(agent, Bomb).result()
    assert outcome.status is Status.AGENT_ERROR
    assert not marker.exists()
    with Pool(max_workers=1, trusted_results=True) as trusting:
        trusting.submit(agent, Bomb).result()
    assert marker.exists()  # the bomb was live, and the pipe the right one


# --- many calls ---


def test_map_keeps_the_order_of_its_input(pool: Pool) -> None:
    assert [outcome.unwrap() for outcome in pool.map(lambda x, y: [x, y], range(20), range(100, 120))] == [
        [x, x + 100] for x in range(20)
    ]


def test_map_ends_with_its_shortest_input_and_with_none_at_all(pool: Pool) -> None:
    assert [outcome.unwrap() for outcome in pool.map(divmod, [7, 8, 9], [2, 2])] == [[3, 1], [4, 0]]
    assert list(pool.map(abs, [])) == []


def test_map_draws_from_an_endless_iterator_only_a_few_calls_ahead(pool: Pool) -> None:
    drawn = []

    def endless() -> Iterator[int]:
        for number in range(10**9):
            drawn.append(number)
            yield number

    outcomes = pool.map(abs, endless())
    assert drawn == []
    for number in range(10):
        assert next(outcomes).unwrap() == number
        assert len(drawn) <= number + 2 * pool.max_workers
    outcomes.close()  # type: ignore[attr-defined]
    assert len(drawn) <= 10 + 2 * pool.max_workers


def test_a_map_that_is_left_early_ends_its_calls(pool: Pool, meeting: Meeting) -> None:
    def agent(meeting: Any, number: int) -> int:
        if number < 2:  # the next one has the slot of the first, and may be there before the second is
            meeting.announce(str(number))
        if number:
            signal.pause()
        return number

    limits = Limits(timeout_s=None, readable=[meeting.folder])
    outcomes = pool.map(agent, [meeting] * 10, range(10), limits=limits)
    assert next(outcomes).unwrap() == 0
    meeting.expect("0", "1")
    outcomes.close()  # type: ignore[attr-defined]
    assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1  # both slots are free again
    assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1


def test_an_error_in_the_input_of_map_reaches_the_caller(pool: Pool) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("input")

    with pytest.raises(KeyError):
        list(pool.map(abs, broken()))


def test_run_all_gives_each_its_outcome_by_name(pool: Pool) -> None:
    def good(task: int) -> int:
        return task + 1

    def crash(task: int) -> None:
        raise RuntimeError(f"task {task}")

    outcomes = pool.run_all({"good": good, "crash": crash, "command": Command(["true"])}, 41)
    assert list(outcomes) == ["good", "crash", "command"]
    assert outcomes["good"].unwrap() == 42
    assert outcomes["crash"].error is not None
    assert outcomes["crash"].error.message == "task 41"
    assert outcomes["command"].ok


def test_no_more_calls_run_at_once_than_there_are_workers(pool: Pool, meeting: Meeting) -> None:
    def agent(meeting: Any, number: int) -> None:
        meeting.announce("in")
        meeting.wait()

    limits = Limits(readable=[meeting.folder])
    futures = [pool.submit(agent, meeting, number, limits=limits) for number in range(4)]
    meeting.expect("in", "in")
    settle(pool)
    assert [future.running() for future in futures] == [True, True, False, False]
    meeting.let_go(4)
    assert all(future.result(PATIENCE_S).ok for future in futures)
    meeting.expect("in", "in")


def test_calls_start_in_the_order_in_which_they_were_made(meeting: Meeting) -> None:
    def agent(meeting: Any, number: int) -> None:
        meeting.announce(str(number))

    with Pool(max_workers=1, limits=Limits(readable=[meeting.folder])) as pool:
        for number in range(8):
            pool.submit(agent, meeting, number)
    assert [meeting.hear() for _ in range(8)] == [str(number) for number in range(8)]


def test_many_threads_can_submit_at_once(pool: Pool) -> None:
    def submit_some(thread: int) -> list[int]:
        futures = [pool.submit(abs, -(thread * 100 + number)) for number in range(10)]
        return [future.result(PATIENCE_S).unwrap() for future in futures]

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        found = list(threads.map(submit_some, range(16)))
    assert found == [[thread * 100 + number for number in range(10)] for thread in range(16)]


def test_as_completed_and_wait_work_on_the_futures(pool: Pool) -> None:
    futures = {pool.submit(abs, -number): number for number in range(6)}
    done = {futures[future]: future.result().unwrap() for future in concurrent.futures.as_completed(futures)}  # type: ignore[index]
    assert done == {number: number for number in range(6)}
    assert not concurrent.futures.wait(futures, timeout=PATIENCE_S).not_done


def test_a_done_callback_can_use_the_pool(pool: Pool) -> None:
    last: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def next_one(future: concurrent.futures.Future[Any]) -> None:
        value = future.result().unwrap()
        if value < 5:
            pool.submit(lambda x: x + 1, value).add_done_callback(next_one)
        else:
            last.set_result(value)

    pool.submit(abs, 0).add_done_callback(next_one)
    assert last.result(PATIENCE_S) == 5


def test_a_done_callback_that_raises_harms_nobody(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def raises(_: object) -> None:
        raise RuntimeError("a callback's own fault")

    future = pool.submit(abs, -1)
    future.add_done_callback(raises)
    assert future.result(PATIENCE_S).unwrap() == 1
    assert pool.submit(abs, -2).result(PATIENCE_S).unwrap() == 2
    assert "callback" in caplog.text


# --- cancelling ---


def test_a_call_that_waits_can_be_cancelled_and_never_runs(meeting: Meeting) -> None:
    def agent(meeting: Any, word: str) -> None:
        meeting.announce(word)
        meeting.wait()

    with Pool(max_workers=1, limits=Limits(readable=[meeting.folder])) as pool:
        first = pool.submit(agent, meeting, "first")
        meeting.expect("first")
        second = pool.submit(agent, meeting, "second")
        third = pool.submit(agent, meeting, "third")
        assert second.cancel()
        assert second.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            second.result()
        meeting.let_go(2)
        assert first.result(PATIENCE_S).ok
        assert third.result(PATIENCE_S).ok
        meeting.expect("third")


def test_a_call_that_runs_can_be_cancelled_which_kills_it_and_keeps_its_trace(pool: Pool, meeting: Meeting) -> None:
    def agent(meeting: Any) -> None:
        for number in range(100):
            context().trace("step", number=number)
        print("so far")
        meeting.announce("ready")
        while True:
            signal.pause()

    future = pool.submit(agent, meeting, limits=Limits(timeout_s=None, readable=[meeting.folder]))
    meeting.expect("ready")
    assert future.cancel()
    outcome = future.result(PATIENCE_S)
    assert (outcome.status, outcome.blame) == (Status.CANCELLED, Blame.RUN)
    assert [event["number"] for event in outcome.trace] == list(range(100))
    assert outcome.stdout == "so far\n"
    assert outcome.kill is not None
    assert outcome.kill.reason == "cancelled"
    assert not outcome.kill.grace_used
    assert not future.cancelled()  # it has an outcome
    assert not future.cancel()  # and has ended


def test_the_answer_to_a_cancelled_call_never_becomes_that_of_the_next() -> None:
    with Pool(max_workers=1) as pool:
        for number in range(60):
            cancelled = pool.submit(divmod, number, 7)
            while not cancelled.running() and not cancelled.done():
                os.sched_yield()
            cancelled.cancel()
            assert pool.submit(divmod, 1000 + number, 1).result(PATIENCE_S).unwrap() == [1000 + number, 0]
            assert cancelled.result(PATIENCE_S).status in (Status.CANCELLED, Status.SUCCESS)


def test_cancelling_an_asyncio_task_kills_its_call(pool: Pool, meeting: Meeting) -> None:
    def agent(meeting: Any) -> None:
        meeting.announce("ready")
        signal.pause()

    limits = Limits(timeout_s=None, readable=[meeting.folder])

    async def main() -> tuple[Any, Any]:
        assert (await asyncio.wrap_future(pool.submit(abs, -3))).unwrap() == 3
        future = pool.submit(agent, meeting, limits=limits)
        task = asyncio.ensure_future(asyncio.wrap_future(future))
        await asyncio.to_thread(meeting.expect, "ready")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return task, await asyncio.to_thread(future.result, PATIENCE_S)

    task, outcome = asyncio.run(main())
    assert task.cancelled()
    assert outcome.status is Status.CANCELLED


def test_an_asyncio_timeout_kills_its_call(pool: Pool) -> None:
    async def main() -> Any:
        future = pool.submit(signal.pause, limits=Limits(timeout_s=None))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.05)
        return await asyncio.to_thread(future.result, PATIENCE_S)

    assert asyncio.run(main()).status is Status.CANCELLED


def test_a_result_that_is_not_waited_for_any_longer_still_comes(pool: Pool, meeting: Meeting) -> None:
    def agent(meeting: Any) -> int:
        meeting.wait()
        return 7

    future = pool.submit(agent, meeting, limits=Limits(readable=[meeting.folder]))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    meeting.let_go()
    assert future.result(PATIENCE_S).unwrap() == 7


# --- freezing ---


def test_a_frozen_agent_makes_no_progress_and_does_not_age(meeting: Meeting) -> None:
    def agent(meeting: Any) -> list[float]:
        before_s = context().remaining
        meeting.announce("ready")
        meeting.wait()
        meeting.announce("on")
        return [before_s, context().remaining]

    def sleeper() -> None:
        signal.pause()

    limits = Limits(timeout_s=1.5, readable=[meeting.folder])
    with Pool(max_workers=2, limits=limits) as pool:
        future = pool.submit(agent, meeting)
        meeting.expect("ready")
        future.freeze()
        settle(pool)
        # The other call is over its own deadline, which is longer than the frozen one's, before we go on.
        other = pool.submit(sleeper, limits=Limits(timeout_s=2, grace_s=0)).result(PATIENCE_S)
        assert other.status is Status.TASK_TIMEOUT
        meeting.let_go()
        assert not future.done()
        assert meeting.unread() == 1
        future.thaw()
        meeting.expect("on")
        before_s, after_s = future.result(PATIENCE_S).unwrap()
    assert 0 < after_s <= before_s <= 1.5
    assert before_s - after_s < 1.5  # of the 2 s and more that have passed


def test_a_frozen_call_can_be_cancelled_and_its_slot_used_again(meeting: Meeting) -> None:
    def agent(meeting: Any) -> None:
        meeting.announce("ready")
        meeting.wait()

    with Pool(max_workers=1, limits=Limits(readable=[meeting.folder])) as pool:
        future = pool.submit(agent, meeting)
        meeting.expect("ready")
        future.freeze()
        settle(pool)
        future.cancel()
        assert future.result(PATIENCE_S).status is Status.CANCELLED
        assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1


def test_freezing_what_has_ended_or_waits_does_nothing(pool: Pool) -> None:
    future = pool.submit(abs, -1)
    assert future.result(PATIENCE_S).ok
    future.freeze()
    future.thaw()
    assert pool.submit(abs, -2).result(PATIENCE_S).unwrap() == 2


# --- budget ---


def test_a_memory_budget_holds_back_what_would_not_fit_beside_what_runs(meeting: Meeting) -> None:
    def agent(meeting: Any, word: str) -> None:
        meeting.announce(word)
        meeting.wait()

    def limits(memory: str) -> Limits:
        return Limits(memory=memory, readable=[meeting.folder])

    with Pool(max_workers=3, limits=limits("64MiB"), memory_budget="128MiB") as pool:
        large = pool.submit(agent, meeting, "large", limits=limits("96MiB"))
        meeting.expect("large")
        held = pool.submit(agent, meeting, "held")
        settle(pool)
        assert not held.running()  # though two workers are free: 96 and 64 are more than 128
        meeting.let_go()
        assert large.result(PATIENCE_S).ok
        meeting.expect("held")
        beside = pool.submit(agent, meeting, "beside")
        meeting.expect("beside")  # 64 and 64 are not
        meeting.let_go(2)
        assert held.result(PATIENCE_S).ok
        assert beside.result(PATIENCE_S).ok


def settle(pool: Pool) -> None:
    """Wait until the manager has acted on all that was said to it before."""
    assert pool._manager is not None
    for _ in range(2):  # it reads its words, then acts; when it reads the second it has acted on the first
        heard = threading.Event()
        pool._manager.put(heard.set)
        assert heard.wait(PATIENCE_S)


def test_a_call_that_can_never_fit_the_budget_is_an_error_at_once() -> None:
    with Pool(max_workers=1, limits=Limits(memory="64MiB"), memory_budget="128MiB") as pool:
        with pytest.raises(InvalidValue, match="can never fit"):
            pool.submit(abs, 1, limits=Limits(memory="129MiB"))
        assert pool.submit(abs, -1).result().unwrap() == 1
    with pytest.raises(InvalidValue, match="can never fit"):
        Pool(limits=Limits(memory="1GiB"), memory_budget="512MiB")


def test_a_call_without_a_ceiling_takes_nothing_of_the_budget() -> None:
    with Pool(max_workers=1, limits=Limits(memory=None), memory_budget="1MiB") as pool:
        assert pool.submit(abs, -1).result().unwrap() == 1


@pytest.mark.parametrize("workers", [0, -1])
def test_a_pool_needs_a_worker(workers: int) -> None:
    with pytest.raises(InvalidValue, match="at least 1"):
        Pool(workers)


# --- seeds ---


def test_seeds_differ_from_call_to_call_and_are_the_same_the_next_time() -> None:
    def seeds(seed: int) -> list[int]:
        with Pool(max_workers=2, seed=seed) as pool:
            return [outcome.unwrap() for outcome in pool.map(lambda _: context().seed, range(5))]

    first = seeds(1)
    assert len(set(first)) == 5
    assert seeds(1) == first
    assert not set(seeds(2)) & set(first)


# --- environment ---


def test_no_variable_of_the_callers_reaches_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    monkeypatch.setenv("LC_ALL", "C")

    def agent() -> dict[str, str]:
        return dict(os.environ)

    with Pool(max_workers=1) as pool:
        seen = pool.submit(agent).result().unwrap()
        printed = pool.submit(Command(["env"])).result().stdout
    places = {"IN", "WORKSPACE", "AGENT", "OUT", "TRACE", "DEADLINE_S"}
    assert set(seen) == {"PATH", "HOME", "LANG"} | {f"SANDBOX_EXEC_{place}" for place in places}
    assert {line.partition("=")[0] for line in printed.splitlines()} == set(seen)
    assert seen["SANDBOX_EXEC_DEADLINE_S"] == "60"
    assert seen["HOME"] == "/tmp"
    assert "hunter2" not in json.dumps(seen) + printed


def test_named_variables_reach_the_agent_and_not_the_next_one() -> None:
    with Pool(max_workers=1, env={"MODE": "careful", "LANG": "de_DE.UTF-8"}) as pool:
        assert pool.submit(os.getenv, "MODE").result().unwrap() == "careful"
        assert pool.submit(os.getenv, "LANG").result().unwrap() == "de_DE.UTF-8"
        own = pool.submit(shell("echo $MODE $EXTRA", env={"EXTRA": "ä", "MODE": "bold"})).result()
        assert own.stdout == "bold ä\n"
        assert pool.submit(os.getenv, "EXTRA").result().unwrap() is None
        assert pool.submit(os.getenv, "MODE").result().unwrap() == "careful"


def test_the_places_that_the_environment_names_are_there(pool: Pool) -> None:
    def agent() -> dict[str, Any]:
        found = {}
        for name in ("IN", "WORKSPACE", "AGENT", "OUT"):
            path = os.environ[f"SANDBOX_EXEC_{name}"]
            found[name] = [os.path.isdir(path), os.access(path, os.W_OK)]
        return {**found, "cwd": os.getcwd() == os.environ["SANDBOX_EXEC_WORKSPACE"]}

    assert pool.submit(agent).result().unwrap() == {
        "IN": [True, False], "WORKSPACE": [True, True], "AGENT": [True, False], "OUT": [True, True], "cwd": True
    }  # fmt: skip


# --- commands ---


def test_a_command_leaves_its_value_in_result_json(pool: Pool) -> None:
    outcome = pool.submit(shell("""echo '{"answer": 42}' > $SANDBOX_EXEC_OUT/result.json; echo done""")).result()
    assert outcome.status is Status.SUCCESS
    assert outcome.value == {"answer": 42}
    assert outcome.stdout == "done\n"


def test_a_command_without_a_result_succeeds_by_its_exit_code(pool: Pool) -> None:
    fine, failed = pool.submit(Command(["true"])).result(), pool.submit(shell("echo why >&2; exit 7")).result()
    assert (fine.status, fine.value, fine.exit_code) == (Status.SUCCESS, None, 0)
    assert (failed.status, failed.exit_code, failed.stderr) == (Status.AGENT_ERROR, 7, "why\n")
    with pytest.raises(AgentFailed, match="exit code 7"):
        failed.unwrap()


def test_a_command_that_a_signal_ended_says_which(pool: Pool) -> None:
    outcome = pool.submit(shell("kill -SEGV $$")).result()
    assert (outcome.status, outcome.signal) == (Status.AGENT_ERROR, signal.SIGSEGV)


@pytest.mark.parametrize("argv", [["no-such-program"], ["/etc/passwd"], ["/tmp"]])
def test_a_command_that_cannot_be_started_is_no_fault_of_the_agent(pool: Pool, argv: list[str]) -> None:
    outcome = pool.submit(Command(argv)).result()
    assert (outcome.status, outcome.blame) == (Status.SETUP_FAILED, Blame.TASK)
    assert outcome.error is not None
    assert "Error" in outcome.error.message


def test_a_command_gets_its_input_as_a_task(pool: Pool) -> None:
    outcome = pool.submit(shell("cp $SANDBOX_EXEC_IN/task.json $SANDBOX_EXEC_OUT/result.json", input=[1, "ä"])).result()
    assert outcome.value["input"] == [1, "ä"]
    assert set(outcome.value) == {"id", "input", "seed", "repeat"}
    assert pool.submit(shell("ls $SANDBOX_EXEC_IN")).result().stdout == ""  # the next one has none


def test_an_input_that_the_disk_limit_has_no_room_for_is_an_outcome(pool: Pool) -> None:
    small = Limits(disk="1MiB")
    outcome = pool.submit(Command(["true"], input="x" * (4 << 20)), limits=small).result(PATIENCE_S)
    assert outcome.status is Status.SETUP_FAILED
    assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1


def test_a_command_can_write_the_trace_with_echo(pool: Pool) -> None:
    text = """echo '{"type":"step","n":1}' > $SANDBOX_EXEC_TRACE; echo '{"type":"step","n":2}' > $SANDBOX_EXEC_TRACE"""
    assert [event["n"] for event in pool.submit(shell(text)).result().trace] == [1, 2]


def test_a_command_can_be_a_python_program_that_imports_what_the_caller_can(pool: Pool) -> None:
    outcome = pool.submit(Command([sys.executable, "-c", "import psutil; print(psutil.__name__)"])).result()
    assert (outcome.stdout, outcome.stderr) == ("psutil\n", "")


def test_a_command_finds_python_on_its_path_and_stdin_at_its_end(pool: Pool) -> None:
    outcome = pool.submit(Command(["python3", "-c", "import sys; print(repr(sys.stdin.read()))"])).result()
    assert (outcome.stdout, outcome.stderr) == ("''\n", "")


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param("echo nothing", id="no JSON"),
        pytest.param("echo '[1]'", id="no object"),
        pytest.param("printf '\\377'", id="no text"),
    ],
)
def test_a_malformed_result_json_is_the_agents_error(pool: Pool, leave: str) -> None:
    outcome = pool.submit(shell(f"{leave} > /out/result.json")).result()
    assert (outcome.status, outcome.value) == (Status.AGENT_ERROR, None)
    assert outcome.error is not None
    assert outcome.error.type == "MalformedResult"


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param("ln -s /etc/hostname /out/result.json", id="a link"),
        pytest.param("ln -s /out/other.json /out/result.json; echo '{}' > /out/other.json", id="a link beside it"),
        pytest.param("mkfifo /out/result.json", id="a named pipe"),
        pytest.param("mkdir /out/result.json", id="a folder"),
        pytest.param("truncate -s 3M /out/result.json", id="too large"),
        pytest.param("truncate -s 10T /out/result.json 2>/dev/null || truncate -s 3M /out/result.json", id="sparse"),
    ],
)
def test_what_is_no_small_file_is_never_opened_as_a_result(pool: Pool, leave: str) -> None:
    outcome = pool.submit(shell(leave), limits=Limits(result="2MiB")).result(PATIENCE_S)
    assert (outcome.status, outcome.value) == (Status.AGENT_ERROR, None)
    assert outcome.error is not None
    assert outcome.error.type == "MalformedResult"


# --- the end ---


def test_a_closed_pool_takes_no_calls() -> None:
    pool = Pool(max_workers=1)
    with pool:
        assert pool.submit(abs, -1).result().unwrap() == 1
    with pytest.raises(PoolClosed, match="shut down"):
        pool.submit(abs, -1)
    pool.shutdown()
    pool.shutdown(kill=True)


def test_a_pool_that_was_never_used_can_be_closed() -> None:
    pool = Pool(max_workers=1)
    pool.shutdown()
    with pytest.raises(PoolClosed):
        pool.submit(abs, 1)
