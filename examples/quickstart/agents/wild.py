"""An agent that misbehaves: it hangs, eats memory, leaves a daemon. None of that reaches the others, or the machine."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NoReturn

from sandbox_exec.guest import context


def solve(task: dict[str, Any]) -> dict[str, Any]:
    match task["id"]:
        case "median":
            hang()
        case "most-common":
            eat_memory()
        case "largest-gap":
            leave_a_daemon()
    return {"answer": sum(task["input"]["numbers"])}


def hang() -> NoReturn:
    """Deaf to every request to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context().trace("hanging")
    while True:
        time.sleep(1)


def eat_memory() -> NoReturn:
    hoard = []
    while True:
        hoard.append(bytearray(8 << 20))
        context().trace("ate", mib=8 * len(hoard))


def leave_a_daemon() -> None:
    """In a session of its own, with no parent: it is gone all the same when the trial has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)  # not for ever: someone may try this on a machine that holds it less well
        os._exit(0)
    os.wait()
