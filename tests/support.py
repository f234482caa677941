"""What the tests of real sandboxes share. Agents import it too: the standard library only, and little of it."""

from __future__ import annotations

import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Iterator
    from pathlib import Path

PATIENCE_S = 60.0  # bounds a test that fails; no test that passes waits for a clock


class Meeting:
    """Two named pipes through which a test and its agents wait for each other.

    `folder` must be among the agents' `readable` paths: a pipe can be written to though its mount is read-only.
    In a test: `expect`, `let_go`. In an agent, where it arrives pickled: `announce`, `wait`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        for name in ("up", "down"):
            os.mkfifo(f"{folder}/{name}")
            os.chmod(f"{folder}/{name}", 0o666)
        folder.chmod(0o755)
        # Held for both directions, so that nobody's open() blocks and nobody sees the end of a pipe.
        self._up, self._down = (os.open(f"{folder}/{name}", os.O_RDWR) for name in ("up", "down"))
        self._heard = b""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _InAgent, (self.folder,)

    def hear(self) -> str:
        """The next word of an agent's."""
        while b"\n" not in self._heard:
            wait_readable(self._up)
            self._heard += os.read(self._up, 65536)
        word, _, self._heard = self._heard.partition(b"\n")
        return word.decode()

    def expect(self, *words: str) -> None:
        """Wait until agents have announced these, in any order."""
        assert sorted(self.hear() for _ in words) == sorted(words)

    def let_go(self, count: int = 1) -> None:
        """Let so many agents go on that are at `wait`, or will be."""
        os.write(self._down, b"." * count)

    def unread(self) -> int:
        """How many were let go and have not noticed."""
        import array
        import fcntl
        import termios

        count = array.array("i", [0])
        fcntl.ioctl(self._down, termios.FIONREAD, count)
        return count[0]

    def close(self) -> None:
        os.close(self._up)
        os.close(self._down)


class _InAgent:
    """The agent's end. Opens what it needs when it needs it: an agent may have closed everything else."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def announce(self, word: str) -> None:
        fd = os.open(f"{self._folder}/up", os.O_WRONLY)
        os.write(fd, word.encode() + b"\n")
        os.close(fd)

    def wait(self) -> None:
        fd = os.open(f"{self._folder}/down", os.O_RDONLY)
        os.read(fd, 1)
        os.close(fd)


def wait_readable(fd: int, events: int = select.POLLIN) -> None:
    poll = select.poll()
    poll.register(fd, events)
    assert poll.poll(PATIENCE_S * 1000), f"nothing came in {PATIENCE_S:g} s"


class Watch:
    """Processes by handle, so that the end of each can be waited for though its number may be another's by then."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in pids:
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                pass

    @property
    def pids(self) -> list[int]:
        return list(self._pidfds)

    def wait_gone(self) -> None:
        """Until every one of them has ended."""
        for pidfd in self._pidfds.values():
            wait_readable(pidfd)

    def is_alive(self, pid: int) -> bool:
        return not select.select([self._pidfds[pid]], [], [], 0)[0]

    def close(self) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


class Script:
    """A Python program of its own that talks to the test by the lines that it prints."""

    def __init__(
        self, folder: Path, text: str, *arguments: str, env: dict[str, str] | None = None, python: str = ""
    ) -> None:
        import subprocess
        import sys
        import textwrap

        self._children = children()
        path = folder / "script.py"
        path.write_text(textwrap.dedent(text))
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [python or sys.executable, str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            cwd=folder,
        )
        self.pid = self.process.pid

    def hear(self) -> str:
        """The next line that it prints; fails with its errors if there is none."""
        assert self.process.stdout is not None
        wait_readable(self.process.stdout.fileno())
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the script ended: {self.end()}")
        return line.rstrip("\n")

    def expect(self, word: str) -> None:
        heard = self.hear()
        assert heard == word, f"{heard!r}\n{self.end() if self.process.poll() is not None else ''}"

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, what else it printed, its errors."""
        stdout, stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, stdout, stderr

    def __enter__(self) -> Script:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.process.stderr is not None:
            os.set_blocking(self.process.stderr.fileno(), False)
            try:
                print(f"the script, exit code {self.process.poll()}:", os.read(self.process.stderr.fileno(), 65536))
            except BlockingIOError:
                pass  # it said nothing
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()  # not read to its end: what the script left running may hold it open
        reap(children() - self._children)  # its orphans have come to us


def children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children()}


def reap(pids: Iterable[int]) -> None:
    """Those that have ended; one that has not is a leak, and for others to find."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass  # reaped by whoever started it


def spin_until(condition: object, what: str) -> None:
    """For what has no handle to wait on, such as a file of the kernel's. Bounded, and it yields the processor."""
    assert callable(condition)
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"never came true: {what}"
        os.sched_yield()


def interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGINT)


def meetings(folder: Path) -> Iterator[Meeting]:
    """The body of a fixture."""
    meeting = Meeting(folder)
    yield meeting
    meeting.close()
