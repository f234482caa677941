"""What is in the images of an experiment, without running them: programs, and files of the grading in any layer."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import tarfile
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

from sandbox_exec import images
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.graders import images_of
from sandbox_exec.preflight.cache import Cache, Kept
from sandbox_exec.preflight.files import Files, Secrets
from sandbox_exec.preflight.findings import Found
from sandbox_exec.preflight.programs import HEAD_BYTES, graders_of, interpreter_in, interpreter_of, program_of
from sandbox_exec.sandbox.owners import name_of
from sandbox_exec.sandbox.reaper import LABEL
from sandbox_exec.units import GIB, MIB, format_bytes

_AT_ONCE: Final = 4  # preflight is beside other work, and a few hide the waiting
_MOST_IMAGE_BYTES: Final = 4 * GIB  # minutes, as the engine sends an image
_MOST_SCRIPT_BYTES: Final = MIB
_MOST_LINKS: Final = 8
_PIECE: Final = 1 << 14  # tarfile moves what is left of one at each read
_ZSTD: Final = b"\x28\xb5\x2f\xfd"  # which Python cannot read before 3.14
_GZIP: Final = b"\x1f\x8b"
_ENGINES_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LINK, _FOLDER = 1 << 27, 1 << 31  # as the engine, which is written in Go, says it


class Image(NamedTuple):
    """An image that is there."""

    id: str
    platform: str
    tools: dict[str, str]  # where it has what smoke needs


class _Need(NamedTuple):
    """A program that an image must have, and who names it."""

    where: str
    word: str
    path: str
    interpreter: tuple[str, ...] | None  # of a file of ours; None: the program is the image's own
    kind: str
    name: str


class Images:
    """All images that a run would use. `there`: those that could be looked at, by their names."""

    def __init__(self, experiment: Experiment, files: Files, cache: Cache, say: Callable[[str], None]) -> None:
        self._experiment, self._files, self._cache, self._say = experiment, files, cache, say
        self.there: dict[str, Image] = {}

    def look(self) -> list[Found]:
        names = sorted(images_of(self._experiment))
        if not names:
            return []
        from sandbox_exec.sandbox import engine  # the SDK takes half a second to load

        try:
            with contextlib.closing(engine.connect()) as client:
                version = client.version()
        except SandboxUnavailable as error:
            return [Found("error", "sandbox.kind", str(error), "then try again; or use sandbox.kind: process")]
        except engine.EngineErrors as error:
            return [Found("error", "sandbox.kind", engine.explain(error), "see the engine's log")]
        engines = f"{version['Os']}/{version['Arch']}"
        self._say(f"images to look at: {len(names)}")
        found: list[Found] = []
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            for name, seen in zip(names, pool.map(lambda name: self._look_at(name, engines), names), strict=True):
                if isinstance(seen, Found):
                    found.append(seen)
                else:
                    self.there[name] = seen[0]
                    found += seen[1]
        return found

    def _look_at(self, name: str, engines: str) -> Found | tuple[Image, tuple[Found, ...]]:
        """The image and what was found in it; or why it could not be looked at."""
        from sandbox_exec.sandbox import engine

        lines: list[str] = []
        try:
            image_id = images.resolve([name], say=lines.append)[name]
            if image_id is None:
                what = lines[-1] if lines else f"{name} is not there"
                todo = "build it (sandbox-exec images build), or pull it (docker pull)"
                return Found("error", "", what, todo, "image", name)
            with contextlib.closing(engine.connect()) as client:
                seen = self._look_into(client, name, client.inspect_image(image_id), engines)
        except SandboxUnavailable as error:
            return Found("error", "", str(error), "then try again", "image", name)
        except engine.EngineErrors as error:
            return Found("error", "", engine.explain(error), "see the engine's log", "image", name)
        except tarfile.TarError as error:
            what = f"what the engine says is in it cannot be read: {error}"
            return Found("error", "", what, "build or pull it again", "image", name)
        self._say(f"image {name}: looked at")
        return seen

    def _look_into(
        self, client: Any, name: str, about: dict[str, Any], engines: str
    ) -> tuple[Image, tuple[Found, ...]]:
        env = dict(line.partition("=")[::2] for line in (about.get("Config") or {}).get("Env") or ())
        path = env.get("PATH") or _ENGINES_PATH
        platform = f"{about['Os']}/{about['Architecture']}"
        needs = self._needs(name, path)
        inputs = {
            "part": "image",
            "image": about["Id"],
            "engine": engines,
            "needs": needs,
            "assets": self._files.secrets.digest,
            "public": sorted(self._files.public),
            "artifacts": {variant_id: manifest.platform for variant_id, (manifest, _) in self._files.artifacts.items()},
            "user": self._experiment.sandbox.user,
        }
        kept = self._cache.get(inputs)
        if kept is None:
            with contextlib.closing(_Inside(client, about["Id"])) as inside:
                found = [*self._platforms(name, platform, engines)]
                for need in needs:
                    if why := self._lack(inside, need):
                        todo = "put it into the image, or name one that is there"
                        found.append(Found("error", need.where, f"in {name}: {why}", todo, need.kind, need.name))
                found += self._leftovers(client, name, about, inside)
                tools = {tool: file.name for tool in ("sh", "true") if (file := inside.find(tool, path))}
            kept = Kept(tuple(found), tools)
            self._cache.put(inputs, kept)
        return Image(about["Id"], platform, kept.tools), kept.found

    def _needs(self, image: str, path: str) -> list[_Need]:
        """The programs that commands name, of those that run in this image."""
        experiment, base = self._experiment, str(self._experiment.base)
        named, grading = experiment.sandbox.image, experiment.grading
        found: dict[_Need, None] = {}
        if any((task.image or named) == image for task in experiment.tasks):
            for variant in experiment.variants:
                own, of = variant.env.get("PATH") or path, ("variant", variant.id)
                if variant.agent.command is not None:
                    word, file = program_of(variant.agent.command, base)
                    found[_Need("agent.command", word, own, interpreter_of(file) if file else None, *of)] = None
                elif (artifact := self._files.artifacts.get(variant.id)) is not None:
                    found[_Need("agent.artifact", "", own, artifact[1], *of)] = None
        for task, grader in graders_of(experiment):
            if grader.command is not None and ((grading and grading.image) or task.image or named) == image:
                word, file = program_of(grader.command, base, grader.assets)
                interpreter = interpreter_of(file) if file else None
                found[_Need("grading.command", word, path, interpreter, "task", task.id)] = None
        return list(found)

    def _lack(self, inside: _Inside, need: _Need) -> str:
        """What the image does not have of what a program needs."""
        interpreter = need.interpreter
        if interpreter is None:
            file = inside.find(need.word, need.path)
            if file is None:
                return f"there is no program {need.word!r}"
            if not file.mode & (0o001 if self._experiment.sandbox.user is None else 0o111):
                return f"{need.word!r} is not executable for who runs it"
            interpreter = interpreter_in(inside.head(file))
        for word in interpreter:
            if inside.find(word, need.path) is None:
                begins = f"{need.word or 'the entrypoint'} begins with #!{' '.join(interpreter)}"
                return f"{begins}, and {word!r} is not there"
        return ""

    def _platforms(self, name: str, images: str, engines: str) -> Iterator[Found]:
        if images != engines:
            what = f"it is for {images}, and the engine is {engines}: it is emulated at best"
            yield Found("warning", "", what, "build or pull it for this machine", "image", name)
        for variant_id, (manifest, _) in self._files.artifacts.items():
            if manifest.platform not in ("any", images):
                what = f"the artifact is for {manifest.platform}, and image {name} is {images}"
                yield Found("error", "agent.artifact", what, "freeze a build for the image", "variant", variant_id)

    def _leftovers(self, client: Any, name: str, about: dict[str, Any], inside: _Inside) -> Iterator[Found]:
        secrets, size = self._files.secrets, format_bytes(about["Size"])
        if not secrets:
            return
        matches: list[tuple[str, str, str]] = []
        why = ""
        if about["Size"] > _MOST_IMAGE_BYTES:
            why = f"it has {size}: too many to look for files of the grading in its layers"
        else:
            self._say(f"image {name}: looking through {size} for files of the grading")
            try:
                matches += _search_layers(iter(client.get_image(about["Id"], _PIECE)), secrets)
            except tarfile.TarError as error:
                matches, why = [], f"its layers cannot be searched for files of the grading: {error}"
        if why:
            yield Found("warning", "", why, "make sure that none was ever copied into it", "image", name)
        for path, secret, same in matches:
            if same in self._files.public:
                continue
            covered = "" if inside.stat(path) else ", in a layer: a later one removes it, but not from the image"
            if same:
                what, todo = f"{path} is {secret} of the grading{covered}", "build it without that file, in any layer"
                yield Found("error", "", what, todo, "image", name)
            else:
                what, todo = f"{path} has the place of {secret} of the grading{covered}", "make sure that it is another"
                yield Found("warning", "", what, todo, "image", name)


class _File(NamedTuple):
    """A regular file of an image: the name it was asked for by, and where that leads."""

    name: str
    path: str
    mode: int
    size: int


class _Inside:
    """The files of an image, through a container that is never started."""

    def __init__(self, client: Any, image_id: str) -> None:
        self._client = client
        config = client.create_container_config(
            image=image_id,
            command=None,
            entrypoint=["/preflight"],
            labels={f"{LABEL}owner": name_of(os.getpid()), f"{LABEL}run": "preflight"},
            host_config=client.create_host_config(network_mode="none"),
        )
        self._container = str(client.create_container_from_config(config)["Id"])

    def close(self) -> None:
        self._client.remove_container(self._container, v=True, force=True)

    def find(self, word: str, path: str) -> _File | None:
        """A program by its name."""
        names = [word] if word.startswith("/") else [os.path.join("/", top, word) for top in path.split(":")]
        return next(filter(None, map(self.stat, names)), None)

    def stat(self, name: str) -> _File | None:
        """A file, through links; None if there is none."""
        path = name
        for _ in range(_MOST_LINKS):
            about = self._about(path)
            if about is None or about["mode"] & _FOLDER:
                return None
            if not about["mode"] & _LINK:
                return _File(name, path, about["mode"] & 0o7777, about["size"])
            path = about["linkTarget"]
        return None

    def head(self, file: _File) -> bytes:
        """Its first bytes, if it is small enough to be a script."""
        if file.size > _MOST_SCRIPT_BYTES:
            return b""
        chunks, _ = self._client.get_archive(self._container, file.path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as packed:
            member = packed.next()
            content = packed.extractfile(member) if member is not None and member.isreg() else None
            return content.read(HEAD_BYTES) if content is not None else b""

    def _about(self, path: str) -> dict[str, Any] | None:
        client = self._client
        url = f"{client.base_url}/v{client.api_version}/containers/{self._container}/archive"
        answer = client.head(url, params={"path": path}, timeout=client.timeout)
        answer.close()
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        about: dict[str, Any] = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
        return about


def _search_layers(chunks: Iterator[bytes], secrets: Secrets) -> Iterator[tuple[str, str, str]]:
    """Each file of a saved image that is one of the secrets: its path, which it is, and the digest if by content.

    An archive of layers, whatever the engine calls them: what in it is an archive is one.
    """
    stream: Any = types.SimpleNamespace(read=lambda size: next(chunks, b""))  # tarfile asks again for what is missing
    with tarfile.open(fileobj=stream, mode="r|") as saved:
        for member in saved:
            file = saved.extractfile(member) if member.isreg() else None
            if file is None:
                continue
            start = file.peek(512)[:512] if isinstance(file, io.BufferedReader) else b""
            if start.startswith(_ZSTD):
                raise tarfile.ReadError(f"{member.name} is compressed with zstd")
            if start[257:262] == b"ustar" or start.startswith(_GZIP):
                mode: Literal["r|gz", "r|"] = "r|gz" if start.startswith(_GZIP) else "r|"
                with tarfile.open(fileobj=file, mode=mode) as layer:
                    yield from _search_layer(layer, secrets)


def _search_layer(layer: tarfile.TarFile, secrets: Secrets) -> Iterator[tuple[str, str, str]]:
    for member in layer:
        if not member.isreg():
            continue
        path = f"/{member.name.removeprefix('./').lstrip('/')}"
        if member.size in secrets.sizes:
            content = layer.extractfile(member)
            digest = hashlib.file_digest(content, "sha256").hexdigest() if content is not None else ""  # type: ignore[arg-type]
            if name := secrets.by_content.get((member.size, digest)):
                yield path, name, digest
                continue
        parts = path.split("/")
        for at in range(max(1, len(parts) - 8), len(parts) - 1):  # below a folder of the assets' name
            if name := secrets.by_place.get("/".join(parts[at:])):
                yield path, name, ""
                break
