"""Segments from the disks of those who wrote them, and from the store where they do not give them."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from logging_helpers import LOG, RUN, RemoteStore, key, message, write_segment

from swift_ft.errors import LogCorruptError, LogMissingError
from swift_ft.logging import Fetched, LogReader, Peer, Peers, SegmentServer, Store, copy_into, peers

TOKEN = "the job's secret"
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
def server(segment: Path) -> Iterator[SegmentServer]:
    server = SegmentServer("127.0.0.1", TOKEN, finder(segment))
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


def ask(address: str, path: str, token: str | None = TOKEN) -> tuple[int, bytes]:
    """A request as anybody can make it, with nothing put right by the client."""
    host, _, port = address.rpartition(":")
    line = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        line.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token is not None else {})
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def upload(segment: Path, store: Store) -> None:
    store._make_parent(store._absolute(f"{LOG}/{segment.name}"))
    store.upload(segment, f"{LOG}/{segment.name}")


def reader_of(
    store: Store,
    peer: Peer,
    fetched: Fetched | None = None,
    called_off: Callable[[], bool] = lambda: False,
) -> LogReader:
    reader = LogReader(store, [LOG], run_id=RUN, peers=Peers({LOG: peer}, 60.0, called_off), fetched=fetched)
    reader.refresh()
    return reader


def assert_read(reader: LogReader) -> None:
    buffer = torch.zeros_like(TENSOR)
    copy_into(reader.message(key(0)), buffer)
    assert torch.equal(buffer, TENSOR)


# ----------------------------------------------------------------------------------------------- the server


def test_a_segment_comes_as_it_is(server: SegmentServer, segment: Path) -> None:
    assert ask(server.address, f"/{segment.name}") == (200, segment.read_bytes())
    assert Peer(server.address, TOKEN, []).open(segment.name).read() == segment.read_bytes()


@pytest.mark.parametrize("token", [None, "", "the job's", "the job's secret ", "Größe"])
def test_without_the_token_nothing_is_told(server: SegmentServer, segment: Path, token: str | None) -> None:
    there = ask(server.address, f"/{segment.name}", token)
    absent = ask(server.address, "/absent", token)
    assert there == absent
    assert there[0] == 403


def test_a_peer_of_another_job_is_refused(server: SegmentServer, segment: Path) -> None:
    with pytest.raises(PermissionError, match=r"127\.0\.0\.1:\d+ answers 403") as caught:
        Peer(server.address, "another", []).open(segment.name)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["/", "/..", "/../secret", "/%2e%2e/secret", "//etc/passwd", "/log/../secret", "/secret", "secret"],
)
def test_only_segments_of_the_log_can_be_asked_for(
    server: SegmentServer, segment: Path, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for place in (segment.parent, segment.parent.parent):
        (place / "secret").write_text("not yours")
    status, content = ask(server.address, path)
    assert status == 404
    assert b"not yours" not in content
    assert capfd.readouterr() == ("", "")


def test_a_name_is_told_as_it_is_and_all_addresses_are_listened_at(segment: Path) -> None:
    """A machine's own name may lead it to itself alone."""
    server = SegmentServer("localhost", TOKEN, finder(segment))
    try:
        host, _, port = server.address.rpartition(":")
        assert host == "localhost"
        assert ask(f"127.0.0.2:{port}", f"/{segment.name}")[0] == 200
    finally:
        server.close()


def test_a_closed_server_is_gone(segment: Path) -> None:
    server = SegmentServer("127.0.0.1", TOKEN, finder(segment))
    server.close()
    with pytest.raises(ConnectionRefusedError):
        Peer(server.address, TOKEN, []).open(segment.name)


# ----------------------------------------------------------------------------------------------- the reader


def test_what_is_not_in_the_store_comes_from_its_writer(
    server: SegmentServer, segment: Path, remote: Store
) -> None:
    fetched = Fetched()
    assert_read(reader_of(remote, Peer(server.address, TOKEN, [segment.name]), fetched))
    assert fetched.take() == (segment.stat().st_size, 0)
    assert fetched.take() == (0, 0)


def test_what_is_not_on_the_peers_disk_any_more_comes_from_the_store(
    server: SegmentServer, segment: Path, remote: Store, recwarn: pytest.WarningsRecorder
) -> None:
    """The disk was needed for more of the log. That is nothing to warn of."""
    upload(segment, remote)
    size = segment.stat().st_size
    segment.unlink()
    fetched = Fetched()
    assert_read(reader_of(remote, Peer(server.address, TOKEN, [segment.name]), fetched))
    assert fetched.take() == (0, size)
    assert not recwarn


def test_a_peer_that_is_gone(segment: Path, remote: Store) -> None:
    upload(segment, remote)
    fetched = Fetched()
    with pytest.warns(UserWarning, match=f"{LOG} is read from file://"):
        assert_read(reader_of(remote, nobody(segment), fetched))
    assert fetched.take() == (0, segment.stat().st_size)


def test_a_transfer_that_breaks_off(segment: Path, remote: Store) -> None:
    upload(segment, remote)
    content = segment.read_bytes()
    head = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content)
    with answering(head + content[: len(content) // 2]) as address:
        with pytest.raises(ConnectionError, match=r"broke off after \d+ of \d+ bytes"):
            Peer(address, TOKEN, []).open(segment.name)
        with pytest.warns(UserWarning, match="broke off"):
            assert_read(reader_of(remote, Peer(address, TOKEN, [segment.name])))


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 500 No\r\n\r\n"]
)
def test_answers_that_are_none(answer: bytes, segment: Path, remote: Store) -> None:
    upload(segment, remote)
    with answering(answer) as address, pytest.warns(UserWarning, match="did not come from the worker"):
        assert_read(reader_of(remote, Peer(address, TOKEN, [segment.name])))


def test_a_peer_that_says_nothing(segment: Path, remote: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(segment, remote)
    monkeypatch.setattr(peers, "_SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.warns(UserWarning, match="timed out"):
            assert_read(reader_of(remote, Peer(address, TOKEN, [segment.name])))


@pytest.mark.parametrize("where", [0.02, 0.5])
def test_a_flipped_bit_is_seen_and_the_stores_copy_is_taken(
    server: SegmentServer, segment: Path, remote: Store, where: float
) -> None:
    """In the schema, seen when the segment is opened; in a payload, when the message is used."""
    upload(segment, remote)
    flip(segment, where)
    fetched = Fetched()
    with pytest.warns(UserWarning, match=f"{LOG} is read from file://"):
        assert_read(reader_of(remote, Peer(server.address, TOKEN, [segment.name]), fetched))
    assert fetched.from_store == segment.stat().st_size


@pytest.mark.filterwarnings("ignore:.*did not come from the worker")
def test_the_stores_copy_is_fetched_once_for_several_flipped_bits(disk: Store, remote: Store) -> None:
    names = [key(0, microbatch) for microbatch in range(4)]
    segment = path_of(disk, write_segment(disk, [message(name, TENSOR) for name in names]))
    upload(segment, remote)
    data = bytearray(segment.read_bytes())
    payload = TENSOR.numpy().tobytes()
    assert data.count(payload) == 4
    segment.write_bytes(data.replace(payload, payload[:-1] + b"x"))
    server, fetched = SegmentServer("127.0.0.1", TOKEN, finder(segment)), Fetched()
    reader = reader_of(remote, Peer(server.address, TOKEN, [segment.name]), fetched)
    for name in names:
        buffer = torch.zeros_like(TENSOR)
        copy_into(reader.message(name), buffer)
        assert torch.equal(buffer, TENSOR)
    server.close()
    assert fetched.take() == (len(data), len(data))


@pytest.mark.filterwarnings("ignore:.*did not come from the worker")
def test_both_copies_are_damaged(server: SegmentServer, segment: Path, remote: Store) -> None:
    flip(segment, 0.5)
    upload(segment, remote)
    with pytest.raises(LogCorruptError):
        reader_of(remote, Peer(server.address, TOKEN, [segment.name])).message(key(0))


@pytest.mark.filterwarnings("ignore:.*did not come from the worker")
def test_the_only_copy_is_damaged_and_nobody_needs_it_any_more(
    server: SegmentServer, segment: Path, remote: Store
) -> None:
    flip(segment, 0.5)
    reader = reader_of(remote, Peer(server.address, TOKEN, [segment.name]), called_off=lambda: True)
    with pytest.raises(LogCorruptError):
        reader.message(key(0))


@pytest.mark.filterwarnings("ignore:.*did not come from the worker")
def test_a_segment_on_its_way_to_the_store_is_waited_for(segment: Path, remote: Store) -> None:
    """Its writer cannot be reached, but lives: it ships what it has."""

    def looked() -> bool:
        upload(segment, remote)
        return False

    assert_read(reader_of(remote, nobody(segment), called_off=looked))


@pytest.mark.filterwarnings("ignore:.*did not come from the worker")
def test_the_wait_ends_with_the_replay(segment: Path, remote: Store) -> None:
    """Its writer has died, and everybody is told so."""
    with pytest.raises(LogMissingError, match="is not in the log"):
        reader_of(remote, nobody(segment), called_off=lambda: True).message(key(0))


@pytest.mark.filterwarnings("ignore:.*did not come from the worker")
def test_a_peer_that_was_doubted_is_asked_after_the_store(
    server: SegmentServer, segment: Path, disk: Store, remote: Store
) -> None:
    """One lost connection is no death."""
    later = path_of(disk, write_segment(disk, [message(key(1), TENSOR)], sequence=1))
    upload(later, remote)
    peer, fetched = Peer(server.address, TOKEN, [segment.name, later.name]), Fetched()
    flip(segment, 0.02)

    def mended() -> bool:
        flip(segment, 0.02)
        return False

    reader = reader_of(remote, peer, fetched, called_off=mended)
    assert_read(reader)
    assert reader.has(key(1))
    assert fetched.take() == (segment.stat().st_size, later.stat().st_size)


def nobody(segment: Path) -> Peer:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return Peer(f"127.0.0.1:{closed.getsockname()[1]}", TOKEN, [segment.name])


def flip(segment: Path, where: float) -> None:
    data = bytearray(segment.read_bytes())
    data[int(where * len(data))] ^= 1
    segment.write_bytes(data)


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that gives everybody the same answer, and closes; its address."""
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
