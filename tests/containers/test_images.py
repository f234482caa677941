"""Images: built on a real engine, untouched while nothing changes, and errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from shell import Done

from sandbox_exec import images
from sandbox_exec.errors import InvalidValue, SandboxUnavailable
from sandbox_exec.images import ImageBuildFailed, Source, base_images, build, is_static, list_images, resolve

NOWHERE = "localhost:1/nowhere:1"  # a registry that refuses at once, with a network or without


@pytest.fixture
def word(engine: Any) -> Iterator[str]:
    """For the names of a test's images, all of which are removed after it: those without a name too."""
    word = f"test-{uuid.uuid4().hex[:12]}"
    yield word
    made = [image for image in engine.images(filters={"label": images.NAME}) if word in image["Labels"][images.NAME]]
    for image in sorted(made, key=lambda image: len(engine.history(image["Id"])), reverse=True):
        engine.remove_image(image["Id"], force=True)  # those above others first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What an image of a few bytes is built of."""
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY data /data\n")
    (folder / ".dockerignore").write_text("notes\n")
    for name in ("data", "notes"):
        (folder / name).write_text(name)
        (folder / name).chmod(0o644)
    return folder


@pytest.fixture
def ours(tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of our only image: `sandbox-exec/WORD:1`."""
    root = tmp_path / "images"
    folder = root / word
    folder.mkdir(parents=True)
    monkeypatch.setattr(images, "_root", lambda: root)
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    return folder


def output(engine: Any, image: str, *command: str) -> str:
    """What a command says in a container of the image."""
    host = engine.create_host_config(network_mode="none", read_only=True)
    container = engine.create_container(image, list(command), user="65534", host_config=host)["Id"]
    try:
        engine.start(container)
        engine.wait(container)
        return str(engine.logs(container).decode())
    finally:
        engine.remove_container(container, force=True)


# --- ours ---


def test_the_busybox_image_gives_an_ordinary_user_a_shell_and_tools(engine: Any, busybox_image: str) -> None:
    assert busybox_image == "sandbox-exec/busybox:1"
    script = "#!/usr/bin/env sh\nid -un; echo a b | wc -w"
    assert output(engine, busybox_image, "sh", "-c", script) == "nobody\n2\n"


def test_the_task_template_builds_on_ours_and_has_its_tool(engine: Any, busybox_image: str, word: str) -> None:
    built = build("task-template", tag=f"{word}:1")
    assert (built.name, built.state) == (f"{word}:1", "built")
    assert output(engine, built.name, "count-lines", "/opt/task/poem.txt") == "3\n"


def test_an_image_of_ours_that_is_missing_below_another_is_built_first(
    engine: Any, ours: Path, folder: Path, word: str
) -> None:
    (folder / "Dockerfile").write_text(f"FROM sandbox-exec/{word}:1\n")
    build(folder, tag=f"{word}-above:1")
    assert {image.name: image.state for image in list_images() if word in image.name} == {
        f"sandbox-exec/{word}:1": "built",
        f"{word}-above:1": "built",
    }


def test_where_no_base_can_be_pulled_the_root_file_system_is_made_here(
    engine: Any, tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "busybox"
    folder.mkdir()
    monkeypatch.setattr(images, "_root", lambda: tmp_path)
    (folder / "Dockerfile").write_text(f"FROM {NOWHERE}\n")
    (folder / "Dockerfile.rootfs").write_text("FROM scratch\nADD rootfs.tar /\n")
    said: list[str] = []
    first = build("busybox", tag=f"{word}:1", say=said.append)
    assert any(f"{NOWHERE} is not there and cannot be pulled" in line for line in said), said
    said.clear()
    assert (build("busybox", tag=f"{word}:1", say=said.append).id, said) == (first.id, [])


def test_our_images_have_the_names_that_experiments_use() -> None:
    found = {source.name for source in images.known()}
    assert found == {"sandbox-exec/busybox:1", "sandbox-exec/python:3.11", "sandbox-exec/task-template:1"}
    assert all((source.folder / "README.md").is_file() for source in images.known())


# --- unchanged means untouched ---


def test_what_is_unchanged_is_not_touched_but_by_force(engine: Any, folder: Path, word: str) -> None:
    said: list[str] = []
    first = build(folder, tag=f"{word}:1", say=said.append)
    made = engine.inspect_image(first.id)
    assert (first.state, made["RepoTags"], bool(said)) == ("built", [f"{word}:1"], True)
    os.utime(folder / "data", (1, 1))
    (folder / "notes").write_text("which .dockerignore leaves out")
    said.clear()
    second = build(folder, tag=f"{word}:1", say=said.append)
    assert (second.state, second.id, second.content, said) == ("unchanged", first.id, first.content, [])
    assert engine.inspect_image(second.name) == made
    forced = build(folder, tag=f"{word}:1", force=True)
    assert (forced.state, forced.content, forced.id != first.id) == ("built", first.content, True)


def test_a_change_builds_it_again_and_keeps_the_old_one_for_runs(engine: Any, folder: Path, word: str) -> None:
    first = build(folder, tag=f"{word}:1")
    (folder / "data").chmod(0o755)
    second = build(folder, tag=f"{word}:1")
    assert (second.state, second.content != first.content) == ("built", True)
    assert engine.inspect_image(f"{word}:1")["Id"] == second.id != first.id
    engine.inspect_image(first.id)  # raises if it is gone


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder: (folder / "data").write_text("other"), id="content"),
        pytest.param(lambda folder: (folder / "data").chmod(0o755), id="mode"),
        pytest.param(lambda folder: (folder / "more").write_text(""), id="another file"),
        pytest.param(lambda folder: (folder / "more").mkdir(), id="a folder"),
        pytest.param(lambda folder: (folder / "more").symlink_to("data"), id="a link"),
        pytest.param(lambda folder: (folder / "data").rename(folder / "dada"), id="a name"),
        pytest.param(lambda folder: (folder / "Dockerfile").write_text("FROM scratch\nCOPY . /\n"), id="Dockerfile"),
    ],
)
def test_every_change_of_the_folder_is_seen(folder: Path, change: Callable[[Path], object]) -> None:
    source = Source("test:1", folder)
    before = source.content("Dockerfile", {"below:1": "sha256:1"})
    assert source.content("Dockerfile", {"below:1": "sha256:1"}) == before
    change(folder)
    assert source.content("Dockerfile", {"below:1": "sha256:1"}) != before


def test_a_change_of_what_the_root_file_system_is_made_of_is_seen(folder: Path) -> None:
    def content(*packages: str) -> str:
        return Source("test:1", folder, images.Debian("bookworm", packages)).content("Dockerfile.rootfs", {})

    (folder / "Dockerfile.rootfs").write_text("FROM scratch\n")
    assert content("python3") == content("python3") != content("python3", "git")


def test_only_a_change_of_the_image_below_builds_it_again(engine: Any, folder: Path, tmp_path: Path, word: str) -> None:
    below = f"localhost:1/{word}:1"
    build(folder, tag=below)
    above = tmp_path / "above"
    above.mkdir()
    (above / "Dockerfile").write_text(f"FROM {below}\n")
    first = build(above, tag=f"{word}-above:1")
    engine.remove_image(below)  # it cannot be pulled again, and need not be
    assert build(above, tag=f"{word}-above:1").id == first.id
    (folder / "data").write_text("other")
    build(folder, tag=below)
    second = build(above, tag=f"{word}-above:1")
    assert (second.state, second.id != first.id) == ("built", True)


# --- what a run starts with ---


def test_a_name_is_resolved_to_what_it_means_now(engine: Any, folder: Path, word: str) -> None:
    built = build(folder, tag=f"{word}:1")
    said: list[str] = []
    missing = [NOWHERE, f"sandbox-exec/{word}:1", "Not Valid", ""]
    assert resolve([f"{word}:1", *missing], say=said.append) == {f"{word}:1": built.id} | dict.fromkeys(missing)
    assert [line for line in said if line.startswith("pulling")] == [f"pulling {NOWHERE}"]
    assert any(line.startswith(f"{NOWHERE} is not there and cannot be pulled: ") for line in said)


# --- the list ---


def test_the_list_says_what_is_missing_built_and_changed(engine: Any, ours: Path, word: str) -> None:
    def state() -> list[tuple[str, str, str]]:
        return [(image.name, image.state, image.id) for image in list_images() if word in image.name]

    name = f"sandbox-exec/{word}:1"
    assert state() == [(name, "missing", "")]
    built = build(word)
    assert state() == [(name, "built", built.id)]
    (ours / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /other\n")
    assert state() == [(name, "changed", built.id)]


def test_an_image_that_others_built_on_ours_is_not_listed(engine: Any, folder: Path, word: str) -> None:
    build(folder, tag=f"{word}:1")
    (folder / "Dockerfile").write_text(f"FROM {word}:1\nCMD again\n")
    list(engine.build(path=str(folder), tag=f"{word}-others:1", rm=True))
    assert engine.inspect_image(f"{word}-others:1")["Config"]["Labels"][images.NAME] == f"{word}:1"
    assert [image.name for image in list_images() if word in image.name] == [f"{word}:1"]


# --- what cannot be built ---


def test_the_end_of_a_failed_build_is_in_the_message_and_there_was_no_network(
    engine: Any, busybox_image: str, folder: Path, word: str
) -> None:
    (folder / "Dockerfile").write_text(f"FROM {busybox_image}\nRUN echo has $(ls /sys/class/net); exit 7\n")
    with pytest.raises(ImageBuildFailed, match=rf"(?s)^cannot build {word}:1 .*\n  has lo\n.*code: 7$"):
        build(folder, tag=f"{word}:1")


@pytest.mark.parametrize("image", [NOWHERE, "localhost:1/nowhere@sha256:" + "0" * 64])
def test_an_image_below_that_cannot_be_had_is_named(engine: Any, folder: Path, image: str, word: str) -> None:
    (folder / "Dockerfile").write_text(f"FROM {image}\n")
    with pytest.raises(ImageBuildFailed, match=f"{image} is not there and cannot be pulled"):
        build(folder, tag=f"{word}:1")


def test_a_dockerfile_that_is_none_is_refused(engine: Any, folder: Path, word: str) -> None:
    (folder / "Dockerfile").write_text("SWIM\n")
    with pytest.raises(ImageBuildFailed, match="unknown instruction: SWIM"):
        build(folder, tag=f"{word}:1")


def test_a_pipe_in_the_folder_is_refused_before_anything_reads_it(engine: Any, folder: Path, word: str) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(InvalidValue, match="pipe is neither a file, a folder nor a link"):
        build(folder, tag=f"{word}:1")


@pytest.mark.parametrize(
    ("image", "fault"),
    [
        ("swimming", r"there is no image 'swimming'; allowed: busybox:1, python:3.11, task-template:1, or a folder"),
        ("python:2.7", r"there is no image 'python:2.7'; allowed: "),
        (Path("busybox"), r"there is no image 'busybox'; allowed: "),
        ("tests", r"there is no Dockerfile in tests"),
    ],
)
def test_a_name_that_nothing_has_is_refused_with_those_that_are_there(
    image: str | Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    with pytest.raises(InvalidValue, match=f"^{fault}"):
        build(image)


@pytest.mark.parametrize(
    ("rootfs", "package"),
    [(images.Busybox(), "busybox-static"), (images.Debian("bookworm", ("python3",)), "debootstrap")],
)
def test_a_missing_tool_is_named_with_the_package_that_has_it(
    rootfs: images.Rootfs, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_path", lambda: str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=rf"apt-get install {package}"), (tmp_path / "tar").open("wb") as file:
        rootfs.write(file, print)


def test_a_busybox_that_needs_libraries_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "busybox").symlink_to(sys.executable)
    monkeypatch.setattr(images, "_path", lambda: str(tmp_path))
    assert not is_static(tmp_path / "busybox")
    with pytest.raises(SandboxUnavailable, match="busybox needs libraries"):
        images.Busybox().made_of()


@pytest.mark.parametrize(
    ("dockerfile", "bases"),
    [
        ("FROM scratch\n", []),
        ("# FROM a\nfrom b:1\nRUN x FROM c\n", ["b:1"]),
        ("FROM --platform=linux/amd64 a AS one\nFROM b as two\nFROM one\nFROM a\n", ["a", "b"]),
        ("ARG TAG=3\nFROM a:$TAG\nFROM b:${TAG}\nFROM c:${OTHER}\n", ["a:3", "b:3"]),
    ],
)
def test_the_images_below_are_those_of_every_from(dockerfile: str, bases: list[str]) -> None:
    assert base_images(dockerfile) == bases


# --- the shell's door ---


@pytest.fixture
def run(call: Callable[..., Done]) -> Callable[..., Done]:
    return partial(call, "images")


def test_without_a_name_all_of_ours_are_built(run: Callable[..., Done], ours: Path, word: str) -> None:
    first = run("build")
    assert (first.code, first.out.split()[0], first.out.split()[2]) == (0, "built", f"sandbox-exec/{word}:1")
    assert "Step 1/" in first.err
    again = run("build", "--json")
    assert (again.code, again.err) == (0, "")
    assert [(row["name"], row["state"]) for row in json.loads(again.out)] == [(f"sandbox-exec/{word}:1", "unchanged")]


def test_a_folder_gives_its_name_to_its_image(run: Callable[..., Done], folder: Path, word: str, engine: Any) -> None:
    named = folder.rename(folder.with_name(f"My_{word}"))
    done = run("build", str(named))
    assert (done.code, done.out.split()[2]) == (0, f"my-{word}:1")


def test_the_list_is_for_people_and_for_programs(run: Callable[..., Done], ours: Path, word: str) -> None:
    lines = [line.split() for line in run("list").out.splitlines()]
    assert [f"sandbox-exec/{word}:1", "missing"] in lines
    rows = json.loads(run("list", "--json").out)
    assert {"name": f"sandbox-exec/{word}:1", "state": "missing", "folder": str(ours)}.items() <= rows[0].items()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("build", "swimming"), 2, "there is no image 'swimming'"),
        (("build", "--tag", "a:1"), 2, "--tag is for one image"),
        (("build", "busybox", "--tag", "My Task"), 2, "'My Task' cannot be the name of an image; allowed: "),
        (("build", "busybox", "--tag", ""), 2, "'' cannot be the name of an image; allowed: "),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    run: Callable[..., Done], arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1)
    assert done.err.startswith(f"sandbox-exec: {message}")


def test_without_an_engine_the_exit_code_is_3_and_the_message_says_where_it_was_sought() -> None:
    command = [sys.executable, "-P", "-m", "sandbox_exec", "images", "build", "busybox"]
    environment = {**os.environ, "DOCKER_HOST": "unix:///nonexistent/engine.sock"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("sandbox-exec: the Docker engine at unix:///nonexistent/engine.sock is not running")


@pytest.mark.parametrize("command", ["build", "list"])
def test_help_has_examples(run: Callable[..., Done], command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    assert re.search(rf"^ +sandbox-exec images {command}", done.out, re.MULTILINE)


def test_the_command_line_does_not_load_the_docker_sdk_before_it_is_needed() -> None:
    code = "import sys; from sandbox_exec import cli, images; sys.exit('docker' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_ctrl_c_ends_a_build_without_a_traceback(
    run: Callable[..., Done], ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(images, "_reading", interrupted)
    done = run("build")
    assert (done.code, done.out) == (130, "")
    assert done.err.splitlines()[-1] == "sandbox-exec: interrupted; an image that was there is as it was"
