"""A side in a process of its own, so that no side pays for another's threads, memory or fork server.

Theory of operation. `Hosted` starts a Python that has loaded little more than this module, sends it the side
to make, and then one message a run; the answer is what the side returned, or the text of what it raised. The
host has a session of its own, so a Ctrl-C reaches only the benchmark. It ends by SIGTERM, which `stop` sends,
and the kernel when the benchmark dies: the side is then stopped, whatever it was doing. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, NoReturn, TypeVar

from .side import Side

T = TypeVar("T")

START_S = 30.0
STOP_S = 10.0  # then it is killed
PR_SET_PDEATHSIG = 1


class SideFailed(Exception):
    """A side did not start, did not answer in time, or raised."""


class Hosted(Generic[T]):
    """A `Side` that runs in another process. `make` goes there by reference: it must be importable."""

    def __init__(self, make: Callable[[], Side[T]]) -> None:
        self.name = "not started"
        self._make = make
        self._process: subprocess.Popen[bytes] | None = None
        self._connection, self._theirs = Pipe()

    def start(self) -> None:
        # Not `-m`: a fork server loads a main module that has a name again in every child.
        code = f"from {__name__} import main; main()"
        with self._theirs:
            fd = self._theirs.fileno()
            command = [sys.executable, "-P", "-c", code, str(fd)]
            self._process = subprocess.Popen(command, pass_fds=[fd], start_new_session=True)
        self._connection.send(self._make)
        self.name = self._answer(START_S)

    def run(self, n: int, in_flight: int, *, within_s: float = 60.0) -> Sequence[T]:
        self._connection.send((n, in_flight))
        answer: Sequence[T] = self._answer(within_s)
        return answer

    def stop(self) -> None:
        """Return once the host is gone; also where the side never started, or failed."""
        self._connection.close()
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, within_s: float) -> Any:
        if not self._connection.poll(within_s):
            raise SideFailed(f"no answer within {within_s:g} s")
        try:
            is_fine, value = self._connection.recv()
        except EOFError:
            raise SideFailed("its process died") from None
        if not is_fine:
            raise SideFailed(value)
        return value


def main() -> None:
    """Be the host: the only argument is the descriptor of the connection."""
    signal.signal(signal.SIGTERM, _exit)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    connection = Connection(int(sys.argv[1]))
    try:
        _serve(connection.recv()(), connection)
    except EOFError:  # the benchmark is gone
        pass
    except Exception:
        connection.send((False, traceback.format_exc()))


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _serve(side: Side[object], connection: Connection) -> NoReturn:
    side.start()
    try:
        connection.send((True, side.name))
        while True:
            n, in_flight = connection.recv()
            connection.send((True, side.run(n, in_flight)))
    finally:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # which follows the end of the connection, and must not cut it short
        side.stop()


def _exit(signum: int, frame: object) -> NoReturn:
    sys.exit()
