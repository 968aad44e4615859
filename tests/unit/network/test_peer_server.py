"""What a worker serves to members of its job, whole and in ranges; broken transfers; and strangers."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from swift_ft.network import JobSecret
from swift_ft.network.http_access import JobConnection
from swift_ft.network.peer_client import PeerFile, put
from swift_ft.network.peer_server import LOGS, PeerServer, files
from tests.support.log import events_of
from tests.support.strangers import Wire, answering, is_refused, issue, new_authority, stranger
from tests.support.waiting import wait_until

SECRET = JobSecret.of_token("the token of this job")
SIZE = 3 << 20


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A file, in a folder of a folder."""
    place = tmp_path / "disk" / "log" / "segment.arrow"
    place.parent.mkdir(parents=True)
    place.write_bytes(os.urandom(SIZE))
    return place


@pytest.fixture
def server(segment: Path) -> Iterator[PeerServer]:
    server = PeerServer("127.0.0.1", SECRET, {LOGS: files(finder(segment))})
    yield server
    server.close()


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


def joined(pieces: Iterable[memoryview]) -> bytes:
    """All of them: each is valid until the next one."""
    return b"".join(bytes(piece) for piece in pieces)


def peer_file(address: str, segment: Path, secret: JobSecret = SECRET) -> PeerFile:
    return PeerFile(address, secret, f"{LOGS}/{segment.name}")


# ---------------------------------------------------------------------------------------------- whole files


def test_a_segment_is_served_unchanged(
    server: PeerServer, segment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has no name that a killed process could leave behind."""
    (copies := tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    assert ask(server.address, f"/logs/{segment.name}") == (200, segment.read_bytes())
    with peer_file(server.address, segment).download() as copy:
        assert copy.read() == segment.read_bytes()
        assert not [*copies.iterdir()]


@pytest.mark.parametrize("proof", [None, "", "Swift", "Swift ", "Swift 0123", "Bearer x", "Swift Größe"])
def test_without_a_proof_all_answers_are_the_same(
    server: PeerServer, segment: Path, proof: str | None
) -> None:
    there = ask_as_stranger(server.address, f"/logs/{segment.name}", proof)
    absent = ask_as_stranger(server.address, "/logs/absent", proof)
    assert there == absent == (401 if proof is None else 403, b"")


def test_a_recorded_request_proves_nothing(server: PeerServer, segment: Path) -> None:
    with Wire(server.address) as wire:
        assert ask(wire.address, f"/logs/{segment.name}") == (200, segment.read_bytes())
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
    server: PeerServer, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with stranger(server.address, first) as line:
        line.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while line.recv(65536):
                continue
    wait_until(lambda: "connection_refused" in events_of(caplog), "the line of the log")
    assert events_of(caplog) == ["connection_refused"]


def test_half_open_connections_end_at_their_deadline(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_limit_s", 0.2)
    for first in (b"", b"GET /", b"GET /x HTTP/1.1\r\n"):
        assert is_refused(stranger(server.address, first))
    wait_until(lambda: len(events_of(caplog)) == 3, "a line for each")


def test_a_member_comes_through_a_crowd_of_strangers(
    server: PeerServer, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_most", 4)
    crowd = [stranger(server.address) for _ in range(20)]
    assert ask(server.address, f"/logs/{segment.name}") == (200, segment.read_bytes())
    for line in crowd[:10]:
        assert is_refused(line)
    for line in crowd[10:]:
        line.close()


def test_with_certificates_nothing_readable_is_on_the_wire(segment: Path, tmp_path: Path) -> None:
    authority = new_authority(tmp_path)
    here, there = (JobSecret(SECRET.key, issue(authority, name)) for name in ("here", "there"))
    with (
        contextlib.closing(PeerServer("127.0.0.1", there, {LOGS: files(finder(segment))})) as server,
        Wire(server.address) as wire,
    ):
        assert ask(wire.address, f"/logs/{segment.name}", here) == (200, segment.read_bytes())
        assert len(wire.downward) > segment.stat().st_size
        for record in (wire.upward, wire.downward):
            assert segment.name.encode() not in record
            assert segment.read_bytes()[:100] not in record
        with pytest.raises(OSError):  # noqa: PT011  (TLS or the system says how)
            ask(server.address, f"/logs/{segment.name}", SECRET)
        stranger_of_authority = JobSecret(JobSecret.generated().key, here.certificates)
        assert ask(server.address, f"/logs/{segment.name}", stranger_of_authority) == (403, b"")


def test_a_peer_of_another_job_is_refused(server: PeerServer, segment: Path) -> None:
    with pytest.raises(PermissionError, match=r"127\.0\.0\.1:\d+ answers 403") as caught:
        peer_file(server.address, segment, JobSecret.generated()).download()
    assert SECRET.key.hex() not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/..", "/../secret", "/%2e%2e/secret", "//etc/passwd", "/secret", "secret"),
        *("/logs", "/logs/", "/logs/../secret", "/logs/%2e%2e/secret", "/logs//etc/passwd", "/logs/secret"),
    ],
)
def test_only_what_is_served_can_be_asked_for(
    server: PeerServer, segment: Path, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for place in (segment.parent, segment.parent.parent):
        (place / "secret").write_text("not yours")
    status, content = ask(server.address, path)
    assert status == 404
    assert b"not yours" not in content
    assert capfd.readouterr() == ("", "")


def test_a_host_name_is_kept_and_the_server_listens_at_all_addresses(segment: Path) -> None:
    """A machine may resolve its own name to the loopback address."""
    server = PeerServer("machine-7", SECRET, {LOGS: files(finder(segment))})
    try:
        host, _, port = server.address.rpartition(":")
        assert host == "machine-7"
        assert ask(f"127.0.0.2:{port}", f"/logs/{segment.name}")[0] == 200
    finally:
        server.close()


def test_a_closed_server_is_gone(segment: Path) -> None:
    server = PeerServer("127.0.0.1", SECRET, {LOGS: files(finder(segment))})
    server.close()
    with pytest.raises(ConnectionRefusedError):
        peer_file(server.address, segment).download()


def test_a_kind_that_is_not_served_any_more(server: PeerServer, segment: Path) -> None:
    server.sources = {}
    with pytest.raises(FileNotFoundError, match=f"{segment.name} of {server.address}"):
        peer_file(server.address, segment).download()
    with pytest.raises(FileNotFoundError):
        joined(peer_file(server.address, segment.with_name("absent")).pieces())


def test_files_take_nothing(server: PeerServer, segment: Path) -> None:
    before = segment.read_bytes()
    assert not put(server.address, SECRET, f"{LOGS}/{segment.name}", {}, memoryview(b"x"), lambda: True)
    assert segment.read_bytes() == before


# --------------------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 1), (0, 10), (7, 0x100000), (0x100000, None), (SIZE - 1, 1), (SIZE - 1, None), (0, SIZE)],
)
def test_a_range_has_these_bytes_and_no_others(
    server: PeerServer, segment: Path, first: int, count: int | None
) -> None:
    asked = peer_file(server.address, segment)
    end = SIZE if count is None else first + count
    assert joined(asked.pieces(first, count)) == segment.read_bytes()[first:end]
    assert asked.size == SIZE


def test_a_range_past_the_end(server: PeerServer, segment: Path) -> None:
    asked = peer_file(server.address, segment)
    assert joined(asked.pieces(SIZE - 5, 100)) == segment.read_bytes()[-5:]
    for first in (SIZE, SIZE + 7):
        with pytest.raises(EOFError, match=f"{segment.name} of .* ends before"):
            joined(asked.pieces(first, 1))


def test_an_empty_file(server: PeerServer, segment: Path) -> None:
    segment.write_bytes(b"")
    assert joined(peer_file(server.address, segment).pieces()) == b""
    with pytest.raises(EOFError):
        joined(peer_file(server.address, segment).pieces(0, 1))


def test_a_file_that_changes_between_two_ranges(server: PeerServer, segment: Path) -> None:
    """The bytes of two versions are never put together."""
    asked = peer_file(server.address, segment)
    assert len(joined(asked.pieces(0, 10))) == 10
    segment.with_name("new").write_bytes(os.urandom(SIZE))
    segment.with_name("new").replace(segment)
    with pytest.raises(ConnectionError, match="has changed"):
        joined(asked.pieces(10, 10))
    assert joined(peer_file(server.address, segment).pieces(10, 10)) == segment.read_bytes()[10:20]


def test_a_peer_that_knows_no_ranges(segment: Path) -> None:
    head = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE
    with (
        answering(head + segment.read_bytes()) as address,
        pytest.raises(ConnectionError, match=f"{address} knows no ranges"),
    ):
        joined(peer_file(address, segment).pieces(10, 10))


@pytest.mark.parametrize(
    "form", ["bytes=-5", "bytes=1-2,4-5", "lines=1-2", "bytes=x-", "bytes=" + "9" * 40 + "-"]
)
def test_other_forms_of_ranges_give_the_whole_file(server: PeerServer, segment: Path, form: str) -> None:
    line = JobConnection(server.address, SECRET, timeout_s=60)
    with contextlib.closing(line), line.get(f"/logs/{segment.name}", {"Range": form}) as answer:
        assert (answer.status, answer.read()) == (200, segment.read_bytes())


# ------------------------------------------------------------------------------------------ broken transfers


class Cut:
    """Stands between a client and a server, and ends a connection that has carried so many bytes down."""

    def __init__(self, wire: Wire, after: int, times: int) -> None:
        self.struck = 0
        self._after, self._times = after, times
        self._carried = 0
        wire.change_down = self._pass

    def _pass(self, data: bytes) -> bytes:
        self._carried += len(data)
        if self.struck < self._times and self._carried > self._after:
            self._carried = 0
            self.struck += 1
            raise ConnectionResetError("cut")
        return data


def test_a_broken_transfer_goes_on_where_it_ended(server: PeerServer, segment: Path) -> None:
    with Wire(server.address) as wire:
        cut = Cut(wire, 2 << 20, times=1)
        with peer_file(wire.address, segment).download() as copy:
            assert copy.read() == segment.read_bytes()
        assert cut.struck == 1
        assert wire.upward.count(b"Range: bytes=") == 2  # without and with the proof
        assert len(wire.downward) < 2 * SIZE


def test_a_connection_that_breaks_again_and_again_is_given_up(server: PeerServer, segment: Path) -> None:
    with Wire(server.address) as wire:
        cut = Cut(wire, 500 << 10, times=1000)
        with pytest.raises(ConnectionError, match=r"broke off after \d+ of \d+ bytes"):
            peer_file(wire.address, segment).download()
        assert cut.struck == 4


def test_a_file_that_changes_while_it_is_fetched(server: PeerServer, segment: Path) -> None:
    """The part that came is of no use: that the transfer broke off is the error."""
    with Wire(server.address) as wire:
        cut = Cut(wire, 2 << 20, times=1)
        pieces = peer_file(wire.address, segment).pieces()
        next(pieces)
        os.utime(segment, (1, 1))
        with pytest.raises(ConnectionError, match="broke off") as caught:
            joined(pieces)
        assert cut.struck == 1
        assert "has changed" in str(caught.value.__cause__)


def test_a_peer_that_dies_in_the_middle(server: PeerServer, segment: Path) -> None:
    with Wire(server.address) as wire:
        cut = Cut(wire, 2 << 20, times=1)
        pieces = peer_file(wire.address, segment).pieces()
        next(pieces)
        wire.stop_listening()
        with pytest.raises(ConnectionError, match="broke off") as caught:
            joined(pieces)
        assert cut.struck == 1
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_large_file_is_not_read_into_memory(server: PeerServer, segment: Path) -> None:
    """Neither by who serves it nor by who fetches it: both are this process."""
    with segment.open("r+b") as file:
        file.truncate(256 << 20)
    tracemalloc.start()
    try:
        assert sum(len(piece) for piece in peer_file(server.address, segment).pieces()) == 256 << 20
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 32 << 20
