"""What a trial writes while it runs, as files that can be read at the same time, and what it says of its provider."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sandbox_exec.contracts import Limits, ProviderUse
from sandbox_exec.contracts.queue import LONGEST_RETRY_AFTER_S
from sandbox_exec.sandbox.base import Stream
from sandbox_exec.trial.trace import MAX_LINE_BYTES, parse_object

_FILES: dict[Stream, str] = {"stdout": "stdout.log", "stderr": "stderr.log", "trace": "trace.jsonl"}
_MOST: Final = 10**12  # of tokens and requests: more than any trial has, and nobody's arithmetic overflows


class Signals:
    """What an agent traces about its provider, added up. It may lie: a number that is none is as if it were not there.

    Only events that trace.jsonl has are heard: what comes after the limit of the trace is not.
    """

    def __init__(self) -> None:
        self._tokens: int | None = None
        self._requests: int | None = None
        self.turned_away = 0
        self.retry_after_s: float | None = None  # the longest

    @property
    def provider(self) -> ProviderUse | None:
        if self._requests is None and not self.turned_away:
            return None
        return ProviderUse(tokens=self._tokens, requests=self._requests, turned_away=self.turned_away)

    def use(self, event: Mapping[str, Any]) -> None:
        tokens = _number(event.get("tokens"), _MOST)
        if tokens is None:
            halves = [_number(event.get(name), _MOST) for name in ("input_tokens", "output_tokens")]
            said = [half for half in halves if half is not None]
            tokens = sum(said) if said else None
        if tokens is not None:
            self._tokens = min((self._tokens or 0) + int(tokens), _MOST)
        requests = _number(event.get("requests"), _MOST)
        self._requests = min((self._requests or 0) + (1 if requests is None else int(requests)), _MOST)

    def turn_away(self, event: Mapping[str, Any]) -> None:
        self.turned_away += 1
        self.wait(event.get("retry_after_s"))

    def wait(self, retry_after_s: Any) -> None:
        wait_s = _number(retry_after_s, LONGEST_RETRY_AFTER_S)
        if wait_s is not None:
            self.retry_after_s = max(self.retry_after_s or 0.0, float(wait_s))


def _number(value: Any, most: float) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:  # NaN is not
        return None
    return min(value, most)


class Recorder:
    """Appends to stdout.log, stderr.log and trace.jsonl, each up to its limit: the beginning is kept.

    trace.jsonl has whole events only. A file is made when there is something to write. What cannot be written ends
    the recording and not the trial; `failure` says why.
    """

    def __init__(self, folder: Path, limits: Limits, files: Mapping[Stream, str] = _FILES) -> None:
        self._folder, self._files = folder, files
        self._room = {"stdout": limits.stdout, "stderr": limits.stderr, "trace": limits.trace}
        self._fds: dict[Stream, int] = {}
        self._tail = b""
        self.events = 0
        self.signals = Signals()
        self.on_serving: Callable[[], None] | None = None  # called once, when an agent says that it serves
        self.failure: OSError | None = None

    def feed(self, stream: Stream, data: memoryview) -> None:
        if self.failure is not None or stream not in self._files or self._room[stream] <= 0:
            return
        if stream == "trace":
            self._feed_trace(data)
        else:
            self._write(stream, bytes(data[: self._room[stream]]))

    def _feed_trace(self, data: memoryview) -> None:
        *lines, tail = (self._tail + bytes(data)).split(b"\n")
        self._tail = tail[: MAX_LINE_BYTES + 1]  # of a giant, enough to know it for one
        kept, room = [], self._room["trace"]
        for line in lines:
            event = parse_object(line) if len(line) <= MAX_LINE_BYTES else None
            if event is None:
                continue
            room -= len(line) + 1
            if room < 0:
                break
            kept += [line, b"\n"]
            match event.get("type"):
                case "usage":
                    self.signals.use(event)
                case "rate_limited":
                    self.signals.turn_away(event)
                case "serving" if self.on_serving is not None:
                    serving, self.on_serving = self.on_serving, None
                    serving()
        self._write("trace", b"".join(kept))
        self.events += len(kept) // 2
        self._room["trace"] = max(0, room)

    def _write(self, stream: Stream, data: bytes) -> None:
        if not data:
            return
        try:
            if stream not in self._fds:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fds[stream] = os.open(self._folder / self._files[stream], flags, 0o644)
            self._room[stream] -= len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(self._fds[stream], view) :]
        except OSError as error:
            self.failure = error

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
