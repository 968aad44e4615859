"""One that follows a relay: it gets blocks in order, and never holds up the others."""

from __future__ import annotations

import threading
from collections import deque

from swift_ft.coordination.relay.lines import Line

_AT_ONCE = 64 * 1024
"""Bytes of a message that fit into what a socket buffers when it says that it has room."""
_MOST_WAITING = 8192
"""Messages that a slow subscriber may be behind. It then loses its line, and asks again."""


class Subscriber:
    """The relay's end of a line, with what waits to be sent on it.

    What fits is sent by the thread that has it: handing it over would cost a thread's turn for each block.
    The rest is sent by a thread of this line, which may wait.

    Args:
        line: to the one that follows.

    Attributes:
        machine: the machine that follows; empty for a worker.
    """

    def __init__(self, line: Line) -> None:
        self.machine = ""
        self._line = line
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()  # guarded by the condition, as the next two
        self._sender: threading.Thread | None = None
        self._closed = False

    def push(self, message: bytes) -> None:
        """Send a message, which is encoded, after those before it. Returns at once."""
        with self._changed:
            if self._closed:
                return
            if not self._waiting and self._sent(message):
                return
            self._waiting.append(message)
            if len(self._waiting) > _MOST_WAITING:
                self._close()
                return
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, name="swift-relay-sender", daemon=True)
                self._sender.start()
            self._changed.notify()

    def close(self) -> None:
        """End the line."""
        with self._changed:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._waiting.clear()
        self._changed.notify()
        self._line.close()

    def _sent(self, message: bytes) -> bool:
        if len(message) > _AT_ONCE:
            return False
        try:
            return self._line.try_send_encoded(message)
        except OSError:  # the thread that receives sees the same
            return True

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                message = self._waiting[0]
            try:
                self._line.send_encoded(message)
            except OSError:
                self.close()
                return
            with self._changed:
                if self._waiting:
                    self._waiting.popleft()
