"""The Linux calls that the standard library lacks: namespaces, mounts, seccomp, Landlock, capabilities.

Thin: each function is one system call that raises OSError. Numbers are known for x86_64 and aarch64; on
any other machine `SUPPORTED` is false and the rungs that need them are not offered.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import fcntl
import os
import struct
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_NEW_ANY = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
_CLONE_PIDFD, _SIGCHLD = 0x1000, 17

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME = 1, 4, 15
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 24, 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

MACHINE = os.uname().machine if sys.platform == "linux" else ""

# name: (x86_64, aarch64); None where the architecture does not have the call
_NR: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220), "clone3": (435, 435), "ioctl": (16, 29), "socket": (41, 198), "capset": (126, 91),
    "landlock_create_ruleset": (444, 444), "landlock_restrict_self": (446, 446),
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
    # refused to agents, by what they would be used for: the file system seen,
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "mount_setattr": (442, 442),
    "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "open_tree_attr": (467, 467), "chroot": (161, 51), "swapon": (167, 224), "swapoff": (168, 225),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "acct": (163, 89),
    # namespaces,
    "unshare": (272, 97), "setns": (308, 268), "sethostname": (170, 161), "setdomainname": (171, 162),
    # other processes,
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # the kernel itself,
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "syslog": (103, 116),
    "iopl": (172, None), "ioperm": (173, None), "vhangup": (153, 58), "lookup_dcookie": (212, 18),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # and key rings, which no namespace separates by trial
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip
# Allowed for the caller itself only: (call, which argument names another process)
_SELF_ONLY = (
    ("prlimit64", 0), ("sched_setaffinity", 0), ("sched_setscheduler", 0), ("sched_setparam", 0),
    ("sched_setattr", 0), ("setpriority", 1), ("ioprio_set", 1),
)  # fmt: skip
_ALLOWED = frozenset(("clone", "capset", "landlock_create_ruleset", "landlock_restrict_self", "ioctl", "socket"))
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(MACHINE)
SUPPORTED = _COLUMN is not None and sys.platform == "linux"
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

if SUPPORTED:
    # PyDLL keeps the GIL: clone() must come back in the child as the thread that holds it.
    _libc = ctypes.PyDLL(None, use_errno=True)
    _syscall = _libc.syscall
    _syscall.restype = ctypes.c_long


def _nr(name: str) -> int:
    number = _NR[name][_COLUMN] if _COLUMN is not None else None
    if number is None:
        raise OSError(errno.ENOSYS, f"{name} is not known on {MACHINE or sys.platform}")
    return number


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _raw(name: str, *args: int) -> int:
    longs = [ctypes.c_long(arg) for arg in args]
    return _check(_syscall(ctypes.c_long(_nr(name)), *longs), name)


def fork_into(namespaces: int) -> tuple[int, int]:
    """fork() whose child starts in new namespaces; only for a process with one thread. Returns pid, pidfd.

    A pid namespace made by unshare() can be made once only, unless one may setns() back into one's own:
    an ordinary user may not. clone() has no such limit.
    """
    pidfd, none = ctypes.c_int(-1), ctypes.c_long(0)
    flags = ctypes.c_long(namespaces | _CLONE_PIDFD | _SIGCHLD)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _syscall(ctypes.c_long(_nr("clone")), flags, none, ctypes.byref(pidfd), none, none)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0, -1
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(pid, "clone"), pidfd.value


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, fstype: str | None = None, flags: int = 0, data: str | None = None) -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        fstype.encode() if fstype else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _check(result, f"mount {fstype or source} on {target}")


def umount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    new, old = ctypes.c_char_p(os.fsencode(new_root)), ctypes.c_char_p(os.fsencode(put_old))
    _check(_syscall(ctypes.c_long(_nr("pivot_root")), new, old), "pivot_root")


def set_mount_flags(target: str, attributes: int, recursive: bool = True) -> None:
    """Add flags to a mount, and to all below it. Linux 5.12."""
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    path = ctypes.c_char_p(os.fsencode(target))
    flags = ctypes.c_long(_AT_RECURSIVE if recursive else 0)
    number = ctypes.c_long(_nr("mount_setattr"))
    result = _syscall(number, ctypes.c_long(_AT_FDCWD), path, flags, ctypes.c_char_p(attr), ctypes.c_long(len(attr)))
    _check(result, f"mount_setattr {target}")


def _prctl(option: int, *args: int) -> None:
    padded = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def set_name(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def set_dumpable(dumpable: bool) -> None:
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_no_new_privs() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_subreaper() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """Be signalled when the parent *thread* ends: only sound below a parent with one thread."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def drop_capability_bounds() -> None:
    """Empty the bounding set, so that no program run from here on can gain a capability."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            return  # EINVAL past the last one; EPERM for one who has none to drop


def drop_capabilities() -> None:
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", 0x20080522, 0)
    none = bytes(24)
    result = _syscall(ctypes.c_long(_nr("capset")), ctypes.c_char_p(header), ctypes.c_char_p(none))
    _check(result, "capset")


def set_hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def set_loopback_up() -> None:
    siocsifflags, up_running = 0x8914, 0x41
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(sock.fileno(), siocsifflags, struct.pack("16sH14x", b"lo", up_running))
    sock.close()


# --- seccomp ---------------------------------------------------------------------------------------

_LD_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_REFUSED_IOCTLS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into a terminal that was inherited
_FAMILIES = (
    1,
    2,
    10,
    16,
)  # unix, inet, inet6, netlink: a net namespace does not hold vsock, nor others yet to come

_Step = tuple[int, str, str, int]  # operation, where to go if it holds, where if not, operand


def seccomp_program() -> bytes:
    """A BPF program that refuses what `_NR` lists, and of some calls only what is out of bounds.

    clone3() answers ENOSYS: its flags lie behind a pointer that BPF cannot read, and every libc falls
    back to clone(). Refusals are EPERM and not death: an agent that only probes shall go on.
    """
    assert _COLUMN is not None
    on_arguments = {
        "clone": _argument(0, [(_JSET, "eperm", "", _CLONE_NEW_ANY)]),
        "ioctl": _argument(1, [(_JEQ, "eperm", "", request) for request in _REFUSED_IOCTLS]),
        "socket": _argument(0, [(_JEQ, "allow", "", family) for family in _FAMILIES], "eperm"),
        "self0": _argument(0, [(_JEQ, "allow", "", 0)], "eperm"),
        "self1": _argument(1, [(_JEQ, "allow", "", 0)], "eperm"),
    }
    judged = {name: name for name in ("clone", "ioctl", "socket")}
    judged |= {name: f"self{argument}" for name, argument in _SELF_ONLY}
    code: list[_Step] = [
        (_LD_ABS, "", "", 4),
        (_JEQ, "", "enosys", _AUDIT_ARCH[MACHINE]),
        (_LD_ABS, "", "", 0),
        (_JGE, "enosys", "", _X32_BIT),
        (_JEQ, "enosys", "", _nr("clone3")),
        *[(_JEQ, label, "", _nr(name)) for name, label in judged.items()],
    ]
    for name, numbers in _NR.items():
        number = numbers[_COLUMN]
        if number is not None and name not in _ALLOWED and name not in judged and name != "clone3":
            code.append((_JEQ, "eperm", "", number))
    code.append((_RET, "", "", _ALLOW))
    labels: dict[str, int] = {}
    for label, steps in on_arguments.items():
        labels[label] = len(code)
        code += steps
    for label, verdict in (
        ("allow", _ALLOW),
        ("eperm", _ERRNO | errno.EPERM),
        ("enosys", _ERRNO | errno.ENOSYS),
    ):
        labels[label] = len(code)
        code.append((_RET, "", "", verdict))

    def jump(label: str, at: int) -> int:
        return labels[label] - at - 1 if label else 0

    return b"".join(
        struct.pack("HBBI", op, jump(yes, at), jump(no, at), operand) for at, (op, yes, no, operand) in enumerate(code)
    )


def _argument(index: int, checks: list[_Step], otherwise: str = "allow") -> list[_Step]:
    verdict = _ALLOW if otherwise == "allow" else _ERRNO | errno.EPERM
    return [(_LD_ABS, "", "", 16 + 8 * index), *checks, (_RET, "", "", verdict)]


def install_seccomp(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0), "seccomp")


# --- Landlock --------------------------------------------------------------------------------------

_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2
SCOPING_ABI = 6  # the first Landlock that can keep signals and abstract sockets inside


def landlock_abi() -> int:
    """The version of Landlock, 0 without it."""
    if not SUPPORTED:
        return 0
    try:
        return _raw("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def landlock_scope() -> None:
    """From here on, signal, trace and reach abstract sockets only of processes that are in here too."""
    attr = struct.pack("QQQ", 0, 0, _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL)
    number = ctypes.c_long(_nr("landlock_create_ruleset"))
    ruleset = _check(
        _syscall(number, ctypes.c_char_p(attr), ctypes.c_long(len(attr)), ctypes.c_long(0)),
        "landlock_create_ruleset",
    )
    try:
        _raw("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
