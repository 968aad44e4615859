"""Segments from the disks of those who wrote them, and from the store where they do not give them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from swift_ft.errors import LogCorruptError, LogMissingError
from swift_ft.logging import FetchStats, LogReader, PeerLog, PeerSources
from swift_ft.network import JobSecret, peer_client
from swift_ft.network.peer_server import LOGS, PeerServer, files
from swift_ft.storage.store import Store
from tests.support.damage import flip
from tests.support.log import LOG, RUN, RemoteStore, events_of, key, message, write_segment
from tests.support.strangers import answering

SECRET = JobSecret.of_token("the token of this job")
TENSOR = torch.arange(1000, dtype=torch.float32)


@pytest.fixture
def disk(tmp_path: Path) -> Store:
    """The local disk of the worker that wrote the log."""
    return Store(tmp_path / "disk")


@pytest.fixture
def remote(tmp_path: Path) -> Store:
    return RemoteStore(str(tmp_path / "store"))


@pytest.fixture
def segment(disk: Store) -> Path:
    """The only one of the log: iteration 0."""
    return path_of(disk, write_segment(disk, [message(key(0), TENSOR)]))


@pytest.fixture
def server(segment: Path) -> Iterator[PeerServer]:
    server = PeerServer("127.0.0.1", SECRET, {LOGS: files(finder(segment))})
    yield server
    server.close()


def path_of(store: Store, path: str) -> Path:
    return Path(store.child_url(path).removeprefix("file://"))


def finder(segment: Path) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        if name != segment.name:
            raise FileNotFoundError(name)
        return segment

    return find


def upload(segment: Path, store: Store) -> None:
    store._make_parent(store._absolute(f"{LOG}/{segment.name}"))
    store.upload(segment, f"{LOG}/{segment.name}")


def reader_of(
    store: Store,
    peer: PeerLog,
    fetch_stats: FetchStats | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> LogReader:
    reader = LogReader(
        store, [LOG], run_id=RUN, peers=PeerSources({LOG: peer}, 60.0, is_cancelled), fetch_stats=fetch_stats
    )
    reader.refresh()
    return reader


def assert_read(reader: LogReader) -> None:
    buffer = torch.zeros_like(TENSOR)
    reader.read_into(key(0), buffer)
    assert torch.equal(buffer, TENSOR)


# ----------------------------------------------------------------------------------------------- the reader


def test_a_segment_that_is_not_in_the_store_comes_from_its_writer(
    server: PeerServer, segment: Path, remote: Store
) -> None:
    fetch_stats = FetchStats()
    assert_read(reader_of(remote, PeerLog(server.address, SECRET, [segment.name]), fetch_stats))
    assert fetch_stats.take() == (segment.stat().st_size, 0)
    assert fetch_stats.take() == (0, 0)


def test_a_segment_that_the_peer_evicted_comes_from_the_store(
    server: PeerServer, segment: Path, remote: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer needed the room for newer segments. No warning is due."""
    upload(segment, remote)
    size = segment.stat().st_size
    segment.unlink()
    fetch_stats = FetchStats()
    assert_read(reader_of(remote, PeerLog(server.address, SECRET, [segment.name]), fetch_stats))
    assert fetch_stats.take() == (0, size)
    assert not caplog.records


def test_a_peer_that_is_gone(segment: Path, remote: Store, caplog: pytest.LogCaptureFixture) -> None:
    upload(segment, remote)
    fetch_stats = FetchStats()
    assert_read(reader_of(remote, unreachable(segment), fetch_stats))
    assert f"{LOG} is read from file://" in caplog.text
    assert events_of(caplog) == ["peer_log_unusable"]
    assert fetch_stats.take() == (0, segment.stat().st_size)


def test_a_transfer_that_breaks_off(segment: Path, remote: Store, caplog: pytest.LogCaptureFixture) -> None:
    upload(segment, remote)
    content = segment.read_bytes()
    head = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content)
    with answering(head + content[: len(content) // 2]) as address:
        with pytest.raises(ConnectionError, match=r"broke off after \d+ of \d+ bytes"):
            PeerLog(address, SECRET, []).open(segment.name)
        assert_read(reader_of(remote, PeerLog(address, SECRET, [segment.name])))
    assert "broke off" in caplog.text
    assert events_of(caplog) == ["peer_log_unusable"]


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 500 No\r\n\r\n"]
)
def test_malformed_answers(
    answer: bytes, segment: Path, remote: Store, caplog: pytest.LogCaptureFixture
) -> None:
    upload(segment, remote)
    with answering(answer) as address:
        assert_read(reader_of(remote, PeerLog(address, SECRET, [segment.name])))
    assert events_of(caplog) == ["peer_log_unusable"]


def test_a_silent_peer(
    segment: Path, remote: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    upload(segment, remote)
    monkeypatch.setattr(peer_client, "READ_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert_read(reader_of(remote, PeerLog(address, SECRET, [segment.name])))
    assert "timed out" in caplog.text
    assert events_of(caplog) == ["peer_log_unusable"]


@pytest.mark.parametrize("where", [0.02, 0.5])
def test_a_flipped_bit_is_detected_and_the_stores_copy_is_read(
    server: PeerServer, segment: Path, remote: Store, where: float, caplog: pytest.LogCaptureFixture
) -> None:
    """In the schema, seen when the segment is opened; in a payload, when the message is used."""
    upload(segment, remote)
    flip(segment, where)
    fetch_stats = FetchStats()
    assert_read(reader_of(remote, PeerLog(server.address, SECRET, [segment.name]), fetch_stats))
    assert f"{LOG} is read from file://" in caplog.text
    assert events_of(caplog) == ["peer_log_unusable"]
    assert fetch_stats.from_store == segment.stat().st_size


def test_the_stores_copy_is_fetched_once_for_several_flipped_bits(disk: Store, remote: Store) -> None:
    names = [key(0, microbatch) for microbatch in range(4)]
    segment = path_of(disk, write_segment(disk, [message(name, TENSOR) for name in names]))
    upload(segment, remote)
    data = bytearray(segment.read_bytes())
    payload = TENSOR.numpy().tobytes()
    assert data.count(payload) == 4
    segment.write_bytes(data.replace(payload, payload[:-1] + b"x"))
    server, fetch_stats = PeerServer("127.0.0.1", SECRET, {LOGS: files(finder(segment))}), FetchStats()
    reader = reader_of(remote, PeerLog(server.address, SECRET, [segment.name]), fetch_stats)
    for name in names:
        buffer = torch.zeros_like(TENSOR)
        reader.read_into(name, buffer)
        assert torch.equal(buffer, TENSOR)
    server.close()
    assert fetch_stats.take() == (len(data), len(data))


def test_both_copies_are_damaged(server: PeerServer, segment: Path, remote: Store) -> None:
    flip(segment, 0.5)
    upload(segment, remote)
    with pytest.raises(LogCorruptError):
        reader_of(remote, PeerLog(server.address, SECRET, [segment.name])).read(key(0))


def test_the_only_copy_is_damaged_and_the_replay_is_cancelled(
    server: PeerServer, segment: Path, remote: Store
) -> None:
    flip(segment, 0.5)
    reader = reader_of(remote, PeerLog(server.address, SECRET, [segment.name]), is_cancelled=lambda: True)
    with pytest.raises(LogCorruptError):
        reader.read(key(0))


def test_a_segment_on_its_way_to_the_store_is_waited_for(segment: Path, remote: Store) -> None:
    """Its writer is unreachable but alive, so it will upload the segment."""

    def looked() -> bool:
        upload(segment, remote)
        return False

    assert_read(reader_of(remote, unreachable(segment), is_cancelled=looked))


def test_the_wait_ends_with_the_replay(segment: Path, remote: Store) -> None:
    """Its writer has died, which cancels the replay."""
    with pytest.raises(LogMissingError, match="is not in the log"):
        reader_of(remote, unreachable(segment), is_cancelled=lambda: True).read(key(0))


def test_a_peer_that_was_doubted_is_asked_after_the_store(
    server: PeerServer, segment: Path, disk: Store, remote: Store
) -> None:
    """One lost connection does not mean that the peer is dead."""
    later = path_of(disk, write_segment(disk, [message(key(1), TENSOR)], sequence=1))
    upload(later, remote)
    peer, fetch_stats = PeerLog(server.address, SECRET, [segment.name, later.name]), FetchStats()
    flip(segment, 0.02)

    def mended() -> bool:
        flip(segment, 0.02)
        return False

    reader = reader_of(remote, peer, fetch_stats, is_cancelled=mended)
    assert_read(reader)
    assert reader.has(key(1))
    assert fetch_stats.take() == (segment.stat().st_size, later.stat().st_size)


def unreachable(segment: Path) -> PeerLog:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return PeerLog(f"127.0.0.1:{closed.getsockname()[1]}", SECRET, [segment.name])
