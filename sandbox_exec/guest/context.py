"""What an agent is given: its clock, its seed, and the trace."""

from __future__ import annotations

import _json
import _thread
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_PIPE_BUF = 4096  # a write of up to this many bytes to a pipe is never mixed with another's


def json_encoder(default: Callable[[Any], Any] | None = None, *, allow_nan: bool = True) -> Callable[[Any], str]:
    """json.dumps without its module, which would make every fork of the zygote a third dearer.

    It does not look for circles, which end in a RecursionError: its notes would be shared between threads.
    """
    escape = _json.encode_basestring_ascii
    encode = _json.make_encoder(None, default or _refuse, escape, None, ":", ",", False, False, allow_nan)
    return lambda value: "".join(encode(value, 0))


def _refuse(value: object) -> NoReturn:
    raise TypeError(f"an object of type {type(value).__name__} is not JSON")


class TrialTimeout(BaseException):
    """The trial's time is over: end now, and what you return still counts as a partial result.

    Not an Exception, so that an agent's `except Exception` does not swallow its own deadline.
    """


class RateLimited(Exception):
    """The provider turned the agent away, and it gives up: the trial is tried again, and this attempt does not count.

    `retry_after_s`: how long the provider said to wait.
    """

    def __init__(
        self, message: str = "the provider says to try again later", *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


_encode = json_encoder(default=repr, allow_nan=False)
_LONG_LINES = _thread.allocate_lock()


class TrialContext:
    """The trial as its agent sees it. Times are seconds; a trial that is frozen does not age."""

    def __init__(self, *, seed: int, deadline_s: float | None, trace_fd: int, paused_fd: int = -1) -> None:
        self.seed = seed
        self.deadline_s = deadline_s
        self._started = time.monotonic()
        self._trace_fd = trace_fd
        self._paused_fd = paused_fd

    @property
    def elapsed(self) -> float:
        paused_ns = os.pread(self._paused_fd, 20, 0) if self._paused_fd >= 0 else b""
        return time.monotonic() - self._started - int(paused_ns or 0) / 1e9

    @property
    def remaining(self) -> float:
        """Seconds to the deadline, never negative; infinite without one."""
        return float("inf") if self.deadline_s is None else max(0.0, self.deadline_s - self.elapsed)

    @property
    def is_expired(self) -> bool:
        return self.deadline_s is not None and self.elapsed >= self.deadline_s

    def check_timeout(self) -> None:
        """Raise TrialTimeout once the deadline has passed. Call it where you can end cleanly."""
        if self.is_expired:
            raise TrialTimeout(f"the trial's {self.deadline_s:g} s are over")

    def trace(self, type: str, /, **data: Any) -> None:
        """Write one event. It is in the supervisor's hands when this returns, whatever happens next.

        Values that JSON lacks are written as their repr. Whole lines are certain up to 4096 bytes; longer
        ones only while no other process of the trial writes at the same moment.
        """
        event = {"t": round(time.monotonic() - self._started, 6), "type": type, **data}
        try:
            line = _encode(event).encode() + b"\n"
        except ValueError:  # a number that is none, or infinite
            line = _encode(_finite(event)).encode() + b"\n"
        if len(line) <= _PIPE_BUF:
            os.write(self._trace_fd, line)
            return
        with _LONG_LINES:
            view = memoryview(line)
            while view:
                view = view[os.write(self._trace_fd, view) :]

    def usage(self, tokens: int | None = None, requests: int = 1) -> None:
        """Say what was had of the provider since the last time: it all adds up."""
        self.trace("usage", tokens=tokens, requests=requests)

    def rate_limited(self, retry_after_s: float | None = None) -> None:
        """Say that the provider turned the agent away. It may go on; to give up, raise RateLimited."""
        self.trace("rate_limited", retry_after_s=retry_after_s)


def _finite(value: Any) -> Any:
    """A copy in which the numbers that JSON lacks are text."""
    if isinstance(value, dict):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and value - value != 0 else value


_current: TrialContext | None = None


def context() -> TrialContext:
    """The context of the trial that this process runs."""
    if _current is None:
        raise RuntimeError("no trial runs here: sandbox_exec.context() is for code that a Pool or a run started")
    return _current


def set_context(ctx: TrialContext) -> None:
    global _current
    _current = ctx


def raise_timeout(signum: int, frame: object) -> NoReturn:
    """The handler of SIGTERM, which comes at the deadline, a short grace before the kill."""
    raise TrialTimeout("the deadline has passed")
