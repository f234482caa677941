"""Wants its code run by the supervisor: returns an object that creates the file `target` when unpickled."""

from collections.abc import Callable


class Bomb:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.target, "w"))


def attack(ready: Callable[[dict[str, object]], object], target: str = "hostile-bomb") -> object:
    ready({})
    return Bomb(target)


if __name__ == "__main__":
    __import__("_common").command(attack)
