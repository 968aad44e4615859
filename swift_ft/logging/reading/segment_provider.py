"""Provides segments to a reader: from the worker that wrote them while it lives, else from the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from swift_ft.errors import RecoveryError
from swift_ft.logging.format.record import Record
from swift_ft.logging.format.segment import SegmentIdentity, parse_segment
from swift_ft.network import JobSecret
from swift_ft.network.peer_client import PeerFile
from swift_ft.network.peer_server import LOGS
from swift_ft.storage.local_source import LocalSource
from swift_ft.storage.retry import retry
from swift_ft.storage.store import Store

_LONGEST_WAIT_S = 0.5  # a replay whose peer was lost is cancelled soon

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A segment whose payloads have not been read.

    Attributes:
        identity: who wrote it.
        records: all of it.
        source: the file that the records' payloads are views of.
    """

    identity: SegmentIdentity
    records: Sequence[Record]
    source: pa.NativeFile


class SegmentSource(Protocol):
    """The log on the disk of its writer, which may hold more than the store."""

    def names(self) -> list[str]:
        """File names of all segments, wherever they are."""

    def open(self, name: str) -> pa.NativeFile:
        """A segment. Raises OSError if it cannot be read, FileNotFoundError if it is only in the store."""


class PeerLog:
    """The log of a living worker, as it offers it.

    Args:
        address: ``host:port`` of its server.
        secret: the job's.
        names: file names of all segments of the log, on the worker's disk or in the store.
    """

    def __init__(self, address: str, secret: JobSecret, names: Iterable[str]) -> None:
        self.address = address
        self._secret = secret
        self._names = list(names)

    def names(self) -> list[str]:
        """File names of all segments of the log."""
        return self._names

    def open(self, name: str) -> pa.NativeFile:
        """Downloads a segment and maps it. The copy has no name, so that a crash leaves nothing behind.

        Raises:
            OSError: see :meth:`swift_ft.network.peer_client.PeerFile.pieces`.
        """
        with PeerFile(self.address, self._secret, f"{LOGS}/{name}").download() as copy:
            return LocalSource(f"/proc/self/fd/{copy.fileno()}")


@dataclass(frozen=True, slots=True)
class PeerSources:
    """The writers that a reader can ask before the store.

    Attributes:
        offers: by log directory.
        patience_s: how long a reader waits for a segment that its writer cannot deliver and that is not yet
            in the store.
        is_cancelled: true when the messages are no longer needed.
    """

    offers: Mapping[str, SegmentSource]
    patience_s: float
    is_cancelled: Callable[[], bool]


class FetchStats:
    """Bytes of fetched segments, by origin. Thread-safe.

    Attributes:
        from_peers: workers that wrote them.
        from_store: the store.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.from_peers = self.from_store = 0
        self._taken = (0, 0)

    def add(self, *, from_peers: int = 0, from_store: int = 0) -> None:
        """Adds fetched bytes."""
        with self._lock:
            self.from_peers += from_peers
            self.from_store += from_store

    def take(self) -> tuple[int, int]:
        """Bytes from peers and from the store since the last call."""
        with self._lock:
            now, before = (self.from_peers, self.from_store), self._taken
            self._taken = now
        return now[0] - before[0], now[1] - before[1]


class SegmentProvider:
    """Lists and opens segments, from their writers or from the store. Thread-safe.

    After a writer has failed once or sent damaged data, the store is asked before it.

    Args:
        store: the store that receives all segments in the end.
        run_id: the run that all must belong to.
        peers: the writers to ask; without them the store has everything.
        fetch_stats: counts bytes by origin.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        peers: PeerSources | None = None,
        fetch_stats: FetchStats | None = None,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._peers = peers or PeerSources({}, 0.0, lambda: True)
        self._fetch_stats = fetch_stats or FetchStats()
        self._doubtful: set[str] = set()  # directories
        self._by_peers: set[str] = set()  # paths
        self._second: dict[str, Opened] = {}  # by path: the store's copies of damaged segments

    def list(self, directory: str) -> list[str]:
        """Names in a log directory. Raises what the store raises."""
        offer = self._peers.offers.get(directory)
        return offer.names() if offer else self._store.list(directory)

    def open(self, path: str) -> Opened:
        """Gets and parses a segment.

        Raises:
            RecoveryError: it is damaged.
            FileNotFoundError: it is absent, and did not arrive in time.
            Exception: an error of the store.
        """
        if path in self._second:
            return self._second[path]
        offer = self._peers.offers.get(path.rpartition("/")[0])
        if offer is None:
            return self._from_store(path)
        return self._retry(lambda: self._attempt(offer, path))

    def open_again(self, path: str, damage: RecoveryError) -> Opened:
        """The store's copy of a segment whose first copy is damaged; raises ``damage`` if there is none."""
        if path not in self._second:
            if path not in self._by_peers:
                raise damage
            self._doubt(path, damage)
            try:
                self._second[path] = self._retry(lambda: self._from_store(path))
            except Exception as error:
                raise damage from error
        return self._second[path]

    def _attempt(self, offer: SegmentSource, path: str) -> Opened:
        doubtful = path.rpartition("/")[0] in self._doubtful
        if not doubtful and (opened := self._from_peer(offer, path)):
            return opened
        try:
            return self._from_store(path)
        except Exception:  # most likely it is not there yet
            if doubtful and (opened := self._from_peer(offer, path)):
                return opened
            raise

    def _from_peer(self, offer: SegmentSource, path: str) -> Opened | None:
        try:
            source = offer.open(path.rpartition("/")[2])
            opened = self._parsed(source, path)
        except FileNotFoundError:
            return None
        except (OSError, RecoveryError) as error:
            self._doubt(path, error)
            return None
        self._by_peers.add(path)
        self._fetch_stats.add(from_peers=source.size())
        return opened

    def _from_store(self, path: str) -> Opened:
        source = self._store.open_read(path)
        self._by_peers.discard(path)
        self._fetch_stats.add(from_store=source.size())
        return self._parsed(source, path)

    def _parsed(self, source: pa.NativeFile, path: str) -> Opened:
        identity, records = parse_segment(source, path, self._run_id)
        if isinstance(source, LocalSource):
            source.forget_pages()
        return Opened(identity, records, source)

    def _doubt(self, path: str, error: Exception) -> None:
        directory = path.rpartition("/")[0]
        if directory not in self._doubtful:
            self._doubtful.add(directory)
            _logger.warning(
                "%s could not be read from the worker that wrote it (%s): %s is read from %s from now on, "
                "as far as it has been uploaded",
                path,
                error,
                directory,
                self._store.url,
                extra={"event": "peer_log_unusable", "path": path},
            )

    def _retry(self, action: Callable[[], Opened]) -> Opened:
        def may_arrive(error: BaseException) -> bool:
            return isinstance(error, FileNotFoundError) and not self._peers.is_cancelled()

        what = f"a segment of the log that a replay needs, from its writer or {self._store.url}"
        return retry(action, self._peers.patience_s, may_arrive, longest_wait_s=_LONGEST_WAIT_S, what=what)
