"""Workers serve the files of checkpoints that are on their machine's disk; the rendezvous store says where.

    parts/GENERATION/checkpoints/00000020/rank-00001.g00002  where the files of this part are served

A worker offers them before it reports, so that a worker that loads finds all offers. It asks for one key for
each part that it reads, however many machines there are. The servers close when training continues.
"""

from __future__ import annotations

import logging
from typing import IO

from swift_ft.checkpoint.part_files import LocalParts
from swift_ft.config import WorkerContext
from swift_ft.file_server import FileServer, fetch_file
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["PartPeers"]

_logger = logging.getLogger(__name__)


class PartPeers:
    """Offers this machine's copies, and opens those of others.

    Args:
        rendezvous: where offers are published.
        context: the worker's place.
        local: this machine's copies.
    """

    def __init__(self, rendezvous: RendezvousStore, context: WorkerContext, local: LocalParts) -> None:
        self._rendezvous = rendezvous
        self._context = context
        self._local = local
        self._server: FileServer | None = None
        self._generation = 0
        self._offered: list[str] = []

    def offer(self, generation: int) -> None:
        """Serve the copies to the workers of a generation. Logs a warning if that cannot be done."""
        self._generation = generation
        if not (parts := self._local.parts()):
            return
        if self._server is None:
            try:
                self._server = FileServer(self._context.address, self._context.secret, self._local.find)
            except OSError as error:
                _logger.warning(
                    "Worker %d cannot serve its copies of checkpoints at %s (%s): others read the store.",
                    self._context.rank,
                    self._context.address,
                    error,
                    extra={"event": "parts_not_served", "rank": self._context.rank},
                )
                return
        for part in parts:
            self._rendezvous.set(key := _key(generation, part), self._server.address)
            self._offered.append(key)

    def withdraw(self) -> None:
        """Training continues: no worker loads a checkpoint any more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for key in self._offered:  # not before: a worker may be between its two questions for a key
            self._rendezvous.delete_key(key)
        self._offered = []

    def open(self, path: str) -> IO[bytes]:
        """Fetch a file from the machine that offers its part.

        Raises:
            FileNotFoundError: no machine does, or it does not have this file.
            OSError: the machine cannot be reached.
        """
        key = _key(self._generation, path.rpartition("/")[0])
        if not self._rendezvous.check([key]):
            raise FileNotFoundError(path)
        return fetch_file(self._rendezvous.get(key).decode(), self._context.secret, path)


def _key(generation: int, part: str) -> str:
    return f"parts/{generation}/{part}"
