"""The command line of the benchmarks. Exit code 0: all targets are met; 1: not all; 2: bad usage."""

from __future__ import annotations

import argparse
import signal
import sys

from rich.console import Console

from . import containers, process, queue, report, run
from .orphans import adopt_orphans, sweep


def main() -> int:
    arguments = _parse()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: a shell may have us ignore it
        signal.signal(number, _interrupt)
    adopt_orphans()
    try:
        return _measure(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        sweep()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Ours beside its peers, from one run.")
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for name, (parts, text) in _BENCHMARKS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(parts=parts)
        command.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
        command.add_argument("--json", action="store_true", help="JSON on stdout")
        command.add_argument("--only", default=",".join(parts), metavar="PART,...", help=f"some of {', '.join(parts)}")
        command.add_argument("--workers", type=int, default=2, help="trials at once (default: 2)")
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - arguments.parts.keys()
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(arguments.parts)}")
    return arguments


_BENCHMARKS = {
    "process": (process.PARTS, "the process sandbox: throughput, kills, traces"),
    "run": (run.PARTS, "durable runs, and the coordinator alone"),
    "queue": (queue.PARTS, "queues, lanes, submissions, and many workers at once"),
    "docker": (containers.PARTS, "trials in containers: seconds each, kills, files"),
}


def _measure(arguments: argparse.Namespace) -> int:
    effort = process.QUICK if arguments.quick else process.FULL
    names = arguments.only.split(",")
    parts = [arguments.parts[name](effort, arguments.workers, _say) for name in names]
    if arguments.json:
        print(report.as_json(parts))
    else:
        report.show(parts, Console())
    return 0 if report.all_met(parts) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
