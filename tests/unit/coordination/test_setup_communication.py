"""Before the first step: what is noted, given to a replacement, left out and refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistStoreError

from swift_ft.coordination import setup_communication
from swift_ft.coordination.setup_communication import LIMIT_BYTES, SetupCommunication
from swift_ft.errors import RecoveryError
from swift_ft.torch_adapters.script_operations import Operation


class Store:
    """A rendezvous store that does not wait."""

    def __init__(self) -> None:
        self.content: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.content[key] = value

    def get(self, key: str) -> bytes:
        if key not in self.content:
            raise DistStoreError("no such key")
        return self.content[key].encode()


@pytest.fixture
def store() -> Store:
    return Store()


def worker(store: Store, rank: int, *, joins: bool = False) -> SetupCommunication:
    """One of four, on two machines."""
    return SetupCommunication(rank, 2, joins, lambda: store)  # type: ignore[arg-type, return-value]


def operation(name: str, *tensors: torch.Tensor, peer: int | None = None) -> Operation:
    return Operation(name, "0", (0, 1, 2, 3), tensors, peer)


def done(setup: SetupCommunication, what: Operation) -> None:
    """It took place, and gave what its tensors hold."""
    over = setup.begin(what)
    assert over is not None
    over()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7),
        torch.randn(3, 2),
        torch.tensor([True, False]),
        torch.randn(4).bfloat16(),
        torch.randn(2, 3).t(),
        torch.zeros(0),
    ],
)
def test_what_all_get_is_noted_by_the_first(store: Store, tensor: torch.Tensor) -> None:
    for rank in range(4):
        done(worker(store, rank), operation("broadcast", tensor))
    assert len(store.content) == 1
    given = torch.zeros_like(tensor)
    assert worker(store, 3, joins=True).begin(operation("broadcast", given)) is None
    assert torch.equal(given, tensor)


def test_operations_are_numbered(store: Store) -> None:
    first, joins = worker(store, 0), worker(store, 2, joins=True)
    for value in (1.0, 2.0):
        done(first, operation("allreduce", torch.tensor(value)))
    done(first, operation("barrier"))
    for value in (1.0, 2.0):
        given = torch.zeros(())
        joins.begin(operation("allreduce", given))
        assert given.item() == value
    assert joins.begin(operation("barrier")) is None


@pytest.mark.parametrize("name", ["scatter", "recv"])
def test_what_each_worker_gets_is_its_own(store: Store, name: str) -> None:
    peer = 0 if name == "recv" else None
    for rank in (2, 3):
        done(worker(store, rank), operation(name, torch.tensor(float(rank)), peer=peer))
    for rank in (2, 3):
        given = torch.zeros(())
        worker(store, rank, joins=True).begin(operation(name, given, peer=peer))
        assert given.item() == rank


def test_what_a_replacement_sends_nobody_needs(store: Store) -> None:
    done(worker(store, 0), operation("send", torch.ones(1), peer=2))
    assert not store.content
    assert worker(store, 0, joins=True).begin(operation("send", torch.ones(1), peer=2)) is None


def test_workers_of_one_machine_communicate(store: Store) -> None:
    inside = Operation("broadcast", "1", (2, 3), (torch.zeros(LIMIT_BYTES),))
    for joins in (False, True):
        setup = worker(store, 2, joins=joins)
        done(setup, inside)
        assert setup.refused is None
    assert not store.content


def test_what_is_left_out_is_neither_noted_nor_counted(store: Store) -> None:
    first = worker(store, 0)
    with first.left_out():
        done(first, operation("allreduce", torch.zeros(LIMIT_BYTES)))
    done(first, operation("allreduce", torch.ones(1)))
    assert first.refused is None
    given = torch.zeros(1)
    worker(store, 1, joins=True).begin(operation("allreduce", given))
    assert given.item() == 1


def test_what_is_given_later_is_neither_noted_nor_waited_for(store: Store) -> None:
    """First weights: a replacement gets them from a recovery."""
    first = worker(store, 0)
    with first.given_later():
        done(first, operation("allgather", torch.ones(LIMIT_BYTES)))
    done(first, operation("allreduce", torch.ones(1)))
    assert first.refused is None
    joins, given = worker(store, 1, joins=True), torch.ones(LIMIT_BYTES)
    with joins.given_later():
        assert joins.begin(operation("allgather", given)) is None
        assert not given.any()
        done(joins, Operation("broadcast", "1", (0, 1), (given,)))  # the workers of its machine are there
    joins.begin(operation("allreduce", given[:1]))
    assert given[0].item() == 1


def test_the_first_that_cannot_be_noted_is_remembered(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = worker(store, 0)
    done(first, operation("broadcast", torch.zeros(LIMIT_BYTES, dtype=torch.uint8)))
    assert first.refused is None
    done(first, operation("broadcast", torch.zeros(LIMIT_BYTES + 1, dtype=torch.uint8)))
    done(first, operation("recv_anysource", torch.zeros(1)))
    assert first.refused is not None
    assert first.refused.operation == "broadcast"
    assert any(frame.filename == __file__ for frame in first.refused.stack)
    monkeypatch.setattr(setup_communication, "LIMIT", 2)
    other = worker(store, 0)
    for _ in range(3):
        done(other, operation("barrier"))
    assert other.refused is not None
    assert len(other.noted) == 2


def test_other_calls_than_those_of_the_lost_worker(store: Store) -> None:
    done(worker(store, 0), operation("allreduce", torch.ones(2)))
    with pytest.raises(RecoveryError, match="replaces got 8"):
        worker(store, 1, joins=True).begin(operation("allreduce", torch.ones(3)))
    with pytest.raises(RecoveryError, match="did not"):
        worker(store, 1, joins=True).begin(operation("allgather", torch.ones(2)))


def test_a_replacement_of_the_replacement_and_a_replay_elsewhere(store: Store) -> None:
    done(worker(store, 0), operation("allreduce", torch.ones(1)))
    second = worker(store, 0, joins=True)
    second.begin(operation("allreduce", torch.zeros(1)))
    assert second.noted == store.content
