"""Steering a run from another process: a socket in the run's folder on which its coordinator listens.

`run.db` has one writer, so that who wants something of a run asks the one who holds it. A request is one JSON object
on one line, and so is the answer, which comes when the coordinator has done it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from sandbox_exec.errors import RunNotActive

NAME = "control.sock"
_MAX_LINE = 1 << 28  # tasks that are submitted: a hundred thousand of a few KB
_MAX_ANSWER = 1 << 24  # a line for each of thousands of trials in flight
_ANSWER_S = 60.0  # a pause waits for every worker; nothing takes longer


class ControlServer:
    """Collects requests in a thread of its own; the coordinator takes them from `requests` when it is woken."""

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._wake = wake
        self._path = folder / NAME
        self._path.unlink(missing_ok=True)  # of an owner that was killed: we hold the run's lock
        self._socket = socket.socket(socket.AF_UNIX)
        with _short(folder) as short:
            self._socket.bind(f"{short}/{NAME}")
        self._path.chmod(0o600)
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve, name="sandbox-exec-control", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            try:
                connection.settimeout(5)
                with connection.makefile("rb") as file:
                    content = json.loads(file.readline(_MAX_LINE))
            except (OSError, ValueError):
                connection.close()
                continue
            self.requests.put(Request(connection, content))
            self._wake()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the thread
        self._socket.close()
        self._thread.join()
        self._path.unlink(missing_ok=True)
        while not self.requests.empty():
            self.requests.get().answer(error="the coordinator has ended")


class Request:
    """What somebody asks, and the way to answer."""

    def __init__(self, connection: socket.socket, content: Any) -> None:
        self.content = content if isinstance(content, dict) else {}
        self._connection = connection

    def answer(self, **content: Any) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(content).encode() + b"\n")
        self._connection.close()


def ask(folder: Path, *, timeout_s: float = _ANSWER_S, **request: Any) -> dict[str, Any]:
    """Ask the coordinator of a run, in JSON or contracts. Raises RunNotActive if there is none, or it says nothing."""
    with socket.socket(socket.AF_UNIX) as sock, _short(folder) as short:
        try:
            sock.connect(f"{short}/{NAME}")
        except OSError as error:
            raise RunNotActive(f"no coordinator holds the run in {folder}; start one: sandbox-exec continue") from error
        sock.settimeout(timeout_s)
        try:
            sock.sendall(to_json(request) + b"\n")
            with sock.makefile("rb") as file:
                line = file.readline(_MAX_ANSWER)
        except TimeoutError as error:
            raise RunNotActive(f"the coordinator of the run in {folder} said nothing for {timeout_s:g} s") from error
        except OSError:  # it ended
            line = b""
    answer = json.loads(line) if line else {"error": "the coordinator ended before it answered"}
    return answer if isinstance(answer, dict) else {}


@contextlib.contextmanager
def _short(folder: Path) -> Any:
    """A path of a few characters to a folder: those of sockets have a limit of about a hundred."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}" if os.path.isdir(f"/proc/self/fd/{fd}") else str(folder)
    finally:
        os.close(fd)
