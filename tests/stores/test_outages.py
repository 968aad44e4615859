"""Stores that fail for a while: nothing is lost, and training does not wait."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
import torch

from benchmarks.lib.hadoop import HdfsCluster
from benchmarks.lib.seaweed import BUCKET, SeaweedServer
from swift_ft.logging import (
    Direction,
    LogOptions,
    LogReader,
    LogStats,
    LogWriter,
    MessageKey,
    SegmentIdentity,
    Ship,
)
from swift_ft.logging.writing.uploader import LogTimeoutError
from swift_ft.storage.store import Store
from tests.support.cluster import assert_identical, run_cluster
from tests.support.proxy import BadNetwork, bad_network

LOG = "log/rank-00001"
DEADLINE_S = 120.0


@pytest.fixture
def network(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadNetwork]:
    """A network that all clients use to reach the server."""
    with bad_network(seaweed.ports[3]) as network:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")
        s3fs.S3FileSystem.clear_instance_cache()
        yield network
    s3fs.S3FileSystem.clear_instance_cache()


def key(iteration: int) -> MessageKey:
    return MessageKey(iteration, 0, Direction.FORWARD, 1, 2, 0)


def tensor(iteration: int) -> torch.Tensor:
    return torch.full((50_000,), float(iteration))


def append(writer: LogWriter, iterations: range) -> None:
    for i in iterations:
        writer.append_message(key(i), tensor(i))
        writer.roll()


def assert_all_there(store: Store, count: int) -> None:
    reader = LogReader(store, [LOG], run_id="run")
    reader.refresh()
    for i in range(count):
        buffer = torch.zeros(50_000)
        reader.read_into(key(i), buffer)
        assert torch.equal(buffer, tensor(i))
    assert [name for name in store.list(LOG) if not name.endswith(".arrow")] == []


def writer_for(
    store: Store, tmp_path: Path, ship: Ship = Ship.ALWAYS, stats: LogStats | None = None
) -> LogWriter:
    options = LogOptions(ship=ship, local=tmp_path / "local")
    return LogWriter(store, LOG, SegmentIdentity("run", 1, 0), options, stats=stats)


@pytest.mark.thorough
def test_a_server_that_is_killed_and_comes_back(own_seaweed: SeaweedServer, tmp_path: Path) -> None:
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    stats = LogStats()
    writer = writer_for(store, tmp_path, stats=stats)
    append(writer, range(4))
    own_seaweed.kill()
    append(writer, range(4, 12))  # is not held up
    assert stats.total.held_back_s == 0
    with pytest.raises(LogTimeoutError, match=r"segments of log/rank-00001 are not in s3://") as caught:
        writer.flush(3.0)
    assert "test-secret" not in str(caught.value)
    own_seaweed.start()
    writer.flush(DEADLINE_S)
    assert_all_there(store, 12)
    writer.close(DEADLINE_S)
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.thorough
def test_answers_of_503_and_silent_connections(network: BadNetwork, tmp_path: Path) -> None:
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    network.busy, network.silent = 4, 1
    writer = writer_for(store, tmp_path)
    append(writer, range(3))
    writer.close(DEADLINE_S)
    assert network.busy == network.silent == 0
    assert_all_there(store, 3)


def test_a_slow_network_delays_only_flush(network: BadNetwork, tmp_path: Path) -> None:
    """1 MB/s, and 3 MB to ship."""
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    stats = LogStats()
    writer = writer_for(store, tmp_path, stats=stats)
    network.bytes_per_s = 1e6
    append(writer, range(15))
    assert stats.total.held_back_s == 0
    writer.close(DEADLINE_S)
    network.bytes_per_s = None
    assert_all_there(store, 15)


def test_on_failure_nothing_is_shipped_before_it(seaweed: SeaweedServer, tmp_path: Path) -> None:
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    writer = writer_for(store, tmp_path, Ship.ON_FAILURE)
    append(writer, range(6))
    assert store.list(LOG) == []
    dropped = writer.drop_before(2)
    writer.flush(DEADLINE_S)
    assert len(dropped) + len(store.list(LOG)) == 6
    reader = LogReader(store, [LOG], run_id="run")
    reader.refresh()
    assert all(reader.has(key(i)) for i in range(2, 6))
    writer.close(DEADLINE_S)


@pytest.mark.thorough
def test_a_data_node_is_killed(hdfs: HdfsCluster, tmp_path: Path) -> None:
    """The NameNode still counts on it, and a write right after the kill fails."""
    store = Store(f"{hdfs.url}/{uuid.uuid4().hex}")
    writer = writer_for(store, tmp_path)
    append(writer, range(3))
    writer.flush(DEADLINE_S)
    with hdfs.killed_data_node():
        append(writer, range(3, 9))
        writer.close(DEADLINE_S)
        assert_all_there(store, 9)


def test_a_training_survives_an_outage_of_its_store(own_seaweed: SeaweedServer, tmp_path: Path) -> None:
    """The server dies in mid-run and is restarted; then a machine dies, and is replayed from it."""
    reference = run_cluster(tmp_path / "undisturbed")
    over = threading.Event()

    def outage() -> None:
        client = own_seaweed.client()
        while not over.is_set():  # the checkpoint of the start means that iterations run
            client.invalidate_cache()
            if client.exists(f"{BUCKET}/run/checkpoints/00000000/committed.json"):
                own_seaweed.kill()
                own_seaweed.start()
                return

    saboteur = threading.Thread(target=outage)
    saboteur.start()
    try:
        run = run_cluster(
            tmp_path / "killed",
            *("--store", f"s3://{BUCKET}/run"),
            inject="kill machine=1 iteration=7 point=forward microbatch=3",
        )
    finally:
        over.set()
        saboteur.join()
    assert_identical(run, reference)
    assert [recovery["slots"] for recovery in run.recoveries] == [[1]]
    assert (own_seaweed.folder / "server.log").read_text().count("Start Seaweed S3 API Server") == 2
