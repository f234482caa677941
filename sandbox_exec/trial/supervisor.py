"""The supervisor of one trial: listens to its sandbox, knows its deadline, ends it, and says how it ended.

Theory of operation. A state machine without a thread or a selector of its own: the sandbox calls `on_output`,
`on_exceeded` and `on_ended` from the loop that it shares with others; whoever runs the loop asks for `due_s` and
calls `on_time` when that has come. States:

  running    until a deadline, a ceiling, a `stop`, or the end
  grace      SIGTERM has been sent at the deadline; a decent agent flushes and ends by itself
  killing    the sandbox has been told to empty itself. If it does not answer in KILL_PATIENCE_S, it is given up
  frozen     beside the above: time stands still, and only a stop ends it
  ended      `outcome` is there. Reached only through `on_ended`: there is no outcome while a process is left

The first cause wins: an agent that is killed for its memory and would also have been late is `memory_exceeded`.
Nothing here waits for the end of a pipe: a daemon may hold one open for ever.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Literal

from sandbox_exec.clock import Clock
from sandbox_exec.contracts import AgentError, Dropped, KillReason, KillReport, Outcome, Status, Usage
from sandbox_exec.sandbox.base import Ceiling, End, Launch, Sandbox, Stream
from sandbox_exec.trial.trace import Tail, TooDeep, TraceReader, parse_json, parse_object

KILL_PATIENCE_S = 2.0  # a keeper answers in milliseconds; under a fork bomb, in some tens of them
_SIGXFSZ = 25
_STATUS_OF: dict[KillReason, Status] = {
    "deadline": Status.TASK_TIMEOUT,
    "memory": Status.MEMORY_EXCEEDED,
    "pids": Status.PIDS_EXCEEDED,
    "output": Status.OUTPUT_EXCEEDED,
    "disk": Status.DISK_EXCEEDED,
    "cancelled": Status.CANCELLED,
}


class Supervisor:
    """One trial from start to outcome. `on_outcome` is called once, from the loop's thread."""

    def __init__(
        self,
        sandbox: Sandbox,
        launch: Launch,
        clock: Clock,
        on_outcome: Callable[[Outcome], None],
        unpickle: Callable[[bytes], Any] | None = None,
        tee: Callable[[Stream, memoryview], None] | None = None,
    ) -> None:
        """`tee` sees all output as it comes."""
        self._sandbox, self._launch, self._clock = sandbox, launch, clock
        self._on_outcome, self._unpickle, self._tee = on_outcome, unpickle, tee
        limits = launch.limits
        self._limits = limits
        self._trace = TraceReader(limits.trace)
        self._tails = {"stdout": Tail(limits.stdout), "stderr": Tail(limits.stderr)}
        self._result = bytearray()
        self._result_size = 0
        self._output = 0
        self._cause: KillReason | None = None
        self._state: Literal["running", "grace", "killing", "ended"] = "running"
        self._killed_at_s = 0.0
        self._grace_used = False
        self._frozen_at_s: float | None = None
        self._paused_s = 0.0
        self._started_s = clock.now_s()
        self.due_s: float | None = None
        self.retry_after_s: Any = None  # as the agent's exception says: anything
        sandbox.start(launch, self)

    # --- time ---

    def on_time(self) -> None:
        """`due_s` has come."""
        now_s = self._clock.now_s()
        if self._state == "running":
            self._cause = "deadline"
            self._state, self._grace_used = "grace", True
            self.due_s = now_s + self._limits.grace_s
            self._sandbox.terminate()
        elif self._state == "grace":
            self._kill("deadline")
        elif self._state == "killing":
            self.due_s = None
            self._sandbox.kill_hard()

    @property
    def memory_bytes(self) -> int | None:
        """The trial's peak so far, where that is known while it runs."""
        return self._sandbox.peak_memory_bytes()

    def freeze(self) -> None:
        """Stop every process of the trial, and its clock."""
        if self._frozen_at_s is None and self._state == "running":
            self._frozen_at_s = self._clock.now_s()
            self._left_s = self.due_s - self._frozen_at_s if self.due_s is not None else None
            self.due_s = None
            self._sandbox.freeze()

    def thaw(self) -> None:
        if self._frozen_at_s is not None and self._state == "running":
            now_s = self._clock.now_s()
            self._paused_s += now_s - self._frozen_at_s
            self._frozen_at_s = None
            self.due_s = now_s + self._left_s if self._left_s is not None else None
            self._sandbox.thaw(self._paused_s)

    def hold(self) -> None:
        """Its time stands still from here: what it does now is not its own."""
        self.due_s = None

    def release(self) -> None:
        """End it: it has done what it was to do."""
        if self._state in ("running", "grace"):
            self._kill("sweep")

    def stop(self, reason: KillReason = "cancelled") -> None:
        """End it now, without grace."""
        if self._state in ("running", "grace"):
            self._kill(reason)

    def _kill(self, reason: KillReason) -> None:
        self._cause = self._cause or reason
        self._state = "killing"
        self._killed_at_s = self._clock.now_s()
        self.due_s = self._killed_at_s + KILL_PATIENCE_S
        self._sandbox.kill()

    # --- what the sandbox says ---

    def on_started(self) -> None:
        """What was staged, and the engine's own time, is not the agent's."""
        self._started_s = self._clock.now_s()
        left_s = self._limits.timeout_s
        if self._state == "running" and left_s is not None:
            if self._frozen_at_s is None:
                self.due_s = self._started_s + left_s
            else:
                self._left_s = left_s

    def on_output(self, stream: Stream, data: memoryview) -> None:
        if self._tee is not None:
            self._tee(stream, data)
        if stream == "result":
            self._result_size += len(data)
            if self._result_size <= self._limits.result:
                self._result += data
            else:
                self._result.clear()
                self.stop("output")
            return
        if stream == "trace":
            self._trace.feed(data)
        else:
            self._tails[stream].feed(data)
        self._output += len(data)
        ceiling = self._limits.output_ceiling
        if ceiling is not None and self._output > ceiling:
            self.stop("output")

    def on_exceeded(self, what: Ceiling) -> None:
        if self._state == "running" or self._state == "grace":
            self._cause = None  # the ceiling is the cause, though the deadline came in between
            self._kill(what)
        elif self._cause is None:
            self._cause = what

    def on_ended(self, end: End) -> None:
        now_s = self._clock.now_s()
        was_killed = self._state == "killing"
        if self._frozen_at_s is not None:  # ended without having been thawed
            self._paused_s += (self._killed_at_s if was_killed else now_s) - self._frozen_at_s
        self._state, self.due_s = "ended", None
        value, error, answered = self._answer(end)
        status, error = self._judge(end, answered, error)
        events, torn = self._trace.finish()
        kill = None
        if was_killed or self._cause is not None or end.swept:
            reason: KillReason = self._cause or ("fault" if was_killed else "sweep")
            latency_s = now_s - self._killed_at_s if was_killed else end.sweep_s
            kill = KillReport(reason=reason, latency_s=latency_s, proof=end.proof, grace_used=self._grace_used)
        self._on_outcome(
            Outcome(
                status=status,
                value=value,
                error=error,
                exit_code=end.exit_code,
                signal=end.signal,
                trace=events,
                stdout=self._tails["stdout"].text(),
                stderr=self._tails["stderr"].text(),
                dropped=Dropped(
                    stdout_bytes=self._tails["stdout"].dropped,
                    stderr_bytes=self._tails["stderr"].dropped,
                    trace_bytes=self._trace.dropped_bytes,
                    trace_events=self._trace.dropped_events,
                    trace_malformed=self._trace.malformed,
                    trace_torn=torn,
                ),
                usage=Usage(
                    wall_s=max(0.0, now_s - self._started_s - self._paused_s),
                    cpu_s=max(0.0, end.cpu_s) if end.cpu_s is not None else None,
                    peak_memory_bytes=end.peak_memory_bytes,
                ),
                kill=kill,
                isolation=self._sandbox.isolation,
            )
        )

    # --- the verdict ---

    def _judge(self, end: End, answered: bool, error: AgentError | None) -> tuple[Status, AgentError | None]:
        if self._cause == "sweep":
            return Status.SUCCESS, None
        if self._cause is not None:
            return _STATUS_OF[self._cause], error
        if end.setup:
            return Status.SETUP_FAILED, AgentError(type="SetupFailed", message=end.setup)
        if end.fault:
            return Status.ENVIRONMENT_ERROR, AgentError(type="SandboxLost", message=end.fault)
        if error is None and answered and end.exit_code == 0:
            return Status.SUCCESS, None
        if end.disk_full or end.signal == _SIGXFSZ:
            return Status.DISK_EXCEEDED, error
        if error is None and end.exit_code == 0:
            error = AgentError(type="NoAnswer", message="its process ended without returning")
        return Status.AGENT_ERROR, error

    def _answer(self, end: End) -> tuple[Any, AgentError | None, bool]:
        """What the agent says came of it: value, error, and whether it said anything. All of it is hostile."""
        if self._launch.argv:
            return self._read_result(end) if self._launch.role == "agent" else (None, None, True)
        line, newline, _ = bytes(self._result).partition(b"\n")
        if not newline:
            return None, None, False
        try:
            frame = parse_json(line)
            if "value" in frame:
                return frame["value"], None, True
            if "pickle" in frame and self._unpickle is not None:
                return self._trust(frame["pickle"])
            said = frame["error"]
            self.retry_after_s = said.get("retry_after_s")
            texts = {name: str(said[name]) for name in ("type", "message", "traceback")}
            return None, AgentError(**texts), True
        except TooDeep as error:
            return None, AgentError(type="MalformedResult", message=f"the result is {error}"), True
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            return (
                None,
                AgentError(type="MalformedResult", message="what came back is not one of our frames"),
                True,
            )

    def _trust(self, text: str) -> tuple[Any, AgentError | None, bool]:
        assert self._unpickle is not None
        try:
            return self._unpickle(base64.b64decode(text)), None, True
        except Exception as error:  # unpickling runs code of the agent's, which is what trusting it means
            return None, AgentError(type="MalformedResult", message=f"{type(error).__name__}: {error}"), True

    def _read_result(self, end: End) -> tuple[Any, AgentError | None, bool]:
        """A command says nothing, or leaves an object in result.json."""
        if end.setup or end.fault:
            return None, None, True
        try:
            data = self._sandbox.read_file("out/result.json", self._limits.result)
        except (ValueError, OSError) as error:
            return None, AgentError(type="MalformedResult", message=str(error)), True
        if data is None:
            return None, None, True
        value = parse_object(data)
        if value is None:
            return None, AgentError(type="MalformedResult", message="result.json is not a JSON object"), True
        return value, None, True
