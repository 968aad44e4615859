"""Adds up gradients of microbatches that several members computed (paper §5.2).

    in order     what the owner had ─▶ member: + its own ─▶ next: + its own ─▶ ... ─▶ owner    bit-identical
    by member    every member's own sum ─▶ owner                                               other roundings

Floating-point addition is not associative. A sum that travels from member to member adds the microbatches in
their original order. Each member sends it once, however many microbatches it has computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from swift_ft.recovery.helpers import ReductionHop
from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import wait_for
from swift_ft.torch_adapters.pipelining.microbatch import Gradients

__all__ = ["StageGradients"]

_BUCKETS = 8
_BUCKET_BYTES = 4 * 2**20
"""A sum travels in buckets that fit into a cache, so that several members work on it at the same time."""


@dataclass(frozen=True, slots=True)
class StageGradients:
    """Adds up the gradients of one stage. All members call the same method for it.

    Attributes:
        group: of all members.
        owner: rank of the worker that holds the stage.
        parameters: of the stage.
        initial: the gradients that they already have, at an owner that has any; else None.
    """

    group: dist.ProcessGroup
    owner: int
    parameters: Sequence[torch.Tensor]
    initial: Gradients | None

    def in_order(self, hops: Sequence[ReductionHop], own: Mapping[int, Gradients]) -> Gradients | None:
        """Add up all microbatches in their original order, along a route from member to member.

        Args:
            hops: the route of the sum.
            own: this worker's gradients, by microbatch.

        Returns:
            The sum, at the owner.

        Raises:
            RuntimeError: as torch does, if a member is gone.
        """
        rank = dist.get_rank()
        result: Gradients = []
        sent = []
        for bucket in _buckets(self.parameters):
            for number, hop in enumerate(hops):
                if hop.rank != rank:
                    continue
                partial = _BucketSum(self.parameters[bucket])
                if number > 0:
                    wait_for([Link(self.group, hops[number - 1].rank, rank).carry(partial.flat)])
                elif self.initial is not None:
                    partial.add(self.initial[bucket])
                for microbatch in hop.microbatches:
                    partial.add(own[microbatch][bucket])
                if number + 1 < len(hops):
                    sent.append(Link(self.group, rank, hops[number + 1].rank).carry(partial.flat))
                else:
                    result += partial.gradients()
        wait_for(sent)
        return result if rank == self.owner else None

    def by_member(self, members: Sequence[int], own: Gradients) -> Gradients | None:
        """Add up the sums of all members.

        Args:
            members: the ranks that compute microbatches.
            own: this worker's sum.

        Returns:
            The sum, at the owner.

        Raises:
            RuntimeError: as torch does, if a member is gone.
        """
        rank = dist.get_rank()
        result: Gradients = []
        for bucket in _buckets(self.parameters):
            total = _BucketSum(self.parameters[bucket])
            if rank != self.owner:
                total.add(own[bucket])
                wait_for([Link(self.group, rank, self.owner).carry(total.flat)])
                continue
            if self.initial is not None:
                total.add(self.initial[bucket])
            for member in members:
                if member == rank:
                    total.add(own[bucket])
                else:
                    partial = _BucketSum(self.parameters[bucket])
                    wait_for([Link(self.group, member, rank).carry(partial.flat)])
                    total.add(partial.gradients())
            result += total.gradients()
        return result if rank == self.owner else None


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Slices of consecutive parameters of one dtype, each of about the same size in bytes."""
    enough = min(_BUCKET_BYTES, sum(parameter.nbytes for parameter in parameters) // _BUCKETS)
    begin = size = 0
    for end, parameter in enumerate(parameters):
        if end > begin and (size >= enough or parameter.dtype != parameters[begin].dtype):
            yield slice(begin, end)
            begin, size = end, 0
        size += parameter.nbytes
    if begin < len(parameters):
        yield slice(begin, len(parameters))


class _BucketSum:
    """The sum of one bucket as one flat tensor: all elements, then whether each parameter has a gradient.

    Args:
        parameters: of the bucket, of one dtype.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        like = parameters[0]
        self.flat = torch.empty(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        *views, self._begun = torch.split(self.flat, [*sizes, len(sizes)])
        self._views = [view.view(parameter.shape) for view, parameter in zip(views, parameters, strict=True)]
        self._begun.zero_()

    def add(self, gradients: Gradients) -> None:
        """Add gradients as autograd does: a sum begins with its first term, not with zero."""
        begun = self._begun.tolist()
        with torch.no_grad():
            for index, (view, gradient) in enumerate(zip(self._views, gradients, strict=True)):
                if gradient is None:
                    continue
                if begun[index]:
                    view += gradient
                else:
                    view.copy_(gradient)
                    self._begun[index] = 1

    def gradients(self) -> Gradients:
        """The sum; None for each parameter without a gradient."""
        return [
            view if begun else None for view, begun in zip(self._views, self._begun.tolist(), strict=True)
        ]
