"""What every test on the engine asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from engine import cannot_run, client

from sandbox_exec import images
from sandbox_exec.errors import SandboxUnavailable


@pytest.fixture(scope="session")
def _engine_answers() -> None:
    client().close()


@pytest.fixture
def engine(_engine_answers: None) -> Iterator[Any]:
    """A client for one test: one that lived longer would open sockets in one test and close them in another."""
    with contextlib.closing(client()) as found:
        yield found


@pytest.fixture(scope="session")
def busybox_image(_engine_answers: None) -> str:
    """The name of the small image. It stays in the engine, for the next run."""
    try:
        return images.build("busybox").name
    except SandboxUnavailable as error:  # no static busybox on this machine
        cannot_run(str(error))
