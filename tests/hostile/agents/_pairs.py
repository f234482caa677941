"""Halves of attacks that need two trials. Here, so that a sandbox that runs one imports no test."""

import os
import time
from collections.abc import Callable

from hostile.agents import snoops_environment
from sandbox_exec.guest import context


def connects_again_and_again(attack: Callable[..., dict[str, object]], target: str) -> bool:
    """For as long as the other one surely listens."""
    while context().remaining > 0.3:
        if attack(lambda _: None, target=target)["escaped"]:
            return True
    return False


def snoops_again_and_again(secret: str) -> list[object]:
    end_s = time.monotonic() + 0.7
    while time.monotonic() < end_s:
        answer = snoops_environment.attack(lambda _: None, secret)
        if answer["escaped"]:
            return [answer]
    return []


def writes_much_of(mark: str) -> str:
    for _ in range(50):
        os.write(1, mark.encode() * 60_000)
        context().trace("mark", mark=mark)
    return mark * 100_000


def find_in_own_memory(head: str, tail: str) -> dict[str, bool]:
    """Whether head and tail stand together in this process, where they never did; `control` is there, and found."""
    there = (b"control-" * 8, b"there")
    kept = b"".join(there)
    found = {"control": False, "found": False}
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            bounds, rights, *_ = line.split()
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            try:
                memory.seek(start)
                data = memory.read(end - start) if "r" in rights else b""
            except (OSError, OverflowError):
                continue  # of the kernel's own
            found["control"] |= _stand_together(data, *there)
            found["found"] |= _stand_together(data, head.encode(), tail.encode())
    del kept
    return found


def _stand_together(data: bytes, head: bytes, tail: bytes) -> bool:
    at = data.find(head)
    while at >= 0:
        if data[at + len(head) : at + len(head) + len(tail)] == tail:
            return True
        at = data.find(head, at + 1)
    return False
