"""A connection that has not proved yet that it belongs to the job: few bytes, a deadline, no thread."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time

from swift_ft.network.channel import Channel
from swift_ft.network.errors import BadFrameError, RefusedError
from swift_ft.network.frames import FrameBuffer, frame
from swift_ft.network.handshake import MAX_HANDSHAKE_BYTES, UNBOUND, ServerHandshake
from swift_ft.network.secret import JobSecret

HANDSHAKE_S = 5.0
"""The longest time that a newcomer may take to prove that it is a member."""

_ENDED = "it ended the connection before it proved anything"
"""A member that is killed does so, too."""


class Newcomer:
    """The server's side of one handshake.

    Args:
        line: just accepted.
        peer: its address, in words.
        secret: the job's.

    Attributes:
        peer: as above.
        deadline: when it has taken too long, on the monotonic clock.
        waits_for: what a selector has to look for.
    """

    def __init__(self, line: socket.socket, peer: str, secret: JobSecret) -> None:
        self.peer = peer
        self.deadline = time.monotonic() + HANDSHAKE_S
        self.waits_for = selectors.EVENT_READ
        line.setblocking(False)
        binding = UNBOUND
        self._tls = secret.certificates is not None
        if secret.certificates is not None:
            binding = secret.certificates.binding()
            line = secret.certificates.server_context().wrap_socket(
                line, server_side=True, do_handshake_on_connect=False
            )
        self._line = line
        self._handshake = ServerHandshake(secret, binding)
        self._received = FrameBuffer(MAX_HANDSHAKE_BYTES)
        self._challenged = False

    def fileno(self) -> int:
        """For a selector."""
        return self._line.fileno()

    def advance(self) -> Channel | None:
        """Take what came. The channel when the handshake is complete; None before.

        Raises:
            RefusedError: it is a stranger. The caller closes it.
        """
        try:
            return self._advance()
        except (ssl.SSLWantReadError, BlockingIOError):
            self.waits_for = selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            self.waits_for = selectors.EVENT_WRITE
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError) as error:
            raise RefusedError(_ENDED) from error
        except ssl.SSLError as error:
            raise RefusedError(f"no TLS with it ({error.reason or error})") from error
        except BadFrameError as error:
            raise RefusedError(f"its first bytes are not those of swift_ft ({error})") from error
        except RefusedError:
            raise
        except OSError as error:
            raise RefusedError(f"it ended the connection ({error.strerror or error})") from error
        return None

    def _advance(self) -> Channel | None:
        if self._tls and isinstance(self._line, ssl.SSLSocket):
            self._line.do_handshake()
            self._tls = False
        while True:
            while (payload := self._received.next()) is not None:
                if self._challenged:
                    return self._finish(payload)
                self._challenged = True
                self._send(self._handshake.challenge(payload))
            data = self._line.recv(self._received.missing())
            if not data:
                raise RefusedError(_ENDED)
            self._received.feed(data)

    def _finish(self, proof: bytes) -> Channel:
        own, keys = self._handshake.finish(proof)
        self._send(own)
        return Channel(self._line, keys, purpose=self._handshake.purpose, peer=self.peer)

    def _send(self, payload: bytes) -> None:
        """A new connection's buffer has room for so little. Where it has not, something is wrong."""
        data = frame(payload)
        if self._line.send(data) != len(data):
            raise RefusedError("it does not read")

    def close(self) -> None:
        """End it, if no channel came of it."""
        with contextlib.suppress(OSError):
            self._line.close()
