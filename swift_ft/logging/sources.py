"""Where a reader gets segments from: the worker that wrote them, while it lives, else the store."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from swift_ft.errors import RecoveryError
from swift_ft.logging.record import Record
from swift_ft.logging.retry import patiently
from swift_ft.logging.segment import SegmentIdentity, parse_segment
from swift_ft.logging.store import Store

__all__ = ["Fetched", "Offer", "Opened", "Peers", "Sources"]

_LONGEST_WAIT_S = 0.5  # a replay whose peer was lost is called off soon

Opened = tuple[SegmentIdentity, list[Record]]


class Offer(Protocol):
    """A log as its one writer has it, which may be more than what is in the store."""

    def names(self) -> list[str]:
        """File names of all segments, wherever they are."""

    def open(self, name: str) -> pa.NativeFile:
        """A segment. Raises OSError if it cannot be had, FileNotFoundError if it is in the store only."""


@dataclass(frozen=True, slots=True)
class Peers:
    """What a reader knows of those who wrote what it reads.

    Attributes:
        offers: by log directory.
        patience_s: how long a segment is waited for that its writer has, but that neither comes from there
            nor is in the store yet.
        called_off: nobody needs the messages any more.
    """

    offers: Mapping[str, Offer]
    patience_s: float
    called_off: Callable[[], bool]


class Fetched:
    """Bytes of segments, by where they came from. For use by several threads.

    Attributes:
        from_peers: workers that wrote them.
        from_store: the store.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.from_peers = self.from_store = 0
        self._taken = (0, 0)

    def add(self, *, from_peers: int = 0, from_store: int = 0) -> None:
        """So much more came."""
        with self._lock:
            self.from_peers += from_peers
            self.from_store += from_store

    def take(self) -> tuple[int, int]:
        """Bytes from peers and from the store since the last call."""
        with self._lock:
            now, before = (self.from_peers, self.from_store), self._taken
            self._taken = now
        return now[0] - before[0], now[1] - before[1]


class Sources:
    """Lists and opens segments. For use by several threads.

    A writer that was once not there, or gave something else, is asked after the store from then on.

    Args:
        store: where all segments get to in the end.
        run_id: the run that all must belong to.
        peers: who offers what; without them the store has everything.
        fetched: is told what came from where.
    """

    def __init__(
        self, store: Store, run_id: str, peers: Peers | None = None, fetched: Fetched | None = None
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._peers = peers or Peers({}, 0.0, lambda: True)
        self._fetched = fetched or Fetched()
        self._doubtful: set[str] = set()  # directories
        self._by_peers: set[str] = set()  # paths
        self._second: dict[str, Opened] = {}  # by path: the store's, of those that came damaged

    def list(self, directory: str) -> list[str]:
        """Names in a log directory. Raises what the store raises."""
        offer = self._peers.offers.get(directory)
        return offer.names() if offer else self._store.list(directory)

    def open(self, path: str) -> Opened:
        """Gets and parses a segment.

        Raises:
            RecoveryError: it is damaged.
            FileNotFoundError: it is absent, and did not come in time.
            Exception: what the store raises.
        """
        if path in self._second:
            return self._second[path]
        offer = self._peers.offers.get(path.rpartition("/")[0])
        if offer is None:
            return self._from_store(path)
        return self._patiently(lambda: self._attempt(offer, path))

    def open_again(self, path: str, damage: RecoveryError) -> Opened:
        """The store's copy of a segment that turned out damaged; raises ``damage`` if there is no other."""
        if path not in self._second:
            if path not in self._by_peers:
                raise damage
            self._doubt(path, damage)
            try:
                self._second[path] = self._patiently(lambda: self._from_store(path))
            except Exception as error:
                raise damage from error
        return self._second[path]

    def _attempt(self, offer: Offer, path: str) -> Opened:
        doubtful = path.rpartition("/")[0] in self._doubtful
        if not doubtful and (opened := self._from_peer(offer, path)):
            return opened
        try:
            return self._from_store(path)
        except Exception:  # most likely it is not there yet
            if doubtful and (opened := self._from_peer(offer, path)):
                return opened
            raise

    def _from_peer(self, offer: Offer, path: str) -> Opened | None:
        try:
            source = offer.open(path.rpartition("/")[2])
            opened = parse_segment(source, path, self._run_id)
        except FileNotFoundError:
            return None
        except (OSError, RecoveryError) as error:
            self._doubt(path, error)
            return None
        self._by_peers.add(path)
        self._fetched.add(from_peers=source.size())
        return opened

    def _from_store(self, path: str) -> Opened:
        source = self._store.open_read(path)
        self._by_peers.discard(path)
        self._fetched.add(from_store=source.size())
        return parse_segment(source, path, self._run_id)

    def _doubt(self, path: str, error: Exception) -> None:
        directory = path.rpartition("/")[0]
        if directory not in self._doubtful:
            self._doubtful.add(directory)
            warnings.warn(
                f"{path} did not come from the worker that wrote it ({error}): {directory} is read from "
                f"{self._store.url} as far as it is there.",
                stacklevel=2,
            )

    def _patiently(self, action: Callable[[], Opened]) -> Opened:
        def may_come(error: BaseException) -> bool:
            return isinstance(error, FileNotFoundError) and not self._peers.called_off()

        return patiently(action, self._peers.patience_s, may_come, longest_wait_s=_LONGEST_WAIT_S)
