"""Files that a worker serves to others while they recover: the rendezvous store says where, key by key.

The keys outlive the server, and the worker that has offered. So each of them names its machine, and what a
machine has offered that is not a member any more is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift_ft.config.worker_context import WorkerContext
from swift_ft.network.file_server import FileServer
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore


class FileOffers:
    """The offers of this worker, and those of others.

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

    def serve(self, find: Callable[[str], Path]) -> None:
        """Serve files, unless that is being done.

        Args:
            find: see :class:`FileServer`.

        Raises:
            OSError: it cannot listen at this worker's address.
        """
        if self._server is None:
            self._server = FileServer(self._context.address, self._context.secret, find)

    def put(self, key: str, **facts: Any) -> None:
        """Publish under a key where the files are served, and what else is to be known of them."""
        assert self._server is not None
        offer = {"address": self._server.address, "machine": self._context.machine, **facts}
        self._rendezvous.set(key, json.dumps(offer))
        self._offered.append(key)

    def find(self, key: str) -> dict[str, Any] | None:
        """What a worker has published under a key. None if none has, or its machine is not there any more."""
        if not self._rendezvous.check([key]):
            return None
        offer: dict[str, Any] = json.loads(self._rendezvous.get(key))
        return offer if self._is_member(offer["machine"]) else None

    def withdraw(self) -> None:
        """Serve no longer, and delete the keys."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for key in self._offered:  # not before: a worker may be between its two questions for a key
            self._rendezvous.delete_key(key)
        self._offered = []
