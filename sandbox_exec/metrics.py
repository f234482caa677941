"""How a run is doing: what waits, runs, takes long and fails; as JSON, as Prometheus text, and as alerts.

`Metrics` is told of every step of every trial by the coordinator and belongs to its thread. It holds what is in
flight or waits for its commit, a row for each variant and tag, and counters: so it does not grow with the run. It knows
of this coordinator's time only, as `start` in its names says: a run that is continued begins at 0.

`MetricsServer` has threads of its own and must not touch a `Metrics`: it is given a function that returns the text.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from itertools import accumulate
from typing import Any, Final, Literal

from sandbox_exec.contracts.queue import WINDOW_S, AlertSettings
from sandbox_exec.contracts.status import Status
from sandbox_exec.contracts.words import TrialCompletion
from sandbox_exec.errors import InvalidValue

# A millisecond to a day, each about 1.6 times the one before: so far off a percentile can be.
BOUNDS_S: Final = (
    *(float(f"{digits}e{power}") for power in range(-3, 5) for digits in ("1", "1.6", "2.5", "4", "6.3")),
    100_000.0,
)
MAX_TAGS: Final = 1000  # that are counted; each is a line for Prometheus, at every scrape
DEPTH_CLEARED: Final = 0.8  # of the limit: a queue that is kept full would otherwise alert with every trial
_SECONDS: Final = int(WINDOW_S)

_Alert = Literal["depth", "stuck", "failure_rate"]
_Between = Literal["retrying", "finished"]


class Metrics:
    """What is told is taken as it comes: a step that was left out, or comes twice, spoils no count."""

    def __init__(self, alerts: AlertSettings, tags_of: Callable[[str], Sequence[str]], now_s: float) -> None:
        self._alerts = alerts
        self._tags_of = tags_of
        self._start_s = now_s
        self._use = _Use()
        self._submitted = 0
        self._workers = 0
        self._depth: Mapping[int, int] = {}
        self._in_flight: dict[str, _Attempt] = {}
        self._between: dict[str, _Between] = {}  # trials that ran, do not now, and are not committed
        self._committed = {"completed": 0, "failed": 0, "skipped": 0}
        self._wait, self._latency = _Distribution(), _Distribution()
        self._by_variant: dict[str, _Share] = {}
        self._by_tag: dict[str, _Share] = {}
        self._tags_left_out = 0
        self._recent: dict[str, _Recent] = {}
        self._stuck_at_s: OrderedDict[str, float] = OrderedDict()  # when each in flight will be; the next one first
        self._active: dict[tuple[_Alert, str], dict[str, Any]] = {}
        self._changes: list[dict[str, Any]] = []

    # --- what happens ---

    def submitted(self, count: int) -> None:
        self._submitted += count

    def assigned(self, trial_id: str, variant_id: str, waited_s: float, now_s: float) -> None:
        """An attempt was dispatched to a worker."""
        self._wait.add(waited_s)
        self._begin(trial_id, _Attempt(variant_id, now_s), now_s)

    def adopted(self, trial_id: str, variant_id: str, age_s: float, now_s: float) -> None:
        """An attempt was in flight when the run was continued. It counts as executing: who heard it start is gone."""
        attempt = _Attempt(variant_id, now_s - max(0.0, age_s))
        attempt.executing = True
        self._begin(trial_id, attempt, now_s)

    def executing(self, trial_id: str) -> None:
        """Its sandbox runs."""
        if attempt := self._in_flight.get(trial_id):
            attempt.executing = True

    def retrying(self, trial_id: str, now_s: float) -> None:
        """The attempt ended, another one follows."""
        self._end(trial_id, now_s)
        self._between[trial_id] = "retrying"

    def finished(self, trial_id: str, now_s: float) -> None:
        """The last attempt ended; the trial waits for its commit."""
        self._end(trial_id, now_s)
        self._between[trial_id] = "finished"

    def committed(self, completion: TrialCompletion, now_s: float) -> None:
        self._end(completion.trial_id, now_s)
        self._between.pop(completion.trial_id, None)
        if completion.status is Status.SKIPPED:
            self._committed["skipped"] += 1
            return
        self._use.commits += 1
        self._use.row[2] += 1
        failed = completion.status is not Status.SUCCESS
        self._committed["failed" if failed else "completed"] += 1
        variant_id = completion.slot.variant_id
        _share(self._by_variant, variant_id).add(failed)
        for tag in dict.fromkeys(self._tags_of(completion.slot.task_id)):
            if tag in self._by_tag or len(self._by_tag) < MAX_TAGS:
                _share(self._by_tag, tag).add(failed)
            else:
                self._tags_left_out += 1
        if self._alerts.failure_rate is not None:
            self._judge(variant_id, failed, self._alerts.failure_rate)

    def stood_still(self, seconds: float) -> None:
        """What is in flight was frozen for so long: it has not run, and its time has not passed."""
        for attempt in self._in_flight.values():
            attempt.since_s += seconds
        for trial_id in self._stuck_at_s:
            self._stuck_at_s[trial_id] += seconds

    def set_depth(self, by_priority: Mapping[int, int]) -> None:
        self._depth = dict(by_priority)
        limit = self._alerts.depth
        if limit is None:
            return
        depth = sum(self._depth.values())
        if depth >= limit:
            self._raise("depth", "", depth=depth, limit=limit)
        elif depth < DEPTH_CLEARED * limit:
            self._clear("depth", "", depth=depth)

    def set_capacity(self, workers: int, now_s: float) -> None:
        self._spend(now_s)
        self._workers = workers

    def _begin(self, trial_id: str, attempt: _Attempt, now_s: float) -> None:
        self._end(trial_id, now_s)
        self._between.pop(trial_id, None)
        self._in_flight[trial_id] = attempt
        if self._alerts.stuck_s is not None:
            due_s = attempt.since_s + self._alerts.stuck_s
            last_s = self._stuck_at_s[next(reversed(self._stuck_at_s))] if self._stuck_at_s else due_s
            self._stuck_at_s[trial_id] = due_s
            if due_s < last_s:  # only what is adopted
                self._stuck_at_s = OrderedDict(sorted(self._stuck_at_s.items(), key=lambda item: item[1]))

    def _end(self, trial_id: str, now_s: float) -> None:
        self._spend(now_s)
        attempt = self._in_flight.get(trial_id)
        if attempt is None:
            return
        if self._alerts.stuck_s is not None:
            self._find_stuck(now_s)  # nobody may have looked between its time and its end
            self._stuck_at_s.pop(trial_id, None)
            self._clear("stuck", trial_id, in_flight_s=now_s - attempt.since_s)
        del self._in_flight[trial_id]
        self._latency.add(now_s - attempt.since_s)

    def _spend(self, now_s: float) -> None:
        busy = len(self._in_flight)
        self._use.spend(now_s - self._start_s, min(busy, self._workers), self._workers)

    # --- alerts ---

    def check(self, now_s: float) -> list[dict[str, Any]]:
        """Return the alerts that began or ended since the last call, in order. Call it after each round of news."""
        self._find_stuck(now_s)
        changes, self._changes = self._changes, []
        return changes

    def next_check_s(self) -> float | None:
        """Return when the next attempt will be stuck, if it is still in flight then; None if there is none."""
        return next(iter(self._stuck_at_s.values()), None)

    def active_alerts(self) -> list[dict[str, Any]]:
        """Return those that have not ended, as they were when they began."""
        return [dict(alert) for alert in self._active.values()]

    def _find_stuck(self, now_s: float) -> None:
        while self._stuck_at_s:
            trial_id = next(iter(self._stuck_at_s))
            if self._stuck_at_s[trial_id] > now_s:
                return
            del self._stuck_at_s[trial_id]
            attempt = self._in_flight[trial_id]
            self._raise(
                "stuck",
                trial_id,
                trial_id=trial_id,
                variant_id=attempt.variant_id,
                in_flight_s=now_s - attempt.since_s,
                limit_s=self._alerts.stuck_s,
            )

    def _judge(self, variant_id: str, failed: bool, limit: float) -> None:
        window = self._alerts.failure_window
        recent = self._recent.get(variant_id) or self._recent.setdefault(variant_id, _Recent(window))
        recent.add(failed)
        if len(recent.last) < window:
            return
        rate = recent.failed / window
        details = {"variant_id": variant_id, "failed": recent.failed, "of": window, "rate": rate, "limit": limit}
        if rate >= limit:
            self._raise("failure_rate", variant_id, **details)
        else:
            self._clear("failure_rate", variant_id, **details)

    def _raise(self, alert: _Alert, subject: str, **details: Any) -> None:
        if (alert, subject) not in self._active:
            self._active[alert, subject] = {"alert": alert, **details}
            self._changes.append({"alert": alert, "state": "raised", **details})

    def _clear(self, alert: _Alert, subject: str, **details: Any) -> None:
        if (alert, subject) in self._active:
            began = self._active.pop((alert, subject))
            self._changes.append({**began, "state": "cleared", **details})

    # --- what is told of it ---

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """Return all of it as JSON. A share or a percentile of nothing is None."""
        self._spend(now_s)
        executing = sum(attempt.executing for attempt in self._in_flight.values())
        between = Counter(self._between.values())
        in_flight = Counter(attempt.variant_id for attempt in self._in_flight.values())
        known = len(self._in_flight) + len(self._between) + sum(self._committed.values())
        return {
            "elapsed_s": self._use.at_s,
            "submitted": self._submitted,
            "depth": {
                "total": sum(self._depth.values()),
                "by_priority": {str(priority): self._depth[priority] for priority in sorted(self._depth, reverse=True)},
            },
            "lifecycle": {
                "pending": self._submitted - known,
                "assigned": len(self._in_flight) - executing,
                "executing": executing,
                "retrying": between["retrying"],
                "finished": between["finished"],
                **self._committed,
            },
            "in_flight": {"total": len(self._in_flight), "by_variant": dict(sorted(in_flight.items()))},
            "wait_s": self._wait.summary(),
            "latency_s": self._latency.summary(),
            "workers": self._workers,
            **self._use.summary(),
            "failure_rate": {
                "by_variant": {name: share.summary() for name, share in sorted(self._by_variant.items())},
                "by_tag": {name: share.summary() for name, share in sorted(self._by_tag.items())},
                "tags_left_out": self._tags_left_out,
            },
            "alerts": self.active_alerts(),
        }


class _Attempt:
    __slots__ = ("executing", "since_s", "variant_id")

    def __init__(self, variant_id: str, since_s: float) -> None:
        self.variant_id = variant_id
        self.since_s = since_s
        self.executing = False


class _Share:
    """How many failed, of those that were not skipped."""

    __slots__ = ("failed", "of")

    def __init__(self) -> None:
        self.failed = self.of = 0

    def add(self, failed: bool) -> None:
        self.failed += failed
        self.of += 1

    def summary(self) -> dict[str, Any]:
        return {"failed": self.failed, "of": self.of, "rate": self.failed / self.of}


def _share(shares: dict[str, _Share], name: str) -> _Share:
    share = shares.get(name)
    if share is None:
        share = shares[name] = _Share()
    return share


class _Recent:
    """How many failed of the last ones."""

    __slots__ = ("failed", "last")

    def __init__(self, window: int) -> None:
        self.last: deque[bool] = deque(maxlen=window)
        self.failed = 0

    def add(self, failed: bool) -> None:
        if len(self.last) == self.last.maxlen:
            self.failed -= self.last[0]
        self.last.append(failed)
        self.failed += failed


class _Distribution:
    """Counts by bucket. A percentile is taken to lie evenly within its bucket; the largest value is exact."""

    __slots__ = ("_counts", "_max", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum = self._max = 0.0

    def add(self, value: float) -> None:
        value = max(0.0, value)
        self._counts[bisect_left(BOUNDS_S, value)] += 1
        self._sum += value
        if value > self._max:
            self._max = value

    def summary(self) -> dict[str, Any]:
        count = sum(self._counts)
        return {
            "count": count,
            "sum": self._sum,
            "mean": self._sum / count if count else None,
            **{f"p{percent}": self._percentile(percent, count) for percent in (50, 90, 99)},
            "max": self._max if count else None,
            "buckets": [list(pair) for pair in zip(BOUNDS_S, accumulate(self._counts), strict=False)],
        }

    def _percentile(self, percent: int, count: int) -> float | None:
        if not count:
            return None
        rank = -(-count * percent // 100)  # rounded up
        until = list(accumulate(self._counts))
        bucket = bisect_left(until, rank)
        within = 1 - (until[bucket] - rank) / self._counts[bucket]
        low = BOUNDS_S[bucket - 1] if bucket else 0.0
        high = BOUNDS_S[bucket] if bucket < len(BOUNDS_S) else self._max
        return min(self._max, low + (high - low) * within)


class _Use:
    """Seconds of workers, busy and in all, and commits of what ran: since the start, and in each of its last 60 s."""

    def __init__(self) -> None:
        self.at_s = 0.0  # since the start, as are the others
        self.busy_s = self.capacity_s = 0.0
        self.commits = 0
        self._rows = [[0.0, 0.0, 0.0] for _ in range(_SECONDS)]
        self.row = self._rows[0]  # of this second: busy, capacity, commits

    def spend(self, until_s: float, busy: int, workers: int) -> None:
        """So many were busy from the last call until now."""
        since_s = self.at_s
        if until_s <= since_s:
            return
        self.at_s = until_s
        self.busy_s += busy * (until_s - since_s)
        self.capacity_s += workers * (until_s - since_s)
        first, last = int(since_s), int(until_s)
        for second in range(max(first, last - _SECONDS + 1), last + 1):
            if second != first:
                self.row = self._rows[second % _SECONDS]
                self.row[:] = 0.0, 0.0, 0.0
            share_s = min(until_s, second + 1) - max(since_s, second)
            self.row[0] += busy * share_s
            self.row[1] += workers * share_s

    def summary(self) -> dict[str, Any]:
        busy_s, capacity_s, commits = map(sum, zip(*self._rows, strict=True))
        minute_s = self.at_s - max(0, int(self.at_s) - _SECONDS + 1)
        return {
            "utilisation": {
                "start": self.busy_s / self.capacity_s if self.capacity_s else None,
                "minute": busy_s / capacity_s if capacity_s else None,
            },
            "throughput_per_minute": {
                "start": _per_minute(self.commits, self.at_s),
                "minute": _per_minute(commits, minute_s),
            },
        }


def _per_minute(commits: float, seconds: float) -> float:
    return commits * 60 / max(1.0, seconds)  # the first commit is not thousands a minute


# --- Prometheus -------------------------------------------------------------------------------------

_Sample = tuple[Mapping[str, object], float | None]


def prometheus(snapshot: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Return a snapshot in the text exposition format 0.0.4; `labels` are on every line."""
    lines: list[str] = []

    def line(name: str, own: Mapping[str, object], value: float) -> None:
        pairs = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in {**labels, **own}.items())
        lines.append(f"sandbox_exec_{name}{{{pairs}}} {value}" if pairs else f"sandbox_exec_{name} {value}")

    def head(name: str, kind: str, text: str) -> None:
        lines.append(f"# HELP sandbox_exec_{name} {text}")
        lines.append(f"# TYPE sandbox_exec_{name} {kind}")

    def family(name: str, kind: str, text: str, samples: Iterable[_Sample]) -> None:
        head(name, kind, text)
        for own, value in samples:
            if value is not None:
                line(name, own, value)

    def histogram(name: str, text: str, of: Mapping[str, Any]) -> None:
        head(name, "histogram", text)
        for bound_s, count in [*of["buckets"], ["+Inf", of["count"]]]:
            line(f"{name}_bucket", {"le": bound_s}, count)
        line(f"{name}_sum", {}, of["sum"])
        line(f"{name}_count", {}, of["count"])

    lifecycle = dict(snapshot["lifecycle"])
    outcomes = {outcome: lifecycle.pop(outcome) for outcome in ("completed", "failed", "skipped")}
    alerts = Counter(alert["alert"] for alert in snapshot["alerts"])

    family("queue_depth", "gauge", "Trials that may start and wait.", _by("priority", snapshot["depth"]["by_priority"]))
    family("trials_submitted_total", "counter", "Trials that joined the schedule.", [({}, snapshot["submitted"])])
    family("trials", "gauge", "Trials that are not committed.", _by("state", lifecycle))
    family("trials_committed_total", "counter", "Trials that are committed.", _by("outcome", outcomes))
    family("in_flight", "gauge", "Attempts in flight.", _by("variant", snapshot["in_flight"]["by_variant"]))
    histogram("wait_seconds", "From when a trial could start until an attempt was dispatched.", snapshot["wait_s"])
    histogram("latency_seconds", "From the dispatch of an attempt to its end.", snapshot["latency_s"])
    family("workers", "gauge", "Workers that there are.", [({}, snapshot["workers"])])
    for name, text in (
        ("utilisation", "Share of the workers that were busy, since the start or for the last minute."),
        ("throughput_per_minute", "Trials committed in a minute, since the start or for the last one."),
    ):
        family(name, "gauge", text, _by("since", snapshot[name]))
    for kind in ("variant", "tag"):
        for suffix, type_, text, field in (
            ("trials_total", "counter", "Trials committed, without those that were skipped.", "of"),
            ("trials_failed_total", "counter", "Trials committed that failed.", "failed"),
            ("failure_ratio", "gauge", "Share that failed of the trials committed and not skipped.", "rate"),
        ):
            shares = snapshot["failure_rate"][f"by_{kind}"]
            family(f"{kind}_{suffix}", type_, text, _by(kind, {name: share[field] for name, share in shares.items()}))
    counts = {alert: alerts[alert] for alert in ("depth", "stuck", "failure_rate")}
    family("alerts_active", "gauge", "Alerts that have not ended.", _by("alert", counts))
    return "\n".join(lines) + "\n"


def _by(label: str, values: Mapping[str, float | None]) -> list[_Sample]:
    return [({label: name}, value) for name, value in values.items()]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# --- HTTP -------------------------------------------------------------------------------------------

_HOST: Final = "127.0.0.1"
_THREADS: Final = 4  # so many clients can hang, until their time is up, before another one has to wait
_BACKLOG: Final = 64
_REQUEST_S: Final = 5.0  # for all of a request, and for the client to read the answer
_DRAIN_S: Final = 1.0  # closing with something unread would reset the connection, and the client lose the answer
_MAX_HEAD: Final = 1 << 14
_NO_DESCRIPTOR_S: Final = 0.5


class MetricsServer:
    """HTTP for those on this machine: `GET /metrics`, without a password.

    `text` is called in a thread of the server, by one at a time, and must return by itself: `close` waits for it.
    """

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        self._socket = _listen(port)
        self.port: int = self._socket.getsockname()[1]
        self._text = text
        self._one_at_a_time = threading.Lock()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads = [
            threading.Thread(target=self._serve, name=f"sandbox-exec-metrics-{number}", daemon=True)
            for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Return once no thread and no socket is left; clients that are being served are cut off."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the threads
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._closed.wait(_NO_DESCRIPTOR_S)
                continue
            with connection:
                with self._lock:
                    if self._closed.is_set():
                        return
                    self._connections.add(connection)
                try:
                    self._answer(connection)
                except OSError:
                    pass  # it has gone, or its time is up
                finally:
                    with self._lock:
                        self._connections.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        status, body = self._respond(_head(connection))
        content = body.encode(errors="replace")
        head = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            "Content-Type: text/plain; version=0.0.4; charset=utf-8",
            f"Content-Length: {len(content)}",
            *(["Allow: GET"] if status is HTTPStatus.METHOD_NOT_ALLOWED else []),
            "Connection: close",
        ]
        connection.settimeout(_REQUEST_S)
        connection.sendall("\r\n".join([*head, "", ""]).encode() + content)
        connection.shutdown(socket.SHUT_WR)
        until_s = time.monotonic() + _DRAIN_S
        while _receive(connection, until_s):
            pass

    def _respond(self, head: bytes) -> tuple[HTTPStatus, str]:
        match head.partition(b"\r\n")[0].split(b" "):
            case [method, target, b"HTTP/1.0" | b"HTTP/1.1"] if head.endswith(b"\r\n\r\n"):
                pass
            case _:
                return HTTPStatus.BAD_REQUEST, "this is no HTTP request; ask: GET /metrics\n"
        if target.partition(b"?")[0] != b"/metrics":
            return HTTPStatus.NOT_FOUND, "there is only /metrics\n"
        if method != b"GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, "there is only GET\n"
        try:
            with self._one_at_a_time:
                return HTTPStatus.OK, self._text()
        except Exception as error:  # the scrape fails and says why; the run goes on
            return HTTPStatus.SERVICE_UNAVAILABLE, f"there are no metrics: {type(error).__name__}: {error}\n"


def _listen(port: int) -> socket.socket:
    try:
        if 0 <= port < 1 << 16:
            return socket.create_server((_HOST, port), backlog=_BACKLOG)
        reason = "there is no such port"
    except OSError as error:
        reason = os.strerror(error.errno or 0)
    raise InvalidValue(
        f"metrics cannot be served on port {port} of {_HOST}: {reason}; "
        "name another one, of 1024 to 65535, or 0 to have a free one picked"
    )


def _head(connection: socket.socket) -> bytes:
    """Return the request up to its empty line, or what there is of it if that never comes."""
    until_s = time.monotonic() + _REQUEST_S
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD:
        more = _receive(connection, until_s)
        if not more:
            return head
        head += more
    before, empty_line, _ = head.partition(b"\r\n\r\n")
    return before + empty_line


def _receive(connection: socket.socket, until_s: float) -> bytes:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)
    return connection.recv(1 << 12)
