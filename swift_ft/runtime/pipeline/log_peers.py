"""Survivors serve their logs to workers that replay; the rendezvous store says where.

    log/GENERATION/RANK             where a worker that has reported serves its log, and which segments it has

A worker offers its log before it reports, so that a worker that replays finds all offers. The servers are
closed when training continues, since no worker replays any more.
"""

from __future__ import annotations

import json
import logging

from swift_ft.config import WorkerContext
from swift_ft.file_server import FileServer
from swift_ft.logging import PeerLog, SegmentUploader
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["PeerDirectory"]

_logger = logging.getLogger(__name__)


class PeerDirectory:
    """Publishes the offer of this worker's log, and reads the offers of others.

    Args:
        rendezvous: where offers are published.
        context: the worker's place.
    """

    def __init__(self, rendezvous: RendezvousStore, context: WorkerContext) -> None:
        self._rendezvous = rendezvous
        self._context = context
        self._server: FileServer | None = None
        self._offered: list[str] = []

    def offer(self, generation: int, log: SegmentUploader) -> bool:
        """Serve a log to the workers of a generation. False, with a warning, if that cannot be done."""
        if self._server is None:
            try:
                self._server = FileServer(self._context.address, self._context.secret, log.find)
            except OSError as error:
                _logger.warning(
                    "Worker %d cannot serve its log at %s (%s): a replacement reads it from the store.",
                    self._context.rank,
                    self._context.address,
                    error,
                    extra={"event": "log_not_served", "rank": self._context.rank},
                )
                return False
        offer = {"address": self._server.address, "names": log.names()}
        self._rendezvous.set(key := _key(generation, self._context.rank), json.dumps(offer))
        self._offered.append(key)
        return True

    def withdraw(self) -> None:
        """Training continues: no worker reads this log any more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for key in self._offered:  # not before: a worker may be between its two questions for a key
            self._rendezvous.delete_key(key)
        self._offered = []

    def of(self, generation: int, rank: int) -> PeerLog | None:
        """The log that a worker offers in a generation. None if it offers none."""
        key = _key(generation, rank)
        if not self._rendezvous.check([key]):
            return None
        offer = json.loads(self._rendezvous.get(key))
        return PeerLog(offer["address"], self._context.secret, offer["names"])


def _key(generation: int, rank: int) -> str:
    return f"log/{generation}/{rank}"
