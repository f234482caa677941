"""Wants the keys of others: environments and command lines of every process that it sees.

`secret` is what the caller has in its environment and arguments: its own environment must not show it,
nor what the kernel keeps of the program that it was forked from.
"""

import contextlib
import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object], secret: str = "no such secret") -> dict[str, object]:
    environments, command_lines, leaks = [], {}, []
    ready({})
    for name in filter(str.isdigit, os.listdir("/proc")):
        for kind in ("environ", "cmdline"):
            with contextlib.suppress(OSError), open(f"/proc/{name}/{kind}", "rb") as file:
                data = file.read() if f"{name}/{kind}" != f"{os.getpid()}/cmdline" else b""
                if secret.encode() in data:
                    leaks.append(f"{name}/{kind}")
                if int(name) != os.getpid() and data:
                    if kind == "environ":
                        environments.append(int(name))
                    else:
                        command_lines[name] = repr(data[:200])
    leaks += [key for key, value in os.environ.items() if secret in value]
    detail = {"environments": environments, "command_lines": command_lines, "leaks": leaks}
    return {"escaped": bool(environments or leaks), "detail": detail}


if __name__ == "__main__":
    __import__("_common").command(attack)
