"""What preflight finds in images: each finding by an image that is broken in one way, and none in one that is not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine import client
from test_preflight import GRADE, the_one

from containers.runs_in_docker import of_run
from sandbox_exec import artifacts, images
from sandbox_exec.contracts import Experiment
from sandbox_exec.preflight import Finding, Preflight, preflight, smoke
from sandbox_exec.preflight import images as inside

# Holds the grader in its top layer, a reference solution that a later layer removed, and an older grader.
_LEAKY = """FROM {base}
COPY reference /opt/reference
COPY grade.sh /opt/copy.sh
COPY older /srv/grading/grade.sh
COPY tool script /bin/
RUN rm /opt/reference && chmod 644 /bin/tool && chmod 755 /bin/script
"""
_BARE = """FROM {base} AS base
FROM scratch
COPY --from=base /bin/busybox /solve
"""
REFERENCE = "the answer is forty-two, and always was\n"
FOREIGN = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, 22) + bytes(64)  # for s390x


class Images(NamedTuple):
    leaky: str
    bare: str
    foreign: str


@pytest.fixture(scope="module")
def built(busybox_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    word = f"sandbox-exec-tests/preflight-{os.getpid()}"
    names = Images(f"{word}:leaky", f"{word}:bare", f"{word}:foreign")
    files = {
        "reference": REFERENCE,
        "grade.sh": GRADE,
        "older": f"{GRADE}# of last year\n",
        "tool": "",
        "script": "#!/usr/bin/env no-such-interpreter\n",
    }
    for name, dockerfile in ((names.leaky, _LEAKY), (names.bare, _BARE)):
        folder = tmp_path_factory.mktemp("image")
        (folder / "Dockerfile").write_text(dockerfile.format(base=busybox_image))
        for file, text in files.items():
            (folder / file).write_text(text)
        images.build(folder, tag=name)
    with contextlib.closing(client()) as engine:
        _load_foreign(engine, busybox_image, names.foreign)
    yield names
    with contextlib.closing(client()) as engine:
        for name in names:
            engine.remove_image(name)


def _load_foreign(engine: Any, base: str, name: str) -> None:
    """The image again, as it would be for another machine."""
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(b"".join(engine.get_image(base)))) as saved,
        tarfile.open(fileobj=out, mode="w") as made,
    ):
        contents = {member.name: saved.extractfile(member) for member in saved if member.isreg()}
        data = {path: file.read() for path, file in contents.items() if file is not None}
        (manifest,) = json.loads(data["manifest.json"])
        config = json.loads(data[manifest["Config"]])
        data[manifest["Config"]] = json.dumps({**config, "architecture": "s390x"}).encode()
        data["manifest.json"] = json.dumps([{**manifest, "RepoTags": [name]}]).encode()
        for path, content in data.items():
            if path != "repositories":
                info = tarfile.TarInfo(path)
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
    list(engine.load_image(out.getvalue()))


def experiment(base: Path, image: str, **fields: Any) -> Experiment:
    """One task, graded by a script; with a reference, where that is asked for."""
    (base / "grading").mkdir(parents=True, exist_ok=True)
    (base / "grading" / "grade.sh").write_text(GRADE)
    sandbox = {"kind": "docker", "image": image, "memory": "64MiB", "out_limit": "1MiB", **fields.pop("sandbox", {})}
    grading = {"command": ["sh", "grade.sh"], "assets": "grading", **fields.pop("grading", {})}
    given = {
        "tasks": [{"id": "t", "input": 1}],
        "variants": [{"id": "v", "agent": {"command": ["sh", "-c", "exit 1"]}}],
        "design": {"max_concurrency": 4},
        **fields,
    }
    return Experiment(name="test", base=base, sandbox=sandbox, grading=grading, **given)


def agent(*command: str) -> dict[str, Any]:
    return {"variants": [{"id": "v", "agent": {"command": list(command)}}]}


def look(one: Experiment, **more: Any) -> Preflight:
    return preflight(one, **{"runs": one.base, "cache": None, **more})


def look_inside(one: Experiment, **more: Any) -> Preflight:
    """Without trials, which nobody tries while a secret is missing."""
    variants = [variant.model_copy(update={"pass_env": ("NO_SUCH_SECRET",)}) for variant in one.variants]
    return look(one.model_copy(update={"variants": tuple(variants)}), **more)


def start(one: Experiment) -> Preflight:
    """Without grading: of trials, only those that start an image."""
    return look(one.model_copy(update={"grading": None}))


def about(found: Preflight, image: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.place == f"image {image!r}"]


@pytest.mark.parametrize("mode", ["fresh", "same"])
def test_in_a_clean_image_nothing_is_found(mode: str, busybox_image: str, tmp_path: Path) -> None:
    one = experiment(tmp_path / "base", busybox_image, grading={"in": mode})
    found = look(one, cache=tmp_path / "cache")
    assert [finding.place for finding in found.findings] == (["grading.in"] if mode == "same" else [])
    (image,) = (line for line in found.checked if line.startswith("image"))
    assert image.startswith(f"image {busybox_image}: sha256:")
    assert found.checked[-1] == "smoke: start of an image x 1, null agent x 1"
    assert of_run("preflight") == []
    again = look(one, cache=tmp_path / "cache")  # neither the image nor a trial is tried
    assert (again.findings, again.checked) == (found.findings, found.checked)
    assert (found.from_cache, again.from_cache) == (0, 3)


def test_without_an_engine_there_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    found = look(experiment(tmp_path, "x:1"))
    the_one(found.findings, "error", "sandbox.kind", "is not running")


def test_an_image_that_is_not_there(engine: Any, tmp_path: Path) -> None:
    name = "sandbox-exec/no-such-image:1"  # one of ours by its name: never pulled
    the_one(look(experiment(tmp_path, name)).findings, "error", f"image {name!r}", "is not there")


def test_an_image_for_another_machine(built: Images, tmp_path: Path) -> None:
    found = about(look_inside(experiment(tmp_path, built.foreign)), built.foreign)
    assert [finding.level for finding in found if "s390x" in finding.what] == ["warning"]


def test_an_artifact_for_another_machine_than_the_image(busybox_image: str, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "run").write_bytes(FOREIGN)
    (folder / "run").chmod(0o755)
    artifacts.freeze(folder, tmp_path / "agent.tar.gz", entrypoint="run")
    one = experiment(tmp_path, busybox_image, variants=[{"id": "v", "agent": {"artifact": "agent.tar.gz"}}])
    the_one(look(one).findings, "error", "variant 'v': agent.artifact", "is for linux/s390x")


def test_an_artifact_whose_interpreter_the_image_has_not(busybox_image: str, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "run").write_text("#!/usr/bin/env python3\n")
    (folder / "run").chmod(0o755)
    artifacts.freeze(folder, tmp_path / "agent.tar.gz", entrypoint="run")
    one = experiment(tmp_path, busybox_image, variants=[{"id": "v", "agent": {"artifact": "agent.tar.gz"}}])
    the_one(look(one).findings, "error", "variant 'v': agent.artifact", "'python3' is not there")


def test_programs_that_the_image_has_not(built: Images, tmp_path: Path) -> None:
    wrong = {
        "absent": (("no-such-program",), "no program 'no-such-program'"),
        "by path": (("/opt/no-such",), "no program '/opt/no-such'"),
        "locked": (("tool",), "'tool' is not executable"),
        "script": (("script",), "'no-such-interpreter' is not there"),
    }
    variants = [{"id": name, "agent": {"command": list(command)}} for name, (command, _) in wrong.items()]
    right = [{"id": "link", "agent": {"command": ["/usr/bin/env"]}}]  # a link in a folder that is a link
    one = experiment(tmp_path, built.leaky, variants=[*variants, *right], grading={"command": ["no-such-grader"]})
    found = look(one).findings
    for name, (_, words) in wrong.items():
        the_one(found, "error", f"variant {name!r}: agent.command", words)
    the_one(found, "error", "task 't': grading.command", "no program 'no-such-grader'")
    assert not [finding for finding in found if "'link'" in finding.place]


def test_files_of_the_grading_in_any_layer(built: Images, tmp_path: Path) -> None:
    (tmp_path / "ref" / "out").mkdir(parents=True)
    (tmp_path / "ref" / "out" / "answer").write_text(REFERENCE)
    tasks = [{"id": "t", "input": 1, "reference": "ref"}]
    found = about(look(experiment(tmp_path, built.leaky, tasks=tasks)), built.leaky)
    said = {finding.what.partition(" ")[0]: finding for finding in found}
    assert {path: finding.level for path, finding in said.items()} == {
        "/opt/copy.sh": "error",
        "/opt/reference": "error",
        "/srv/grading/grade.sh": "warning",
    }
    assert "a later one removes it" in said["/opt/reference"].what
    assert "a later one" not in said["/opt/copy.sh"].what


def test_what_agents_are_given_may_be_in_the_image_and_only_while_they_are(built: Images, tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "example.sh").write_text(GRADE)
    tasks = [{"id": "t", "input": 1, "workspace": "ws"}]
    one = experiment(tmp_path, built.leaky, tasks=tasks)
    found = look_inside(one, cache=tmp_path / "cache")
    assert [finding.level for finding in about(found, built.leaky)] == ["warning"]
    (tmp_path / "ws" / "example.sh").unlink()
    found = look_inside(one, cache=tmp_path / "cache")
    assert [finding.level for finding in about(found, built.leaky)] == ["error", "warning"]


def test_layers_that_cannot_be_read(busybox_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "_ZSTD", b"")  # which all begin with
    found = look_inside(experiment(tmp_path, busybox_image)).findings
    the_one(found, "warning", f"image {busybox_image!r}", "compressed with zstd")


def test_an_image_that_is_too_large_to_be_searched(
    busybox_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "_MOST_IMAGE_BYTES", 1)
    found = look_inside(experiment(tmp_path, busybox_image)).findings
    the_one(found, "warning", f"image {busybox_image!r}", "too many to look")


def test_an_image_without_a_shell_is_started_and_graded_all_the_same(
    built: Images, busybox_image: str, tmp_path: Path
) -> None:
    one = experiment(tmp_path, built.bare, grading={"image": busybox_image}, **agent("/solve", "true"))
    found = look(one, cache=tmp_path / "cache")
    assert found.findings == ()
    assert found.checked[-1] == "smoke: start of an image x 2, null agent x 1"
    (tmp_path / "grading" / "grade.sh").write_text("""echo '{"score": 1}' >"$SANDBOX_EXEC_GRADE" """)
    again = look(one, cache=tmp_path / "cache")
    the_one(again.findings, "error", "task 't': grading", "does nothing")
    assert again.from_cache == 2  # that both start


def test_an_image_that_cannot_write_and_an_engine_whose_init_is_elsewhere(
    built: Images, busybox_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "_WRITES", ": >/workspace/no-such-folder/file")
    monkeypatch.setattr(smoke, "_INIT", ("/run/no-such-init", "--version"))
    tasks = [{"id": "t", "input": 1}, {"id": "u", "input": 1, "image": busybox_image}]
    (tmp_path / "solve").write_text("")  # which both images have: it is ours
    (tmp_path / "solve").chmod(0o755)
    found = start(experiment(tmp_path, built.bare, tasks=tasks, **agent("solve"))).findings
    the_one(found, "note", f"image {built.bare!r}", "could not be tried")
    the_one(found, "error", f"image {busybox_image!r}", "cannot be written")


def test_a_user_that_the_image_has_not(busybox_image: str, tmp_path: Path) -> None:
    found = start(experiment(tmp_path, busybox_image, sandbox={"user": "no-such-user"})).findings
    the_one(found, "error", f"image {busybox_image!r}", "does not start")


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's graders have that user's own rights")
def test_assets_that_only_their_owner_may_read(busybox_image: str, tmp_path: Path) -> None:
    one = experiment(tmp_path, busybox_image)
    (tmp_path / "grading" / "grade.sh").chmod(0o600)
    the_one(look(one).findings, "error", "grading.assets", "owner only")


def test_a_reference_that_does_not_pass(busybox_image: str, tmp_path: Path) -> None:
    (tmp_path / "ref" / "out").mkdir(parents=True)
    (tmp_path / "ref" / "out" / "wrong-name").write_text(REFERENCE)
    tasks = [{"id": "t", "input": 1, "reference": "ref"}]
    found = look(experiment(tmp_path, busybox_image, tasks=tasks)).findings
    the_one(found, "error", "task 't': reference", "does not pass the reference")
