"""What `backends.base` promises, held by one suite over every backend; then what only real processes can show."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import leftovers
import psutil
import pytest
from runs_support import children, experiment, fork, reap_orphans
from support import Meeting, Watch, meetings, spin_until, wait_readable

from sandbox_exec.backends import local
from sandbox_exec.backends.base import (
    Finished,
    Lost,
    PauseAck,
    Started,
    Traced,
    WorkerBackend,
    WorkerEvent,
    WorkerTicket,
)
from sandbox_exec.backends.local import LocalBackend
from sandbox_exec.backends.worker import Worker
from sandbox_exec.clock import MonotonicClock
from sandbox_exec.contracts import (
    ActiveTrial,
    Limits,
    Slot,
    Status,
    TrialCompletion,
    TrialDispatch,
    derive_trial_id,
)
from sandbox_exec.dispatching import limits_of, resolve
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import wire
from sandbox_exec.sandbox import owners
from sandbox_exec.store import attempt_folder, read_completion
from sandbox_exec.testing import HOLDS, ManualClock, Play, ScriptedBackend

WORKERS = 2


class Bench(Protocol):
    """A backend, and what a test needs beside it."""

    @property
    def backend(self) -> WorkerBackend: ...

    def dispatch(self, idx: int, *, holds: bool = False) -> tuple[TrialDispatch, Path]:
        """An attempt that ends at once, or one that runs until it is let go."""

    def let_go(self, ticket: WorkerTicket) -> None: ...
    def await_held(self, *tickets: WorkerTicket) -> None: ...
    def lose(self, ticket: WorkerTicket) -> None: ...
    def close(self) -> None:
        """Close the backend, unless that was done."""


class ScriptedBench:
    def __init__(self, tmp_path: Path) -> None:
        self.folder, self._closed = tmp_path, False
        self._holds: set[int] = set()
        self.backend = ScriptedBackend(
            ManualClock(), WORKERS, lambda one: HOLDS if one.slot.schedule_idx in self._holds else Play(), patience_s=1
        )

    def dispatch(self, idx: int, *, holds: bool = False) -> tuple[TrialDispatch, Path]:
        if holds:
            self._holds.add(idx)
        return make_dispatch(self.folder, idx, {})

    def let_go(self, ticket: WorkerTicket) -> None:
        self.backend.finish(ticket)

    def await_held(self, *tickets: WorkerTicket) -> None: ...

    def lose(self, ticket: WorkerTicket) -> None:
        self.backend.say(Lost(ticket, "as the test says"))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.backend.close()


class LocalBench:
    def __init__(self, tmp_path: Path, meeting: Meeting, **settings: Any) -> None:
        self.folder, self.meeting, self._closed = tmp_path, meeting, False
        one = experiment(tmp_path / "base", ["t"], sandbox={"readable": [meeting.folder]})
        self.backend = LocalBackend(WORKERS, limits=limits_of(one), **settings)

    def dispatch(self, idx: int, *, holds: bool = False, **limits: Any) -> tuple[TrialDispatch, Path]:
        folder = self.meeting.folder
        what = {"meet": [f"{folder}/up", f"{folder}/down"]} if holds else {}
        return make_dispatch(self.folder, idx, what, readable=[folder], **limits)

    def let_go(self, ticket: WorkerTicket) -> None:
        self.meeting.let_go()

    def await_held(self, *tickets: WorkerTicket) -> None:
        self.meeting.expect(*(f"t{ticket.schedule_idx}" for ticket in tickets))

    def lose(self, ticket: WorkerTicket) -> None:
        os.kill(worker_pid(ticket), signal.SIGKILL)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.backend.close()


def make_dispatch(folder: Path, idx: int, what: Any, **limits: Any) -> tuple[TrialDispatch, Path]:
    one = experiment(folder / "base", [{"id": f"t{idx}", "input": what}])
    slot = Slot(schedule_idx=idx, variant_id="v", task_id=f"t{idx}", repeat=0)
    shown, variant = resolve(Limits(**limits), one.variants[0], one.base)
    dispatch = TrialDispatch(
        slot=slot,
        trial_id=derive_trial_id(slot),
        attempt=1,
        seed=idx,
        task=one.tasks[0],
        variant=variant,
        limits=shown,
        base=one.base,
    )
    return dispatch, attempt_folder(folder / "run", dispatch.trial_id, 1)


def worker_pid(ticket: WorkerTicket) -> int:
    return int(ticket.worker.partition("-")[0])


def active(dispatch: TrialDispatch, ticket: WorkerTicket) -> ActiveTrial:
    return ActiveTrial(
        slot=dispatch.slot,
        trial_id=dispatch.trial_id,
        attempt=dispatch.attempt,
        folder=ticket.folder,
        worker=ticket.worker,
    )


_unheard: weakref.WeakKeyDictionary[WorkerBackend, list[WorkerEvent]] = weakref.WeakKeyDictionary()


def hear(backend: WorkerBackend, *kinds: type[WorkerEvent]) -> WorkerEvent:
    """The next event of one of these kinds; what comes before is passed over, what comes with it is kept."""
    waiting = _unheard.setdefault(backend, [])
    while True:
        while waiting:
            if isinstance(event := waiting.pop(0), kinds):
                return event
        waiting += backend.poll(60)


def hear_all(backend: WorkerBackend, count: int) -> list[WorkerEvent]:
    """How `count` attempts ended."""
    return [hear(backend, Finished, Lost) for _ in range(count)]


def ending(ticket: WorkerTicket) -> TrialCompletion:
    found = read_completion(ticket.folder)
    assert found.value is not None, found.reason
    return found.value


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    folder = tmp_path / "meeting"
    folder.mkdir()
    yield from meetings(folder)


@pytest.fixture(params=["scripted", "local"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, meeting: Meeting) -> Iterator[Bench]:
    made: Bench = ScriptedBench(tmp_path) if request.param == "scripted" else LocalBench(tmp_path, meeting)
    yield made
    made.close()


# --- of every backend ---


def test_nothing_is_heard_of_an_attempt_until_it_is_begun(bench: Bench) -> None:
    ticket = bench.backend.submit(*bench.dispatch(0))
    assert bench.backend.poll(0) == []
    bench.backend.begin(ticket)
    assert hear(bench.backend, Started, Finished, Lost) == Started(ticket)
    assert hear(bench.backend, Finished, Lost) == Finished(ticket)
    assert ending(ticket).status is Status.SUCCESS


def test_a_ticket_names_its_attempt_its_folder_and_a_worker_of_its_own(bench: Bench) -> None:
    wanted = [bench.dispatch(idx) for idx in range(bench.backend.capacity())]
    tickets = [bench.backend.submit(*one) for one in wanted]
    assert [(one.schedule_idx, one.trial_id, one.attempt, one.folder) for one in tickets] == [
        (one.slot.schedule_idx, one.trial_id, one.attempt, folder) for one, folder in wanted
    ]
    assert len({ticket.worker for ticket in tickets}) == len(tickets) == WORKERS


def test_as_many_attempts_as_the_capacity_says_run_at_once(bench: Bench) -> None:
    tickets = [bench.backend.submit(*bench.dispatch(idx, holds=True)) for idx in range(bench.backend.capacity())]
    for ticket in tickets:
        bench.backend.begin(ticket)
    bench.await_held(*tickets)
    for ticket in tickets:
        bench.let_go(ticket)
    assert set(hear_all(bench.backend, WORKERS)) == {Finished(ticket) for ticket in tickets}


def test_a_worker_that_has_finished_can_be_had_again(bench: Bench) -> None:
    for idx in range(WORKERS + 1):
        ticket = bench.backend.submit(*bench.dispatch(idx))
        bench.backend.begin(ticket)
        assert hear(bench.backend, Finished, Lost) == Finished(ticket)


def test_a_poll_without_news_ends_when_its_time_is_over_or_it_is_woken(bench: Bench) -> None:
    ticket = bench.backend.submit(*bench.dispatch(0, holds=True))
    bench.backend.begin(ticket)
    assert hear(bench.backend, Started) == Started(ticket)
    assert not any(isinstance(event, Finished | Lost) for event in bench.backend.poll(0))
    bench.backend.wake()
    assert not any(isinstance(event, Finished | Lost) for event in bench.backend.poll(None))


def test_an_attempt_that_is_stopped_ends_as_cancelled(bench: Bench) -> None:
    ticket = bench.backend.submit(*bench.dispatch(0, holds=True))
    bench.backend.begin(ticket)
    bench.await_held(ticket)
    bench.backend.stop(ticket, "the test says so")
    assert hear(bench.backend, Finished, Lost) == Finished(ticket)
    assert ending(ticket).status is Status.CANCELLED


def test_stopping_what_has_ended_changes_nothing(bench: Bench) -> None:
    ticket = bench.backend.submit(*bench.dispatch(0))
    bench.backend.begin(ticket)
    hear(bench.backend, Finished)
    bench.backend.stop(ticket, "too late")
    following = bench.backend.submit(*bench.dispatch(1))
    bench.backend.begin(following)
    assert hear(bench.backend, Finished, Lost) == Finished(following)
    assert (ending(ticket).status, ending(following).status) == (Status.SUCCESS, Status.SUCCESS)


def test_paused_attempts_stand_still_until_they_are_resumed(bench: Bench) -> None:
    tickets = [bench.backend.submit(*bench.dispatch(idx, holds=True)) for idx in range(2)]
    for ticket in tickets:
        bench.backend.begin(ticket)
    bench.await_held(*tickets)
    assert bench.backend.pause(tickets, 60) == [PauseAck(ticket, frozen=True) for ticket in tickets]
    for ticket in tickets:
        bench.let_go(ticket)
    bench.backend.resume(tickets[0])
    assert hear_all(bench.backend, 1) == [Finished(tickets[0])]  # the other was let go too, and does not move
    bench.backend.resume(tickets[1])
    assert hear_all(bench.backend, 1) == [Finished(tickets[1])]


def test_a_paused_attempt_can_be_stopped(bench: Bench) -> None:
    ticket = bench.backend.submit(*bench.dispatch(0, holds=True))
    bench.backend.begin(ticket)
    bench.await_held(ticket)
    bench.backend.pause([ticket], 60)
    bench.backend.stop(ticket, "the test says so")
    assert hear(bench.backend, Finished, Lost) == Finished(ticket)
    assert ending(ticket).status is Status.CANCELLED


def test_what_has_ended_counts_as_standing_still(bench: Bench) -> None:
    ticket = bench.backend.submit(*bench.dispatch(0))
    bench.backend.begin(ticket)
    hear(bench.backend, Finished)
    assert bench.backend.pause([ticket], 0) == [PauseAck(ticket, frozen=True)]
    bench.backend.resume(ticket)


def test_an_attempt_whose_worker_dies_is_lost_once_and_leaves_no_completion(bench: Bench) -> None:
    ticket, other = (bench.backend.submit(*bench.dispatch(idx, holds=True)) for idx in range(2))
    for one in (ticket, other):
        bench.backend.begin(one)
    bench.await_held(ticket, other)
    bench.lose(ticket)
    heard = hear(bench.backend, Finished, Lost)
    assert isinstance(heard, Lost)
    assert heard.ticket == ticket
    assert read_completion(ticket.folder).value is None
    bench.let_go(other)
    assert hear_all(bench.backend, 1) == [Finished(other)]
    assert not any(isinstance(event, Finished | Lost) for event in bench.backend.poll(0))


def test_of_attempts_of_another_life_a_backend_says_what_their_folders_say(bench: Bench) -> None:
    ticket = bench.backend.submit(*(finished := bench.dispatch(0)))
    bench.backend.begin(ticket)
    hear(bench.backend, Finished)
    gone, folder = bench.dispatch(1)
    never = WorkerTicket(1, gone.trial_id, 1, "1-2-3", folder)
    adoptions = bench.backend.adopt([active(finished[0], ticket), active(gone, never)])
    assert [(one.active.slot.schedule_idx, one.state, one.ticket) for one in adoptions] == [
        (0, "finished", None),
        (1, "lost", None),
    ]


def test_closing_kills_what_still_runs(bench: Bench) -> None:
    ticket = bench.backend.submit(*bench.dispatch(0, holds=True))
    bench.backend.begin(ticket)
    bench.await_held(ticket)
    bench.close()
    assert ending(ticket).status is Status.CANCELLED


# --- of real processes ---


@pytest.fixture
def orphans() -> Iterator[None]:
    """What a killed process leaves comes to us: wait for its end, as the init of a machine would."""
    known = children()
    yield
    reap_orphans(known)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def real(tmp_path: Path, meeting: Meeting, clock: ManualClock, orphans: None) -> Iterator[LocalBench]:
    """Who hangs is a matter of the clock, which stands still unless it is told to move."""
    bench = LocalBench(tmp_path, meeting, clock=clock)
    yield bench
    bench.close()


def begin(bench: LocalBench, idx: int = 0, **limits: Any) -> WorkerTicket:
    """An attempt that has begun, and holds."""
    ticket = bench.backend.submit(*bench.dispatch(idx, holds=True, **limits))
    bench.backend.begin(ticket)
    bench.await_held(ticket)
    assert hear(bench.backend, Started, Finished, Lost) == Started(ticket)
    return ticket


def cgroups_of(ticket: WorkerTicket) -> list[Path]:
    name = f"sandbox-exec-{worker_pid(ticket)}-*"
    return [folder for home in leftovers.cgroup_homes() for folder in home.glob(name)]


def agents_of(ticket: WorkerTicket) -> set[int]:
    """The processes in the worker's sandbox, where there are cgroups to find them by."""
    found: set[int] = set()
    for folder in cgroups_of(ticket):
        for members in folder.glob("0/cgroup.procs"):
            found.update(map(int, members.read_text().split()))
    if not found:
        pytest.skip("no cgroups here: the processes of a sandbox cannot be found from outside")
    return found


def test_a_worker_that_is_killed_takes_its_sandbox_along_and_another_takes_its_place(real: LocalBench) -> None:
    ticket = begin(real)
    with Watch(agents_of(ticket)) as agents:
        real.lose(ticket)
        assert hear(real.backend, Finished, Lost) == Lost(ticket, "the worker died")
        assert not any(map(agents.is_alive, agents.pids))  # it is not only said to be lost
    following = real.backend.submit(*real.dispatch(1))
    assert following.worker != ticket.worker
    real.backend.begin(following)
    assert hear(real.backend, Finished, Lost) == Finished(following)
    assert cgroups_of(ticket) == []


def test_a_worker_that_hangs_is_killed_and_another_takes_its_place(real: LocalBench, clock: ManualClock) -> None:
    ticket = begin(real)
    with Watch(agents_of(ticket)) as agents:
        os.kill(worker_pid(ticket), signal.SIGSTOP)
        heard: list[WorkerEvent] = []
        while not any(isinstance(event, Finished | Lost) for event in heard):
            clock.advance(local.HUNG_S + 1)  # the first time, it may have said something that was not read yet
            heard += real.backend.poll(0)
        assert heard[-1] == Lost(ticket, "the worker hung: nothing heard for 15 s")
        assert not any(map(agents.is_alive, agents.pids))
    following = real.backend.submit(*real.dispatch(1))
    real.backend.begin(following)
    assert hear(real.backend, Finished, Lost) == Finished(following)


def test_a_worker_that_is_only_slow_to_be_heard_is_not_taken_for_one_that_hangs(
    real: LocalBench, clock: ManualClock
) -> None:
    ticket = begin(real)
    for _ in range(3):
        hear(real.backend, Traced)
        spin_until(lambda: has_news(real.backend), "the worker's next beat is there, unread")
        clock.advance(local.HUNG_S + 1)
    real.let_go(ticket)
    assert hear(real.backend, Finished, Lost) == Finished(ticket)


def has_news(backend: LocalBackend) -> bool:
    (worker,) = backend._workers
    return bool(select.select([worker.channel], [], [], 0)[0])


def test_when_the_host_is_killed_its_workers_go_on_and_another_host_forks_the_next(real: LocalBench) -> None:
    ticket = begin(real)
    (host,) = real.backend._hosts
    host.process.kill()
    host.process.wait()
    following = real.backend.submit(*real.dispatch(1))
    real.backend.begin(following)
    assert hear(real.backend, Finished, Lost) == Finished(following)
    real.let_go(ticket)
    assert hear(real.backend, Finished, Lost) == Finished(ticket)
    assert (ending(ticket).status, ending(following).status) == (Status.SUCCESS, Status.SUCCESS)


def test_when_the_zygote_is_killed_attempts_are_run_all_the_same(real: LocalBench) -> None:
    ticket = begin(real)
    (host,) = real.backend._hosts
    zygotes = [one for one in psutil.Process(host.process.pid).children() if one.name() == "sx-zygote"]
    for zygote in zygotes:
        zygote.kill()
    psutil.wait_procs(zygotes)
    following = real.backend.submit(*real.dispatch(1))  # by another worker, which another host must fork
    real.backend.begin(following)
    assert hear(real.backend, Finished, Lost) == Finished(following)
    real.let_go(ticket)
    assert hear(real.backend, Finished, Lost) == Finished(ticket)
    again = real.backend.submit(*real.dispatch(2))
    real.backend.begin(again)
    assert hear(real.backend, Finished, Lost) == Finished(again)


def test_who_cannot_be_given_a_worker_is_told_why(tmp_path: Path, orphans: None) -> None:
    backend = LocalBackend(1, containment="magic")
    try:
        with pytest.raises(SandboxUnavailable, match=r"no worker can be had: .*magic"):
            backend.submit(*make_dispatch(tmp_path, 0, {}))
    finally:
        backend.close()


def test_a_pause_that_comes_before_the_sandbox_does_holds_from_when_it_is_there(real: LocalBench) -> None:
    ticket = real.backend.submit(*real.dispatch(0, holds=True))
    real.backend.begin(ticket)
    assert real.backend.pause([ticket], 60) == [PauseAck(ticket, frozen=True)]
    real.let_go(ticket)
    assert not any(isinstance(event, Finished | Lost) for event in real.backend.poll(0))
    real.backend.resume(ticket)
    real.await_held(ticket)
    assert hear(real.backend, Finished, Lost) == Finished(ticket)


def test_the_deadline_of_a_paused_attempt_stands_still(real: LocalBench) -> None:
    ticket = begin(real, timeout_s=2.0)
    real.backend.pause([ticket], 60)
    end_s = time.monotonic() + 2.5
    while (left_s := end_s - time.monotonic()) > 0:
        assert not any(isinstance(event, Finished | Lost) for event in real.backend.poll(left_s))
    real.let_go(ticket)
    real.backend.resume(ticket)
    assert hear(real.backend, Finished, Lost) == Finished(ticket)
    assert ending(ticket).status is Status.SUCCESS


def test_who_does_not_answer_a_pause_is_reported_and_the_others_are_frozen(real: LocalBench) -> None:
    deaf, other = begin(real, 0), begin(real, 1)
    os.kill(worker_pid(deaf), signal.SIGSTOP)

    def pause() -> list[PauseAck]:
        real.backend._clock = MonotonicClock()
        return real.backend.pause([deaf, other], 1.0)

    assert pause() == [PauseAck(deaf, frozen=False), PauseAck(other, frozen=True)]
    os.kill(worker_pid(deaf), signal.SIGCONT)


def test_closing_ends_even_a_worker_that_hangs(real: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = begin(real)
    os.kill(worker_pid(ticket), signal.SIGSTOP)
    monkeypatch.setattr(local, "_CLOSE_S", 0.2)
    with Watch([worker_pid(ticket), *agents_of(ticket)]) as watch:
        real.close()
        assert not any(map(watch.is_alive, watch.pids))


def test_a_worker_goes_on_though_its_coordinator_does_not_read(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    worker = Worker(theirs, "auto", [])
    with contextlib.suppress(BlockingIOError):
        while True:
            theirs.send(b"x" * 4095 + b"\n")
    dispatch, folder = make_dispatch(tmp_path, 0, {"nap_s": 1.0})  # some beats long
    request = wire.dict_file({"folder": str(folder)}, dispatch.model_dump_json().encode())
    wire.send_line(ours, "run", fds=(request,))
    os.close(request)
    thread = threading.Thread(target=worker.run)
    thread.start()
    spin_until((folder / "completion.json").exists, "the attempt has ended")
    heard = b""
    while b"finished" not in heard:
        wait_readable(ours.fileno())
        data, fds = wire.receive(ours, 1 << 16)
        heard = heard[-100:] + data
        for fd in fds:
            os.close(fd)
    ours.close()
    thread.join()
    theirs.close()
    found = read_completion(folder)
    assert found.value is not None
    assert found.value.status is Status.SUCCESS


# --- after the coordinator's death ---


class DeadCoordinator:
    """A process that had these attempts under way, each on a worker of its own, and was killed."""

    def __init__(self, bench: LocalBench, *dispatches: tuple[TrialDispatch, Path], pauses: bool = False) -> None:
        hear_end, tell_end = os.pipe()

        def coordinate() -> None:
            backend = LocalBackend(WORKERS, limits=[one.limits for one, _ in dispatches])
            tickets = [backend.submit(*one) for one in dispatches]
            for ticket in tickets:
                backend.begin(ticket)
            for _ in tickets:
                assert isinstance(hear(backend, Started, Finished, Lost), Started)
            if pauses:
                assert all(ack.frozen for ack in backend.pause(tickets, 60))
            os.write(tell_end, json.dumps([ticket.worker for ticket in tickets]).encode())
            signal.pause()

        self.pid = fork(coordinate)
        os.close(tell_end)
        wait_readable(hear_end)
        names = json.loads(os.read(hear_end, 65536) or b"null")
        os.close(hear_end)
        self.active = [
            ActiveTrial(slot=one.slot, trial_id=one.trial_id, attempt=1, folder=folder, worker=name)
            for (one, folder), name in zip(dispatches, names, strict=True)
        ]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_workers_outlive_a_killed_coordinator_and_the_next_one_hears_how_they_ended(real: LocalBench) -> None:
    dead = DeadCoordinator(real, real.dispatch(0, holds=True), real.dispatch(1, holds=True))
    real.meeting.expect("t0", "t1")
    dead.kill()
    adoptions = real.backend.adopt(dead.active)
    tickets = [one.ticket for one in adoptions if one.ticket is not None]
    assert [(one.state, one.active) for one in adoptions] == [("alive", one) for one in dead.active]
    assert real.backend.poll(0) == []
    real.meeting.let_go(2)
    assert set(hear_all(real.backend, 2)) == {Finished(ticket) for ticket in tickets}
    assert [ending(ticket).status for ticket in tickets] == [Status.SUCCESS, Status.SUCCESS]


def test_a_frozen_attempt_goes_on_when_its_coordinator_is_killed(real: LocalBench) -> None:
    dead = DeadCoordinator(real, real.dispatch(0, holds=True), pauses=True)
    dead.kill()
    (adoption,) = real.backend.adopt(dead.active)
    assert adoption.state == "alive"
    real.meeting.expect("t0")
    real.meeting.let_go()
    assert hear_all(real.backend, 1) == [Finished(adoption.ticket)]  # type: ignore[arg-type]


def test_an_orphan_is_killed_at_its_deadline_as_ever(real: LocalBench) -> None:
    dead = DeadCoordinator(real, real.dispatch(0, holds=True, timeout_s=1.0))
    dead.kill()
    (adoption,) = real.backend.adopt(dead.active)
    (heard,) = hear_all(real.backend, 1)
    assert isinstance(heard, Finished)
    assert (adoption.state, ending(heard.ticket).status) == ("alive", Status.TASK_TIMEOUT)


def test_an_orphan_that_dies_is_lost(real: LocalBench) -> None:
    dead = DeadCoordinator(real, real.dispatch(0, holds=True))
    dead.kill()
    (adoption,) = real.backend.adopt(dead.active)
    assert adoption.ticket is not None
    os.kill(worker_pid(adoption.ticket), signal.SIGKILL)
    assert hear_all(real.backend, 1) == [Lost(adoption.ticket, "the worker died")]


def test_an_orphan_cannot_be_frozen_and_is_killed_when_it_is_stopped(real: LocalBench) -> None:
    dead = DeadCoordinator(real, real.dispatch(0, holds=True))
    dead.kill()
    (adoption,) = real.backend.adopt(dead.active)
    assert adoption.ticket is not None
    assert real.backend.pause([adoption.ticket], 0) == [PauseAck(adoption.ticket, frozen=False)]
    real.backend.stop(adoption.ticket, "the test says so")
    assert hear_all(real.backend, 1) == [Lost(adoption.ticket, "the worker died")]


def test_an_orphan_that_hangs_is_killed_when_its_time_is_long_over(real: LocalBench, clock: ManualClock) -> None:
    dead = DeadCoordinator(real, real.dispatch(0, holds=True, timeout_s=60.0))
    dead.kill()
    (adoption,) = real.backend.adopt(dead.active)
    assert adoption.ticket is not None
    os.kill(worker_pid(adoption.ticket), signal.SIGSTOP)
    clock.advance(60.0 + local.MOST_AROUND_S + local.HUNG_S)
    assert real.backend.poll(0) == []
    clock.advance(1.0)
    assert hear_all(real.backend, 1) == [Lost(adoption.ticket, "the worker died")]


def test_what_a_living_worker_finished_before_is_finished(real: LocalBench) -> None:
    first = real.backend.submit(*(dispatched := real.dispatch(0)))
    real.backend.begin(first)
    hear(real.backend, Finished)
    second = begin(real, 1)
    assert second.worker == first.worker
    (adoption,) = real.backend.adopt([active(dispatched[0], first)])
    assert (adoption.state, adoption.ticket) == ("finished", None)


def test_a_pid_that_was_given_again_is_no_worker_of_ours(real: LocalBench) -> None:
    dispatch, folder = real.dispatch(0)
    pid, _, place = owners.name_of(os.getpid()).split("-", 2)
    for name in (f"{pid}-1-{place}", f"{pid}", "no worker", ""):
        stranger = WorkerTicket(0, dispatch.trial_id, 1, name, folder)
        assert [one.state for one in real.backend.adopt([active(dispatch, stranger)])] == ["lost"]
