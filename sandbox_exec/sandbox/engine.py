"""The way to the Docker engine: one place that connects, and one that says in words why it does not work.

The engine is the one of the environment (`DOCKER_HOST` and its companions), or the default socket. It must see our
file system: a trial's folders are bind-mounted, not copied.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Final, cast

import docker
import docker.constants
import docker.errors
import requests
import urllib3

from sandbox_exec.errors import SandboxUnavailable

MIN_API: Final = "1.40"  # engine 19.03
ANSWER_S: Final = 30.0  # for one call, on a machine under load; `start` of a container takes tenths of one
_HOST: Final = "DOCKER_HOST"
_DEFAULT: Final = "unix:///var/run/docker.sock"
_START_ONE: Final = "start it (systemctl start docker), or name another in DOCKER_HOST"

Missing: Final = docker.errors.NotFound
EngineErrors: Final = (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError)
"""All that a call of the engine can raise."""


def connect(timeout_s: float | None = None) -> Any:
    """Return a client that the engine has answered. Raises `SandboxUnavailable` with what to do."""
    timeout_s = ANSWER_S if timeout_s is None else timeout_s
    try:
        _knock(timeout_s)
        probe = _client(MIN_API, timeout_s)
        try:
            version = probe.version(api_version=False)["ApiVersion"]
        finally:
            probe.close()
        found = _numbers(version)
        if found < _numbers(MIN_API):
            raise SandboxUnavailable(
                f"the Docker engine at {address()} is too old: it speaks version {version} of its API, and "
                f"{MIN_API} is needed: install engine 19.03 or later, or name another in DOCKER_HOST"
            )
        newest = docker.constants.DEFAULT_DOCKER_API_VERSION
        return _client(version if found < _numbers(newest) else newest, timeout_s)
    except (*EngineErrors, KeyError, TypeError, ValueError) as error:  # what answers there may be no engine
        raise SandboxUnavailable(explain(error)) from error


def _knock(timeout_s: float) -> None:
    """Whether anybody is there: the SDK leaves its own socket open where nobody is."""
    scheme, _, path = address().partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(timeout_s)
            knocking.connect(path)


def _client(version: str, timeout_s: float) -> Any:
    return docker.APIClient(version=version, timeout=timeout_s, **docker.utils.kwargs_from_env())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def address() -> str:
    return os.environ.get(_HOST) or _DEFAULT


def is_podman(info: dict[str, Any]) -> bool:
    """Whether it is Podman that speaks the engine's API, by what the engine says of itself."""
    return "BuildahVersion" in info


def is_rootless(info: dict[str, Any]) -> bool:
    """Whether it runs as an ordinary user, who is root in its containers. Docker and Podman say so in two places."""
    return "name=rootless" in info.get("SecurityOptions", ()) or info.get("Rootless") is True


def ignores_limits(info: dict[str, Any]) -> bool:
    """Whether it takes ceilings and holds none, without a word: Podman as an ordinary user on cgroup v1."""
    return is_podman(info) and is_rootless(info) and info.get("CgroupVersion") == "1"


def is_down(error: BaseException) -> bool:
    """Whether it is the engine that is not there or does not answer, rather than what was asked of it."""
    if isinstance(error, docker.errors.APIError):
        return error.response is not None and error.response.status_code in (502, 503, 504)
    # A plain OSError, such as a file that is not there, is of our own doing; those of a socket are not.
    return isinstance(error, (*EngineErrors[:-1], SandboxUnavailable, ConnectionError, TimeoutError))


def is_answer(error: BaseException) -> bool:
    """Whether it is what the engine said to what it was asked."""
    return isinstance(error, docker.errors.APIError)


def is_missing(error: BaseException) -> bool:
    """Whether the container or image that was asked for is not there."""
    return isinstance(error, docker.errors.NotFound)


def is_being_removed(error: BaseException) -> bool:
    """Whether another removes that container right now."""
    return isinstance(error, docker.errors.APIError) and "already in progress" in str(error)


def is_full(error: BaseException) -> bool:
    """Whether the engine has no room left on its disk."""
    return isinstance(error, docker.errors.APIError) and os.strerror(errno.ENOSPC).lower() in str(error).lower()


def explain(error: BaseException) -> str:
    """What went wrong, in one line, and what to do about it."""
    where = f"the Docker engine at {address()}"
    for cause in _chain(error):
        match cause:
            case FileNotFoundError() | ConnectionRefusedError():
                return f"{where} is not running: {_START_ONE}"
            case PermissionError():
                return (
                    f"{where} may not be used by this user: join the group of its socket (usermod -aG docker), or "
                    "name another engine in DOCKER_HOST"
                )
            case TimeoutError() | requests.Timeout():
                return f"{where} does not answer: see its log, or restart it"
            case ConnectionError() | requests.ConnectionError() if cause.__context__ is None:
                return f"{where} has ended or does not answer: {_START_ONE}"
            case requests.exceptions.ChunkedEncodingError() | urllib3.exceptions.ProtocolError():  # amid an answer
                return f"{where} has ended: {_START_ONE}"
    if is_full(error):
        return f"{where} has no room left on its disk: free some, for instance with `docker system prune`"
    if isinstance(error, docker.errors.APIError):
        said = cast(str, error.explanation or str(error))
        return f"{where} refused: {said.strip()}"
    return f"{where} cannot be used: {error}"


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and what those hold: requests wraps urllib3's, which wrap the socket's."""
    found: list[BaseException] = []
    pending: list[Any] = [error]
    while pending:
        one = pending.pop(0)
        if isinstance(one, BaseException) and one not in found and len(found) < 32:
            found.append(one)
            pending += [*one.args, one.__cause__, one.__context__, getattr(one, "reason", None)]
    return sorted(found, key=lambda one: not isinstance(one, OSError))
