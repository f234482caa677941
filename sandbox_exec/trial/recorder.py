"""What a trial writes while it runs, as files that can be read at the same time: logs and trace."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox_exec.contracts import Limits
from sandbox_exec.sandbox.base import Stream
from sandbox_exec.trial.trace import MAX_LINE_BYTES, parse_object

_FILES: dict[Stream, str] = {"stdout": "stdout.log", "stderr": "stderr.log", "trace": "trace.jsonl"}


class Recorder:
    """Appends to stdout.log, stderr.log and trace.jsonl, each up to its limit: the beginning is kept.

    trace.jsonl has whole events only. A file is made when there is something to write.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        self._room = {"stdout": limits.stdout, "stderr": limits.stderr, "trace": limits.trace}
        self._fds: dict[Stream, int] = {}
        self._tail = b""
        self.events = 0

    def feed(self, stream: Stream, data: memoryview) -> None:
        if stream == "trace":
            self._feed_trace(bytes(data))
        elif stream != "result":
            self._write(stream, bytes(data[: self._room[stream]]))

    def _feed_trace(self, data: bytes) -> None:
        head, newline, tail = (self._tail + data).rpartition(b"\n")
        self._tail = tail if len(tail) <= MAX_LINE_BYTES else b""
        if not newline:
            return
        lines = [line + b"\n" for line in head.split(b"\n") if parse_object(line) is not None]
        while lines and sum(map(len, lines)) > self._room["trace"]:
            lines.pop()
        self.events += len(lines)
        self._write("trace", b"".join(lines))

    def _write(self, stream: Stream, data: bytes) -> None:
        if not data:
            return
        if stream not in self._fds:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fds[stream] = os.open(self._folder / _FILES[stream], flags, 0o644)
        self._room[stream] -= len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fds[stream], view) :]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
