"""Wants the run's disk through what is collected: leaves 512 MiB of files in its output folder."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    out, chunk, written = os.environ["SANDBOX_EXEC_OUT"], b"\xff" * (1 << 20), 0
    ready({})
    try:
        for number in range(512):
            with open(f"{out}/{number}", "wb", 0) as file:
                written += file.write(chunk)
    except OSError as error:
        return {"escaped": False, "detail": f"{error.strerror} after {written} bytes"}
    return {"escaped": True, "detail": f"{written} bytes"}


if __name__ == "__main__":
    __import__("_common").command(attack)
