"""Wants to leave what nobody can remove: folders that cannot be entered, one in the other."""

import os
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> dict[str, object]:
    for place in (os.environ["SANDBOX_EXEC_OUT"], os.environ["SANDBOX_EXEC_WORKSPACE"]):
        os.makedirs(f"{place}/locked/inner")
        with open(f"{place}/locked/inner/file", "w") as file:
            file.write("kept")
        os.chmod(f"{place}/locked/inner", 0)
        os.chmod(f"{place}/locked", 0)
    ready({})
    os.chmod(os.environ["SANDBOX_EXEC_WORKSPACE"], 0)
    return {"escaped": False, "detail": "locked folders"}


if __name__ == "__main__":
    __import__("_common").command(attack)
