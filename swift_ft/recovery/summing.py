"""Gradients of microbatches that several members computed, added up where they are needed (paper §5.2).

    in order     what the owner had ─▶ member: + its own ─▶ next: + its own ─▶ ... ─▶ owner    bit-identical
    by member    every member's own sum ─▶ owner                                               other roundings

Adding is not associative. A sum that is passed on meets the microbatches in their original order, and each
member sends it once, however many microbatches it has computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from swift_ft.microbatch import Gradients
from swift_ft.recovery.sharing import Leg
from swift_ft.recovery.transfer import Lane, wait

__all__ = ["StageGradients"]

_PIECES = 8
_PIECE_BYTES = 4 * 2**20
"""A sum goes in pieces that fit into a cache: while the last is under way, the first are further on."""


@dataclass(frozen=True, slots=True)
class StageGradients:
    """Those of one stage; all members call the same function for it.

    Attributes:
        group: of all members.
        owner: whose stage it is.
        parameters: of the stage.
        had: what they already have, at an owner whose gradients do not begin with nothing; else None.
    """

    group: dist.ProcessGroup
    owner: int
    parameters: Sequence[torch.Tensor]
    had: Gradients | None

    def in_order(self, way: Sequence[Leg], own: Mapping[int, Gradients]) -> Gradients | None:
        """Pass on the sum.

        Args:
            way: of the sum.
            own: this worker's gradients, by microbatch.

        Returns:
            The sum, at the owner.

        Raises:
            RuntimeError: as torch does, if a member is gone.
        """
        rank = dist.get_rank()
        found: Gradients = []
        sent = []
        for part in _parts(self.parameters):
            for number, leg in enumerate(way):
                if leg.rank != rank:
                    continue
                piece = _Piece(self.parameters[part])
                if number > 0:
                    wait(Lane(self.group, way[number - 1].rank, rank).carry(piece.flat))
                elif self.had is not None:
                    piece.add(self.had[part])
                for microbatch in leg.microbatches:
                    piece.add(own[microbatch][part])
                if number + 1 < len(way):
                    sent.append(Lane(self.group, rank, way[number + 1].rank).carry(piece.flat))
                else:
                    found += piece.gradients()
        for work in sent:
            wait(work)
        return found if rank == self.owner else None

    def by_member(self, members: Sequence[int], own: Gradients) -> Gradients | None:
        """Add up the sums of all members.

        Args:
            members: that compute.
            own: this worker's sum.

        Returns:
            The sum, at the owner.

        Raises:
            RuntimeError: as torch does, if a member is gone.
        """
        rank = dist.get_rank()
        found: Gradients = []
        for part in _parts(self.parameters):
            total = _Piece(self.parameters[part])
            if rank != self.owner:
                total.add(own[part])
                wait(Lane(self.group, rank, self.owner).carry(total.flat))
                continue
            if self.had is not None:
                total.add(self.had[part])
            for member in members:
                if member == rank:
                    total.add(own[part])
                else:
                    piece = _Piece(self.parameters[part])
                    wait(Lane(self.group, member, rank).carry(piece.flat))
                    total.add(piece.gradients())
            found += total.gradients()
        return found if rank == self.owner else None


def _parts(parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Consecutive parameters of one type, of about the same size in each part."""
    enough = min(_PIECE_BYTES, sum(parameter.nbytes for parameter in parameters) // _PIECES)
    begin = size = 0
    for end, parameter in enumerate(parameters):
        if end > begin and (size >= enough or parameter.dtype != parameters[begin].dtype):
            yield slice(begin, end)
            begin, size = end, 0
        size += parameter.nbytes
    if begin < len(parameters):
        yield slice(begin, len(parameters))


class _Piece:
    """A sum for some parameters as one tensor, to be sent: their elements, then for each whether it has any.

    Args:
        parameters: of one type.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        like = parameters[0]
        self.flat = torch.empty(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        *views, self._begun = torch.split(self.flat, [*sizes, len(sizes)])
        self._views = [view.view(parameter.shape) for view, parameter in zip(views, parameters, strict=True)]
        self._begun.zero_()

    def add(self, gradients: Gradients) -> None:
        """As autograd does: a sum begins with its first part, not with zero."""
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
        """The sum."""
        return [
            view if begun else None for view, begun in zip(self._views, self._begun.tolist(), strict=True)
        ]
