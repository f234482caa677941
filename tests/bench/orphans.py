"""No process outlives the benchmark: what the sides leave behind is adopted, counted and ended."""

from __future__ import annotations

import os

import psutil

from .host import prctl

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def sweep() -> int:
    """Kill and reap all that is below this process; return how many were alive.

    It must have no other children than what is to be swept.
    """
    _reap_the_dead()
    alive = 0
    while children := psutil.Process().children():  # the children of the killed come to us, hence the loop
        for child in children:
            child.kill()
            os.waitpid(child.pid, 0)
            alive += 1
    return alive


def _reap_the_dead() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
