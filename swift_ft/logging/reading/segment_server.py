"""A small HTTP server for segments on the local disk of the worker that wrote them.

    GET /g00002-s000003-i00000020-00000047.arrow        one of the log's segments, unchanged
    Authorization: Bearer TOKEN                         the job's token; without it every request is refused

The server does not list its segments. The worker publishes the list in the rendezvous store, which outlives
the server.
"""

from __future__ import annotations

import hmac
import logging
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from swift_ft.addresses import family_of, listen_address

__all__ = ["READ_TIMEOUT_S", "SegmentServer"]

READ_TIMEOUT_S = 5.0
"""How long either side waits for the other's next bytes."""

_POLL_S = 0.02  # how often a server checks whether it was closed

_logger = logging.getLogger(__name__)


class SegmentServer:
    """Serves the segments of one log to clients that know the token, in threads, until it is closed.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.addresses.listen_address`).
        token: the token that each request must carry.
        find: returns the file of a segment; raises FileNotFoundError for a name that is not in the log.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, token: str, find: Callable[[str], Path]) -> None:
        self._server = _Server(host, token, find)
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="swift_ft log server", daemon=True
        ).start()

    def close(self) -> None:
        """Stops serving. Transfers in progress continue."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, token: str, find: Callable[[str], Path]) -> None:
        address = listen_address(host)
        self.address_family = family_of(address)
        self.expected = f"Bearer {token}".encode()
        self.find = find
        super().__init__((address, 0), _Handler)

    def server_bind(self) -> None:
        """Binds as TCPServer does. HTTPServer would first look up its own name, which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a broken connection, which the client sees as well. Logs any other error."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _logger.error(
                "The request of %s for a log segment failed: %s",
                client_address,
                error,
                exc_info=error,
                extra={"event": "segment_request_failed"},
            )


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_TIMEOUT_S

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, self.server.expected):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        try:
            file = self.server.find(self.path.removeprefix("/")).open("rb")
        except FileNotFoundError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(file.seek(0, 2)))
            self.end_headers()
            file.seek(0)
            self.connection.sendfile(file)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the client counts what it fetched."""
