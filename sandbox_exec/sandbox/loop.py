"""Waiting on handles: one selector, one callback a descriptor."""

from __future__ import annotations

import selectors
from collections.abc import Callable

Callback = Callable[[], object]


class Loop:
    """Calls back when a descriptor can be read. Not for use from several threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._callbacks: dict[int, Callback] = {}

    def add(self, fd: int, callback: Callback) -> None:
        self._selector.register(fd, selectors.EVENT_READ)
        self._callbacks[fd] = callback

    def remove(self, fd: int) -> None:
        """Forget a descriptor; before it is closed, or its number could be another's."""
        self._selector.unregister(fd)
        del self._callbacks[fd]

    def run_once(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            # A callback before this one may have removed it.
            if (callback := self._callbacks.get(key.fd)) is not None:
                callback()

    def close(self) -> None:
        self._selector.close()
