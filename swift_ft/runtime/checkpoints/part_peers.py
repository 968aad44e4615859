"""Workers serve the files of checkpoints that are on their machine's disk, until training continues.

A worker that loads asks for one key for each part that it reads, however many machines there are.
"""

from __future__ import annotations

import logging
from typing import IO

from swift_ft.checkpoint.part_files import LocalParts
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.network.peer_server import PARTS, files
from swift_ft.runtime.peer_files import PeerFiles

_logger = logging.getLogger(__name__)


class PartPeers:
    """Offers this machine's copies, and opens those of others.

    Args:
        peers: the other workers.
        context: the worker's place.
        local: this machine's copies.
    """

    def __init__(self, peers: PeerFiles, context: WorkerContext, local: LocalParts) -> None:
        self._peers = peers
        self._context = context
        self._local = local
        self._asked_in = 0

    def offer(self, asked_in: int) -> None:
        """Serve the copies to those that report as well. Logs a warning if that cannot be done."""
        self._asked_in = asked_in
        if not (parts := self._local.parts()):
            return
        try:
            self._peers.serve(PARTS, files(self._local.find))
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
            self._peers.offer(PARTS, store_keys.part_offer(asked_in, part))

    def withdraw(self) -> None:
        """Training continues: no worker loads a checkpoint any more."""
        self._peers.withdraw(PARTS)

    def open(self, path: str) -> IO[bytes]:
        """Fetch a file from the machine that offers its part.

        Raises:
            FileNotFoundError: no machine does that is still there, or it does not have this file.
            OSError: the machine cannot be reached.
        """
        key = store_keys.part_offer(self._asked_in, path.rpartition("/")[0])
        if (offer := self._peers.find(key)) is None:
            raise FileNotFoundError(path)
        return self._peers.file(offer, PARTS, path).download()
