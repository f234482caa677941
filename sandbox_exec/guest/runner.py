"""The last steps in the agent's own process: become the command, or call the function and say what came of it.

Everything here runs with the agent's rights. What is sent is one JSON object on one line; the supervisor
trusts none of it.
"""

from __future__ import annotations

import gc
import os
import sys
from _pickle import loads
from _signal import SIG_DFL, SIG_IGN, SIGPIPE, SIGTERM, SIGXFSZ, signal

from .context import RateLimited, TrialContext, TrialTimeout, json_encoder, raise_timeout, set_context

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


def run_command(argv: list[str]) -> NoReturn:
    for signum in (SIGPIPE, SIGXFSZ):  # Python ignores them, and exec would pass that on
        signal(signum, SIG_DFL)
    os.execvp(argv[0], argv)


def run_call(request: dict[str, Any], payload: bytes, trace_fd: int, paused_fd: int, result_fd: int) -> NoReturn:
    deadline_s = request["deadline_s"]
    set_context(TrialContext(seed=request["seed"], deadline_s=deadline_s, trace_fd=trace_fd, paused_fd=paused_fd))
    code = 1
    try:
        gc.enable()
        signal(SIGTERM, raise_timeout)
        function, args, kwargs = loads(payload)
        answer = _encode(function(*args, **kwargs), request["trusted_results"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        answer = _error(error)
    except BaseException as error:
        code = os.EX_TEMPFAIL if isinstance(error, RateLimited) else 1
        answer = _error(error)
    finally:
        signal(SIGTERM, SIG_IGN)  # the answer is on its way: let it out whole
    _flush()
    _write(result_fd, answer + b"\n")
    os._exit(code & 0xFF)


def _encode(value: Any, trusted: bool) -> bytes:
    if trusted:
        import base64

        import cloudpickle

        return b'{"pickle":"' + base64.b64encode(cloudpickle.dumps(value)) + b'"}'
    try:
        return json_encoder()({"value": value}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        hint = "return what JSON can say, or trust the agent with Pool(trusted_results=True)"
        raise TypeError(f"the result is not JSON ({error}): {hint}") from None


def _error(error: BaseException) -> bytes:
    import traceback

    name = type(error).__qualname__
    module = type(error).__module__
    inner = error.__traceback__.tb_next if error.__traceback__ else None  # our own frame says nothing
    try:
        message = str(error)
        text = "".join(traceback.format_exception(type(error), error, inner))
    except BaseException as second:  # a __str__ of the agent's that raises
        message, text = f"<{type(second).__name__} while printing it>", ""
    known = module in ("builtins", TrialTimeout.__module__)
    said: dict[str, Any] = {
        "type": name if known else f"{module}.{name}",
        "message": message[:_MESSAGE],
        "traceback": text[-_TRACEBACK:],
    }
    if isinstance(error, RateLimited):
        try:
            said["retry_after_s"] = float(error.retry_after_s)  # type: ignore[arg-type]  # or a header's text
        except Exception:  # there is none, or a date: no reason to lose the rest
            pass
    return json_encoder()({"error": said}).encode()


_MESSAGE, _TRACEBACK = 4096, 32768  # what a person reads; the rest would only fill the pipe


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os._exit(1)  # the agent closed our pipe: the supervisor sees an agent without an answer
