"""The channel between an agent and one of its workers: a local socket, one JSON message per packet.

When one side dies, the socket closes and the other side notices at once. Missing heartbeats reveal a worker
that is stopped, or that hangs in a call that holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

_MAX_PACKET = 64 * 1024


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """The agent's end and the worker's end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next message, or None when the other side is gone.

    Raises:
        BlockingIOError: if no message has arrived and the socket does not block.
    """
    try:
        packet = channel.recv(_MAX_PACKET)
    except ConnectionError:
        return None
    return json.loads(packet) if packet else None


class AgentChannel:
    """The worker's end. A thread of its own sends heartbeats.

    Args:
        end: the worker's end of :func:`channel_pair`.
        beat_s: seconds between two heartbeats.
        on_agent_lost: called once, in a thread of this object, when the agent is gone.
    """

    def __init__(self, end: socket.socket, *, beat_s: float, on_agent_lost: Callable[[], None]) -> None:
        self._socket = end
        self._beat_s = beat_s
        self._on_agent_lost = on_agent_lost
        self._closed = threading.Event()
        self._progress: dict[str, Any] = {}
        self._due = threading.Condition()
        # Guarded by the condition: what the agent publishes for this worker, until it is sent.
        self._shown: dict[str, Any] | None = None
        self._mode: str | None = None  # as it was shown last
        self._hurry = False
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name=f"swift-channel{target.__name__}", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message. If the agent is gone, the watching thread notices, not this call."""
        packet = json.dumps(message).encode()[:_MAX_PACKET]
        try:
            self._socket.send(packet)
        except OSError:
            self._close()

    def mention(self, **message: Any) -> None:
        """As :meth:`send`, unless the agent is behind with reading, as while it waits for a store."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def show(self, rank: int, facts: dict[str, Any]) -> None:
        """Have the agent publish facts of this worker: with the next heartbeat, or at once in a new mode.

        Args:
            rank: this worker.
            facts: JSON-ready, with ``mode``.
        """
        with self._due:
            self._shown = {"rank": rank, "facts": facts}
            if facts["mode"] != self._mode:
                self._mode, self._hurry = facts["mode"], True
                self._due.notify()

    def progress(self, **facts: Any) -> None:
        """Facts that the next heartbeat carries (iteration, mode)."""
        self._progress = facts

    def send_last_beat(self) -> None:
        """Tell the agent the newest facts, before the process ends."""
        self._send_beat()

    def _send_beat(self) -> None:
        with self._due:
            shown, self._shown, self._hurry = self._shown, None, False
        self.send(beat=self._progress, **({} if shown is None else {"shown": shown}))

    def _beat(self) -> None:
        while not self._closed.is_set():
            with self._due:
                self._due.wait_for(lambda: self._hurry or self._closed.is_set(), self._beat_s)
            self._send_beat()

    def _close(self) -> None:
        with self._due:
            self._closed.set()
            self._due.notify()

    def _watch(self) -> None:
        while receive(self._socket) is not None:
            pass
        self._close()
        self._on_agent_lost()


_own: AgentChannel | None = None


def set_agent_channel(channel: AgentChannel) -> None:
    """Set this process's channel, before its script begins."""
    global _own
    _own = channel


def agent_channel() -> AgentChannel | None:
    """The channel of this process to its agent; None outside of a worker."""
    return _own


def tell_agent(**message: Any) -> None:
    """Send the agent a message. Outside of a worker there is none."""
    if _own is not None:
        _own.send(**message)
