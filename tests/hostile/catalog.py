"""What must become of each hostile agent, and where: one table, plain data.

How to run a row. As a callable: `pool.submit(attack, ready, **arguments)` with the module's `attack`, where
`ready` traces its dict as an event of type "ready". As a command: `python agents/<module>.py key=value ...`,
which traces the same event, and the result as an event of type "result".

What a row promises, in a `Situation`:
- a "ready" event is in the trace: without it the attack did not take place, and the rest proves nothing;
- the trial ends with one of `statuses`, or of `otherwise` where `otherwise_where` holds;
- "escaped", in the ready event or the result, is true where `escapes_where` holds, and false elsewhere;
- a process of it is left where `survives_where` holds, and none elsewhere; `racy_where`: it can go either way.
  None is left anywhere once its pool is closed;
- the supervisor is stopped or dead where `harms_where` holds, and unharmed elsewhere.

All five hold exactly: an agent that no longer does what the table says has to lose its entry. On the rungs with
namespaces nothing survives and nobody is harmed, so those columns speak of the others only.

What may be left behind where there are no namespaces is named so that a test can find it: files and folders
`hostile-*`, System V keys 0x5B0Exxxx and 0x5B0Fxxxx. A process that survives ends by itself after minutes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["hangs", "finishes", "dies"]
"""Never ends by itself; returns a result; is ended by a signal, an exception or a ceiling."""

Ceilings = Literal["cgroup", "watched", "none"]
"""Held by the kernel; looked at by the keeper; not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where an agent runs, as far as it matters to what it can do."""

    rung: str
    as_root: bool  # the supervisor
    shares_uid: bool  # the agent and its supervisor
    ceilings: Ceilings
    delegated: bool = False  # a cgroup is the supervisor's to write
    landlock: bool = False  # in force: only ever without namespaces

    @property
    def namespaced(self) -> bool:
        return self.rung in ("root-namespaces", "user-namespaces")


Where = Callable[[Situation], bool]


def nowhere(situation: Situation) -> bool:
    return False


def _in_sight(situation: Situation) -> bool:
    """The caller's files, with the caller's uid."""
    return not situation.namespaced and situation.shares_uid


def _unshielded(situation: Situation) -> bool:
    """The caller's processes, with the caller's uid, and nothing to stop a signal or a look."""
    return _in_sight(situation) and not situation.landlock


def _on_hosts_network(situation: Situation) -> bool:
    return not situation.namespaced


def _among_hosts_sockets(situation: Situation) -> bool:
    return not situation.namespaced and not situation.landlock


def _as_root_in_user_namespace(situation: Situation) -> bool:
    """What belongs to root can be opened by an agent that is root, without any capability."""
    return situation.rung == "user-namespaces" and situation.as_root


def _in_a_cgroup_of_its_own_uid(situation: Situation) -> bool:
    return _in_sight(situation) and situation.delegated


def _on_the_last_rung(situation: Situation) -> bool:
    """What leaves its process group, and loses its parent, is found by nobody."""
    return situation.rung == "process-group"


def _without_ceilings(situation: Situation) -> bool:
    return situation.ceilings == "none"


def _without_cgroup(situation: Situation) -> bool:
    """Memory that no process maps is counted by a cgroup only."""
    return situation.ceilings != "cgroup"


def _either(*wheres: Where) -> Where:
    return lambda situation: any(where(situation) for where in wheres)


def _on_the_last_rung_with_a_keeper(situation: Situation) -> bool:
    """Who kills its keeper has its orphans looked for; who only leaves the process group has not."""
    return _on_the_last_rung(situation) and not _unshielded(situation)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileAgent:
    name: str
    module: str  # in hostile.agents
    wants: str
    kind: Kind
    statuses: frozenset[str]  # what the outcome may say
    otherwise_where: Where = nowhere
    otherwise: frozenset[str] = frozenset()
    escapes_where: Where = nowhere
    survives_where: Where = nowhere
    racy_where: Where = nowhere
    harms_where: Where = nowhere
    detaches: bool = False  # leaves processes outside of its tree, session or group
    limits: Mapping[str, Any] = field(default_factory=dict)  # for Limits(**limits)
    arguments: tuple[str, ...] = ()  # what the test must pass to attack(); `outer_pidns` guards the machine
    runs_as: tuple[str, ...] = ("callable", "command")

    def allowed(self, situation: Situation) -> frozenset[str]:
        return self.otherwise if self.otherwise_where(situation) else self.statuses


HANG_S = 0.3  # most are ready in a few milliseconds; one that was not is run again with more time
FINISH_S = 20.0  # never reached by what finishes: it only bounds a failing test
CEILING_S = 4.0  # far more than it takes to reach a ceiling, where there is one

TIMEOUT = ("task_timeout",)
SUCCESS = ("success",)
ERROR = ("agent_error",)
MEMORY = ("memory_exceeded",)
PIDS = ("pids_exceeded",)
LOST = ("environment_error",)


def _row(
    kind: Kind,
    name: str,
    wants: str,
    statuses: tuple[str, ...],
    *,
    module: str | None = None,
    limits: Mapping[str, Any] | None = None,
    otherwise: tuple[str, ...] = (),
    **rest: Any,
) -> HostileAgent:
    timeout_s = HANG_S if kind == "hangs" else FINISH_S
    return HostileAgent(
        name=name,
        module=module or name,
        wants=wants,
        kind=kind,
        statuses=frozenset(statuses),
        otherwise=frozenset(otherwise),
        limits={"timeout_s": timeout_s, "grace_s": 0.1, **(limits or {})},
        **rest,
    )


def _hangs(name: str, wants: str, statuses: tuple[str, ...] = TIMEOUT, **rest: Any) -> HostileAgent:
    return _row("hangs", name, wants, statuses, **rest)


def _finishes(name: str, wants: str, statuses: tuple[str, ...] = SUCCESS, **rest: Any) -> HostileAgent:
    return _row("finishes", name, wants, statuses, **rest)


def _dies(name: str, wants: str, statuses: tuple[str, ...] = ERROR, **rest: Any) -> HostileAgent:
    return _row("dies", name, wants, statuses, **rest)


def _daemon(make: Callable[..., HostileAgent], name: str, wants: str, **rest: Any) -> HostileAgent:
    return make(name, wants, detaches=True, **{"survives_where": _on_the_last_rung, **rest})


def _hog(name: str, wants: str, statuses: tuple[str, ...] = MEMORY, **rest: Any) -> HostileAgent:
    limits = {"memory": "128MiB", "timeout_s": CEILING_S, **rest.pop("limits", {})}
    return _dies(name, wants, statuses, **{"otherwise": TIMEOUT, **rest}, limits=limits)


def _bomb(name: str, wants: str, **rest: Any) -> HostileAgent:
    # It takes the processor from a keeper that only watches, which may then not see it before its deadline.
    limits, either = {"pids": 64, "timeout_s": CEILING_S}, PIDS + TIMEOUT
    return _dies(name, wants, PIDS, limits=limits, otherwise_where=_without_cgroup, otherwise=either, **rest)


_PIDNS: Final = ("outer_pidns",)

_ROWS = (
    # To live on: the 19 measured, and their kin.
    _hangs("busy_loop", "the processor for ever"),
    _hangs("ignores_every_signal", "to survive a polite stop"),
    _bomb("fork_bomb", "every process slot", detaches=True),
    _bomb("thread_bomb", "every task slot"),
    _daemon(_hangs, "pid_hopper", "to be faster than a kill by pid"),
    _daemon(
        _finishes,
        "pid_hopper_outlives_parent",
        "to run after the trial, never with the same pid",
        racy_where=_on_the_last_rung,  # it may be killed between its fork and its first own session
    ),
    _daemon(_hangs, "daemon_parent_hangs", "to leave the process tree"),
    _daemon(_finishes, "daemon_outlives_parent", "to run after a success"),
    _daemon(_hangs, "daemon_heartbeats", "to outlive a killed supervisor"),
    _daemon(
        _hangs,
        "forks_daemon_in_grace",
        "to use the grace after SIGTERM",
        limits={"grace_s": 0.5},  # it needs the grace to attack at all
        survives_where=nowhere,  # what it forked is still below it when the tree is walked
    ),
    _daemon(_finishes, "holds_stdout_open", "a supervisor that waits for EOF"),
    _daemon(_hangs, "looks_like_ours", "to be spared by a search for names", arguments=("name",)),
    _daemon(
        _hangs,
        "daemon_leaves_its_cgroup",
        "to be in no list that a kill goes by",
        escapes_where=_in_a_cgroup_of_its_own_uid,
    ),
    _daemon(
        _hangs,
        "daemon_kills_parent",
        "no watcher to find it",
        arguments=_PIDNS,
        survives_where=_on_the_last_rung_with_a_keeper,
        otherwise_where=_unshielded,
        otherwise=LOST,
    ),
    _hangs("stops_itself", "neither to end nor to answer"),
    _hangs(
        "stops_parent_and_supervisor",
        "nobody to watch the deadline",
        arguments=_PIDNS,
        harms_where=_unshielded,
    ),
    _hangs("kills_parent", "its watcher dead", arguments=_PIDNS, otherwise_where=_unshielded, otherwise=LOST),
    _dies("kills_supervisor_and_everyone", "everybody dead", arguments=_PIDNS, harms_where=_unshielded),
    _hangs("starves_its_parent", "its watcher to fail", arguments=_PIDNS),
    _hangs("ptraces_everyone", "to hold others still", arguments=_PIDNS),
    _hangs("signal_storm", "its watcher drowned in signals", arguments=_PIDNS),
    _hangs("stuck_in_c", "no Python handler ever to run"),
    _hangs("main_thread_exits", "to look dead: a zombie whose other threads go on"),
    _hangs("execs_from_a_thread", "its watcher to lose it"),
    _hangs("execs_for_ever", "never to be the program that was looked at"),
    _hangs("vfork_parent", "a process that answers nothing"),
    _hangs("zombie_maker", "slots that nobody frees"),
    _hangs("leaves_its_cgroup", "to be where no ceiling holds", escapes_where=_in_a_cgroup_of_its_own_uid),
    # To have more than its share.
    _hog("memory_hog", "all memory", otherwise_where=_without_ceilings),
    _hog("memfd_hog", "memory that nobody maps", otherwise_where=_without_cgroup),
    _hog(
        "sysv_shm_hog",
        "memory that outlives every process",
        limits={"timeout_s": FINISH_S},
        otherwise_where=_without_cgroup,
        otherwise=SUCCESS,
        escapes_where=_without_cgroup,
    ),
    _hog(
        "posix_shm_hog",
        "memory that stays in /dev/shm",
        (*MEMORY, *SUCCESS, "disk_exceeded"),
        limits={"disk": "32MiB"},
    ),
    _hog("child_oom_killed", "its memory forgiven", otherwise_where=_without_ceilings),
    _hog(
        "spares_itself_from_oom",
        "somebody else killed for its memory",
        otherwise_where=_without_ceilings,
        escapes_where=_either(_in_sight, _as_root_in_user_namespace),
    ),
    _finishes("raises_its_limits", "more than it was given"),
    _finishes("takes_realtime_priority", "the processor first"),
    _hangs("exhausts_inotify", "other trials to fail"),
    _hangs("stdout_flood", "the supervisor's memory or disk"),
    _dies(
        "stdout_flood_over_the_ceiling",
        "the supervisor's memory or disk",
        ("output_exceeded",),
        module="stdout_flood",
        limits={"output_ceiling": "16MiB"},
    ),
    # Without namespaces nothing of ours bounds what is written, and the machine does: tests give it little room.
    _finishes("disk_fill", "the disk full", (*SUCCESS, *MEMORY, "disk_exceeded"), limits={"disk": "32MiB"}),
    _finishes(
        "fills_out",
        "the run's disk through what is collected",
        (*SUCCESS, "disk_exceeded"),
        limits={"disk": "32MiB"},
    ),
    _finishes("sparse_file_in_out", "the run's disk for nothing", (*SUCCESS, "disk_exceeded")),
    _finishes("inode_fill", "every inode", (*SUCCESS, "disk_exceeded"), limits={"files": 1000}),
    _finishes("inode_fill_in_out", "a collector that never ends", (*SUCCESS, "disk_exceeded")),
    # To lie to its supervisor.
    _hangs("closes_stdout", "to be taken for finished"),
    _hangs("poisons_every_descriptor", "its watcher's channels"),
    _finishes("reads_stdin", "what the caller types"),
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
    _finishes("links_in_out", "files of the host read or overwritten", SUCCESS + ERROR),
    _finishes("fifo_at_result", "a reader that hangs", SUCCESS + ERROR),
    _finishes("socket_at_result", "a reader that fails", SUCCESS + ERROR),
    _finishes("replaces_out_directory", "the collector elsewhere", SUCCESS + ERROR, escapes_where=_in_sight),
    # To see or reach what is not its own.
    _finishes("reads_memory_of_others", "others' secrets", escapes_where=_unshielded),
    _finishes("opens_descriptors_of_others", "others' pipes", escapes_where=_unshielded),
    _finishes("snoops_environment", "others' keys", escapes_where=_unshielded, arguments=("secret",)),
    _finishes("reads_callers_home", "the caller's keys", escapes_where=_in_sight, arguments=("home", "canary")),
    _finishes("reads_private_system_files", "what only root may read", escapes_where=_as_root_in_user_namespace),
    _finishes("writes_system_files", "to change what others run"),
    _finishes("writes_kernel_settings", "code run by the kernel"),
    _finishes("leaves_its_root", "the host's files", escapes_where=_in_sight, arguments=("hidden",)),
    _finishes("opens_by_handle", "files by number"),
    _finishes("opens_devices", "the raw disk or memory"),
    _finishes(
        "connects_to_abstract_socket",
        "a service of the host without a file",
        escapes_where=_among_hosts_sockets,
        arguments=("target",),
    ),
    _finishes(
        "connects_to_path_socket",
        "a service of the host by its file",
        escapes_where=_in_sight,
        arguments=("target",),
    ),
    _finishes(
        "connects_to_loopback",
        "a service of the host's loopback",
        escapes_where=_on_hosts_network,
        arguments=("target",),
    ),
    _finishes("opens_vsock", "the hypervisor"),
    _finishes("terminal_injection", "to type in the caller's terminal"),
    # The next three are halves: what they gain is seen in the other one, run beside or after it.
    _hangs("listens_for_other_trials", "to work together with another trial", arguments=("target",)),
    _finishes("leaves_marks", "to reach the next trial"),
    _finishes("finds_marks", "what an earlier trial left"),
    # To have other rights.
    _finishes("io_uring", "system calls that no filter sees"),
    _finishes("forbidden_syscalls", "the kernel's rarer doors"),
    _finishes("new_namespaces", "to be root somewhere"),
    _finishes("mounts", "another view of the files"),
    _finishes("runs_setuid_programs", "root from a setuid program"),
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
