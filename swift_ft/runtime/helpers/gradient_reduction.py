"""Adds up gradients of microbatches that several members computed (paper §5.2).

    in order     what the owner had ─▶ member: + its own ─▶ next: + its own ─▶ ... ─▶ owner    bit-identical
    by member    every member's own sum ─▶ owner                                               other roundings

Floating-point addition is not associative. A sum that travels from member to member adds the microbatches in
their original order. Each member sends it once, however many microbatches it has computed. It travels in
pieces, so that several members work on it at the same time, and what begins it is sent without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from swift_ft.recovery.helpers import ReductionHop
from swift_ft.runtime.helpers.pieces import Piece, pieces_of
from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import wait_for
from swift_ft.torch_adapters.pipelining.microbatch import Gradients

__all__ = ["StageGradients", "begins_in_order"]


def begins_in_order(hops: Sequence[ReductionHop], rank: int, computed: Sequence[int], *, begun: bool) -> bool:
    """Whether a sum begins with all microbatches of a member, in the order in which it computes them.

    Then autograd adds them up, as it does without helpers.

    Args:
        hops: the route of the sum.
        rank: the member.
        computed: its microbatches.
        begun: the sum begins with what the owner already has.
    """
    return not begun and hops[0].rank == rank and hops[0].microbatches == [*computed]


@dataclass(frozen=True, slots=True)
class StageGradients:
    """Adds up the gradients of one stage. All members call the same method for it.

    Attributes:
        group: of all members.
        owner: rank of the worker that holds the stage.
        parameters: of the stage.
        initial: the gradients that they already have, at an owner that has any; else None.
        under_way: each send that is started is added to it. The caller waits for all of them.
    """

    group: dist.ProcessGroup
    owner: int
    parameters: Sequence[torch.Tensor]
    initial: Gradients | None
    under_way: list[dist.Work] = field(default_factory=list)

    def in_order(
        self, hops: Sequence[ReductionHop], own: Mapping[int, Sequence[Gradients]]
    ) -> Gradients | None:
        """Add up all microbatches in their original order, along a route from member to member.

        Args:
            hops: the route of the sum.
            own: by the number of this worker's hops, what it adds there, in this order; it is changed.

        Returns:
            The sum, at the owner.

        Raises:
            RuntimeError: as torch does, if a member is gone.
        """
        rank = dist.get_rank()
        result: Gradients | None = None
        for number, hop in enumerate(hops):
            if hop.rank != rank:
                continue
            before = hops[number - 1].rank if number > 0 else None
            after = hops[number + 1].rank if number + 1 < len(hops) else None
            terms = [*own[number]]
            if number == 0 and self.initial is not None:
                terms = [self.initial if not terms else _copy(self.initial), *terms]
            result = self._pass_on(before, terms, after)
        return self._with_frozen(result) if rank == self.owner and result is not None else None

    def by_member(self, members: Sequence[int], own: Gradients) -> Gradients | None:
        """Add up the sums of all members.

        Args:
            members: the ranks that compute microbatches.
            own: this worker's sum; it is changed.

        Returns:
            The sum, at the owner.

        Raises:
            RuntimeError: as torch does, if a member is gone.
        """
        rank = dist.get_rank()
        if rank != self.owner:
            self._pass_on(None, [own], self.owner)
            return None
        total: Gradients = [None] * len(self.parameters)
        if self.initial is not None:
            total = _copy(self.initial)
        for member in members:
            received = own if member == rank else self._pass_on(member, [], None)
            total = [_add([first, second]) for first, second in zip(total, received, strict=True)]
        return self._with_frozen(total)

    def _with_frozen(self, total: Gradients) -> Gradients:
        """The sum, and the gradients that parameters had before they were frozen."""
        if self.initial is None:
            return total
        both = zip(self.parameters, self.initial, total, strict=True)
        return [gradient if parameter.requires_grad else before for parameter, before, gradient in both]

    def _pass_on(self, before: int | None, terms: Sequence[Gradients], after: int | None) -> Gradients:
        """Take a sum from one member, add to it, and give it to another one.

        First travels which parameters have a gradient, then all pieces.
        """
        pieces = pieces_of({n: p for n, p in enumerate(self.parameters) if p.requires_grad})
        arriving: list[tuple[dist.Work, torch.Tensor]] = []
        begun = torch.zeros(len(self.parameters), dtype=torch.uint8, device=self.parameters[0].device)
        if before is not None:
            link = Link(self.group, before, dist.get_rank())
            known = link.carry(begun)
            flats = [piece.empty() for piece in pieces]
            arriving = [(link.carry(flat), flat) for flat in flats]
            wait_for([known])
        has = begun.tolist()
        ours = [any(term[number] is not None for term in terms) for number in range(len(has))]
        if after is not None:
            link = Link(self.group, dist.get_rank(), after)
            both = [int(mine or others) for mine, others in zip(ours, has, strict=True)]
            self.under_way.append(link.carry(torch.tensor(both, dtype=torch.uint8, device=begun.device)))
        total: Gradients = [None] * len(has)
        for place, piece in enumerate(pieces):
            received: Mapping[int, torch.Tensor] = {}
            flat = None
            if arriving:
                work, flat = arriving[place]
                wait_for([work])
                views = zip(piece.keys, piece.views(flat), strict=True)
                received = {number: view for number, view in views if has[number]}
            for number in piece.keys:
                total[number] = _add([received.get(number), *(term[number] for term in terms)])
            if after is not None:
                own = [total[number] for number in piece.keys]
                self.under_way.append(link.carry(_joined(piece, own, flat, received)))
        return total


def _joined(
    piece: Piece[int],
    total: Gradients,
    flat: torch.Tensor | None,
    received: Mapping[int, torch.Tensor],
) -> torch.Tensor:
    """A piece of a sum as one tensor: the one that has arrived, if all was added to that in place."""
    if flat is not None and len(received) == sum(gradient is not None for gradient in total):
        return flat
    return piece.join(total)


def _add(terms: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Adds up as autograd does: a sum begins with its first term, not with zero. That term is changed."""
    total = None
    with torch.no_grad():
        for term in terms:
            if total is None:
                total = term
            elif term is not None:
                total += term
    return total


def _copy(gradients: Gradients) -> Gradients:
    return [None if gradient is None else gradient.clone() for gradient in gradients]
