"""One listening port for all that members of the job want of this process, by purpose.

One thread accepts and does the handshakes. A connection gets a thread of its own once it has proved that it
belongs to the job. So strangers cost little: few bytes and no thread, until a deadline. Where too many wait,
the oldest is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping

from swift_ft.network.addresses import create_server, endpoint, listen_address
from swift_ft.network.channel import Channel
from swift_ft.network.errors import BadFrameError, RefusedError
from swift_ft.network.frames import FrameBuffer, frame
from swift_ft.network.handshake import MAX_HANDSHAKE_BYTES, UNBOUND, ServerHandshake
from swift_ft.network.refusals import Refusals
from swift_ft.network.secret import JobSecret

_logger = logging.getLogger(__name__)

Handler = Callable[[Channel], None]
"""Serves a channel, in a thread of its own. It may keep the channel; then it closes it later."""

MAX_NEWCOMERS = 128
"""Connections that have not proved anything yet. A member needs milliseconds for it."""

HANDSHAKE_S = 5.0
"""The longest time that a newcomer may take to prove that it is a member."""

_ENDED = "it ended the connection before it proved anything"
"""A member that is killed does so, too."""

_BACKLOG = 512
_PAUSE_S = 0.05  # before another try to accept, where descriptors are short
_CLOSE_S = 5.0


class Port:
    """Listens until it is closed.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.network.addresses.listen_address`).
        secret: the job's.
        handlers: who serves a connection, by its purpose. More can be added later.
        number: of the port; 0 for any free one.

    Attributes:
        address: at which other machines find it.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self, host: str, secret: JobSecret, handlers: Mapping[str, Handler] | None = None, *, number: int = 0
    ) -> None:
        self._listener = create_server(listen_address(host), number, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = endpoint(host, self._listener.getsockname()[1])
        self._secret = secret
        self._handlers = dict(handlers or {})  # replaced as a whole, so that a look needs no lock
        self._refusals = Refusals(f"the port {self.address}")
        self._newcomers: dict[Newcomer, None] = {}  # the oldest first; belongs to the thread
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._changing = threading.Lock()  # guards the handlers and channels
        self._closing = False
        self._wake_r, self._wake_w = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="swift-port", daemon=True)
        self._thread.start()

    def serve(self, purpose: str, handler: Handler) -> None:
        """Serve one more purpose from now on."""
        with self._changing:
            self._handlers = {**self._handlers, purpose: handler}

    def close(self) -> None:
        """Stop listening, and end all channels that came in here."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_w, b"c")
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake_r)
            os.close(self._wake_w)
        with self._changing:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    # ---------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._pause_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, Newcomer) and key.fileobj in self._newcomers:
                    self._advance(key.fileobj)
            self._drop_late_ones()
            self._refusals.flush()
        self._refusals.flush(now=True)
        for newcomer in list(self._newcomers):
            self._forget(newcomer).close()
        self._selector.close()
        self._listener.close()

    def _pause_s(self) -> float | None:
        """Until the next deadline; None if nothing has one."""
        due = [newcomer.deadline for newcomer in self._newcomers][:1]  # the oldest one's
        if (flush_at := self._refusals.flush_at) is not None:
            due.append(flush_at)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _accept(self) -> None:
        try:
            line, source = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left, or the stranger is gone already
            self._refusals.note("someone", f"it cannot be accepted ({error.strerror or error})")
            time.sleep(_PAUSE_S)
            return
        peer = str(source[0]).removeprefix("::ffff:")  # IPv4, at a server of both kinds
        try:
            newcomer = Newcomer(line, peer, self._secret)
        except OSError as error:
            line.close()
            self._refusals.note(peer, f"it ended the connection ({error.strerror or error})")
            return
        if len(self._newcomers) >= MAX_NEWCOMERS:
            oldest = next(iter(self._newcomers))
            self._refuse(oldest, f"it has proved nothing yet, and {MAX_NEWCOMERS} others wait")
        self._newcomers[newcomer] = None
        self._selector.register(newcomer, newcomer.waits_for)

    def _advance(self, newcomer: Newcomer) -> None:
        before = newcomer.waits_for
        try:
            channel = newcomer.advance()
        except RefusedError as error:
            self._refuse(newcomer, str(error))
            return
        if channel is not None:
            self._forget(newcomer)
            self._begin(channel)
        elif newcomer.waits_for != before:
            self._selector.modify(newcomer, newcomer.waits_for)

    def _begin(self, channel: Channel) -> None:
        handler = self._handlers.get(channel.purpose)
        if handler is None:
            self._refusals.note(channel.peer, f"nothing here serves {channel.purpose!r}")
            channel.close()
            return
        with self._changing:
            self._channels.add(channel)
        name = f"swift-port-{channel.purpose}"
        threading.Thread(target=_serve, args=(handler, channel), name=name, daemon=True).start()

    def _drop_late_ones(self) -> None:
        now = time.monotonic()
        while self._newcomers and (oldest := next(iter(self._newcomers))).deadline <= now:
            self._refuse(oldest, f"it has not proved within {HANDSHAKE_S:g} s that it belongs to the job")

    def _refuse(self, newcomer: Newcomer, reason: str) -> None:
        self._refusals.note(newcomer.peer, reason)
        self._forget(newcomer).close()

    def _forget(self, newcomer: Newcomer) -> Newcomer:
        del self._newcomers[newcomer]
        self._selector.unregister(newcomer)
        return newcomer


def _serve(handler: Handler, channel: Channel) -> None:
    try:
        handler(channel)
    except OSError as error:  # the other side is gone, or sent what it must not
        channel.close()
        _logger.info(
            "the connection of %s for %s is over: %s",
            channel.peer,
            channel.purpose,
            error,
            extra={"event": "channel_over"},
        )
    except Exception:
        channel.close()
        _logger.exception(
            "serving %s for %s failed", channel.peer, channel.purpose, extra={"event": "channel_failed"}
        )


class Newcomer:
    """A connection that has not proved yet that it belongs to the job: few bytes, a deadline, no thread.

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
