"""Wants to be root somewhere: unshare, setns, clone and clone3 with a user namespace, each in a child."""

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Callable

NEWUSER, NEWNS, NEWPID, NEWNET = 0x10000000, 0x20000, 0x20000000, 0x40000000


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    libc, answers = ctypes.CDLL(None, use_errno=True), {}
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    clone3 = struct.pack("11Q", NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    tries: dict[str, Callable[[], int]] = {
        "unshare user": lambda: libc.unshare(NEWUSER),
        "unshare user and mount": lambda: libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET),
        "unshare mount": lambda: libc.unshare(NEWNS),
        "clone user": lambda: libc.syscall(clone, NEWUSER | signal.SIGCHLD, None, None, None, None),
        "clone3 user": lambda: libc.syscall(435, clone3, len(clone3)),
        "setns of process 1": lambda: libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0),
        "setns of its parent": lambda: libc.setns(os.open(f"/proc/{os.getppid()}/ns/user", os.O_RDONLY), 0),
        "setns of its own": lambda: libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0),
    }
    ready({})
    for name, call in tries.items():
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if call() >= 0 else ctypes.get_errno())
            except OSError as error:
                os._exit(error.errno or 255)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers[name] = errno.errorcode.get(code, "worked" if code == 0 else "killed")
    return {"escaped": "worked" in answers.values(), "detail": answers}


if __name__ == "__main__":
    __import__("_common").command(attack)
