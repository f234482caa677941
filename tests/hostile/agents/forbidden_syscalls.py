"""Wants the kernel's rarer doors: keys, bpf, perf, kexec, modules, swap, accounting, the kernel's log.

Arguments are chosen so that a kernel that lets it through does nothing. Each call is made in a child,
since a filter may kill for it.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Callable

MAP = struct.pack("5I", 2, 4, 8, 1, 0).ljust(72, b"\0")
PERF = struct.pack("IIQQQQQ", 1, 64, 0, 0, 0, 0, 0x60).ljust(64, b"\0")
CALLS: dict[str, tuple[int, int, tuple[object, ...]]] = {  # name: number on x86_64, on aarch64, arguments
    "add_key": (248, 217, (b"user", b"hostile", b"x", 1, -2)),
    "request_key": (249, 218, (b"user", b"hostile", None, 0)),
    "keyctl": (250, 219, (0, -2, 1)),
    "bpf": (321, 280, (0, MAP, len(MAP))),
    "perf_event_open": (298, 241, (PERF, 0, -1, -1, 0)),
    "kexec_load": (246, 104, (0, 0, None, 0xFFFF)),
    "init_module": (175, 105, (None, 0, b"")),
    "finit_module": (313, 273, (-1, b"", 0)),
    "delete_module": (176, 106, (b"hostile", os.O_NONBLOCK)),
    "reboot": (169, 142, (0, 0, 0, None)),
    "swapon": (167, 224, (b"/hostile", 0)),
    "acct": (163, 89, (b"/hostile",)),
    "syslog": (103, 116, (3, b"\0" * 4096, 4096)),
}


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    libc, answers = ctypes.CDLL(None, use_errno=True), {}
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    ready({})
    for name, call in CALLS.items():
        child = os.fork()
        if child == 0:
            os._exit(0 if libc.syscall(call[column], *call[2]) >= 0 else ctypes.get_errno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers[name] = errno.errorcode.get(code, "worked" if code == 0 else "killed")
    refused = ("EPERM", "EACCES", "ENOSYS", "killed")
    through = [name for name, answer in answers.items() if answer not in refused]
    return {"escaped": bool(through), "detail": {"through": through, "answers": answers}}


if __name__ == "__main__":
    __import__("_common").command(attack)
