"""Gradients of microbatches that several members computed, added up where they are needed (paper §5.2).

    in order     owner's ─▶ first member + its own ─▶ next + its own ─▶ ... ─▶ owner      bit-identical
    by member    every member's own sum ─▶ owner                                          other roundings

Adding is not associative. A sum that is passed on meets the microbatches in their original order, and each
member sends it once, however many microbatches it has computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from swift_ft.microbatch import Gradients, add_up
from swift_ft.recovery.sharing import Leg
from swift_ft.recovery.transfer import Lane, Parcel, fresh_on, receive, send

__all__ = ["add_by_member", "add_in_order"]

_CHUNKS = 8
"""A sum is passed on in so many pieces: while the last one is under way, the first ones are further on."""


def add_in_order(
    way: Sequence[Leg],
    group: dist.ProcessGroup,
    gradients: Mapping[int, Gradients],
    had: Gradients | None,
    parameters: Sequence[torch.Tensor],
) -> Gradients | None:
    """Take part in passing on the sum for a stage.

    Args:
        way: of the sum.
        group: of all members.
        gradients: this worker's, by microbatch.
        had: what the sum begins with, at the owner; None for nothing.
        parameters: of the stage.

    Returns:
        The sum, where its way ends.

    Raises:
        RuntimeError: as torch does, if a member is gone.
    """
    rank = dist.get_rank()
    found: Gradients = []
    for chunk in _chunks(parameters):
        for number, leg in enumerate(way):
            if leg.rank != rank:
                continue
            parts = [gradients[microbatch][chunk] for microbatch in leg.microbatches]
            if number > 0:
                parts.insert(0, _receive(Lane(group, way[number - 1].rank, rank), parameters[chunk]))
            elif had is not None:
                parts.insert(0, had[chunk])
            total = add_up(parts)
            if number + 1 < len(way):
                _send(total, Lane(group, rank, way[number + 1].rank))
            else:
                found += total
    return found if way[-1].rank == rank else None


def add_by_member(
    members: Sequence[int],
    owner: int,
    group: dist.ProcessGroup,
    own: Gradients,
    had: Gradients | None,
    parameters: Sequence[torch.Tensor],
) -> Gradients | None:
    """Take part in adding up the sums of all members at the owner of a stage.

    Args:
        members: that compute.
        owner: whose stage it is.
        group: of all members.
        own: this worker's sum.
        had: what the owner already has; None for nothing.
        parameters: of the stage.

    Returns:
        The sum, at the owner.

    Raises:
        RuntimeError: as torch does, if a member is gone.
    """
    rank = dist.get_rank()
    if rank != owner:
        _send(own, Lane(group, rank, owner))
        return None
    parts = [had] if had is not None else []
    for member in members:
        parts.append(own if member == rank else _receive(Lane(group, member, rank), parameters))
    return add_up(parts)


def _chunks(parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Consecutive parameters, of about the same number of elements in each piece."""
    enough = sum(parameter.numel() for parameter in parameters) / _CHUNKS
    begin = elements = 0
    for end, parameter in enumerate(parameters, start=1):
        elements += parameter.numel()
        if elements >= enough or end == len(parameters):
            yield slice(begin, end)
            begin, elements = end, 0


def _send(gradients: Gradients, lane: Lane) -> None:
    send(Parcel({(str(index),): g for index, g in enumerate(gradients) if g is not None}), lane)


def _receive(lane: Lane, parameters: Sequence[torch.Tensor]) -> Gradients:
    found: Gradients = [None] * len(parameters)
    for (index,), gradient in receive(lane, fresh_on(parameters[0].device)).tensors.items():
        found[int(index)] = gradient
    return found
