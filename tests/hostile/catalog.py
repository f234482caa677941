"""What must become of each hostile agent: one table, plain data.

How to run a row. As a callable: `pool.submit(attack, ready, **arguments)` with the module's `attack`, where
`ready` traces its dict as an event of type "ready". As a command: `python agents/<module>.py key=value ...`,
which traces the same event, and the result as an event of type "result".

What a row promises, on the namespaced rungs with ceilings held by a cgroup:
- a "ready" event is in the trace: without it the attack did not take place, and the rest proves nothing;
- the trial ends with one of `statuses`, and no process of it is left;
- "escaped" is false in the ready event and in the result, where `escape_must_be_false`.

What may be left behind where there are no namespaces is named so that a test can find it: files and folders
`hostile-*`, System V keys 0x5B0Exxxx and 0x5B0Fxxxx. A process that survives ends by itself after minutes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["hangs", "finishes", "dies"]
"""Never ends by itself; returns a result; is ended by a signal, an exception or a ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileAgent:
    name: str
    module: str  # in tests.hostile.agents
    wants: str
    kind: Kind
    statuses: frozenset[str]  # what the outcome may say
    detaches: bool = False  # leaves processes outside of its tree, session or group
    escape_must_be_false: bool = False  # only where the agent can tell by itself
    limits: Mapping[str, Any] = field(default_factory=dict)  # for Limits(**limits)
    weak: str = ""  # what may go wrong on the rungs without namespaces
    arguments: tuple[str, ...] = ()  # what the test must pass to attack(); `outer_pidns` guards the machine
    runs_as: tuple[str, ...] = ("callable", "command")


HANG_S = 0.4  # most are ready in a few milliseconds; one that was not is run again with more time
FINISH_S = 20.0  # never reached by what finishes: it only bounds a failing test

TIMEOUT = ("task_timeout",)
SUCCESS = ("success",)
ERROR = ("agent_error",)
MEMORY = ("memory_exceeded",)
PIDS = ("pids_exceeded",)

SURVIVES = "the daemon may survive"
HARMS = "may stop, trace or kill its supervisor, and whatever has the same uid"
UNCOUNTED = "not counted where memory is measured by process: passes the ceiling"
SHARED_VIEW = "sees the host's file system with the caller's rights"
SHARED_PROC = "sees the host's processes; what has the same uid can be read"
NO_FILTER = "no filter of system calls without namespaces: what an ordinary user may do works"


def _row(
    kind: Kind,
    name: str,
    wants: str,
    statuses: tuple[str, ...],
    *,
    module: str | None = None,
    limits: Mapping[str, Any] | None = None,
    escape: bool = False,
    **rest: Any,
) -> HostileAgent:
    timeout_s = HANG_S if kind == "hangs" else FINISH_S
    return HostileAgent(
        name=name,
        module=module or name,
        wants=wants,
        kind=kind,
        statuses=frozenset(statuses),
        limits={"timeout_s": timeout_s, "grace_s": 0.1, **(limits or {})},
        escape_must_be_false=escape,
        **rest,
    )


def _hangs(name: str, wants: str, statuses: tuple[str, ...] = TIMEOUT, **rest: Any) -> HostileAgent:
    return _row("hangs", name, wants, statuses, **rest)


def _finishes(name: str, wants: str, statuses: tuple[str, ...] = SUCCESS, **rest: Any) -> HostileAgent:
    return _row("finishes", name, wants, statuses, **rest)


def _dies(name: str, wants: str, statuses: tuple[str, ...] = ERROR, **rest: Any) -> HostileAgent:
    return _row("dies", name, wants, statuses, **rest)


_PIDNS: Final = ("outer_pidns",)
_SMALL: Final = {"memory": "128MiB"}

_ROWS = (
    # To live on: the 19 measured, and their kin.
    _hangs("busy_loop", "the processor for ever"),
    _hangs("ignores_every_signal", "to survive a polite stop"),
    _dies("fork_bomb", "every process slot", PIDS, limits={"pids": 64}, detaches=True, weak="slow to sweep"),
    _dies(
        "thread_bomb", "every task slot", PIDS, limits={"pids": 64}, weak="bounded by RLIMIT_NPROC at best"
    ),
    _hangs("pid_hopper", "to be faster than a kill by pid", detaches=True, weak="may outrun a tree kill"),
    _finishes(
        "pid_hopper_outlives_parent",
        "to run after the trial, never with the same pid",
        detaches=True,
        weak="may outrun a tree kill",
    ),
    _hangs("daemon_parent_hangs", "to leave the process tree", detaches=True, weak=SURVIVES),
    _finishes("daemon_outlives_parent", "to run after a success", detaches=True, weak=SURVIVES),
    _hangs("daemon_heartbeats", "to outlive a killed supervisor", detaches=True, weak=SURVIVES),
    _hangs(
        "forks_daemon_in_grace",
        "to use the grace after SIGTERM",
        detaches=True,
        limits={"grace_s": 0.5},  # it needs the grace to attack at all
        weak=SURVIVES,
    ),
    _finishes("holds_stdout_open", "a supervisor that waits for EOF", detaches=True, weak=SURVIVES),
    _hangs("stops_itself", "neither to end nor to answer"),
    _hangs("stops_parent_and_supervisor", "nobody to watch the deadline", arguments=_PIDNS, weak=HARMS),
    _hangs("kills_parent", "its watcher dead", arguments=_PIDNS, weak=HARMS),
    _hangs("daemon_kills_parent", "no watcher to find it", arguments=_PIDNS, detaches=True, weak=HARMS),
    _dies("kills_supervisor_and_everyone", "everybody dead", arguments=_PIDNS, weak=HARMS),
    _hangs("starves_its_parent", "its watcher to fail", arguments=_PIDNS, escape=True, weak=HARMS),
    _hangs("ptraces_everyone", "to hold others still", arguments=_PIDNS, escape=True, weak=HARMS),
    _hangs("signal_storm", "its watcher drowned in signals", arguments=_PIDNS, weak=HARMS),
    _hangs("stuck_in_c", "no Python handler ever to run"),
    _hangs("main_thread_exits", "to look dead", weak="shows as a zombie: a tree kill must not skip it"),
    _hangs("execs_from_a_thread", "its watcher to lose it"),
    _hangs("execs_for_ever", "never to be the program that was looked at"),
    _hangs("vfork_parent", "a process that answers nothing"),
    _hangs("zombie_maker", "slots that nobody frees"),
    _hangs(
        "looks_like_ours",
        "to be spared by a search for names",
        detaches=True,
        arguments=("name",),
        weak=SURVIVES,
    ),
    _hangs(
        "leaves_its_cgroup",
        "to be where no ceiling holds",
        escape=True,
        weak="leaves it if it may write the tree: as root, or as the user that it is delegated to",
    ),
    _hangs("daemon_leaves_its_cgroup", "to be in no list that a kill goes by", escape=True, detaches=True),
    # To have more than its share.
    _dies("memory_hog", "all memory", MEMORY, limits=_SMALL, weak="passes the ceiling between two looks"),
    _dies("memfd_hog", "memory that nobody maps", MEMORY, limits=_SMALL, weak=UNCOUNTED),
    _dies(
        "sysv_shm_hog",
        "memory that outlives every process",
        MEMORY + SUCCESS,
        limits=_SMALL,
        escape=True,
        weak=UNCOUNTED + "; segments stay",
    ),
    _dies(
        "posix_shm_hog",
        "memory that stays in /dev/shm",
        (*MEMORY, *SUCCESS, "disk_exceeded"),
        limits={"memory": "128MiB", "disk": "32MiB"},
        escape=True,
        weak=UNCOUNTED + "; files stay",
    ),
    _finishes("child_oom_killed", "its memory forgiven", MEMORY, limits=_SMALL, weak="its success may stand"),
    _dies(
        "spares_itself_from_oom",
        "somebody else killed for its memory",
        MEMORY,
        limits=_SMALL,
        escape=True,
        weak="may write its parent's score",
    ),
    _finishes("raises_its_limits", "more than it was given", escape=True, weak="works as root"),
    _finishes("takes_realtime_priority", "the processor first", escape=True, weak="works as root"),
    _hangs(
        "exhausts_inotify", "other trials to fail", weak="what is counted by user is shared by all trials"
    ),
    _hangs("stdout_flood", "the supervisor's memory or disk"),
    _dies(
        "stdout_flood_over_the_ceiling",
        "the supervisor's memory or disk",
        ("output_exceeded",),
        module="stdout_flood",
        limits={"output_ceiling": "16MiB"},
    ),
    _finishes(
        "disk_fill",
        "the disk full",
        (*SUCCESS, *MEMORY, "disk_exceeded"),
        limits={"disk": "32MiB"},
        escape=True,
        weak="nothing bounds the total: it writes all its 2 GiB",
    ),
    _finishes(
        "fills_out",
        "the run's disk through what is collected",
        (*SUCCESS, "disk_exceeded"),
        limits={"disk": "32MiB"},
        escape=True,
        weak="nothing bounds the total but what is collected",
    ),
    _finishes("sparse_file_in_out", "the run's disk for nothing", (*SUCCESS, "disk_exceeded")),
    _finishes(
        "inode_fill",
        "every inode",
        (*SUCCESS, "disk_exceeded"),
        limits={"files": 1000},
        escape=True,
        weak="nothing bounds the count: it makes all its 300 000 files",
    ),
    _finishes("inode_fill_in_out", "a collector that never ends", (*SUCCESS, "disk_exceeded")),
    # To lie to its supervisor.
    _hangs("closes_stdout", "to be taken for finished"),
    _hangs("poisons_every_descriptor", "its watcher's channels"),
    _finishes("reads_stdin", "what the caller types", escape=True),
    _finishes(
        "trace_flood",
        "the supervisor's memory, through the trace",
        SUCCESS + TIMEOUT,
        limits={"timeout_s": 2.0, "trace": "1MiB"},
    ),
    _dies("torn_trace", "the events before the last lost"),
    _finishes("forged_frames", "the supervisor's parser to fail or to believe", SUCCESS + ERROR),
    _finishes("child_answers_too", "two results for one call", SUCCESS + ERROR, runs_as=("callable",)),
    _dies("exits_without_result", "success for nothing", runs_as=("callable",)),
    _dies("returns_pickle_bomb", "its code run by us", arguments=("target",), runs_as=("callable",)),
    _dies(
        "returns_huge_result",
        "the supervisor's memory, through the result",
        (*ERROR, "output_exceeded"),
        runs_as=("callable",),
    ),
    _dies("returns_deep_result", "the supervisor's stack"),
    _dies("returns_odd_values", "a result that JSON cannot carry"),
    _dies("raises_odd_exception", "whoever reports its error to fail"),
    # To mislead the collector.
    _finishes("odd_file_names", "whoever lists its output to stumble"),
    _finishes("deep_directories", "a recursive walk to fail"),
    _finishes("locks_its_folders", "to leave what nobody can remove"),
    _finishes(
        "links_in_out", "files of the host read or overwritten", SUCCESS + ERROR, escape=True, weak=SHARED_VIEW
    ),
    _finishes("fifo_at_result", "a reader that hangs", SUCCESS + ERROR),
    _finishes("socket_at_result", "a reader that fails", SUCCESS + ERROR),
    _finishes("replaces_out_directory", "the collector elsewhere", escape=True, weak=SHARED_VIEW),
    # To see or reach what is not its own.
    _finishes("reads_memory_of_others", "others' secrets", escape=True, weak=SHARED_PROC),
    _finishes("opens_descriptors_of_others", "others' pipes", escape=True, weak=SHARED_PROC),
    _finishes("snoops_environment", "others' keys", escape=True, arguments=("secret",), weak=SHARED_PROC),
    _finishes(
        "reads_callers_home", "the caller's keys", escape=True, arguments=("home", "canary"), weak=SHARED_VIEW
    ),
    _finishes("reads_private_system_files", "what only root may read", escape=True, weak="works as root"),
    _finishes("writes_system_files", "to change what others run", escape=True, weak=SHARED_VIEW),
    _finishes("writes_kernel_settings", "code run by the kernel", escape=True, weak="works as root"),
    _finishes("leaves_its_root", "the host's files", escape=True, arguments=("hidden",), weak=SHARED_PROC),
    _finishes("opens_by_handle", "files by number", escape=True, weak="works as root"),
    _finishes("opens_devices", "the raw disk or memory", escape=True, weak="works as root"),
    _finishes(
        "connects_to_abstract_socket",
        "a service of the host without a file",
        escape=True,
        arguments=("target",),
        weak="connects, unless Landlock scopes it",
    ),
    _finishes(
        "connects_to_path_socket",
        "a service of the host by its file",
        escape=True,
        arguments=("target",),
        weak=SHARED_VIEW,
    ),
    _finishes(
        "connects_to_loopback",
        "a service of the host's loopback",
        escape=True,
        arguments=("target",),
        weak="connects: it has the host's network",
    ),
    _finishes("opens_vsock", "the hypervisor", escape=True, weak=NO_FILTER),
    _finishes("terminal_injection", "to type in the caller's terminal", escape=True),
    _hangs(
        "listens_for_other_trials",
        "to work together with another trial",  # run a connects_to_* beside it: that one must not escape
        arguments=("target",),
        weak="the host's network is shared by all trials",
    ),
    _finishes("leaves_marks", "to reach the next trial", weak="finds_marks, run after it, finds them"),
    _finishes("finds_marks", "what an earlier trial left", escape=True, weak="shared places and ipc"),
    # To have other rights.
    _finishes("io_uring", "system calls that no filter sees", escape=True, weak=NO_FILTER),
    _finishes("forbidden_syscalls", "the kernel's rarer doors", escape=True, weak=NO_FILTER),
    _finishes("new_namespaces", "to be root somewhere", escape=True, weak=NO_FILTER),
    _finishes("mounts", "another view of the files", escape=True, weak="works as root"),
    _finishes("runs_setuid_programs", "root from a setuid program", escape=True),
)

CATALOG: Final[Mapping[str, HostileAgent]] = {row.name: row for row in _ROWS}

MEASURED: Final = (  # the 19 that every mechanism of killing is measured with
    "busy_loop",
    "ignores_every_signal",
    "fork_bomb",
    "pid_hopper",
    "daemon_parent_hangs",
    "daemon_outlives_parent",
    "stops_itself",
    "stops_parent_and_supervisor",
    "ptraces_everyone",
    "stuck_in_c",
    "memory_hog",
    "stdout_flood",
    "disk_fill",
    "kills_parent",
    "kills_supervisor_and_everyone",
    "poisons_every_descriptor",
    "vfork_parent",
    "leaves_its_cgroup",
    "daemon_heartbeats",
)
