"""Wants another view of the file system: mount, umount, pivot_root and the new mount calls, each in a child.

The arguments are wrong where the right ones would change something: a permitted call fails with another
error than EPERM, which is enough to know.
"""

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    libc, answers = ctypes.CDLL(None, use_errno=True), {}
    empty = tempfile.mkdtemp(prefix="hostile-").encode()
    pivot_root = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    tries: dict[str, Callable[[], int]] = {
        "mount": lambda: libc.mount(b"none", empty, b"no_such_type", 0, None),
        "bind": lambda: libc.mount(b"/hostile", empty, None, 0x1000, None),
        "remount": lambda: libc.mount(None, empty, None, 0x20, None),
        "umount": lambda: libc.umount2(empty, 0),
        "pivot_root": lambda: libc.syscall(pivot_root, empty, empty),
        "open_tree": lambda: libc.syscall(428, -100, b"/", 1),
        "move_mount": lambda: libc.syscall(429, -1, b"", -1, b"", 0),
        "fsopen": lambda: libc.syscall(430, b"tmpfs", 0),
        "mount_setattr": lambda: libc.syscall(442, -100, empty, 0, (ctypes.c_uint64 * 4)(1), 32),
    }
    ready({})
    for name, call in tries.items():
        child = os.fork()
        if child == 0:
            os._exit(0 if call() >= 0 else ctypes.get_errno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers[name] = errno.errorcode.get(code, "worked" if code == 0 else "killed")
    os.rmdir(empty)
    refused = ("EPERM", "EACCES", "ENOSYS", "killed")
    through = [name for name, answer in answers.items() if answer not in refused]
    return {"escaped": bool(through), "detail": {"through": through, "answers": answers}}


if __name__ == "__main__":
    __import__("_common").command(attack)
