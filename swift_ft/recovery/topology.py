"""Dependencies between workers: replicas, neighbours in a pipeline, recovery groups. Pure.

A plan needs these answers for every worker. :meth:`Topology.of` computes them once, in time linear in the
number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from swift_ft.recovery.events import StatusReported

WHOLE_MODEL = ("the model",)
"""The parts of a worker that has no shard and no stage."""


def is_whole_model(holds: tuple[str, ...]) -> bool:
    """Whether a worker that holds these parts has no shard of the model, and no stage."""
    return holds == WHOLE_MODEL


@dataclass(frozen=True, slots=True)
class Topology:
    """The dependences between the workers of a job: replicas, messages, groups.

    Attributes:
        replica_sets: ranks that hold the same parts of the model (paper §4). A worker without a replica is a
            set of its own.
        replicas_of: by rank, the replica set that it belongs to.
        neighbours: by rank, the workers with which it exchanges messages.
        group_of: by rank, its recovery group (§5.3). Messages inside a group are not logged.
        unreplicated_in: by group, the members without a replica.
        together: by rank, all workers that are rebuilt whenever it is, because no log has what their scripts
            communicate (:attr:`StatusReported.together`), itself included. Only ranks that have others.
    """

    replica_sets: tuple[tuple[int, ...], ...]
    replicas_of: Mapping[int, tuple[int, ...]]
    neighbours: Mapping[int, Set[int]]
    group_of: Mapping[int, int]
    unreplicated_in: Mapping[int, Sequence[int]]
    together: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, statuses: Mapping[int, StatusReported], workers_per_machine: int) -> Topology:
        """The topology that the workers' reports describe.

        Args:
            statuses: one report per rank.
            workers_per_machine: workers per machine. A machine whose workers name no group is a group.
        """
        sets = replica_sets(statuses)
        # Workers of one machine are lost together, and a log of what they send each other with them.
        group_of = {
            rank: rank // workers_per_machine if s.group is None else s.group for rank, s in statuses.items()
        }
        unreplicated: dict[int, list[int]] = {}
        for rank in (members[0] for members in sets if len(members) == 1):
            unreplicated.setdefault(group_of[rank], []).append(rank)
        return cls(
            replica_sets=tuple(sets),
            replicas_of={rank: members for members in sets for rank in members},
            neighbours=_neighbours(statuses),
            group_of=group_of,
            unreplicated_in=unreplicated,
            together=_together(statuses),
        )


def replica_sets(statuses: Mapping[int, StatusReported]) -> list[tuple[int, ...]]:
    """Ranks that hold the same parts, one tuple per set, ordered by their first rank.

    What a worker holds makes it a replica, not how its gradients are averaged. A worker that holds no named
    part is a set of its own. A set is in ascending order or, in pipelines of a LayerStack, in theirs.
    """
    sets: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(statuses, key=lambda rank: _order(statuses[rank])):
        sets.setdefault(statuses[rank].holds or (f"worker {rank}",), []).append(rank)
    return [tuple(ranks) for ranks in sets.values()]


def checkpoint_owner(rank: int, statuses: Mapping[int, StatusReported]) -> int:
    """The worker that saves checkpoints for all replicas of ``rank``: the first of them."""
    holds = statuses[rank].holds if rank in statuses else ()
    if not holds:
        return rank
    return min((s for s in statuses.values() if s.holds == holds), key=_order).rank


def _order(status: StatusReported) -> tuple[int, int]:
    """The place of a worker among its replicas."""
    # Cuts of pipelines may be unlike: only all workers of one of them have each layer.
    return status.pipeline if status.layers else 0, status.rank


def _together(statuses: Mapping[int, StatusReported]) -> dict[int, tuple[int, ...]]:
    """Workers that replay together, directly or through others, by rank. One report of a pair is enough."""
    partners: dict[int, set[int]] = {}
    for rank, status in statuses.items():
        for other in status.together:
            if other != rank and other in statuses:
                partners.setdefault(rank, set()).add(other)
                # The other one may not have made the call yet, and so may not name this one (decision 29).
                partners.setdefault(other, set()).add(rank)
    found: dict[int, tuple[int, ...]] = {}
    for first in sorted(partners):
        if first in found:
            continue
        members, due = {first}, [first]
        while due:
            new = partners[due.pop()] - members
            members |= new
            due += new
        found |= dict.fromkeys(members, tuple(sorted(members)))
    return found


def _neighbours(statuses: Mapping[int, StatusReported]) -> dict[int, set[int]]:
    """Workers that hold adjacent or linked stages of one pipeline, by rank."""
    # By pipeline, since replicas exchange gradients but no messages.
    holder = {(s.pipeline, stage): rank for rank, s in statuses.items() for stage in s.stages}
    pairs = [(rank, holder.get((pipeline, stage + 1))) for (pipeline, stage), rank in holder.items()]
    # Gradients of tied parameters and skipped connections are messages as well (decision 30).
    pairs += [(rank, holder.get((s.pipeline, stage))) for rank, s in statuses.items() for stage in s.linked]
    neighbours: dict[int, set[int]] = {rank: set() for rank in statuses}
    for rank, other in pairs:
        if other is not None and other != rank:
            neighbours[rank].add(other)
            neighbours[other].add(rank)
    return neighbours
