"""A worker's one server for all kinds, its offers under keys, and files of samples from others."""

from __future__ import annotations

import threading
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from swift_ft.config import store_keys
from swift_ft.data.file_index import DataFile
from swift_ft.network.peer_server import LOGS, PARTS, files
from swift_ft.runtime.data.file_peers import FilePeers
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.storage.digest import Digester
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.log import events_of
from tests.unit.runtime.test_worker_log import context

KEY = store_keys.log_offer(1, 0)


@pytest.fixture
def rendezvous() -> RendezvousStore:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    return RendezvousStore(lambda: TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60)))


def peers_of(rendezvous: RendezvousStore, rank: int = 0, members: Collection[str] = ("m",)) -> PeerFiles:
    return PeerFiles(rendezvous, context(rank), members.__contains__)


def test_one_server_has_all_kinds_until_the_last_is_withdrawn(
    rendezvous: RendezvousStore, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"content")
    first, second = peers_of(rendezvous), peers_of(rendezvous, 1)
    source = files(tmp_path.joinpath)
    assert first.serve(LOGS, source) == first.serve(PARTS, source)
    first.offer(LOGS, KEY, names=["a"])
    offer = second.find(KEY)
    assert offer is not None
    assert offer.facts == {"names": ["a"]}
    for kind in (LOGS, PARTS):
        with second.file(offer, kind, "a").download() as copy:
            assert copy.read() == b"content"
    first.withdraw(LOGS)
    assert second.find(KEY) is None
    with pytest.raises(FileNotFoundError):
        second.file(offer, LOGS, "a").download()
    second.file(offer, PARTS, "a").download().close()
    first.withdraw(PARTS)
    with pytest.raises(ConnectionRefusedError):
        second.file(offer, PARTS, "a").download()


def test_what_is_withdrawn_is_not_offered_any_more(rendezvous: RendezvousStore, tmp_path: Path) -> None:
    peers = peers_of(rendezvous)
    peers.serve(LOGS, files(tmp_path.joinpath))
    peers.withdraw(LOGS)
    peers.offer(LOGS, KEY)
    assert peers.find(KEY) is None


def test_an_offer_of_a_machine_that_was_lost_is_not_used(rendezvous: RendezvousStore, tmp_path: Path) -> None:
    members = {"m"}
    peers = peers_of(rendezvous, members=members)
    peers.serve(LOGS, files(tmp_path.joinpath))
    peers.offer(LOGS, KEY)
    assert peers.find(KEY) is not None
    members.remove("m")
    assert peers.find(KEY) is None
    peers.withdraw(LOGS)


# ------------------------------------------------------------------------------------------ files of samples


@pytest.fixture
def sample(tmp_path: Path) -> tuple[DataFile, Path]:
    place = tmp_path / "copy"
    place.write_bytes(b"samples")
    digester = Digester()
    digester.update(b"samples")
    return DataFile("part-0.txt", 1, digester.digest()), place


def samples_of(
    rendezvous: RendezvousStore, rank: int, members: Collection[str] = ("m",), others_wait_s: float = 300.0
) -> FilePeers:
    place = context(rank, others_wait_s=others_wait_s)
    return FilePeers(peers_of(rendezvous, rank, members), rendezvous, place)


def test_the_first_worker_reads_a_file_of_samples_and_gives_it_to_the_next(
    rendezvous: RendezvousStore, sample: tuple[DataFile, Path]
) -> None:
    file, place = sample
    first, second = samples_of(rendezvous, 0), samples_of(rendezvous, 1)
    with pytest.raises(FileNotFoundError):
        first.open(file)
    got: list[bytes] = []

    def fetch() -> None:
        with second.open(file) as copy:
            got.append(copy.read())

    waits = threading.Thread(target=fetch)
    waits.start()
    first.offer(file, place)
    waits.join(60)
    assert got == [b"samples"]
    first.close()
    with pytest.raises(ConnectionError):
        second.open(file)


def test_a_file_of_samples_is_waited_for_no_longer_than_others_wait_for_a_replay(
    rendezvous: RendezvousStore, sample: tuple[DataFile, Path]
) -> None:
    file, _ = sample
    with pytest.raises(FileNotFoundError):
        samples_of(rendezvous, 0).open(file)
    with pytest.raises(ConnectionError, match="after 160ms"):  # torch's words
        samples_of(rendezvous, 1, others_wait_s=0.2).open(file)


def test_a_file_of_samples_whose_machine_was_lost_is_read_again(
    rendezvous: RendezvousStore, sample: tuple[DataFile, Path]
) -> None:
    file, place = sample
    members = {"m"}
    first, second = samples_of(rendezvous, 0), samples_of(rendezvous, 1, members)
    with pytest.raises(FileNotFoundError):
        first.open(file)
    first.offer(file, place)
    second.open(file).close()
    members.remove("m")
    with pytest.raises(FileNotFoundError):
        second.open(file)
    second.offer(file, place)  # it has read it meanwhile
    first.close()
    with samples_of(rendezvous, 2).open(file) as copy:
        assert copy.read() == b"samples"
    second.close()


def test_a_worker_that_cannot_serve_says_so_once(
    rendezvous: RendezvousStore,
    sample: tuple[DataFile, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The address is reserved for documentation (RFC 5737): no host has it."""
    monkeypatch.setattr("swift_ft.network.peer_server.listen_address", lambda host: "203.0.113.1")
    file, place = sample
    lonely = samples_of(rendezvous, 0)
    for _ in range(2):
        lonely.offer(file, place)
    assert events_of(caplog) == ["samples_not_served"]
    assert not rendezvous.check([store_keys.samples_at(file.content.digest)])
