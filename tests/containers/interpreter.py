"""Python for agents in a container whose image has none: that of the tests, shown where it is, read-only."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tarfile
import uuid
from pathlib import Path

import docker.errors
from engine import client


class Python:
    """An image in which the interpreter of the tests can be reached, and what of this machine it needs."""

    def __init__(self, base: str) -> None:
        self.name = f"test-{uuid.uuid4().hex[:12]}:1"
        self.executable = os.path.realpath(sys.executable)
        system = [path for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if os.path.isdir(path)]
        self.readable = (*system, *({sys.base_prefix, sys.prefix, str(Path(self.executable).parents[1])} - {"/usr"}))
        context = _tar(
            {
                "Dockerfile": (f"FROM {base}\nADD root.tar /\n".encode(), 0o644),
                "root.tar": (_tar(self._root(), self._folders()).getvalue(), 0o644),
            }
        )
        with contextlib.closing(client()) as asked:
            said = b"".join(asked.build(fileobj=context, custom_context=True, tag=self.name, rm=True))
        assert b"Successfully built" in said, said

    def _folders(self) -> list[str]:
        """All that leads there, open to every user: the image's home of root is not."""
        return sorted({str(above) for path in self.readable for above in Path(path).parents if str(above) != "/"})

    def _root(self) -> dict[str, tuple[bytes, int]]:
        """A program that makes its user root, if that can be. One that keeps what it has: a shell gives it back."""
        return {"sbin/sudo": (Path(shutil.which("cat") or "/bin/cat").read_bytes(), 0o4755)}

    def close(self) -> None:
        with contextlib.closing(client()) as asked, contextlib.suppress(docker.errors.ImageNotFound):
            asked.remove_image(self.name, force=True)


def _tar(files: dict[str, tuple[bytes, int]], folders: list[str] | None = None) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for folder in folders or ():
            info = tarfile.TarInfo(folder.lstrip("/"))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for name, (data, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    stream.seek(0)
    return stream
