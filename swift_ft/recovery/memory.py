"""The newest state that all workers can return to from the memory of living machines. Pure.

Every few iterations each worker keeps a copy of its state in its host's memory, and sends one to a worker of
another machine, which holds it: in another failure domain (a rack, a switch), so that both are not lost
together. All workers must return to the same iteration.

    worker     keeps    holds                after the loss of worker 1: iteration 15 is everywhere
    0          10 15    10 15 of worker 2    0: its own      1: from worker 2
    1 (lost)   -        -                    2: its own
    2          10 15    10 15 of worker 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_ft.recovery.events import StatusReported


@dataclass(frozen=True, slots=True)
class MemoryCheckpoint:
    """One state of all workers, in the memory of the living.

    Attributes:
        iteration: completed iterations.
        holders: by rank, the worker in whose memory that worker's state is: itself, if it kept a copy.
    """

    iteration: int
    holders: Mapping[int, int]


def newest_in_memory(
    statuses: Mapping[int, StatusReported], workers: int | None = None
) -> MemoryCheckpoint | None:
    """The newest state of which the living have all parts, by their reports; None without any.

    Args:
        statuses: their reports.
        workers: of the job, lost ones too; None if all have reported.
    """
    places: dict[int, dict[int, int]] = {}  # by iteration and rank, the holder
    for rank, status in sorted(statuses.items()):
        if status.held_of is not None:
            for iteration in status.held:
                places.setdefault(iteration, {}).setdefault(status.held_of, rank)
    for rank, status in statuses.items():
        for iteration in status.kept:
            places.setdefault(iteration, {})[rank] = rank
    parts = len(statuses) if workers is None else workers
    complete = [iteration for iteration, holders in places.items() if len(holders) == parts]
    if not complete:
        return None
    return MemoryCheckpoint(newest := max(complete), places[newest])


@dataclass(frozen=True, slots=True)
class CopyPlacement:
    """In whose memory the copies of each worker are. Each worker holds those of one other worker.

    Attributes:
        holders: by rank, the worker that holds its copies. It is on another machine.
        owners: by rank, the worker whose copies it holds: the inverse.
        exposed: slots whose copies are in their own failure domain, because the others have too few machines.
    """

    holders: tuple[int, ...]
    owners: tuple[int, ...]
    exposed: tuple[int, ...]

    @classmethod
    def of(cls, domains: Sequence[str], workers_per_machine: int) -> CopyPlacement | None:
        """The placement for machines in these failure domains; None for a single machine.

        Args:
            domains: of the machine in each slot; empty for a machine that is a domain of its own.
            workers_per_machine: a worker's copies go to the worker of the same local rank.
        """
        if len(domains) < 2:
            return None
        # A pure function of the members, so nobody has to negotiate (decision 84).
        slots = holding_slots(domains)
        workers = range(workers_per_machine)
        holders = [slot * workers_per_machine + local for slot in slots for local in workers]
        owners = [0] * len(holders)
        for owner, holder in enumerate(holders):
            owners[holder] = owner
        keys = _keys(domains)
        exposed = tuple(slot for slot, holder in enumerate(slots) if keys[slot] == keys[holder])
        return cls(tuple(holders), tuple(owners), exposed)


def holding_slots(domains: Sequence[str]) -> tuple[int, ...]:
    """By slot, the slot of another machine that holds its copies, in another failure domain where possible.

    The machines of each domain stand in a row, and the rows form a ring. Each machine's copies go as many
    places on as the longest row has machines. So they leave each row, unless it has more than half of all
    machines; then as many copies stay in it as must. Where each machine is a domain of its own, the holder is
    the next machine. In a single domain it is the next one, too.

    Args:
        domains: of the machine in each slot, of at least two; empty for a machine that is its own domain.
    """
    keys = _keys(domains)
    rows: dict[tuple[str, int], list[int]] = {}
    for slot, key in enumerate(keys):
        rows.setdefault(key, []).append(slot)
    ring = [slot for row in rows.values() for slot in row]
    longest = max(map(len, rows.values()))
    places = longest if longest < len(ring) else 1
    holders = [0] * len(ring)
    for at, slot in enumerate(ring):
        holders[slot] = ring[(at + places) % len(ring)]
    return tuple(holders)


def _keys(domains: Sequence[str]) -> list[tuple[str, int]]:
    """By slot, a key that machines of one failure domain share. Without a name, the slot is a domain."""
    return [(name, -1 if name else slot) for slot, name in enumerate(domains)]
