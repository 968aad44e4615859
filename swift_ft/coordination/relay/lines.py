"""A line between a relay and one that follows it: messages in both directions, in order.

Between machines it is a channel of the network, which proves who speaks. Between an agent and a worker it
is a pair of sockets that exists before the worker does.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from typing import Any, Protocol

from swift_ft.network.messages import decoded, encoded

RELAY = "relay"
"""The purpose of a line between the relays of two machines, at the port of an agent."""

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 << 20
_READ = 256 * 1024
_BUFFER = 4 << 20


class Line(Protocol):
    """One end of a line. Several threads may send, one at a time receives."""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: if the line is closed, or the other side does not take it.
        """

    def try_send(self, message: dict[str, Any]) -> bool:
        """Send a message if that needs no waiting. False: nothing was sent.

        Raises:
            OSError: if the line is closed.
        """

    def send_encoded(self, body: bytes) -> None:
        """As :meth:`send`, for a message that is encoded once and sent to many (`network/messages.py`)."""

    def try_send_encoded(self, body: bytes) -> bool:
        """As :meth:`try_send`, for a message that is encoded once and sent to many."""

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None once the other side has closed.

        Raises:
            TimeoutError: if none comes in time.
        """

    def close(self) -> None:
        """End the line, and what waits for it."""


class LocalLine:
    """A line within a machine: one message after the other, each after its length.

    Args:
        end: a connected stream.

    Attributes:
        pid: the process that has this end.
    """

    def __init__(self, end: socket.socket) -> None:
        self.pid = os.getpid()
        self._socket = end
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._sending = threading.Lock()
        self._received = bytearray()  # owner: the thread that receives

    def send(self, message: dict[str, Any]) -> None:
        """See :meth:`Line.send`."""
        self.send_encoded(encoded(message))

    def try_send(self, message: dict[str, Any]) -> bool:
        """See :meth:`Line.try_send`. For messages that fit into the room that a socket then has."""
        return self.try_send_encoded(encoded(message))

    def send_encoded(self, body: bytes) -> None:
        """See :meth:`Line.send_encoded`."""
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def try_send_encoded(self, body: bytes) -> bool:
        """See :meth:`Line.try_send_encoded`."""
        if not _ready(self._socket, select.POLLOUT, 0.0):
            return False
        self.send_encoded(body)
        return True

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """See :meth:`Line.receive`."""
        deadline = time.monotonic() + timeout_s
        while (message := self._next()) is None:
            if not _ready(self._socket, select.POLLIN, max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            try:
                data = self._socket.recv(_READ)
            except OSError:
                return None
            if not data:
                return None
            self._received += data
        return message

    def _next(self) -> dict[str, Any] | None:
        buffer = self._received
        if len(buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if length > _MOST_BYTES:
            raise OSError(f"a message of {length} bytes is no message")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[_LENGTH.size : end])
        del buffer[:end]
        return decoded(body)

    def close(self) -> None:
        """See :meth:`Line.close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _ready(end: socket.socket, event: int, timeout_s: float) -> bool:
    poll = select.poll()
    try:
        poll.register(end, event)
    except (ValueError, OSError):  # closed: its next use says so
        return True
    return bool(poll.poll(timeout_s * 1000))


def local_pair() -> tuple[socket.socket, socket.socket]:
    """The agent's end and the worker's end of a line."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


_own: LocalLine | None = None


def set_line_of_worker(end: socket.socket) -> None:
    """Set this process's line to its agent, before its script begins."""
    global _own
    _own = LocalLine(end)


def take_line_of_worker() -> LocalLine | None:
    """The line of this process to its agent, for the first one that asks: one thread reads it.

    None outside of a worker, and in what a worker starts.
    """
    global _own
    line, _own = _own, None
    return line if line is not None and line.pid == os.getpid() else None
