"""Our side of a zygote: start it, ask it for keepers, notice its end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.guest import wire
from sandbox_exec.sandbox.handles import let_go, socket_pair

_ROOT = str(Path(__file__).parent.parent.parent)
_BOOT = "import sys; sys.path.insert(0, {root!r}); from sandbox_exec.guest import zygote; zygote.main({fd})"
_BOOT_S = 30.0  # it takes 50 ms, and what the user preloads; a machine under load may need more
_SEND_S = 5.0  # a zygote that does not read for so long is stuck


class ZygoteLink:
    """A connection to a zygote: ask it for keepers, notice its end. `landlock` is the ABI in force in it."""

    def __init__(self, control: socket.socket, pid: int, landlock: int) -> None:
        self.control, self.pid, self.landlock = control, pid, landlock
        control.settimeout(_SEND_S)

    def preload(self, modules: list[str]) -> None:
        wire.send_dict(self.control, {"preload": modules})

    def fork_keeper(self, slot: dict[str, Any], fds: dict[str, int]) -> socket.socket:
        """Ask for a keeper; the channel on which it will say that it is there. Raises OSError if the zygote is gone."""
        ours, theirs = socket_pair()
        with theirs:
            try:
                wire.send_dict(self.control, {**slot, "fds": ["channel", *fds]}, (theirs.fileno(), *fds.values()))
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        self.control.close()

    def abandon(self) -> None:
        """In a forked child: drop what was inherited, without a word to a process that is not ours."""
        let_go(self.control)


class Zygote(ZygoteLink):
    """A fork server in the containment that `boot` describes. Raises SandboxUnavailable if it cannot be had."""

    def __init__(self, boot: dict[str, Any], handles: tuple[int, ...] = ()) -> None:
        ours, theirs = socket_pair()
        self.control = ours
        with theirs:
            code = _BOOT.format(root=_ROOT, fd=theirs.fileno())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-E", "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the caller
                    env={},
                    close_fds=True,
                )
            except OSError as error:
                ours.close()
                raise SandboxUnavailable(f"the interpreter cannot be started: {error}") from error
        try:
            self._boot(boot, handles)
        except BaseException:
            self.close()
            raise

    def connect(self) -> socket.socket:
        """A connection of its own for another process; see `ZygoteLink`."""
        ours, theirs = socket.socketpair()
        with theirs:
            wire.send_dict(self.control, {"client": True}, (theirs.fileno(),))
        return ours

    def _boot(self, boot: dict[str, Any], handles: tuple[int, ...]) -> None:
        self.control.settimeout(_BOOT_S)
        lines = wire.Lines(self.control)
        try:
            wire.send_dict(self.control, {"boot": boot}, handles)
            while (line := lines.next()) is None:
                if not lines.read():
                    raise SandboxUnavailable(f"the zygote ended while starting (see its error above): {self._end()}")
        except (OSError, TimeoutError) as error:
            raise SandboxUnavailable(f"the zygote did not start: {error}") from error
        kind, words, _ = line
        if kind != "booted":
            raise SandboxUnavailable(words)
        super().__init__(self.control, self._process.pid, int(words))

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit code {self._process.wait(1)}"
        return "still running"

    def close(self) -> None:
        """Let it go; it ends when its keepers have. Returns once it has."""
        self.control.close()
        try:
            self._process.wait(_SEND_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """In a forked child: drop what was inherited, without a word to a process that is not ours."""
        super().abandon()
        self._process.returncode = 0  # not our child: nothing to wait for, and no warning about it
