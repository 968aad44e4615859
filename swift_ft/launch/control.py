"""The line between an agent and one of its workers: a local socket, one JSON message per packet.

Its end tells each side of the other's death at once. Heartbeats on it tell of a worker that is stopped or
hangs in a call that holds the interpreter.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["WorkerLine", "line_pair", "receive"]

_MAX_PACKET = 64 * 1024


def line_pair() -> tuple[socket.socket, socket.socket]:
    """The agent's end and the worker's end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive(line: socket.socket) -> dict[str, Any] | None:
    """The next message, or None when the other side is gone.

    Raises:
        BlockingIOError: if nothing is there and the socket does not block.
    """
    try:
        packet = line.recv(_MAX_PACKET)
    except ConnectionError:
        return None
    return json.loads(packet) if packet else None


class WorkerLine:
    """The worker's end. Sends a heartbeat in a thread of its own.

    Args:
        line: the socket.
        beat_s: seconds between two heartbeats.
        on_agent_lost: called once, in a thread of this object, when the agent is gone.
    """

    def __init__(self, line: socket.socket, *, beat_s: float, on_agent_lost: Callable[[], None]) -> None:
        self._line = line
        self._beat_s = beat_s
        self._on_agent_lost = on_agent_lost
        self._closed = threading.Event()
        self._progress: dict[str, Any] = {}
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name=f"swift-line{target.__name__}", daemon=True).start()

    def tell(self, **message: Any) -> None:
        """Send a message. A line that is gone is noticed by the watching thread, not here."""
        packet = json.dumps(message).encode()[:_MAX_PACKET]
        try:
            self._line.send(packet)
        except OSError:
            self._closed.set()

    def progress(self, **facts: Any) -> None:
        """Facts that the next heartbeat carries (iteration, mode)."""
        self._progress = facts

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_s):
            self.tell(beat=self._progress)

    def _watch(self) -> None:
        while receive(self._line) is not None:
            pass
        self._closed.set()
        self._on_agent_lost()
