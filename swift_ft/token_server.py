"""A small HTTP server for other workers of the job: each request must prove that it comes from a member.

How it does is in `network/http_access.py`. Who writes one derives from :class:`TokenServer` and
:class:`TokenHandler`. A connection that has not proved anything has a deadline, and of too many of them the
oldest ends.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from swift_ft.addresses import family_of, listen_address
from swift_ft.network import JobSecret
from swift_ft.network.http_access import RequestCheck
from swift_ft.network.refusals import Refusals

__all__ = ["READ_TIMEOUT_S", "TokenHandler", "TokenServer"]

READ_TIMEOUT_S = 5.0
"""How long either side waits for the other's next bytes."""

_PROVES_S = 5.0  # how long a connection may take until it has proved something
_MAX_STRANGERS = 64  # connections that have not, each with a thread
_POLL_S = 0.02  # how often a server checks whether it was closed


@dataclass(slots=True, eq=False)
class _Stranger:
    """A connection that has proved nothing yet."""

    line: socket.socket
    peer: str
    deadline: float


class TokenServer(ThreadingHTTPServer):
    """Answers requests in threads, until it is closed.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.addresses.listen_address`).
        secret: the job's.
        handler: of requests.
        name: of its thread.

    Attributes:
        address: at which other machines find it.
        secret: the job's.
        refusals: what is said of refused connections.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = True

    def __init__(self, host: str, secret: JobSecret, handler: type[TokenHandler], *, name: str) -> None:
        address = listen_address(host)
        self.address_family = family_of(address)
        self.secret = secret
        self._changing = threading.Lock()  # guards the next one
        self._strangers: dict[int, _Stranger] = {}  # by the thread that serves them; the oldest first
        super().__init__((address, 0), handler)
        self.address = f"{host}:{self.server_port}"
        self.refusals = Refusals(f"the server {self.address}")
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop serving. Transfers in progress continue."""
        self.shutdown()
        self.server_close()
        self._end_strangers(lambda _: True, "the server was closed")
        self.refusals.flush(now=True)

    def server_bind(self) -> None:
        """Bind as TCPServer does. HTTPServer would first look up its own name, which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    # -------------------------------------------------------------------------------------- strangers

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in a thread of its own."""
        stranger = _Stranger(request, str(client_address[0]), time.monotonic() + _PROVES_S)
        with self._changing:
            self._strangers[threading.get_ident()] = stranger
            crowd = len(self._strangers) - _MAX_STRANGERS
            oldest = list(self._strangers.values())[:1] if crowd > 0 else []
        self._end_strangers(lambda one: one in oldest, f"more than {_MAX_STRANGERS} have proved nothing yet")
        try:
            self._serve(stranger, client_address)
        except OSError as error:
            if self.admit() is not None:
                self.refusals.note(stranger.peer, f"it ended the connection ({error.strerror or error})")
        finally:
            if self.admit() is not None:
                self.refusals.note(stranger.peer, "it ended the connection before it proved anything")
            stranger.line.close()

    def _serve(self, stranger: _Stranger, client_address: Any) -> None:
        if self.secret.certificates is not None:
            encrypted = self.secret.certificates.server_context().wrap_socket(
                stranger.line, server_side=True, do_handshake_on_connect=False
            )
            stranger.line = encrypted
            encrypted.do_handshake()
        super().finish_request(stranger.line, client_address)

    def admit(self) -> _Stranger | None:
        """The connection of this thread is no stranger's, or has ended. None if that was known."""
        with self._changing:
            return self._strangers.pop(threading.get_ident(), None)

    def refuse(self, reason: str) -> None:
        """Log that the connection of this thread was refused, unless it was already."""
        if (stranger := self.admit()) is not None:
            self.refusals.note(stranger.peer, reason)

    def service_actions(self) -> None:
        """End those that take too long. Called all the time."""
        now = time.monotonic()
        self._end_strangers(lambda one: one.deadline <= now, f"it proved nothing within {_PROVES_S:g} s")
        self.refusals.flush()

    def _end_strangers(self, which: Any, reason: str) -> None:
        with self._changing:
            ended = {thread: one for thread, one in self._strangers.items() if which(one)}
            for thread in ended:
                del self._strangers[thread]
        for one in ended.values():
            self.refusals.note(one.peer, reason)
            with contextlib.suppress(OSError):  # its thread sees the end, and closes it
                socket.socket.shutdown(one.line, socket.SHUT_RDWR)

    # -------------------------------------------------------------------------------------- failures

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection, which the client sees as well. Any other error is logged."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            self.log_failure(client_address, error)

    def log_failure(self, client_address: object, error: BaseException) -> None:
        """Log that a request could not be answered."""
        raise NotImplementedError


class TokenHandler(BaseHTTPRequestHandler):
    """Handles the requests of one connection: one that asks how to prove something, and one that does."""

    server: TokenServer
    protocol_version = "HTTP/1.1"  # the second request comes on the same connection

    def setup(self) -> None:
        """Before the first request."""
        self._check = RequestCheck(self.server.secret)
        super().setup()

    def may(self) -> bool:
        """Whether the request comes from a member of the job. If not, it is answered."""
        authorization = self.headers.get("Authorization")
        length = self.headers.get("Content-Length", "0")
        if authorization is None:
            self.close_connection = length != "0"  # its content is not read
            self.send_response(HTTPStatus.UNAUTHORIZED)
            self.send_header("WWW-Authenticate", self._check.challenge())
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        self.close_connection = True
        # The path as it was sent: ``self.path`` has no double slashes.
        if not length.isdecimal() or not self._check.accepts(
            authorization, self.command, self.requestline.split()[1], int(length)
        ):
            self.server.refuse("it does not know this job's secret")
            self.answer(HTTPStatus.FORBIDDEN)
            return False
        self.server.admit()
        self.connection.settimeout(READ_TIMEOUT_S)
        return True

    def answer(self, status: HTTPStatus) -> None:
        """Send an answer without content, and end the connection: what is left of a request is not read."""
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called for what is no request."""
        self.server.refuse(f"its bytes are no request ({HTTPStatus(code).phrase})")
        self.answer(HTTPStatus(code))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the client counts what it fetched."""
