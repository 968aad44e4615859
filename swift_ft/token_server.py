"""A small HTTP server for other workers of the job: each request must carry the job's token.

    Authorization: Bearer TOKEN

Who writes one derives from :class:`TokenServer` and :class:`TokenHandler`.
"""

from __future__ import annotations

import hmac
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from swift_ft.addresses import family_of, listen_address

__all__ = ["READ_TIMEOUT_S", "TokenHandler", "TokenServer"]

READ_TIMEOUT_S = 5.0
"""How long either side waits for the other's next bytes."""

_POLL_S = 0.02  # how often a server checks whether it was closed


class TokenServer(ThreadingHTTPServer):
    """Answers requests in threads, until it is closed.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.addresses.listen_address`).
        token: that each request must carry.
        handler: of requests.
        name: of its thread.

    Attributes:
        address: at which other machines find it.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = True

    def __init__(self, host: str, token: str, handler: type[TokenHandler], *, name: str) -> None:
        address = listen_address(host)
        self.address_family = family_of(address)
        self._expected = f"Bearer {token}".encode()
        super().__init__((address, 0), handler)
        self.address = f"{host}:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop serving. Transfers in progress continue."""
        self.shutdown()
        self.server_close()

    def knows(self, authorization: str) -> bool:
        """Whether a request carries the token."""
        return hmac.compare_digest(authorization.encode("latin-1", "replace"), self._expected)

    def server_bind(self) -> None:
        """Bind as TCPServer does. HTTPServer would first look up its own name, which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection, which the client sees as well. Any other error is logged."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            self.log_failure(client_address, error)

    def log_failure(self, client_address: object, error: BaseException) -> None:
        """Log that a request could not be answered."""
        raise NotImplementedError


class TokenHandler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: TokenServer
    timeout = READ_TIMEOUT_S

    def may(self) -> bool:
        """Whether the request carries the token. If not, it is refused."""
        if self.server.knows(self.headers.get("Authorization", "")):
            return True
        self.answer(HTTPStatus.FORBIDDEN)
        return False

    def answer(self, status: HTTPStatus) -> None:
        """Send an answer without content, and end the connection: what is left of a request is not read."""
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the client counts what it fetched."""
