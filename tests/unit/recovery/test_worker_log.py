"""Before a worker reports, others can have its log: from itself, or else from the store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from swift_ft.config import Timeouts, WorkerContext
from swift_ft.logging import Direction, LogOptions, LogTimeoutError, MessageKey, Store, copy_into
from swift_ft.recovery.claim import log_directory
from swift_ft.recovery.log_peers import LogPeers
from swift_ft.recovery.worker_log import WorkerLog

WRITER, READER = 1, 2
KEY = MessageKey(0, 0, Direction.FORWARD, 1, 2, 0)
TENSOR = torch.arange(100.0)


class SlowStore(Store):
    """Behind a network, and takes nothing before ``open_gate``."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = threading.Event()

    @property
    def remote(self) -> bool:
        return True

    def upload(self, local: Path, path: str) -> None:
        if not self.gate.is_set():
            raise ConnectionError("the store is away")
        super().upload(local, path)


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    (tmp_path / "store" / log_directory(WRITER)).mkdir(parents=True)
    return SlowStore(str(tmp_path / "store"))


@pytest.fixture(scope="module")
def rendezvous() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


def context(rank: int, address: str = "127.0.0.1", flush_s: float = 60.0) -> WorkerContext:
    shape: Any = {"rank": rank, "world": 3, "workers": 1, "launched": 1, "store_mode": "", "inject": ""}
    place: Any = {"run_id": "run", "host": "", "port": 0, "machine": "m", "agent_pid": 0}
    return WorkerContext(**place, **shape, timeouts=Timeouts(flush_s=flush_s), address=address)


class Worker:
    """A worker's log in one generation after the other."""

    def __init__(self, store: Store, rendezvous: TCPStore, folder: Path, place: WorkerContext) -> None:
        self.peers = LogPeers(rendezvous, place)
        self.log = WorkerLog(store, place, LogOptions(local=folder / f"local{place.rank}"))
        self.log.share(self.peers, lambda: False)

    def write(self, generation: int) -> None:
        self.log.open(generation, since=0)
        self.log.messages.sent(KEY, TENSOR)


@pytest.fixture
def writer(store: SlowStore, rendezvous: TCPStore, tmp_path: Path) -> Iterator[Worker]:
    writer = Worker(store, rendezvous, tmp_path, context(WRITER))
    writer.write(1)
    yield writer
    writer.peers.withdraw()


def assert_read(store: Store, rendezvous: TCPStore, folder: Path, generation: int) -> WorkerLog:
    reader = Worker(store, rendezvous, folder, context(READER)).log
    reader.hand_over(generation, shipped=False)  # as everybody who reports
    buffer = torch.zeros_like(TENSOR)
    copy_into(reader.read([WRITER], since=0, iteration=0).message(KEY), buffer)
    assert torch.equal(buffer, TENSOR)
    return reader


def test_a_log_can_be_had_before_the_store_has_it(
    writer: Worker, store: SlowStore, rendezvous: TCPStore, tmp_path: Path
) -> None:
    writer.log.hand_over(2, shipped=False)
    assert store.list(log_directory(WRITER)) == []
    reader = assert_read(store, rendezvous, tmp_path, 2)
    assert reader.metrics().read_from_peers_bytes > 0
    assert reader.metrics().read_from_store_bytes == 0
    store.gate.set()
    writer.log.open(2, since=0)
    writer.log.hand_over(3, shipped=True)  # it gets there all the same
    assert len(store.list(log_directory(WRITER))) == 1


def test_a_log_that_nobody_would_send_again_is_in_the_store_first(
    store: SlowStore, rendezvous: TCPStore, tmp_path: Path
) -> None:
    """Whoever replaces a worker with replicas gets its state from them, and no log."""
    writer = Worker(store, rendezvous, tmp_path, context(WRITER, flush_s=0.1))
    writer.write(1)
    with pytest.raises(LogTimeoutError, match="the store is away"):
        writer.log.hand_over(2, shipped=True)
    writer.peers.withdraw()


def test_a_log_that_cannot_be_served_is_in_the_store_first(
    store: SlowStore, rendezvous: TCPStore, tmp_path: Path
) -> None:
    """The address is one for documentation (RFC 5737): nobody has it."""
    elsewhere = Worker(store, rendezvous, tmp_path, context(WRITER, "203.0.113.1"))
    elsewhere.write(1)
    store.gate.set()
    with pytest.warns(UserWarning, match=r"Worker 1 cannot serve its log at 203\.0\.113\.1"):
        elsewhere.log.hand_over(5, shipped=False)
    assert len(store.list(log_directory(WRITER))) == 1
    reader = assert_read(store, rendezvous, tmp_path, 5)
    assert reader.metrics().read_from_peers_bytes == 0


def test_an_offer_is_for_one_generation(
    writer: Worker, store: SlowStore, rendezvous: TCPStore, tmp_path: Path
) -> None:
    """What a dead worker offered is never asked for."""
    writer.log.hand_over(2, shipped=False)
    reader = LogPeers(rendezvous, context(READER))
    assert reader.of(3, WRITER) is None
    first = reader.of(2, WRITER)
    writer.log.hand_over(3, shipped=False)
    assert reader.of(2, WRITER) is None
    second = reader.of(3, WRITER)
    assert first is not None
    assert second is not None
    assert first.address == second.address  # it is served on
    (name,) = second.names()
    assert second.open(name).size() > 0
    writer.log.open(3, since=0)  # training goes on
    assert reader.of(3, WRITER) is None
    with pytest.raises(ConnectionRefusedError):
        second.open(name)


def test_the_token_is_one_for_all_and_in_no_offer(writer: Worker, rendezvous: TCPStore) -> None:
    token = writer.peers._token()
    assert LogPeers(rendezvous, context(READER))._token() == token
    assert len(token) >= 32
    writer.log.hand_over(2, shipped=False)
    offer = rendezvous.get(f"log/2/{WRITER}")
    assert token.encode() not in offer
    assert json.loads(offer).keys() == {"address", "names"}


def test_an_own_log_is_read_where_it_is(writer: Worker, store: SlowStore) -> None:
    """A stage that is ahead serves the interrupted iteration from its log, which is in no store yet."""
    writer.log.hand_over(2, shipped=False)
    writer.log.open(2, since=0)
    assert writer.log.read([WRITER], since=0, iteration=0).has(KEY)
    assert writer.log.metrics().read_from_peers_bytes == 0
