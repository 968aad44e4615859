"""The operations as exchanges of bytes. All members add in the order of their ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from swift_ft.testing.nccl_like.mesh import Mesh

Tensors = Sequence[torch.Tensor]

_REDUCE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


class Member:
    """One member of a group, in whose thread of operations these run.

    Args:
        mesh: its connections.
        rank: its number.
    """

    def __init__(self, mesh: Mesh, rank: int, size: int) -> None:
        self._mesh = mesh
        self._rank = rank
        self._size = size

    def all_to_all(self, given: Mapping[int, torch.Tensor], taken: Mapping[int, torch.Tensor]) -> None:
        """Give some members, and take from some, a tensor each."""
        if self._rank in given and self._rank in taken:
            _fill(taken[self._rank], given[self._rank])
        transfer(
            self._mesh,
            {rank: [tensor] for rank, tensor in given.items() if rank != self._rank},
            {rank: [tensor] for rank, tensor in taken.items() if rank != self._rank},
        )

    def all_gather(self, outputs: Tensors, given: torch.Tensor) -> None:
        """Take from each what it gives."""
        self.all_to_all(dict.fromkeys(range(self._size), given), dict(enumerate(outputs)))

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Take the reduction of what all give."""
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self.all_gather(parts, tensor)
        _fill(tensor, _reduced(parts, op))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Take what one gives."""
        at_root = self._rank == root
        self.all_to_all(
            dict.fromkeys(range(self._size), tensor) if at_root else {}, {} if at_root else {root: tensor}
        )

    def gather(self, outputs: Tensors, given: torch.Tensor, root: int) -> None:
        """One takes what each gives."""
        self.all_to_all({root: given}, dict(enumerate(outputs)) if self._rank == root else {})

    def reduce(self, tensor: torch.Tensor, root: int, op: Any) -> None:
        """One takes the reduction of what all give."""
        parts = [torch.empty_like(tensor) for _ in range(self._size if self._rank == root else 0)]
        self.gather(parts, tensor, root)
        if parts:
            _fill(tensor, _reduced(parts, op))

    def scatter(self, output: torch.Tensor, given: Tensors, root: int) -> None:
        """Each takes its part of what one gives."""
        self.all_to_all(dict(enumerate(given)) if self._rank == root else {}, {root: output})

    def reduce_scatter(self, output: torch.Tensor, given: Tensors, op: Any) -> None:
        """Each takes the reduction of its parts of what all give."""
        parts = [torch.empty_like(output) for _ in range(self._size)]
        self.all_to_all(dict(enumerate(given)), dict(enumerate(parts)))
        _fill(output, _reduced(parts, op))

    def barrier(self) -> None:
        """Wait for all."""
        self.all_gather([torch.zeros(1) for _ in range(self._size)], torch.zeros(1))


def transfer(mesh: Mesh, sends: Mapping[int, Tensors], receives: Mapping[int, Tensors]) -> None:
    """Send and receive tensors at once."""
    apart = [
        (tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format))
        for tensors in receives.values()
        for tensor in tensors
        if not tensor.is_contiguous()
    ]
    within = {id(tensor): buffer for tensor, buffer in apart}
    mesh.exchange(
        {peer: [_bytes_of(tensor.contiguous()) for tensor in tensors] for peer, tensors in sends.items()},
        {
            peer: [_bytes_of(within.get(id(tensor), tensor)) for tensor in tensors]
            for peer, tensors in receives.items()
        },
    )
    for tensor, buffer in apart:
        _fill(tensor, buffer)


def _fill(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Write into memory, as a device does: autograd and inference mode know nothing of it."""
    if tensor.is_contiguous():
        _bytes_of(tensor)[:] = _bytes_of(result.contiguous())
    else:
        tensor.detach().copy_(result)


def fill_with_garbage(tensor: torch.Tensor, rank: int) -> None:
    """Write what no operation gives: a large number of any dtype, and another one for each rank."""
    byte = 65 + rank % 32
    garbage = torch.full((tensor.nbytes,), byte, dtype=torch.uint8)
    if tensor.nbytes:
        _fill(tensor, garbage.view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _reduced(parts: Tensors, op: Any) -> torch.Tensor:
    function = next((function for name, function in _REDUCE.items() if op == name), None)
    if function is None:
        raise ValueError(f"the reduction {op} is not made like NCCL's here")
    result = functools.reduce(function, parts)
    return result / len(parts) if op == dist.ReduceOp.AVG else result
