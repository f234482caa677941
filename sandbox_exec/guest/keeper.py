"""The keeper: one process beside each agent, inside its containment, that nothing of the agent's can touch.

Who runs, with which rights
  zygote    forks a keeper for each slot of the pool, into namespaces of its own (or plainly, on the rungs
            without them); see `zygote`
  keeper    forks one agent after the other (the next one's process while it waits), reaps what they leave to
            it, says how each ended, and kills all that is left. It is init of the slot's pid namespace: an
            agent's signals do nothing to it, every
            orphan becomes its child, and should it die, the kernel kills the whole namespace with it. It is
            no member of the trial's cgroup: it cannot be frozen, and no ceiling of the agent's is its own.
  agent     has another uid, or (user namespaces) meets a keeper that is not dumpable: it can neither trace it
            nor open its descriptors. Its first steps, still with the keeper's rights, are in `agent`.

Which pipe goes where
  channel   supervisor <-> keeper: frames to the supervisor, single bytes from it (`START` and so on). The end
            of the channel is the end of the supervisor, kill -9 included: the keeper kills all, and exits.
  request   a sealed file, handed over unread: only the agent's process reads it, so that nothing of one trial
            (its arguments, its environment) is ever in the memory that the next one is forked from
  stdout, stderr, trace, result   named pipes, agent -> supervisor; one of each for the slot, and each agent
            opens its own ends anew, so that no flag that it sets on them is left to the next

How a trial ends: the main process ended by itself, or `KILL` came. Either way kill(-1) and then wait() until
there is no child left. In a pid namespace that is proof: all in it are descendants of its init, and a fork
that races with kill(-1) is refused by the kernel. Without one, the keeper is a subreaper and must look for
what to kill (`_members`); docs/threat-model.md says what can escape it.
"""

from __future__ import annotations

import _signal as signal  # whose public face loads enum, and wraps every number into one
import _socket
import fcntl
import gc
import os
import resource
import select
import sys
import time

from . import agent, view, wire
from . import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

START, TERM, KILL, FREEZE, THAW = b"s", b"t", b"k", b"f", b"c"
_WATCH_S = 0.02  # where no controller counts: how far a hog can get past its ceiling between two looks
_REPORT_EVERY = 10  # looks between two reports of usage to the supervisor
_SWEEPS = 4000  # a fork bomb of 256 needs a handful; bounded, so that a keeper never spins for ever
_ABOVE = 32  # the keeper's own descriptors; below are the numbers that an agent's are put at


def keep(boot: dict[str, Any], slot: dict[str, Any], fds: list[int]) -> NoReturn:
    """Serve one slot until the supervisor is gone. `fds` are named by `slot["fds"]`."""
    named = dict(zip(slot["fds"], map(_move_up, fds), strict=True))
    channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, named.pop("channel"))
    keeper: _Keeper | None = None
    try:
        keeper = _Keeper(boot, slot, named, channel)
        while True:
            keeper.serve()
    except BaseException as error:
        try:
            wire.send_line(channel, "failed", f"{type(error).__name__}: {error}")
        except OSError:
            pass
        if keeper and not keeper.private:  # else the kernel does it, as init ends
            keeper._sweep()
    finally:
        os._exit(1)


class _Keeper:
    def __init__(
        self, boot: dict[str, Any], slot: dict[str, Any], fds: dict[str, int], channel: _socket.socket
    ) -> None:
        self.boot, self.slot, self.fds, self.channel = boot, slot, fds, channel
        self.private = boot["mode"] == "namespaces"
        self.main = self.spare = self.swept = 0
        self.exit: int | None = None
        self.looks = self.peak = 0
        os.setsid()  # kill(0) of an agent must not reach what stands above the keeper
        os.umask(0o022)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        uid, gid = slot["uid"], slot["gid"]
        if self.private:
            k.set_dumpable(False)
            k.set_hostname("sandbox")
            if "network" in fds:
                k.setns(fds["network"], k.CLONE_NEWNET)  # that of the agent which it is to grade
                os.close(fds.pop("network"))
            elif slot["network"] == "none":
                view.make_network()
            scratch = view.add_slot_mounts(slot["disk"], slot["files"], uid, gid, boot["view"])
            os.chdir(view.home_of(boot["view"]["role"]))
        else:
            os.mkdir(slot["scratch"], 0o755)
            role = boot["view"]["role"]
            view.fill_scratch(slot["scratch"], uid, gid, role)
            scratch = os.open(slot["scratch"], os.O_RDONLY | os.O_DIRECTORY)
            os.chdir(slot["scratch"] + view.home_of(role))
            if k.SUPPORTED and boot["mode"] != "process-group":
                k.set_subreaper()
        os.environ.update(slot["env"])
        self.scratch = _move_up(scratch)
        self._take_pipes()
        self.clean = view.Cleanliness(self.scratch) if self.private else None
        if k.SUPPORTED:
            k.set_name("sx-keeper")
            k.install_seccomp(k.seccomp_program())  # nothing that it refuses is needed from here on
            if os.geteuid() == uid:
                k.drop_capabilities()
        gc.freeze()
        gc.disable()
        self._say_kept()
        self._fork_spare()

    def _take_pipes(self) -> None:
        """Own descriptors go up, so that `agent` finds its numbers free."""
        failure_read, failure_write = os.pipe()
        wake_read, wake_write = os.pipe()
        self.failure, self.wake, wake = _move_up(failure_read), _move_up(wake_read), _move_up(wake_write)
        failure = _move_up(failure_write)
        null = _move_up(os.open(os.devnull, os.O_RDONLY))
        for number in range(agent.FIRST_FREE):
            os.dup2(null, number, inheritable=number <= agent.STDERR)
        os.dup2(failure, agent.FAILURE, inheritable=False)
        os.close(failure)
        os.close(null)
        for fd in (self.failure, self.wake, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        orders, taken = (_move_up(sock.detach()) for sock in _socket_pair())
        self.orders = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, orders)
        self.taken = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, taken)
        self.poll = select.poll()
        self.poll.register(self.channel, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def _say_kept(self) -> None:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        reads = tuple(os.open(name, flags, dir_fd=self.scratch) for name in view.PIPES)
        # Held open, so that between two trials the supervisor sees an empty pipe and not the end of one.
        self.writers = [_move_up(os.open(name, os.O_WRONLY, dir_fd=self.scratch)) for name in view.PIPES]
        wire.send_line(self.channel, "kept", fds=(self.scratch, *reads))
        for fd in reads:
            os.close(fd)

    def serve(self) -> None:
        """Wait for what comes next: a word of the supervisor's, the end of a child, or the time to look."""
        watching = self.main and self.slot["watched"]
        for fd, _ in self.poll.poll(_WATCH_S * 1000 if watching else None):
            if fd == self.wake:
                os.read(fd, 4096)
                self._reap()
            else:
                self._obey(*wire.receive(self.channel, 1))
        if watching and self.main:
            self._look()

    def _obey(self, command: bytes, fds: list[int]) -> None:
        if command == START:
            self._start(fds)
        elif command == b"":
            self._sweep()
            os._exit(0)
        elif self.main:  # else: the trial has ended while the word was under way
            if command == KILL:
                self._end()
            else:
                self._signal({TERM: signal.SIGTERM, FREEZE: signal.SIGSTOP, THAW: signal.SIGCONT}[command])

    def _fork_spare(self) -> None:
        """The process of the next agent, forked while nobody waits for it. It has read nothing and has no trial."""
        self.spare = os.fork()
        if self.spare == 0:
            agent.become(self.boot, self.slot, self.scratch, self.taken)

    def _start(self, fds: list[int]) -> None:
        if not self.spare:
            self._fork_spare()
        wire.send_bytes(self.orders, START, tuple(fds))
        for fd in fds:
            os.close(fd)
        self.main, self.spare = self.spare, 0
        self.exit = None
        self.looks = self.peak = 0

    def _reap(self) -> None:
        """Reap all that can be; if the main process is among them, the trial is over."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.spare:
                    self.spare = 0
                if pid == self.main:
                    self.exit = os.waitstatus_to_exitcode(status)
                    self._end()
                    return
        except ChildProcessError:
            pass

    def _end(self) -> None:
        """Kill and reap all that is left of the trial, and say so."""
        begun = time.monotonic()
        self.swept = 0
        left = self._sweep()
        self.main = 0
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = self.clean is None or self.clean.is_lost()
        wire.send_line(
            self.channel,
            "ended",
            self.exit,
            left,
            int(spent),
            round(usage.ru_utime + usage.ru_stime, 6),
            self.peak,
            self.swept,
            round(time.monotonic() - begun, 6),
            _read_now(self.failure).decode(errors="replace"),
        )
        if not spent:
            self._take_back_order()
            self._fork_spare()

    def _take_back_order(self) -> None:
        """What an agent was killed before it could read must not become the order of the next."""
        try:
            _, fds = wire.receive(self.taken, 1, _socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        for fd in fds:
            os.close(fd)

    def _sweep(self) -> int:
        """Kill what is left until nothing is; how many could not be killed.

        Without a pid namespace: stops before it kills, so that a chain of forks does not run away while it
        is being read. What has left the cgroup, or on the last rung the process group, is not seen here.
        """
        if self.private:
            if not self._no_children():
                _kill(-1, signal.SIGKILL)
                self._wait_for_all()
            return 0
        if "kill" in self.fds:
            os.write(self.fds["kill"], b"1")
        if self.main:
            _kill(-self.main, signal.SIGKILL)
        members: list[int] = []
        for _ in range(_SWEEPS):
            members = self._members()
            for signum in (signal.SIGSTOP, signal.SIGKILL):
                for pid in members:
                    _kill(pid, signum)
            if self._no_children() and not members:  # in this order: what is dead is a member until it is reaped
                return 0
            select.select([], [], [], 0.0005)  # they are dying: let them
        return len(members) or int(not self._no_children())

    def _wait_for_all(self) -> None:
        try:
            while True:
                self._note(*os.waitpid(-1, 0))
        except ChildProcessError:
            pass

    def _no_children(self) -> bool:
        """Reap what has ended; whether nothing is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return False
                self._note(pid, status)
        except ChildProcessError:
            return True

    def _note(self, pid: int, status: int) -> None:
        if pid != self.main:
            self.swept += 1
        elif self.exit is None:
            self.exit = os.waitstatus_to_exitcode(status)

    def _signal(self, signum: int) -> None:
        for pid in [-1] if self.private else self._members() or [self.main]:
            _kill(pid, signum)

    def _members(self) -> list[int]:
        """Every process of the trial that can be found."""
        if self.private:
            return [pid for pid in _all_pids() if pid != 1]
        if "procs" in self.fds:
            os.lseek(self.fds["procs"], 0, os.SEEK_SET)
            listed = map(int, _read_all(self.fds["procs"]).split())
            # Who may write the tree of cgroups leaves its own; it is still below us.
            return list({*listed, *_descendants(os.getpid())})
        if sys.platform != "linux" or self.boot["mode"] == "process-group":
            return []
        return _descendants(os.getpid())

    def _look(self) -> None:
        """Where no cgroup counts for us. Sees what is mapped, not what a memfd holds unmapped."""
        members = self._members()
        memory = sum(map(_resident, members))
        limit, pids = self.slot["watched"]["memory"], self.slot["watched"]["pids"]
        if limit is not None and memory > limit:
            memory = sum(map(_proportional, members))  # dear, and exact where processes share pages
        self.peak = max(self.peak, memory)
        if limit is not None and memory > limit:
            wire.send_line(self.channel, "exceeded", "memory", self.peak)
        elif pids is not None and sum(map(_threads, members)) > pids:
            wire.send_line(self.channel, "exceeded", "pids", self.peak)
        elif self.looks % _REPORT_EVERY == 0:
            wire.send_line(self.channel, "usage", round(sum(map(_cpu_s, members)), 6), self.peak)
        self.looks += 1


_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def _socket_pair() -> tuple[_socket.socket, _socket.socket]:
    return _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM, 0)


def _move_up(fd: int) -> int:
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    os.close(fd)
    return high


def _kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # gone already, or not ours to kill: what is left is counted, not assumed


def _read_now(fd: int) -> bytes:
    try:
        return os.read(fd, 1000)
    except BlockingIOError:
        return b""


def _read_all(fd: int) -> bytes:
    return b"".join(iter(lambda: os.read(fd, 65536), b""))


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        try:
            children.setdefault(int(_stat(pid)[1]), []).append(pid)
        except (OSError, IndexError):
            pass  # ended while we looked
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, IndexError):
        return _resident(pid)


def _threads(pid: int) -> int:
    try:
        return int(_stat(pid)[17])
    except (OSError, IndexError):
        return 0


def _cpu_s(pid: int) -> float:
    try:
        return sum(int(ticks) for ticks in _stat(pid)[11:15]) / _TICKS
    except (OSError, IndexError):
        return 0.0
