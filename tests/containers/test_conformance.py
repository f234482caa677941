"""What every sandbox promises, in one suite for both kinds; and what only a container can be asked for.

Most trials are run beforehand, several at a time, and each test looks at the end of one. Time passes when told to.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import io
import json
import os
import re
import signal
import socket
import tarfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import docker.errors
import pytest
from engine import client

from containers.boxes import LABEL, Box, Kind, Trial, a_box, processes_with
from sandbox_exec.contracts import Limits, Outcome, Status
from sandbox_exec.sandbox import owners

LANES = 4
KINDS: tuple[Kind, ...] = ("process", "docker")
MIB = 1 << 20
FLOOD = 200_000_000
KEPT = 64 << 10
PLACES = ("IN", "WORKSPACE", "AGENT", "OUT", "TRACE", "DEADLINE_S")
CONTRACT = {"PATH", "HOME", "LANG", *(f"SANDBOX_EXEC_{name}" for name in PLACES)}
OUT, TRACE = '"$SANDBOX_EXEC_OUT"', '"$SANDBOX_EXEC_TRACE"'

LOOKS_AROUND = """
about() { echo "== $1"; }
about environment; tr '\\0' '\\n' < /proc/$$/environ
about given; echo "$GIVEN"
about folder; pwd
about status; cat /proc/self/status
about task; cat "$SANDBOX_EXEC_IN/task.json"; echo
about artifact; "$SANDBOX_EXEC_AGENT/bin/agent" one
about workspace; cat given; find . | sort; echo more >> given && echo more > sub/more && echo written
about denied
for place in "$SANDBOX_EXEC_IN" "$SANDBOX_EXEC_AGENT" "$SANDBOX_EXEC_AGENT/bin"; do
    (echo x > "$place/planted") 2>/dev/null && echo "$place"; done
for file in "$SANDBOX_EXEC_IN/task.json" "$SANDBOX_EXEC_AGENT/bin/agent"; do
    (echo x >> "$file") 2>/dev/null && echo "$file"; chmod 777 "$file" 2>/dev/null && echo "$file"; done
about temporary; echo x > /tmp/x && cat /tmp/x
about network; tail -n +3 /proc/net/dev
about end
"""

# Of the issue. Each leaves a process that holds stdout and is deaf to SIGTERM; the first one is in the foreground.
PAYLOAD = f"""
trap '' TERM
sh -c 'trap "" TERM; while :; do sleep 1000; done' MARK-child &
setsid sh -c 'trap "" TERM; while :; do sleep 1000; done' MARK-session &
(setsid sh -c '(trap "" TERM; sh -c "while :; do sleep 1000; done" MARK-daemon &) & exit 0' MARK-parent &)
echo '{{"type": "ready"}}' > {TRACE}
ENDING
"""


class Case(NamedTuple):
    script: str
    limits: Limits = Limits()
    staged: bool = False


def _into(path: str, files: int, kib: int) -> str:
    """One file after the other, until one is refused."""
    return f"cd {path}; i=0; while [ $i -lt {files} ]; do head -c {kib}k /dev/zero > f$i || exit 9; i=$((i+1)); done"


_CALM = Limits(timeout_s=60.0, grace_s=0.2)
_HOG = "x=$(yes | head -c 300000000)"
CASES = {
    "speaks": Case(
        f"""echo to stdout; echo to stderr >&2; echo '{{"type": "said", "n": 1}}' > {TRACE}
        echo '{{"answer": 42}}' > {OUT}/result.json"""
    ),
    "looks around": Case(LOOKS_AROUND, Limits(timeout_s=60.0), staged=True),
    "exits with 3": Case("exit 3"),
    "dies by a signal": Case("kill -USR1 $$"),
    "is cut off": Case(
        f"""echo to stdout; echo to stderr >&2; echo '{{"type": "whole"}}' > {TRACE}; printf '{{"type": "torn' > {TRACE}
        kill -KILL $$"""
    ),
    "floods": Case(f"head -c {FLOOD} /dev/zero", Limits(stdout=KEPT)),
    "leaves a malformed result": Case(f"echo '[1, 2' > {OUT}/result.json"),
    "leaves a list": Case(f"echo '[1, 2]' > {OUT}/result.json"),
    "leaves a link": Case(f"echo '{{}}' > {OUT}/real; ln -s real {OUT}/result.json"),
    "leaves a fifo": Case(f"mkfifo {OUT}/result.json"),
    "leaves a folder": Case(f"mkdir {OUT}/result.json"),
    "leaves too large a result": Case(f"head -c 4096 /dev/zero > {OUT}/result.json", Limits(result=1024)),
    "takes memory": Case(_HOG, Limits(memory="64MiB")),
    "has a child that takes memory": Case(f"({_HOG}); exit 0", Limits(memory="64MiB")),
    # Its own end is so quick that nobody could say what it met: so it stays.
    "takes processes": Case("(while :; do sleep 1000 & done); while :; do :; done", Limits(pids=16)),
    "needs one process": Case("exec echo enough", Limits(pids=1)),
    "fills out": Case(_into(OUT, 40, 1024), Limits(disk="16MiB")),
    "fills the workspace": Case(_into(".", 40, 1024), Limits(disk="16MiB")),
    "fills out with names": Case(_into(OUT, 1000, 0), Limits(files=64)),
    "leaves a sparse giant": Case(
        f"exec dd if=/dev/zero of={OUT}/giant bs=1 count=1 seek=99000000", Limits(file_size=MIB)
    ),
    "talks too much": Case("yes", Limits(output_ceiling=MIB)),
    "asks for more processors than there are": Case("echo ran", Limits(cpus=4096.0)),
}


# --- trials that end by themselves -----------------------------------------------------------------


class Given(NamedTuple):
    """What a trial is filled with."""

    workspace: Path
    agent: Path


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    top = tmp_path_factory.mktemp("given")
    workspace, agent = top / "workspace", top / "agent"
    (workspace / "sub").mkdir(parents=True)
    (workspace / "given").write_text("by the task\n")
    (workspace / "given").chmod(0o600)
    (workspace / "link").symlink_to("given")
    (agent / "bin").mkdir(parents=True)
    (agent / "bin" / "agent").write_text('#!/bin/sh\necho "ran with $1"\n')
    (agent / "bin" / "agent").chmod(0o755)
    for folder in (agent, agent / "bin"):
        folder.chmod(0o755)
    return Given(workspace, agent)


@functools.cache
def _why_no_process_sandbox() -> str:
    from sandbox_exec.sandbox.provider import chosen

    return "" if chosen().rung.namespaced else "no namespaces on this machine: a container promises more"


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "process" and _why_no_process_sandbox():
        pytest.skip(_why_no_process_sandbox())
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def image(kind: Kind, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("busybox_image")) if kind == "docker" else ""


@pytest.fixture(scope="module")
def ran(kind: Kind, image: str, given: Given) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    before = os.umask(0o077)  # what a trial is given can be read, whatever ours is
    with a_box(kind, image, LANES) as box:
        filled: dict[str, Any] = {
            "workspace": given.workspace,
            "agent": given.agent,
            "env": {"GIVEN": "by the variant"},
            "staged": {"in/task.json": b'{"id": 7}'},
        }
        launches = {
            name: box.launch(case.script, limits=case.limits, **(filled if case.staged else {}))
            for name, case in CASES.items()
        }
        for name, trial in box.run_all(launches):
            assert trial.ended is not None, (name, trial.refused)
            found[name] = trial.ended
    os.umask(before)
    return found


@pytest.fixture
def box(kind: Kind, image: str) -> Iterator[Box]:
    with a_box(kind, image) as made:
        yield made
    if kind == "docker":
        assert_no_container_is_left()


def assert_no_container_is_left() -> None:
    asked = client()
    try:
        label = f"{LABEL}owner={owners.name_of(os.getpid())}"
        assert asked.containers(all=True, filters={"label": label}) == []
    finally:
        asked.close()


def test_what_an_agent_says_arrives(ran: dict[str, Outcome]) -> None:
    found = ran["speaks"]
    assert (found.status, found.exit_code, found.signal) == (Status.SUCCESS, 0, None)
    assert (found.stdout, found.stderr, found.value) == ("to stdout\n", "to stderr\n", {"answer": 42})
    assert [(event["type"], event["n"]) for event in found.trace] == [("said", 1)]
    assert found.kill is None
    assert found.isolation is not None
    assert (found.isolation.filesystem, found.isolation.network, found.isolation.disk) == ("private", "none", "tmpfs")


def test_what_it_used_is_measured(ran: dict[str, Outcome]) -> None:
    found = ran["floods"].usage
    assert found.cpu_s is not None
    assert found.cpu_s > 0
    assert found.peak_memory_bytes is not None
    assert 0 < found.peak_memory_bytes < 512 * MIB


def test_an_exit_code_is_told(ran: dict[str, Outcome]) -> None:
    found = ran["exits with 3"]
    assert (found.status, found.exit_code, found.signal) == (Status.AGENT_ERROR, 3, None)


def test_a_death_by_a_signal_is_told(ran: dict[str, Outcome]) -> None:
    found = ran["dies by a signal"]
    assert (found.status, found.exit_code, found.signal) == (Status.AGENT_ERROR, None, signal.SIGUSR1)


def test_what_was_written_before_a_sudden_end_is_there(ran: dict[str, Outcome]) -> None:
    found = ran["is cut off"]
    assert (found.status, found.signal) == (Status.AGENT_ERROR, signal.SIGKILL)
    assert (found.stdout, found.stderr) == ("to stdout\n", "to stderr\n")
    assert [event["type"] for event in found.trace] == ["whole"]
    assert found.dropped.trace_torn == 1


def test_a_flood_is_read_to_its_end_and_its_tail_is_kept(ran: dict[str, Outcome]) -> None:
    found = ran["floods"]
    assert (found.status, len(found.stdout), found.dropped.stdout_bytes) == (Status.SUCCESS, KEPT, FLOOD - KEPT)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("leaves a malformed result", "not a JSON object"),
        ("leaves a list", "not a JSON object"),
        ("leaves a link", "result.json cannot be read"),
        ("leaves a fifo", "not a regular file"),
        ("leaves a folder", "not a regular file"),
        ("leaves too large a result", "4096 bytes; 1024 are allowed"),
    ],
)
def test_a_result_that_is_no_object_in_a_regular_file_is_malformed(
    ran: dict[str, Outcome], name: str, words: str
) -> None:
    found = ran[name]
    assert (found.status, found.exit_code, found.value) == (Status.AGENT_ERROR, 0, None)
    assert found.error is not None
    assert found.error.type == "MalformedResult"
    assert words in found.error.message


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("takes memory", Status.MEMORY_EXCEEDED),
        ("has a child that takes memory", Status.MEMORY_EXCEEDED),
        ("takes processes", Status.PIDS_EXCEEDED),
        ("fills out", Status.DISK_EXCEEDED),
        ("fills the workspace", Status.DISK_EXCEEDED),
        ("fills out with names", Status.DISK_EXCEEDED),
        ("leaves a sparse giant", Status.DISK_EXCEEDED),
        ("talks too much", Status.OUTPUT_EXCEEDED),
    ],
)
def test_a_ceiling_is_held_and_named(ran: dict[str, Outcome], name: str, status: Status) -> None:
    assert ran[name].status is status


def test_the_memory_of_a_trial_stays_under_its_ceiling(ran: dict[str, Outcome]) -> None:
    peak = ran["takes memory"].usage.peak_memory_bytes
    assert peak is not None
    assert 32 * MIB < peak <= 64 * MIB


def test_one_process_is_enough_for_an_agent_that_forks_none(ran: dict[str, Outcome]) -> None:
    assert (ran["needs one process"].status, ran["needs one process"].stdout) == (Status.SUCCESS, "enough\n")


def test_more_processors_than_there_are_is_all_that_there_are(ran: dict[str, Outcome]) -> None:
    assert ran["asks for more processors than there are"].stdout == "ran\n"


# --- what an agent sees ---


@pytest.fixture(scope="module")
def seen(ran: dict[str, Outcome]) -> dict[str, str]:
    """What the agent says that it sees, by heading."""
    found = ran["looks around"]
    assert (found.status, found.stderr) == (Status.SUCCESS, ""), found
    return dict(re.findall(r"^== (\w+)\n(.*?)(?=^== )", found.stdout, re.MULTILINE | re.DOTALL))


def test_the_environment_has_the_names_of_the_contract_and_no_others(kind: Kind, seen: dict[str, str]) -> None:
    names = {line.partition("=")[0] for line in seen["environment"].splitlines()}
    own = {"HOSTNAME"} if kind == "docker" else set()  # which the engine gives to every container
    by_shell = {"PWD", "SHLVL", "OLDPWD", "_"}
    assert names - by_shell == CONTRACT | own | {"GIVEN"}
    assert seen["given"] == "by the variant\n"


def test_the_agent_is_in_its_workspace_which_is_filled_and_its_own(seen: dict[str, str]) -> None:
    assert seen["folder"] == "/workspace\n"
    assert seen["workspace"] == "by the task\n.\n./given\n./link\n./sub\nwritten\n"
    assert seen["temporary"] == "x\n"


def test_the_agent_reads_its_task_and_its_artifact_and_can_write_neither(seen: dict[str, str]) -> None:
    assert json.loads(seen["task"]) == {"id": 7}
    assert seen["artifact"] == "ran with one\n"
    assert seen["denied"] == ""


def test_the_agent_has_no_rights_and_can_gain_none(seen: dict[str, str], ran: dict[str, Outcome]) -> None:
    status = dict(line.split(":\t", 1) for line in seen["status"].splitlines())
    uids, gids = ({int(number) for number in status[name].split()} for name in ("Uid", "Gid"))
    isolation = ran["looks around"].isolation
    assert isolation is not None
    assert uids == {isolation.uid}
    assert 0 not in uids | gids
    assert {status[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_the_agent_has_no_network_but_its_own_loopback(seen: dict[str, str]) -> None:
    assert [line.split(":")[0].strip() for line in seen["network"].splitlines()] in ([], ["lo"])


def test_nothing_of_the_host_can_be_reached(box: Box) -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        addresses = ["127.0.0.1", "172.17.0.1", *_own_addresses()]
        tries = "; ".join(f"nc {address} {port} < /dev/null && echo reached" for address in addresses)
        found = box.run(f"command -v nc > /dev/null || exit 0; ({tries}) 2> /dev/null; exit 0")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert (found.status, found.stdout) == (Status.SUCCESS, "")


def _own_addresses() -> list[str]:
    import psutil

    return [one.address for all_of in psutil.net_if_addrs().values() for one in all_of if one.family == socket.AF_INET]


@pytest.mark.parametrize("what", ["missing", "too large"])
def test_a_workspace_that_cannot_be_filled_is_a_fault_of_the_setup(box: Box, tmp_path: Path, what: str) -> None:
    workspace = tmp_path / "workspace"
    if what == "too large":
        workspace.mkdir()
        (workspace / "large").write_bytes(bytes(8 * MIB))
    trial = box.start(box.launch("true", workspace=workspace, limits=Limits(disk="4MiB")))
    box.until(lambda: trial.ended or trial.refused, "it is refused")
    said = trial.refused.setup if trial.refused else trial.ended and trial.ended.error and trial.ended.error.message
    box.finish(trial)
    assert "the sandbox cannot be filled" in (said or "")
    assert box.run("true").status is Status.SUCCESS


def test_a_command_that_is_not_there_never_counts_as_success(box: Box) -> None:
    found = box.run(("no-such-command",))
    assert (found.status, found.exit_code) == (Status.SETUP_FAILED, 127)


def test_an_agent_that_says_that_it_was_not_there_is_not_believed(box: Box) -> None:
    found = box.run(("sh", "-c", "exit 127"))
    assert (found.status, found.exit_code) == (Status.AGENT_ERROR, 127)


# --- time, freezing, stopping ----------------------------------------------------------------------

READY = f"""echo '{{"type": "ready"}}' > {TRACE}"""
COUNTS = f"{READY}; while :; do echo >> {OUT}/count; done"


def test_a_decent_agent_ends_at_its_deadline_and_what_it_flushes_is_there(box: Box) -> None:
    script = f"""trap 'echo flushed; echo "{{}}" > {OUT}/result.json; exit 0' TERM; echo before; {READY}
        while :; do sleep 1000 & wait; done"""
    trial = box.start(box.launch(script, limits=Limits(timeout_s=5.0, grace_s=1000.0)))
    trial.hear("ready")
    box.manual.advance(5.0)
    found = trial.outcome()
    box.finish(trial)
    assert (found.status, found.stdout, found.value) == (Status.TASK_TIMEOUT, "before\nflushed\n", {})
    assert found.kill is not None
    assert (found.kill.reason, found.kill.grace_used) == ("deadline", True)


def test_an_agent_that_ignores_the_end_of_its_time_is_killed_after_the_grace(box: Box) -> None:
    trial = box.start(box.launch(f"trap '' TERM; echo before; {COUNTS}", limits=Limits(timeout_s=5.0, grace_s=1.0)))
    trial.hear("ready")
    box.manual.advance(5.0)
    listener = trial.listener()
    box.until(lambda: listener.due_s == box.manual.now_s() + 1.0, "the grace begins")
    count = _count(trial)
    box.until(lambda: _count(trial) > count, "it goes on in its grace")
    box.manual.advance(1.0)
    found = trial.outcome()
    box.finish(trial)
    assert (found.status, found.stdout) == (Status.TASK_TIMEOUT, "before\n")
    assert found.kill is not None
    assert (found.kill.reason, found.kill.grace_used) == ("deadline", True)
    assert "pid namespace" in found.kill.proof


def test_the_time_of_an_agent_runs_from_its_start(box: Box) -> None:
    trial = box.start(box.launch(f"{READY}; sleep 1000", limits=Limits(timeout_s=5.0)))
    box.manual.advance(100.0)  # what it takes to make a sandbox
    trial.hear("ready")
    assert trial.listener().due_s == box.manual.now_s() + 5.0
    trial.listener().stop()
    assert trial.outcome().status is Status.CANCELLED
    box.finish(trial)


@pytest.mark.parametrize("when", ["at once", "when it runs", "when it has ended", "when it is frozen"])
def test_a_trial_can_be_stopped_at_any_time(box: Box, when: str) -> None:
    script = "echo over" if when == "when it has ended" else f"trap '' TERM; {READY}; while :; do sleep 1000; done"
    trial = box.start(box.launch(script))
    listener = trial.listener()
    if when == "when it has ended":
        trial.outcome()
    elif when != "at once":
        trial.hear("ready")
    if when == "when it is frozen":
        listener.freeze()
    listener.stop()
    found = trial.outcome()
    box.finish(trial)
    if when == "when it has ended":
        assert (found.status, found.stdout, found.kill) == (Status.SUCCESS, "over\n", None)
    else:
        assert found.status is Status.CANCELLED
        assert found.kill is not None
        assert "pid namespace" in found.kill.proof
    assert box.run("echo next").stdout == "next\n"


@pytest.mark.parametrize("when", ["when it runs", "at once"])
def test_a_frozen_trial_stands_still_and_so_does_its_time(box: Box, kind: Kind, image: str, when: str) -> None:
    trial = box.start(box.launch(COUNTS, limits=Limits(timeout_s=5.0, disk="64MiB")))
    listener = trial.listener()
    if when == "when it runs":
        trial.hear("ready")
        box.until(lambda: _count(trial) > 100, "it counts")
        box.manual.advance(3.0)
    listener.freeze()
    if when == "at once":  # the engine may still have to start it: then it is frozen as soon as it has
        with a_box(kind, image) as other:
            assert other.run("echo meanwhile").stdout == "meanwhile\n"
        box.until(lambda: listener.is_started, "it has been started")
    sandbox = trial.sandbox
    box.until(lambda: sandbox is not None and sandbox.keeper_pidfd >= 0, "its first process is known")
    count, cpu_s = _count(trial), _cpu_s(trial)
    with a_box(kind, image) as other:  # as long as another trial takes
        assert other.run("head -c 1000000 /dev/zero > /dev/null; echo beside").stdout == "beside\n"
    box.manual.advance(10_000.0)
    box.loop.run_once(0)
    assert (trial.ended, listener.due_s, _count(trial), _cpu_s(trial)) == (None, None, count, cpu_s)
    listener.thaw()
    assert listener.due_s == box.manual.now_s() + (2.0 if when == "when it runs" else 5.0)
    box.until(lambda: _count(trial) > count, "it goes on")
    box.manual.advance(5.0)
    box.until(lambda: listener.due_s != box.manual.now_s(), "the deadline comes")
    box.manual.advance(5.0)
    found = trial.outcome()
    box.finish(trial)
    assert found.status is Status.TASK_TIMEOUT
    assert found.usage.wall_s < 100.0


def _count(trial: Trial) -> int:
    assert trial.sandbox is not None
    return len(trial.sandbox.read_file("out/count", 1 << 30) or b"")


def _cpu_s(trial: Trial) -> float:
    """What the kernel says of all the trial's processes: by the pid namespace that they are in."""
    import psutil

    assert trial.sandbox is not None
    with open(f"/proc/self/fdinfo/{trial.sandbox.keeper_pidfd}") as file:
        pid = int(dict(line.split(":\t") for line in file.read().splitlines())["Pid"])
    below = [child for child in psutil.Process(pid).children(recursive=True) if child.name() != "sx-keeper"]
    return sum(sum(child.cpu_times()[:2]) for child in below)


# --- nothing is left -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["while :; do sleep 1000; done", "exit 0", "kill -KILL $$"])
def test_of_the_payload_all_is_gone_before_anybody_hears_of_the_end(box: Box, ending: str) -> None:
    """Foreground, child, child in its own session, daemon; stdout inherited, SIGTERM ignored."""
    mark, left = f"mark{uuid.uuid4().hex}", list[list[str]]()
    stays = ending.startswith("while")
    script = PAYLOAD.replace("ENDING", ending).replace("MARK", mark)
    trial = box.start(
        box.launch(("sh", "-c", script, f"{mark}-main"), limits=Limits(timeout_s=5.0, grace_s=1.0)),
        at_end=lambda _: left.append(processes_with(mark)),
    )
    if stays:
        trial.hear("ready")
        for part in ("main", "child", "session", "daemon"):
            box.until(functools.partial(processes_with, f"{mark}-{part}"), f"there is a {part}")
        box.manual.advance(5.0)
        listener = trial.listener()
        box.until(lambda: listener.due_s == box.manual.now_s() + 1.0, "the grace begins")
        for part in ("main", "child", "session", "daemon"):
            assert processes_with(f"{mark}-{part}"), "SIGTERM is ignored"
        box.manual.advance(1.0)
    found = trial.outcome()
    box.finish(trial)
    assert left == [[]]
    expected = {"exit 0": Status.SUCCESS, "kill -KILL $$": Status.AGENT_ERROR}.get(ending, Status.TASK_TIMEOUT)
    assert found.status is expected
    assert [event["type"] for event in found.trace] == ["ready"]


def test_what_a_trial_opened_is_closed_and_not_left_to_the_garbage_collector(box: Box) -> None:
    gc.collect()
    gc.disable()
    try:
        box.run("true")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            gc.collect()
    finally:
        gc.enable()
    assert [str(one.message) for one in found] == []


# --- what only a container can be asked for --------------------------------------------------------


class Images(NamedTuple):
    """Small ones on top of the small one, for the session."""

    odd: str  # with an entrypoint, a command, a health check, volumes, an environment and a user of its own
    bare: str  # nothing but one static binary: no shell, no /etc, no /tmp


_ODD = """FROM {base}
COPY passwd /etc/passwd
COPY group /etc/group
ENV OF_THE_IMAGE=1 HOME=/nowhere SANDBOX_EXEC_OUT=/nowhere
VOLUME /data /in /agent /out/ /tmp
HEALTHCHECK --interval=1s --retries=1 CMD ["touch", "/out/checked"]
USER nobody
WORKDIR /nowhere
STOPSIGNAL SIGWINCH
ENTRYPOINT ["/bin/false"]
CMD ["of the image"]
"""
_BARE = """FROM {base} AS base
FROM scratch
COPY --from=base /bin/busybox /busybox-agent
"""


@pytest.fixture(scope="module")
def images(busybox_image: str) -> Iterator[Images]:
    word = f"test-{uuid.uuid4().hex[:12]}"
    users = {"passwd": "root:x:0:0::/:\nsolver:x:1234:4321::/:\n", "group": "root:x:0:\nsolvers:x:4321:\n"}
    made = {
        f"{word}:odd": {"Dockerfile": _ODD.format(base=busybox_image), **users},
        f"{word}:bare": {"Dockerfile": _BARE.format(base=busybox_image)},
    }
    try:
        with contextlib.closing(client()) as asked:
            for name, files in made.items():
                said = asked.build(fileobj=_tar(files), custom_context=True, tag=name, rm=True, network_mode="none")
                assert b"Successfully built" in b"".join(said), name
        yield Images(*made)
    finally:
        with contextlib.closing(client()) as asked:
            for name in made:
                with contextlib.suppress(docker.errors.ImageNotFound):
                    asked.remove_image(name, force=True)


def _tar(files: Mapping[str, str]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    stream.seek(0)
    return stream


@pytest.fixture
def containers(busybox_image: str) -> Iterator[Box]:
    with a_box("docker", busybox_image, LANES) as made:
        yield made
    assert_no_container_is_left()


WHO = "id -u; id -g; echo mine > /out/x && echo mine >> given && ls -ln /out/x | tr -s ' ' | cut -d ' ' -f 3"


@pytest.mark.parametrize(
    ("user", "uid", "gid"),
    [("0", 0, 0), ("root", 0, 0), ("4000", 4000, 4000), ("4000:5000", 4000, 5000), ("solver", 1234, 4321)],
)
def test_the_agent_is_the_user_that_was_named_and_its_places_are_its_own(
    containers: Box, images: Images, given: Given, user: str, uid: int, gid: int
) -> None:
    script = f"{WHO}; grep -E '^(Cap|NoNew|Secc)' /proc/self/status; mknod /out/device b 8 0; mount -t tmpfs x /mnt"
    found = containers.run(script, image=images.odd, user=user, workspace=given.workspace)
    lines = found.stdout.splitlines()
    assert lines[:3] == [str(uid), str(gid), str(uid)], found
    rights = dict(line.split(":\t") for line in lines[3:])
    assert {value for name, value in rights.items() if name.startswith("Cap")} == {"0" * 16}
    assert (rights["NoNewPrivs"], rights["Seccomp"]) == ("1", "2")
    assert found.exit_code != 0  # of mount
    assert "mknod: /out/device: Operation not permitted" in found.stderr


def test_a_read_only_root_can_be_written_nowhere_but_in_the_places(containers: Box, images: Images) -> None:
    script = """for path in / /bin /etc /run /dev /in /agent /tmp /workspace /out /dev/shm; do
        (echo x > $path/planted) 2> /dev/null && echo $path; done; exit 0"""
    found = containers.run(script, image=images.odd, user="0", read_only=True)
    assert set(found.stdout.split()) == {"/dev", "/dev/shm", "/tmp", "/workspace", "/out"}
    assert found.isolation is not None
    assert found.isolation.notes == ()


def test_of_an_image_its_files_and_environment_count_and_nothing_that_it_would_run(
    containers: Box, images: Images, given: Given
) -> None:
    script = """echo $OF_THE_IMAGE $HOME $SANDBOX_EXEC_OUT $(pwd) $(id -u); cat /in/task.json /agent/bin/agent
        for place in /data /tmp /out; do df -P $place | tail -n 1 | awk '{ print $1, $2 }'; done
        echo x > /data/x && ls /data /out"""
    trial = containers.start(
        containers.launch(
            script, image=images.odd, agent=given.agent, staged={"in/task.json": b"{}\n"}, limits=Limits(disk="8MiB")
        )
    )
    trial.listener()
    (container,) = own_containers()
    found = trial.outcome()
    containers.finish(trial)
    assert (found.status, found.stderr) == (Status.SUCCESS, "")
    lines = found.stdout.splitlines()
    assert found.isolation is not None
    assert lines[0] == f"1 /tmp /out /workspace {found.isolation.uid}"
    assert lines[1:4] == ["{}", "#!/bin/sh", 'echo "ran with $1"']
    assert lines[4:7] == ["tmpfs 8192"] * 3, "a size that holds"
    assert lines[7:] == ["/data:", "x", "", "/out:"]
    assert container["Config"]["Healthcheck"]["Test"] == ["NONE"]
    assert container["Mounts"] == [mount for mount in container["Mounts"] if mount["Type"] != "volume"]


def own_containers() -> list[dict[str, Any]]:
    asked = client()
    try:
        label = f"{LABEL}owner={owners.name_of(os.getpid())}"
        found = asked.containers(all=True, filters={"label": label})
        return [asked.inspect_container(one["Id"]) for one in found]
    finally:
        asked.close()


def test_an_image_needs_no_shell_and_nothing_else(containers: Box, images: Images) -> None:
    launches = {
        "speaks": containers.launch(("/busybox-agent", "echo", "hello"), image=images.bare, read_only=True),
        "traces": containers.launch(
            ("/busybox-agent", "sh", "-c", "/busybox-agent echo '{\"n\": 1}' > $SANDBOX_EXEC_TRACE"), image=images.bare
        ),
        "is deaf": containers.launch(
            ("/busybox-agent", "sh", "-c", "trap '' TERM; echo up; while :; do /busybox-agent sleep 1000; done"),
            image=images.bare,
            limits=Limits(timeout_s=0.0001, grace_s=0.0),
        ),
    }
    found: dict[str, Outcome] = {}
    containers.manual.advance(1.0)
    for name, launch in launches.items():
        trial = containers.start(launch)
        if name == "is deaf":
            listener = trial.listener()
            containers.until(lambda: listener.is_started, "it has been started")  # noqa: B023 - not called later
            containers.manual.advance(1.0)
        found[name] = trial.outcome()
        containers.finish(trial)
    assert found["speaks"].stdout == "hello\n"
    assert [event["n"] for event in found["traces"].trace] == [1]
    assert found["is deaf"].status is Status.TASK_TIMEOUT


def test_what_is_written_to_the_root_beyond_the_limit_ends_the_trial(containers: Box) -> None:
    """Watched, not held: it takes as long as from one look to the next."""
    script = f"i=0; while [ $i -lt 8 ]; do head -c 1m /dev/zero > /f$i; i=$((i+1)); done; {READY}; sleep 1000"
    trial = containers.start(containers.launch(script, user="0", limits=Limits(disk="4MiB")))
    trial.hear("ready")
    found = trial.outcome()
    containers.finish(trial)
    assert found.status is Status.DISK_EXCEEDED
    assert found.kill is not None
    assert found.kill.reason == "disk"


@pytest.mark.parametrize("how", ["in bytes", "in names", "where no path leads"])
def test_where_nothing_can_be_mounted_the_size_of_the_places_is_watched(
    containers: Box, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As for an ordinary user who may use the engine."""

    def mount(*_: object) -> None:
        raise PermissionError(errno.EPERM, "mount")

    monkeypatch.setattr("sandbox_exec.sandbox.container.kernel.mount", mount)
    fills = {
        "in bytes": f"{_into('/out', 8, 1024)}",
        "in names": f"{_into('/workspace', 100, 0)}",
        "where no path leads": f"""name=$(printf %0250d 0); cd /out; i=0
            while [ $i -lt 20 ]; do mkdir $name; cd $name; i=$((i+1)); done; {_into(".", 8, 1024)}""",
    }
    limits = Limits(disk="4MiB", files=64)
    trial = containers.start(containers.launch(f"{fills[how]}; {READY}; sleep 1000", limits=limits))
    found = trial.outcome()
    containers.finish(trial)
    assert found.isolation is not None
    assert (found.status, found.isolation.disk) == (Status.DISK_EXCEEDED, "watched")


def test_a_container_is_known_by_its_labels_and_holds_what_was_asked_for(containers: Box) -> None:
    limits = Limits(memory="32MiB", pids=7, cpus=0.5, open_files=99, timeout_s=100.0, grace_s=1.0)
    labels = {"run": "r", "trial": "t.1", "attempt": "2"}
    before_s = time.time()
    trial = containers.start(containers.launch(f"{READY}; sleep 1000", limits=limits, labels=labels))
    trial.hear("ready")
    (found,) = own_containers()
    trial.listener().stop()
    trial.outcome()
    containers.finish(trial)
    assert {f"{LABEL}{name}": value for name, value in labels.items()}.items() <= found["Config"]["Labels"].items()
    assert before_s + 101 < float(found["Config"]["Labels"][f"{LABEL}deadline"]) < time.time() + 300
    host = found["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (32 * MIB, 32 * MIB, 8)  # one for its init
    assert (host["NanoCpus"], host["Init"], host["LogConfig"]["Type"]) == (500_000_000, True, "none")
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
    assert (host["NetworkMode"], host["Privileged"], host["CapAdd"]) == ("none", False, None)
    ulimits = {one["Name"]: (one["Soft"], one["Hard"]) for one in host["Ulimits"]}
    assert (ulimits["nofile"], ulimits["core"]) == ((99, 99), (0, 0))
    assert trial.sandbox is not None
    assert {"resolve", "stage", "create", "attach", "start", "remove"} <= set(trial.sandbox.steps_s)


def test_an_image_that_is_not_there_is_a_fault_of_the_setup(containers: Box) -> None:
    trial = containers.start(containers.launch("true", image="sandbox-exec/no-such-image:1"))
    containers.until(lambda: trial.refused, "it is refused")
    assert trial.refused is not None
    assert (trial.refused.fault, "sandbox-exec/no-such-image:1" in trial.refused.setup) == ("", True)
    containers.finish(trial)
