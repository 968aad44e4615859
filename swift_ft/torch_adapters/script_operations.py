"""Operations on the script's process groups, and the decision about each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from swift_ft.torch_core.tensors import tensors_in

ALIKE = (
    *("allreduce", "allreduce_coalesced", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced"),
)
"""Collectives that give the same tensors to all members of a group. Not every torch has all of them."""

SCATTERED_SUMS = (
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""Those of the next that gloo has not: who waits for one waits for a sum of all, and takes its part of it."""

PERSONAL = (
    *("reduce", "gather", "gather_single", "gather_into_tensor", "scatter"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
    *SCATTERED_SUMS,
)
"""Collectives that give each member tensors of its own."""

POINT_TO_POINT = ("send", "recv", "recv_anysource")
"""Between two members."""

_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send")
_GIVEN = {
    name: 0 if name in _IN_PLACE else 1
    for name in (*ALIKE, *PERSONAL, *POINT_TO_POINT)
    if name not in ("barrier", "monitored_barrier", "recv", "recv_anysource")
}
"""The argument with the tensors that a worker gives: the second one where the first is for the results."""

_NO_TENSORS = ("barrier", "monitored_barrier")
_FILLS_NOTHING = (*_NO_TENSORS, "send", "reduce", "gather", "gather_single", "gather_into_tensor")
"""Operations after which the first argument of some worker is what it was, or anything."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the script on one of its groups.

    Attributes:
        name: torch's name of it.
        group: torch's name of the group.
        members: global ranks, in the order of their ranks in the group.
        tensors: what the operation gives to this worker, or what this worker sends.
        peer: the global rank on the other side of a point-to-point operation; None if it may be any, and for
            a collective.
        source: the global rank whose tensors all get; None if it is not a broadcast.
        given: what this worker gives to the others. A broadcast's others have no say in it.
        tag: by which both sides match a message; 0 where they go by the order of messages alone.
        kept: copies of ``tensors``, made as it ended; none where they are read at once.
    """

    name: str
    group: str
    members: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    peer: int | None = None
    source: int | None = None
    given: tuple[torch.Tensor, ...] = ()
    tag: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls, name: str, group: str, members: Sequence[int], args: Sequence[Any], tag: int = 0
    ) -> Operation:
        """From the arguments of a method of ``ProcessGroup``: what it gives comes first."""
        tensors = () if name in _NO_TENSORS else tuple(tensors_in(args[0]))
        peer = members[args[1]] if name in ("send", "recv") else None
        source = members[_root(args)] if name == "broadcast" else None
        given = tuple(tensors_in(args[_GIVEN[name]])) if name in _GIVEN else ()
        return cls(name, group, tuple(members), tensors, peer, source, given, tag)

    def keep(self) -> None:
        """It has ended, and what the script does with its tensors next must not change what is logged."""
        self.kept.extend(tensor.detach().clone() for tensor in self.tensors)

    @property
    def gives_to_all(self) -> bool:
        """Whether each worker that takes part gets tensors: in others only one does."""
        return self.name not in _FILLS_NOTHING

    @property
    def nbytes(self) -> int:
        """Payload."""
        return sum(tensor.nbytes for tensor in self.tensors)


class OperationInterceptor(Protocol):
    """Decides about each operation of the script. The thread that begins the operation makes all calls."""

    def begin(self, operation: Operation) -> Callable[[], None] | None:
        """An operation is about to begin.

        Returns:
            What to call once it is over and its tensors are filled; None if it need not begin: its tensors
            have been filled, or no one waits for them.

        Raises:
            UsageError: it cannot be served in a replay.
            RecoveryError: it has to be served, and is in no log.
        """


class GroupInterceptor(OperationInterceptor, Protocol):
    """Is asked first, and once for all groups. Often it looks at no tensors, and they need not be found."""

    def begin_unseen(self, name: str, workers: int) -> Callable[[], None] | None:
        """An operation is about to begin.

        Args:
            name: torch's name of it.
            workers: how many members its group has.

        Returns:
            What to call once it is over; None where :meth:`begin` has to be asked.

        Raises:
            UsageError: it has no place here.
        """


def _root(args: Sequence[Any]) -> int:
    """Of the arguments of a broadcast: in the group. torch gives options, or the rank itself, or neither."""
    given = args[1] if len(args) > 1 else 0
    return int(getattr(given, "rootRank", given))
