"""What an agent is given: its clock, its seed, the trace and the way its prints take."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S, Meeting

from sandbox_exec import Limits, Pool, Status, TrialTimeout
from sandbox_exec.guest import TrialContext, context
from sandbox_exec.guest.logs import TraceHandler


class Traced:
    """A context outside of a trial, and what it writes."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.context = TrialContext(seed=7, deadline_s=None, trace_fd=self._write)

    def events(self) -> list[dict[str, Any]]:
        os.close(self._write)
        with open(self._read, "rb") as file:
            return [json.loads(line, parse_constant=_no_constant) for line in file]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# --- time ---


def test_outside_of_a_trial_there_is_no_context() -> None:
    with pytest.raises(RuntimeError, match="no trial runs here"):
        context()


def test_time_passes_from_the_start_to_the_deadline(pool: Pool) -> None:
    def agent() -> dict[str, Any]:
        ctx = context()
        first_s, left_s = ctx.elapsed, ctx.remaining
        ctx.check_timeout()
        return {
            "deadline": ctx.deadline_s,
            "grows": 0 <= first_s <= ctx.elapsed,
            "shrinks": left_s >= ctx.remaining > 0,
            "adds up": abs(ctx.elapsed + ctx.remaining - 50) < 1,
            "expired": ctx.is_expired,
        }

    assert pool.submit(agent, limits=Limits(timeout_s=50)).result().unwrap() == {
        "deadline": 50, "grows": True, "shrinks": True, "adds up": True, "expired": False
    }  # fmt: skip


def test_without_a_deadline_nothing_expires(pool: Pool) -> None:
    def agent() -> list[Any]:
        ctx = context()
        ctx.check_timeout()
        return [ctx.deadline_s, math.isinf(ctx.remaining), ctx.is_expired]

    assert pool.submit(agent, limits=Limits(timeout_s=None)).result().unwrap() == [None, True, False]


def test_an_agent_that_checks_its_time_ends_cleanly_and_keeps_what_it_has(pool: Pool) -> None:
    def agent() -> dict[str, Any]:
        ctx = context()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that it is the check that ends it
        steps = 0
        try:
            while True:
                ctx.check_timeout()
                steps += 1
        except TrialTimeout as timeout:
            return {"steps": steps, "expired": ctx.is_expired, "left": ctx.remaining, "said": str(timeout)}

    outcome = pool.submit(agent, limits=Limits(timeout_s=0.5, grace_s=PATIENCE_S)).result()
    assert outcome.value["steps"] > 0
    assert outcome.value["expired"] is True
    assert outcome.value["left"] == 0
    assert "0.5 s" in outcome.value["said"]
    assert outcome.status in (Status.TASK_TIMEOUT, Status.SUCCESS)  # its clock started after the supervisor's


def test_the_word_at_the_deadline_is_an_exception_that_except_exception_does_not_swallow(pool: Pool) -> None:
    def agent() -> str:
        try:
            while True:
                try:
                    signal.pause()
                except Exception:
                    context().trace("swallowed")
        except TrialTimeout:
            return "partial"

    outcome = pool.submit(agent, limits=Limits(timeout_s=0.5, grace_s=PATIENCE_S)).result()
    assert (outcome.status, outcome.value, outcome.trace) == (Status.TASK_TIMEOUT, "partial", ())
    assert outcome.kill is not None
    assert outcome.kill.grace_used


def test_a_timeout_that_is_not_caught_is_the_error_of_a_timeout(pool: Pool) -> None:
    outcome = pool.submit(signal.pause, limits=Limits(timeout_s=0.5, grace_s=PATIENCE_S)).result()
    assert outcome.status is Status.TASK_TIMEOUT
    assert outcome.error is not None
    assert outcome.error.type == "TrialTimeout"
    assert outcome.value is None


def test_what_a_finally_clause_does_at_the_deadline_is_done(pool: Pool) -> None:
    def agent() -> None:
        try:
            signal.pause()
        finally:
            context().trace("flushed")

    outcome = pool.submit(agent, limits=Limits(timeout_s=0.5, grace_s=PATIENCE_S)).result()
    assert [event["type"] for event in outcome.trace] == ["flushed"]


def test_a_command_can_end_by_itself_at_the_deadline(pool: Pool) -> None:
    from sandbox_exec import Command

    text = (
        """trap 'echo "{\\"steps\\": 3}" > $SANDBOX_EXEC_OUT/result.json; exit 0' TERM; while :; do sleep 0.01; done"""
    )
    limits = Limits(timeout_s=0.5, grace_s=PATIENCE_S)
    outcome = pool.submit(Command(["sh", "-c", text]), limits=limits).result()
    assert (outcome.status, outcome.value, outcome.exit_code) == (Status.TASK_TIMEOUT, {"steps": 3}, 0)


# --- the trace ---


def test_an_event_has_its_time_its_type_and_its_data(pool: Pool) -> None:
    def agent() -> None:
        context().trace("step", n=1, text="ä\n", nested={"a": [1, None, True]})
        context().trace("bare")

    first, second = pool.submit(agent).result().trace
    assert 0 <= first.pop("t") <= second.pop("t")
    assert first == {"type": "step", "n": 1, "text": "ä\n", "nested": {"a": [1, None, True]}}
    assert second == {"type": "bare"}


def test_values_that_json_lacks_are_written_as_their_repr() -> None:
    traced = Traced()
    traced.context.trace("odd", path=Path("/x"), group={1}, raw=b"\xff", number=1 + 2j, error=ValueError("no"))
    (event,) = traced.events()
    assert event["path"] == "PosixPath('/x')"
    assert event["group"] == "{1}"
    assert event["raw"] == "b'\\xff'"
    assert event["number"] == "(1+2j)"
    assert event["error"] == "ValueError('no')"


def test_numbers_that_are_none_are_written_as_text_and_lose_no_event() -> None:
    traced = Traced()
    traced.context.trace("loss", value=math.nan, best=[1.5, -math.inf], by={math.inf: (math.nan,)}, fine=2.5)
    (event,) = traced.events()
    assert event["value"] == "nan"
    assert event["best"] == [1.5, "-inf"]
    assert event["by"] == {"inf": ["nan"]}
    assert event["fine"] == 2.5


def test_text_that_is_no_unicode_does_not_lose_an_event(pool: Pool) -> None:
    def agent() -> None:
        context().trace("file", name=os.fsdecode(b"caf\xe9"))

    (event,) = pool.submit(agent).result().trace
    assert event["name"].startswith("caf")


def test_an_event_that_cannot_be_written_is_the_callers_error_and_hides_nothing_after_it() -> None:
    traced = Traced()
    data: dict[Any, Any] = {(1, 2): 3}
    with pytest.raises(TypeError):
        traced.context.trace("bad", data=data)
    data.clear()
    data["me"] = data
    with pytest.raises(RecursionError):
        traced.context.trace("bad", data=data)
    data.clear()
    traced.context.trace("good", data=data)
    assert [event["type"] for event in traced.events()] == ["good"]


def test_the_same_object_can_be_traced_by_two_threads_at_once() -> None:
    traced = Traced()
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        def __repr__(self) -> str:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(PATIENCE_S)
            return "slow"

    shared = {"a": [Slow()]}
    thread = threading.Thread(target=lambda: traced.context.trace("other", shared=shared))
    thread.start()
    assert inside.wait(PATIENCE_S)
    traced.context.trace("main", shared=shared)  # while the other is in the middle of it
    go_on.set()
    thread.join()
    assert [event["type"] for event in traced.events()] == ["main", "other"]


@pytest.mark.parametrize("size", [4000, 4096, 5000, 100_000, 900_000])
def test_long_events_come_whole(pool: Pool, size: int) -> None:
    def agent(size: int) -> None:
        for number in range(3):
            context().trace("long", number=number, text="x" * size)

    outcome = pool.submit(agent, size).result()
    assert [(event["number"], len(event["text"])) for event in outcome.trace] == [(n, size) for n in range(3)]


def test_long_events_of_several_threads_are_not_mixed(pool: Pool) -> None:
    def agent() -> None:
        def write(letter: str) -> None:
            for _ in range(20):
                context().trace("long", text=letter * 50_000)

        threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    outcome = pool.submit(agent).result()
    assert len(outcome.trace) == 80
    assert all(len(set(event["text"])) == 1 and len(event["text"]) == 50_000 for event in outcome.trace)


def test_children_of_an_agent_trace_too_and_short_events_are_never_torn(pool: Pool) -> None:
    def agent() -> None:
        children = []
        for child in range(4):
            pid = os.fork()
            if pid == 0:
                for number in range(500):
                    context().trace("step", child=child, number=number, text="x" * (number * 7 % 3000))
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)

    outcome = pool.submit(agent).result()
    assert (outcome.dropped.trace_malformed, outcome.dropped.trace_torn) == (0, 0)
    for child in range(4):
        assert [event["number"] for event in outcome.trace if event["child"] == child] == list(range(500))


def test_every_event_that_was_written_before_a_kill_is_in_the_outcome(pool: Pool, meeting: Meeting) -> None:
    def agent(meeting: Any) -> None:
        for number in range(20_000):
            context().trace("step", number=number)
        meeting.announce("done")
        os.kill(os.getpid(), signal.SIGKILL)

    outcome = pool.submit(agent, meeting, limits=Limits(readable=[meeting.folder])).result()
    assert outcome.signal == signal.SIGKILL
    assert [event["number"] for event in outcome.trace] == list(range(20_000))


# --- logging ---


def test_log_records_become_events(pool: Pool) -> None:
    def agent() -> None:
        logger = logging.getLogger("solver.search")
        logger.addHandler(TraceHandler())
        logger.warning("tried %d of %s", 3, "many")
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logger.exception("failed")

    warning, failure = pool.submit(agent).result().trace
    assert {name: warning[name] for name in ("type", "level", "logger", "message")} == {
        "type": "log", "level": "WARNING", "logger": "solver.search", "message": "tried 3 of many"
    }  # fmt: skip
    assert failure["message"].startswith("failed\nTraceback")
    assert "ZeroDivisionError" in failure["message"]


def test_a_log_record_that_cannot_be_formatted_does_not_end_the_agent(pool: Pool) -> None:
    def agent() -> str:
        logger = logging.getLogger("solver")
        logger.addHandler(TraceHandler())
        logger.warning("%d", "no number")
        return "still here"

    outcome = pool.submit(agent).result()
    assert outcome.unwrap() == "still here"
    assert "Logging error" in outcome.stderr


# --- prints ---


def test_every_line_that_was_printed_before_a_kill_is_kept(pool: Pool) -> None:
    def agent() -> None:
        for number in range(1000):
            print("line", number)
        print("no end of line", end="")
        os.kill(os.getpid(), signal.SIGKILL)

    outcome = pool.submit(agent).result()
    assert outcome.stdout.splitlines()[:1000] == [f"line {number}" for number in range(1000)]


def test_what_was_printed_without_an_end_of_line_comes_with_the_end_of_the_call(pool: Pool) -> None:
    def agent() -> None:
        print("out", end="")
        print("err", end="", file=sys.stderr)

    outcome = pool.submit(agent).result()
    assert (outcome.stdout, outcome.stderr) == ("out", "err")


@pytest.mark.parametrize("text", ["ä€😀", "\udcff", "\0"])
def test_any_text_can_be_printed(pool: Pool, text: str) -> None:
    outcome = pool.submit(print, text).result()
    assert outcome.ok
    assert outcome.stdout == text.encode("utf-8", "backslashreplace").decode() + "\n"


@pytest.mark.parametrize("how", ["close", "replace", "none", "descriptor"])
def test_an_agent_may_do_away_with_its_stdout_and_still_return(pool: Pool, how: str) -> None:
    def agent(how: str) -> int:
        if how == "close":
            sys.stdout.close()
        elif how == "replace":
            sys.stdout = 3
        elif how == "none":
            sys.stdout = None
        else:
            os.close(1)
        return 7

    assert pool.submit(agent, how).result().unwrap() == 7


def test_an_exception_whose_text_cannot_be_made_is_still_an_error(pool: Pool) -> None:
    def agent() -> None:
        class Odd(Exception):
            def __str__(self) -> str:
                raise RuntimeError("not even this")

        raise Odd

    outcome = pool.submit(agent).result()
    assert outcome.status is Status.AGENT_ERROR
    assert outcome.error is not None
    assert outcome.error.type.endswith("Odd")


def test_a_long_message_and_a_deep_traceback_are_cut(pool: Pool) -> None:
    def agent(depth: int) -> None:
        if depth:
            agent(depth - 1)
        raise ValueError("x" * 100_000)

    outcome = pool.submit(agent, 900).result()
    assert outcome.error is not None
    assert outcome.error.message.startswith("xxxx")
    assert len(outcome.error.message) <= 4096
    assert len(outcome.error.traceback) <= 32768
