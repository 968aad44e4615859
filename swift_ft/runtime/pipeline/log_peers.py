"""Survivors serve their logs to workers that replay; the rendezvous store says where.

    log/ASKED_IN/RANK               where a worker that has reported serves its log, and which segments it has

A worker offers its log before it reports, so that a worker that replays finds all offers: under the number
of the generation that began to ask for reports. A worker may be lost and replaced before a plan is made: what
it has offered is not used. The servers are closed when training continues, since no worker replays any more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from swift_ft.file_server import FileServer
from swift_ft.logging import PeerLog, SegmentUploader
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.worker_context import WorkerContext

__all__ = ["PeerDirectory"]

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
        self._rendezvous = rendezvous
        self._context = context
        self._is_member = is_member
        self._server: FileServer | None = None
        self._offered: list[str] = []

    def offer(self, asked_in: int, log: SegmentUploader) -> bool:
        """Serve a log to those that report as well. False, with a warning, if that cannot be done."""
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
        offer = {
            "address": self._server.address,
            "machine": self._context.machine,
            "names": log.names(),
        }
        self._rendezvous.set(key := _key(asked_in, self._context.rank), json.dumps(offer))
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

    def of(self, asked_in: int, rank: int) -> PeerLog | None:
        """The log that a worker offers. None if it offers none, or is not there any more."""
        key = _key(asked_in, rank)
        if not self._rendezvous.check([key]):
            return None
        offer = json.loads(self._rendezvous.get(key))
        if not self._is_member(offer["machine"]):
            return None
        return PeerLog(offer["address"], self._context.secret, offer["names"])


def _key(asked_in: int, rank: int) -> str:
    return f"log/{asked_in}/{rank}"
