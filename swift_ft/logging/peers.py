"""Segments straight from the local disk of the worker that wrote them: a small HTTP server, and its client.

    GET /g00002-s000003-i00000020-00000047.arrow        one of the log's segments, as it is
    Authorization: Bearer TOKEN                         the job's, without which nothing is told

Which segments there are is told elsewhere (`recovery/log_peers.py`): it is known when a server is gone, too.
"""

from __future__ import annotations

import hmac
import http.client
import ipaddress
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import pyarrow as pa

__all__ = ["Peer", "SegmentServer"]

_SILENCE_S = 5.0  # longest wait for the other side's next bytes
_LOOK_S = 0.02  # how soon a server notices that it was closed
_COPY_BYTES = 1 << 20


class SegmentServer:
    """Serves the segments of one log to whoever knows the token, in threads, until it is closed.

    Args:
        host: the address to listen at, as the others know this machine. A name is only published, and all
            addresses are listened at, since a machine's own name often leads it to itself alone.
        token: what a request must bring.
        find: the file of a segment; raises FileNotFoundError for whatever is not one of the log's.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, token: str, find: Callable[[str], Path]) -> None:
        self._server = _Server(host, token, find)
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="swift_ft log server", daemon=True
        ).start()

    def close(self) -> None:
        """Ends the service. Transfers that are under way go on."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, token: str, find: Callable[[str], Path]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.expected = f"Bearer {token}".encode()
        self.find = find
        super().__init__((host if _is_literal(host) else "", 0), _Handler)

    def server_bind(self) -> None:
        """As any server does; HTTP's looks up a name for itself first, which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the other side's affair; whatever else goes wrong is told."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENCE_S

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
        """Nothing: what was transferred is counted by who asked for it."""


class Peer:
    """The log of a living worker, as its server offers it.

    Args:
        address: ``host:port`` of its server.
        token: the job's.
        names: file names of all segments of its log, on its disk or in the store.
    """

    def __init__(self, address: str, token: str, names: Iterable[str]) -> None:
        self.address = address
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._token = token
        self._names = list(names)

    def names(self) -> list[str]:
        """File names of all segments of the log."""
        return self._names

    def open(self, name: str) -> pa.NativeFile:
        """Brings a segment here and maps it. Its copy has no name, so that nothing is left whoever dies.

        Raises:
            FileNotFoundError: the peer does not have it on its disk any more.
            PermissionError: the peer takes this for another job.
            ConnectionError, TimeoutError: the peer is not there, or was lost in between.
        """
        line = http.client.HTTPConnection(self._host, self._port, timeout=_SILENCE_S)
        try:
            line.request("GET", f"/{name}", headers={"Authorization": f"Bearer {self._token}"})
            answer = line.getresponse()
            if answer.status == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(name)
            if answer.status != HTTPStatus.OK or answer.length is None:
                raise PermissionError(f"{self.address} answers {answer.status} {answer.reason}")
            size = answer.length
            with tempfile.NamedTemporaryFile(prefix="swift-ft-") as copy:
                shutil.copyfileobj(answer, copy, _COPY_BYTES)
                if copy.tell() != size:
                    raise ConnectionError(f"{self.address} broke off after {copy.tell()} of {size} bytes")
                copy.flush()
                return pa.memory_map(copy.name, "r")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.address}: {type(error).__name__}: {error}") from error
        finally:
            line.close()


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
