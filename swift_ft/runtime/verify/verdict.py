"""Decides where computations of one step began to differ, and on which workers. Pure.

A worker is at fault if the first thing that differs on it is one that it has made itself, of inputs that did
not differ: a message, what it contributes to a collective, or, if no worker has given anything unlike, its
state at the end. All that follows from a wrong input differs as well, and is nobody's fault. Such an input
may be a sum: if all have contributed what they should and it differs, something was wrong between them.

    worker 0   gave ══ gave ══ got  ≠≠ gave ≠≠ state ≠≠       it got what differs: not at fault
    worker 1   got  ══ gave ≠≠ state ≠≠                       at fault, from its second output on

Two computations that differ do not show which of them is wrong. The third one does.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swift_ft.checkpoint.state_digest import differing
from swift_ft.runtime.verify.evidence import STATE, Entry, Evidence

_MOST_NAMES = 16

PAIRS = ((0, 1), (1, 2), (0, 2))
"""The pairs of three computations, by their numbers from 0."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One output that differs between two computations of a step.

    Attributes:
        place: see :class:`swift_ft.torch_core.outputs.Output`, as for the next two.
        members: see there.
        received: see there.
        names: tensors that differ.
    """

    place: str
    members: tuple[int, ...]
    received: bool
    names: tuple[str, ...]


Differences = tuple[Difference, ...]
"""On one worker, the earliest first."""


def differences(one: Evidence, other: Evidence) -> Differences:
    """The differences between two computations of a step on this worker."""
    found = []
    for place in {**one.entries, **other.entries}:
        first, second = one.entries.get(place), other.entries.get(place)
        of = first or second
        assert of is not None
        names = differing(_digests(first), _digests(second))
        if names or first is None or second is None:
            found.append(Difference(place, of.members, of.received, tuple(names[:_MOST_NAMES])))
    return tuple(found)


def _digests(entry: Entry | None) -> Mapping[str, int]:
    return {} if entry is None else entry.digests


@dataclass(frozen=True, slots=True)
class Fault:
    """The first difference that a worker has made itself.

    Attributes:
        place: where.
        names: of the tensors that differ there.
    """

    place: str
    names: tuple[str, ...]


def own_fault(rank: int, places: Mapping[str, int], all_differences: Sequence[Differences]) -> Fault | None:
    """The fault of this worker, as far as it can be one; None if its first difference came from elsewhere.

    Args:
        rank: the worker.
        places: the position of each of its outputs.
        all_differences: of all workers, by rank.
    """
    own = all_differences[rank]
    if not own or own[0].received:
        return None
    position = places.get(own[0].place, -1)
    reached = min(
        (
            places.get(difference.place, -1)
            for other, of_other in enumerate(all_differences)
            if other != rank
            for difference in of_other
            if not difference.received and rank in difference.members
        ),
        default=math.inf,
    )
    # Its contribution to the very same collective does not depend on the others'.
    return Fault(own[0].place, own[0].names) if reached >= position else None


class Kind(StrEnum):
    """The meaning of a difference."""

    ONCE = "once"
    """Two of three computations agree: a processor, or its memory, was wrong once."""
    EACH_TIME = "each time"
    """All three differ, and others with the same stages, or earlier steps, show that it is deterministic."""
    NOT_DETERMINISTIC = "not deterministic"
    """All three differ, and nothing shows that they should not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on three computations of a step, the same on all workers.

    Attributes:
        kind: what the difference means.
        faults: by rank, of the workers at fault: one, unless several differ by themselves.
        right: the last computation, which counts, is one of two that agree.
        arrived: if no worker is at fault, the first thing that differs where it came from others.
    """

    kind: Kind
    faults: Mapping[int, Fault]
    right: bool
    arrived: Fault | None = None

    @property
    def named(self) -> bool:
        """Whether a machine is to blame."""
        return self.kind != Kind.NOT_DETERMINISTIC


@dataclass(frozen=True, slots=True)
class Account:
    """One worker's account of three computations of a step, for all others.

    Attributes:
        pairs: its differences, by the pairs of :data:`PAIRS`.
        gives: it gave something to others.
        proven: verified steps of this process so far that came out alike.
    """

    pairs: tuple[Differences, ...]
    gives: bool
    proven: int


def account_of(runs: Sequence[Evidence], proven: int) -> Account:
    """The account of three computations on this worker.

    Args:
        runs: the evidence of each.
        proven: see :class:`Account`.
    """
    pairs = tuple(differences(runs[one], runs[other]) for one, other in PAIRS)
    return Account(pairs, runs[0].has_outputs, proven)


def own_faults(rank: int, places: Mapping[str, int], accounts: Sequence[Account]) -> list[Fault | None]:
    """The faults of this worker, by the pairs of :data:`PAIRS`."""
    return [
        own_fault(rank, places, [account.pairs[pair] for account in accounts]) for pair in range(len(PAIRS))
    ]


def judge(
    accounts: Sequence[Account], faults: Sequence[Sequence[Fault | None]], places: Sequence[Hashable]
) -> Verdict:
    """The verdict.

    Args:
        accounts: of all workers, by rank.
        faults: of each of them, by the pairs of :data:`PAIRS`.
        places: by rank, the part of the model that a worker computes. Equal ones compute the same.
    """
    first_second, second_third, first_third = (
        any(account.pairs[pair] for account in accounts) for pair in range(len(PAIRS))
    )
    if not (second_third and first_third):
        # The third agrees with one of them on all workers, so the other one is wrong.
        assert first_second
        blamed = _blamed([of_rank[0] for of_rank in faults])
        return Verdict(Kind.ONCE, blamed, right=True, arrived=None if blamed else _arrived(accounts))
    # Not deterministic, or wrong in more than one of them.
    blamed = _blamed([next((f for f in of_rank if f is not None), None) for of_rank in faults])
    alike = {
        place
        for place, account in zip(places, accounts, strict=True)
        if account.gives
        and not any(d.place != STATE and not d.received for pair in account.pairs for d in pair)
    }
    shown = bool(blamed) and all(places[rank] in alike for rank in blamed)
    deterministic = shown or any(account.proven for account in accounts)
    some = 0 < len(blamed) < max(2, len(accounts))
    kind = Kind.EACH_TIME if deterministic and some else Kind.NOT_DETERMINISTIC
    return Verdict(kind, blamed, right=False, arrived=None if blamed else _arrived(accounts))


def _arrived(accounts: Sequence[Account]) -> Fault | None:
    """The first difference on a worker whose first one came from others."""
    got = (of_pair[0] for account in accounts for of_pair in account.pairs if of_pair)
    return next((Fault(first.place, first.names) for first in got if first.received), None)


def _blamed(faults: Sequence[Fault | None]) -> dict[int, Fault]:
    """Those whose outputs differ; where none does, those whose state differs."""
    found = {rank: fault for rank, fault in enumerate(faults) if fault is not None}
    return {rank: fault for rank, fault in found.items() if fault.place != STATE} or found
