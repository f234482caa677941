"""`Pool`: call a function or a command in a sandbox and get an outcome, never a hang.

Theory of operation. One thread, the manager, owns the loop, the sandboxes and the supervisors of all calls; every
other thread only puts words into its inbox and wakes it. Callers wait on futures, which the manager completes.
What a caller's thread does itself is to pickle, so that a call that cannot be pickled is an error where it is made.
The manager ends when the pool is shut down, collected, or the interpreter exits; a killed interpreter takes the
sandboxes with it, as their keepers see their channel close.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import pickle
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import psutil

from sandbox_exec.clock import MonotonicClock
from sandbox_exec.containment import Containment, check_readable, require
from sandbox_exec.contracts import AgentError, Limits, Outcome, Status, Usage, derive_seed
from sandbox_exec.errors import BrokenPool, InvalidValue, PoolClosed
from sandbox_exec.sandbox.base import Launch
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.process import ProcessSandbox
from sandbox_exec.sandbox.provider import Provider, chosen
from sandbox_exec.trial.supervisor import Supervisor
from sandbox_exec.units import format_bytes, parse_bytes, processors

_BUDGET_SHARE = 0.8  # of the machine's memory, when the caller names no budget
_BROKEN = "the pool's manager failed, which no agent can cause: please report it with the error below; make a new pool"
_MAP_AHEAD = 2  # calls in flight for each worker in map(): one that runs, one that is ready to


@dataclass(frozen=True)
class Command:
    """A program to run in place of a function. What it leaves in `$SANDBOX_EXEC_OUT/result.json` is the value."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    input: Any = None  # what `$SANDBOX_EXEC_IN/task.json` says as "input", if not None

    def __post_init__(self) -> None:
        if isinstance(self.argv, str | bytes) or not self.argv or not all(isinstance(a, str) for a in self.argv):
            raise InvalidValue(f"a command is a list of words, such as ['python3', 'solve.py'], not {self.argv!r}")


class Future(concurrent.futures.Future[Outcome]):
    """As in `concurrent.futures`, but a call that runs can be ended, and frozen."""

    _call: _Call
    _manager: _Manager
    _pool: Pool | None = None

    def cancel(self) -> bool:
        """Forget the call if it waits (then `result` raises CancelledError); kill it if it runs (then its
        outcome says `cancelled`, with all that it traced). False if it has ended."""
        if super().cancel():
            return True
        if self.done():
            return False
        self._manager.put(lambda: self._manager.stop_call(self._call))
        return True

    def freeze(self) -> None:
        """Stop every process of a call that runs; its deadline stands still. No effect on one that waits."""
        self._manager.put(lambda: self._manager.freeze_call(self._call, frozen=True))

    def thaw(self) -> None:
        self._manager.put(lambda: self._manager.freeze_call(self._call, frozen=False))


class Pool:
    """Sandboxes for `max_workers` calls at a time, on the strongest containment of this machine."""

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        limits: Limits | None = None,
        memory_budget: int | str | None = None,
        env: Mapping[str, str] | None = None,
        preload: Iterable[str] = (),
        trusted_results: bool = False,
        seed: int = 0,
        containment: str = "auto",
    ) -> None:
        """
        max_workers: calls at a time; by default one for each processor.
        limits: for every call that brings none of its own.
        memory_budget: the sum of the ceilings in flight; by default 80 % of the machine's memory.
        env: variables for every agent, beside PATH, HOME, LANG and the places of its sandbox.
        preload: modules that every trial finds loaded. They run outside of the sandbox: name only your own.
        trusted_results: pickle what comes back, which lets an agent run code in this process.
        seed: what the seed of each call is derived from.
        containment: "auto", or a rung by name, to use a weaker one.
        """
        if max_workers is not None and max_workers < 1:
            raise InvalidValue(f"max_workers is {max_workers}; at least 1 is needed")
        self.max_workers = max_workers or processors()
        self.limits = limits or Limits()
        self.memory_budget = _budget(memory_budget)
        self.containment: Containment = chosen(containment)
        require(self.containment, self.limits)
        check_readable(self.limits.readable)
        self._check_fit(self.limits)
        self._env = dict(env or {})
        self._preload = list(preload)
        self._trusted = trusted_results
        self._seed = seed
        self._numbers = itertools.count()
        self._closed = False
        self._lock = threading.Lock()
        self._manager: _Manager | None = None
        _pools.add(self)

    # --- calls ---

    def submit(
        self, call: Callable[..., Any] | Command, /, *args: Any, limits: Limits | None = None, **kwargs: Any
    ) -> Future:
        """Run it in a sandbox. The future's result is an `Outcome`, whatever the agent does."""
        limits = limits or self.limits
        require(self.containment, limits)
        check_readable(limits.readable)
        self._check_fit(limits)
        launch = self._launch(call, args, kwargs, limits)
        future = Future()
        with self._lock:
            if self._closed:
                raise PoolClosed("the pool has been shut down; make a new one")
            if self._manager is None or self._manager.pid != os.getpid():
                self._manager = _Manager(self.containment, self.max_workers, self.memory_budget, self._preload)
                self._stopper = weakref.finalize(self, _Manager.end, self._manager)
            manager = self._manager
            future._manager = manager
            future._pool = self  # a pool that nobody names lives as long as its calls
            future._call = _Call(future, launch)
            # In the lock, so that a shutdown comes either before the call or after it.
            manager.put(lambda: manager.pending.append(future._call))
        manager.raise_if_broken()
        return future

    def map(
        self, call: Callable[..., Any], *iterables: Iterable[Any], limits: Limits | None = None
    ) -> Iterator[Outcome]:
        """Outcomes in the order of the input, which may be endless: it is read a few calls ahead and no more."""
        arguments = zip(*iterables, strict=False)
        waiting: deque[Future] = deque()
        try:
            while True:
                for items in itertools.islice(arguments, self.max_workers * _MAP_AHEAD - len(waiting)):
                    waiting.append(self.submit(call, *items, limits=limits))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def run_all(
        self,
        calls: Mapping[str, Callable[..., Any] | Command],
        /,
        *args: Any,
        limits: Limits | None = None,
        **kwargs: Any,
    ) -> dict[str, Outcome]:
        """Run each with the same arguments, beside each other, and wait for all."""
        futures = {}
        for name, call in calls.items():
            given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}) if isinstance(call, Command) else (args, kwargs)
            futures[name] = self.submit(call, *given[0], limits=limits, **given[1])
        try:
            return {name: future.result() for name, future in futures.items()}
        finally:
            for future in futures.values():
                future.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, kill: bool = False) -> None:
        """Take no more calls. What waits is still run unless cancelled; what runs, unless killed."""
        with self._lock:
            self._closed = True
            manager = self._manager if self._manager and self._manager.pid == os.getpid() else None
            if manager is not None:
                manager.tell_to_end(kill=kill, cancel=cancel_futures or kill)
        if manager is not None and wait:
            manager.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A block that is left by an exception, Ctrl-C among them, has no use for the rest.
        self.shutdown(kill=kind is not None)

    # --- parts ---

    def _launch(
        self,
        call: Callable[..., Any] | Command,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limits: Limits,
    ) -> Launch:
        number = next(self._numbers)
        seed = derive_seed(self._seed, f"call-{number}")
        if isinstance(call, Command):
            if args or kwargs:
                raise InvalidValue("a Command takes no arguments: put them into its argv, env or input")
            staged = {}
            if call.input is not None:
                task = {"id": f"call-{number}", "input": call.input, "seed": seed, "repeat": 0}
                staged["in/task.json"] = json.dumps(task).encode()
            return Launch(limits, argv=tuple(call.argv), env={**self._env, **call.env}, seed=seed, staged=staged)
        if not callable(call):
            raise InvalidValue(f"{call!r} is neither a function nor a Command")
        payload = cloudpickle.dumps((call, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        return Launch(limits, payload=payload, env=self._env, seed=seed, trusted_results=self._trusted)

    def _check_fit(self, limits: Limits) -> None:
        if (limits.memory or 0) > self.memory_budget:
            raise InvalidValue(
                f"a call with memory={format_bytes(limits.memory or 0)} can never fit the pool's "
                f"memory_budget of {format_bytes(self.memory_budget)}: lower one or raise the other"
            )


def _budget(budget: int | str | None) -> int:
    return parse_bytes(budget) if budget is not None else int(psutil.virtual_memory().total * _BUDGET_SHARE)


@dataclass(eq=False)
class _Call:
    future: Future
    launch: Launch
    supervisor: Supervisor | None = None
    stopped: bool = False  # before its sandbox was ready

    @property
    def memory(self) -> int:
        return self.launch.limits.memory or 0


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_managers: weakref.WeakSet[_Manager] = weakref.WeakSet()


class _Manager:
    """The thread that owns everything. `put` is the one method for other threads."""

    def __init__(self, containment: Containment, slots: int, budget: int, preload: list[str]) -> None:
        self.pid = os.getpid()
        self.pending: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        self._free = list(range(slots))[::-1]
        self._budget = budget
        self._in_use = 0
        self._clock = MonotonicClock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._awake, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._awake.setblocking(False)
        self._closing = False
        self._broken: BaseException | None = None
        self._loop = Loop()
        self._loop.add(self._awake.fileno(), self._on_wake)
        self._provider = Provider(self._loop, containment, slots, preload)
        self._thread = threading.Thread(target=self._run, name="sandbox-exec", daemon=True)
        _managers.add(self)
        self._thread.start()

    # --- from other threads ---

    def put(self, word: Callable[[], object]) -> None:
        self._inbox.append(word)
        try:
            self._wake.send(b"w")
        except (BlockingIOError, OSError):
            pass  # it is awake, or at its end

    def tell_to_end(self, *, kill: bool, cancel: bool) -> None:
        self.put(lambda: self._close(kill=kill, cancel=cancel))

    def end(self) -> None:
        """Kill all, and wait for it; nothing in a forked child, where all of it is the parent's."""
        if self.pid == os.getpid():
            self.tell_to_end(kill=True, cancel=True)
            self.join()

    def raise_if_broken(self) -> None:
        if self._broken is not None:
            raise BrokenPool(_BROKEN) from self._broken

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- in the manager's thread ---

    def stop_call(self, call: _Call) -> None:
        call.stopped = True
        if call.supervisor is not None:
            call.supervisor.stop("cancelled")

    def freeze_call(self, call: _Call, *, frozen: bool) -> None:
        if call.supervisor is not None:
            (call.supervisor.freeze if frozen else call.supervisor.thaw)()

    def _run(self) -> None:
        try:
            while True:
                while self._inbox:
                    self._inbox.popleft()()
                self._dispatch()
                if self._closing and not self._running and not self.pending:
                    break
                self._loop.run_once(self._wait_s())
                self._call_due()
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._provider.close()
            _managers.discard(self)  # from here on a forked child has nothing of ours to close
            self._loop.close()
            self._awake.close()
            self._wake.close()

    def _break(self, error: BaseException) -> None:
        """After a bug of ours: whoever waits is told, and nobody waits again."""
        self._broken = error
        while self._inbox:
            with contextlib.suppress(Exception):
                self._inbox.popleft()()
        for call in (*self.pending, *self._running.values()):
            broken = BrokenPool(_BROKEN)
            broken.__cause__ = error
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                call.future.set_exception(broken)

    def _on_wake(self) -> None:
        try:
            self._awake.recv(4096)
        except BlockingIOError:
            pass

    def _wait_s(self) -> float | None:
        if self._inbox:
            return 0
        due = [call.supervisor.due_s for call in self._running.values() if call.supervisor is not None]
        nearest = min((due_s for due_s in due if due_s is not None), default=None)
        return None if nearest is None else max(0.0, nearest - self._clock.now_s())

    def _call_due(self) -> None:
        now_s = self._clock.now_s()
        for call in list(self._running.values()):
            supervisor = call.supervisor
            if supervisor is not None and supervisor.due_s is not None and supervisor.due_s <= now_s:
                supervisor.on_time()

    def _dispatch(self) -> None:
        while self.pending and self._free:
            call = self.pending[0]
            if self._in_use + call.memory > self._budget:
                return
            self.pending.popleft()
            if call.future.set_running_or_notify_cancel():
                self._assign(self._free.pop(), call)

    def _assign(self, slot: int, call: _Call) -> None:
        self._running[slot] = call
        self._in_use += call.memory
        if b"cloudpickle" in call.launch.payload or call.launch.trusted_results:
            self._provider.preload("cloudpickle")
        self._provider.acquire(
            slot,
            call.launch.limits,
            on_ready=lambda sandbox: self._begin(slot, call, sandbox),
            on_failure=lambda reason: self._end(slot, call, _unavailable(reason)),
        )

    def _begin(self, slot: int, call: _Call, sandbox: ProcessSandbox) -> None:
        unpickle = pickle.loads if call.launch.trusted_results else None
        call.supervisor = Supervisor(
            sandbox, call.launch, self._clock, lambda outcome: self._end(slot, call, outcome), unpickle
        )
        if call.stopped:
            call.supervisor.stop("cancelled")

    def _end(self, slot: int, call: _Call, outcome: Outcome) -> None:
        del self._running[slot]
        self._free.append(slot)
        self._in_use -= call.memory
        call.supervisor = None
        if self._broken is None:  # else it has been told
            call.future.set_result(outcome)
        call.future._pool = None

    def _close(self, *, kill: bool, cancel: bool) -> None:
        self._closing = True
        if cancel:
            for call in self.pending:
                if call.future.cancel():
                    call.future.set_running_or_notify_cancel()
            self.pending.clear()
        if kill:
            for call in self._running.values():
                self.stop_call(call)

    def abandon(self) -> None:
        """In a forked child: the thread is not there, and what it owned is the parent's."""
        self._provider.abandon()
        self._loop.close()
        for sock in (self._awake, self._wake):
            os.close(sock.detach())


def _unavailable(reason: str) -> Outcome:
    error = AgentError(type="SandboxUnavailable", message=reason)
    return Outcome(status=Status.ENVIRONMENT_ERROR, error=error, usage=Usage(wall_s=0.0))


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._lock = threading.Lock()  # a thread that is not here may have held it
    for manager in list(_managers):
        _managers.discard(manager)
        manager.abandon()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork_in_child)
