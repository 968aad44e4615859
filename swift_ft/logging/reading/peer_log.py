"""The client of a segment server: reads the log of a living worker from that worker's disk."""

from __future__ import annotations

import http.client
import shutil
import tempfile
from collections.abc import Iterable
from http import HTTPStatus

import pyarrow as pa

from swift_ft.token_server import READ_TIMEOUT_S

__all__ = ["PeerLog"]

_COPY_BYTES = 1 << 20


class PeerLog:
    """The log of a living worker, as its segment server offers it.

    Args:
        address: ``host:port`` of the server.
        token: the job's.
        names: file names of all segments of the log, on the worker's disk or in the store.
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
        """Downloads a segment and maps it. The copy has no name, so that a crash leaves nothing behind.

        Raises:
            FileNotFoundError: the worker no longer has it on its disk.
            PermissionError: the worker belongs to another job.
            ConnectionError, TimeoutError: the worker cannot be reached, or was lost during the transfer.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=READ_TIMEOUT_S)
        try:
            connection.request("GET", f"/{name}", headers={"Authorization": f"Bearer {self._token}"})
            with connection.getresponse() as response:
                if response.status == HTTPStatus.NOT_FOUND:
                    raise FileNotFoundError(name)
                if response.status != HTTPStatus.OK or response.length is None:
                    raise PermissionError(f"{self.address} answers {response.status} {response.reason}")
                size = response.length
                with tempfile.NamedTemporaryFile(prefix="swift-ft-") as copy:
                    shutil.copyfileobj(response, copy, _COPY_BYTES)
                    if copy.tell() != size:
                        raise ConnectionError(f"{self.address} broke off after {copy.tell()} of {size} bytes")
                    copy.flush()
                    return pa.memory_map(copy.name, "r")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.address}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
