"""Docker images: ours, and those that tasks bring. Built through the engine's API, cached by content.

An image is a folder. Its `Dockerfile` begins with other images: those of ours are built first, others are pulled if
the engine does not have them. A folder of ours may have a `Dockerfile.rootfs` as well or instead: it begins with
nothing and unpacks `rootfs.tar`, which is made here of what the machine has, and needs no registry.

All that goes into a build is hashed into a label of the image: the files that are sent, their modes, the ids of the
images below, what the root file system is made of. The same hash means the same image, and nothing is done. Not seen by
it: what `RUN` fetches, images named only in `COPY --from`, newer packages of Debian's; `force` builds again. An image
that is built again keeps the old one without a name, since a run may still use it by its id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Final, Literal

from pydantic import Field

from sandbox_exec.contracts import Contract
from sandbox_exec.errors import InvalidValue, SandboxExecError, SandboxUnavailable

PREFIX: Final = "sandbox-exec/"
CONTENT: Final = "sandbox-exec.content"  # label: the hash of what the image was built of
NAME: Final = "sandbox-exec.image"  # label: whose hash that is; an image that is built on ours inherits both
BASES: Final = "sandbox-exec.bases"  # label: the images below, and their ids when it was built
RECIPE: Final = 1  # raised when the same inputs are to give another image
DOCKERFILE: Final = "Dockerfile"
ROOTFS_DOCKERFILE: Final = "Dockerfile.rootfs"
ROOTFS_TAR: Final = "rootfs.tar"
BUILD_S: Final = 3600.0  # that a step of a build may be silent
_REFERENCE: Final = re.compile(r"[a-z0-9]+([._:/-]+[a-z0-9]+)*:\w[\w.-]{0,127}", re.ASCII)
_TAIL: Final = 15  # lines of what failed, in a message
_MORE_PLACES: Final = ("/bin", "/usr/sbin", "/sbin")  # where the tools are that a user's PATH may not have

Say = Callable[[str], None]


class ImageBuildFailed(SandboxExecError):
    """The engine could not build an image, or could not get the one below it; the message ends with what it said."""


class Built(Contract):
    """An image that is there now."""

    name: str
    id: str = Field(description="The engine's: the digest of the image's configuration.")
    content: str = Field(description="The hash of what it was built of.")
    state: Literal["built", "unchanged"] = Field(description="unchanged: it was there and was not touched.")
    wall_s: float = Field(ge=0)


class ImageReport(Contract):
    """An image of ours, or one that was built by us."""

    name: str
    state: Literal["built", "changed", "missing"] = Field(description="changed: its folder or base is not as it was.")
    id: str = ""
    size_bytes: int = Field(default=0, ge=0)
    folder: str = Field(default="", description="What it is built of; known of our own images only.")


def build(
    image: str | Path,
    *,
    tag: str | None = None,
    network: str = "none",
    force: bool = False,
    say: Say = lambda line: None,
) -> Built:
    """Build an image of ours, by its name, or that of a folder with a Dockerfile; unchanged means untouched.

    `tag` names the image; the default for a folder is its own name with `:1`. `network` is for `RUN`. `say` gets
    lines of progress. Raises `InvalidValue`, `SandboxUnavailable` or `ImageBuildFailed`. Two builds of one image at
    once both build it; the last one has the name.
    """
    source = _find(image, tag)
    with _engine() as engine:
        return _Builder(engine, network, say).build(source, force=force)


def resolve(names: Iterable[str], *, say: Say = lambda line: None) -> dict[str, str | None]:
    """Return the id of each image, pulled if it is not there; None for one that cannot be had: `say` gets the reason.

    Ours are never pulled: in a registry, their names may be anybody's. Raises `SandboxUnavailable` without an engine.
    """
    found: dict[str, str | None] = {}
    with _engine() as engine:
        builder = _Builder(engine, "none", say)
        for name in names:
            try:
                found[name] = builder.id_of(name)
            except (_NoBase, ImageBuildFailed) as error:
                say(str(error))
                found[name] = None
    return found


def list_images() -> list[ImageReport]:
    """Our images, built or not, and after them what else was built by us."""
    ours = known()
    with _engine() as engine:
        with _asking():
            found = engine.images(filters={"label": [CONTENT, NAME]})
        reports = [_report(source, engine) for source in ours]
    names = {source.name for source in ours}
    others = [image for image in found if image["Labels"][NAME] in (image["RepoTags"] or ())]
    return reports + [
        ImageReport(name=name, state="built", id=image["Id"], size_bytes=image["Size"])
        for image in sorted(others, key=lambda image: str(image["Labels"][NAME]))
        if (name := image["Labels"][NAME]) not in names
    ]


def known() -> list[Source]:
    """Our own images, in the order of their names."""
    root, rootfs = _root(), {"busybox": Busybox(), "python/3.11": Debian("bookworm", ("python3",))}
    folders = {path.parent for name in (DOCKERFILE, ROOTFS_DOCKERFILE) for path in root.rglob(name)}
    below = sorted(folder.relative_to(root) for folder in folders)
    return [Source(_name(path), root / path, rootfs.get(path.as_posix())) for path in below]


def _root() -> Path:
    """In a wheel beside this file; in a checkout at its root."""
    package = Path(__file__).parent
    return packed if (packed := package / "_images").is_dir() else package.parent / "images"


def _name(below: Path) -> str:
    """`python/3.11` is `sandbox-exec/python:3.11`; `busybox` is `sandbox-exec/busybox:1`."""
    name, tag = (*below.parts, "1")[:2]
    return f"{PREFIX}{name}:{tag}"


def _find(image: str | Path, tag: str | None) -> Source:
    ours = known()
    if isinstance(image, str):
        matching = [source for source in ours if image.removeprefix(PREFIX) in source.short_names]
        if len(matching) > 1:
            raise InvalidValue(f"{image!r} can be {' or '.join(source.name for source in matching)}: say which")
        if matching:
            return matching[0].named(tag)
    folder = Path(image)
    for source in ours:
        if folder.is_dir() and folder.samefile(source.folder):
            return source.named(tag)
    if (folder / DOCKERFILE).is_file():
        return Source(_derived(folder), folder).named(tag)
    if folder.is_dir():
        raise InvalidValue(f"there is no {DOCKERFILE} in {folder}")
    allowed = ", ".join(source.name.removeprefix(PREFIX) for source in ours)
    raise InvalidValue(f"there is no image {str(image)!r}; allowed: {allowed}, or a folder with a {DOCKERFILE}")


def _derived(folder: Path) -> str:
    word = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return f"{word or 'image'}:1"


def _report(source: Source, engine: Any) -> ImageReport:
    there = _inspect(engine, source.name)
    if there is None:
        return ImageReport(name=source.name, state="missing", folder=str(source.folder))
    return ImageReport(
        name=source.name,
        state="built" if _label(there, CONTENT) in _contents(engine, source, there) else "changed",
        id=there["Id"],
        size_bytes=there["Size"],
        folder=str(source.folder),
    )


# --- what goes into an image ---


@dataclass(frozen=True)
class Source:
    """A folder, and the name of the image that is built of it."""

    name: str
    folder: Path
    rootfs: Rootfs | None = None

    @property
    def short_names(self) -> tuple[str, str]:
        short = self.name.removeprefix(PREFIX)
        return short, short.partition(":")[0]

    def named(self, tag: str | None) -> Source:
        if tag is None:
            return self
        name = tag if ":" in tag.rpartition("/")[2] else f"{tag}:latest"
        if not _REFERENCE.fullmatch(name):
            raise InvalidValue(f"{tag!r} cannot be the name of an image; allowed: small letters, such as my-task:1")
        return dataclasses.replace(self, name=name)

    def dockerfiles(self) -> list[str]:
        """In the order in which they are tried."""
        names = [DOCKERFILE] if self.rootfs is None else [DOCKERFILE, ROOTFS_DOCKERFILE]
        return [name for name in names if (self.folder / name).is_file()]

    def bases(self, dockerfile: str) -> list[str]:
        with _reading(self.folder):
            return base_images((self.folder / dockerfile).read_text(errors="replace"))

    def files(self, dockerfile: str) -> list[str]:
        """What is sent to the engine, relative to the folder: what .dockerignore leaves, of ours one Dockerfile."""
        from docker.utils import exclude_paths

        ignore = self.folder / ".dockerignore"
        lines = ignore.read_text().splitlines() if ignore.is_file() else []
        patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        patterns += [name for name in self.dockerfiles() if name != dockerfile]
        return sorted(exclude_paths(str(self.folder), patterns, dockerfile=dockerfile))

    def content(self, dockerfile: str, bases: dict[str, str]) -> str:
        """The hash of all that goes into the image."""
        inputs = {
            "recipe": RECIPE,
            "dockerfile": dockerfile,
            "files": [_fingerprint(self.folder, name) for name in self.files(dockerfile)],
            "bases": bases,
            "rootfs": self.rootfs.made_of() if self.rootfs and dockerfile == ROOTFS_DOCKERFILE else "",
        }
        return "sha256:" + hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def write_context(self, dockerfile: str, file: IO[bytes], say: Say) -> None:
        """What the engine builds from, as a tar archive."""
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in self.files(dockerfile):
                archive.add(self.folder / name, name, recursive=False, filter=_nobodys)
            if self.rootfs and dockerfile == ROOTFS_DOCKERFILE:
                with tempfile.TemporaryFile(prefix="sandbox-exec-") as packed:
                    self.rootfs.write(packed, say)
                    entry = tarfile.TarInfo(ROOTFS_TAR)
                    entry.size = packed.tell()
                    packed.seek(0)
                    archive.addfile(entry, packed)


def base_images(dockerfile: str) -> list[str]:
    """The images that a Dockerfile begins with. One whose name is not known before the build is left out."""
    arguments = dict(re.findall(r"^\s*ARG\s+(\w+)=(\S+)", dockerfile, re.MULTILINE | re.IGNORECASE))
    found: dict[str, None] = {}
    stages = {"scratch"}
    pattern = r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?"
    for base, stage in re.findall(pattern, dockerfile, re.MULTILINE | re.IGNORECASE):
        name = re.sub(r"\$\{?(\w+)\}?", lambda match: arguments.get(match[1], match[0]), base)
        if name.lower() not in stages and "$" not in name:
            found[name] = None
        stages.add(stage.lower())
    return list(found)


def _fingerprint(folder: Path, name: str) -> tuple[str, int, str]:
    path = folder / name
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return name, mode, os.readlink(path)
    if stat.S_ISREG(mode):
        with path.open("rb") as file:
            return name, mode, hashlib.file_digest(file, "sha256").hexdigest()
    if stat.S_ISDIR(mode):
        return name, mode, ""
    raise InvalidValue(f"{path} is neither a file, a folder nor a link: an image cannot hold it")


def _nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """As root's and without a time: the same folder gives the same layers."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


# --- building ---


class _NoBase(Exception):
    """An image below is not there and cannot be pulled."""


@dataclass(frozen=True)
class _Builder:
    engine: Any
    network: str
    say: Say

    def build(self, source: Source, *, force: bool = False) -> Built:
        began_s = time.monotonic()
        self._build_ours_below(source)
        there = _inspect(self.engine, source.name)
        if there is not None and not force:
            content = _label(there, CONTENT)
            if _label(there, NAME) == source.name and content in _contents(self.engine, source, there):
                return self._built(source, there, "unchanged", began_s)
        self._build_one(source, force)
        made = _inspect(self.engine, source.name)
        if made is None:
            raise ImageBuildFailed(f"{source.name} was built, but the engine does not have it: was it removed?")
        return self._built(source, made, "built", began_s)

    def _built(
        self, source: Source, image: dict[str, Any], state: Literal["built", "unchanged"], began_s: float
    ) -> Built:
        return Built(
            name=source.name,
            id=image["Id"],
            content=_label(image, CONTENT),
            state=state,
            wall_s=time.monotonic() - began_s,
        )

    def _build_ours_below(self, source: Source) -> None:
        ours = {one.name: one for one in known()}
        for dockerfile in source.dockerfiles():
            for base in source.bases(dockerfile):
                if base in ours and base != source.name:
                    self.build(ours[base])

    def _build_one(self, source: Source, force: bool) -> None:
        """With the first Dockerfile whose bases can be had."""
        why_not = []
        for dockerfile in source.dockerfiles():
            try:
                bases = {base: self.id_of(base) for base in source.bases(dockerfile)}
            except _NoBase as error:
                self.say(f"{source.name}: {error}")
                why_not.append(str(error))
                continue
            self._send(source, dockerfile, bases, force)
            return
        raise ImageBuildFailed(f"cannot build {source.name}: {'; '.join(why_not)}")

    def id_of(self, base: str) -> str:
        """Pull it if it is not there. Raises `_NoBase`."""
        there = _inspect(self.engine, base) if base else None
        if there is None:
            self._pull(base)
            there = _inspect(self.engine, base)
        if there is None:
            raise _NoBase(f"{base} is not there")
        return str(there["Id"])

    def _pull(self, base: str) -> None:
        from sandbox_exec.sandbox.engine import EngineErrors, explain

        if not base or base.startswith(PREFIX):
            raise _NoBase(f"{base or 'an image without a name'} is not there: sandbox-exec images build [NAME]")
        self.say(f"pulling {base}")
        try:
            answers = list(self.engine.pull(base, stream=True, decode=True))
        except EngineErrors as error:
            raise _NoBase(f"{base} is not there and cannot be pulled: {explain(error)}") from error
        for answer in answers:
            if "error" in answer:
                raise _NoBase(f"{base} is not there and cannot be pulled: {answer['error']}")

    def _send(self, source: Source, dockerfile: str, bases: dict[str, str], force: bool) -> None:
        self.say(f"{source.name}: building with {source.folder / dockerfile}")
        with _reading(source.folder):
            labels = {NAME: source.name, CONTENT: source.content(dockerfile, bases)}
        if bases:
            labels[BASES] = json.dumps(bases)
        with tempfile.TemporaryFile(prefix="sandbox-exec-") as context:
            with _reading(source.folder):
                source.write_context(dockerfile, context, self.say)
            context.seek(0)
            with _asking():
                answers = self.engine.build(
                    fileobj=context,
                    custom_context=True,
                    dockerfile=dockerfile,
                    tag=source.name,
                    labels=labels,
                    network_mode=self.network,
                    nocache=force,
                    rm=True,
                    forcerm=True,
                    decode=True,
                    timeout=BUILD_S,
                )
                self._follow(source, answers)

    def _follow(self, source: Source, answers: Iterator[dict[str, Any]]) -> None:
        last: deque[str] = deque(maxlen=_TAIL)
        for answer in answers:
            for line in str(answer.get("stream", "")).splitlines():
                if line.strip():
                    last.append(line)
                if line.startswith("Step ") and " : LABEL " not in line:
                    self.say(f"  {line}")
            if "error" in answer:
                said = "".join(f"\n  {line}" for line in [*last, str(answer["error"]).strip()])
                raise ImageBuildFailed(f"cannot build {source.name} from {source.folder}. The end of the build:{said}")


def _contents(engine: Any, source: Source, there: dict[str, Any]) -> list[str]:
    """The hashes that the image may have if it is as its folder says, one for each Dockerfile.

    The id of a base that the engine no longer has is the one that the image was built on: that base cannot have
    changed, and to pull it only to find out would not leave the image untouched.
    """
    recorded = json.loads(_label(there, BASES) or "{}")
    found = []
    for dockerfile in source.dockerfiles():
        images = {base: _inspect(engine, base) for base in source.bases(dockerfile)}
        bases = {base: image["Id"] if image else recorded.get(base, "") for base, image in images.items()}
        try:
            with _reading(source.folder):
                found.append(source.content(dockerfile, bases))
        except SandboxUnavailable:
            pass  # what it is made of is not on this machine: the other Dockerfile may do
    return found


def _label(image: dict[str, Any], name: str) -> str:
    return str((image["Config"].get("Labels") or {}).get(name, ""))


def _inspect(engine: Any, name: str) -> dict[str, Any] | None:
    from sandbox_exec.sandbox.engine import EngineErrors, is_missing

    with _asking():
        try:
            image: dict[str, Any] = engine.inspect_image(name)
        except EngineErrors as error:
            if is_missing(error):
                return None
            raise
    return image


@contextlib.contextmanager
def _engine() -> Iterator[Any]:
    from sandbox_exec.sandbox.engine import connect

    with contextlib.closing(connect()) as engine:
        yield engine


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """What the engine answers, as an error of ours."""
    from sandbox_exec.sandbox.engine import EngineErrors, explain, is_down

    try:
        yield
    except EngineErrors as error:
        raise (SandboxUnavailable if is_down(error) else ImageBuildFailed)(explain(error)) from error


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """A folder that cannot be read is the caller's mistake."""
    try:
        yield
    except OSError as error:
        raise InvalidValue(f"cannot read {error.filename or folder}: {error.strerror}") from error


# --- root file systems that are made here ---


class Rootfs:
    """A root file system that is made of what this machine has."""

    def made_of(self) -> str:
        """What a change of changes the image. Raises `SandboxUnavailable` if it is not there."""
        raise NotImplementedError

    def write(self, file: IO[bytes], say: Say) -> None:
        """As a tar archive; the file is left at its end."""
        raise NotImplementedError


class Busybox(Rootfs):
    """The static busybox of this machine, a link to it for each of its tools, and an empty /tmp."""

    FOLDERS: Final = {"bin": 0o755, "etc": 0o755, "root": 0o700, "tmp": 0o1777, "usr": 0o755}
    FILES: Final = {
        "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
        "etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    }

    def made_of(self) -> str:
        return "busybox " + hashlib.sha256(self._binary().read_bytes()).hexdigest()

    def write(self, file: IO[bytes], say: Say) -> None:
        binary = self._binary()
        tools = subprocess.run([binary, "--list"], capture_output=True, text=True, check=True).stdout.split()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name, mode in self.FOLDERS.items():
                _add(archive, name, mode, tarfile.DIRTYPE)
            for name, data in self.FILES.items():
                _add(archive, name, 0o644, data=data)
            _add(archive, "bin/busybox", 0o755, data=binary.read_bytes())
            for tool in sorted({*tools} - {"busybox"}):
                _add(archive, f"bin/{tool}", 0o777, tarfile.SYMTYPE, link="busybox")
            _add(archive, "usr/bin", 0o777, tarfile.SYMTYPE, link="../bin")  # for `#!/usr/bin/env sh`

    def _binary(self) -> Path:
        found = _which("busybox")
        if found is None or not is_static(found):
            what = f"{found} needs libraries" if found else "it is not there"
            raise SandboxUnavailable(
                f"the image needs a static busybox, and {what}: install one (apt-get install busybox-static)"
            )
        return found


@dataclass(frozen=True)
class Debian(Rootfs):
    """The smallest Debian with these packages, by debootstrap. Needs root and about a minute."""

    suite: str
    packages: tuple[str, ...]

    LEFT_OUT: ClassVar = re.compile(
        r"(dev|proc|sys|run|debootstrap)/.|var/(cache/apt|lib/apt/lists|log)/.|usr/share/(man|locale|info)/."
        r"|usr/share/doc/.*/(?!copyright$)[^/]+$"
    )
    MORE_LINKS: ClassVar = {"usr/bin/python": "python3"}

    def made_of(self) -> str:
        return f"debootstrap {self.suite} {' '.join(self.packages)}"

    def write(self, file: IO[bytes], say: Say) -> None:
        tool = _which("debootstrap")
        if tool is None:
            raise SandboxUnavailable("debootstrap is not there: install it (apt-get install debootstrap)")
        if os.geteuid() != 0:
            raise SandboxUnavailable("debootstrap needs root: run this as root, or let the engine pull the base image")
        with tempfile.TemporaryDirectory(prefix="sandbox-exec-rootfs-") as folder:
            say(f"  debootstrap of {self.suite} with {', '.join(self.packages)}: takes about a minute")
            self._run(tool, folder, say)
            say("  packing it")
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.add(folder, ".", filter=self._kept)
                for name, target in self.MORE_LINKS.items():
                    _add(archive, name, 0o777, tarfile.SYMTYPE, link=target)

    def _run(self, tool: Path, folder: str, say: Say) -> None:
        # In namespaces of its own, so that neither a mount nor a process of it is left when it is interrupted.
        command = ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child", str(tool)]
        command += ["--variant=minbase", f"--include={','.join(self.packages)}", self.suite, folder, *self._mirror()]
        last: deque[str] = deque(maxlen=_TAIL)
        told = set()
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PATH": _path()},
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    last.append(line.rstrip())
                    verb = " ".join(line.split()[:2])
                    if line.startswith("I: ") and verb not in told:  # one line for a kind of work, not for a package
                        told.add(verb)
                        say(f"  {line.strip()}")
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            said = "".join(f"\n  {line}" for line in last)
            raise ImageBuildFailed(f"debootstrap ended with code {process.returncode}. The end of what it said:{said}")

    def _mirror(self) -> list[str]:
        """The one that apt uses here for this suite; if it has none, debootstrap's own choice."""
        command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", f"Release: {self.suite}"]
        try:
            said = subprocess.run(command, capture_output=True, text=True).stdout.split()
        except OSError:
            return []
        return said[:1]

    def _kept(self, entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if self.LEFT_OUT.match(entry.name.removeprefix("./")) else entry


def is_static(program: Path) -> bool:
    """Whether a 64-bit program needs no loader, and so no library."""
    with program.open("rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            return False
        order = "<" if head[5] == 1 else ">"
        (offset,) = struct.unpack_from(order + "Q", head, 32)
        size, count = struct.unpack_from(order + "HH", head, 54)
        file.seek(offset)
        table = file.read(size * count)
    interpreter = 3  # PT_INTERP
    kinds = [struct.unpack_from(order + "I", table, size * index)[0] for index in range(count)]
    return interpreter not in kinds


def _add(
    archive: tarfile.TarFile, name: str, mode: int, kind: bytes = tarfile.REGTYPE, *, link: str = "", data: bytes = b""
) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.type, entry.linkname, entry.size = mode, kind, link, len(data)
    archive.addfile(entry, io.BytesIO(data))


def _which(tool: str) -> Path | None:
    found = shutil.which(tool, path=_path())
    return Path(found) if found else None


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *_MORE_PLACES])
