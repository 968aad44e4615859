"""A small HTTP server for segments on the local disk of the worker that wrote them.

    GET /g00002-s000003-i00000020-00000047.arrow        one of the log's segments, unchanged
    Authorization: Bearer TOKEN                         the job's token; without it every request is refused

The server does not list its segments. The worker publishes the list in the rendezvous store, which outlives
the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from swift_ft.token_server import TokenHandler, TokenServer

__all__ = ["SegmentServer"]

_logger = logging.getLogger(__name__)


class SegmentServer(TokenServer):
    """Serves the segments of one log.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.addresses.listen_address`).
        token: the token that each request must carry.
        find: returns the file of a segment; raises FileNotFoundError for a name that is not in the log.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, token: str, find: Callable[[str], Path]) -> None:
        self.find = find
        super().__init__(host, token, _Handler, name="swift_ft log server")

    def log_failure(self, client_address: object, error: BaseException) -> None:
        """Log that a request could not be answered."""
        _logger.error(
            "The request of %s for a log segment failed: %s",
            client_address,
            error,
            exc_info=error,
            extra={"event": "segment_request_failed"},
        )


class _Handler(TokenHandler):
    server: SegmentServer

    def do_GET(self) -> None:
        if not self.may():
            return
        try:
            file = self.server.find(self.path.removeprefix("/")).open("rb")
        except FileNotFoundError:
            self.answer(HTTPStatus.NOT_FOUND)
            return
        with file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(file.seek(0, 2)))
            self.end_headers()
            file.seek(0)
            self.connection.sendfile(file)
