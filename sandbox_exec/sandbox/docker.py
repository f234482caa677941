"""The Docker sandbox: one container for one trial, on the engine of this machine.

Theory of operation
  engine        makes the container, and runs it with all capabilities dropped, no new privileges, its default filter
                of system calls, no network, ceilings of its own, and an init that reaps
  container     a pid namespace: when its first process ends, the kernel has killed all others in it
  worker        us. Holds a folder, the scratch, and mounts what is in it into the container:
                    in/            task.json, read-only                           -> /in
                    box/workspace  \\ one tmpfs of the trial's size and number of  -> /workspace
                    box/out        / files, mounted here, if we may               -> /out
                    trace          a FIFO that we hold open at both ends          -> /run/trace
                stdout and stderr come over a connection that is attached before the start. Nothing of a trial is in the
                engine's logs

Who tells us what. The engine's `wait` says that the container has ended, and how. A handle on its first process (a
pidfd) says the same, sooner, and also when the engine is gone or hangs: it is the proof. Its cgroups, read while it
runs and once more at its end, say what was exceeded and used. Each call of the engine blocks, and so has a thread.

Limits of the limits. Where we may not mount (an ordinary user), /workspace and /out are plain folders: their size is
looked at twice a second, and no file can be larger than all may be together. So it is with the container's root, where
that can be written and the image lets the agent's user do so. `Isolation.disk` says which.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from sandbox_exec.contracts import ContainerSpec, Isolation, Limits
from sandbox_exec.errors import SandboxUnavailable
from sandbox_exec.sandbox import engine, usage
from sandbox_exec.sandbox.base import End, Launch, Listener, Sandbox, Stream
from sandbox_exec.sandbox.calls import Calls
from sandbox_exec.sandbox.container import Made, Maker, NotFilled, is_not_in, unmake
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.scratch import is_full, open_folder, read_file

_ROOT_LOOK_S: Final = 2.0  # between two looks at what was written to the container's root: the engine has to walk it
_BOX_LOOK_S: Final = 0.5  # and between those at plain folders
_EOF_S: Final = 2.0  # for the rest of the output, once the container has ended
_GONE_S: Final = 5.0  # for the engine to say how a container ended that has; it takes some milliseconds
_NOT_RUN: Final = (126, 127)  # what init exits with if it cannot start the program; and any program, if it likes
_NOT_RUN_BY_PODMAN: Final = (1, *_NOT_RUN)  # catatonit's, or of another init
_FRAME: Final = struct.Struct(">BxxxI")  # before each piece of output: which stream, how long
_STREAM: Final[dict[int, Stream]] = {1: "stdout", 2: "stderr"}
_CHUNK: Final = 1 << 16
_PROOF: Final = "init of the container's pid namespace is gone, and the kernel killed all in it first"
_UNPROVEN: Final = "none: the engine is gone, and its container is not ours to kill; `sandbox-exec reap` will"
_SAID: Final = "the engine says that the container has ended, and with it its pid namespace"


class DockerSandboxes:
    """Where containers come from: one engine, for one trial after the other."""

    def __init__(self, loop: Loop, slot: int = 0) -> None:
        self._loop, self._slot = loop, slot
        self._calls = Calls(loop)
        self._maker: Maker | None = None

    def acquire(self, launch: Launch, on_ready: Callable[[Sandbox], None], on_failure: Callable[[End], None]) -> None:
        """Make a container for it and fill its places; tell of it when it can be started, or why not."""

        def then(found: tuple[Maker, Made] | None, error: BaseException | None) -> None:
            if found is not None:
                maker, made = found
                on_ready(DockerSandbox(self._loop, self._calls, maker.client, made, maker.isolation(launch, made)))
            elif error is not None:
                if engine.is_down(error):
                    self._forget_engine()
                on_failure(_failed(error, launch.container))

        self._calls.make(lambda: self._make(launch), then)

    def release(self, sandbox: Sandbox, then: Callable[[], None]) -> None:
        """Remove the container and all that was made for it. What cannot be removed now is left to the reaper."""
        assert isinstance(sandbox, DockerSandbox)
        sandbox.forget()

        def done(_: None, error: BaseException | None) -> None:
            if error is not None and engine.is_down(error):
                self._forget_engine()
            then()

        self._calls.make(lambda: unmake(sandbox.made, sandbox.client), done)

    def close(self) -> None:
        self._calls.close()
        self._forget_engine()

    def _make(self, launch: Launch) -> tuple[Maker, Made]:
        """In a thread: all of it may block."""
        maker = self._maker = self._maker or Maker(self._slot)
        like, beside = (one.made if isinstance(one, DockerSandbox) else None for one in (launch.like, launch.beside))
        return maker, maker.make(launch, like, beside)

    def _forget_engine(self) -> None:
        """The next trial connects anew."""
        maker, self._maker = self._maker, None
        if maker is not None:
            maker.client.close()


class DockerSandbox:
    """See `Sandbox`. One container, which is started once."""

    def __init__(self, loop: Loop, calls: Calls, client: Any, made: Made, isolation: Isolation) -> None:
        self.isolation, self.made = isolation, made
        self._loop, self._calls, self.client = loop, calls, client
        self._listener: Listener | None = None
        self._limits = Limits()
        self._started = self._killing = self._paused = False
        self._pidfd = -1
        self._group = usage.Group()
        self._peak = 0
        self._cpu_s: float | None = None
        self._frames = b""
        self._output_open = True
        self._ended: dict[str, Any] | None = None  # what the engine said of its end
        self._gone = False  # what its pidfd says
        self._gone_at_s = 0.0
        self._fault = ""
        self._ended_at_s = 0.0
        self._next_look_s = {"root": 0.0, "box": 0.0}
        self._looking = False
        assert made.output is not None
        loop.add(made.output.fileno(), self._read_output)
        loop.add(made.trace, self._read_trace)

    @property
    def keeper_pidfd(self) -> int:
        """Of the container's first process."""
        return self._pidfd

    @property
    def steps_s(self) -> Mapping[str, float]:
        return self.made.steps_s

    # --- what the supervisor asks for ---

    def start(self, launch: Launch, listener: Listener) -> None:
        self._listener, self._limits, self._argv = listener, launch.limits, launch.argv
        began_s = time.monotonic()

        def then(_: None, error: BaseException | None) -> None:
            self.made.steps_s["start"] = round(time.monotonic() - began_s, 4)
            if error is not None:
                self._on_not_started(error)
            else:
                self._on_started()

        self._on_state({"Pid": self.made.pid}, None)
        self._calls.make(lambda: self.client.start(self.made.container), then)

    def terminate(self) -> None:
        if not self._signal_all(signal.SIGTERM):
            self._ask(lambda: self.client.kill(self.made.container, "SIGTERM"))

    def kill(self) -> None:
        self._killing = True
        if not self._started:
            return  # as soon as it is
        if self._paused:
            self._paused = False
            self._ask(lambda: self.client.unpause(self.made.container), self._kill_now)
        else:
            self._kill_now()

    def _kill_now(self) -> None:
        try:
            if self._pidfd < 0:
                raise PermissionError
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except OSError:  # not ours to kill, or not to be seen from here: the engine must do it
            self._ask(lambda: self.client.kill(self.made.container, "SIGKILL"))

    def _thaw_now(self) -> None:
        """Without the engine: on cgroup v1, what is frozen cannot even be killed."""
        if self._group.thaw is not None:
            path, word = self._group.thaw
            with contextlib.suppress(OSError):
                path.write_text(word)

    def kill_hard(self) -> None:
        """What the engine could not do in time: without it, if we may."""
        self._fault = self._fault or "the engine did not answer"
        self._thaw_now()
        self._kill_now()
        if self._gone:
            self._finish()

    def freeze(self) -> None:
        self._paused = True
        if self._started:
            self._pause()

    def _pause(self) -> None:
        # Not in a thread: who asks counts on its standing still when this returns.
        with contextlib.suppress(*engine.EngineErrors):
            self.client.pause(self.made.container)

    def thaw(self, paused_s: float) -> None:
        self._paused = False
        if self._started:
            with contextlib.suppress(*engine.EngineErrors):
                self.client.unpause(self.made.container)

    def peak_memory_bytes(self) -> int | None:
        self._look_at_usage()
        return self._peak or None

    def read_file(self, path: str, limit: int) -> bytes | None:
        return read_file(self.made.box, path, limit)

    def open_folder(self, name: str) -> int:
        shared = self.made.shared if name in ("workspace", "out") else None
        return open_folder((shared or self.made).box, name)

    def give(self, name: str) -> None:
        self.made.give(name)

    def close(self) -> None:
        self.kill()

    def forget(self) -> None:
        """Close all handles; what was made is somebody else's to take away."""
        if self.made.output is not None:
            if self._output_open:
                self._loop.remove(self.made.output.fileno())
            self.made.output.close()
            self.made.output = None
        if self.made.trace >= 0:
            self._loop.remove(self.made.trace)
            os.close(self.made.trace)
            self.made.trace = -1
        if self._pidfd >= 0:
            if not self._gone:
                self._loop.remove(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    # --- its life ---

    def _on_not_started(self, error: BaseException) -> None:
        end = _failed(error, None)
        self._end(End(setup=end.setup, fault=end.fault, proof="no process was started"))

    def _on_started(self) -> None:
        self._started = True
        if self._listener:
            self._listener.on_started()
        self._loop.add_look(self._look)
        self._calls.make(lambda: self.client.wait(self.made.container, timeout=None), self._on_waited)
        if self._pidfd < 0:
            self._calls.make(lambda: self.client.inspect_container(self.made.container)["State"], self._on_state)
        if self._killing:
            self.kill()
        elif self._paused:
            self._pause()

    def _on_state(self, state: dict[str, Any] | None, error: BaseException | None) -> None:
        """Its first process, if we can see it: the engine's pids are ours only on the same machine."""
        pid = state["Pid"] if state else 0
        if not pid or self._listener is None:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        lines = [line for line in usage.cgroup_lines(pid) if self.made.container in line]  # others: it is ending
        if not lines:
            os.close(pidfd)
            return
        self._pidfd, self._group = pidfd, usage.find_group(lines)
        self._loop.add(pidfd, self._on_gone)
        if self._killing:
            self._kill_now()

    def _on_gone(self) -> None:
        """All processes have ended. The engine will say how; if it can."""
        self._loop.remove(self._pidfd)
        self._gone, self._gone_at_s = True, time.monotonic()
        self._look_at_usage()  # before the engine removes the cgroup
        if self._fault:
            self._finish()

    def _on_waited(self, result: dict[str, Any] | None, error: BaseException | None) -> None:
        if self._listener is None:
            return
        if error is not None:
            self._on_engine_lost(error)
            return
        assert result is not None
        code = int(result["StatusCode"])

        def then(state: dict[str, Any] | None, error: BaseException | None) -> None:
            if self._listener is None:
                return
            self._ended = {"StatusCode": code, **(state or {})}
            self._ended_at_s = time.monotonic()
            self._loop.add_look(self._look)
            self._finish_if_quiet()

        self._calls.make(lambda: self._last_state(code), then)

    def _last_state(self, code: int) -> dict[str, Any]:
        state: dict[str, Any] = self.client.inspect_container(self.made.container)["State"]
        not_run = _NOT_RUN_BY_PODMAN if self.made.by_podman else _NOT_RUN
        if code in not_run and not self._killing and is_not_in(self.client, self.made.image_id, self._argv[0]):
            state["NotInImage"], state["StatusCode"] = True, _NOT_RUN[-1]
        return state

    def _on_engine_lost(self, error: BaseException) -> None:
        """The container may live on without its engine: kill it ourselves, and wait for that; else say so."""
        self._fault = engine.explain(error)
        self._killing = True
        if self._gone:
            self._finish()
        elif self._pidfd >= 0:
            self._thaw_now()
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except OSError:
                self._finish()
        else:
            self._finish()

    def _finish_if_quiet(self) -> None:
        """All of the output is here, or will not come any more."""
        late = time.monotonic() - self._ended_at_s > _EOF_S
        if self._ended is not None and (not self._output_open or late):
            self._finish()

    def _finish(self) -> None:
        if self._listener is None:
            return
        self._drain()
        ended = self._ended
        if ended is not None and ended.get("OOMKilled"):
            self._listener.on_exceeded("memory")
        code = ended["StatusCode"] if ended is not None else None
        by_signal = code is not None and 128 < code <= 128 + signal.SIGRTMAX  # as init and every shell say it
        known = ended is not None or self._gone
        self._end(
            End(
                exit_code=None if by_signal else code,
                signal=code - 128 if by_signal and code is not None else None,
                setup=f"there is no program {self._argv[0]!r} in the image" if (ended or {}).get("NotInImage") else "",
                fault="" if ended is not None else self._fault,
                left=0 if known else 1,
                proof=_PROOF if self._gone else _SAID if known else _UNPROVEN,
                cpu_s=self._cpu_s,
                peak_memory_bytes=self._peak or None,
                disk_full=self.isolation.disk == "tmpfs" and is_full(self.made.box),
            )
        )

    def _end(self, end: End) -> None:
        listener, self._listener = self._listener, None
        self._loop.remove_look(self._look)
        if listener is not None:
            listener.on_ended(end)

    # --- what comes out of it ---

    def _read_output(self) -> None:
        output = self.made.output
        assert output is not None
        try:
            data = output.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove(output.fileno())
            self._output_open = False
            self._finish_if_quiet()
            return
        self._frames += data
        while len(self._frames) >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._frames)
            if len(self._frames) < _FRAME.size + size:
                break
            piece = self._frames[_FRAME.size : _FRAME.size + size]
            self._frames = self._frames[_FRAME.size + size :]
            if self._listener and kind in _STREAM:
                self._listener.on_output(_STREAM[kind], memoryview(piece))

    def _read_trace(self) -> int:
        try:
            count = os.readv(self.made.trace, [self._loop.buffer])
        except BlockingIOError:
            return 0
        if self._listener:
            self._listener.on_output("trace", memoryview(self._loop.buffer)[:count])
        return count

    def _drain(self) -> None:
        for _ in range(64):  # more than the pipe holds
            if not self._read_trace():
                break

    # --- what it uses ---

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._ended is not None:
            self._finish_if_quiet()
            return
        if self._gone:
            if now_s - self._gone_at_s > _GONE_S:
                self._fault = f"{engine.explain(TimeoutError())}; how the container ended is not known"
                self._finish()
            return
        self._look_at_usage()
        if self._looking or self._listener is None:
            return
        if self.isolation.disk == "watched" and now_s >= self._next_look_s["box"]:
            self._next_look_s["box"] = now_s + _BOX_LOOK_S
            self._look_later(functools.partial(usage.size_of, self.made.folder / "box", self._limits.files))
        elif now_s >= self._next_look_s["root"]:
            first = self._next_look_s["root"] == 0.0
            self._next_look_s["root"] = now_s + _ROOT_LOOK_S
            if not first:
                self._look_later(functools.partial(usage.root_size, self.client, self.made.container))

    def _look_later(self, size: Callable[[], int]) -> None:
        self._looking = True

        def then(found: int | None, error: BaseException | None) -> None:
            self._looking = False
            if found is not None and found > self._limits.disk and self._listener:
                self._listener.on_exceeded("disk")

        self._calls.make(size, then)

    def _look_at_usage(self) -> None:
        group = self._group
        self._peak = max(self._peak, usage.number(group.peak))
        cpu = usage.cpu_s(group.cpu)
        self._cpu_s = cpu if cpu is not None else self._cpu_s
        if self._listener:
            if usage.count(group.oom, "oom_kill"):
                self._listener.on_exceeded("memory")
            if usage.count(group.pids, "max"):
                self._listener.on_exceeded("pids")

    def _signal_all(self, number: int) -> bool:
        """Whether every process of the container got it, directly."""
        if self._group.procs is None or os.geteuid() != 0:
            return False
        try:
            pids = [int(pid) for pid in self._group.procs.read_text().split()]
        except (OSError, ValueError):
            return False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def _ask(self, call: Callable[[], Any], then: Callable[[], None] | None = None) -> None:
        def told(_: Any, error: BaseException | None) -> None:
            if error is not None and engine.is_down(error):
                self._on_engine_lost(error)
            elif then is not None:
                then()

        self._calls.make(call, told)


def _failed(error: BaseException, spec: ContainerSpec | None) -> End:
    """Whose fault it is that there is no container, or that it did not start."""
    if isinstance(error, SandboxUnavailable):
        return End(fault=str(error))
    if isinstance(error, NotFilled):
        return End(setup=f"the sandbox cannot be filled: {error}")
    if spec is not None and engine.is_missing(error) and "image" in str(error).lower():
        return End(
            setup=f"there is no image {spec.image!r}: build it (sandbox-exec images build), or pull it (docker pull)"
        )
    if engine.is_down(error) or engine.is_full(error):
        return End(fault=engine.explain(error))
    if not engine.is_answer(error):  # no room for a folder of ours, no more descriptors
        return End(fault=f"the sandbox cannot be made: {type(error).__name__}: {error}")
    return End(setup=engine.explain(error))
