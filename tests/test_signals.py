"""What an agent says of its provider: that it was turned away, and what it used. In words, by its exit, by raising."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs_support import completions, history_of, statuses
from support import Meeting

from sandbox_exec import Experiment, RateLimited, Status, context, run
from sandbox_exec.contracts import Limits, ProviderUse, Rung, TrialCompletion
from sandbox_exec.sandbox.provider import chosen
from sandbox_exec.schedule import retries
from sandbox_exec.trial.recorder import Recorder, Signals

LIMITED, FAILED = Status.RATE_LIMITED, Status.AGENT_ERROR
MOST = 10**12


def attempts(folder: Path, *agents: Any, **fields: Any) -> list[TrialCompletion]:
    """The first attempts of these agents, each a shell's text or a function; none is tried again."""
    variants = [
        {"id": f"v{number}", "agent": {"command": ["sh", "-c", one]} if isinstance(one, str) else {"function": one}}
        for number, one in enumerate(agents)
    ]
    fields = {"tasks": [{"id": "t", "input": {}}], "design": {"max_concurrency": 2}, **fields}
    fields["sandbox"] = {"timeout_s": 30, "memory": "128MiB", **fields.get("sandbox", {})}
    one = Experiment(name="signals", seed=3, variants=variants, base=folder, **fields)
    run(one, runs=folder, run_id="r")
    found = [attempt for ended in completions(folder / "r").values() for attempt in ended if attempt.attempt == 1]
    return sorted(found, key=lambda attempt: attempt.slot.variant_id)


def says(**event: Any) -> str:
    return f"echo '{json.dumps(event)}' >$SANDBOX_EXEC_TRACE; "


AWAY = says(type="rate_limited", retry_after_s=2.5)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is turned away is not tried again."""
    monkeypatch.setattr(retries, "RATE_LIMITED_ATTEMPTS", 1)


# --- the verdict ---


def test_a_command_says_so_by_its_exit_code_or_by_an_event(tmp_path: Path, once: None) -> None:
    by_code, by_event, by_both, other_code = attempts(
        tmp_path, "exit 75", AWAY + AWAY + "exit 3", says(type="rate_limited") + "exit 75", "exit 74"
    )
    assert [one.status for one in (by_code, by_event, by_both, other_code)] == [LIMITED, LIMITED, LIMITED, FAILED]
    assert [one.retry_after_s for one in (by_code, by_event, by_both)] == [None, 2.5, None]
    assert (by_code.provider, by_event.provider, other_code.provider) == (None, ProviderUse(turned_away=2), None)
    assert (by_code.exit_code, by_event.exit_code) == (75, 3)


def test_a_python_agent_raises_and_the_longest_wait_counts(tmp_path: Path, once: None) -> None:
    class Busy(RateLimited):
        pass

    def raises(task: Any) -> None:
        raise RateLimited(retry_after_s=12.5)

    def raises_a_kind_of_it_with_the_text_of_a_header(task: Any) -> None:
        context().rate_limited(retry_after_s=3)
        raise Busy("busy", retry_after_s="7")  # type: ignore[arg-type]

    def raises_after_a_longer_wait(task: Any) -> None:
        context().rate_limited(retry_after_s=30)
        context().rate_limited()
        raise RateLimited("no more", retry_after_s=1.0)

    def raises_with_a_date(task: Any) -> None:
        raise RateLimited(retry_after_s="tomorrow")  # type: ignore[arg-type]

    def swallows_it(task: Any) -> str:
        try:
            raise RateLimited
        except Exception as error:
            return str(error)

    found = attempts(
        tmp_path,
        raises,
        raises_a_kind_of_it_with_the_text_of_a_header,
        raises_after_a_longer_wait,
        raises_with_a_date,
        swallows_it,
    )
    assert [one.status for one in found] == [*[LIMITED] * 4, Status.SUCCESS]
    assert [one.retry_after_s for one in found] == [12.5, 7.0, 30.0, None, None]
    assert [one.provider and one.provider.turned_away for one in found] == [None, 1, 2, None, None]
    assert [one.error and one.error.message for one in found[:3]] == [
        "the provider says to try again later", "busy", "no more"
    ]  # fmt: skip
    assert found[0].error is not None
    assert found[0].error.type == "RateLimited"


def test_one_that_succeeds_though_it_was_turned_away_is_a_success(tmp_path: Path) -> None:
    (one,) = attempts(tmp_path, AWAY + says(type="usage", tokens=10) + AWAY)
    assert (one.status, one.retry_after_s) == (Status.SUCCESS, None)
    assert one.provider == ProviderUse(tokens=10, requests=1, turned_away=2)


# --- grading ---


def test_one_that_was_turned_away_is_not_graded_and_what_a_grader_traces_is_not_counted(
    tmp_path: Path, once: None
) -> None:
    text = f'{AWAY} {says(type="usage", tokens=9)} echo \'{{"score": 1}}\' >"$SANDBOX_EXEC_GRADE"'
    grading = {"command": ["sh", "-c", text], "grade_on": "always"}
    used = says(type="usage", tokens=5)
    limited, failed, succeeded = attempts(tmp_path, "exit 75", used + "exit 3", used, grading=grading)
    assert [one.status for one in (limited, failed, succeeded)] == [LIMITED, FAILED, Status.SUCCESS]
    assert [one.grade and one.grade.score for one in (limited, failed, succeeded)] == [None, 1.0, 1.0]
    assert limited.grading is None
    assert failed.provider == succeeded.provider == ProviderUse(tokens=5, requests=1)


@pytest.mark.skipif(chosen().rung is not Rung.ROOT_NAMESPACES, reason="services need root, or docker")
def test_a_service_that_gives_up_while_it_is_graded_has_no_grade(tmp_path: Path, once: None) -> None:
    (tmp_path / "grade.py").write_text("import os; open(os.environ['SANDBOX_EXEC_GRADE'], 'w').write('{\"score\": 1}')")
    grading = {"command": [sys.executable, "grade.py"], "services": "keep", "grade_on": "always"}
    (service,) = attempts(tmp_path, says(type="serving") + "exit 75", grading=grading)
    assert (service.status, service.grade, service.grading) == (LIMITED, None, None)


# --- another attempt ---


@pytest.mark.parametrize("max_retries", [0, 1])
def test_an_attempt_that_was_turned_away_is_made_again_and_does_not_count(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, max_retries: int
) -> None:
    monkeypatch.setattr(retries, "_jitter", lambda nth, seed: 0.0)

    def agent(task: Any) -> str:
        with open(task["input"], "rb", buffering=0) as pipe:
            word = pipe.read(1)  # one for each attempt
        context().usage(tokens=100)
        if word == b"r":
            raise RateLimited(retry_after_s=0)
        if word == b"e":
            raise ValueError
        return "done"

    down = f"{meeting.folder}/down"
    with open(down, "r+b", buffering=0) as pipe:
        pipe.write(b"rr" + b"e" * max_retries + b".")
        attempts(
            tmp_path,
            agent,
            tasks=[{"id": "t", "input": down, "protocol": {"max_retries": max_retries}}],
            sandbox={"readable": [meeting.folder]},
        )
    (ended,) = completions(tmp_path / "r").values()
    assert [one.status for one in ended] == [LIMITED, LIMITED, *[FAILED] * max_retries, Status.SUCCESS]
    assert [one.provider for one in ended] == [ProviderUse(tokens=100, requests=1)] * len(ended)
    assert statuses(tmp_path / "r") == [Status.SUCCESS]
    assert [len(json.loads(line)["attempts"]) for line in history_of(tmp_path / "r")] == [1 + max_retries]


# --- numbers ---


def heard(folder: Path, *lines: str) -> Signals:
    recorder = Recorder(folder, Limits())
    recorder.feed("trace", memoryview("".join(f"{line}\n" for line in lines).encode()))
    recorder.close()
    return recorder.signals


@pytest.mark.parametrize(
    ("events", "tokens", "requests"),
    [
        (['"tokens": 1200, "requests": 1', '"tokens": 300, "requests": 4'], 1500, 5),
        (['"tokens": 7', '"requests": 2', '"t": 0'], 7, 4),
        (['"input_tokens": 5, "output_tokens": 6', '"output_tokens": 1'], 12, 2),
        (['"tokens": 5, "input_tokens": 100'], 5, 1),
        (['"tokens": 5, "requests": 0'], 5, 0),
        (['"tokens": 0'], 0, 1),
        (['"tokens": 12.0'], 12, 1),
        (['"tokens": -5, "requests": -1', '"tokens": "9"', '"tokens": true', '"tokens": [1]'], None, 4),
        (['"tokens": null, "requests": null'], None, 1),
        (['"tokens": 1e999, "requests": 1e999', '"tokens": 1, "requests": 1'], MOST, MOST),
        ([f'"input_tokens": {MOST}, "output_tokens": 9{"0" * 400}'], MOST, 1),
        ([f'"tokens": {"9" * 5000}', '"tokens": NaN', '"tokens": Infinity', '"tokens": 3'], 3, 1),
    ],
)
def test_what_was_used_adds_up_and_what_is_no_number_is_not_there(
    tmp_path: Path, events: list[str], tokens: int | None, requests: int
) -> None:
    found = heard(tmp_path, *(f'{{"type": "usage", {event}}}' for event in events)).provider
    assert found == ProviderUse(tokens=tokens, requests=requests)


@pytest.mark.parametrize(
    ("said", "wait_s"),
    [("2.5", 2.5), ("0", 0.0), ("-1", None), ('"5"', None), ("true", None), ("null", None), ("1e999", 3600.0),
     ("9" * 400, 3600.0), ("{}", None)],
)  # fmt: skip
def test_a_wait_is_a_number_of_seconds_and_bounded(tmp_path: Path, said: str, wait_s: float | None) -> None:
    found = heard(tmp_path, f'{{"type": "rate_limited", "retry_after_s": {said}}}')
    assert (found.retry_after_s, found.turned_away) == (wait_s, 1)


def test_other_events_and_lines_that_are_none_say_nothing(tmp_path: Path) -> None:
    lines = (
        '{"type": ["usage"]}',
        '{"type": {"rate_limited": 1}}',
        '{"tokens": 5}',
        "usage",
        '{"type": "rate_limited"',
    )
    assert heard(tmp_path, *lines).provider is None


ANYTHING = st.one_of(
    st.sampled_from([None, True, "7", [1], {"a": 1}, MOST, 10**400, -(10**400)]), st.integers(), st.floats()
)
NAMES = st.sampled_from(["tokens", "input_tokens", "output_tokens", "requests", "retry_after_s"])


@settings(max_examples=100)
@given(st.lists(st.dictionaries(NAMES, ANYTHING, max_size=5), max_size=6))
def test_whatever_is_said_gives_a_bounded_answer(events: list[dict[str, Any]]) -> None:
    signals = Signals()
    for event in events:
        signals.use(event)
        signals.turn_away(event)
    found = signals.provider
    assert (found is None) == (not events)
    if found is not None:
        assert 0 <= (found.tokens or 0) <= MOST
        assert 0 <= (found.requests or 0) <= MOST
        assert found.turned_away == len(events)
    assert 0 <= (signals.retry_after_s or 0) <= 3600
