"""What a trial writes while it runs, as files that can be read at the same time: logs and trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from sandbox_exec.contracts import Limits
from sandbox_exec.sandbox.base import Stream
from sandbox_exec.trial.trace import MAX_LINE_BYTES, parse_object

_FILES: dict[Stream, str] = {"stdout": "stdout.log", "stderr": "stderr.log", "trace": "trace.jsonl"}


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
            if len(line) > MAX_LINE_BYTES or parse_object(line) is None:
                continue
            room -= len(line) + 1
            if room < 0:
                break
            kept += [line, b"\n"]
            if (
                self.on_serving is not None
                and b"serving" in line
                and (parse_object(line) or {}).get("type") == "serving"
            ):
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
