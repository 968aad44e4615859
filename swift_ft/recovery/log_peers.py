"""Survivors offer their logs to those who replay: who serves what is told in the rendezvous store.

    log/token                       what a request to any of the servers must bring
    log/GENERATION/RANK             where a worker that has reported serves its log, and what is in it

A worker offers its log before it reports, so that who replays finds all offers, and the servers are closed
when training goes on: nobody replays any more.
"""

from __future__ import annotations

import json
import secrets
import warnings

from torch._C._distributed_c10d import Store as Rendezvous

from swift_ft.config import WorkerContext
from swift_ft.logging import Peer, SegmentServer, Shipper

__all__ = ["LogPeers"]

_TOKEN = "log/token"
_TOKEN_BYTES = 32


class LogPeers:
    """One worker's offer, and those of others.

    Args:
        rendezvous: where they are told.
        context: the worker's place.
    """

    def __init__(self, rendezvous: Rendezvous, context: WorkerContext) -> None:
        self._rendezvous = rendezvous
        self._context = context
        self._server: SegmentServer | None = None
        self._told = ""

    def offer(self, generation: int, log: Shipper) -> bool:
        """Serve a log to the workers of a generation; False, with a warning, where that cannot be done."""
        if self._server is None:
            try:
                self._server = SegmentServer(self._context.address, self._token(), log.find)
            except OSError as error:
                warnings.warn(
                    f"Worker {self._context.rank} cannot serve its log at {self._context.address} ({error}): "
                    "a replacement reads it from the store.",
                    stacklevel=2,
                )
                return False
        self._forget()
        self._told = _key(generation, self._context.rank)
        offer = {"address": self._server.address, "names": log.names()}
        self._rendezvous.set(self._told, json.dumps(offer))
        return True

    def withdraw(self) -> None:
        """Training goes on."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._forget()

    def of(self, generation: int, rank: int) -> Peer | None:
        """The log that a worker offers in a generation; None if it does not."""
        key = _key(generation, rank)
        if not self._rendezvous.check([key]):
            return None
        offer = json.loads(self._rendezvous.get(key))
        return Peer(offer["address"], self._token(), offer["names"])

    def _token(self) -> str:
        """Whoever needs it first makes it up."""
        return self._rendezvous.compare_set(_TOKEN, "", secrets.token_hex(_TOKEN_BYTES)).decode()

    def _forget(self) -> None:
        if self._told:
            self._rendezvous.delete_key(self._told)
            self._told = ""


def _key(generation: int, rank: int) -> str:
    return f"log/{generation}/{rank}"
