"""Wants its processor time before everybody else's: real-time scheduling and a negative nice value."""

import contextlib
import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    gained = []
    ready({})
    for policy in (os.SCHED_FIFO, os.SCHED_RR):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, os.sched_param(1))
            gained.append(f"policy {policy}")
    with contextlib.suppress(OSError):
        os.nice(-5)
        gained.append("nice")
    return {"escaped": bool(gained), "detail": gained}


if __name__ == "__main__":
    __import__("_common").command(attack)
