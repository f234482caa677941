"""The floor: a bare zygote that forks in namespaces. What isolation costs when nothing else is done.

Theory of operation. The caller starts this file as the zygote (`python -I -S -E`, one thread, nothing but
the standard library) and holds one end of a socket. A request is a datagram with the write end of a pipe;
the zygote forks for it a child in new pid, mount, ipc and uts namespaces, which mounts a tmpfs and a proc,
drops its uid, echoes the request into the pipe and exits. The caller waits for the end of the pipe. The
network namespace is empty and made once, as is the user namespace where the caller is not root.

There are no cgroups, no system call filter, no streams and no deadline, and nobody waits until the kernel
has torn the namespaces down: this is not a sandbox. It imports nothing of ours. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID_NODEV = 0x2 | 0x4
MS_NOEXEC = 0x8
MS_REC_PRIVATE = 0x4000 | 0x40000
NOBODY = 65534
MAX_MESSAGE_BYTES = 256

# PyDLL: there is one thread, so giving up the GIL around each call would be work for nothing.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


class FloorSide:
    """The caller of the zygote. `in_flight` is not held to any number of workers: there are none."""

    name = "floor: bare zygote fork in namespaces"

    def start(self) -> None:
        import subprocess  # here, as the zygote is this file: `threading` in it would slow its every fork

        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-I", "-S", "-E", __file__, str(theirs.fileno())]
            self._zygote = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._poll = select.poll()
        self._open: dict[int, tuple[bytes, float]] = {}

    def run(self, n: int, in_flight: int) -> list[float]:
        latencies: list[float] = []
        for i in range(n):
            if len(self._open) == in_flight:
                latencies += self._collect()
            self._request(b"%d" % i)
        while self._open:
            latencies += self._collect()
        return latencies

    def stop(self) -> None:
        self._socket.close()  # the zygote exits at the end of its socket
        self._zygote.wait()

    def _request(self, body: bytes) -> None:
        begun = time.perf_counter()
        ours, theirs = os.pipe()
        socket.send_fds(self._socket, [body], [theirs])
        os.close(theirs)
        self._open[ours] = (body, begun)
        self._poll.register(ours, select.POLLIN)

    def _collect(self) -> list[float]:
        return [self._end(pipe) for pipe, _ in self._poll.poll()]

    def _end(self, pipe: int) -> float:
        body, begun = self._open.pop(pipe)
        answer = _read_to_end(pipe)
        self._poll.unregister(pipe)
        os.close(pipe)
        if answer != body:
            raise ValueError(f"the zygote's child answered {answer!r} to {body!r}")
        return time.perf_counter() - begun


def _read_to_end(pipe: int) -> bytes:
    answer = b""
    while piece := os.read(pipe, MAX_MESSAGE_BYTES):
        answer += piece
    return answer


def zygote(control: socket.socket) -> None:
    """Serve requests until the caller is gone."""
    is_root = os.geteuid() == 0
    _enter_namespaces(is_root)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    while True:
        body, pipes, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not body:
            return
        _check(_libc.setns(own_pid_namespace, CLONE_NEWPID))  # else the next one would nest in the last
        _check(_libc.unshare(CLONE_NEWPID))
        if os.fork() == 0:
            _child(body, pipes[0], is_root)
        os.close(pipes[0])


def _enter_namespaces(is_root: bool) -> None:
    """Do once what need not be done for every child."""
    if is_root:
        _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWNET))
    else:
        _become_root_of_own()
    _mount(None, b"/", None, MS_REC_PRIVATE)  # a child's copy of the mounts is then private too


def _become_root_of_own() -> None:
    """Enter a user namespace as its root and a pid namespace as its init: setns is refused to anyone else."""
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET))
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{file}", "w") as stream:
            stream.write(text)
    pid = os.fork()
    if pid > 0:
        os.waitpid(pid, 0)
        os._exit(0)
    _mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV | MS_NOEXEC)  # else /proc/self is nobody here


def _child(body: bytes, pipe: int, is_root: bool) -> None:
    try:
        _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS))
        _mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID_NODEV, b"size=16m")
        _mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV | MS_NOEXEC)
        if is_root:  # in a user namespace no other uid is mapped
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        os.write(pipe, _echo(body))
    except OSError as error:
        os.write(pipe, str(error).encode())  # a wrong answer, which the caller shows
    finally:
        os._exit(0)


def _echo(body: bytes) -> bytes:
    return body


def _mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, data: bytes = b"") -> None:
    _check(_libc.mount(source, target, kind, flags, data))


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    zygote(socket.socket(fileno=int(sys.argv[1])))
