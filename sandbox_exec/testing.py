"""What users' tests and ours share: stand-ins for the parts that are passed in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from sandbox_exec.contracts import Isolation, Rung
from sandbox_exec.errors import InvalidValue
from sandbox_exec.sandbox.base import End, Launch, Listener, Stream


class ManualClock:
    """A clock that moves only when it is told to. Not for use from several threads at once."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`; a monotonic clock never moves back."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidValue(f"a clock advances by a finite number of seconds >= 0, not {seconds!r}")
        self._now_s += seconds


class FakeSandbox:
    """A `Sandbox` with no process in it: notes what its supervisor asks for, and says what it is told to say.

    `asked` has the names of the calls in their order. `write`, `exceed` and `end` play the agent. It does not
    hold anyone to the order of calls, and does nothing by itself: a `kill` ends it only when `end` is called.
    """

    def __init__(self, files: Mapping[str, bytes | Exception] | None = None) -> None:
        self.files = dict(files or {})  # what `read_file` finds; an exception is raised
        self.asked: list[str] = []
        self.paused_s = 0.0
        self.launch: Launch | None = None
        self._listener: Listener | None = None

    # --- the agent's part ---

    def write(self, stream: Stream, data: bytes) -> None:
        self._heard().on_output(stream, memoryview(data))

    def exceed(self, what: Literal["memory", "pids"]) -> None:
        self._heard().on_exceeded(what)

    def end(self, exit_code: int | None = 0, **fields: Any) -> None:
        """No process is left; `fields` are those of `End`."""
        self._heard().on_ended(End(exit_code=exit_code, **{"proof": "there never was a process", **fields}))

    def _heard(self) -> Listener:
        if self._listener is None:
            raise InvalidValue("the sandbox has not been started: make its supervisor first")
        return self._listener

    # --- the sandbox's part ---

    @property
    def isolation(self) -> Isolation:
        return Isolation(
            rung=Rung.PROCESS_GROUP,
            memory="none",
            pids="none",
            cpu="none",
            freeze="none",
            filesystem="host",
            network="host",
        )

    def start(self, launch: Launch, listener: Listener) -> None:
        self.launch, self._listener = launch, listener
        self.asked.append("start")

    def terminate(self) -> None:
        self.asked.append("terminate")

    def kill(self) -> None:
        self.asked.append("kill")

    def kill_hard(self) -> None:
        self.asked.append("kill_hard")

    def freeze(self) -> None:
        self.asked.append("freeze")

    def thaw(self, paused_s: float) -> None:
        self.asked.append("thaw")
        self.paused_s = paused_s

    def peak_memory_bytes(self) -> int | None:
        return None

    def read_file(self, path: str, limit: int) -> bytes | None:
        found = self.files.get(path)
        if isinstance(found, Exception):
            raise found
        if found is not None and len(found) > limit:
            raise ValueError(f"{path} has {len(found)} bytes; {limit} are allowed")
        return found

    def close(self) -> None:
        self.asked.append("close")
