"""Adds up gradients of microbatches that several members computed (paper §5.2).

    in order     what the owner had ─▶ member: + its own ─▶ next: + its own ─▶ ... ─▶ owner    bit-identical
    by member    every member's own sum ─▶ owner                                               other roundings

Floating-point addition is not associative. A sum that travels from member to member adds the microbatches in
their original order. Each member sends it once, however many microbatches it has computed. It travels in
pieces, the last layers first, so that several members work on it at the same time, and what begins it is sent
without a copy, while the last backward pass still computes the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from swift_ft.errors import CannotHelpError
from swift_ft.recovery.helpers import ReductionHop
from swift_ft.runtime.helpers.pieces import Piece, pieces_of
from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import wait_for, wait_on_host
from swift_ft.torch_adapters.pipelining.microbatch import Gradients
from swift_ft.torch_core.tensors import version_of


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
        group: has all members.
        owner: rank of the worker that holds the stage.
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
                # A sum changes its first term, and these are the script's own gradients.
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
            # Adding changes the first term.
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
        pieces = _pieces(self.parameters)
        arriving: list[tuple[dist.Work, torch.Tensor]] = []
        # An optimizer skips a parameter without a gradient, and does not skip one whose gradient is zero.
        begun = torch.zeros(len(self.parameters), dtype=torch.uint8, device=self.parameters[0].device)
        if before is not None:
            link = Link(self.group, before, dist.get_rank())
            known = link.carry(begun)
            flats = [piece.empty() for piece in pieces]
            arriving = [(link.carry(flat), flat) for flat in flats]
            wait_on_host([known], [begun.device])
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


class EarlySum:
    """A sum that leaves its first member piece by piece, while a backward pass still adds to the rest.

    To the next member it looks like any other. Begin it before the last backward pass, with
    :func:`has_all_gradients`.

    Args:
        link: to the next member.
        parameters: of the stage, on the host.
        under_way: each send that is started is added to it.
    """

    def __init__(self, link: Link, parameters: Sequence[torch.Tensor], under_way: list[dist.Work]) -> None:
        self._link, self._parameters, self._under_way = link, parameters, under_way
        self._pieces = deque(_pieces(parameters))
        self._added: set[int] = set()  # numbers of parameters to whose gradients nothing will be added
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # by number, the gradient and its version
        has = torch.tensor([parameter.requires_grad for parameter in parameters], dtype=torch.uint8)
        under_way.append(link.carry(has))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_added, number))
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def finish(self) -> None:
        """The backward pass has ended: send the rest.

        Raises:
            CannotHelpError: it has added to gradients more than once.
            RuntimeError: as torch does, if the next member is gone.
        """
        for hook in self._hooks:
            hook.remove()
        while self._pieces:
            self._send(self._pieces.popleft())
        for number, (gradient, version) in self._sent.items():
            if self._parameters[number].grad is not gradient or version_of(gradient) != version:
                raise CannotHelpError(
                    "a backward pass adds to the gradient of a parameter more than once, so it cannot be "
                    "known when that gradient is complete"
                )

    def _on_added(self, number: int, _: torch.Tensor) -> None:
        self._added.add(number)
        # In order, which is all that the receiver knows of them.
        while self._pieces and self._added.issuperset(self._pieces[0].keys):
            self._send(self._pieces.popleft())

    def _send(self, piece: Piece[int]) -> None:
        gradients = [self._parameters[number].grad for number in piece.keys]
        for number, gradient in zip(piece.keys, gradients, strict=True):
            assert gradient is not None  # all have one
            self._sent[number] = gradient, version_of(gradient)
        self._under_way.append(self._link.carry(piece.join(gradients)))


def has_all_gradients(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each parameter that is trained has a gradient of its own kind already."""
    return all(
        parameter.grad is not None and parameter.grad.layout == torch.strided
        for parameter in parameters
        if parameter.requires_grad
    )


def _pieces(parameters: Sequence[torch.Tensor]) -> list[Piece[int]]:
    """The last ones first: a backward pass comes to them first."""
    trained = [(number, parameter) for number, parameter in enumerate(parameters) if parameter.requires_grad]
    return pieces_of(dict(reversed(trained)))


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
