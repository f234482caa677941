"""Waiting on handles: one selector, one callback a descriptor."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

Callback = Callable[[], object]
_LOOK_S = 0.05  # how long a ceiling of which nobody tells us can be reached before we see it


class Loop:
    """Calls back when a descriptor can be read. Not for use from several threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._callbacks: dict[int, Callback] = {}
        # For every read in this loop: consumed before the next. Not shared beyond it: a read lets go of the GIL,
        # and the loop of another pool would write its trials' bytes into ours.
        self.buffer = bytearray(1 << 18)
        self._looks: set[Callback] = set()
        self._next_look_s = 0.0

    def add(self, fd: int, callback: Callback) -> None:
        self._selector.register(fd, selectors.EVENT_READ)
        self._callbacks[fd] = callback

    def remove(self, fd: int) -> None:
        """Forget a descriptor; before it is closed, or its number could be another's."""
        self._selector.unregister(fd)
        del self._callbacks[fd]

    def add_look(self, callback: Callback) -> None:
        """Call back every now and then: only for what the kernel has no handle to wait on."""
        self._looks.add(callback)

    def remove_look(self, callback: Callback) -> None:
        self._looks.discard(callback)

    def run_once(self, timeout_s: float | None) -> None:
        if self._looks:
            timeout_s = _LOOK_S if timeout_s is None else min(timeout_s, _LOOK_S)
        self._run_ready(timeout_s)
        if self._looks and time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + _LOOK_S
            for callback in tuple(self._looks):
                if callback in self._looks:
                    callback()

    def _run_ready(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            # A callback before this one may have removed it.
            if (callback := self._callbacks.get(key.fd)) is not None:
                callback()

    def close(self) -> None:
        self._selector.close()
