"""The peers, each in the fastest of its modes that gives every task a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from pebble import ProcessPool

from . import agents
from .side import Call, closed_loop, echoed


class PebbleSide:
    """Pebble, which can kill a task at its timeout; one task a process, forked."""

    name = "Pebble, max_tasks=1, fork"

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPool(max_workers=self._workers, max_tasks=1, context=context)

    def run(self, n: int, in_flight: int) -> list[float]:
        return echoed(closed_loop(lambda i: self._pool.schedule(agents.echo, args=[i]), n, in_flight))

    def stop(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]  # Pebble types it in part
        self._pool.join()


class FuturesSide:
    """`concurrent.futures` with one task a child, from a fork server."""

    name = "concurrent.futures, one task a child"

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pool = ProcessPoolExecutor(self._workers, mp_context=context, max_tasks_per_child=1)

    def run(self, n: int, in_flight: int) -> list[float]:
        return echoed(closed_loop(lambda i: self._pool.submit(agents.echo, i), n, in_flight))

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class ForkServerSide:
    """A bare `multiprocessing` fork server that has the function loaded: a process and a pipe a task."""

    name = "multiprocessing fork server, preloaded"

    def start(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([agents.__name__])
        self._open: dict[Connection, tuple[ForkServerProcess, int, float]] = {}

    def run(self, n: int, in_flight: int) -> list[float]:
        calls: list[Call[int]] = []
        for i in range(n):
            if len(self._open) == in_flight:
                calls += self._collect()
            self._begin(i)
        while self._open:
            calls += self._collect()
        return echoed(calls)

    def stop(self) -> None:
        for process, _, _ in self._open.values():
            process.kill()
            process.join()

    def _begin(self, i: int) -> None:
        begun = time.perf_counter()
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=agents.answer, args=(theirs, agents.echo, i))
        process.start()
        theirs.close()
        self._open[ours] = (process, i, begun)

    def _collect(self) -> list[Call[int]]:
        return [self._end(pipe) for pipe in wait(list(self._open)) if isinstance(pipe, Connection)]

    def _end(self, pipe: Connection) -> Call[int]:
        process, i, begun = self._open.pop(pipe)
        value = pipe.recv()
        process.join()
        pipe.close()
        process.close()
        return Call(i, time.perf_counter() - begun, value)
