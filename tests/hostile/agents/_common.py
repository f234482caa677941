"""What `python some_agent.py [key=value ...]` needs. The attacks themselves import nothing of ours."""

import contextlib
import json
import os
import sys
from collections.abc import Callable


def command(attack: Callable[..., object]) -> None:
    """Run `attack` as a program: events go to the trace pipe, the result to stdout and `result.json`.

    The result is traced too, since an attack may have broken everything else. `result.json` is left
    alone if the attack has put something there.
    """
    result = attack(_trace_ready, **dict(argument.split("=", 1) for argument in sys.argv[1:]))
    _trace({"type": "result", "result": result})
    with contextlib.suppress(OSError, KeyError):
        path = os.path.join(os.environ["SANDBOX_EXEC_OUT"], "result.json")
        with open(path, "x") as file:
            json.dump(result, file)
    with contextlib.suppress(OSError):
        print(json.dumps(result), flush=True)


def _trace_ready(state: dict[str, object]) -> None:
    _trace({"type": "ready", **state})


def _trace(event: dict[str, object]) -> None:
    # Opened for each event: an attack may have closed or poisoned every descriptor.
    with contextlib.suppress(OSError, KeyError), open(os.environ["SANDBOX_EXEC_TRACE"], "ab", 0) as pipe:
        pipe.write(json.dumps(event).encode() + b"\n")
