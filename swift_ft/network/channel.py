"""A connection between two members of a job: each message is known to be the other side's next one.

A thread can wait in :meth:`Channel.receive`; a loop over a selector calls :meth:`Channel.drain` when
:meth:`Channel.fileno` is readable. Any thread may send.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import sys
import threading
import time
from typing import Any

from swift_ft.network.errors import BadFrameError
from swift_ft.network.frames import MAX_FRAME_BYTES, FrameBuffer, Opener, Sealer
from swift_ft.network.handshake import Keys
from swift_ft.network.messages import decoded, encoded

SEND_TIMEOUT_S = 30.0
"""The longest time that a message may take to leave for a side that reads slowly or not at all."""

_FRAME_S = 30.0  # how long the other side may take for a frame that it has begun
_READ_BYTES = 1 << 16
_DRAIN_BYTES = 1 << 20  # other channels of the same loop have their turn after so much
_LOOK_S = 5.0  # a thread that waits looks so often whether another one closed the channel

_MS, _RECEIVED_AT = struct.Struct("=I"), 52  # of Linux' tcp_info: tcpi_last_data_recv

# A machine that is gone without a word ends its connections within half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Channel:
    """Messages are JSON objects (`network/messages.py`). One thread at a time receives; any may send.

    Args:
        line: connected, and after the handshake. The channel closes it.
        keys: this side's.
        purpose: what the connection is for.
        peer: the other side's address, for messages to a person.

    Attributes:
        ended: the other side closed the channel, or this one did. What came before can still be received.
    """

    def __init__(self, line: socket.socket, keys: Keys, *, purpose: str, peer: str) -> None:
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not on every system
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.purpose = purpose
        self.peer = peer
        self.ended = False
        self._line = line
        self._encrypted = isinstance(line, ssl.SSLSocket)
        self._using_line = threading.Lock()  # OpenSSL's state: one thread at a time; never held while waiting
        self._sending = threading.Lock()  # guards the next two
        self._sealer = Sealer(keys.sending)
        self._unsent = memoryview(b"")
        self._opener = Opener(keys.receiving)  # these three belong to the thread that receives
        self._received = FrameBuffer(MAX_FRAME_BYTES)
        self._begun_at = 0.0

    def fileno(self) -> int:
        """For a selector: readable when :meth:`drain` has something to do. -1 once it is closed."""
        return self._line.fileno()

    # ------------------------------------------------------------------------------------------- sending

    def send(self, message: dict[str, Any], timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Send a message; wait while the other side's buffers are full.

        Raises:
            TimeoutError: the other side does not read. The channel is closed.
            ConnectionError: it is over.
        """
        self.send_encoded(encoded(message), timeout_s)

    def send_encoded(self, body: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """As :meth:`send`, for a message that is encoded once and sent to many."""
        deadline = time.monotonic() + timeout_s
        with self._sending:
            self._unsent = memoryview(bytes(self._unsent) + self._sealer.seal(body))
            while not self._flushed():
                left = deadline - time.monotonic()
                if left <= 0:
                    self.close()
                    raise TimeoutError(f"{self.peer} has not read for {timeout_s:g} s")
                self._wait(select.POLLOUT, left)

    def try_send(self, message: dict[str, Any]) -> bool:
        """Send a message if that needs no waiting. False: the other side reads too slowly; it gets nothing.

        Raises:
            ConnectionError: the channel is over.
        """
        return self.try_send_encoded(encoded(message))

    def try_send_encoded(self, body: bytes) -> bool:
        """As :meth:`try_send`, for a message that is encoded once and sent to many."""
        with self._sending:
            if self._unsent and not self._flushed():
                return False
            self._unsent = memoryview(self._sealer.seal(body))
            self._flushed()
        return True

    def _flushed(self) -> bool:
        """Send what the other side takes now. Whether that was all."""
        while self._unsent:
            try:
                with self._using_line:
                    sent = self._line.send(self._unsent)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except OSError as error:
                self.close()
                raise ConnectionError(
                    f"the channel to {self.peer} is over ({error.strerror or error})"
                ) from error
            self._unsent = self._unsent[sent:]
        return True

    # ----------------------------------------------------------------------------------------- receiving

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Wait for the next message; None once the other side has closed the channel.

        Args:
            timeout_s: how long to wait; None for as long as the channel lasts.

        Raises:
            TimeoutError: nothing came in time. The channel goes on.
            BadFrameError: what came is not the other side's next message. The channel is closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._next()
            if message is not None or self.ended:
                return message
            if not self._read():
                left = _LOOK_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{self.peer} has sent nothing for {timeout_s:g} s")
                self._wait(select.POLLIN, left)

    def drain(self) -> list[dict[str, Any]]:
        """The messages that are there, without waiting. :attr:`ended` tells whether others may follow.

        Raises:
            BadFrameError: what came is not the other side's next message. The channel is closed.
        """
        messages = []
        read = 0
        while True:
            while (message := self._next()) is not None:
                messages.append(message)
            # What OpenSSL has read already would wake no selector: that is taken in any case.
            if read >= _DRAIN_BYTES and not self._pending():
                return messages
            got = self._read()
            read += got
            if not got or (got < _READ_BYTES and not self._encrypted):  # no more is there
                messages += iter(self._next, None)
                return messages

    def quiet_s(self) -> float:
        """Since when nothing has come, by the kernel. 0 if the system does not tell."""
        if sys.platform != "linux" or self.ended:
            return 0.0
        told = self._line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _MS.size)
        return (
            0.0
            if len(told) < _RECEIVED_AT + _MS.size
            else float(_MS.unpack_from(told, _RECEIVED_AT)[0]) / 1000
        )

    def _pending(self) -> int:
        if not isinstance(self._line, ssl.SSLSocket) or self.ended:
            return 0
        with self._using_line:
            return self._line.pending()

    def _next(self) -> dict[str, Any] | None:
        try:
            payload = self._received.next()
            if payload is None:
                return None
            self._begun_at = 0.0
            return _decoded(self._opener.open(payload))
        except BadFrameError:
            self.close()
            raise

    def _check_progress(self) -> None:
        """Called when no more bytes are there: what is left is the beginning of a frame."""
        if len(self._received) and not self._begun_at:
            self._begun_at = time.monotonic()
        elif self._begun_at and time.monotonic() - self._begun_at > _FRAME_S:
            self.close()
            raise BadFrameError(f"{self.peer} has not finished a message for {_FRAME_S:g} s")

    def _read(self) -> int:
        """Take the bytes that are there. How many those were."""
        try:
            with self._using_line:
                data = self._line.recv(_READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._check_progress()
            return 0
        except OSError:  # reset, or closed by another thread
            data = b""
        if not data:
            self.ended = True
        self._received.feed(data)
        return len(data)

    # ---------------------------------------------------------------------------------------------- both

    def _wait(self, event: int, left_s: float) -> None:
        """Until the socket is ready, or a while has passed."""
        poll = select.poll()
        try:
            # OpenSSL may have to read in order to write.
            poll.register(self._line, event | (select.POLLIN if self._encrypted else 0))
        except (ValueError, OSError):  # closed by another thread: the next use of the socket says so
            return
        poll.poll(1000 * min(left_s, _LOOK_S))

    def close(self) -> None:
        """End the channel, and whatever waits in it. It may be called more than once, in any thread."""
        self.ended = True
        with (
            self._using_line
        ):  # a socket that is shut down encrypts no more: no thread may write to it meanwhile
            with contextlib.suppress(OSError):  # it may be over already
                self._line.shutdown(socket.SHUT_RDWR)
            self._line.close()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return decoded(body)
    except (ValueError, RecursionError) as error:
        raise BadFrameError(f"a message that is not JSON ({type(error).__name__})") from error
