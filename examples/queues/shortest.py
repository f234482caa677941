"""A queue of one's own: what has the shortest name goes first. It changes when trials run, never the history."""

from __future__ import annotations

from collections.abc import Collection

from sandbox_exec import Entry, SequentialQueue


class ShortestFirst(SequentialQueue):
    def __init__(self, experiment) -> None:
        super().__init__(experiment)
        self._entries: dict[int, Entry] = {}

    def put(self, entry: Entry) -> None:
        self._entries[entry.idx] = entry

    def take(self, now_s: float, closed: Collection[str] = ()) -> int | None:
        may = [entry for entry in self._entries.values() if entry.cell.variant_id not in closed]
        if not may:
            return None
        return self._entries.pop(min(may, key=lambda entry: (len(entry.cell.task_id), entry.idx)).idx).idx

    def discard(self, idx: int) -> None:
        self._entries.pop(idx, None)
