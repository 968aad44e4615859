"""Segments from the disks of those who wrote them, and from the store where they do not give them."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from swift_ft.errors import LogCorruptError, LogMissingError
from swift_ft.logging import FetchStats, LogReader, PeerLog, PeerSources
from swift_ft.network import JobSecret, file_server
from swift_ft.network.file_server import FileServer
from swift_ft.network.http_access import JobConnection
from swift_ft.storage.store import Store
from tests.support.log import LOG, RUN, RemoteStore, events_of, key, message, write_segment
from tests.support.strangers import Wire, is_refused, issue, new_authority, stranger
from tests.support.waiting import wait_until

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
def server(segment: Path) -> Iterator[FileServer]:
    server = FileServer("127.0.0.1", SECRET, finder(segment))
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


def ask(address: str, path: str, secret: JobSecret = SECRET) -> tuple[int, bytes]:
    """A raw request, with nothing corrected by the client."""
    with contextlib.closing(JobConnection(address, secret, timeout_s=60)) as line, line.get(path) as answer:
        return answer.status, answer.read()


def ask_as_stranger(address: str, path: str, authorization: str | None) -> tuple[int, bytes]:
    """A request that proves nothing, on a connection that was told how to."""
    host, _, port = address.rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as line:
        for headers in ({}, {"Authorization": authorization} if authorization is not None else {}):
            line.request("GET", path, headers=headers)
            answer = line.getresponse()
            found = answer.status, answer.read()
            answer.close()
        return found


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


# ----------------------------------------------------------------------------------------------- the server


def test_a_segment_is_served_unchanged(server: FileServer, segment: Path) -> None:
    assert ask(server.address, f"/{segment.name}") == (200, segment.read_bytes())
    assert PeerLog(server.address, SECRET, []).open(segment.name).read() == segment.read_bytes()


@pytest.mark.parametrize("proof", [None, "", "Swift", "Swift ", "Swift 0123", "Bearer x", "Swift Größe"])
def test_without_a_proof_all_answers_are_the_same(
    server: FileServer, segment: Path, proof: str | None
) -> None:
    there = ask_as_stranger(server.address, f"/{segment.name}", proof)
    absent = ask_as_stranger(server.address, "/absent", proof)
    assert there == absent == (401 if proof is None else 403, b"")


def test_a_recorded_request_proves_nothing(server: FileServer, segment: Path) -> None:
    with Wire(server.address) as wire:
        assert ask(wire.address, f"/{segment.name}") == (200, segment.read_bytes())
        with stranger(server.address, bytes(wire.upward)) as line:
            answers = b""
            while data := line.recv(65536):
                answers += data
    assert answers.count(b"HTTP/1.1 ") == 2
    assert b" 401 " in answers
    assert b" 403 " in answers
    assert segment.read_bytes() not in answers


@pytest.mark.parametrize(
    "first", [b"\xff" * 300, b"GET /x HTTP/1.1\r\n" + b"a" * 70_000, os.urandom(300) + b"\n"]
)
def test_bytes_that_are_no_request_get_one_line(
    server: FileServer, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with stranger(server.address, first) as line:
        line.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while line.recv(65536):
                continue
    wait_until(lambda: "connection_refused" in events_of(caplog), "the line of the log")
    assert events_of(caplog) == ["connection_refused"]


def test_half_open_connections_end_at_their_deadline(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_limit_s", 0.2)
    for first in (b"", b"GET /", b"GET /x HTTP/1.1\r\n"):
        assert is_refused(stranger(server.address, first))
    wait_until(lambda: len(events_of(caplog)) == 3, "a line for each")


def test_a_member_comes_through_a_crowd_of_strangers(
    server: FileServer, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_most", 4)
    crowd = [stranger(server.address) for _ in range(20)]
    assert ask(server.address, f"/{segment.name}") == (200, segment.read_bytes())
    for line in crowd[:10]:
        assert is_refused(line)
    for line in crowd[10:]:
        line.close()


def test_with_certificates_nothing_readable_is_on_the_wire(segment: Path, tmp_path: Path) -> None:
    authority = new_authority(tmp_path)
    here, there = (JobSecret(SECRET.key, issue(authority, name)) for name in ("here", "there"))
    with (
        contextlib.closing(FileServer("127.0.0.1", there, finder(segment))) as server,
        Wire(server.address) as wire,
    ):
        assert ask(wire.address, f"/{segment.name}", here) == (200, segment.read_bytes())
        assert len(wire.downward) > segment.stat().st_size
        for record in (wire.upward, wire.downward):
            assert segment.name.encode() not in record
            assert segment.read_bytes()[:100] not in record
        with pytest.raises(OSError):  # noqa: PT011  (TLS or the system says how)
            ask(server.address, f"/{segment.name}", SECRET)
        stranger_of_authority = JobSecret(JobSecret.generated().key, here.certificates)
        assert ask(server.address, f"/{segment.name}", stranger_of_authority) == (403, b"")


def test_a_peer_of_another_job_is_refused(server: FileServer, segment: Path) -> None:
    with pytest.raises(PermissionError, match=r"127\.0\.0\.1:\d+ answers 403") as caught:
        PeerLog(server.address, JobSecret.generated(), []).open(segment.name)
    assert SECRET.key.hex() not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["/", "/..", "/../secret", "/%2e%2e/secret", "//etc/passwd", "/log/../secret", "/secret", "secret"],
)
def test_only_segments_of_the_log_can_be_asked_for(
    server: FileServer, segment: Path, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for place in (segment.parent, segment.parent.parent):
        (place / "secret").write_text("not yours")
    status, content = ask(server.address, path)
    assert status == 404
    assert b"not yours" not in content
    assert capfd.readouterr() == ("", "")


def test_a_host_name_is_kept_and_the_server_listens_at_all_addresses(segment: Path) -> None:
    """A machine may resolve its own name to the loopback address."""
    server = FileServer("machine-7", SECRET, finder(segment))
    try:
        host, _, port = server.address.rpartition(":")
        assert host == "machine-7"
        assert ask(f"127.0.0.2:{port}", f"/{segment.name}")[0] == 200
    finally:
        server.close()


def test_a_closed_server_is_gone(segment: Path) -> None:
    server = FileServer("127.0.0.1", SECRET, finder(segment))
    server.close()
    with pytest.raises(ConnectionRefusedError):
        PeerLog(server.address, SECRET, []).open(segment.name)


# ----------------------------------------------------------------------------------------------- the reader


def test_a_segment_that_is_not_in_the_store_comes_from_its_writer(
    server: FileServer, segment: Path, remote: Store
) -> None:
    fetch_stats = FetchStats()
    assert_read(reader_of(remote, PeerLog(server.address, SECRET, [segment.name]), fetch_stats))
    assert fetch_stats.take() == (segment.stat().st_size, 0)
    assert fetch_stats.take() == (0, 0)


def test_a_segment_that_the_peer_evicted_comes_from_the_store(
    server: FileServer, segment: Path, remote: Store, caplog: pytest.LogCaptureFixture
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
    monkeypatch.setattr(file_server, "READ_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert_read(reader_of(remote, PeerLog(address, SECRET, [segment.name])))
    assert "timed out" in caplog.text
    assert events_of(caplog) == ["peer_log_unusable"]


@pytest.mark.parametrize("where", [0.02, 0.5])
def test_a_flipped_bit_is_detected_and_the_stores_copy_is_read(
    server: FileServer, segment: Path, remote: Store, where: float, caplog: pytest.LogCaptureFixture
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
    server, fetch_stats = FileServer("127.0.0.1", SECRET, finder(segment)), FetchStats()
    reader = reader_of(remote, PeerLog(server.address, SECRET, [segment.name]), fetch_stats)
    for name in names:
        buffer = torch.zeros_like(TENSOR)
        reader.read_into(name, buffer)
        assert torch.equal(buffer, TENSOR)
    server.close()
    assert fetch_stats.take() == (len(data), len(data))


def test_both_copies_are_damaged(server: FileServer, segment: Path, remote: Store) -> None:
    flip(segment, 0.5)
    upload(segment, remote)
    with pytest.raises(LogCorruptError):
        reader_of(remote, PeerLog(server.address, SECRET, [segment.name])).read(key(0))


def test_the_only_copy_is_damaged_and_the_replay_is_cancelled(
    server: FileServer, segment: Path, remote: Store
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
    server: FileServer, segment: Path, disk: Store, remote: Store
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


def flip(segment: Path, where: float) -> None:
    data = bytearray(segment.read_bytes())
    data[int(where * len(data))] ^= 1
    segment.write_bytes(data)


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that sends every client the same answer and closes; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # that it is closed
            while True:
                with listener.accept()[0] as client:
                    client.recv(1 << 16)
                    client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
