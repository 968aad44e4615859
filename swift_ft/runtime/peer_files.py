"""Workers serve each other files and copies; the rendezvous store says who has what.

A worker has one server for all kinds, which is there as long as it serves any. A log, or a part of a
checkpoint, is offered before the worker reports, so that whoever replays or loads finds all offers: under the
number of the generation that began to ask for reports. Files of samples and copies are served all the time.
Where copies are taken is agreed on once for each worker, and not file by file (`memory/agreement.py`).

An offer outlives the server, and the worker that has made it. So each names its machine, and what a machine
has offered that is not a member any more is not used: its address may not answer for a long time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swift_ft.config.worker_context import WorkerContext
from swift_ft.network.peer_client import PeerFile
from swift_ft.network.peer_server import PeerServer, Source
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer as it stands under a key.

    Attributes:
        address: at which the worker serves.
        facts: all else that it says.
    """

    address: str
    facts: dict[str, Any]


class PeerFiles:
    """The offers of this worker and of others. May be used by any thread.

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
        self._changing = threading.Lock()  # guards what follows
        self._server: PeerServer | None = None
        self._offered: dict[str, list[str]] = {}  # keys, by kind

    # ---------------------------------------------------------------------------------- what this one has

    def serve(self, kind: str, source: Source) -> str:
        """Serve a kind from now on. Returns the server's address.

        Raises:
            OSError: it cannot listen at this worker's address.
        """
        with self._changing:
            if self._server is None:
                self._server = PeerServer(self._context.address, self._context.secret)
            self._server.sources = {**self._server.sources, kind: source}
            return self._server.address

    def offer(self, kind: str, key: str, **facts: Any) -> None:
        """Publish under a key that a file is served here, and what else is to be known of it."""
        with self._changing:
            if self._server is None or kind not in self._server.sources:
                return  # it was withdrawn meanwhile
            address = self._server.address
            self._offered.setdefault(kind, []).append(key)
        offer = {"address": address, "machine": self._context.machine, **facts}
        self._rendezvous.set(key, json.dumps(offer))

    def withdraw(self, kind: str) -> None:
        """Serve a kind no longer, and delete its keys."""
        self.stop(kind)
        with self._changing:
            keys = self._offered.pop(kind, [])
        for key in keys:  # not before: a worker may be between its two questions for a key
            self._rendezvous.delete_key(key)

    def stop(self, kind: str) -> None:
        """Serve a kind no longer. Its keys stay: this worker ends, perhaps after the store."""
        with self._changing:
            if (server := self._server) is None:
                return
            server.sources = {other: source for other, source in server.sources.items() if other != kind}
            if server.sources:
                return
            self._server = None
        server.close()

    # ---------------------------------------------------------------------------------- what others have

    def find(self, key: str) -> Offer | None:
        """The offer under a key. None if there is none, or its machine is not there any more."""
        if not self._rendezvous.check([key]):
            return None
        facts: dict[str, Any] = json.loads(self._rendezvous.get(key))
        address, machine = facts.pop("address"), facts.pop("machine")
        return Offer(address, facts) if self._is_member(machine) else None

    def file(self, offer: Offer, kind: str, name: str) -> PeerFile:
        """A file that is offered."""
        return PeerFile(offer.address, self._context.secret, f"{kind}/{name}")
