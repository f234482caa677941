"""What a test passes to `attack` as `ready`, when it runs as a callable."""


def ready(state: dict[str, object]) -> None:
    from sandbox_exec.guest import context

    context().trace("ready", **state)
