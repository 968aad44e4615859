"""Files on a worker's own disk, served to other workers of the job, and fetched from there.

    GET /g00002-s000003-i00000020-00000047.arrow        one of the files that the worker serves, unchanged

Each request proves that it comes from a member of the job (`network/http_access.py`), or is refused.

A server does not list its files. The worker publishes what it has in the rendezvous store, which outlives the
server.
"""

from __future__ import annotations

import http.client
import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import IO, cast

from swift_ft.network import JobSecret
from swift_ft.network.http_access import JobConnection
from swift_ft.network.token_server import READ_TIMEOUT_S, TokenHandler, TokenServer

_logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20


class FileServer(TokenServer):
    """Serves files.

    Args:
        host: by which other machines know this one (see :func:`swift_ft.network.addresses.listen_address`).
        secret: the job's.
        find: returns the file of a name; raises FileNotFoundError for one that is not served.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, secret: JobSecret, find: Callable[[str], Path]) -> None:
        self.find = find
        super().__init__(host, secret, _Handler, name="swift-file-server")

    def log_failure(self, client_address: object, error: BaseException) -> None:
        """Log that a request could not be answered."""
        _logger.error(
            "The request of %s for a file failed: %s",
            client_address,
            error,
            exc_info=error,
            extra={"event": "file_request_failed"},
        )


class _Handler(TokenHandler):
    server: FileServer

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


def fetch_file(address: str, secret: JobSecret, name: str) -> IO[bytes]:
    """Download a file.

    Args:
        address: ``host:port`` of the server.
        secret: the job's.

    Returns:
        The copy, at its beginning. Its ``name`` is its path, where it is deleted when it is closed.

    Raises:
        FileNotFoundError: the worker does not have it on its disk.
        PermissionError: the worker belongs to another job.
        ConnectionError, TimeoutError: the worker cannot be reached, or was lost during the transfer.
    """
    with ExitStack() as until_complete:
        copy = until_complete.enter_context(tempfile.NamedTemporaryFile(prefix="swift-ft-"))
        _download(address, secret, name, copy)
        copy.seek(0)
        until_complete.pop_all()
        return cast(IO[bytes], copy)


def _download(address: str, secret: JobSecret, name: str, into: IO[bytes]) -> None:
    connection = JobConnection(address, secret, timeout_s=READ_TIMEOUT_S)
    try:
        with connection.get(f"/{name}") as response:
            if response.status == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(name)
            if response.status != HTTPStatus.OK or response.length is None:
                raise PermissionError(f"{address} answers {response.status} {response.reason}")
            size = response.length
            shutil.copyfileobj(response, into, _COPY_BYTES)
            if into.tell() != size:
                raise ConnectionError(f"{address} broke off after {into.tell()} of {size} bytes")
    except http.client.HTTPException as error:
        raise ConnectionError(f"{address}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
