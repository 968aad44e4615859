"""Metrics and answers to probes over HTTP, for anyone who reaches the port: ``GET``, a few known paths."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from swift_ft.errors import first_line
from swift_ft.network.bounded_server import BoundedServer

_logger = logging.getLogger(__name__)

_MOST = 16  # connections at once
_LIMIT_S = 10.0  # for each of them
_HEAD_BYTES = 16 << 10  # of a request


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    body: bytes
    status: int = HTTPStatus.OK
    kind: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Page]]
"""The function that computes each page, by its path."""


class PageServer(BoundedServer):
    """Serves pages until it is closed, in threads. Each is computed when it is asked for.

    Args:
        address: where it listens; empty for all addresses of this host.
        port: its number; 0 for any free one.
        pages: what computes them.
        name: the thread's name.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self, address: str, port: int, pages: Mapping[str, Callable[[], Page]], *, name: str
    ) -> None:
        self.pages = pages
        super().__init__(address, port, _Handler, name=name, most=_MOST, limit_s=_LIMIT_S)

    def log_failure(self, client_address: object, error: BaseException) -> None:
        """Log that a page could not be computed."""
        text = f"a page could not be served: {type(error).__name__}: {first_line(error)}"
        _logger.error("%s", text, extra={"event": "page_failed"})


def metrics_page(collector: Any) -> Callable[[], Page]:
    """A page for Prometheus with the metrics of a collector of prometheus_client, read at each call."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return lambda: Page(generate_latest(registry), kind=CONTENT_TYPE_PLAIN_0_0_4)


class _Head(io.BufferedIOBase):
    """The lines of a request, as far as they may be long."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.left = _HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line, or what of it is within the limit; empty beyond it."""
        line: bytes = self._source.readline(self.left if size is None or size < 0 else min(size, self.left))
        self.left -= len(line)
        return line

    def close(self) -> None:
        """Close the connection's file."""
        self._source.close()
        super().close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "swift_ft", ""

    def setup(self) -> None:
        """Before the request."""
        super().setup()
        self.rfile = self._head = _Head(self.rfile)

    def do_GET(self) -> None:
        """Answer the one request of a connection."""
        page = self.server.pages.get(self.path.partition("?")[0])
        if not self._head.left:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif page is None:
            self._answer(Page(f"{' or '.join(self.server.pages)}\n".encode(), HTTPStatus.NOT_FOUND))
        else:
            self._answer(page())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called for what is not a request, and for other methods."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._answer(Page(f"{status.phrase}\n".encode(), status))

    def _answer(self, page: Page) -> None:
        self.send_response(page.status)
        if page.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        self.wfile.write(page.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
