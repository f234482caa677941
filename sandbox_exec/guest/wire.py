"""What supervisor, zygote and keeper say to each other. All three are ours; an agent never holds these sockets.

To the zygote: a length (4 bytes, big-endian) and a marshalled dict, with descriptors. Up to the supervisor:
lines of words, `KIND COUNT WORD... TEXT`, where COUNT descriptors come with the line. Nothing from below is
ever unmarshalled, and reading JSON would make the zygote a third larger.
"""

from __future__ import annotations

import _socket
import array
import marshal
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LENGTH = struct.Struct(">I")
_INT_SIZE = array.array("i").itemsize
MAX_FDS = 32
_CHUNK = 1 << 16
_CLOSE_ON_EXEC = getattr(_socket, "MSG_CMSG_CLOEXEC", 0)  # no program that is started here inherits what came


def send_line(sock: _socket.socket, kind: str, *words: object, fds: tuple[int, ...] = ()) -> None:
    """One line up. Only the last word may hold blanks."""
    line = " ".join((kind, str(len(fds)), *map(str, words))).replace("\n", "\\n").encode() + b"\n"
    _send(sock, line, fds)


def send_dict(sock: _socket.socket, content: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """One dict down."""
    data = marshal.dumps(content)
    _send(sock, _LENGTH.pack(len(data)) + data, fds)


def send_bytes(sock: _socket.socket, data: bytes, fds: tuple[int, ...]) -> None:
    _send(sock, data, fds)


def dict_file(content: dict[str, Any], body: bytes) -> int:
    """A dict and any bytes, as a file that has no name; read with `read_dict_file`."""
    header = marshal.dumps(content)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("request", os.MFD_CLOEXEC)
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    view = memoryview(_LENGTH.pack(len(header)) + header + body)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def read_dict_file(fd: int) -> tuple[dict[str, Any], bytes]:
    data = os.pread(fd, _CHUNK, 0)
    if len(data) == _CHUNK:
        chunks = [data]
        while chunks[-1]:
            chunks.append(os.pread(fd, _CHUNK, sum(map(len, chunks))))
        data = b"".join(chunks)
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    return marshal.loads(data[_LENGTH.size : end]), data[end:]


def receive_dict(sock: _socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next dict, waited for; None when the other side is gone."""
    prefix, fds = receive(sock, _LENGTH.size)
    if not prefix:
        return None
    rest = _LENGTH.unpack(prefix)[0]
    data = b""
    while len(data) < rest:
        chunk = sock.recv(rest - len(data))
        if not chunk:
            return None
        data += chunk
    content: dict[str, Any] = marshal.loads(data)
    return content, fds


def receive(sock: _socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    space = _socket.CMSG_SPACE(MAX_FDS * _INT_SIZE)
    data, ancillary, _flags, _address = sock.recvmsg(size, space, flags | _CLOSE_ON_EXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % _INT_SIZE])
    return data, list(fds)


def _send(sock: _socket.socket, data: bytes, fds: tuple[int, ...]) -> None:
    if fds:
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))
        data = data[sock.sendmsg([data], [rights]) :]
    if data:
        sock.sendall(data)


class Lines:
    """Collects the lines that come up a socket, with their descriptors."""

    def __init__(self, sock: _socket.socket) -> None:
        self._sock = sock
        self._buffer = b""
        self._fds: list[int] = []

    def read(self) -> bool:
        """Take in what is there; false when the other side is gone."""
        data, fds = receive(self._sock, _CHUNK)
        self._fds += fds
        self._buffer += data
        return bool(data)

    def next(self) -> tuple[str, str, list[int]] | None:
        """The next whole line, as its kind, its words and its descriptors."""
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        kind, count, words = (line.decode(errors="replace") + " ").split(" ", 2)
        fds, self._fds = self._fds[: int(count)], self._fds[int(count) :]
        return kind, words.rstrip(" "), fds

    def close(self) -> None:
        """Close the descriptors of lines that nobody took."""
        while self._fds:
            os.close(self._fds.pop())
