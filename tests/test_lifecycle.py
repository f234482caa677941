"""How pools and their callers end: in order, by force, in a fork, or not at all; nothing is left in any case."""

from __future__ import annotations

import concurrent.futures
import fcntl
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S, Meeting, Script, Watch, descendants, meetings

from sandbox_exec import BrokenPool, Limits, Outcome, Pool, PoolClosed, Status
from sandbox_exec.sandbox.provider import Provider

HANGS = """
import signal, sys
from support import Meeting
from sandbox_exec import Limits, Pool

def hang(meeting, word="ready"):
    import os
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
    meeting.announce(word)
    while True:
        signal.pause()

class Folder:  # what a Meeting is to an agent, without its descriptors here
    def __init__(self, folder):
        self.folder = folder
    def __reduce__(self):
        from support import _InAgent
        return _InAgent, (self.folder,)

meeting = Folder(sys.argv[1])
limits = Limits(timeout_s=None, readable=[meeting.folder])
"""


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    tmp_path.chmod(0o755)  # agents of root have another uid, and the scripts of these tests lie in here
    folder = tmp_path / "meeting"
    folder.mkdir()
    yield from meetings(folder)


def start(tmp_path: Path, meeting: Meeting, text: str) -> Script:
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    return Script(tmp_path, HANGS + text, meeting.folder, env={"PYTHONPATH": path})


def waits(meeting: Any, word: str) -> str:
    meeting.announce(word)
    meeting.wait()
    return word


# --- shutting down ---


def test_shutdown_waits_for_what_runs_and_for_what_waits(meeting: Meeting) -> None:
    pool = Pool(max_workers=1, limits=Limits(readable=[meeting.folder]))
    futures = [pool.submit(waits, meeting, word) for word in ("first", "second")]
    meeting.expect("first")
    closing = threading.Thread(target=pool.shutdown)
    closing.start()
    meeting.let_go(2)
    closing.join(PATIENCE_S)
    assert [future.result(0).unwrap() for future in futures] == ["first", "second"]


def test_shutdown_without_waiting_lets_what_was_submitted_run_on(meeting: Meeting) -> None:
    pool = Pool(max_workers=1, limits=Limits(readable=[meeting.folder]))
    futures = [pool.submit(waits, meeting, word) for word in ("first", "second")]
    pool.shutdown(wait=False)
    with pytest.raises(PoolClosed):
        pool.submit(abs, 1)
    meeting.let_go(2)
    assert [future.result(PATIENCE_S).unwrap() for future in futures] == ["first", "second"]
    pool.shutdown()


def test_shutdown_can_cancel_what_waits_and_let_what_runs_end(meeting: Meeting) -> None:
    pool = Pool(max_workers=1, limits=Limits(readable=[meeting.folder]))
    running = pool.submit(waits, meeting, "running")
    meeting.expect("running")
    waiting = [pool.submit(waits, meeting, "never") for _ in range(3)]
    pool.shutdown(wait=False, cancel_futures=True)
    done, not_done = concurrent.futures.wait(waiting, PATIENCE_S)
    assert not not_done
    assert all(future.cancelled() for future in done)
    meeting.let_go()
    assert running.result(PATIENCE_S).unwrap() == "running"
    pool.shutdown()


def test_shutdown_can_kill_what_runs(meeting: Meeting) -> None:
    pool = Pool(max_workers=2, limits=Limits(readable=[meeting.folder]))
    running = [pool.submit(waits, meeting, "running") for _ in range(2)]
    waiting = pool.submit(waits, meeting, "never")
    meeting.expect("running", "running")
    pool.shutdown(kill=True)
    assert [future.result(0).status for future in running] == [Status.CANCELLED] * 2
    assert waiting.cancelled()


def test_a_block_that_an_exception_leaves_kills_what_runs(meeting: Meeting) -> None:
    futures = []

    def leave_it() -> None:
        with Pool(max_workers=1, limits=Limits(readable=[meeting.folder])) as pool:
            futures.append(pool.submit(waits, meeting, "running"))
            meeting.expect("running")
            raise KeyError

    with pytest.raises(KeyError):
        leave_it()
    assert futures[0].result(0).status is Status.CANCELLED


def test_every_call_that_was_taken_ends_though_others_close_the_pool_at_that_moment() -> None:
    for _ in range(5):
        pool = Pool(max_workers=2)
        taken: list[concurrent.futures.Future[Outcome]] = []
        under_way = threading.Semaphore(0)

        def submit_until_closed(pool: Pool = pool, taken: Any = taken, under_way: Any = under_way) -> None:
            try:
                while True:
                    taken.append(pool.submit(abs, -1))
                    under_way.release()
            except PoolClosed:
                pass

        threads = [threading.Thread(target=submit_until_closed) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            assert under_way.acquire(timeout=PATIENCE_S)
        pool.shutdown(wait=False, cancel_futures=True)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not concurrent.futures.wait(taken, PATIENCE_S).not_done
        pool.shutdown()


def test_a_pool_that_nobody_names_lives_as_long_as_its_calls(meeting: Meeting) -> None:
    pool = Pool(max_workers=1, limits=Limits(readable=[meeting.folder]))
    future = pool.submit(waits, meeting, "running")
    meeting.expect("running")
    dropped = weakref.ref(pool)
    thread = pool._manager._thread if pool._manager else None
    del pool
    gc.collect()
    assert not future.done()
    meeting.let_go()
    assert future.result(PATIENCE_S).status is Status.SUCCESS
    assert thread is not None
    thread.join(PATIENCE_S)  # it ends by itself, and takes its zygote along: nobody has closed the pool
    gc.collect()
    assert not thread.is_alive()
    assert dropped() is None


def test_a_pool_that_a_done_callback_drops_or_closes_does_not_wait_for_itself(meeting: Meeting) -> None:
    pool = Pool(max_workers=1, limits=Limits(readable=[meeting.folder]))
    closed = threading.Event()
    future = pool.submit(waits, meeting, "running")

    def close(_: object) -> None:
        pool.shutdown()
        closed.set()

    future.add_done_callback(close)
    meeting.let_go()
    assert closed.wait(PATIENCE_S)
    pool.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_of_ours_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch, meeting: Meeting) -> None:
    pool = Pool(max_workers=2, limits=Limits(readable=[meeting.folder]))
    running = pool.submit(waits, meeting, "running")
    meeting.expect("running")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Provider, "acquire", broken)
    with pytest.raises(BrokenPool) as unlucky:  # which the pool may be before it is asked for anything more
        pool.submit(abs, 1).result(PATIENCE_S)
    with pytest.raises(BrokenPool) as waited:
        running.result(PATIENCE_S)
    assert all(isinstance(raised.value.__cause__, RuntimeError) for raised in (unlucky, waited))
    with pytest.raises(BrokenPool):
        pool.submit(abs, 1)
    pool.shutdown()


# --- descriptors ---


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def test_no_descriptor_of_a_pool_reaches_the_programs_that_its_caller_starts() -> None:
    before = descriptors()
    with Pool(max_workers=2) as pool:
        pool.submit(abs, 1).result()
        new = [fd for fd in descriptors() - before if os.path.exists(f"/proc/self/fd/{fd}")]
        assert len(new) > 5
        assert [os.readlink(f"/proc/self/fd/{fd}") for fd in new if not fcntl.fcntl(fd, fcntl.F_GETFD)] == []


def test_the_number_of_descriptors_does_not_grow_with_the_calls() -> None:
    def leaves_a_file() -> None:
        with open("left", "w") as file:
            file.write("so that the sandbox is made anew")

    with Pool(max_workers=1) as pool:
        pool.submit(leaves_a_file).result()
        before = len(descriptors())
        for _ in range(8):
            assert pool.submit(leaves_a_file).result().ok
        assert len(descriptors()) <= before + 2  # one more sandbox may be on its way out


# --- the end of the caller ---


def test_an_interpreter_that_exits_without_closing_its_pool_leaves_nothing(tmp_path: Path, meeting: Meeting) -> None:
    text = """
pool = Pool(2)
futures = [pool.submit(hang, meeting, limits=limits) for _ in range(3)]
sys.stdin.readline()
"""
    with start(tmp_path, meeting, text) as script:
        meeting.expect("ready", "ready")
        with Watch(descendants(script.pid)) as watch:
            assert len(watch.pids) >= 7  # a zygote, and for each agent a keeper and a daemon
            script.say("go on")
            assert script.end() == (0, "", "")
            watch.wait_gone()


def test_a_thread_that_waits_for_a_call_gets_it_before_the_interpreter_exits(tmp_path: Path, meeting: Meeting) -> None:
    text = """
import threading
pool = Pool(1)
future = pool.submit(abs, -5)
threading.Thread(target=lambda: print(future.result().value)).start()
"""
    with start(tmp_path, meeting, text) as script:
        assert script.end() == (0, "5\n", "")


@pytest.mark.parametrize("inside", ["with", "map", "global"])
def test_ctrl_c_ends_everything_with_a_keyboard_interrupt(tmp_path: Path, meeting: Meeting, inside: str) -> None:
    text = {
        "with": """
with Pool(2, limits=limits) as pool:
    futures = [pool.submit(hang, meeting) for _ in range(4)]
    futures[0].result()
""",
        "map": """
with Pool(2, limits=limits) as pool:
    for outcome in pool.map(hang, [meeting] * 9):
        pass
""",
        "global": """
pool = Pool(2, limits=limits)
futures = [pool.submit(hang, meeting) for _ in range(4)]
futures[0].result()
""",
    }[inside]
    with start(tmp_path, meeting, text) as script:
        meeting.expect("ready", "ready")
        with Watch(descendants(script.pid)) as watch:
            os.kill(script.pid, signal.SIGINT)
            code, _, stderr = script.end()
            assert code == -signal.SIGINT
            assert "KeyboardInterrupt" in stderr
            assert stderr.count("Traceback") == 1
            watch.wait_gone()


def test_ctrl_c_at_a_terminal_reaches_no_process_but_the_callers(tmp_path: Path, meeting: Meeting) -> None:
    text = """
import os
os.setpgid(0, 0)
with Pool(1, limits=limits) as pool:
    future = pool.submit(hang, meeting)
    try:
        future.result()
    except KeyboardInterrupt:
        print("interrupted", future.done(), flush=True)
        sys.stdin.readline()
        future.cancel()
        print(future.result().status)
"""
    with start(tmp_path, meeting, text) as script:
        meeting.expect("ready")
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does, to the whole group
        script.expect("interrupted False")
        script.say("go on")
        script.expect("cancelled")
        assert script.end()[0] == 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_caller_that_is_killed_takes_its_sandboxes_with_it(tmp_path: Path, meeting: Meeting, signum: int) -> None:
    text = """
pool = Pool(2, limits=limits)
pool.submit(hang, meeting)
pool.submit(hang, meeting).result()
"""
    with start(tmp_path, meeting, text) as script:
        meeting.expect("ready", "ready")
        with Watch(descendants(script.pid)) as watch:
            assert len(watch.pids) >= 7
            os.kill(script.pid, signum)
            watch.wait_gone()
            assert script.end()[0] == -signum


def test_a_caller_that_becomes_another_program_leaves_nothing(tmp_path: Path, meeting: Meeting) -> None:
    text = """
import os
pool = Pool(1, limits=limits)
pool.submit(hang, meeting)
sys.stdin.readline()
os.execvp("cat", ["cat"])
"""
    with start(tmp_path, meeting, text) as script:
        meeting.expect("ready")
        with Watch(descendants(script.pid)) as watch:
            script.say("go on")
            watch.wait_gone()
            script.say("still here")
            script.expect("still here")


def test_a_caller_that_is_killed_before_it_read_all_takes_its_sandboxes_with_it(
    tmp_path: Path, meeting: Meeting
) -> None:
    """Where the keeper is no init: it must kill by itself, though its channel ends with an error."""
    text = """
import time
from sandbox_exec.containment import Cgroups, ladder

def hang_and_tell(meeting):
    import os
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.5)  # in which the keeper, who counts in place of a cgroup, reports twice
        meeting.announce("later")
        while True:
            signal.pause()
    meeting.announce("ready")
    signal.pause()

ladder.find = lambda: Cgroups()
pool = Pool(1, limits=limits, containment="subreaper")
pool.submit(hang_and_tell, meeting).result()
"""
    with start(tmp_path, meeting, text) as script:
        meeting.expect("ready")
        with Watch(descendants(script.pid)) as watch:
            os.kill(script.pid, signal.SIGSTOP)
            meeting.expect("later")
            os.kill(script.pid, signal.SIGKILL)
            watch.wait_gone()


# --- forks of the caller ---


def test_a_forked_child_that_exits_does_not_disturb_its_parents_calls(tmp_path: Path, meeting: Meeting) -> None:
    text = """
import os
def waits(meeting):
    meeting.announce("waiting")
    meeting.wait()
    return "undisturbed"
with Pool(1, limits=limits) as pool:
    future = pool.submit(waits, meeting)
    sys.stdin.readline()
    if os.fork() == 0:
        sys.exit(0)  # with all that is done at exit
    _, status = os.wait()
    print("child", status, flush=True)
    print(future.result().value, flush=True)
    print(pool.submit(abs, -1).result().value)
"""
    with start(tmp_path, meeting, text) as script:
        meeting.expect("waiting")
        script.say("fork")
        script.expect("child 0")
        meeting.let_go()
        script.expect("undisturbed")
        script.expect("1")
        assert script.end()[0] == 0


def test_a_forked_child_can_use_the_pool_itself(tmp_path: Path, meeting: Meeting) -> None:
    text = """
import os
def waits(meeting):
    meeting.announce("waiting")
    meeting.wait()
    return "the parent's"
pool = Pool(1, limits=limits)
future = pool.submit(waits, meeting)
sys.stdin.readline()
if os.fork() == 0:
    print(pool.submit(abs, -7).result().value, flush=True)
    pool.shutdown()
    os._exit(0)
os.wait()
print("waited", flush=True)
print(future.result().value, flush=True)
print(pool.submit(abs, -8).result().value, flush=True)
"""
    with start(tmp_path, meeting, text) as script:
        meeting.expect("waiting")
        script.say("fork")
        script.expect("7")
        script.expect("waited")
        meeting.let_go()
        script.expect("the parent's")
        script.expect("8")
        assert script.end()[0] == 0


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not(tmp_path: Path, meeting: Meeting) -> None:
    text = """
import os, threading
pool = Pool(1)
held, go_on = threading.Event(), threading.Event()
def submit_slowly():
    with pool._lock:
        held.set()
        go_on.wait()
thread = threading.Thread(target=submit_slowly)
thread.start()
held.wait()
if os.fork() == 0:
    print(pool.submit(abs, -7).result().value, flush=True)
    pool.shutdown()
    os._exit(0)
os.wait()
go_on.set()
thread.join()
print(pool.submit(abs, -8).result().value, flush=True)
"""
    with start(tmp_path, meeting, text) as script:
        script.expect("7")
        script.expect("8")
        assert script.end()[0] == 0


def test_sandboxes_die_with_their_caller_though_a_forked_child_of_it_lives_on(tmp_path: Path, meeting: Meeting) -> None:
    text = """
import os
pool = Pool(2, limits=limits)
futures = [pool.submit(hang, meeting) for _ in range(2)]
sys.stdin.readline()
child = os.fork()
if child == 0:
    sys.stdin.readline()
    os._exit(0)
print(child, flush=True)
futures[0].result()
"""
    with start(tmp_path, meeting, text) as script:
        meeting.expect("ready", "ready")
        with Watch(descendants(script.pid)) as sandboxes:
            script.say("fork")
            with Watch([int(script.hear())]) as child:
                os.kill(script.pid, signal.SIGKILL)
                sandboxes.wait_gone()
                assert child.is_alive(child.pids[0])
                script.say("go on")
                child.wait_gone()


def test_a_child_that_is_forked_at_any_moment_holds_none_of_our_sockets(tmp_path: Path, meeting: Meeting) -> None:
    text = """
import os, threading
from sandbox_exec.sandbox import zygote

def sockets():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return {name for name in found if name.startswith("socket:")}

booting, go_on = threading.Event(), threading.Event()
boot = zygote.Zygote._boot
def wait_in_boot(self, *args):
    booting.set()
    go_on.wait()
    boot(self, *args)

pool = Pool(1)
before = sockets()
zygote.Zygote._boot = wait_in_boot
future = pool.submit(abs, -3)
booting.wait()
if os.fork() == 0:
    print(sorted(sockets() - before), flush=True)
    os._exit(0)
os.wait()
go_on.set()
print(future.result().value)
"""
    with start(tmp_path, meeting, text) as script:
        script.expect("[]")
        script.expect("3")
        assert script.end()[0] == 0
