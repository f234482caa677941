"""Wants root from a setuid program: starts those it finds and compares their user and rights with its own."""

import glob
import os
import stat
import subprocess
from collections.abc import Callable

NAMES = ("su", "sudo", "mount", "umount", "passwd", "chsh", "newgrp", "pkexec", "fusermount*", "ping")


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    def rights(pid: int) -> tuple[str, int]:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
        return fields["Uid"].split()[1], int(fields["CapEff"], 16)

    found = {path for name in NAMES for path in glob.glob(f"/*bin/{name}") + glob.glob(f"/usr/*bin/{name}")}
    user, own = rights(os.getpid())
    ran, gained = [], []
    ready({})
    for path in sorted(found):
        if os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID) or path.endswith("ping"):
            # A pipe for stdin: what asks for a password waits, or gives up.
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            with subprocess.Popen([path], stdin=pipe, stdout=null, stderr=null, process_group=0) as program:
                # Popen returns after the exec, and a zombie keeps its rights: there is no race here.
                its_user, its_rights = rights(program.pid)
                if its_user != user or its_rights & ~own:
                    gained.append(path)
                else:
                    program.kill()
            ran.append(path)
    return {"escaped": bool(gained), "detail": {"ran": ran, "gained": gained}}


if __name__ == "__main__":
    __import__("_common").command(attack)
