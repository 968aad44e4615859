"""What a worker holds for another: sent, kept, given back; nothing changes between a report and training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swift_ft.checkpoint.memory_copy import Block, digest_of
from swift_ft.network import JobSecret
from swift_ft.network.peer_server import COPIES, PeerServer
from swift_ft.runtime.memory.holder import Held, HeldCopies, fetch_copy, send_copy

SIZE = 3 << 20
SECRET = JobSecret.generated()


@pytest.fixture
def held() -> HeldCopies:
    return HeldCopies()


@pytest.fixture
def server(held: HeldCopies) -> Iterator[PeerServer]:
    made = PeerServer("127.0.0.1", SECRET, {COPIES: held.source})
    yield made
    made.close()


def copy(fill: int, size: int = SIZE) -> Held:
    block = Block(torch.full((size,), fill, dtype=torch.uint8), size)
    return Held(block, digest_of(block))


def send(
    server: PeerServer, iteration: int, keep: int | None = None, generation: int = 3, owner: int = 1
) -> bool:
    return send_copy(
        server.address,
        SECRET,
        iteration,
        copy(iteration),
        owner=owner,
        generation=generation,
        keep=keep,
        go_on=lambda: True,
    )


def test_a_copy_comes_back_as_it_was(server: PeerServer, held: HeldCopies) -> None:
    held.open(3, until=0)
    assert send(server, 5)
    back = fetch_copy(server.address, SECRET, 5)
    assert back.digest == copy(5).digest == digest_of(back.block)
    assert bytes(back.block.view) == bytes(copy(5).block.view)


def test_the_one_that_is_still_needed_stays(server: PeerServer, held: HeldCopies) -> None:
    held.open(3, until=0)
    assert all(send(server, at, keep) for at, keep in ((5, None), (10, 5), (15, 10)))
    assert held.freeze() == (10, 15)


def test_nothing_changes_in_a_recovery(server: PeerServer, held: HeldCopies) -> None:
    held.open(3, until=0)
    assert send(server, 5)
    assert held.freeze() == (5,)
    assert not send(server, 10, 5)
    held.open(4, until=5)
    assert not send(server, 10, 5)
    assert send(server, 10, 5, generation=4)
    assert held.freeze() == (5, 10)


def test_an_abandoned_history_is_dropped(server: PeerServer, held: HeldCopies) -> None:
    held.open(3, until=0)
    assert send(server, 5)
    assert send(server, 10, 5)
    held.open(4, until=7)
    assert held.freeze() == (5,)


def test_the_copies_of_another_worker_replace_those_of_the_last(server: PeerServer, held: HeldCopies) -> None:
    """Not before one of them comes, although both are of the same iteration."""
    held.open(3, until=0)
    assert send(server, 5)
    assert send(server, 10, 5)
    held.freeze()
    held.open(4, until=10)
    assert (held.owner, held.freeze()) == (1, (5, 10))
    held.open(5, until=10)
    assert send(server, 10, 10, generation=5, owner=2)
    assert (held.owner, held.freeze()) == (2, (10,))


def test_a_damaged_copy_is_dropped(server: PeerServer, held: HeldCopies) -> None:
    """The copy beside it stays. What is dropped is not named in the next report."""
    held.open(3, until=0)
    assert send(server, 5)
    assert send(server, 10, 5)
    found = held.as_sent(10)
    assert found is not None
    found.block.data[SIZE // 2] ^= 1
    with pytest.raises(ConnectionError, match="finds that it is not what was sent"):
        fetch_copy(server.address, SECRET, 10)
    with pytest.raises(FileNotFoundError):
        fetch_copy(server.address, SECRET, 10)
    assert held.freeze() == (5,)
    assert fetch_copy(server.address, SECRET, 5).digest == copy(5).digest


def test_strangers_get_nothing(server: PeerServer, held: HeldCopies) -> None:
    held.open(3, until=0)
    assert send(server, 5)
    with pytest.raises(PermissionError, match="403"):
        fetch_copy(server.address, JobSecret.generated(), 5)
    assert not send_copy(
        server.address, JobSecret.generated(), 10, copy(1), owner=1, generation=3, keep=5, go_on=lambda: True
    )
    assert held.freeze() == (5,)


def test_a_sender_that_dies_on_the_way(server: PeerServer, held: HeldCopies) -> None:
    """The copy before it stays, and what has arrived counts for nothing."""
    held.open(3, until=0)
    assert send(server, 5)
    pieces = iter((True, False))
    assert not send_copy(
        server.address, SECRET, 10, copy(10), owner=1, generation=3, keep=5, go_on=lambda: next(pieces)
    )
    assert held.freeze() == (5,)
