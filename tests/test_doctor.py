"""The doctor: what it finds on this machine, and what it says of machines that give less."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from sandbox_exec import doctor
from sandbox_exec.containment import Cgroups, Containment, ladder
from sandbox_exec.contracts import Limits, Rung
from sandbox_exec.doctor import Diagnosis, EngineReport, ask_engine, diagnose
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.pool import Pool
from sandbox_exec.sandbox.provider import chosen

NOWHERE = "unix:///nonexistent/engine.sock"
LIMITS = [
    "memory", "pids", "cpu", "freeze", "disk", "files", "network", "filesystem", "uid", "seccomp", "landlock",
]  # fmt: skip


def grants(containment: Containment) -> None:
    """A probe for a machine that gives everything."""


def refusing(*rungs: Rung) -> ladder.Probe:
    def probe(containment: Containment) -> None:
        if containment.rung in rungs:
            raise SandboxUnavailable(f"no {containment.rung} today")

    return probe


@pytest.fixture
def no_cgroups(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the machine have no cgroup for us, for this reason."""

    def plant(reason: str) -> None:
        why = dict.fromkeys(("v2", "memory", "pids", "cpu"), reason)
        monkeypatch.setattr(ladder, "find", lambda: Cgroups(why=why))

    return plant


# --- this machine ----------------------------------------------------------------------------------


def test_a_pool_takes_what_the_doctor_says_it_will() -> None:
    assert diagnose(docker_host=NOWHERE).chosen is chosen().rung


def test_what_holds_each_limit_is_what_an_outcome_says_held_it() -> None:
    held_by = {limit.name: limit.held_by for limit in diagnose(docker_host=NOWHERE).limits}
    with Pool(max_workers=1, limits=Limits(cpus=1.0)) as pool:
        isolation = pool.submit(os.getpid).result().isolation
    assert isolation is not None
    for name in ("memory", "pids", "cpu", "freeze", "filesystem", "network"):
        assert held_by[name] == getattr(isolation, name), name
    assert held_by["seccomp"] == ("filter" if isolation.seccomp else "none")
    assert held_by["uid"] == ("caller's" if isolation.uid == os.geteuid() else "own")


def test_every_rung_and_every_limit_is_in_the_answer_with_how_it_was_found_out() -> None:
    diagnosis = diagnose(docker_host=NOWHERE)
    assert [rung.rung for rung in diagnosis.rungs] == list(Rung)
    assert [limit.name for limit in diagnosis.limits] == LIMITS
    assert [controller.name for controller in diagnosis.cgroups.controllers] == ["memory", "pids", "cpu"]
    assert all(rung.how_found for rung in diagnosis.rungs)
    assert all(limit.how_found for limit in diagnosis.limits)
    assert all(controller.how_found for controller in diagnosis.cgroups.controllers)
    assert all(rung.available or rung.why_not for rung in diagnosis.rungs)


def test_the_answer_survives_json_and_refuses_what_it_does_not_know() -> None:
    diagnosis = diagnose(grants, docker_host=NOWHERE)
    text = diagnosis.model_dump_json()
    assert Diagnosis.model_validate_json(text) == diagnosis
    with pytest.raises(ValidationError, match="Extra inputs"):
        Diagnosis.model_validate({**json.loads(text), "mood": "good"})
    with pytest.raises(ValidationError, match="frozen"):
        diagnosis.chosen = None


# --- machines that give less -----------------------------------------------------------------------


def test_the_strongest_rung_that_can_be_had_is_chosen() -> None:
    diagnosis = diagnose(refusing(Rung.ROOT_NAMESPACES, Rung.USER_NAMESPACES, Rung.CGROUP), docker_host=NOWHERE)
    assert diagnosis.chosen is Rung.SUBREAPER
    assert [rung.rung for rung in diagnosis.rungs if rung.chosen] == [Rung.SUBREAPER]
    refused = diagnosis.rungs[1]
    assert (refused.available, refused.why_not) == (False, "no user-namespaces today")
    assert refused.how_found == "a trial was tried in it"
    assert "namespaces" in refused.to_get


def test_without_namespaces_the_open_places_are_said_to_be_open() -> None:
    limits = {limit.name: limit for limit in diagnose(refusing(*list(Rung)[:3]), docker_host=NOWHERE).limits}
    assert {name: limits[name].held_by for name in ("disk", "files", "network", "filesystem")} == {
        "disk": "none",
        "files": "none",
        "network": "host",
        "filesystem": "host",
    }
    assert "namespaces" in limits["network"].to_get


def test_a_machine_that_gives_nothing_has_its_reasons_and_no_advice_that_would_not_help() -> None:
    def probe(containment: Containment) -> None:
        raise SandboxUnavailable("the interpreter cannot be started")

    diagnosis = diagnose(probe, docker_host=NOWHERE)
    assert diagnosis.chosen is None
    assert diagnosis.limits == ()
    tried = [rung for rung in diagnosis.rungs if rung.how_found == "a trial was tried in it"]
    assert Rung.PROCESS_GROUP in [rung.rung for rung in tried]
    assert {(rung.why_not, rung.to_get) for rung in tried} == {("the interpreter cannot be started", "")}


def test_a_probe_that_breaks_is_a_reason_and_no_exception() -> None:
    def probe(containment: Containment) -> None:
        if containment.rung.namespaced:
            raise OSError(errno.ENOSPC, "no room\x1b[31m\nat all" + "!" * 1000)

    why_not = diagnose(probe, docker_host=NOWHERE).rungs[1].why_not
    assert why_not.startswith("OSError: [Errno 28] no room?[31m at all!!!")
    assert len(why_not) <= 400


def test_a_warning_for_users_becomes_a_note_once() -> None:
    def probe(containment: Containment) -> None:
        warnings.warn("sys.path has your home", stacklevel=1)
        warnings.warn("unclosed file", ResourceWarning, stacklevel=1)

    assert diagnose(probe, docker_host=NOWHERE).notes == ("sys.path has your home",)


# --- what stands in the way ------------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc in which nothing forbids anything."""
    files = {
        "self/status": "Name:\tx\nCapEff:\t000001ffffffffff\n",
        "self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/kernel/unprivileged_userns_clone": "1\n",
        "sys/user/max_user_namespaces": "96349\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ],
)
def test_the_setting_that_forbids_user_namespaces_is_named(proc: Path, setting: str, value: str, advice: str) -> None:
    (proc / "sys" / setting).write_text(value + "\n")
    diagnosis = diagnose(refusing(Rung.USER_NAMESPACES), docker_host=NOWHERE, proc=proc)
    assert advice in diagnosis.rungs[1].to_get
    assert diagnosis.rungs[1].to_get.count("sysctl") == 1


def test_where_no_setting_forbids_user_namespaces_the_advice_is_general(proc: Path) -> None:
    diagnosis = diagnose(refusing(Rung.USER_NAMESPACES), docker_host=NOWHERE, proc=proc)
    assert "In a container" in diagnosis.rungs[1].to_get


@pytest.mark.skipif(os.geteuid() != 0, reason="to others it is known without a try")
def test_root_without_its_capabilities_is_told_so(proc: Path) -> None:
    (proc / "self/status").write_text("CapEff:\t00000000a80425fb\n")
    diagnosis = diagnose(refusing(Rung.ROOT_NAMESPACES), docker_host=NOWHERE, proc=proc)
    assert "CAP_SYS_ADMIN" in diagnosis.rungs[0].to_get


def test_a_tree_of_cgroups_that_is_read_only_is_told_from_one_that_is_not_ours(
    no_cgroups: Callable[[str], None],
) -> None:
    advice = {}
    for code in (errno.EROFS, errno.EACCES):
        no_cgroups(f"cannot make a cgroup in /sys/fs/cgroup: {os.strerror(code)}")
        diagnosis = diagnose(grants, docker_host=NOWHERE)
        memory = diagnosis.cgroups.controllers[0]
        assert (memory.held_by, memory.how_found) == ("none", "it was tried")
        assert os.strerror(code) in memory.why_not
        advice[code] = memory.to_get
    assert "read-only" in advice[errno.EROFS]
    assert "Delegate=yes" in advice[errno.EACCES]


def test_without_cgroups_ceilings_are_watched_and_it_is_said_how_to_have_them_held(
    no_cgroups: Callable[[str], None],
) -> None:
    no_cgroups("no hierarchy is mounted")
    limits = {limit.name: limit for limit in diagnose(grants, docker_host=NOWHERE).limits}
    assert {name: limits[name].held_by for name in ("memory", "pids", "cpu", "freeze")} == {
        "memory": "watched",
        "pids": "watched",
        "cpu": "none",
        "freeze": "signals",
    }
    assert all(limits[name].to_get for name in ("memory", "pids", "cpu", "freeze"))


def test_a_ceiling_that_cannot_be_set_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ladder, "find", lambda: Cgroups(homes={"cpu": (1, tmp_path)}))  # a folder is no cgroup
    diagnosis = diagnose(grants, docker_host=NOWHERE)
    assert "No such file" in diagnosis.cgroups.failure
    cpu = diagnosis.cgroups.controllers[2]
    assert "setting ceilings failed" in cpu.how_found
    assert list(tmp_path.iterdir()) == []


def test_the_trees_of_cgroups_are_listed_with_their_version(proc: Path) -> None:
    (hierarchy,) = diagnose(grants, docker_host=NOWHERE, proc=proc).cgroups.hierarchies
    assert (hierarchy.version, hierarchy.mount_point) == (2, "/sys/fs/cgroup")


# --- Docker ----------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[bytes | None], str]]:
    """Start something that answers every request with these bytes, or with None never; its address."""
    listener = socket.socket(socket.AF_UNIX)
    threads: list[threading.Thread] = []

    def serve(answer: bytes | None) -> None:
        held = []
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                break
            held.append(connection)
            if answer is not None and connection.recv(65536):  # else: someone knocked and left
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()

    def start(answer: bytes | None) -> str:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        threads.append(threading.Thread(target=serve, args=(answer,)))
        threads[0].start()
        return f"unix://{tmp_path}/s"

    yield start
    if threads:
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        threads[0].join()
    listener.close()


def http(body: object, status: str = "200 OK") -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + data


def test_an_engine_that_answers_is_shown_with_its_versions(engine: Callable[[bytes | None], str]) -> None:
    address = engine(http({"Version": "20.10.24", "ApiVersion": "1.41"}))
    report = ask_engine(address)
    assert report == EngineReport(
        state="answers",
        address=address,
        version="20.10.24",
        api_version="1.41",
        how_found="the engine was asked for its version",
    )


def test_an_engine_that_is_too_old_is_told_from_none(engine: Callable[[bytes | None], str]) -> None:
    report = ask_engine(engine(http({"Version": "1.6.2", "ApiVersion": "1.18"})))
    assert report.state == "too-old"
    assert report.to_get


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        http([]),
        http({}),
        http({"ApiVersion": 7, "Version": 7}),
        http({"ApiVersion": "seven"}),
        http({"ApiVersion": "1.41"}),
        http({"message": "a page of its own"}, "500 Internal Server Error"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\xff\xfe",
    ],
    ids=["ssh", "nothing", "a list", "empty", "numbers", "words", "half", "a fault", "bytes"],
)
def test_what_answers_badly_is_odd_and_no_exception(answer: bytes, engine: Callable[[bytes | None], str]) -> None:
    report = ask_engine(engine(answer))
    assert report.state == "odd"
    assert report.why_not
    assert "DOCKER_HOST" in report.to_get


def test_what_an_engine_says_of_itself_cannot_move_the_cursor(engine: Callable[[bytes | None], str]) -> None:
    report = ask_engine(engine(http({"Version": "\x1b[2J" + "9" * 1000, "ApiVersion": "1.41"})))
    assert report.version == "?[2J" + "9" * 33 + "..."


def test_an_engine_that_never_answers_is_given_up(engine: Callable[[bytes | None], str]) -> None:
    report = ask_engine(engine(None), timeout_s=0.1)
    assert (report.state, report.why_not) == ("silent", "it did not answer within 0.1 s")


def test_an_engine_is_given_up_though_the_client_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def from_env(**_: object) -> None:
        entered.set()
        leave.wait()
        left.set()

    monkeypatch.setattr("docker.from_env", from_env)
    report = ask_engine("ssh://far.example", timeout_s=0.1)
    assert entered.is_set()
    assert not left.is_set()
    assert report.state == "silent"
    leave.set()
    assert left.wait(10)


def test_without_a_socket_there_is_no_engine() -> None:
    report = ask_engine(NOWHERE)
    assert (report.state, report.why_not) == ("absent", "there is no such socket")


def test_a_socket_that_nobody_listens_on_is_no_engine(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "s"))
        report = ask_engine(f"unix://{tmp_path}/s")
    assert (report.state, report.why_not) == ("absent", "nobody listens there")


def test_an_engine_that_is_not_for_this_user_is_denied(engine: Callable[[bytes | None], str], tmp_path: Path) -> None:
    address = engine(http({"Version": "20.10.24", "ApiVersion": "1.41"}))
    assert ask_engine(address).state == "answers"
    (tmp_path / "s").chmod(0)
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)  # root may use any socket
    try:
        report = ask_engine(address)
    finally:
        os.seteuid(uid)
    assert report.state == "denied"
    assert "group" in report.to_get


def test_an_address_that_is_none_is_odd() -> None:
    assert ask_engine("carrier-pigeon://roof").state == "odd"


@pytest.mark.parametrize(
    ("variable", "address"), [(NOWHERE, NOWHERE), ("", doctor.DEFAULT_ENGINE), (None, doctor.DEFAULT_ENGINE)]
)
def test_the_engine_is_the_one_that_docker_host_names_or_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, address: str
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    if variable is not None:
        monkeypatch.setenv("DOCKER_HOST", variable)
    assert ask_engine().address == address
