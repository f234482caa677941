"""The command line of the benchmarks. Exit code 0: all targets are met; 1: not all; 2: bad usage."""

from __future__ import annotations

import argparse
import signal
import sys

from rich.console import Console

from . import process, report
from .orphans import adopt_orphans, sweep


def main() -> int:
    arguments = _parse()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: a shell may have us ignore it
        signal.signal(number, _interrupt)
    adopt_orphans()
    try:
        return _process(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        sweep()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Ours beside its peers, from one run.")
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    command = commands.add_parser("process", help="the process sandbox: throughput, kills, traces")
    command.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    command.add_argument("--json", action="store_true", help="JSON on stdout")
    command.add_argument(
        "--only", type=_parts, default=list(process.PARTS), metavar="PART,...", help=_PARTS_HELP
    )
    command.add_argument("--workers", type=int, default=2, help="trials at once (default: 2)")
    return parser.parse_args()


_PARTS_HELP = f"some of {', '.join(process.PARTS)}"


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = set(names) - process.PARTS.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"no part is called {', '.join(sorted(unknown))}; {_PARTS_HELP}")
    return names


def _process(arguments: argparse.Namespace) -> int:
    effort = process.QUICK if arguments.quick else process.FULL
    parts = [process.PARTS[name](effort, arguments.workers, _say) for name in arguments.only]
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
