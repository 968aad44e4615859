"""Workers serve the files of checkpoints that are on their machine's disk; the rendezvous store says where.

A worker offers them before it reports, so that a worker that loads finds all offers: under the number of the
generation that began to ask for reports. It asks for one key for each part that it reads, however many
machines there are. A machine that was lost after it had reported is not asked. The servers close when
training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import IO

from swift_ft.checkpoint.part_files import LocalParts
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.network.file_server import fetch_file
from swift_ft.runtime.file_offers import FileOffers
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)


class PartPeers:
    """Offers this machine's copies, and opens those of others.

    Args:
        rendezvous: where offers are published.
        context: the worker's place.
        local: this machine's copies.
        is_member: whether a machine fills a slot now.
    """

    def __init__(
        self,
        rendezvous: RendezvousStore,
        context: WorkerContext,
        local: LocalParts,
        is_member: Callable[[str], bool],
    ) -> None:
        self._offers = FileOffers(rendezvous, context, is_member)
        self._context = context
        self._local = local
        self._asked_in = 0

    def offer(self, asked_in: int) -> None:
        """Serve the copies to those that report as well. Logs a warning if that cannot be done."""
        self._asked_in = asked_in
        if not (parts := self._local.parts()):
            return
        try:
            self._offers.serve(self._local.find)
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
            self._offers.put(store_keys.part_offer(asked_in, part))

    def withdraw(self) -> None:
        """Training continues: no worker loads a checkpoint any more."""
        self._offers.withdraw()

    def open(self, path: str) -> IO[bytes]:
        """Fetch a file from the machine that offers its part.

        Raises:
            FileNotFoundError: no machine does that is still there, or it does not have this file.
            OSError: the machine cannot be reached.
        """
        key = store_keys.part_offer(self._asked_in, path.rpartition("/")[0])
        if (offer := self._offers.find(key)) is None:
            raise FileNotFoundError(path)
        return fetch_file(offer["address"], self._context.secret, path)
