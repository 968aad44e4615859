"""A worker's server for other workers of the job: files on its disk, and copies in its memory, over HTTP.

    GET /logs/g00002-s000003-i00000020-00000047.arrow      a file; with ``Range: bytes=1000-``, the rest of it
    GET /copies/15                                        a copy in memory
    PUT /copies/15?owner=1&...                            one that another worker sends

The first name is the kind. Each request proves that it comes from a member of the job
(`network/http_access.py`), or is refused. A connection that has not proved anything has a deadline, and of
too many of them the oldest ends. A server does not list what it has: the rendezvous store says so, which
outlives it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from swift_ft.network import JobSecret
from swift_ft.network.addresses import endpoint, listen_address
from swift_ft.network.bounded_server import BoundedServer, Stranger
from swift_ft.network.http_access import RequestCheck

_logger = logging.getLogger(__name__)

LOGS, PARTS, SAMPLES, COPIES, WORLDS = "logs", "parts", "samples", "copies", "worlds"
"""The kinds: segments of a log, files of checkpoints, files of samples, copies of a worker's state, and the
state that a worker offers to the next world."""

READ_TIMEOUT_S = 5.0
"""The time for which either side waits for the other's next bytes."""

_PROVES_S = 5.0  # how long a connection may take until it has proved something
_MAX_STRANGERS = 64  # connections that have not, each with a thread
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})?")  # any other form may be ignored (RFC 9110, 14.2)


class SpoiltError(OSError):
    """The bytes that are asked for have changed since they were put here."""


@dataclass(frozen=True, slots=True)
class Content:
    """The answer to a request.

    Attributes:
        size: bytes.
        version: a name for exactly these bytes. A request for the rest of them says it.
        send: sends some of them, from the first one on, so many. No file is read into memory for that.
    """

    size: int
    version: str
    send: Callable[[socket.socket, int, int], object]


@dataclass(frozen=True, slots=True)
class Sent:
    """A copy that a worker sends.

    Attributes:
        name: its name, as others will ask for it.
        facts: numbers that belong to it.
        size: bytes.
        read: fills the memory that it is given with the next ones. Raises ConnectionError if they end before.
    """

    name: str
    facts: dict[str, int]
    size: int
    read: Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class Source:
    """A kind that is served.

    Attributes:
        open: the content of a name, as long as the context lasts. Raises FileNotFoundError for one that is
            not served, and SpoiltError.
        take: takes what another worker sends. False if it is not wanted. None: it never is.
    """

    open: Callable[[str], AbstractContextManager[Content]]
    take: Callable[[Sent], bool] | None = None


def files(find: Callable[[str], Path]) -> Source:
    """Files on the disk, unchanged.

    Args:
        find: returns the file of a name; raises FileNotFoundError for one that is not served.
    """

    @contextmanager
    def opened(name: str) -> Iterator[Content]:
        with find(name).open("rb") as file:
            facts = os.fstat(file.fileno())
            version = f"{facts.st_ino:x}-{facts.st_size:x}-{facts.st_mtime_ns:x}"
            yield Content(
                facts.st_size, version, lambda line, first, count: line.sendfile(file, first, count)
            )

    return Source(opened)


class PeerServer(BoundedServer):
    """Answers members of the job, until it is closed.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.network.addresses.listen_address`).
        secret: the job's.

    Attributes:
        address: at which other machines find it.
        secret: the job's.
        sources: what is served, by kind. Replaced as a whole, so that a look needs no lock.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, secret: JobSecret, sources: dict[str, Source] | None = None) -> None:
        self.secret = secret
        self.sources = dict(sources or {})
        super().__init__(
            listen_address(host),
            0,
            _Handler,
            name="swift-peer-server",
            most=_MAX_STRANGERS,
            limit_s=_PROVES_S,
            host=host,
        )
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

    def log_failure(self, client_address: object, error: BaseException) -> None:
        """Log that a request could not be answered."""
        _logger.error(
            "The request of %s for a file or a copy failed: %s",
            client_address,
            error,
            exc_info=error,
            extra={"event": "file_request_failed"},
        )


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection: one that asks how to prove something, and one that does."""

    server: PeerServer
    protocol_version = "HTTP/1.1"  # the second request comes on the same connection

    def setup(self) -> None:
        """Before the first request."""
        self._check = RequestCheck(self.server.secret)
        super().setup()

    # ------------------------------------------------------------------------------- who may ask at all

    def _may(self) -> bool:
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
            self._answer(HTTPStatus.FORBIDDEN)
            return False
        self.server.admit()
        self.connection.settimeout(READ_TIMEOUT_S)
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called for what is not a request."""
        self.server.refuse(f"its bytes are no request ({HTTPStatus(code).phrase})")
        self._answer(HTTPStatus(code))

    # ------------------------------------------------------------------------------- what a member gets

    def do_GET(self) -> None:
        """Give a content, or a range of it."""
        if not self._may():
            return
        source, name = self._asked_for()
        if source is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        try:
            with source.open(name) as content:
                self._give(content)
        except FileNotFoundError:
            self._answer(HTTPStatus.NOT_FOUND)
        except SpoiltError:
            self._answer(HTTPStatus.GONE)

    def do_PUT(self) -> None:
        """Take what another worker sends."""
        if not self._may():
            return
        source, name = self._asked_for()
        if source is None or source.take is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        facts = {name: int(values[0]) for name, values in parse_qs(urlsplit(self.path).query).items()}
        taken = source.take(Sent(name, facts, int(self.headers["Content-Length"]), self._read))
        self._answer(HTTPStatus.OK if taken else HTTPStatus.CONFLICT)

    def _asked_for(self) -> tuple[Source | None, str]:
        kind, _, name = urlsplit(self.path).path.removeprefix("/").partition("/")
        return self.server.sources.get(kind), name

    def _give(self, content: Content) -> None:
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        first, end = 0, content.size
        if asked is not None:
            first = int(asked[1])
            end = min(end, int(asked[2]) + 1) if asked[2] else end
            wanted = self.headers.get("If-Match")
            if wanted is not None and wanted != f'"{content.version}"':
                self._answer(HTTPStatus.PRECONDITION_FAILED)
                return
            if first >= end:
                self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
        self.send_response(HTTPStatus.OK if asked is None else HTTPStatus.PARTIAL_CONTENT)
        if asked is not None:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{content.size}")
        self.send_header("ETag", f'"{content.version}"')
        self.send_header("Content-Length", str(end - first))
        self.end_headers()
        if end > first:
            content.send(self.connection, first, end - first)

    def _read(self, into: memoryview) -> None:
        at = 0
        while at < len(into):
            read = self.rfile.readinto(into[at:])
            if not read:
                raise ConnectionError(f"the sender broke off after {at} of {len(into)} bytes")
            at += read

    def _answer(self, status: HTTPStatus) -> None:
        """Send an answer without content, and end the connection: what is left of a request is not read."""
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the client counts what it fetched."""
