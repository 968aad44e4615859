"""Gradients of several processes are added up over a real gloo group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swift_ft.errors import CannotHelpError
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.runtime.helpers.gradient_reduction import (
    EarlySum,
    StageGradients,
    begins_in_order,
    has_all_gradients,
)
from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import wait_for
from swift_ft.torch_adapters.pipelining.microbatch import Gradients
from tests.support.clean_fork import CLEAN_FORK

REPLAY = ParallelReplay(owners=(1,), helpers=(0, 2), begin=0, until=1)
PARAMETERS = [
    nn.Parameter(tensor)
    for tensor in (
        torch.empty(300, 400),  # large: travels by itself
        torch.empty(7, dtype=torch.bfloat16),
        torch.empty(()),
        torch.empty(5, 3),
        torch.empty(2),
        torch.empty(3),
    )
]
FROZEN = 5
PARAMETERS[FROZEN].requires_grad_(False)
MICROBATCHES = 8
ORDERS = {"ascending": [*range(MICROBATCHES)], "crooked": [5, 0, 1, 7, 3, 2, 6, 4]}


def gradients_of(microbatch: int) -> Gradients:
    """Of very different sizes, so that each order of adding gives other bits; some parameters have none."""
    generator = torch.Generator().manual_seed(microbatch)
    found: Gradients = [
        (torch.randn(p.shape, generator=generator) * 10.0 ** (microbatch % 5)).to(p.dtype) for p in PARAMETERS
    ]
    found[3] = found[FROZEN] = None
    if microbatch < 6:
        found[4] = None
    elif microbatch == 6:
        found[4] = torch.tensor([-0.0, 1.0])  # begins a sum in one order: zero plus it would be another zero
    return found


def had() -> Gradients:
    return [torch.ones_like(PARAMETERS[0]), None, torch.tensor(3.0), None, None, torch.ones(3)]


def expected(
    order: list[int], first: Gradients | None, of: Callable[[int], Gradients] = gradients_of
) -> Gradients:
    """As autograd adds, on one process."""
    total: Gradients = [None] * len(PARAMETERS)
    for part in [*([first] if first is not None else []), *map(of, order)]:
        for index, gradient in enumerate(part):
            if gradient is not None:
                have = total[index]
                total[index] = gradient if have is None else have + gradient
    return total


def in_order(rank: int, group: Any, order: list[int], first: Gradients | None) -> Gradients | None:
    way = REPLAY.hops(order, 1, begun=first is not None)
    own = {n: [gradients_of(m) for m in hop.microbatches] for n, hop in enumerate(way) if hop.rank == rank}
    stage = StageGradients(group, 1, PARAMETERS, first if rank == 1 else None)
    found = stage.in_order(way, own)
    wait_for(stage.under_way)
    return found


def by_member(rank: int, group: Any, order: list[int], first: Gradients | None) -> Gradients | None:
    own = expected([*REPLAY.microbatches_of(rank, MICROBATCHES)], None)
    stage = StageGradients(group, 1, PARAMETERS, first if rank == 1 else None)
    found = stage.by_member(REPLAY.members, own)
    wait_for(stage.under_way)
    return found


Take = Callable[[int, Any, list[int], Gradients | None], Gradients | None]


def member(rank: int, folder: Path, take: Take, order: list[int], first: Gradients | None) -> None:
    torch.set_num_threads(1)  # the threads of the process from which this one was forked are not here
    store = dist.FileStore(str(folder / "store"), 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    found = take(rank, dist.group.WORLD, order, first)
    assert (found is not None) == (rank == 1)
    if found is not None:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def together(folder: Path, take: Take, order: list[int], first: Gradients | None) -> Gradients:
    processes = [CLEAN_FORK.Process(target=member, args=(r, folder, take, order, first)) for r in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    found: Gradients = torch.load(folder / "found.pt")
    return found


def bits(gradients: Gradients) -> list[bytes | None]:
    return [
        None if g is None else g.contiguous().view(torch.uint8).numpy().tobytes()
        for g in map(flat, gradients)
    ]


def flat(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.reshape(-1)


@pytest.mark.parametrize("first", [None, had()], ids=["from nothing", "on top"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_in_order_is_bit_identical(order: list[int], first: Gradients | None, tmp_path: Path) -> None:
    assert bits(expected(order, first)) == bits(together(tmp_path, in_order, order, first))


def test_other_orders_give_other_bits() -> None:
    """Else the test above could not fail."""
    ascending, crooked = (bits(expected(order, None)) for order in ORDERS.values())
    assert ascending[0] != crooked[0]


@pytest.mark.parametrize("first", [None, had()], ids=["from nothing", "on top"])
def test_by_member_is_close(first: Gradients | None, tmp_path: Path) -> None:
    found = together(tmp_path, by_member, [], first)
    for ours, theirs in zip(found, expected(ORDERS["ascending"], first), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2)


def test_autograd_adds_up_what_begins_a_sum() -> None:
    """Only a member that begins it with all that it computes, in its order, and on top of nothing."""
    shares = {rank: REPLAY.microbatches_of(rank, MICROBATCHES) for rank in range(3)}
    ascending = REPLAY.hops([*range(MICROBATCHES)], 1, begun=False)
    assert [begins_in_order(ascending, r, shares[r], begun=False) for r in range(3)] == [True, False, False]
    first_last = REPLAY.hops([6, 7, 0, 1, 2, 3, 4, 5], 1, begun=False)
    assert begins_in_order(first_last, 1, shares[1], begun=False)
    assert not begins_in_order(REPLAY.hops([6, 7, *range(6)], 1, begun=True), 1, shares[1], begun=True)
    assert not begins_in_order(REPLAY.hops([*range(8)][::-1], 1, begun=False), 1, shares[1], begun=False)


def of_all(microbatch: int) -> Gradients:
    """As :func:`gradients_of`, of all parameters that are trained."""
    found = gradients_of(microbatch)
    return [
        torch.full_like(p, 0.1 * microbatch) if g is None and p.requires_grad else g
        for p, g in zip(PARAMETERS, found, strict=True)
    ]


def backward(microbatch: int) -> None:
    """Autograd adds the gradients of a microbatch to those that the parameters have."""
    pairs = [(p, g) for p, g in zip(PARAMETERS, of_all(microbatch), strict=True) if g is not None]
    torch.autograd.backward([p * 1 for p, _ in pairs], [g for _, g in pairs])


def leaves_early(rank: int, group: Any, order: list[int], first: Gradients | None) -> Gradients | None:
    way = REPLAY.hops(order, 1, begun=False)
    if rank != way[0].rank:
        own = {n: [of_all(m) for m in hop.microbatches] for n, hop in enumerate(way) if hop.rank == rank}
        stage = StageGradients(group, 1, PARAMETERS, None)
        found = stage.in_order(way, own)
        wait_for(stage.under_way)
        return found
    under_way: list[dist.Work] = []
    assert not has_all_gradients(PARAMETERS)
    for microbatch in way[0].microbatches[:-1]:
        backward(microbatch)
    assert has_all_gradients(PARAMETERS)
    early = EarlySum(Link(group, rank, way[1].rank), PARAMETERS, under_way)
    assert len(under_way) == 1
    backward(way[0].microbatches[-1])
    assert len(under_way) > 2  # before it is told that this is all
    early.finish()
    wait_for(under_way)
    return None


def test_a_sum_that_leaves_early_is_bit_identical(tmp_path: Path) -> None:
    order = ORDERS["ascending"]
    assert bits(expected(order, None, of_all)) == bits(together(tmp_path, leaves_early, order, None))


class Nowhere:
    """A link on which nothing travels."""

    def carry(self, tensor: torch.Tensor) -> None:
        pass


def test_what_is_added_after_a_piece_has_left_is_noticed() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.sum().backward()
    early = EarlySum(Nowhere(), [parameter], [])  # type: ignore[arg-type]
    parameter.sum().backward()
    parameter.sum().backward()  # as a checkpointed part may that is used twice
    with pytest.raises(CannotHelpError, match="more than once"):
        early.finish()
