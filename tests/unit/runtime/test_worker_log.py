"""Before a worker reports, others can have its log: from itself, or else from the store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import TCPStore

from swift_ft.checkpoint.store_claim import log_directory
from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.config.store_keys import log_offer
from swift_ft.config.worker_context import WorkerContext
from swift_ft.logging import Direction, LogOptions, MessageKey
from swift_ft.network import JobSecret
from swift_ft.network.peer_server import LOGS
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.runtime.pipeline import worker_log
from swift_ft.runtime.pipeline.part import LogPart
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.worker.part import StepInfo
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.log import events_of

WRITER, READER = 1, 2
KEY = MessageKey(0, 0, Direction.FORWARD, 1, 2, 0)
TENSOR = torch.arange(100.0)
SECRET = JobSecret.generated()


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
def rendezvous() -> RendezvousStore:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    return RendezvousStore(lambda: TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60)))


def context(
    rank: int, address: str = "127.0.0.1", flush_s: float = 60.0, others_wait_s: float = 300.0
) -> WorkerContext:
    return WorkerContext(
        run_id="run",
        store=StoreAddress.tcp("localhost", 0),
        machine="m",
        address=address,
        agent_pid=0,
        rank=rank,
        world_size=3,
        workers_per_machine=1,
        started_in=1,
        config=RunConfig(
            flush_timeout_s=flush_s, report_timeout_s=others_wait_s, replay_timeout_s=others_wait_s
        ),
        secret=SECRET,
    )


class Worker:
    """A worker's log in one generation after the other."""

    def __init__(
        self,
        store: Store,
        rendezvous: RendezvousStore,
        folder: Path,
        place: WorkerContext,
        *,
        stays: bool = False,
    ) -> None:
        self.peers = PeerFiles(rendezvous, place, {place.machine}.__contains__)
        options = LogOptions(local=folder / f"local{place.rank}")
        self.log = WorkerLog(store, place, options, self.peers, is_cancelled=lambda _: False, stays=stays)

    def write(self, generation: int) -> None:
        self.log.open(generation, since=0, begin=0)
        self.log.messages.sent(KEY, TENSOR)


@pytest.fixture
def writer(store: SlowStore, rendezvous: RendezvousStore, tmp_path: Path) -> Iterator[Worker]:
    writer = Worker(store, rendezvous, tmp_path, context(WRITER))
    writer.write(1)
    yield writer
    writer.peers.withdraw(LOGS)


def assert_read(store: Store, rendezvous: RendezvousStore, folder: Path, generation: int) -> WorkerLog:
    reader = Worker(store, rendezvous, folder, context(READER)).log
    reader.seal_and_offer(generation, uploaded=False)  # as each worker does that reports
    buffer = torch.zeros_like(TENSOR)
    reader.read([WRITER], since=0, iteration=0).read_into(KEY, buffer)
    assert torch.equal(buffer, TENSOR)
    return reader


def test_a_log_can_be_had_before_the_store_has_it(
    writer: Worker, store: SlowStore, rendezvous: RendezvousStore, tmp_path: Path
) -> None:
    writer.log.seal_and_offer(2, uploaded=False)
    assert store.list(log_directory(WRITER)) == []
    reader = assert_read(store, rendezvous, tmp_path, 2)
    assert reader.metrics().read_from_peers_bytes > 0
    assert reader.metrics().read_from_store_bytes == 0
    store.gate.set()
    writer.log.open(2, since=0, begin=0)
    writer.log.seal_and_offer(3, uploaded=True)  # it gets there all the same
    assert len(store.list(log_directory(WRITER))) == 1


def test_a_log_that_no_worker_would_resend_is_in_the_store_first(
    store: SlowStore, rendezvous: RendezvousStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The replacement of a worker with replicas gets its state from them, and no log."""
    writer = Worker(store, rendezvous, tmp_path, context(WRITER, flush_s=0.1))
    writer.write(1)
    writer.log.seal_and_offer(2, uploaded=True)
    assert events_of(caplog) == ["log_not_uploaded"]
    assert "the store is away" in caplog.text
    assert writer.log.gap_before(1) == 0  # it is served
    writer.peers.withdraw(LOGS)


def test_a_log_that_can_be_read_nowhere_has_a_gap(
    store: SlowStore, rendezvous: RendezvousStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker keeps its state, and says so: the plan must not count on that log."""
    lonely = Worker(store, rendezvous, tmp_path, context(WRITER, "203.0.113.1", flush_s=0.1))
    lonely.write(1)
    lonely.log.seal_and_offer(2, uploaded=False)
    assert "log_suspended" in events_of(caplog)
    assert "the store is away" in lonely.log.why_gap
    assert lonely.log.gap_before(1) == 2
    lonely.log.open(2, since=0, begin=1)  # all from iteration 1 on is logged
    assert lonely.log.gap_before(4) == 1
    assert lonely.log.why_checkpoint(0)
    assert not lonely.log.why_checkpoint(1)
    assert "log_whole_again" in events_of(caplog)
    lonely.log.messages.writer = None


def test_a_step_that_counts_although_it_was_not_logged_leaves_a_gap(writer: Worker) -> None:
    """Its computation was to be repeated, and only the last one is logged."""
    part = LogPart(writer.log, 0, lambda: False)
    for iteration, computation in enumerate((0, 2, 1)):
        step = StepInfo(iteration, 1)
        step.computation = computation
        part.begin(step)
        writer.log.messages.sent(replace(KEY, iteration=iteration), TENSOR)
        part.completed(step)
        assert writer.log.gap_before(iteration + 1) == (3 if computation == 1 else 0)
    assert writer.log.why_gap == "iteration 2 was not logged"
    assert part.why_checkpoint(2) == "the log has a gap"
    assert part.why_checkpoint(3) == writer.log.why_gap == ""


def test_a_log_is_waited_for_no_longer_than_others_wait_for_the_report(
    store: SlowStore, rendezvous: RendezvousStore, tmp_path: Path
) -> None:
    """Else ``--report-timeout`` would cost a machine whose log has a gap, and nothing else."""
    place = context(WRITER, "203.0.113.1", flush_s=600.0, others_wait_s=0.5)
    lonely = Worker(store, rendezvous, tmp_path, place)
    lonely.write(1)
    lonely.log.seal_and_offer(2, uploaded=False)
    assert "the store is away" in lonely.log.why_gap
    assert "after 0." in lonely.log.why_gap


def test_a_segment_is_waited_for_no_longer_than_others_wait_for_the_replay(
    store: SlowStore, rendezvous: RendezvousStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_log, "PeerSources", sources := MagicMock())
    monkeypatch.setattr(worker_log, "LogReader", MagicMock())
    for flush_s, others_wait_s in ((120.0, 300.0), (120.0, 60.0)):
        place = context(READER, flush_s=flush_s, others_wait_s=others_wait_s)
        Worker(store, rendezvous, tmp_path, place).log.read([WRITER], since=0, iteration=0)
    assert [call.args[1] for call in sources.call_args_list] == [120.0, 48.0]


def test_a_log_that_cannot_be_served_is_in_the_store_first(
    store: SlowStore, rendezvous: RendezvousStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The address is reserved for documentation (RFC 5737): no host has it."""
    elsewhere = Worker(store, rendezvous, tmp_path, context(WRITER, "203.0.113.1"))
    elsewhere.write(1)
    store.gate.set()
    elsewhere.log.seal_and_offer(5, uploaded=False)
    assert "Worker 1 cannot serve its log at 203.0.113.1" in caplog.text
    assert len(store.list(log_directory(WRITER))) == 1
    reader = assert_read(store, rendezvous, tmp_path, 5)
    assert reader.metrics().read_from_peers_bytes == 0


def test_an_offer_is_for_one_plan(
    writer: Worker, store: SlowStore, rendezvous: RendezvousStore, tmp_path: Path
) -> None:
    """What a worker offered for an earlier one is never asked for."""
    writer.log.seal_and_offer(2, uploaded=False)
    reader = PeerFiles(rendezvous, context(READER), {"m"}.__contains__)
    assert reader.find(log_offer(3, WRITER)) is None
    first = reader.find(log_offer(2, WRITER))
    writer.log.seal_and_offer(3, uploaded=False)
    second = reader.find(log_offer(3, WRITER))
    assert first is not None
    assert second is not None
    assert first.address == second.address  # it is served on
    (name,) = second.facts["names"]
    with reader.file(second, LOGS, name).download() as segment:
        assert segment.read()
    writer.log.open(3, since=0, begin=0)  # training goes on
    assert reader.find(log_offer(3, WRITER)) == second  # those behind repeat an iteration now
    with reader.file(second, LOGS, name).download() as segment:
        assert segment.read()
    writer.log.withdraw()  # they have repeated it
    assert reader.find(log_offer(2, WRITER)) is reader.find(log_offer(3, WRITER)) is None
    with pytest.raises(ConnectionRefusedError):
        reader.file(second, LOGS, name).download()


def test_an_offer_of_a_machine_that_was_lost_since_is_not_used(
    writer: Worker, rendezvous: RendezvousStore
) -> None:
    """Its worker had reported, and no plan was made before its machine was lost."""
    writer.log.seal_and_offer(2, uploaded=False)
    members = {"m"}
    reader = PeerFiles(rendezvous, context(READER), members.__contains__)
    assert reader.find(log_offer(2, WRITER)) is not None
    members.remove("m")
    assert reader.find(log_offer(2, WRITER)) is None


def test_no_secret_is_in_an_offer(writer: Worker, rendezvous: RendezvousStore) -> None:
    writer.log.seal_and_offer(2, uploaded=False)
    offer = rendezvous.get(f"log/2/{WRITER}")
    assert json.loads(offer).keys() == {"address", "machine", "names"}


def test_an_own_log_is_read_where_it_is(writer: Worker, store: SlowStore) -> None:
    """A stage that is ahead serves the interrupted iteration from its log, which is in no store yet."""
    writer.log.seal_and_offer(2, uploaded=False)
    writer.log.open(2, since=0, begin=0)
    assert writer.log.read([WRITER], since=0, iteration=0).has(KEY)
    assert writer.log.metrics().read_from_peers_bytes == 0


@pytest.fixture(autouse=True)
def _listens_only_where_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an address of another host cannot be listened at."""
    monkeypatch.setattr("swift_ft.network.peer_server.listen_address", lambda host: host)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_log_that_stays_is_waited_for_at_the_end(
    comes_back: bool,
    store: SlowStore,
    rendezvous: RendezvousStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A replay without the job reads all of it. Any other log is of no use by then."""
    place = context(WRITER, flush_s=60.0 if comes_back else 0.1)
    writer = Worker(store, rendezvous, tmp_path, place, stays=True)
    writer.write(1)
    if comes_back:
        threading.Timer(0.2, store.gate.set).start()
    writer.log.close()
    assert bool(store.list(log_directory(WRITER))) == comes_back
    assert events_of(caplog) == [] if comes_back else ["log_not_kept"]
    other = Worker(store, rendezvous, tmp_path, context(READER))
    other.write(1)
    store.gate.clear()
    other.log.close()
    assert not store.list(log_directory(READER))
