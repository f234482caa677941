from __future__ import annotations

import http.client
import json
import math
import pickle
import re
import select
import socket
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_exec import metrics as module
from sandbox_exec.contracts import Phase, Slot, Status, TrialCompletion, derive_trial_id
from sandbox_exec.contracts.queue import AlertSettings
from sandbox_exec.errors import InvalidValue
from sandbox_exec.metrics import BOUNDS_S, Metrics, MetricsServer, prometheus

TAGS = {"sums": ("maths", "easy"), "proof": ("maths", "maths"), "essay": ()}


def tags_of(task_id: str) -> Sequence[str]:
    return TAGS.get(task_id, (f"tag-{task_id}",))


def make(now_s: float = 100.0, **alerts: Any) -> Metrics:
    return Metrics(AlertSettings(**alerts), tags_of, now_s)


def done(
    number: int = 0, status: Status = Status.SUCCESS, *, variant: str = "a", task: str = "sums"
) -> TrialCompletion:
    slot = Slot(schedule_idx=number, variant_id=variant, task_id=task, repeat=number)
    return TrialCompletion(slot=slot, trial_id=derive_trial_id(slot), attempt=1, status=status, phase=Phase.AGENT)


# --- counts ---


class Step(NamedTuple):
    """One call about one of some trials."""

    what: str
    number: int
    status: Status = Status.SUCCESS


def tell(metrics: Metrics, step: Step, now_s: float) -> None:
    completion = done(step.number, step.status)
    trial_id = completion.trial_id
    match step.what:
        case "assigned":
            metrics.assigned(trial_id, "a", 1.0, now_s)
        case "adopted":
            metrics.adopted(trial_id, "a", 1.0, now_s)
        case "committed":
            metrics.committed(completion, now_s)
        case "executing":
            metrics.executing(trial_id)
        case other:
            getattr(metrics, other)(trial_id, now_s)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], {"pending": 3}),
        ([Step("assigned", 0)], {"pending": 2, "assigned": 1}),
        ([Step("assigned", 0), Step("executing", 0)], {"pending": 2, "executing": 1}),
        ([Step("adopted", 0)], {"pending": 2, "executing": 1}),
        ([Step("assigned", 0), Step("executing", 0), Step("retrying", 0)], {"pending": 2, "retrying": 1}),
        ([Step("assigned", 0), Step("retrying", 0), Step("assigned", 0)], {"pending": 2, "assigned": 1}),
        ([Step("assigned", 0), Step("retrying", 0), Step("finished", 0)], {"pending": 2, "finished": 1}),
        ([Step("assigned", 1), Step("finished", 1)], {"pending": 2, "finished": 1}),
        ([Step("assigned", 0), Step("finished", 0), Step("committed", 0)], {"pending": 2, "completed": 1}),
        ([Step("assigned", 0), Step("committed", 0, Status.TASK_TIMEOUT)], {"pending": 2, "failed": 1}),
        ([Step("committed", 0, Status.CANCELLED)], {"pending": 2, "failed": 1}),
        ([Step("committed", 0, Status.SKIPPED)], {"pending": 2, "skipped": 1}),
        ([Step("retrying", 0), Step("committed", 0, Status.SKIPPED)], {"pending": 2, "skipped": 1}),
        # what comes late, or twice
        ([Step("executing", 0)], {"pending": 3}),
        ([Step("assigned", 0), Step("assigned", 0)], {"pending": 2, "assigned": 1}),
        ([Step("assigned", 0), Step("finished", 0), Step("executing", 0)], {"pending": 2, "finished": 1}),
    ],
)
def test_a_trial_is_counted_where_it_is(steps: list[Step], expected: dict[str, int]) -> None:
    metrics = make()
    metrics.submitted(3)
    for step in steps:
        tell(metrics, step, 101.0)
    lifecycle = metrics.snapshot(102.0)["lifecycle"]
    assert {state: count for state, count in lifecycle.items() if count} == expected
    assert set(lifecycle) >= {"pending", "assigned", "executing", "retrying", "completed", "failed", "skipped"}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            Step, st.sampled_from(["assigned", "adopted", "executing", "retrying", "finished"]), st.integers(0, 4)
        ),
        max_size=30,
    )
)
def test_whatever_happens_each_trial_is_in_one_place_and_none_is_left_at_the_end(steps: list[Step]) -> None:
    metrics = make(stuck_s=3.0)
    metrics.submitted(5)
    for second, step in enumerate(steps):
        tell(metrics, step, 100.0 + second)
        snapshot = metrics.snapshot(100.0 + second)
        assert sum(snapshot["lifecycle"].values()) == 5
        assert min(snapshot["lifecycle"].values()) >= 0
    for number in range(5):
        tell(metrics, Step("committed", number), 200.0)
    snapshot = metrics.snapshot(200.0)
    assert {state: count for state, count in snapshot["lifecycle"].items() if count} == {"completed": 5}
    assert snapshot["in_flight"]["total"] == 0
    changes = metrics.check(200.0)
    assert metrics.active_alerts() == []
    assert metrics.next_check_s() is None
    assert [change["state"] for change in changes].count("raised") * 2 == len(changes)


def test_it_does_not_grow_with_the_trials() -> None:
    metrics = make(stuck_s=1000.0, failure_rate=0.9, depth=1)
    sizes = []
    for number in range(4000):
        now_s = 100.0 + number
        completion = done(number, task=f"{number % 1500}")
        metrics.submitted(1)
        metrics.set_depth({number % 3: number % 2})
        metrics.assigned(completion.trial_id, "a", 0.5, now_s)
        metrics.retrying(completion.trial_id, now_s)
        metrics.assigned(completion.trial_id, "a", 0.5, now_s)
        metrics.finished(completion.trial_id, now_s)
        metrics.committed(completion, now_s)
        metrics.check(now_s)
        if number in (1500, 3999):
            sizes.append(len(pickle.dumps(metrics)))
    assert sizes[1] < sizes[0] * 1.05
    assert metrics.snapshot(5000.0)["failure_rate"]["tags_left_out"] == 1000  # 500 of the first round, as in the next
    assert len(metrics.snapshot(5000.0)["failure_rate"]["by_tag"]) == module.MAX_TAGS


def test_depth_and_what_is_in_flight() -> None:
    metrics = make()
    metrics.set_depth({-10: 2, 10: 1, 0: 4})
    metrics.assigned("x", "b", 0.0, 100.0)
    metrics.assigned("y", "a", 0.0, 100.0)
    metrics.adopted("z", "b", 5.0, 100.0)
    snapshot = metrics.snapshot(101.0)
    assert snapshot["depth"] == {"total": 7, "by_priority": {"10": 1, "0": 4, "-10": 2}}
    assert list(snapshot["depth"]["by_priority"]) == ["10", "0", "-10"]
    assert snapshot["in_flight"] == {"total": 3, "by_variant": {"a": 1, "b": 2}}
    assert json.loads(json.dumps(snapshot)) == snapshot


def test_the_share_of_failures_leaves_out_what_was_skipped() -> None:
    metrics = make()
    metrics.committed(done(0), 100.0)
    metrics.committed(done(1, Status.AGENT_ERROR, task="proof"), 100.0)
    metrics.committed(done(2, Status.SKIPPED), 100.0)
    metrics.committed(done(3, Status.WORKER_LOST, variant="b", task="essay"), 100.0)
    metrics.committed(done(4, Status.SKIPPED, variant="c", task="other"), 100.0)
    rates = metrics.snapshot(100.0)["failure_rate"]
    assert rates["by_variant"] == {
        "a": {"failed": 1, "of": 2, "rate": 0.5},
        "b": {"failed": 1, "of": 1, "rate": 1.0},
    }
    assert rates["by_tag"] == {  # a tag that a task names twice counts once
        "easy": {"failed": 0, "of": 1, "rate": 0.0},
        "maths": {"failed": 1, "of": 2, "rate": 0.5},
    }


# --- times ---


def test_wait_and_latency() -> None:
    metrics = make()
    metrics.assigned("x", "a", 2.0, 100.0)
    metrics.retrying("x", 103.0)
    metrics.assigned("x", "a", 4.0, 110.0)
    metrics.finished("x", 115.0)
    metrics.adopted("y", "a", 60.0, 100.0)
    metrics.finished("y", 101.0)
    snapshot = metrics.snapshot(120.0)
    assert {name: snapshot["wait_s"][name] for name in ("count", "sum", "mean", "max")} == {
        "count": 2, "sum": 6.0, "mean": 3.0, "max": 4.0,
    }  # fmt: skip
    assert {name: snapshot["latency_s"][name] for name in ("count", "sum", "mean", "max")} == {
        "count": 3, "sum": 69.0, "mean": 23.0, "max": 61.0,
    }  # fmt: skip


def test_of_nothing_there_is_no_percentile_and_no_share() -> None:
    snapshot = make().snapshot(100.0)
    assert [snapshot["wait_s"][name] for name in ("count", "sum", "mean", "p50", "p99", "max")] == [
        0, 0.0, None, None, None, None,
    ]  # fmt: skip
    assert snapshot["utilisation"] == {"start": None, "minute": None}
    assert snapshot["throughput_per_minute"] == {"start": 0.0, "minute": 0.0}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 300_000) | st.floats(0, 1) | st.sampled_from(BOUNDS_S), min_size=1, max_size=60))
def test_a_percentile_is_in_the_bucket_of_the_exact_one(values: list[float]) -> None:
    metrics = make()
    for number, value in enumerate(values):
        metrics.assigned(str(number), "a", value, 100.0)
    found = metrics.snapshot(100.0)["wait_s"]
    for percent in (50, 90, 99):
        exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
        bucket = bisect_left(BOUNDS_S, exact)
        low = BOUNDS_S[bucket - 1] if bucket else 0.0
        high = BOUNDS_S[bucket] if bucket < len(BOUNDS_S) else max(values)
        assert low <= found[f"p{percent}"] <= high
    assert found["p50"] <= found["p90"] <= found["p99"] <= found["max"] == max(values)
    assert found["mean"] == pytest.approx(sum(values) / len(values))
    assert found["buckets"] == [[bound, sum(value <= bound for value in values)] for bound in BOUNDS_S]


class Use(NamedTuple):
    at_s: float
    what: str  # "+" and "-" for an attempt that begins and ends, a number for the workers


@pytest.mark.parametrize(
    ("uses", "until_s", "start", "minute"),
    [
        ([Use(0, "2"), Use(0, "+")], 10.0, 0.5, 0.5),
        ([Use(0, "2"), Use(5, "+")], 10.0, 0.25, 0.25),
        ([Use(0, "1"), Use(2.5, "+"), Use(3.25, "-")], 10.0, 0.075, 0.075),
        ([Use(0, "1"), Use(0, "+"), Use(5, "3")], 10.0, 0.5, 0.5),
        ([Use(0, "1"), Use(0, "+"), Use(0, "+")], 10.0, 1.0, 1.0),  # more than there are workers: adopted ones
        ([Use(0, "1"), Use(0, "+"), Use(100, "-")], 200.0, 0.5, 0.0),
        ([Use(0, "1"), Use(0, "+"), Use(160, "-")], 200.0, 0.8, 19 / 59),  # the last 59 whole seconds, and this one
        ([Use(0, "1"), Use(100, "+")], 7300.0, 7200 / 7300, 1.0),
        ([Use(0, "0")], 10.0, None, None),
    ],
)
def test_utilisation(uses: list[Use], until_s: float, start: float | None, minute: float | None) -> None:
    metrics = make(now_s=50.0)
    for number, use in enumerate(uses):
        if use.what == "+":
            metrics.assigned(str(number), "a", 0.0, 50.0 + use.at_s)
        elif use.what == "-":
            metrics.finished(str(number - 1), 50.0 + use.at_s)
        else:
            metrics.set_capacity(int(use.what), 50.0 + use.at_s)
    found = metrics.snapshot(50.0 + until_s)["utilisation"]
    assert found["start"] == pytest.approx(start)
    assert found["minute"] == pytest.approx(minute)


@pytest.mark.parametrize(
    ("commits_s", "until_s", "start", "minute"),
    [
        ([0.0], 0.0, 60.0, 60.0),  # not without end
        ([1.0, 2.0], 30.0, 4.0, 4.0),
        ([float(second) for second in range(120)], 120.0, 60.0, 60.0),
        ([float(second) for second in range(120)], 240.0, 30.0, 0.0),
        ([1.0, 230.0], 240.0, 0.5, 60 / 59),
        ([1.0], 100_000.0, 0.0006, 0.0),
    ],
)
def test_throughput(commits_s: list[float], until_s: float, start: float, minute: float) -> None:
    metrics = make(now_s=0.0)
    for number, at_s in enumerate(commits_s):
        metrics.committed(done(number), at_s)
    found = metrics.snapshot(until_s)["throughput_per_minute"]
    assert found["start"] == pytest.approx(start)
    assert found["minute"] == pytest.approx(minute)


# --- alerts ---


def brief(changes: list[dict[str, Any]]) -> list[str]:
    return [f"{change['alert']} {change['state']}" for change in changes]


def test_depth_is_raised_once_and_cleared_below_four_fifths() -> None:
    metrics = make(depth=10)
    seen = []
    for depth in (9, 10, 30, 9, 8, 10, 7, 9, 0, 10):
        metrics.set_depth({0: depth - 3, 1: 3})
        seen.append([(change["state"], change["depth"], change["limit"]) for change in metrics.check(100.0)])
    assert seen == [
        [], [("raised", 10, 10)], [], [], [], [], [("cleared", 7, 10)], [], [], [("raised", 10, 10)],
    ]  # fmt: skip


def test_what_began_and_ended_between_two_checks_is_told() -> None:
    metrics = make(depth=1)
    metrics.set_depth({0: 1})
    metrics.set_depth({})
    assert brief(metrics.check(102.0)) == ["depth raised", "depth cleared"]
    assert metrics.check(103.0) == []


def test_each_attempt_is_stuck_by_itself() -> None:
    metrics = make(stuck_s=10.0)
    assert metrics.next_check_s() is None
    metrics.assigned("x", "a", 0.0, 100.0)
    metrics.assigned("y", "b", 0.0, 104.0)
    assert metrics.next_check_s() == 110.0
    assert metrics.check(109.9) == []
    assert metrics.check(110.0) == [
        {
            "alert": "stuck", "state": "raised", "trial_id": "x", "variant_id": "a",
            "in_flight_s": 10.0, "limit_s": 10.0,
        }
    ]  # fmt: skip
    assert metrics.next_check_s() == 114.0
    assert brief(metrics.check(120.0)) == ["stuck raised"]
    assert metrics.next_check_s() is None
    assert [alert["trial_id"] for alert in metrics.active_alerts()] == ["x", "y"]
    metrics.retrying("x", 125.0)
    (change,) = metrics.check(125.0)
    assert (change["trial_id"], change["state"], change["in_flight_s"]) == ("x", "cleared", 25.0)
    metrics.assigned("x", "a", 0.0, 130.0)
    assert metrics.next_check_s() == 140.0
    assert metrics.snapshot(131.0)["alerts"] == metrics.active_alerts() != []


def test_the_oldest_that_was_adopted_is_stuck_first() -> None:
    metrics = make(stuck_s=10.0)
    for trial_id, age_s in (("young", 1.0), ("late", 15.0), ("old", 8.0)):
        metrics.adopted(trial_id, "a", age_s, 100.0)
    metrics.assigned("new", "a", 0.0, 100.0)
    found = [metrics.next_check_s()]
    raised = [change["trial_id"] for change in metrics.check(100.0)]
    while (next_s := metrics.next_check_s()) is not None:
        found.append(next_s)
        raised += [change["trial_id"] for change in metrics.check(next_s)]
    assert raised == ["late", "old", "young", "new"]
    assert found == [95.0, 102.0, 109.0, 110.0]


def test_an_attempt_that_was_stuck_is_told_though_nobody_looked_before_its_end() -> None:
    metrics = make(stuck_s=10.0)
    metrics.assigned("x", "a", 0.0, 100.0)
    metrics.finished("x", 111.0)
    assert brief(metrics.check(111.0)) == ["stuck raised", "stuck cleared"]


def test_the_failure_rate_is_of_a_full_window_of_one_variant() -> None:
    metrics = make(failure_rate=0.3, failure_window=10)
    failed = Status.AGENT_ERROR
    seen = []
    for number in range(9):
        metrics.committed(done(number, failed if number >= 6 else Status.SUCCESS), 100.0)
        metrics.committed(done(number, Status.SKIPPED), 100.0)
        metrics.committed(done(number, variant="b"), 100.0)
        seen += metrics.check(100.0)
    assert seen == []
    metrics.committed(done(9), 100.0)
    assert metrics.check(100.0) == [
        {
            "alert": "failure_rate", "state": "raised", "variant_id": "a",
            "failed": 3, "of": 10, "rate": 0.3, "limit": 0.3,
        }
    ]  # fmt: skip
    for number in range(10, 16):
        metrics.committed(done(number), 100.0)
    assert metrics.check(100.0) == []
    metrics.committed(done(16), 100.0)
    (change,) = metrics.check(100.0)
    assert (change["state"], change["failed"], change["rate"]) == ("cleared", 2, 0.2)


def test_without_limits_there_are_no_alerts() -> None:
    metrics = make()
    metrics.set_depth({0: 10**6})
    metrics.assigned("x", "a", 0.0, 100.0)
    for number in range(100):
        metrics.committed(done(number, Status.AGENT_ERROR), 100.0)
    assert metrics.check(10**6) == []
    assert metrics.next_check_s() is None
    assert metrics.active_alerts() == []


# --- Prometheus ---

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
VALUE = r'"(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({NAME}={VALUE}(?:,{NAME}={VALUE})*)\}})? ([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)")
Series = tuple[str, frozenset[tuple[str, str]]]


def parse(text: str) -> dict[Series, float]:
    """Read the text format and refuse what is not exactly so: families in one piece, declared, nothing twice."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    helped: list[str] = []
    found: dict[Series, float] = {}
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped
            assert len(line.split(" ", 3)[3]) > 5
            helped.append(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == helped[-1]
            assert kind in ("counter", "gauge", "histogram")
            assert (kind == "counter") == name.endswith("_total")
            assert name not in kinds
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, pairs, value = match.groups()
            suffixes = ("_bucket", "_sum", "_count") if kinds[helped[-1]] == "histogram" else ("",)
            assert name in [helped[-1] + suffix for suffix in suffixes]
            labels = [
                (key, re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text[1:-1]))
                for key, text in re.findall(rf"({NAME})=({VALUE})", pairs or "")
            ]
            assert len(dict(labels)) == len(labels)
            series = (name, frozenset(labels))
            assert series not in found
            found[series] = float(value)
    assert all(name.startswith("sandbox_exec_") for name in kinds)
    for name in (name for name, kind in kinds.items() if kind == "histogram"):
        check_histogram(name, found)
    return found


def check_histogram(name: str, found: dict[Series, float]) -> None:
    by_rest: dict[frozenset[tuple[str, str]], dict[float, float]] = defaultdict(dict)
    for (series, labels), value in found.items():
        if series == f"{name}_bucket":
            bound = dict(labels)["le"]
            rest = frozenset(pair for pair in labels if pair[0] != "le")
            by_rest[rest][math.inf if bound == "+Inf" else float(bound)] = value
    assert by_rest
    for rest, buckets in by_rest.items():
        assert list(buckets) == sorted(buckets)
        assert list(buckets.values()) == sorted(buckets.values())
        assert buckets[math.inf] == found[f"{name}_count", rest]
        assert found[f"{name}_sum", rest] >= 0


def a_snapshot() -> dict[str, Any]:
    metrics = make(depth=3, stuck_s=5.0)
    metrics.submitted(10)
    metrics.set_capacity(2, 100.0)
    metrics.set_depth({0: 3, -10: 1})
    awkward = 'q"\\\n{},= \N{SNOWMAN}'
    metrics.assigned("x", awkward, 0.25, 100.0)
    metrics.assigned("y", "a", 400_000.0, 100.0)
    metrics.finished("y", 103.0)
    metrics.committed(done(0, Status.AGENT_ERROR, variant=awkward), 110.0)
    metrics.committed(done(1, task="essay"), 110.0)
    metrics.check(110.0)
    return metrics.snapshot(110.0)


def test_every_figure_is_in_the_text() -> None:
    found = parse(prometheus(json.loads(json.dumps(a_snapshot())), {"run": 'the "first"'}))

    def value(name: str, **labels: str) -> float:
        return found[f"sandbox_exec_{name}", frozenset({"run": 'the "first"', **labels}.items())]

    awkward = 'q"\\\n{},= \N{SNOWMAN}'
    assert value("queue_depth", priority="-10") == 1
    assert value("trials_submitted_total") == 10
    assert value("trials", state="pending") == 6
    assert value("trials", state="finished") == 1
    assert value("trials_committed_total", outcome="failed") == 1
    assert value("in_flight", variant=awkward) == 1
    assert value("wait_seconds_bucket", le="0.25") == 1
    assert value("wait_seconds_bucket", le="100000.0") == 1
    assert value("wait_seconds_bucket", le="+Inf") == 2
    assert value("wait_seconds_sum") == 400_000.25
    assert value("latency_seconds_bucket", le="2.5") == 0
    assert value("latency_seconds_bucket", le="4.0") == 1
    assert value("latency_seconds_count") == 1
    assert value("workers") == 2
    assert value("utilisation", since="start") == pytest.approx(0.65)
    assert value("throughput_per_minute", since="minute") == 12
    assert value("variant_trials_failed_total", variant=awkward) == 1
    assert value("variant_failure_ratio", variant="a") == 0
    assert value("tag_failure_ratio", tag="maths") == 1
    assert value("tag_trials_total", tag="maths") == 1
    assert value("alerts_active", alert="stuck") == 1
    assert value("alerts_active", alert="failure_rate") == 0


def test_before_anything_has_happened_the_text_is_valid_too() -> None:
    assert parse(prometheus(make().snapshot(100.0), {}))["sandbox_exec_wait_seconds_count", frozenset()] == 0


# --- HTTP ---


@contextmanager
def served(text: Callable[[], str] = lambda: "all is well\n") -> Iterator[MetricsServer]:
    server = MetricsServer(0, text)
    try:
        yield server
    finally:
        server.close()


def ask(port: int, path: str = "/metrics", method: str = "GET", body: bytes | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
        assert (answer.status == 405) == (answer.getheader("Allow") == "GET")
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def connect(server: MetricsServer, content: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(content)
    return client


def until_closed(client: socket.socket) -> bytes:
    with client:
        received = b""
        try:
            while more := client.recv(1 << 16):
                received += more
        except ConnectionResetError:
            pass
        return received


def test_a_scrape_over_the_loopback() -> None:
    snapshot = a_snapshot()
    with served(lambda: prometheus(snapshot, {"run": "r"})) as server:
        status, text = ask(server.port)
        assert status == 200
        assert parse(text) == parse(prometheus(snapshot, {"run": "r"}))
        assert ask(server.port, "/metrics?name=x") == (200, text)


def test_only_this_machine_is_answered() -> None:
    with served() as server, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=60)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/../metrics", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/metrics", 405),
        ("POST", "/else", 404),
    ],
)
def test_what_else_is_asked_is_refused(method: str, path: str, status: int) -> None:
    with served() as server:
        body = b"x" * 200_000 if method == "POST" else None
        assert ask(server.port, path, method, body)[0] == status
        assert ask(server.port)[0] == 200


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET  /metrics HTTP/1.1\r\n\r\n",
        b"A" * (1 << 15),
        b"GET /metrics HTTP/1.1\r\nX: " + b"y" * (1 << 15),
    ],
)
def test_rubbish_is_refused(rubbish: bytes) -> None:
    with served() as server:
        assert until_closed(connect(server, rubbish)).startswith(b"HTTP/1.1 400 ")
        assert ask(server.port)[0] == 200


def test_who_is_refused_may_finish_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRAIN_S", 60.0)
    with served() as server, connect(server, b"POST /metrics HTTP/1.1\r\nContent-Length: 6\r\n\r\n") as client:
        with client.makefile("rb") as file:
            assert file.readline() == b"HTTP/1.1 405 Method Not Allowed\r\n"
            file.read()
        for byte in b"abcdef":
            client.sendall(bytes([byte]))


def test_half_a_request_and_silence_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_REQUEST_S", 0.3)
            clients = [connect(server, content) for content in (b"", b"GET", b"GET /metrics HTTP/1.1\r\n") * 2]
            assert ask(server.port)[0] == 200
            assert [until_closed(client) for client in clients] == [b""] * 6
        with connect(server, b"GET /met") as client:
            client.shutdown(socket.SHUT_WR)
            assert client.recv(12) == b"HTTP/1.1 400"
        assert ask(server.port)[0] == 200


def test_a_byte_now_and_then_does_not_prolong_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_S", 0.2)
    with served() as server, connect(server, b"GET /metrics HTTP/1.1\r\nX: ") as client:
        while not select.select([client], [], [], 0.02)[0]:
            client.sendall(b"y")
        assert until_closed(client) == b""


def test_who_does_not_read_the_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_S", 0.1)
    large = "x" * (64 << 20)  # more than the kernel holds for a connection
    texts, taken = iter([large] * 4), threading.Semaphore(0)

    def text() -> str:
        taken.release()
        return next(texts, "small\n")

    with served(text) as server:
        clients = [connect(server, b"GET /metrics HTTP/1.1\r\n\r\n") for _ in range(4)]
        assert all(taken.acquire(timeout=60) for _ in clients)
        assert ask(server.port) == (200, "small\n")
        for client in clients:
            assert len(until_closed(client)) < len(large)


def test_a_fault_in_the_text_is_told_and_passes() -> None:
    faults = iter([RuntimeError("the run is being closed")])

    def text() -> str:
        for fault in faults:
            raise fault
        return "well \ud800 again\n"

    with served(text) as server:
        assert ask(server.port) == (503, "there are no metrics: RuntimeError: the run is being closed\n")
        assert ask(server.port) == (200, "well ? again\n")


def test_the_text_is_asked_for_by_one_at_a_time() -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()
    inside, most = 0, 0

    def text() -> str:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        entered.release()
        go_on.wait(60)
        inside -= 1
        return "x\n"

    with served(text) as server:
        clients = [connect(server, b"GET /metrics HTTP/1.1\r\n\r\n") for _ in range(3)]
        assert entered.acquire(timeout=60)
        go_on.set()
        assert all(until_closed(client).endswith(b"x\n") for client in clients)
    assert most == 1


def test_closing_cuts_off_whoever_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_S", 3600.0)  # to wait for it would be to hang
    with served() as server:
        clients = [connect(server, b"GET") for _ in range(6)]
    assert [until_closed(client) for client in clients] == [b""] * 6
    assert not [thread for thread in threading.enumerate() if "metrics" in thread.name]
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # it is free again


def test_a_port_that_is_taken_is_refused_with_what_to_do() -> None:
    with served() as server:
        with pytest.raises(InvalidValue, match=rf"port {server.port} .*in use.*; name another one.* or 0 to have"):
            MetricsServer(server.port, str)
        assert ask(server.port)[0] == 200
    with pytest.raises(InvalidValue, match=r"port 70000 .*1024 to 65535"):
        MetricsServer(70000, str)
