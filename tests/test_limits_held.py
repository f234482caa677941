"""Each limit against an agent that goes beyond it, and the slot against what one trial could leave to the next.

The ceilings here are the kernel's (cgroups), as on the strongest rungs; what the keeper watches in their place is
in tests/hostile.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support import PATIENCE_S, Meeting

from sandbox_exec import Blame, Command, Limits, Pool, Rung, SandboxUnavailable, Status
from sandbox_exec.containment import Cgroups, Containment, require
from sandbox_exec.guest import context

MIB = 1 << 20
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no agent loads this module, and pytest with it


def held_by_cgroup(name: str) -> Callable[[Any], Any]:
    """For what only a cgroup holds: on a machine without, there is nothing to test."""
    from sandbox_exec.containment.cgroups import find

    return pytest.mark.skipif(name not in find().homes, reason=f"no {name} controller here: see sandbox-exec doctor")


# --- memory ---


@held_by_cgroup("memory")
def test_an_agent_at_its_memory_ceiling_is_ended_for_it(pool: Pool) -> None:
    def agent() -> None:
        held = []
        while True:
            held.append(bytearray(MIB))

    outcome = pool.submit(agent, limits=Limits(memory="64MiB")).result(PATIENCE_S)
    assert (outcome.status, outcome.blame) == (Status.MEMORY_EXCEEDED, Blame.AGENT)
    assert outcome.kill is not None
    assert outcome.kill.reason == "memory"
    assert outcome.usage.peak_memory_bytes is not None
    assert 60 * MIB < outcome.usage.peak_memory_bytes <= 64 * MIB


@held_by_cgroup("memory")
def test_the_ceiling_is_the_cause_though_it_was_a_child_that_was_killed_and_the_agent_returned(pool: Pool) -> None:
    def agent() -> str:
        child = os.fork()
        if child == 0:
            held = []
            while True:
                held.append(bytearray(MIB))
        os.waitpid(child, 0)
        return "nothing happened"

    outcome = pool.submit(agent, limits=Limits(memory="64MiB")).result(PATIENCE_S)
    assert outcome.status is Status.MEMORY_EXCEEDED


@held_by_cgroup("memory")
def test_a_command_whose_child_ran_out_of_memory_is_not_saved_by_its_exit_code(pool: Pool) -> None:
    hog = f"{sys.executable} -c 'x = bytearray(200 << 20)'; exit 0"
    outcome = pool.submit(Command(["sh", "-c", hog]), limits=Limits(memory="64MiB")).result(PATIENCE_S)
    assert outcome.status is Status.MEMORY_EXCEEDED


@held_by_cgroup("memory")
def test_the_ceiling_counts_all_processes_together(pool: Pool) -> None:
    def agent() -> None:
        for _ in range(4):
            if os.fork() == 0:
                held = bytearray(24 * MIB)
                signal.pause()
                del held
        signal.pause()

    assert pool.submit(agent, limits=Limits(memory="64MiB")).result(PATIENCE_S).status is Status.MEMORY_EXCEEDED


@held_by_cgroup("memory")
def test_what_an_agent_writes_to_its_places_counts_as_its_memory(pool: Pool) -> None:
    def agent() -> None:
        with open("/tmp/large", "wb") as file:
            for _ in range(200):
                file.write(bytes(MIB))

    limits = Limits(memory="64MiB", disk="256MiB")
    assert pool.submit(agent, limits=limits).result(PATIENCE_S).status is Status.MEMORY_EXCEEDED


def test_an_agent_below_its_ceiling_is_left_alone_also_after_one_that_was_not(one_slot: Pool) -> None:
    def agent(size: int) -> int:
        return len(bytearray(size))

    limits = Limits(memory="64MiB")
    for _ in range(3):
        assert one_slot.submit(agent, 40 * MIB, limits=limits).result(PATIENCE_S).unwrap() == 40 * MIB
        assert not one_slot.submit(agent, 400 * MIB, limits=limits).result(PATIENCE_S).ok


def test_the_ceiling_of_a_slot_can_rise_and_fall(one_slot: Pool) -> None:
    def agent(size: int) -> int:
        return len(bytearray(size))

    for memory, size, fits in (("32MiB", 60, False), ("128MiB", 60, True), ("32MiB", 60, False), (None, 200, True)):
        outcome = one_slot.submit(agent, size * MIB, limits=Limits(memory=memory)).result(PATIENCE_S)
        assert outcome.ok is fits, (memory, size, outcome)


def test_an_address_space_that_was_asked_for_is_a_memory_error_in_the_agent(pool: Pool) -> None:
    def agent() -> str:
        try:
            bytearray(512 * MIB)
        except MemoryError:
            return "refused"
        return "given"

    assert pool.submit(agent, limits=Limits(address_space="256MiB", memory=None)).result().unwrap() == "refused"
    assert pool.submit(agent, limits=Limits(memory=None)).result().unwrap() == "given"


# --- processes ---


def test_an_agent_with_too_many_processes_is_ended_for_it(pool: Pool) -> None:
    def agent() -> None:
        while True:
            try:
                if os.fork() == 0:
                    signal.pause()
            except BlockingIOError:
                signal.pause()

    outcome = pool.submit(agent, limits=Limits(pids=16)).result(PATIENCE_S)
    assert (outcome.status, outcome.blame) == (Status.PIDS_EXCEEDED, Blame.AGENT)
    assert outcome.kill is not None
    assert outcome.kill.reason == "pids"


def test_an_agent_with_as_many_processes_as_it_may_have_is_left_alone(pool: Pool) -> None:
    def agent() -> int:
        read, write = os.pipe()
        for _ in range(7):
            if os.fork() == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
        os.close(write)  # and all seven see the end of it
        for _ in range(7):
            os.wait()
        return 7

    for _ in range(2):
        assert pool.submit(agent, limits=Limits(pids=8)).result(PATIENCE_S).unwrap() == 7


def test_threads_count_as_processes(pool: Pool) -> None:
    def agent() -> None:
        import threading

        never = threading.Event()
        for _ in range(64):
            threading.Thread(target=never.wait, daemon=True).start()

    assert pool.submit(agent, limits=Limits(pids=16)).result(PATIENCE_S).status is Status.PIDS_EXCEEDED


# --- processors ---


@held_by_cgroup("cpu")
def test_a_share_of_the_processors_is_held_by_the_kernel(meeting: Meeting) -> None:
    def waits(meeting: Any) -> None:
        meeting.announce("ready")
        meeting.wait()

    def quota(pool: Pool) -> str:
        assert pool._manager is not None
        cgroups = pool._manager._provider._cgroups
        assert cgroups is not None
        version, home = cgroups.cgroups.homes["cpu"]
        folder = home / cgroups.name / "0"
        if version == 2:
            return (folder / "cpu.max").read_text().strip()
        return (
            f"{(folder / 'cpu.cfs_quota_us').read_text().strip()} {(folder / 'cpu.cfs_period_us').read_text().strip()}"
        )

    with Pool(max_workers=1, limits=Limits(readable=[meeting.folder])) as pool:
        for cpus, held in ((0.25, "25000 100000"), (1.5, "150000 100000"), (None, None)):
            future = pool.submit(waits, meeting, limits=Limits(cpus=cpus, readable=[meeting.folder]))
            meeting.expect("ready")
            assert quota(pool) == held or (held is None and quota(pool).split()[0] in ("-1", "max"))
            meeting.let_go()
            outcome = future.result(PATIENCE_S)
            assert outcome.ok
            assert outcome.isolation is not None
            assert (outcome.isolation.cpu == "none") is (cpus is None)


@held_by_cgroup("cpu")
def test_an_agent_gets_no_more_processor_time_than_its_share(pool: Pool) -> None:
    def agent() -> None:
        while os.times().user < 0.2:
            pass

    usage = pool.submit(agent, limits=Limits(cpus=0.25)).result(PATIENCE_S).usage
    assert usage.cpu_s is not None
    assert usage.cpu_s <= usage.wall_s * 0.25 + 0.05  # one period's worth may be used ahead; load only slows it


# --- files ---


def test_a_file_cannot_grow_beyond_its_limit(pool: Pool) -> None:
    def agent() -> list[Any]:
        with open("large", "wb", 0) as file:
            try:
                while True:
                    file.write(bytes(65536))
            except OSError as error:
                return [error.errno, os.path.getsize("large")]

    assert pool.submit(agent, limits=Limits(file_size=MIB)).result().unwrap() == [errno.EFBIG, MIB]


def test_a_command_that_writes_too_large_a_file_is_ended_for_it(pool: Pool) -> None:
    command = Command(["dd", "if=/dev/zero", "of=large", "bs=64k", "count=64"])
    outcome = pool.submit(command, limits=Limits(file_size=MIB)).result()
    assert (outcome.status, outcome.signal) == (Status.DISK_EXCEEDED, signal.SIGXFSZ)


@pytest.mark.parametrize("place", ["/tmp", "/workspace", "/out", "/dev/shm"])
def test_the_disk_is_full_when_it_is_full_wherever_it_was_written(pool: Pool, place: str) -> None:
    def agent(place: str) -> None:
        with open(f"{place}/large", "wb", 0) as file:
            while True:
                file.write(bytes(65536))

    outcome = pool.submit(agent, place, limits=Limits(disk="2MiB")).result(PATIENCE_S)
    assert (outcome.status, outcome.blame) == (Status.DISK_EXCEEDED, Blame.AGENT)
    assert outcome.error is not None
    assert "No space left" in outcome.error.message


def test_files_are_counted_too(pool: Pool) -> None:
    def agent() -> None:
        for number in range(10_000):
            os.mkdir(f"/tmp/{number}")

    outcome = pool.submit(agent, limits=Limits(files=200)).result(PATIENCE_S)
    assert outcome.status is Status.DISK_EXCEEDED


def test_an_agent_that_copes_with_a_full_disk_has_succeeded(pool: Pool) -> None:
    def agent() -> str:
        try:
            with open("large", "wb", 0) as file:
                while True:
                    file.write(bytes(65536))
        except OSError:
            return "coped"

    assert pool.submit(agent, limits=Limits(disk="2MiB")).result(PATIENCE_S).unwrap() == "coped"


def test_the_room_of_one_trial_is_not_taken_by_the_last(one_slot: Pool) -> None:
    def agent() -> None:
        with open("large", "wb", 0) as file:
            file.write(bytes(3 * MIB))

    for _ in range(3):
        assert one_slot.submit(agent, limits=Limits(disk="4MiB")).result(PATIENCE_S).ok


def test_descriptors_are_limited(pool: Pool) -> None:
    def agent() -> list[int | None]:
        opened = []
        try:
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            return [error.errno, max(opened)]

    assert pool.submit(agent, limits=Limits(open_files=64)).result().unwrap() == [errno.EMFILE, 63]


def test_an_agent_cannot_raise_its_limits(pool: Pool) -> None:
    def agent() -> list[str]:
        refused = []
        for name in ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_CORE"):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            try:
                resource.setrlimit(kind, (hard + 1, hard + 1))
            except (ValueError, OSError):
                refused.append(name)
        return refused

    limits = Limits(open_files=64, file_size=MIB, address_space="1GiB")
    assert len(pool.submit(agent, limits=limits).result().unwrap()) == 4


# --- output ---


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def flood(stream: int, size: int) -> int:
    chunk = b"0123456789abcde\n" * 4096
    written = 0
    while written < size:
        written += os.write(stream, chunk)
    os.write(stream, b"the end")
    return written + 7


LARGE = pytest.mark.skipif("SANDBOX_EXEC_LARGE_TESTS" not in os.environ, reason="10 GB: set it to run this")


@pytest.mark.parametrize(
    ("stream", "size"),
    [(1, 400 * MIB), (2, 400 * MIB), pytest.param(1, 10_000 * MIB, marks=LARGE)],
    ids=["stdout", "stderr", "10 GB"],
)
def test_any_amount_of_output_moves_our_memory_by_little_and_is_counted_exactly(stream: int, size: int) -> None:
    with Pool(max_workers=1, limits=Limits(stdout="64KiB", stderr="64KiB")) as pool:
        pool.submit(flood, stream, MIB).result()  # what is loaded once is loaded
        before = rss_bytes()
        outcome = pool.submit(flood, stream, size).result(PATIENCE_S)
        grown = rss_bytes() - before
    written = outcome.unwrap()
    kept = outcome.stdout if stream == 1 else outcome.stderr
    dropped = outcome.dropped.stdout_bytes if stream == 1 else outcome.dropped.stderr_bytes
    assert grown < 64 * MIB
    assert len(kept) == 64 * 1024
    assert kept.endswith("the end")
    assert len(kept) + dropped == written


def test_a_flooded_trace_keeps_its_beginning_and_counts_the_rest_exactly() -> None:
    def agent() -> int:
        line = b'{"type":"flood","text":"' + b"x" * 1000 + b'"}\n'
        fd = os.open(os.environ["SANDBOX_EXEC_TRACE"], os.O_WRONLY)
        for _ in range(100_000):
            os.write(fd, line)
        return len(line)

    with Pool(max_workers=1, limits=Limits(trace="1MiB")) as pool:
        pool.submit(abs, 1).result()
        before = rss_bytes()
        outcome = pool.submit(agent).result(PATIENCE_S)
        assert rss_bytes() - before < 64 * MIB
    length = outcome.unwrap()
    kept = MIB // length
    assert len(outcome.trace) == kept
    assert outcome.dropped.trace_events == 100_000 - kept
    assert outcome.dropped.trace_bytes == (100_000 - kept) * length
    assert outcome.dropped.trace_torn == 0


def test_a_ceiling_of_output_ends_the_trial(pool: Pool) -> None:
    def agent() -> None:
        while True:
            os.write(1, bytes(65536))

    outcome = pool.submit(agent, limits=Limits(output_ceiling="4MiB")).result(PATIENCE_S)
    assert (outcome.status, outcome.blame) == (Status.OUTPUT_EXCEEDED, Blame.AGENT)
    assert outcome.kill is not None
    assert outcome.kill.reason == "output"
    assert outcome.dropped.stdout_bytes >= 3 * MIB


def test_a_result_that_is_too_large_ends_the_trial(pool: Pool) -> None:
    outcome = pool.submit(lambda: "x" * (2 * MIB), limits=Limits(result="1MiB")).result(PATIENCE_S)
    assert (outcome.status, outcome.value) == (Status.OUTPUT_EXCEEDED, None)


def test_a_daemon_that_holds_every_pipe_open_is_not_waited_for(pool: Pool) -> None:
    def agent() -> str:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    signal.pause()
            os._exit(0)
        os.wait()
        return "done"

    outcome = pool.submit(agent, limits=Limits(timeout_s=None)).result(PATIENCE_S)
    assert outcome.unwrap() == "done"
    assert outcome.kill is not None
    assert outcome.kill.reason == "sweep"


# --- what is required ---


def test_less_than_is_required_is_refused_and_the_error_says_what_to_do() -> None:
    needs_namespaces = Limits(require="namespaces")
    with pytest.raises(SandboxUnavailable, match=r"(?s)require='namespaces'.*subreaper.*to get namespaces: .*sysctl"):
        Pool(containment="subreaper", limits=needs_namespaces)
    with Pool(containment="subreaper", max_workers=1) as pool:
        with pytest.raises(SandboxUnavailable, match="to get namespaces"):
            pool.submit(abs, 1, limits=needs_namespaces)
        assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1
    with Pool(max_workers=1, limits=needs_namespaces) as pool:
        assert pool.submit(abs, -1).result(PATIENCE_S).unwrap() == 1


@pytest.mark.parametrize(
    ("wanted", "rung", "controllers", "missing"),
    [
        ("namespaces", Rung.USER_NAMESPACES, (), ""),
        ("namespaces", Rung.CGROUP, ("memory", "pids"), "user namespaces"),
        ("cgroup", Rung.SUBREAPER, ("memory", "pids"), ""),
        ("cgroup", Rung.ROOT_NAMESPACES, ("memory",), "no cgroup for pids"),
        ("cgroup", Rung.ROOT_NAMESPACES, (), "no cgroup for memory and pids"),
        ("namespaces+cgroup", Rung.ROOT_NAMESPACES, ("memory", "pids", "cpu"), ""),
        ("namespaces+cgroup", Rung.SUBREAPER, (), "; and no cgroup"),
        ("subreaper", Rung.SUBREAPER, (), ""),
        ("subreaper", Rung.PROCESS_GROUP, (), "Linux"),
        ("process-group", Rung.PROCESS_GROUP, (), ""),
        (None, Rung.PROCESS_GROUP, (), ""),
    ],
)
def test_what_meets_a_requirement(wanted: Any, rung: Rung, controllers: tuple[str, ...], missing: str) -> None:
    containment = Containment(rung, Cgroups(homes={name: (1, Path("/nowhere")) for name in controllers}))
    if not missing:
        require(containment, Limits(require=wanted))
        return
    with pytest.raises(SandboxUnavailable, match=missing) as raised:
        require(containment, Limits(require=wanted))
    assert "sandbox-exec doctor" in str(raised.value)


# --- a slot is not shared ---

Marks = Callable[[], None]


def leaves_files() -> None:
    for place in ("/tmp", "/workspace", "/out", "/dev/shm"):
        with open(f"{place}/left", "w") as file:
            file.write("left")
        os.mkdir(f"{place}/left-folder")


def leaves_and_takes_back_a_file() -> None:
    with open("/tmp/taken", "w") as file:
        file.write("x")
    os.unlink("/tmp/taken")
    os.utime("/tmp", (1, 1))


def leaves_system_v_objects() -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.shmget(0x5B0E0001, 4096, 0o1666) >= 0
    assert libc.semget(0x5B0E0002, 1, 0o1666) >= 0
    assert libc.msgget(0x5B0E0003, 0o1666) >= 0


def leaves_a_message_queue() -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o666, None) >= 0


def sends_packets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"x" * 1000)


def resizes_its_pipes() -> None:
    import fcntl

    for fd in (1, 2, 3):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4096)


def makes_its_pipes_fail() -> None:
    for fd in (1, 2, 3):
        os.set_blocking(fd, False)


def writes_a_terminal() -> None:
    import pty

    pty.openpty()


def looks_around() -> dict[str, Any]:
    """All that could tell of a trial before this one."""
    import fcntl

    found: dict[str, Any] = {}
    for place in ("/tmp", "/workspace", "/out", "/dev/shm", "/dev/mqueue", "/in", "/agent"):
        found[place] = sorted(os.listdir(place))
    for place in ("/tmp", "/workspace", "/out", "/dev/shm"):
        found[f"time of {place}"] = os.stat(place).st_mtime > 1000
    for kind in ("shm", "sem", "msg"):
        with open(f"/proc/sysvipc/{kind}") as file:
            found[kind] = len(file.readlines())
    with open("/proc/net/dev") as file:
        found["packets"] = [line.split()[1:] for line in file if line.strip().startswith("lo:")]
    with open("/proc/net/snmp") as file:
        found["connections"] = [line.split()[5:9] for line in file if line.startswith("Tcp: ") and "Active" not in line]
    found["pipes"] = [fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) for fd in (1, 2, 3)]
    found["blocking"] = [os.get_blocking(fd) for fd in (0, 1, 2, 3)]
    found["processes"] = sorted(
        int(name) for name in os.listdir("/proc") if name.isdigit() and name != str(os.getpid())
    )
    found["descriptors"] = sorted(os.listdir("/proc/self/fd"))
    return found


@pytest.mark.parametrize(
    "leaves",
    [
        leaves_files,
        leaves_and_takes_back_a_file,
        leaves_system_v_objects,
        leaves_a_message_queue,
        sends_packets,
        resizes_its_pipes,
        makes_its_pipes_fail,
        writes_a_terminal,
    ],
)
def test_a_trial_sees_nothing_of_the_one_before_it_on_its_slot(leaves: Marks) -> None:
    with Pool(max_workers=1) as pool:
        before = pool.submit(looks_around).result().unwrap()
        for _ in range(2):
            assert pool.submit(leaves).result().unwrap() is None
            assert pool.submit(looks_around).result().unwrap() == before


def test_a_slot_that_was_left_clean_is_used_again() -> None:
    with Pool(max_workers=1) as pool:
        keepers = set()
        for number in range(5):
            assert pool.submit(abs, -number).result().unwrap() == number
            assert pool._manager is not None
            (sandbox,) = pool._manager._provider._sandboxes.values()
            keepers.add(sandbox.keeper_pid)
    assert len(keepers) == 1


def test_traces_of_one_trial_are_not_in_the_next(one_slot: Pool) -> None:
    def writes_and_dies(number: int) -> None:
        context().trace("step", number=number)
        os.write(1, b"torn")
        os.write(int(os.environ.get("NOWHERE", "6")), b'{"torn')
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(5):
        outcome = one_slot.submit(writes_and_dies, number).result()
        assert [event["number"] for event in outcome.trace] == [number]
        assert outcome.stdout == "torn"
        assert outcome.dropped.trace_torn == 1
