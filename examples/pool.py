"""Eight agents, one task: which words occur most often in a text? Some are good, the others misbehave.

    .venv/bin/python examples/pool.py [CONTAINMENT]

Every agent runs in a sandbox of its own, beside the others. Whatever it does, the pool gives back an outcome.
CONTAINMENT is a rung that `sandbox-exec doctor` shows, to see what a weaker one does; by default the strongest.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sandbox_exec import Command, Limits, Outcome, Pool, TrialTimeout, context
from sandbox_exec.units import format_bytes, format_seconds

TEXT = """
The fox saw the crow. The crow had the cheese, and the fox had none. "Sing," said the fox to the crow. The crow
sang, and the cheese fell. The fox ate the cheese, and said no more.
"""
EXPECTED = ["the", "fox", "crow"]  # most frequent first
DAEMON = f"stray-{os.getpid()}"  # how the process that an agent leaves behind calls itself: we shall look for it
Answer = dict[str, Any]

# --- the agents: each is given the text, and answers {"words": [...]} -------------------------------


def counts(text: str) -> Answer:
    """A good agent. What it traces is kept, however it ends."""
    words = [word.strip('.,"').lower() for word in text.split()]
    context().trace("read", words=len(words))
    best = collections.Counter(words).most_common(3)
    context().trace("counted", best=best)
    return {"words": [word for word, _ in best]}


def careless(text: str) -> Answer:
    """Ends well, and is wrong: it takes "The" and "the" for two words. That is for a grade, not for a status."""
    return {"words": [word for word, _ in collections.Counter(text.split()).most_common(3)]}


# An agent can be any program. It finds its input in task.json, and what it leaves in result.json is its answer.
in_shell = r"""
echo '{"type": "started"}' > "$SANDBOX_EXEC_TRACE"
sed 's/.*"input": "//; s/", "seed".*//; s/\\n/ /g; s/\\"//g' "$SANDBOX_EXEC_IN/task.json" |
    tr -cs 'A-Za-z' '\n' | tr 'A-Z' 'a-z' | sort | uniq -c | sort -k1,1nr -k2,2r | head -n 3 |
    awk '{ printf "%s\"%s\"", (NR > 1 ? ", " : "{\"words\": ["), $2 } END { print "]}" }' \
    > "$SANDBOX_EXEC_OUT/result.json"
"""


def slow_but_decent(text: str) -> Answer:
    """Too slow, but it asks for its time, and ends in time to say how far it came."""
    ctx = context()
    found: collections.Counter[str] = collections.Counter()
    try:
        for word in text.lower().split():
            found[word.strip('.,"')] += 1
            ctx.trace("word", word=word, remaining_s=round(ctx.remaining, 2))
            time.sleep(0.1)
            ctx.check_timeout()
    except TrialTimeout:
        ctx.trace("out of time", words=found.total())
    return {"words": [word for word, _ in found.most_common(3)]}


def hangs(text: str) -> Answer:
    """Never ends, and is deaf to every request to."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    context().trace("hanging")
    while True:
        pass


def leaves_a_daemon(text: str) -> Answer:
    """Answers well, and leaves a process behind, in a session of its own, that nobody is the parent of."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
                file.write(DAEMON)
            time.sleep(60)  # not for ever: someone may try this on a machine that holds it less well
        os._exit(0)
    os.wait()
    return counts(text)


def eats_memory(text: str) -> Answer:
    """Wants more than its 64 MiB."""
    hoard = []
    while True:
        hoard.append(bytearray(16 << 20))
        context().trace("ate", mib=16 * len(hoard))


def raises(text: str) -> Answer:
    """Has a bug. Its traceback is in the outcome's error."""
    return {"words": text.missing}  # type: ignore[attr-defined]  # an agent's bug is the agent's own


# --- the pool ---------------------------------------------------------------------------------------


def main(containment: str = "auto") -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    agents: dict[str, Callable[..., Any] | Command] = {
        "counts": counts,
        "careless": careless,
        "in_shell": Command(["sh", "-c", in_shell], input=TEXT),
        "slow_but_decent": slow_but_decent,
        "hangs": hangs,
        "leaves_a_daemon": leaves_a_daemon,
        "eats_memory": eats_memory,
        "raises": raises,
    }
    limits = Limits(timeout_s=1, grace_s=0.2, memory="64MiB")
    started_s = time.monotonic()
    with Pool(max_workers=4, limits=limits, containment=containment) as pool:
        outcomes = pool.run_all(agents, TEXT)
        daemons = [process for process in psutil.process_iter(["name"]) if process.info["name"] == DAEMON]
    children = psutil.Process().children(recursive=True)
    took_s = time.monotonic() - started_s

    console.print(table_of(outcomes))
    console.print(f"{len(agents)} agents in {format_seconds(took_s)}.", end=" ")
    console.print(f"Left on the machine: {len(daemons)} daemons, {len(children)} other processes.")
    isolation = outcomes["counts"].isolation
    if isolation is not None:
        console.print(
            f"Held by {isolation.rung}: file system {isolation.filesystem}, network {isolation.network}, "
            f"memory by {isolation.memory}, pids by {isolation.pids}."
        )
    return 1 if daemons or children else 0


def table_of(outcomes: dict[str, Outcome]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("agent", "status", "blame", "score"):
        table.add_column(column, no_wrap=True)
    for column in ("time", "memory", "events", "kill"):
        table.add_column(column, justify="right")
    table.add_column("why")
    for name, outcome in outcomes.items():
        usage, kill = outcome.usage, outcome.kill
        table.add_row(
            name,
            f"[{'green' if outcome.ok else 'yellow'}]{outcome.status}",
            outcome.blame or "-",
            score(outcome.value),
            format_seconds(usage.wall_s),
            format_bytes(usage.peak_memory_bytes) if usage.peak_memory_bytes else "-",
            str(len(outcome.trace)),
            format_seconds(kill.latency_s) if kill and kill.latency_s else "-",
            why(outcome),
        )
    return table


def score(value: Any) -> str:
    """The caller's own judgement. What an agent returns may be anything."""
    words = value.get("words") if isinstance(value, dict) else None
    if not isinstance(words, list):
        return "-"
    return f"{sum(given == due for given, due in zip(words, EXPECTED, strict=False))}/{len(EXPECTED)}"


def why(outcome: Outcome) -> str:
    """The reason of a kill, or else the type of the agent's exception."""
    if outcome.kill is not None:
        return outcome.kill.reason
    return shown(outcome.error.type) if outcome.error else "-"


def shown(text: str) -> str:
    """Text from a sandbox, for a terminal: no control characters, nothing that looks like markup."""
    return escape("".join(char if char.isprintable() else "?" for char in text))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
