"""Machines that serve their copies of checkpoints to others."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from swift_ft.checkpoint.part_files import LocalParts
from swift_ft.runtime.checkpoints.part_peers import PartPeers
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.unit.runtime.test_worker_log import context

PART = "checkpoints/00000020/rank-00001.g00002"
FILE = f"{PART}/__0_0.distcp"


@pytest.fixture(scope="module")
def rendezvous() -> RendezvousStore:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    return RendezvousStore(lambda: TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60)))


def machine(
    rendezvous: RendezvousStore, folder: Path, rank: int, *files: str, members: Collection[str] = ("m",)
) -> PartPeers:
    local = LocalParts(folder / str(rank), "s3://bucket/run")
    for path in files:
        with local.written(path) as more:
            more(path.encode())
    place = context(rank)
    return PartPeers(PeerFiles(rendezvous, place, members.__contains__), place, local)


def test_a_file_comes_from_the_machine_that_has_it(rendezvous: RendezvousStore, tmp_path: Path) -> None:
    first, second = machine(rendezvous, tmp_path, 0), machine(rendezvous, tmp_path, 1, FILE)
    for one in (first, second):
        one.offer(3)
    with first.open(FILE) as file:
        assert file.read() == FILE.encode()
    with pytest.raises(FileNotFoundError):
        first.open(f"{PART}/__0_7.distcp")
    with pytest.raises(FileNotFoundError):
        first.open("checkpoints/00000020/rank-00002.g00002/__0_0.distcp")
    for one in (first, second):
        one.withdraw()
    with pytest.raises(FileNotFoundError):
        first.open(FILE)


def test_a_machine_that_was_lost_since(rendezvous: RendezvousStore, tmp_path: Path) -> None:
    first, second = machine(rendezvous, tmp_path, 0), machine(rendezvous, tmp_path, 1, FILE)
    for one in (first, second):
        one.offer(4)
    assert second._peers._server is not None
    second._peers._server.close()
    with pytest.raises(OSError):  # noqa: PT011  (which one depends on the system)
        first.open(FILE)


def test_an_address_where_nobody_can_listen(
    rendezvous: RendezvousStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("swift_ft.network.peer_server.listen_address", lambda host: "203.0.113.1")
    machine(rendezvous, tmp_path, 1, FILE).offer(5)
    assert "others read the store" in caplog.text


def test_a_machine_that_is_known_to_be_lost_is_not_asked(rendezvous: RendezvousStore, tmp_path: Path) -> None:
    """Its address may not answer for a long time."""
    members = {"m"}
    first = machine(rendezvous, tmp_path, 0, members=members)
    second = machine(rendezvous, tmp_path, 1, FILE)
    for one in (first, second):
        one.offer(5)
    first.open(FILE).close()
    members.remove("m")
    with pytest.raises(FileNotFoundError):
        first.open(FILE)
    second.withdraw()
