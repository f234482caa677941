"""After every test: no process, cgroup, mount, temporary folder, thread or descriptor of ours is left."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import leftovers
import pytest
from shell import Done
from support import Meeting, meetings

from sandbox_exec import Pool, cli

LAST = ("test_artifacts.py", "hostile")  # they make this process large, and every fork after them slower


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: any(part in LAST for part in item.path.parts))


@pytest.fixture(scope="session", autouse=True)
def _own_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder and orphans of its own, so that what is left cannot be another program's."""
    if sys.platform != "linux":
        yield
        return
    leftovers.adopt_orphans()
    usual = tempfile.gettempdir()
    place = tempfile.mkdtemp(prefix="sandbox-exec-tests-")
    os.chmod(place, 0o1777)  # some tests run as another user
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
            patch.setenv("PYTEST_DEBUG_TEMPROOT", usual)  # where pytest keeps what a failed test wrote
        patch.setenv("TMPDIR", place)
        patch.setattr(tempfile, "tempdir", place)
        leftovers.own_mounts_below(place, str(tmp_path_factory.getbasetemp()))
        yield
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_by_module(_own_place: None) -> Iterator[None]:
    """For what the tests of a module share: a pool that is open from one test to the next, say."""
    yield from _compare()


@pytest.fixture(autouse=True)
def _nothing_left(_nothing_left_by_module: None) -> Iterator[None]:
    yield from _compare()


def _compare() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    before = leftovers.Picture.take()
    yield
    left = before.left()
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


# --- what many tests ask for ---


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(max_workers=2) as pool:
        yield pool


@pytest.fixture
def one_slot() -> Iterator[Pool]:
    """A pool in which each call has the slot of the one before."""
    with Pool(max_workers=1) as pool:
        yield pool


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    yield from meetings(tmp_path)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Call the command line in this process: for what needs no signals."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["sandbox-exec", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return Done(caught.value.code, *capfd.readouterr())

    return call
