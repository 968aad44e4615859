"""How heartbeats of machines travel: lines of single bytes between two sentinels, which never block."""

from __future__ import annotations

import contextlib
import socket

from swift_ft.addresses import family_of, listen_address

__all__ = ["BEAT", "BYE", "BeatLine", "BeatPort", "dial"]

BEAT, BYE = b".", b"!"


class BeatLine:
    """One end of a connection between two sentinels.

    Args:
        end: its socket.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._end = end

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._end.fileno()

    def send(self, what: bytes) -> None:
        """Send one byte, or nothing where the other side does not read.

        Raises:
            OSError: the connection has ended.
        """
        with contextlib.suppress(BlockingIOError):
            self._end.send(what)

    def receive(self) -> bytes | None:
        """What has arrived; empty if nothing has, and None if the connection has ended."""
        try:
            return self._end.recv(4096) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def close(self) -> None:
        """End the connection."""
        self._end.close()


class BeatPort:
    """Where other sentinels connect.

    Args:
        host: by which the other agents know this one (see :func:`swift_ft.addresses.listen_address`).

    Attributes:
        address: where it listens (``host:port``).
    """

    def __init__(self, host: str) -> None:
        address = listen_address(host)
        self._listener = socket.create_server((address, 0), family=family_of(address))
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def fileno(self) -> int:
        """The descriptor that becomes readable when a line waits."""
        return self._listener.fileno()

    def accept(self) -> BeatLine | None:
        """The next line that waits, if one does."""
        try:
            return BeatLine(self._listener.accept()[0])
        except OSError:  # it has gone again
            return None

    def close(self) -> None:
        """Listen no longer."""
        self._listener.close()


def dial(address: str, timeout_s: float) -> BeatLine:
    """Connect to another sentinel.

    Raises:
        OSError: it cannot be reached, or not in time.
    """
    host, _, port = address.rpartition(":")
    return BeatLine(socket.create_connection((host, int(port)), timeout=timeout_s))
