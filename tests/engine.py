"""The Docker engine for the tests: a missing one is a skip, and with CI set a failure."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any, NoReturn

import pytest

from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.sandbox.engine import connect


def client() -> Any:
    """A client for the engine of this run; whoever asks for it closes it."""
    # The SDK leaves its socket open where it cannot connect; what it warns of then is no fault of a test's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return connect()
        except SandboxUnavailable as error:
            why_not = str(error)
        gc.collect()
    return cannot_run(f"{why_not}; or: scripts/docker-engine start")


def cannot_run(why_not: str) -> NoReturn:
    """Skip the test; where everything must be tested, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, so this may not be skipped: {why_not}", pytrace=False)
    pytest.skip(why_not)
