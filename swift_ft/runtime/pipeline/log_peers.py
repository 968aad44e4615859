"""Survivors serve their logs to workers that replay; the rendezvous store says where.

A worker offers its log before it reports, so that a worker that replays finds all offers: under the number
of the generation that began to ask for reports. A worker may be lost and replaced before a plan is made: what
it has offered is not used. The servers are closed when training continues, since no worker replays any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.logging import PeerLog, SegmentUploader
from swift_ft.runtime.file_offers import FileOffers
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)


class PeerDirectory:
    """Publishes the offer of this worker's log, and reads the offers of others.

    Args:
        rendezvous: where offers are published.
        context: the worker's place.
        is_member: whether a machine fills a slot now.
    """

    def __init__(
        self, rendezvous: RendezvousStore, context: WorkerContext, is_member: Callable[[str], bool]
    ) -> None:
        self._offers = FileOffers(rendezvous, context, is_member)
        self._context = context

    def offer(self, asked_in: int, log: SegmentUploader) -> bool:
        """Serve a log to those that report as well. False, with a warning, if that cannot be done."""
        try:
            self._offers.serve(log.find)
        except OSError as error:
            _logger.warning(
                "Worker %d cannot serve its log at %s (%s): a replacement reads it from the store.",
                self._context.rank,
                self._context.address,
                error,
                extra={"event": "log_not_served", "rank": self._context.rank},
            )
            return False
        self._offers.put(store_keys.log_offer(asked_in, self._context.rank), names=log.names())
        return True

    def withdraw(self) -> None:
        """Training continues: no worker reads this log any more."""
        self._offers.withdraw()

    def of(self, asked_in: int, rank: int) -> PeerLog | None:
        """The log that a worker offers. None if it offers none, or is not there any more."""
        if (offer := self._offers.find(store_keys.log_offer(asked_in, rank))) is None:
            return None
        return PeerLog(offer["address"], self._context.secret, offer["names"])
