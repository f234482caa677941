"""Zygotes and keepers: what they load, what they pass on, and what their own death costs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support import PATIENCE_S, Meeting, Watch, children, reap

from sandbox_exec import Blame, Limits, Pool, Status
from sandbox_exec.sandbox.provider import Provider


@pytest.fixture(autouse=True)
def _orphans() -> Iterator[None]:
    """Keepers whose zygote was killed become children of this process, as of an init, which reaps."""
    before = children()
    yield
    reap(children() - before)


def waits(meeting: Any, word: str) -> str:
    meeting.announce(word)
    meeting.wait()
    return word


def provider(pool: Pool) -> Provider:
    assert pool._manager is not None
    return pool._manager._provider


def keeper_of(pool: Pool, future: object) -> int:
    assert pool._manager is not None
    (slot,) = [slot for slot, call in pool._manager._running.items() if call.future is future]
    return provider(pool)._sandboxes[slot].keeper_pid


def kill(*pids: int) -> None:
    with Watch(pids) as watch:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        watch.wait_gone()


# --- death ---


def test_a_zygote_that_is_killed_is_replaced_and_costs_no_call_that_runs(meeting: Meeting) -> None:
    with Pool(max_workers=2, limits=Limits(readable=[meeting.folder])) as pool:
        running = pool.submit(waits, meeting, "running")
        meeting.expect("running")
        (first,) = provider(pool).zygote_pids()
        kill(first)
        assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1  # in the slot that has no keeper yet
        (second,) = provider(pool).zygote_pids()
        assert second != first
        meeting.let_go()
        assert running.result(PATIENCE_S).unwrap() == "running"


def test_a_zygote_may_be_killed_again_and_again() -> None:
    def leaves_a_file() -> None:
        with open("left", "w"):
            pass

    with Pool(max_workers=1) as pool:
        for _ in range(4):
            assert pool.submit(leaves_a_file).result(PATIENCE_S).ok  # so that each needs a keeper of its own
            kill(*provider(pool).zygote_pids())


def test_a_keeper_that_is_killed_costs_its_own_call_and_no_other(meeting: Meeting) -> None:
    with Pool(max_workers=2, limits=Limits(readable=[meeting.folder])) as pool:
        unlucky, other = pool.submit(waits, meeting, "unlucky"), pool.submit(waits, meeting, "other")
        meeting.expect("unlucky", "other")
        kill(keeper_of(pool, unlucky))
        outcome = unlucky.result(PATIENCE_S)
        assert (outcome.status, outcome.blame) == (Status.ENVIRONMENT_ERROR, Blame.INFRA)
        assert outcome.error is not None
        assert "keeper" in outcome.error.message
        assert not other.done()
        meeting.let_go()
        assert other.result(PATIENCE_S).unwrap() == "other"
        assert [pool.submit(abs, -n).result(PATIENCE_S).unwrap() for n in range(3)] == [0, 1, 2]


def test_a_keeper_that_is_killed_while_idle_costs_at_most_the_call_that_meets_it() -> None:
    with Pool(max_workers=1) as pool:
        for _ in range(3):
            assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1
            (sandbox,) = provider(pool)._sandboxes.values()
            kill(sandbox.keeper_pid)
            assert pool.submit(abs, -1).result(PATIENCE_S).status in (Status.SUCCESS, Status.ENVIRONMENT_ERROR)


def test_a_keeper_that_is_killed_while_its_trial_is_frozen_leaves_a_slot_that_is_not(meeting: Meeting) -> None:
    with Pool(max_workers=1, limits=Limits(readable=[meeting.folder])) as pool:
        future = pool.submit(waits, meeting, "frozen")
        meeting.expect("frozen")
        future.freeze()
        keeper = keeper_of(pool, future)
        assert pool._manager is not None
        is_frozen = threading.Event()
        pool._manager.put(is_frozen.set)  # it comes after the word to freeze
        assert is_frozen.wait(PATIENCE_S)
        meeting.let_go()  # which it does not hear
        kill(keeper)
        assert future.result(PATIENCE_S).status is Status.ENVIRONMENT_ERROR
        assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1


def test_a_frozen_keeper_is_given_up_and_its_call_still_ends(meeting: Meeting) -> None:
    with Pool(max_workers=1, limits=Limits(readable=[meeting.folder])) as pool:
        future = pool.submit(waits, meeting, "running")
        meeting.expect("running")
        os.kill(keeper_of(pool, future), signal.SIGSTOP)
        future.cancel()
        outcome = future.result(PATIENCE_S)
        assert outcome.status is Status.CANCELLED
        assert outcome.kill is not None
        assert "kernel" in outcome.kill.proof
        assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1


# --- what is loaded ---


def test_an_agent_starts_with_nothing_of_ours_but_the_guest() -> None:
    def agent() -> list[str]:
        return sorted(sys.modules)

    with Pool(max_workers=1) as pool:
        loaded = pool.submit(agent).result().unwrap()
    ours = [name for name in loaded if name.startswith("sandbox_exec")]
    assert all(name == "sandbox_exec" or name.startswith("sandbox_exec.guest") for name in ours)
    assert not {"pydantic", "psutil", "subprocess", "asyncio", "pytest"} & set(loaded)


def test_a_preloaded_module_is_there_before_the_call() -> None:
    def agent() -> bool:
        return "colorsys" in sys.modules

    with Pool(max_workers=1) as plain, Pool(max_workers=1, preload=["colorsys"]) as loaded:
        assert plain.submit(agent).result().unwrap() is False
        assert loaded.submit(agent).result().unwrap() is True
        kill(*provider(loaded).zygote_pids())
        other_shape = Limits(disk="8MiB")  # which the keeper that is there cannot give
        assert loaded.submit(agent, limits=other_shape).result(PATIENCE_S).unwrap() is True


def test_a_module_that_cannot_be_preloaded_is_named_in_every_outcome() -> None:
    with Pool(max_workers=1, preload=["no_such_module"]) as pool:
        for _ in range(2):
            outcome = pool.submit(abs, 1).result(PATIENCE_S)
            assert (outcome.status, outcome.blame) == (Status.ENVIRONMENT_ERROR, Blame.INFRA)
            assert outcome.error is not None
            assert "no_such_module" in outcome.error.message


# --- what is passed on ---


def test_nothing_of_one_call_is_in_the_memory_of_the_next() -> None:
    def keeps(secret: str) -> None:
        os.environ["KEPT"] = secret

    def looks(reversed_text: str, given: str = "") -> int:
        """How often a text is in this process's memory. It is given the text reversed, and turns it itself."""
        text, found = bytearray(reversed_text.encode()[::-1]), 0
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps:
                span, rights = line.split()[:2]
                if "r" in rights and "[v" not in line:
                    start, end = (int(edge, 16) for edge in span.split("-"))
                    memory.seek(start)
                    found += memory.read(end - start).count(text)
        return found

    secret, never_said = os.urandom(16).hex(), os.urandom(16).hex()
    with Pool(max_workers=1) as pool:

        def count(text: str, given: str = "") -> int:
            return int(pool.submit(looks, text[::-1], given).result().unwrap())

        pool.submit(keeps, secret).result().unwrap()
        of_its_own_making = count(never_said)
        assert count(never_said, given=never_said) > of_its_own_making  # it would see what is there
        assert count(secret) <= of_its_own_making


def test_what_an_agent_does_to_its_own_process_is_not_done_to_the_next() -> None:
    def spoils() -> None:
        import resource

        os.umask(0)
        os.chdir("/")
        os.environ.clear()
        sys.path.clear()
        sys.stdout = None
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.nice(5)
        __builtins__["len"] = None

    def looks() -> dict[str, Any]:
        import resource

        print("heard")
        return {
            "umask": os.umask(0o022),
            "cwd": os.getcwd(),
            "env": sorted(os.environ),
            "path": list(sys.path),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "nice": os.nice(0),
            "len": len("abc"),
        }

    with Pool(max_workers=1) as pool:
        before = pool.submit(looks).result()
        pool.submit(spoils).result()
        after = pool.submit(looks).result()
    assert before.unwrap() == after.unwrap()
    assert before.stdout == after.stdout == "heard\n"
