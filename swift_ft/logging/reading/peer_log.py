"""The log of a living worker, read from that worker's disk."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from swift_ft.network import JobSecret
from swift_ft.network.peer_client import PeerFile
from swift_ft.network.peer_server import LOGS
from swift_ft.storage.local_source import LocalSource


class PeerLog:
    """The log of a living worker, as it offers it.

    Args:
        address: ``host:port`` of its server.
        secret: the job's.
        names: file names of all segments of the log, on the worker's disk or in the store.
    """

    def __init__(self, address: str, secret: JobSecret, names: Iterable[str]) -> None:
        self.address = address
        self._secret = secret
        self._names = list(names)

    def names(self) -> list[str]:
        """File names of all segments of the log."""
        return self._names

    def open(self, name: str) -> pa.NativeFile:
        """Downloads a segment and maps it. The copy has no name, so that a crash leaves nothing behind.

        Raises:
            OSError: see :meth:`swift_ft.network.peer_client.PeerFile.pieces`.
        """
        with PeerFile(self.address, self._secret, f"{LOGS}/{name}").download() as copy:
            return LocalSource(copy.name)
