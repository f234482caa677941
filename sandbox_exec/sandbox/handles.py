"""Sockets that no forked child of the caller may keep: what holds on to one end keeps what is at the other alive."""

from __future__ import annotations

import os
import socket
import threading
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_lock = threading.RLock()  # no fork between the making of a pair and its being known here


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that are closed in every child that is forked while they are open."""
    with _lock:
        pair = socket.socketpair()
        _sockets.update(pair)
    return pair


def let_go(sock: socket.socket) -> None:
    """Close the descriptor and nothing else: no word to the other side, which is the parent's."""
    if sock.fileno() >= 0:
        os.close(sock.detach())


def _in_child() -> None:
    for sock in list(_sockets):
        let_go(sock)
    _sockets.clear()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
