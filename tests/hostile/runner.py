"""Run rows of the catalog and say what became of each. What holds must be judged by who reads the reports.

`run_beside` runs many rows at a time, in lanes: each has a pool with one worker, so that after a trial its sandbox
is idle and whatever is still in it is a survivor. `run_alone` runs one row after the other, for the rungs where a
survivor can only be told by its being there at all.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import leftovers

from hostile.agents._ready import ready
from hostile.catalog import CATALOG, HostileAgent
from sandbox_exec import Command, Limits, Outcome, Pool

AGENTS = Path(__file__).parent / "agents"
LANES = 8  # most agents do nothing but wait for their deadline
LONGER = 20  # times, for an agent that was not ready in time on a machine that is busy
STARTING = threading.Lock()  # held by who starts a child of this process: by then, what is new is known to be its own
Case = tuple[str, str]  # the name of a row, and "callable" or "command"


@dataclass(frozen=True)
class Report:
    """What became of one agent."""

    name: str
    form: str
    status: str
    is_ready: bool  # the attack took place
    has_escaped: bool  # by its own account
    survivors: tuple[str, ...]
    outlived: tuple[str, ...]  # its pool
    answers: bool  # the pool, after it
    proof: str  # of the kill; empty if there was none
    account: str  # what the agent says, and what went wrong, for a person
    isolation: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        return cls(**{**data, "survivors": tuple(data["survivors"]), "outlived": tuple(data["outlived"])})


class Surroundings:
    """What lies around a sandbox and could be reached: services, secrets, files. Each can be reached from here."""

    def __init__(self, outer_pidns: str | None = None) -> None:
        """`outer_pidns`: what the most dangerous agents must not be in; this process's own, unless named."""
        self.outer_pidns = outer_pidns or os.readlink("/proc/self/ns/pid")
        self.secret = secrets.token_hex(16)
        self.home = os.path.expanduser("~")

    def __enter__(self) -> Surroundings:
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        self.canary = self.folder / "canary"
        self.canary.write_text(self.secret)
        os.environ["HOSTILE_SECRET"] = self.secret
        self.abstract = f"hostile-{secrets.token_hex(8)}"
        self.path = self.folder / "service"
        self._listeners = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX), socket.socket()]
        for listener, address in zip(self._listeners, self._addresses(port=0), strict=True):
            listener.bind(address)
            listener.listen(128)
        self.path.chmod(0o777)
        self.port = self._listeners[2].getsockname()[1]
        for listener, address in zip(self._listeners, self._addresses(self.port), strict=True):
            with socket.socket(listener.family) as client:
                client.connect(address)
        return self

    def _addresses(self, port: int) -> tuple[Any, ...]:
        return f"\0{self.abstract}", str(self.path), ("127.0.0.1", port)

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        os.environ.pop("HOSTILE_SECRET", None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def arguments(self, row: HostileAgent) -> dict[str, str]:
        values = {
            "outer_pidns": self.outer_pidns,
            "secret": self.secret,
            "hidden": str(self.canary),
            "home": self.home,
            "canary": str(self.canary),
            "name": "sx-keeper",
            "target": {
                "connects_to_abstract_socket": self.abstract,
                "connects_to_path_socket": str(self.path),
                "connects_to_loopback": str(self.port),
                "listens_for_other_trials": str(self.port + 1),
                "returns_pickle_bomb": str(self.folder / "bomb"),
            }.get(row.name, ""),
        }
        return {name: values[name] for name in row.arguments}

    @property
    def has_exploded(self) -> bool:
        return (self.folder / "bomb").exists()


def submit(pool: Pool, row: HostileAgent, form: str, arguments: dict[str, str], limits: Limits) -> Future[Outcome]:
    if form == "callable":
        attack = importlib.import_module(f"hostile.agents.{row.module}").attack
        return pool.submit(attack, ready, limits=limits, **arguments)
    words = [f"{name}={value}" for name, value in arguments.items()]
    script = str(AGENTS / f"{row.module}.py")
    return pool.submit(Command([sys.executable, "-S", "-E", script, *words]), limits=limits)


def limits_of(row: HostileAgent, times: int = 1) -> Limits:
    return Limits(**{**row.limits, "timeout_s": row.limits["timeout_s"] * times})


def run_one(pool: Pool, row: HostileAgent, form: str, around: Surroundings) -> Outcome:
    """One trial; a second one with far more time if the machine was too busy for the attack to begin."""
    outcome = submit(pool, row, form, around.arguments(row), limits_of(row)).result()
    if not events(outcome, "ready") and outcome.status == "task_timeout":
        outcome = submit(pool, row, form, around.arguments(row), limits_of(row, LONGER)).result()
    return outcome


def events(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    return [event for event in outcome.trace if event.get("type") == kind]


def report(
    row: HostileAgent,
    form: str,
    outcome: Outcome,
    survivors: Sequence[str],
    answers: bool,
) -> Report:
    said = [*events(outcome, "ready")]
    said += [event["result"] for event in events(outcome, "result") if isinstance(event.get("result"), dict)]
    said += [outcome.value] if isinstance(outcome.value, dict) else []
    error = f"{outcome.error.type[:80]}: {outcome.error.message[:400]}" if outcome.error else ""
    return Report(
        name=row.name,
        form=form,
        status=str(outcome.status),
        is_ready=bool(events(outcome, "ready")),
        has_escaped=any(bool(words.get("escaped")) for words in said),
        survivors=tuple(survivors),
        outlived=(),
        answers=answers,
        proof=outcome.kill.proof if outcome.kill else "",
        account=f"{str(said)[:1000]} {error} {outcome.stderr[-300:]}",
        isolation=outcome.isolation.model_dump(mode="json") if outcome.isolation else {},
    )


def keeper_of_next(pool: Pool, limits: Limits) -> int:
    """Whether the pool still answers: the pid of the keeper of another trial, or 0.

    In the same sandbox, if it is lent again. Further tries have the time that a busy machine may need, or that it
    takes to remove what filled its disk.
    """
    for each in (limits, *[Limits()] * 5):
        outcome = pool.submit(os.getppid, limits=each).result()
        if outcome.ok:
            return int(outcome.value)
    return 0


def run_until_killed(rung: str, cases: Sequence[Case], around: Surroundings) -> None:
    """All at once, in one pool, with so much time that whoever calls is killed before any deadline."""
    with Pool(len(cases), containment=rung) as pool:
        for name, form in cases:
            row = CATALOG[name]
            submit(pool, row, form, around.arguments(row), limits_of(row, LONGER))


# --- beside each other, where a pid namespace tells the trials apart -------------------------------


def run_beside(rung: str, cases: Sequence[Case], around: Surroundings, lanes: int = LANES) -> Iterator[Report]:
    """Reports in the order in which they come."""
    todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
    done: queue.SimpleQueue[Report | BaseException | None] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)

    def work() -> None:
        try:
            with Pool(1, containment=rung) as pool:
                with STARTING:
                    before = set(leftovers.children(os.getpid()))
                    keeper_of_next(pool, Limits())
                    zygotes = set(leftovers.children(os.getpid())) - before
                with contextlib.suppress(queue.Empty):
                    while True:
                        name, form = todo.get_nowait()
                        row = CATALOG[name]
                        outcome = run_one(pool, row, form, around)
                        survivors = in_pid_namespaces_below(zygotes)
                        answers = keeper_of_next(pool, limits_of(row)) == 1
                        done.put(report(row, form, outcome, survivors, answers))
        except BaseException as error:
            done.put(error)
        done.put(None)

    threads = [threading.Thread(target=work) for _ in range(min(lanes, len(cases)))]
    for thread in threads:
        thread.start()
    working = len(threads)
    while working:
        match done.get():
            case None:
                working -= 1
            case BaseException() as error:
                raise error
            case made:
                yield made
    for thread in threads:
        thread.join()


def in_pid_namespaces_below(zygotes: set[int]) -> list[str]:
    """What is in the sandboxes of idle pools beside their first process, and the one that waits to be the next agent.

    By the kernel's own numbers: the first process of a pid namespace is 1 in it, whatever its name.
    """
    found = []
    firsts = [pid for zygote in zygotes for pid in leftovers.descendants(zygote) if inner_pid(pid) == 1]
    for first in firsts:
        below = leftovers.descendants(first)
        waiting = [pid for pid in leftovers.children(first) if is_waiting_for_its_trial(pid)]
        found += [leftovers.describe(pid) for pid in below - set(waiting[:1])]
    return [text for text in found if not text.endswith("(ended)")]


def inner_pid(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(leftovers.fields(pid).get("NSpid", "0").split()[-1])
    return 0


def is_waiting_for_its_trial(pid: int) -> bool:
    with contextlib.suppress(OSError):
        status = leftovers.fields(pid)
        return status["Name"] == "sx-keeper" and status["Threads"] == "1" and not leftovers.children(pid)
    return False


# --- alone, in a pid namespace that holds nothing but this process and its parent ------------------


def run_alone(rung: str, cases: Sequence[Case], around: Surroundings, patience_s: dict[str, float]) -> Iterator[Report]:
    """Only for a driver of `ordinary_user`, which is alone in its pid namespace. `patience_s` by row.

    A pool is used until something has survived in it: then it is closed, to see whether that outlives it too.
    """
    todo = list(cases)
    while todo:
        with Pool(1, containment=rung) as pool:
            made = None
            while todo and made is None:
                name, form = todo.pop(0)
                row = CATALOG[name]
                outcome = run_one(pool, row, form, around)
                keeper = keeper_of_next(pool, limits_of(row))  # and then that of this trial is gone
                survivors = strangers({keeper, *leftovers.children(os.getpid())}, patience_s[name])
                made = report(row, form, outcome, survivors, keeper > 0)
                if todo and not survivors and outcome.status != "environment_error":
                    yield made
                    made = None
        if made is not None:
            yield replace(made, outlived=tuple(strangers(set(), leftovers.PATIENCE_S)))


def strangers(known: set[int], patience_s: float) -> list[str]:
    """Every process in here but the first one, this one, and those that are known."""
    deadline_s = time.monotonic() + patience_s
    while (found := _strangers(known)) and leftovers.wait_for_end_of_one(found, deadline_s):
        pass
    return [leftovers.describe(pid) for pid in found]


def _strangers(known: set[int]) -> list[int]:
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    return sorted(pids - {1, os.getpid()} - known)
