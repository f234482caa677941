"""How fast: lanes, the rate scopes of providers. Variants that name the same lane share its limits.

A lane never waits and never sends anybody to sleep: it says from when on a trial may start, and that is the latest of

  blocked      the provider turned a trial away, and said until when
  gap          min_gap_s after the last start
  spacing      each start moves a virtual time ahead by what it uses of a minute: 60 / rpm, and tokens * 60 / tpm
  window       the first moment at which it fits into the last 60 seconds, with what is known of those by now.
               Spacing is not enough: trials of 600 tokens at 1000 a minute are 36 seconds apart, two in a minute

and only when fewer are in flight than `limit`. What a trial uses is an estimate until it ends and reports the number;
then that counts, as of its start. It is the claim of an agent: see `_Rate.correct` for what it can do at most.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sandbox_exec.contracts.queue import LONGEST_RETRY_AFTER_S, WINDOW_S, LaneSettings
from sandbox_exec.contracts.words import Variant

_MAX_PUSH_S: Final = 600.0  # a claim delays the next start by no more: a lie must not stop a lane
_MAX_CLAIM: Final = 2**53  # in a lane without a limit: what JSON holds exactly
_IDLE_S: Final = 1.0  # a start later than it could have been by more was not held back by the lane
_SAME_START_S: Final = 1.0  # after a crash, starts are known by the wall clock only
_AVERAGED: Final = 16  # trials that the estimate is an average of, about
_MAX_KEPT: Final = 120  # starts in a snapshot: it is written with every commit


class Lane:
    """One rate scope. It belongs to the coordinator's thread, and all times but `wall_s` are by its clock."""

    def __init__(self, settings: LaneSettings) -> None:
        self.settings = settings
        self.limit = settings.max_concurrent
        self.in_flight = 0
        self.refusals = 0
        self._requests = _Rate(settings.rpm)
        self._tokens = _Rate(settings.tpm)
        self._gap_until_s = -math.inf
        self._blocked_until_s = -math.inf
        self._halved_s = -math.inf
        self._successes = 0  # in a row, since the limit was changed

    def opens_s(self, now_s: float, tokens: int = 0) -> float | None:
        """Return the earliest time at which a trial of so many tokens may start; None: only once another one ends."""
        if self.limit is not None and self.in_flight >= self.limit:
            return None
        times = self._blocked_until_s, self._gap_until_s, self._requests.opens_s(1), self._tokens.opens_s(tokens)
        return max(now_s, *times)

    def start(self, now_s: float, tokens: int = 0) -> None:
        """Reserve for a trial that starts now. Whether it may is not asked again."""
        self.in_flight += 1
        self._gap_until_s = now_s + self.settings.min_gap_s
        self._requests.take(now_s, 1)
        self._tokens.take(now_s, tokens)

    def adopt(self) -> None:
        """Count a trial of before a crash: its reservation is in what was restored."""
        self.in_flight += 1

    def end(
        self,
        now_s: float,
        *,
        estimate: int,
        started_s: float,
        success: bool,
        tokens: int | None = None,
        requests: int | None = None,
    ) -> None:
        """Note the end of a trial for which `estimate` tokens were reserved, and what it says that it used.

        A failure of its own says nothing about the provider: it neither counts for the limit nor against it.
        """
        self.in_flight = max(0, self.in_flight - 1)
        if requests is not None:
            self._requests.correct(now_s, started_s, reserved=1, claimed=requests)
        if tokens is not None:
            self._tokens.correct(now_s, started_s, reserved=estimate, claimed=tokens)
        if success and self._can_grow():
            self._successes += 1
            if self.limit is not None and self._successes >= self.limit:
                self.limit += 1
                self._successes = 0

    def turned_away(self, now_s: float, *, started_s: float, retry_after_s: float, jitter_s: float = 0.0) -> None:
        """Note that the provider refused a trial. It is ended besides.

        When a lane is too fast, all that is in flight is refused at once. Those refusals are one message: only a trial
        that began after the last halving can say that the halved limit is too high as well.
        """
        self.refusals += 1
        wait_s = min(LONGEST_RETRY_AFTER_S, max(0.0, retry_after_s)) + jitter_s
        self._blocked_until_s = max(self._blocked_until_s, now_s + wait_s)
        self._successes = 0
        if self.settings.adaptive and self.limit is not None and started_s > self._halved_s:
            self.limit = max(1, self.limit // 2)
            self._halved_s = now_s

    def status(self, now_s: float) -> dict[str, Any]:
        return {
            "in_flight": self.in_flight,
            "limit": self.limit,
            "max_concurrent": self.settings.max_concurrent,
            "blocked_s": max(0.0, self._blocked_until_s - now_s),
            "starts_in_window": self._requests.used(now_s),
            "tokens_in_window": self._tokens.used(now_s),
            "turned_away": self.refusals,
        }

    def snapshot(self, now_s: float, wall_s: float) -> dict[str, Any]:
        """Return what must outlive the coordinator, as JSON. Not what is in flight: `continue` adopts that."""
        shift_s = wall_s - now_s
        return {
            "wall_s": wall_s,
            "blocked_until_s": _shifted(self._blocked_until_s, shift_s),
            "gap_until_s": _shifted(self._gap_until_s, shift_s),
            "halved_s": _shifted(self._halved_s, shift_s),
            "limit": self.limit,
            "successes": self._successes,
            "turned_away": self.refusals,
            "requests": self._requests.snapshot(now_s, shift_s),
            "tokens": self._tokens.snapshot(now_s, shift_s),
        }

    def restore(self, state: Any, now_s: float, wall_s: float) -> None:
        """Be as at that snapshot, with the time gone by since. A wall clock that was set back counts as none."""
        shift_s = now_s - max(wall_s, state["wall_s"])
        self._blocked_until_s = _restored(state["blocked_until_s"], shift_s)
        self._gap_until_s = _restored(state["gap_until_s"], shift_s)
        self._halved_s = _restored(state["halved_s"], shift_s)
        if self.settings.adaptive and self.limit is not None and state["limit"] is not None:
            self.limit = min(self.limit, state["limit"])
        self._successes = state["successes"]
        self.refusals = state["turned_away"]
        self._requests.restore(state["requests"], shift_s)
        self._tokens.restore(state["tokens"], shift_s)

    def _can_grow(self) -> bool:
        most = self.settings.max_concurrent
        return self.settings.adaptive and self.limit is not None and most is not None and self.limit < most


class Lanes:
    """All lanes of an experiment, addressed by variant. One without a lane is never held."""

    def __init__(self, settings: Mapping[str, LaneSettings], variants: Iterable[Variant]) -> None:
        self._name_of: dict[str, str] = {}
        self._estimates: dict[str, _Estimate] = {}
        self._reserved: defaultdict[str, tuple[list[float], list[int]]] = defaultdict(lambda: ([], []))
        self._changed: dict[str, None] = {}
        self.by_name = {name: Lane(each) for name, each in settings.items()}
        for variant in variants:
            tpm = None
            if variant.lane is not None:
                self._name_of[variant.id] = variant.lane
                tpm = self.by_name.setdefault(variant.lane, Lane(LaneSettings())).settings.tpm
            self._estimates[variant.id] = _Estimate(variant.tokens_per_trial, tpm)

    def lane_of(self, variant_id: str) -> Lane | None:
        name = self._name_of.get(variant_id)
        return None if name is None else self.by_name[name]

    def estimate(self, variant_id: str) -> int:
        """Return the tokens to reserve for a trial: the variant's own number, and the average once trials reported."""
        return self._estimates[variant_id].tokens

    def closed(self, now_s: float) -> set[str]:
        """Return the variants of which none can start now."""
        known: dict[tuple[str, int], bool] = {}  # many variants ask for the same
        found = set()
        for variant_id, name in self._name_of.items():
            key = name, self._estimates[variant_id].tokens
            if key not in known:
                opens_s = self.by_name[name].opens_s(now_s, key[1])
                known[key] = opens_s is None or opens_s > now_s
            if known[key]:
                found.add(variant_id)
        return found

    def opens_s(self, variant_ids: Iterable[str], now_s: float) -> float | None:
        """Return the first moment after now at which time alone opens one of these; None: there is none."""
        opens = [self._opens_s(variant_id, now_s) for variant_id in variant_ids if variant_id in self._name_of]
        return min((opens_s for opens_s in opens if opens_s is not None and opens_s > now_s), default=None)

    def start(self, variant_id: str, now_s: float) -> None:
        if lane := self._changing(variant_id):
            tokens = self.estimate(variant_id)
            lane.start(now_s, tokens)
            starts_s, amounts = self._reserved[variant_id]
            starts_s.append(now_s)
            amounts.append(tokens)

    def adopt(self, variant_id: str) -> None:
        if lane := self.lane_of(variant_id):
            lane.adopt()

    def end(
        self,
        variant_id: str,
        now_s: float,
        *,
        started_s: float,
        success: bool,
        tokens: int | None = None,
        requests: int | None = None,
    ) -> None:
        if lane := self._changing(variant_id):
            estimate = self._release(variant_id, started_s)
            lane.end(now_s, estimate=estimate, started_s=started_s, success=success, tokens=tokens, requests=requests)
            if tokens is not None:
                self._estimates[variant_id].learn(tokens)

    def turned_away(
        self, variant_id: str, now_s: float, *, started_s: float, retry_after_s: float, jitter_s: float
    ) -> None:
        if lane := self._changing(variant_id):
            lane.turned_away(now_s, started_s=started_s, retry_after_s=retry_after_s, jitter_s=jitter_s)

    def take_changed(self) -> list[str]:
        """Return the lanes whose state is another since the last call: what is to be stored."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def snapshot(self, name: str, now_s: float, wall_s: float) -> dict[str, Any]:
        estimates = {variant_id: self._estimates[variant_id].snapshot() for variant_id in self._variants_of(name)}
        return {**self.by_name[name].snapshot(now_s, wall_s), "estimates": estimates}

    def restore(self, name: str, state: Any, now_s: float, wall_s: float) -> None:
        self.by_name[name].restore(state, now_s, wall_s)
        for variant_id in self._variants_of(name):
            if variant_id in state["estimates"]:
                self._estimates[variant_id].restore(state["estimates"][variant_id])

    def status(self, now_s: float) -> dict[str, dict[str, Any]]:
        """Return each lane for people: `opens_in_s` is None while only the end of a trial can open it."""
        found = {}
        for name, lane in self.by_name.items():
            tokens = {variant_id: self.estimate(variant_id) for variant_id in self._variants_of(name)}
            opens_s = lane.opens_s(now_s, min(tokens.values(), default=0))
            found[name] = {
                **lane.status(now_s),
                "opens_in_s": None if opens_s is None else opens_s - now_s,
                "tokens_per_trial": tokens,
            }
        return found

    def _opens_s(self, variant_id: str, now_s: float) -> float | None:
        return self.by_name[self._name_of[variant_id]].opens_s(now_s, self.estimate(variant_id))

    def _changing(self, variant_id: str) -> Lane | None:
        name = self._name_of.get(variant_id)
        if name is None:
            return None
        self._changed[name] = None
        return self.by_name[name]

    def _release(self, variant_id: str, started_s: float) -> int:
        starts_s, amounts = self._reserved[variant_id]
        i = _nearest(starts_s, started_s)
        if i is None:  # of before a crash
            return self.estimate(variant_id)
        del starts_s[i]
        return amounts.pop(i)

    def _variants_of(self, name: str) -> list[str]:
        return [variant_id for variant_id, lane in self._name_of.items() if lane == name]


class _Rate:
    """So many a minute of one thing, tokens or requests: the virtual time, and a log of the starts of the last minute.

    The log is a Fenwick tree over the starts in their order, so that what is asked of it takes O(log n): which is the
    oldest start that must be out of the window before so much fits in?
    """

    def __init__(self, per_minute: float | None) -> None:
        self._per_minute = math.inf if per_minute is None else per_minute
        self._most_claimed = math.floor(min(self._per_minute * _MAX_PUSH_S / WINDOW_S, _MAX_CLAIM))
        self._next_s = -math.inf
        self._busy_since_s = -math.inf  # since when each start was held back by the ones before
        self._clear()

    def opens_s(self, amount: int) -> float:
        """Return the earliest time for so much. What is more than a minute's whole amount fits into an empty window."""
        excess = min(self._total + amount - self._per_minute, self._total)
        if excess <= 0:
            return self._next_s
        return max(self._next_s, _leaves_s(self._starts_s[self._first_reaching(excess)]))

    def take(self, now_s: float, amount: int) -> None:
        self._forget(now_s)
        if now_s > self.opens_s(amount) + _IDLE_S:
            self._busy_since_s = now_s
        self._next_s = max(self._next_s, now_s) + self._spacing_s(amount)
        if self._starts_s and self._starts_s[-1] == now_s:
            self._add(len(self._starts_s) - 1, amount)
        else:
            self._append(now_s, amount)

    def correct(self, now_s: float, started_s: float, *, reserved: int, claimed: int) -> None:
        """Put what a trial says that it used in the place of what was reserved for it.

        More than reserved moves the next start, by ten minutes from now at most. Less gives back what was reserved,
        and nothing where starts were not held back since: time that nobody wanted cannot be had later.
        """
        change = min(max(0, claimed), max(reserved, self._most_claimed)) - reserved
        self._forget(now_s)
        i = _nearest(self._starts_s, started_s)
        if i is not None and i >= self._gone:
            self._add(i, max(change, -self._amounts[i]))
        moved_s = self._next_s + self._spacing_s(change)
        if change > 0:
            self._next_s = max(self._next_s, min(moved_s, now_s + _MAX_PUSH_S))
        elif started_s >= self._busy_since_s:
            self._next_s = max(moved_s, min(self._next_s, now_s))

    def used(self, now_s: float) -> int:
        self._forget(now_s)
        return self._total

    def snapshot(self, now_s: float, shift_s: float) -> dict[str, Any]:
        """Return the state as JSON. Many starts become fewer, each as late as the last of those it stands for."""
        self._forget(now_s)
        starts: list[list[float]] = []
        if self._per_minute < math.inf:
            size = max(1, math.ceil((len(self._starts_s) - self._gone) / _MAX_KEPT))
            for i in range(self._gone, len(self._starts_s), size):
                amounts = self._amounts[i : i + size]
                starts.append([self._starts_s[i + len(amounts) - 1] + shift_s, sum(amounts)])
        return {
            "next_s": _shifted(self._next_s, shift_s),
            "busy_since_s": _shifted(self._busy_since_s, shift_s),
            "starts": starts,
        }

    def restore(self, state: Any, shift_s: float) -> None:
        self._next_s = _restored(state["next_s"], shift_s)
        self._busy_since_s = _restored(state["busy_since_s"], shift_s)
        self._clear()
        for start_s, amount in state["starts"]:
            self._append(start_s + shift_s, amount)

    def _spacing_s(self, amount: int) -> float:
        return amount * WINDOW_S / self._per_minute

    def _clear(self) -> None:
        self._starts_s: list[float] = []
        self._amounts: list[int] = []  # 0 for those that left the window
        self._sums = [0]  # the tree: node i, from 1, is the sum of the i & -i amounts that end with the i-th
        self._gone = 0  # so many of the first left the window
        self._total = 0

    def _append(self, start_s: float, amount: int) -> None:
        self._starts_s.append(start_s)
        self._amounts.append(amount)
        self._total += amount
        node = len(self._starts_s)
        part, below = amount, node - 1
        while below > node - (node & -node):
            part += self._sums[below]
            below -= below & -below
        self._sums.append(part)

    def _add(self, i: int, change: int) -> None:
        self._amounts[i] += change
        self._total += change
        node = i + 1
        while node < len(self._sums):
            self._sums[node] += change
            node += node & -node

    def _first_reaching(self, amount: float) -> int:
        """Return the first start up to and including which there was so much; `amount` is at most the total."""
        node = 0
        step = 1 << len(self._starts_s).bit_length()
        while step := step >> 1:
            if node + step < len(self._sums) and self._sums[node + step] < amount:
                node += step
                amount -= self._sums[node]
        return node

    def _forget(self, now_s: float) -> None:
        while self._gone < len(self._starts_s) and _leaves_s(self._starts_s[self._gone]) <= now_s:
            self._add(self._gone, -self._amounts[self._gone])
            self._gone += 1
        if self._gone > 64 and 2 * self._gone > len(self._starts_s):
            kept = list(zip(self._starts_s[self._gone :], self._amounts[self._gone :], strict=True))
            self._clear()
            for start_s, amount in kept:
                self._append(start_s, amount)


class _Estimate:
    """The tokens of a variant's trials: its own number is the first of those that are averaged, if there is one."""

    def __init__(self, tokens: int, tpm: float | None) -> None:
        self.tokens = min(tokens, _MAX_CLAIM)
        self._most = _MAX_CLAIM if tpm is None else math.floor(min(tpm, _MAX_CLAIM))
        self._mean = float(min(self.tokens, self._most))
        self._count = 1 if tokens else 0

    def learn(self, claimed: int) -> None:
        self._count = min(self._count + 1, _AVERAGED)
        self._mean += (min(max(0, claimed), self._most) - self._mean) / self._count
        self.tokens = round(self._mean)

    def snapshot(self) -> list[float]:
        return [self.tokens, self._mean, self._count]

    def restore(self, state: Sequence[Any]) -> None:
        self.tokens, self._mean, self._count = state


def _leaves_s(start_s: float) -> float:
    """Return when a start is no longer within the window: never a rounding error too early."""
    end_s = start_s + WINDOW_S
    return end_s if end_s - start_s >= WINDOW_S else math.nextafter(end_s, math.inf)


def _nearest(times_s: Sequence[float], time_s: float) -> int | None:
    """Return the index of that time, or of the one next to it; None: none is so near that it is the same."""
    i = bisect_left(times_s, time_s)
    near = [k for k in (i - 1, i) if 0 <= k < len(times_s) and abs(times_s[k] - time_s) <= _SAME_START_S]
    return min(near, key=lambda k: abs(times_s[k] - time_s), default=None)


def _shifted(time_s: float, shift_s: float) -> float | None:
    return None if time_s == -math.inf else time_s + shift_s


def _restored(time_s: float | None, shift_s: float) -> float:
    return -math.inf if time_s is None else time_s + shift_s
