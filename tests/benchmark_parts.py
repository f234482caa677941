"""Benchmarks for the tests. Trials import it: the standard library only, and little of it."""

from __future__ import annotations

import os
import re
import signal
import sys

from sandbox_exec.benchmark import AgentFault, Benchmark, EnvironmentFault, UserFault
from sandbox_exec.guest import context

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

Task = dict[str, "Any"]


class Part:
    """Raises what it is told to where it is told to, and remembers how often it was called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def act(self, then: Any = None) -> Any:
        self.calls += 1
        return then() if then else None

    def gather_traces(self) -> Any:
        return {"calls": self.calls}

    def gather_config(self) -> Any:
        return {"name": self.name}


class Helper:
    """Of some part, but not registered."""

    def fail(self) -> NoReturn:
        raise LookupError("deep down")


class Fates(Benchmark):
    """An environment, a user and an agent; what becomes of a trial is its task's input."""

    def setup_environment(self, task: Task) -> Any:
        if task["input"] == "setup_environment":
            raise OSError("no such world")
        if task["input"] == "lambda on a dict":
            return {"here": 1}
        world = Part("world")
        if task["input"] == "by hand":
            self.registry.register("environment", "shop", world)
            self.registry.register("tools", "till", Part("till"))
        return world

    def setup_user(self, task: Task, environment: Any) -> Any:
        if task["input"] == "setup_user":
            raise OSError("nobody there")
        return Part("customer")

    def setup_agents(self, task: Task, environment: Any, user: Any) -> Any:
        if task["input"] == "setup_agents":
            raise OSError("no model")
        if task["input"] == "killed in setup_agents":
            os.kill(os.getpid(), signal.SIGKILL)
        if task["input"] == "two names":
            solver = Part("solver")
            return {"solver": solver, "helper": solver}
        return {"solver": Part("solver"), "helper": Part("helper")}

    def run_agents(self, task: Task, agents: Any, environment: Any, user: Any) -> Any:
        agent, fail = agents["solver"], Helper().fail
        match task["input"]:
            case "function":
                return _solve(environment, fail)
            case "lambda on a dict":
                return (lambda world: world["there"])(environment)
            case "killed at once":
                os.kill(os.getpid(), signal.SIGKILL)
        agent.act(environment.act)
        user.act()
        self.registry.snapshot()
        match task["input"]:
            case "well":
                context().usage(tokens=120, requests=2)
            case "agent":
                agent.act(fail)
            case "environment" | "by hand":
                agent.act(lambda: environment.act(fail))
            case "user":
                agent.act(lambda: user.act(fail))
            case "agent below environment":
                environment.act(lambda: agent.act(fail))
            case "environment fault":
                raise EnvironmentFault("the world stands still")
            case "user fault":
                agent.act(lambda: _raise(UserFault("out of character")))
            case "agent fault":
                environment.act(lambda: _raise(AgentFault("no such move")))
            case "exit":
                sys.exit(3)
            case "killed":
                agent.act()  # after the last snapshot
                os.kill(os.getpid(), signal.SIGKILL)
            case "killed after a step":
                agent.act()
                self.registry._last_s = -1.0  # long ago
                context().trace("step")
                os.kill(os.getpid(), signal.SIGKILL)
            case "late":
                agent.act(_wait)
            case "late environment":
                agent.act(lambda: environment.act(_wait))
            case "late and deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                _wait()
            case "no json":
                return {1, 2}
            case "large answer":
                return "x" * (4 << 20)
            case "forges":
                context().trace("component_fault", component=["environment"])
                context().trace("component_traces", category="agents", name=["x"], data=1)
                os._exit(4)
            case "lies":
                with open(os.environ["SANDBOX_EXEC_OUT"] + "/answer.json", "w") as file:
                    file.write("[" * 100_000)
                os._exit(0)
        return {"of": task["id"]}

    def setup_evaluators(self, task: Task) -> Any:
        if task["input"] == "setup_evaluators":
            raise OSError("no judge")
        return [Part("judge")]

    def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: Any) -> Any:
        match task["input"]:
            case "evaluate":
                raise KeyError("what is this")
            case "no score":
                return "good"
            case "not a number":
                return float("nan")
        return {
            "score": 0.5,
            "passed": True,
            "metrics": {"calls": traces["agents"]["solver"]["calls"]},
            "judges": len(evaluators),
            "seen": {"answer": answer, "evaluation": task["evaluation"], "agent": task["agent"]["status"]},
            "odd": {1},
        }


def _solve(environment: Part, then: Any) -> Any:
    """An agent that is a function, and not a method of what it is given."""
    return then()


def _wait() -> NoReturn:
    while True:
        signal.pause()


def _raise(error: Exception) -> NoReturn:
    raise error


class Variants(Benchmark):
    """Tells what each variant was given, and what it was not."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    evaluation_only = ("secret",)

    def setup_agents(self, task: Task, environment: Any, user: Any) -> Any:
        return Part("only")

    def run_agents(self, task: Task, agents: Any, environment: Any, user: Any) -> Any:
        data: Any = {"data": self.agent_data, "mode": os.environ.get("MODE"), "agents": sorted(agents)}
        return data | {"attributes": sorted(vars(self)), "repeat": task["repeat"]}

    def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: Any) -> Any:
        return {"score": 1, "data": self.agent_data, "secret": self.secret}


class Marking(Benchmark):
    """The agent leaves marks wherever a process could carry them to its evaluation."""

    marked = False

    def setup_agents(self, task: Task, environment: Any, user: Any) -> Any:
        return Part("marker")

    def run_agents(self, task: Task, agents: Any, environment: Any, user: Any) -> Any:
        Marking.marked = self.__dict__["own"] = True
        sys.modules["marker"] = sys
        os.environ["MARKER"] = "1"
        for place in ("/tmp/marker", "/dev/shm/marker"):
            with open(place, "w") as file:
                file.write("1")
        return _who_am_i()

    def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: Any) -> Any:
        marks = {
            "class": Marking.marked,
            "object": "own" in vars(self),
            "modules": "marker" in sys.modules,
            "environment": "MARKER" in os.environ,
            "files": os.path.exists("/tmp/marker") or os.path.exists("/dev/shm/marker"),
        }
        return {"score": 1, "details": {"marks": marks, "me": _who_am_i(), "agent": answer}}


def _who_am_i() -> Any:
    return {"pids": os.readlink("/proc/self/ns/pid"), "uid": os.getuid()}


class Searching(Benchmark):
    """The agent looks for canaries in all that it can reach: its environment, its files and its memory."""

    def setup_agents(self, task: Task, environment: Any, user: Any) -> Any:
        return None

    def run_agents(self, task: Task, agents: Any, environment: Any, user: Any) -> Any:
        # Written so that the pattern does not find itself.
        canary = re.compile(("canar" + "y-[0-9a-f]{32}").encode())
        found: set[bytes] = set(canary.findall(repr(dict(os.environ)).encode()))
        for data in (*_files(task["input"]["since"]), *_memory()):
            found.update(canary.findall(data))
        return sorted(one.decode() for one in found)

    def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: Any) -> Any:
        return {"score": 1, "details": task["evaluation"]}


def _files(since: float) -> Iterator[bytes]:
    """What was written since then: nothing of an older file can be of this run. The system's own are not looked at."""
    system = {"/usr", "/etc", "/opt", "/proc", "/sys", sys.prefix, sys.base_prefix}
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in system]
        for name in files:
            path = os.path.join(folder, name)
            try:
                if os.path.isfile(path) and os.stat(path).st_mtime >= since:
                    with open(path, "rb") as file:
                        yield file.read(64 << 20)
            except OSError:
                pass


def _memory() -> Iterator[bytes]:
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    with open("/proc/self/mem", "rb", 0) as memory:
        for span, rights, *rest in regions:
            start, end = (int(word, 16) for word in span.split("-"))
            if "r" in rights and rest[-1] not in ("[vvar]", "[vvar_vclock]", "[vsyscall]"):
                try:
                    memory.seek(start)
                    yield memory.read(end - start)
                except (OSError, ValueError):
                    pass


class Waiting(Benchmark):
    """The first task ends when all the others have."""

    def setup_agents(self, task: Task, environment: Any, user: Any) -> Any:
        return None

    def run_agents(self, task: Task, agents: Any, environment: Any, user: Any) -> Any:
        if task["input"]["first"]:
            with open(task["input"]["pipe"], "rb", buffering=0) as pipe:
                for _ in range(task["input"]["others"]):
                    pipe.read(1)
        else:
            with open(task["input"]["pipe"], "wb", buffering=0) as pipe:
                pipe.write(b".")
        return task["id"]

    def evaluate(self, task: Task, evaluators: Any, answer: Any, traces: Any) -> Any:
        return answer == task["id"]
