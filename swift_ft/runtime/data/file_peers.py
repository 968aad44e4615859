"""Workers give each other the files of samples that they have; the rendezvous store says who has which.

All replicas come to a file at about the same time. So the first one reads it, and the others wait for that
one, instead of reading it as well. If it is lost, they wait in vain for a while, once for each file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from torch.distributed import DistError

from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.data.file_cache import Peers
from swift_ft.data.file_index import DataFile
from swift_ft.data.files import FileSamples
from swift_ft.data.global_batches import GlobalBatches
from swift_ft.errors import first_line
from swift_ft.network.peer_server import SAMPLES, files
from swift_ft.observe.waits import waiting
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_PATIENCE_S = 20.0


class FilePeers(Peers):
    """The other workers of a job. May be used by any thread.

    Args:
        peers: serves and finds files.
        rendezvous: where workers agree on who reads one.
        context: the worker's place.
    """

    any = True

    def __init__(self, peers: PeerFiles, rendezvous: RendezvousStore, context: WorkerContext) -> None:
        self._peers = peers
        self._rendezvous = rendezvous
        self._context = context
        self._lock = threading.Lock()  # guards what follows
        self._refused = False
        self._places: dict[str, Path] = {}

    def open(self, file: DataFile) -> IO[bytes]:
        """Fetch a file from the worker that had it last.

        Raises:
            FileNotFoundError: no other machine has it, so this worker reads it from where it is stored.
            OSError: who has it cannot be reached.
        """
        digest = file.content.digest
        try:
            self._await_reader(digest, file.path)
            offer = self._peers.find(store_keys.samples_at(digest))
        except (DistError, RuntimeError) as error:
            raise ConnectionError(f"the rendezvous store does not answer: {first_line(error)}") from error
        if offer is None:  # its machine was lost
            raise FileNotFoundError(file.path)
        return self._peers.file(offer, SAMPLES, digest).download()

    def _await_reader(self, digest: str, path: str) -> None:
        """Wait until a worker has the file. Raises FileNotFoundError if that is to be this one."""
        store, at = self._rendezvous, store_keys.samples_at(digest)
        if not store.check([at]):
            reader = f"worker {self._context.rank}, started in {self._context.started_in}"
            first = store.compare_set(store_keys.samples_reader(digest), "", reader).decode()
            if first == reader:
                raise FileNotFoundError(path)
            limit_s = min(_PATIENCE_S, self._context.config.within_replay_s)  # it may be in a replay
            with waiting(f"{first} to read {path}", limit_s):
                store.wait([at], timedelta(seconds=limit_s))

    def offer(self, file: DataFile, place: Path) -> None:
        """Serve a file from now on. Logs a warning if this worker cannot serve any."""
        digest = file.content.digest
        with self._lock:
            if digest in self._places or not self._serves():
                return
            self._places[digest] = place
        try:
            self._peers.offer(SAMPLES, store_keys.samples_at(digest))
        except (DistError, RuntimeError) as error:
            _logger.info(
                "%s is not offered to other workers: the rendezvous store does not answer (%s)",
                file.path,
                first_line(error),
                extra={"event": "samples_not_offered"},
            )

    def close(self) -> None:
        """Serve no more."""
        with self._lock:
            self._refused = True
        self._peers.stop(SAMPLES)

    def _serves(self) -> bool:
        """Whether files can be served here."""
        if not self._refused:
            try:
                self._peers.serve(SAMPLES, files(self._find))
            except OSError as error:
                self._refused = True
                _logger.warning(
                    "Worker %d cannot serve its files of samples at %s (%s): others read the store.",
                    self._context.rank,
                    self._context.address,
                    error,
                    extra={"event": "samples_not_served", "rank": self._context.rank},
                )
        return not self._refused

    def _find(self, name: str) -> Path:
        if (place := self._places.get(name)) is None:
            raise FileNotFoundError(name)
        return place


def share_files(
    parts: Iterable[Any], others: PeerFiles, rendezvous: RendezvousStore, context: WorkerContext
) -> FilePeers | None:
    """Let the files of the session's batches come from other workers, too.

    Returns:
        To be closed at the end; None if there are no such batches.
    """
    datasets = [part.dataset for part in parts if isinstance(part, GlobalBatches)]
    of_files = [dataset for dataset in datasets if isinstance(dataset, FileSamples)]
    if not of_files or context.world_size == 1:
        return None
    peers = FilePeers(others, rendezvous, context)
    for dataset in of_files:
        dataset.copies.peers = peers
    return peers
