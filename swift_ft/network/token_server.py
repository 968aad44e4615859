"""A small HTTP server for other workers of the job: each request must prove that it comes from a member.

How it does is in `network/http_access.py`. Who writes one derives from :class:`TokenServer` and
:class:`TokenHandler`. A connection that has not proved anything has a deadline, and of too many of them the
oldest ends.
"""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from swift_ft.network import JobSecret
from swift_ft.network.addresses import endpoint, listen_address
from swift_ft.network.bounded_server import BoundedServer, Stranger
from swift_ft.network.http_access import RequestCheck

READ_TIMEOUT_S = 5.0
"""The time for which either side waits for the other's next bytes."""

_PROVES_S = 5.0  # how long a connection may take until it has proved something
_MAX_STRANGERS = 64  # connections that have not, each with a thread


class TokenServer(BoundedServer):
    """Answers members of the job, until it is closed.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.network.addresses.listen_address`).
        secret: the job's.
        handler: handles the requests.
        name: the thread's name.

    Attributes:
        address: at which other machines find it.
        secret: the job's.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, secret: JobSecret, handler: type[TokenHandler], *, name: str) -> None:
        self.secret = secret
        address = listen_address(host)
        super().__init__(address, 0, handler, name=name, most=_MAX_STRANGERS, limit_s=_PROVES_S, host=host)
        self.address = endpoint(host, self.server_port)

    def serve(self, stranger: Stranger, client_address: Any) -> None:
        """Answer the requests of a connection, with TLS where the job has certificates."""
        try:
            if self.secret.certificates is not None:
                encrypted = self.secret.certificates.server_context().wrap_socket(
                    stranger.line, server_side=True, do_handshake_on_connect=False
                )
                stranger.line = encrypted
                encrypted.do_handshake()
            super().serve(stranger, client_address)
        except OSError as error:
            if self.admit() is not None:
                self.refusals.note(stranger.peer, f"it ended the connection ({error.strerror or error})")
        finally:
            if self.admit() is not None:
                self.refusals.note(stranger.peer, "it ended the connection before it proved anything")

    def refuse(self, reason: str) -> None:
        """Log that the connection of this thread was refused, unless it was already."""
        if (stranger := self.admit()) is not None:
            self.refusals.note(stranger.peer, reason)


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
        """Called for what is not a request."""
        self.server.refuse(f"its bytes are no request ({HTTPStatus(code).phrase})")
        self.answer(HTTPStatus(code))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the client counts what it fetched."""
