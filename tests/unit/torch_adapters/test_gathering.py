"""Members meet in a store, once for each communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import DistError

from swift_ft.torch_adapters.gathering import Gathering, gather

SOON, NEVER = timedelta(minutes=1), timedelta(milliseconds=50)


class Waits:
    """Makes each wait at once, and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, function: Callable[[], object]) -> None:
        self.made += 1
        function()


def together(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_all_of_them_come() -> None:
    store = dist.HashStore()
    together(*[lambda: gather(store, "group", 3, SOON)] * 3)


def test_one_that_does_not_come_is_waited_for() -> None:
    store = dist.HashStore()
    with pytest.raises((DistError, RuntimeError)):
        gather(store, "group", 2, NEVER)
    with pytest.raises((DistError, RuntimeError)):
        gather(store, "another group", 2, NEVER)
    gather(store, "group", 2, NEVER)  # the second one


def test_a_communicator_is_waited_for_once() -> None:
    store, waits = dist.HashStore(), [Waits(), Waits()]
    members = [Gathering(store, rank, 2, SOON) for rank in range(2)]
    for _ in range(2):
        together(*(lambda rank=rank: members[rank].meet(None, waits[rank]) for rank in range(2)))
    assert [one.made for one in waits] == [1, 1]


def test_a_pair_meets_apart_from_all() -> None:
    store, waits = dist.HashStore(), Waits()
    members = [Gathering(store, rank, 3, SOON) for rank in range(3)]
    together(lambda: members[0].meet(2, waits), lambda: members[2].meet(0, waits))
    with pytest.raises((DistError, RuntimeError)):
        Gathering(store, 0, 3, NEVER).meet(None, waits)


def test_all_may_have_met_already() -> None:
    waits, member = Waits(), Gathering(dist.HashStore(), 0, 3, NEVER)
    member.formed()
    member.meet(None, waits)
    assert not waits.made
