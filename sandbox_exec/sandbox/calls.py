"""Calls that block, such as the engine's, beside a loop that must not."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from sandbox_exec.sandbox.handles import socket_pair
from sandbox_exec.sandbox.loop import Loop

Then = Callable[[Any, BaseException | None], None]


class Calls:
    """Each call has a thread of its own; what comes of it is told in the thread of the loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._done: deque[tuple[Then, Any, BaseException | None]] = deque()
        self._bell, self._ring = socket_pair()
        self._bell.setblocking(False)
        self._threads: set[threading.Thread] = set()
        loop.add(self._bell.fileno(), self._hear)

    def make(self, call: Callable[[], Any], then: Then) -> None:
        """Do it; then tell its result, or what it raised."""

        def work() -> None:
            try:
                result, error = call(), None
            except BaseException as raised:
                result, error = None, raised
            self._done.append((then, result, error))
            with contextlib.suppress(OSError):  # closed: nobody wants to know any more
                self._ring.send(b"!")

        thread = threading.Thread(target=work, name="sandbox-exec-call", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while self._done:
            then, result, error = self._done.popleft()
            then(result, error)
        self._threads = {thread for thread in self._threads if thread.is_alive()}

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for what is under way, so long for each; its results are not told."""
        self._loop.remove(self._bell.fileno())
        for thread in self._threads:
            thread.join(timeout_s)
        self._bell.close()
        self._ring.close()
