"""The supervisor against a sandbox that does as it is told, on a clock that moves when it is told to."""

from __future__ import annotations

import base64
import json
import pickle
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_exec.contracts import Limits, Outcome, Status
from sandbox_exec.sandbox.base import Launch, Sandbox
from sandbox_exec.testing import FakeSandbox, ManualClock
from sandbox_exec.trial.supervisor import KILL_PATIENCE_S, Supervisor
from sandbox_exec.trial.trace import MAX_DEPTH

VALUE = b'{"value":{"answer":42}}\n'


class Trial:
    """A supervisor, its fake sandbox, and the loop that would call it when something is due."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        argv: tuple[str, ...] = (),
        files: dict[str, bytes | Exception] | None = None,
        unpickle: Any = None,
    ) -> None:
        self.sandbox = FakeSandbox(files)
        self.clock = ManualClock(1000.0)
        self.outcomes: list[Outcome] = []
        launch = Launch(limits or Limits(timeout_s=10, grace_s=1), argv=argv)
        sandbox: Sandbox = self.sandbox
        self.supervisor = Supervisor(sandbox, launch, self.clock, self.outcomes.append, unpickle)

    def wait(self, seconds: float) -> None:
        """Let time pass, stopping at each moment at which something is due."""
        end_s = self.clock.now_s() + seconds
        while (due_s := self.supervisor.due_s) is not None and due_s <= end_s:
            self.clock.advance(max(0.0, due_s - self.clock.now_s()))
            self.supervisor.on_time()
        self.clock.advance(end_s - self.clock.now_s())

    @property
    def outcome(self) -> Outcome:
        (outcome,) = self.outcomes
        return outcome


# --- time ---


def test_an_agent_that_answers_in_time_succeeds_and_is_asked_nothing() -> None:
    trial = Trial()
    trial.wait(4)
    trial.sandbox.write("result", VALUE)
    trial.sandbox.end(cpu_s=0.5, peak_memory_bytes=1000)
    assert trial.sandbox.asked == ["start"]
    assert trial.outcome.status is Status.SUCCESS
    assert trial.outcome.value == {"answer": 42}
    assert trial.outcome.kill is None
    assert trial.outcome.usage.model_dump() == {"wall_s": 4.0, "cpu_s": 0.5, "peak_memory_bytes": 1000}
    assert trial.supervisor.due_s is None


def test_at_the_deadline_comes_a_word_then_after_the_grace_the_kill_then_after_its_patience_the_hard_one() -> None:
    trial = Trial(Limits(timeout_s=10, grace_s=1))
    trial.wait(9.99)
    assert trial.sandbox.asked == ["start"]
    trial.wait(0.02)
    assert trial.sandbox.asked == ["start", "terminate"]
    trial.wait(0.97)
    assert trial.sandbox.asked == ["start", "terminate"]
    trial.wait(0.02)
    assert trial.sandbox.asked == ["start", "terminate", "kill"]
    trial.wait(KILL_PATIENCE_S - 0.02)
    assert trial.sandbox.asked == ["start", "terminate", "kill"]
    trial.wait(0.02)
    assert trial.sandbox.asked == ["start", "terminate", "kill", "kill_hard"]
    trial.wait(1000)
    assert trial.sandbox.asked == ["start", "terminate", "kill", "kill_hard"]
    assert not trial.outcomes  # no outcome while a process may be left


def test_an_agent_that_had_to_be_killed_is_late_and_the_report_says_how_long_the_kill_took() -> None:
    trial = Trial(Limits(timeout_s=10, grace_s=1))
    trial.wait(11)
    trial.clock.advance(0.25)
    trial.sandbox.end(None, signal=signal.SIGKILL, proof="looked")
    assert trial.outcome.status is Status.TASK_TIMEOUT
    assert trial.outcome.signal == signal.SIGKILL
    assert trial.outcome.kill is not None
    assert trial.outcome.kill.model_dump() == {
        "reason": "deadline", "latency_s": 0.25, "proof": "looked", "grace_used": True
    }  # fmt: skip
    assert trial.outcome.usage.wall_s == 11.25


def test_what_is_returned_in_the_grace_is_a_partial_result_of_a_timeout() -> None:
    trial = Trial()
    trial.wait(10.5)
    trial.sandbox.write("result", b'{"value":"half of it"}\n')
    trial.sandbox.end()
    assert trial.sandbox.asked == ["start", "terminate"]
    assert trial.outcome.status is Status.TASK_TIMEOUT
    assert trial.outcome.value == "half of it"
    assert trial.outcome.kill is not None
    assert (trial.outcome.kill.reason, trial.outcome.kill.latency_s) == ("deadline", 0.0)


def test_without_a_deadline_nothing_is_ever_due() -> None:
    trial = Trial(Limits(timeout_s=None))
    assert trial.supervisor.due_s is None
    trial.wait(1e9)
    assert trial.sandbox.asked == ["start"]


def test_a_grace_of_zero_kills_at_the_deadline() -> None:
    trial = Trial(Limits(timeout_s=1, grace_s=0))
    trial.wait(1)
    assert trial.sandbox.asked == ["start", "terminate", "kill"]


# --- freezing ---


def test_a_frozen_trial_has_no_deadline_and_a_thawed_one_has_exactly_what_was_left_of_it() -> None:
    trial = Trial(Limits(timeout_s=10, grace_s=1))
    for before_s, frozen_s, left_s in ((4, 1e6, 6), (5, 50, 1)):
        trial.wait(before_s)
        trial.supervisor.freeze()
        assert trial.supervisor.due_s is None
        trial.wait(frozen_s)
        trial.supervisor.thaw()
        assert trial.supervisor.due_s == trial.clock.now_s() + left_s
    assert trial.sandbox.paused_s == 1e6 + 50
    trial.wait(1)
    assert trial.sandbox.asked == ["start", "freeze", "thaw", "freeze", "thaw", "terminate"]
    trial.sandbox.end()
    assert trial.outcome.usage.wall_s == 10


def test_freezing_twice_is_freezing_once_and_so_is_thawing() -> None:
    trial = Trial()
    trial.supervisor.thaw()
    trial.supervisor.freeze()
    trial.wait(1)
    trial.supervisor.freeze()
    trial.wait(1)
    trial.supervisor.thaw()
    trial.supervisor.thaw()
    assert trial.sandbox.asked == ["start", "freeze", "thaw"]
    assert trial.sandbox.paused_s == 2


def test_a_trial_without_a_deadline_has_none_after_a_thaw() -> None:
    trial = Trial(Limits(timeout_s=None))
    trial.supervisor.freeze()
    trial.supervisor.thaw()
    assert trial.supervisor.due_s is None


def test_a_frozen_trial_can_be_stopped_and_the_time_it_was_frozen_for_is_not_its_own() -> None:
    trial = Trial()
    trial.wait(2)
    trial.supervisor.freeze()
    trial.wait(500)
    trial.supervisor.stop()
    trial.clock.advance(0.5)
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.sandbox.asked == ["start", "freeze", "kill"]
    assert trial.outcome.status is Status.CANCELLED
    assert trial.outcome.usage.wall_s == 2.5


@pytest.mark.parametrize("after_s", [10, 11])
def test_what_is_being_ended_cannot_be_frozen(after_s: int) -> None:
    trial = Trial(Limits(timeout_s=10, grace_s=1))
    trial.wait(after_s)
    trial.supervisor.freeze()
    trial.supervisor.thaw()
    assert "freeze" not in trial.sandbox.asked
    assert "thaw" not in trial.sandbox.asked
    assert trial.supervisor.due_s is not None


# --- causes ---


def test_a_stop_kills_at_once_and_is_the_cause() -> None:
    trial = Trial()
    trial.supervisor.stop()
    trial.supervisor.stop()
    assert trial.sandbox.asked == ["start", "kill"]
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.outcome.status is Status.CANCELLED
    assert trial.outcome.kill is not None
    assert trial.outcome.kill.grace_used is False


@pytest.mark.parametrize(("what", "status"), [("memory", Status.MEMORY_EXCEEDED), ("pids", Status.PIDS_EXCEEDED)])
def test_a_ceiling_kills_without_grace(what: Any, status: Status) -> None:
    trial = Trial()
    trial.sandbox.exceed(what)
    assert trial.sandbox.asked == ["start", "kill"]
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.outcome.status is status


def test_a_ceiling_that_is_only_seen_at_the_end_counts_although_the_agent_answered_and_exited_with_0() -> None:
    trial = Trial()
    trial.sandbox.write("result", VALUE)
    trial.sandbox.exceed("memory")
    trial.sandbox.end(0)
    assert trial.outcome.status is Status.MEMORY_EXCEEDED
    assert trial.outcome.value == {"answer": 42}


def test_the_first_cause_wins() -> None:
    trial = Trial()
    trial.sandbox.exceed("memory")
    trial.sandbox.exceed("pids")
    trial.supervisor.stop()
    trial.wait(60)
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.outcome.status is Status.MEMORY_EXCEEDED
    assert trial.sandbox.asked == ["start", "kill", "kill_hard"]


def test_memory_that_runs_out_in_the_grace_is_the_cause_and_is_not_waited_for() -> None:
    trial = Trial()
    trial.wait(10.1)
    trial.sandbox.exceed("memory")
    assert trial.sandbox.asked == ["start", "terminate", "kill"]
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.outcome.status is Status.MEMORY_EXCEEDED


def test_memory_that_runs_out_while_being_killed_for_the_deadline_is_not_the_cause() -> None:
    trial = Trial()
    trial.wait(11)
    trial.sandbox.exceed("memory")
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.outcome.status is Status.TASK_TIMEOUT


def test_a_cancel_in_the_grace_does_not_make_a_late_agent_cancelled() -> None:
    trial = Trial()
    trial.wait(10.1)
    trial.supervisor.stop()
    assert trial.sandbox.asked == ["start", "terminate", "kill"]
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.outcome.status is Status.TASK_TIMEOUT


# --- output ---


def test_output_within_the_ceiling_is_kept_and_more_ends_the_trial() -> None:
    trial = Trial(Limits(output_ceiling=100))
    trial.sandbox.write("stdout", b"o" * 40)
    trial.sandbox.write("stderr", b"e" * 40)
    trial.sandbox.write("trace", b"t" * 20)
    assert trial.sandbox.asked == ["start"]
    trial.sandbox.write("trace", b"t")
    assert trial.sandbox.asked == ["start", "kill"]
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.outcome.status is Status.OUTPUT_EXCEEDED
    assert trial.outcome.stdout == "o" * 40


def test_without_a_ceiling_output_is_dropped_and_counted() -> None:
    trial = Trial(Limits(stdout=10, stderr=0, trace=20))
    for _ in range(100):
        trial.sandbox.write("stdout", b"0123456")
        trial.sandbox.write("stderr", b"abc")
        trial.sandbox.write("trace", b'{"n":1}\n')
    trial.sandbox.write("result", VALUE)
    trial.sandbox.end()
    assert trial.outcome.status is Status.SUCCESS
    assert trial.outcome.stdout == "4560123456"
    assert trial.outcome.stderr == ""
    assert trial.outcome.trace == ({"n": 1}, {"n": 1})
    dropped = trial.outcome.dropped
    assert (dropped.stdout_bytes, dropped.stderr_bytes) == (690, 300)
    assert (dropped.trace_events, dropped.trace_bytes) == (98, 784)


def test_a_result_that_is_too_large_ends_the_trial_and_is_not_held() -> None:
    trial = Trial(Limits(result=1000))
    for _ in range(100):
        trial.sandbox.write("result", b"x" * 999)
        assert len(trial.supervisor._result) <= 1000
    assert trial.sandbox.asked == ["start", "kill"]
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert trial.outcome.status is Status.OUTPUT_EXCEEDED
    assert trial.outcome.value is None


def test_a_result_that_is_too_large_does_not_end_with_a_small_one() -> None:
    trial = Trial(Limits(result=1000))
    trial.sandbox.write("result", b"x" * 1001)
    trial.sandbox.write("result", VALUE)
    trial.sandbox.end(0)
    assert trial.outcome.status is Status.OUTPUT_EXCEEDED
    assert trial.outcome.value is None


def test_a_result_as_large_as_is_allowed_is_taken() -> None:
    frame = b'{"value":"' + b"x" * 100 + b'"}\n'
    trial = Trial(Limits(result=len(frame)))
    trial.sandbox.write("result", frame)
    trial.sandbox.end()
    assert trial.outcome.value == "x" * 100


def test_what_an_agent_traced_before_it_was_killed_is_in_its_outcome() -> None:
    trial = Trial()
    trial.sandbox.write("trace", b'{"type":"step","n":1}\n{"type":"st')
    trial.sandbox.write("trace", b'ep","n":2}\n{"type":"step"')
    trial.sandbox.write("stdout", b"as far as I got\n")
    trial.supervisor.stop()
    trial.sandbox.write("trace", b',"n":3}\n{"torn')
    trial.sandbox.end(None, signal=signal.SIGKILL)
    assert [event["n"] for event in trial.outcome.trace] == [1, 2, 3]
    assert trial.outcome.dropped.trace_torn == 1
    assert trial.outcome.stdout == "as far as I got\n"


# --- answers ---


KEYS = ["value", "error", "pickle", "type", "message", "traceback"]
ANSWERS = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [b"{}", b'{"value"', b'{"value":1}', b'{"error":1}', b'{"error":{}}', b'{"pickle":"gASVAg=="}', b'"value"',
         b'["value"]', b"null", b"1", b'{"error":{"type":[],"message":{},"traceback":null}}', b'{"value":NaN}',
         rb'{"value":"\ud800"}', rb'{"error":{"type":"\udfff","message":"\ud800","traceback":""}}',
         b'{"value":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"value":' + b"[" * 400 + b"]" * 400 + b"}",
         b'{"error":{"type":' + b"9" * 5000 + b',"message":"","traceback":""}}']
    ),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)  # fmt: skip


@given(ANSWERS, st.booleans(), st.integers(0, 255))
def test_any_bytes_as_an_answer_give_an_outcome_that_can_be_written_down(
    answer: bytes, ends_its_line: bool, exit_code: int
) -> None:
    trial = Trial()
    trial.sandbox.write("result", answer + b"\n" * ends_its_line)
    trial.sandbox.end(exit_code)
    outcome = trial.outcome
    assert outcome.status in (Status.SUCCESS, Status.AGENT_ERROR)
    assert exit_code == 0 or outcome.status is Status.AGENT_ERROR
    Outcome.model_validate_json(outcome.model_dump_json())


@given(st.binary(max_size=200))
def test_any_bytes_in_result_json_give_an_outcome_that_can_be_written_down(data: bytes) -> None:
    trial = Trial(argv=("agent",), files={"out/result.json": data})
    trial.sandbox.end(0)
    assert trial.outcome.status in (Status.SUCCESS, Status.AGENT_ERROR)
    Outcome.model_validate_json(trial.outcome.model_dump_json())


def test_an_agent_that_exits_with_0_and_says_nothing_has_not_succeeded() -> None:
    trial = Trial()
    trial.sandbox.end(0)
    assert trial.outcome.status is Status.AGENT_ERROR
    assert trial.outcome.error is not None
    assert "without returning" in trial.outcome.error.message


def test_half_an_answer_is_none() -> None:
    trial = Trial()
    trial.sandbox.write("result", VALUE[:-1])
    trial.sandbox.end(0)
    assert (trial.outcome.status, trial.outcome.value) == (Status.AGENT_ERROR, None)


def test_of_two_answers_the_first_counts() -> None:
    trial = Trial()
    trial.sandbox.write("result", b'{"value":1}\n{"value":2}\n')
    trial.sandbox.end(0)
    assert trial.outcome.value == 1


def test_an_error_comes_with_the_guests_words() -> None:
    trial = Trial()
    said = {"type": "ValueError", "message": "no\udcff", "traceback": "Traceback ..."}
    trial.sandbox.write("result", json.dumps({"error": said}).encode() + b"\n")
    trial.sandbox.end(1)
    error = trial.outcome.error
    assert error is not None
    assert (error.type, error.traceback) == ("ValueError", "Traceback ...")
    assert error.message.startswith("no")


def test_a_value_that_is_nested_too_deep_is_said_to_be() -> None:
    trial = Trial()
    trial.sandbox.write("result", b'{"value":' + b"[" * 500 + b"]" * 500 + b"}\n")
    trial.sandbox.end(0)
    assert trial.outcome.status is Status.AGENT_ERROR
    assert trial.outcome.error is not None
    assert str(MAX_DEPTH) in trial.outcome.error.message


class Bomb:
    """What an agent would send to run code where its result is read."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return explode, ()


exploded: list[bool] = []


def explode() -> None:
    exploded.append(True)


def test_a_pickle_is_never_unpickled_unless_results_are_trusted() -> None:
    frame = b'{"pickle":"' + base64.b64encode(pickle.dumps(Bomb())) + b'"}\n'
    trial = Trial()
    trial.sandbox.write("result", frame)
    trial.sandbox.end(0)
    assert not exploded
    assert trial.outcome.status is Status.AGENT_ERROR
    trusting = Trial(unpickle=pickle.loads)
    trusting.sandbox.write("result", frame)
    trusting.sandbox.end(0)
    assert exploded.pop()  # the bomb was live
    assert trusting.outcome.status is Status.SUCCESS


@pytest.mark.parametrize("text", ["not base64!", "AAAA", "", 7, None])
def test_a_trusted_result_that_cannot_be_unpickled_is_the_agents_error(text: object) -> None:
    trial = Trial(unpickle=pickle.loads)
    trial.sandbox.write("result", json.dumps({"pickle": text}).encode() + b"\n")
    trial.sandbox.end(0)
    assert trial.outcome.status is Status.AGENT_ERROR
    assert trial.outcome.error is not None
    assert trial.outcome.error.type == "MalformedResult"


# --- commands ---


def test_a_command_succeeds_by_its_exit_code_and_its_result_is_the_value() -> None:
    silent = Trial(argv=("true",))
    silent.sandbox.end(0)
    assert (silent.outcome.status, silent.outcome.value) == (Status.SUCCESS, None)
    speaking = Trial(argv=("solve",), files={"out/result.json": b'{"answer": 42}'})
    speaking.sandbox.end(0)
    assert (speaking.outcome.status, speaking.outcome.value) == (Status.SUCCESS, {"answer": 42})


def test_a_command_that_fails_keeps_the_result_it_left() -> None:
    trial = Trial(argv=("solve",), files={"out/result.json": b'{"answer": 42}'})
    trial.sandbox.end(3)
    assert (trial.outcome.status, trial.outcome.exit_code) == (Status.AGENT_ERROR, 3)
    assert trial.outcome.value == {"answer": 42}


@pytest.mark.parametrize(
    "found",
    [b"", b"[1]", b"{", b"\xff", b'{"a":NaN}', b"x" * 2000, ValueError("not a regular file"), OSError("gone")],
)
def test_a_result_json_that_is_no_object_in_a_file_is_the_agents_error(found: bytes | Exception) -> None:
    trial = Trial(Limits(result=1000), argv=("solve",), files={"out/result.json": found})
    trial.sandbox.end(0)
    assert trial.outcome.status is Status.AGENT_ERROR
    assert trial.outcome.error is not None
    assert trial.outcome.error.type == "MalformedResult"


# --- how it ended ---


def test_what_never_started_is_a_failure_of_the_set_up() -> None:
    for argv in ((), ("nowhere",)):
        trial = Trial(argv=argv)
        trial.sandbox.end(127, setup="FileNotFoundError: nowhere")
        assert trial.outcome.status is Status.SETUP_FAILED
        assert trial.outcome.error is not None
        assert "nowhere" in trial.outcome.error.message


def test_a_fault_of_ours_is_not_the_agents() -> None:
    for argv in ((), ("solve",)):
        trial = Trial(argv=argv)
        trial.sandbox.end(None, fault="the keeper ended")
        assert trial.outcome.status is Status.ENVIRONMENT_ERROR
        assert trial.outcome.error is not None
        assert "the keeper ended" in trial.outcome.error.message


def test_a_full_disk_explains_a_failure_and_nothing_else() -> None:
    failed, fine = Trial(), Trial()
    failed.sandbox.end(1, disk_full=True)
    assert failed.outcome.status is Status.DISK_EXCEEDED
    fine.sandbox.write("result", VALUE)
    fine.sandbox.end(0, disk_full=True)
    assert fine.outcome.status is Status.SUCCESS


def test_a_file_that_grew_too_large_is_the_disks_limit() -> None:
    trial = Trial(argv=("dd",))
    trial.sandbox.end(None, signal=signal.SIGXFSZ)
    assert trial.outcome.status is Status.DISK_EXCEEDED


def test_a_signal_of_its_own_is_the_agents_error() -> None:
    trial = Trial()
    trial.sandbox.end(None, signal=signal.SIGSEGV)
    assert (trial.outcome.status, trial.outcome.signal) == (Status.AGENT_ERROR, signal.SIGSEGV)
    assert trial.outcome.kill is None


def test_what_was_swept_after_an_agent_had_ended_is_reported_and_does_not_change_its_status() -> None:
    trial = Trial()
    trial.sandbox.write("result", VALUE)
    trial.sandbox.end(0, swept=3, sweep_s=0.02, proof="looked")
    assert trial.outcome.status is Status.SUCCESS
    assert trial.outcome.kill is not None
    assert trial.outcome.kill.model_dump() == {
        "reason": "sweep", "latency_s": 0.02, "proof": "looked", "grace_used": False
    }  # fmt: skip
