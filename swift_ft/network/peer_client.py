"""A client of other workers' servers (`network/peer_server.py`): fetches files and copies, sends copies.

A connection that breaks is made again, and what is missing is asked for, of the same version. So a large file
is not fetched twice, nor is its place given up because of one lost connection. A peer that is silent, or
gone, is given up at once: there is another place, most often the store.
"""

from __future__ import annotations

import contextlib
import http.client
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http import HTTPStatus
from typing import IO, cast
from urllib.parse import urlencode

from swift_ft.network import JobSecret
from swift_ft.network.http_access import JobConnection
from swift_ft.network.peer_server import READ_TIMEOUT_S

_PIECE_BYTES = 1 << 20
_RESUMES = 3  # of one transfer: more connections than that do not break by chance


class PeerFile:
    """A file or a copy that a peer serves. All bytes that are read through this are of one version.

    Args:
        address: ``host:port`` of the peer's server.
        secret: the job's.
        path: the kind and the name there.

    Attributes:
        size: bytes; known once the first ones have come.
        version: the peer's name for exactly these bytes; known then, too.
    """

    def __init__(self, address: str, secret: JobSecret, path: str) -> None:
        self.size = 0
        self.version = ""
        self._address = address
        self._secret = secret
        self._path = path

    def download(self) -> IO[bytes]:
        """Fetch the whole file.

        Returns:
            The copy, at its beginning. It has no name: whatever ends this process leaves nothing behind.

        Raises:
            OSError: see :meth:`pieces`.
        """
        with ExitStack() as until_complete:
            copy = until_complete.enter_context(tempfile.TemporaryFile())
            for piece in self.pieces():
                copy.write(piece)
            copy.seek(0)
            until_complete.pop_all()
            return cast(IO[bytes], copy)

    def pieces(self, first: int = 0, count: int | None = None) -> Iterator[memoryview]:
        """Fetch a range, piece by piece. Each is valid until the next one is asked for.

        Args:
            first: the first byte.
            count: so many bytes, or fewer if the file ends before; None for all that follow.

        Raises:
            FileNotFoundError: the peer does not have it.
            PermissionError: the peer belongs to another job.
            EOFError: the file has no byte ``first``.
            ConnectionError: the peer cannot be reached, broke off, has another version by now, has damaged
                bytes, or knows no ranges.
            TimeoutError: it is silent.
        """
        at, broken = first, []
        while True:
            began = at
            try:
                for piece in self._answered(at, None if count is None else first + count - at):
                    at += len(piece)
                    yield piece
            except _BrokenOffError as error:
                broken.append(error)
                if at == began or len(broken) > _RESUMES:
                    raise broken[0] from None
            except OSError as error:
                if not broken:
                    raise
                raise broken[0] from error  # why the rest could not be had is the second thing to know
            else:
                return

    def _answered(self, first: int, count: int | None) -> Iterator[memoryview]:
        """The pieces of one request."""
        headers = {}
        if first or count is not None:
            headers["Range"] = f"bytes={first}-{'' if count is None else first + count - 1}"
            headers |= {"If-Match": f'"{self.version}"'} if self.version else {}
        with (
            _connection(self._address, self._secret) as connection,
            connection.get(f"/{self._path}", headers) as response,
        ):
            yield from self._read(response, self._checked(response, ranged="Range" in headers))

    def _checked(self, response: http.client.HTTPResponse, *, ranged: bool) -> int:
        """The number of bytes that come."""
        what = f"{self._path} of {self._address}"
        match response.status:
            case HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(what)
            case HTTPStatus.GONE:
                raise ConnectionError(f"{self._address} finds that it is not what was sent")
            case HTTPStatus.PRECONDITION_FAILED:
                raise ConnectionError(f"{what} has changed")
            case HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise EOFError(f"{what} ends before")
            case HTTPStatus.OK if ranged:
                raise ConnectionError(f"{self._address} knows no ranges")
            case HTTPStatus.OK | HTTPStatus.PARTIAL_CONTENT if response.length is not None:
                pass
            case _:
                raise PermissionError(f"{self._address} answers {response.status} {response.reason}")
        self.version = response.headers.get("ETag", "").strip('"')
        self.size = int(response.headers.get("Content-Range", f"/{response.length}").rpartition("/")[2])
        return response.length

    def _read(self, response: http.client.HTTPResponse, length: int) -> Iterator[memoryview]:
        buffer, at = memoryview(bytearray(min(length, _PIECE_BYTES))), 0
        while at < length:
            try:
                read = response.readinto(buffer[: length - at])
            except ConnectionError as error:
                raise self._broken_off(at, length) from error
            if not read:
                raise self._broken_off(at, length)
            at += read
            yield buffer[:read]

    def _broken_off(self, at: int, length: int) -> _BrokenOffError:
        return _BrokenOffError(f"{self._address} broke off after {at} of {length} bytes")


class _BrokenOffError(ConnectionError):
    """The connection ended in the middle of a file."""


def put(
    address: str,
    secret: JobSecret,
    path: str,
    facts: dict[str, int],
    content: memoryview,
    go_on: Callable[[], bool],
) -> bool:
    """Send bytes to a peer. False if it does not take them, or they are not needed any more.

    Args:
        address: ``host:port`` of its server.
        secret: the job's.
        path: the kind and the name there.
        facts: what it has to know of them.
        content: the bytes.
        go_on: asked before each piece.

    Raises:
        OSError: it cannot be reached.
    """
    path = f"/{path}?{urlencode(facts)}"
    with _connection(address, secret) as connection:
        authorization = connection.authorization("PUT", path, len(content))
        connection.putrequest("PUT", path)
        connection.putheader("Authorization", authorization)
        connection.putheader("Content-Length", str(len(content)))
        connection.endheaders()
        try:
            for at in range(0, len(content), _PIECE_BYTES):
                if not go_on():
                    return False
                connection.send(content[at : at + _PIECE_BYTES])
        except (BrokenPipeError, ConnectionResetError):  # refused, perhaps: the answer says so
            return False
        with connection.getresponse() as response:
            return response.status == HTTPStatus.OK


@contextlib.contextmanager
def _connection(address: str, secret: JobSecret) -> Iterator[JobConnection]:
    connection = JobConnection(address, secret, timeout_s=READ_TIMEOUT_S)
    try:
        yield connection
    except http.client.HTTPException as error:
        raise ConnectionError(f"{address}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
