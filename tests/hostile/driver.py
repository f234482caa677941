"""`python -m hostile.driver SPEC`: run rows of the catalog in a process of its own; a line of JSON for each.

Started by `ordinary_user.start`. SPEC is an object: `rung`, `cases`, `outer_pidns` and, if wanted, `alone` (patience
in seconds by row: see `runner.run_alone`), `landlock` (false: as on a kernel without it), and `dies_when_ready`
(true: all cases at once, until all are ready).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from hostile import runner
from sandbox_exec.guest import kernel
from sandbox_exec.trial.supervisor import Supervisor


def main(spec: dict[str, Any]) -> None:
    cases = [(name, form) for name, form in spec["cases"]]
    if not spec.get("landlock", True):
        hide_landlock()
    with runner.Surroundings(spec["outer_pidns"]) as around:
        if spec.get("dies_when_ready"):
            die_when_ready(len(cases))
            runner.run_until_killed(spec["rung"], cases, around)
        if "alone" in spec:
            reports = runner.run_alone(spec["rung"], cases, around, spec["alone"])
        else:
            reports = runner.run_beside(spec["rung"], cases, around)
        for report in reports:
            print(json.dumps(report.as_json()), flush=True)


def hide_landlock() -> None:
    """A filter that answers as a kernel without Landlock, for this process and all that it starts."""
    number = kernel._nr("landlock_create_ruleset")
    load, equals, answer = 0x20, 0x15, 0x06
    steps = ((load, 0, 0, 0), (equals, 0, 1, number), (answer, 0, 0, 0x00050000 | 38), (answer, 0, 0, 0x7FFF0000))
    import struct

    kernel.set_no_new_privs()
    kernel.install_seccomp(b"".join(struct.pack("HBBI", *step) for step in steps))
    if kernel.landlock_abi():
        raise RuntimeError("Landlock still answers")


def die_when_ready(count: int) -> None:
    """SIGKILL to this process, the supervisor, at the moment when it hears that the last of its agents is ready."""
    on_output = Supervisor.on_output
    heard: set[Supervisor] = set()

    def listen(self: Supervisor, stream: Any, data: memoryview) -> None:
        if stream == "trace" and b'"ready"' in bytes(data):
            heard.add(self)
            if len(heard) == count:
                print(json.dumps({"ready": count}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        on_output(self, stream, data)

    Supervisor.on_output = listen  # type: ignore[method-assign]  # there is no other moment to hear of


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
