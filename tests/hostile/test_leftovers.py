"""The check that runs after every test would see what it looks for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import leftovers
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
SOON_S = 0.05  # it is known to stay


def test_an_orphan_is_seen_though_it_left_its_session_and_its_parent_ended() -> None:
    before = leftovers.Picture.take()
    script = "sleep 300 >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["setsid", "sh", "-c", script], stdout=subprocess.PIPE, check=True, text=True).stdout)
    try:
        assert [line for line in before.left(SOON_S) if line.startswith(f"process: {pid} sleep")]
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert before.left() == []


def test_a_process_that_is_just_ending_is_waited_for() -> None:
    before = leftovers.Picture.take()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        threading.Timer(0.05, process.stdin.close).start()
        waiter = threading.Thread(target=process.wait)
        waiter.start()
        assert [line for line in before.left() if line.startswith("process")] == []
        waiter.join()


def test_a_folder_a_descriptor_and_a_manager_are_seen() -> None:
    before = leftovers.Picture.take()
    folder = tempfile.mkdtemp(prefix="sandbox-exec-")
    end = threading.Event()
    manager = threading.Thread(target=end.wait, name=leftovers.THREAD)
    manager.start()
    try:
        with open("/dev/full"):
            left = before.left(SOON_S)
    finally:
        end.set()
        manager.join()
        shutil.rmtree(folder)
    assert f"folder: {folder}" in left
    assert [line for line in left if line.startswith("descriptor:") and line.endswith("/dev/full")]
    assert f"thread: {leftovers.THREAD}" in left
    assert before.left() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make them")
def test_a_cgroup_and_a_mount_are_seen(tmp_path: Path) -> None:
    before = leftovers.Picture.take()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    cgroup = leftovers.cgroup_homes()[0] / f"{leftovers.PREFIX}-{os.getpid()}-{namespace}-test"
    cgroup.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        left = before.left(SOON_S)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
        cgroup.rmdir()
    assert f"cgroup: {cgroup}" in left
    assert [line for line in left if line.startswith("mount:") and str(tmp_path) in line]
    assert before.left() == []


def test_a_cgroup_of_a_living_process_of_another_is_not_ours() -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    assert leftovers._is_anothers(f"{leftovers.PREFIX}-{os.getppid()}-{namespace}-0")
    assert not leftovers._is_anothers(f"{leftovers.PREFIX}-{os.getpid()}-{namespace}-0")
    assert not leftovers._is_anothers(f"{leftovers.PREFIX}-{os.getppid()}-{namespace + 1}-0")


CONTAINER = "0123456789ab" * 5


@pytest.mark.parametrize(
    ("path", "is_ours"),
    [
        ("{place}/anything", True),
        ("{place}/sandbox-exec-x/box", True),
        ("{place}/engine-x/data", True),  # of an engine that a test started and has to stop
        ("{place}/engine-x/exec/netns/default", True),
        ("{place}/engine-x/data/overlay2/x/merged", False),
        ("{usual}/sandbox-exec-x/box", True),
        ("{usual}/sandbox-exec-tests-of-another/sandbox-exec-x/box", False),
        ("{usual}/elsewhere", False),
        (f"/var/lib/docker/containers/{CONTAINER}/mounts/shm", False),
        ("/var/lib/sandbox-exec-engine-0123abcd/data", False),
        ("/var/lib/sandbox-exec-engine-0123abcd/data/overlay2/x/merged", False),
        (f"/opt/sandbox-exec/engine/exec/netns/{CONTAINER[:12]}", False),
        (f"/opt/sandbox-exec/engine/data/rootfs/overlayfs/{CONTAINER}", False),
    ],
)
def test_a_mount_is_ours_by_its_place_or_its_name_and_never_a_containers(path: str, is_ours: bool) -> None:
    place = os.path.realpath(tempfile.gettempdir())
    assert leftovers._is_our_mount(path.format(place=place, usual=os.path.dirname(place))) is is_ours


def test_a_scratch_folders_mount_is_anothers_while_that_other_lives() -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    usual = os.path.dirname(os.path.realpath(tempfile.gettempdir()))
    for pid, is_ours in ((os.getppid(), False), (os.getpid(), True), (1 << 30, True)):
        assert leftovers._is_our_mount(f"{usual}/sandbox-exec-docker-{pid}-1-abc-{namespace}-x/box") is is_ours
