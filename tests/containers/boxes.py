"""A small bench for sandboxes of either kind: trials on one loop, several at a time, and time that passes when told."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from support import PATIENCE_S

from sandbox_exec.clock import Clock
from sandbox_exec.contracts import ContainerSpec, Limits, Outcome
from sandbox_exec.sandbox.base import Ceiling, End, Launch, Places, Sandbox, Stream
from sandbox_exec.sandbox.docker import DockerSandboxes
from sandbox_exec.sandbox.loop import Loop
from sandbox_exec.sandbox.provider import Provider, SlotPlaces, chosen
from sandbox_exec.testing import ManualClock
from sandbox_exec.trial.supervisor import Supervisor

Kind = Literal["process", "docker"]
LABEL = "sandbox-exec."  # what the labels of a container begin with
CALLS = "sandbox-exec-call"  # the name of the threads in which the engine is asked


class _Listener(Supervisor):
    """Notes what it hears after its end: there must be nothing."""

    ended_with: End | None = None
    is_started = False
    trace = b""
    late: tuple[str, ...] = ()
    after_ready_s: float | None = None  # if given: so long after its agent said that it is ready, the deadline comes

    def on_started(self) -> None:
        self._note("started")
        self.is_started = True
        super().on_started()
        self._hurry()

    def on_output(self, stream: Stream, data: memoryview) -> None:
        self._note(stream)
        if stream == "trace" and len(self.trace) < 1 << 16:
            self.trace += bytes(data)
        super().on_output(stream, data)
        if stream == "trace":
            self._hurry()

    def _hurry(self) -> None:
        if self.after_ready_s is not None and self.is_started and self.due_s and b'"ready"' in self.trace:
            self.due_s, self.after_ready_s = self._clock.now_s() + self.after_ready_s, None

    def on_exceeded(self, what: Ceiling) -> None:
        self._note(what)
        super().on_exceeded(what)

    def on_ended(self, end: End) -> None:
        self._note("ended")
        self.ended_with = end
        super().on_ended(end)

    def _note(self, what: str) -> None:
        if self.ended_with is not None:
            self.late += (what,)


class Trial:
    """One launch, from the wish for a sandbox until that is released."""

    def __init__(
        self,
        box: Box,
        places: Places,
        launch: Launch,
        at_end: Callable[[Trial], None] | None,
        after_ready_s: float | None,
    ) -> None:
        self._after_ready_s = after_ready_s
        self._box, self._places, self._at_end = box, places, at_end
        self.launch = launch
        self.sandbox: Sandbox | None = None
        self.supervisor: _Listener | None = None
        self.refused: End | None = None
        self.ended: Outcome | None = None
        self.is_released = False
        places.acquire(launch, self._begin, self._on_refused)

    def _begin(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.supervisor = _Listener(sandbox, self.launch, self._box.clock, self._on_ended)
        self.supervisor.after_ready_s = self._after_ready_s

    def _on_refused(self, end: End) -> None:
        self.refused, self.is_released = end, True

    def _on_ended(self, outcome: Outcome) -> None:
        if self._at_end is not None:
            self._at_end(self)
        self.ended = outcome

    def listener(self) -> _Listener:
        """Once its sandbox is there."""
        self._box.until(lambda: self.supervisor is not None or self.refused, "there is a sandbox")
        assert self.supervisor is not None, self.refused
        return self.supervisor

    def hear(self, word: str) -> None:
        """Wait until the agent has traced that, and its time runs: an engine may tell of the start after it."""
        listener = self.listener()
        heard = word.encode()
        self._box.until(lambda: (heard in listener.trace and listener.is_started) or self.ended, f"it says {word!r}")
        assert heard in listener.trace, self.ended

    def outcome(self) -> Outcome:
        self._box.until(lambda: self.ended is not None or self.refused, "the trial ends")
        assert self.ended is not None, self.refused
        return self.ended

    def release(self) -> None:
        assert self.sandbox is not None

        def then() -> None:
            self.is_released = True

        self._places.release(self.sandbox, then)
        self._box.until(lambda: self.is_released, "the sandbox is released")


class Box:
    """Where trials are run: `places` for as many as `lanes` at a time."""

    def __init__(self, kind: Kind, image: str, lanes: int = 1, clock: Clock | None = None) -> None:
        self.kind, self.image = kind, image
        self._calls_before = _calls()
        self.loop = Loop()
        self.manual = ManualClock(1000.0)
        self.clock: Clock = clock or self.manual
        self._trials: list[Trial] = []
        self._late: list[tuple[str, ...]] = []
        self.places: list[Places] = []
        if kind == "process":
            self._provider = Provider(self.loop, chosen(), lanes, [])
            self.places += [SlotPlaces(self._provider, slot) for slot in range(lanes)]
        else:
            self.places += [DockerSandboxes(self.loop, slot) for slot in range(lanes)]

    def launch(self, script: str | tuple[str, ...], *, limits: Limits | None = None, **fields: Any) -> Launch:
        """`script` is for a shell, or all of a command. Of a container's options, those that are named."""
        spec = {name: fields.pop(name) for name in ContainerSpec.model_fields if name in fields}
        container = ContainerSpec(**{"image": self.image, **spec}) if self.kind == "docker" else None
        argv = script if isinstance(script, tuple) else ("sh", "-c", script)
        return Launch(limits or Limits(), argv=argv, container=container, **fields)

    def start(
        self,
        launch: Launch,
        lane: int = 0,
        at_end: Callable[[Trial], None] | None = None,
        after_ready_s: float | None = None,
    ) -> Trial:
        trial = Trial(self, self.places[lane], launch, at_end, after_ready_s)
        self._trials.append(trial)
        return trial

    def run(self, script: str | tuple[str, ...], **fields: Any) -> Outcome:
        trial = self.start(self.launch(script, **fields))
        outcome = trial.outcome()
        self.finish(trial)
        return outcome

    def finish(self, trial: Trial) -> None:
        if trial.sandbox is not None and not trial.is_released:
            trial.release()
        if trial.supervisor is not None:
            self._late.append(trial.supervisor.late)
        self._trials.remove(trial)

    def run_all(
        self,
        launches: Mapping[str, Launch],
        at_end: Callable[[str, Trial], None] | None = None,
        after_ready_s: Mapping[str, float] | None = None,
    ) -> Iterator[tuple[str, Trial]]:
        """All of these, as many at a time as there are lanes; each as soon as it has ended."""
        todo, lanes = list(launches.items()), dict[int, tuple[str, Trial]]()

        def ended() -> list[int]:
            return [lane for lane, (_, trial) in lanes.items() if trial.ended or trial.refused]

        def start(lane: int, name: str, launch: Launch) -> None:
            hurry_s = after_ready_s.get(name) if after_ready_s else None
            tell = functools.partial(at_end, name) if at_end else None
            lanes[lane] = name, self.start(launch, lane, tell, hurry_s)

        while todo or lanes:
            for lane in range(len(self.places)):
                if todo and lane not in lanes:
                    start(lane, *todo.pop(0))
            self.until(lambda: ended(), "one of the trials ends")
            for lane in ended():
                name, trial = lanes.pop(lane)
                self.finish(trial)
                yield name, trial

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Run the loop; a deadline comes when the clock is there."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"never came true: {what}"
            self._on_time()
            if not condition():
                self.loop.run_once(0.05)

    def _on_time(self) -> None:
        for trial in self._trials:
            due_s = trial.supervisor.due_s if trial.supervisor is not None else None
            if due_s is not None and due_s <= self.clock.now_s():
                assert trial.supervisor is not None
                trial.supervisor.on_time()

    def close(self) -> None:
        for trial in list(self._trials):  # of a test that failed
            if trial.supervisor is not None and trial.ended is None:
                trial.supervisor.stop()
                trial.outcome()
            if trial.sandbox is not None and not trial.is_released:
                trial.release()
        if self.kind == "process":
            self._provider.close()
        else:
            for places in self.places:
                places.close()
        self.loop.close()
        assert [late for late in self._late if late] == [], "a listener heard something after its end"
        assert _calls() <= self._calls_before, "a call of the engine is still under way"


@contextmanager
def a_box(kind: Kind, image: str, lanes: int = 1, clock: Clock | None = None) -> Iterator[Box]:
    box = Box(kind, image, lanes, clock)
    try:
        yield box
    finally:
        box.close()


def _calls() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == CALLS}


def processes_with(mark: str) -> list[str]:
    """Of this machine, those that have a word among their arguments; this one aside."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    line = file.read()
            except OSError:
                continue  # ended while we looked
            if mark.encode() in line:
                found.append(f"{name} {line.replace(bytes(1), b' ').decode(errors='replace')}")
    return found
