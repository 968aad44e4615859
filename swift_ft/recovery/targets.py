"""Targets: the source of each worker's state. Stages 1 to 3 of a plan (`recovery/plan.py`). Pure.

A worker's report (:class:`StatusReported`) is a fact. What a plan decides about the worker is its
:class:`Target`. :func:`reconcile` derives targets from reports. :func:`choose_replays` revises them where the
logs lack what a replay needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.reconcile import Reconciliation, Transfer, reconcile_replicas, roll_back_to
from swift_ft.recovery.topology import Topology

_Reconciled = tuple[Mapping[int, StatusReported], Reconciliation | None]
"""The reports of a part's replicas, and how they become equal; None if none of them is usable."""


@dataclass(frozen=True, slots=True)
class Target:
    """The state that one worker continues from, before any replay.

    Attributes:
        iteration: iterations that the state has completed; None to load the committed checkpoint.
        live: the state needs no replay. Otherwise the worker is rebuilt by one.
        dirty: why the state is unusable, if it is.
        received: at least a part of the state comes from a replica.
        undo: parameters whose last update is undone first.
        back: an iteration that the worker has completed is taken back first.
    """

    iteration: int | None
    live: bool
    dirty: str | None = None
    received: bool = False
    undo: tuple[int, ...] = ()
    back: bool = False

    @classmethod
    def reported(cls, status: StatusReported) -> Target:
        """The state that a worker has, without the help of replicas.

        A replay that was interrupted in an update starts over: some parameters are one iteration ahead.
        """
        half_updated = bool(status.updated) and not status.live
        return cls(None if half_updated else status.iteration, status.live, status.dirty)

    def begin(self, committed: int | None) -> int | None:
        """Iterations completed before any replay; None if there is no checkpoint to load."""
        return committed if self.iteration is None else self.iteration


FROM_CHECKPOINT = Target(iteration=None, live=False)
"""The worker loads its part of the committed checkpoint and replays the rest."""


def reconcile(
    statuses: Mapping[int, StatusReported], topology: Topology
) -> tuple[dict[int, Target], tuple[Transfer, ...]]:
    """Stage 1: make the replicas of each part equal (paper §4).

    Args:
        statuses: one report per rank.

    Returns:
        By rank, the state that each worker then has; and the transfers that this takes, in order.
    """
    replica_sets = [{rank: statuses[rank] for rank in ranks} for ranks in topology.replica_sets]
    results: list[_Reconciled] = [(replicas, reconcile_replicas(replicas)) for replicas in replica_sets]
    common = _common_iteration(statuses, topology, results)
    results = _rolled_back(topology, results, common)
    targets: dict[int, Target] = {}
    transfers: list[Transfer] = []
    kept: dict[int, Target] = {}  # by iteration: the one target of all that keep a state as it is
    for replicas, result in results:
        if result is None:
            targets |= {rank: Target.reported(status) for rank, status in replicas.items()}
            continue
        transfers += result.transfers
        received = {rank for transfer in result.transfers for rank in transfer.targets}
        for rank in replicas:
            if rank in received or rank in result.undo:
                targets[rank] = Target(
                    result.iteration,
                    live=True,
                    received=rank in received,
                    undo=result.undo.get(rank, ()),
                    # Not whether parameters are undone: the iteration may have updated nothing.
                    back=rank in result.undo and replicas[rank].iteration == result.iteration + 1,
                )
            elif (same := kept.get(result.iteration)) is not None:
                targets[rank] = same
            else:
                targets[rank] = kept[result.iteration] = Target(result.iteration, live=True)
    return {rank: targets[rank] for rank in statuses}, tuple(transfers)


def _rolled_back(topology: Topology, results: Sequence[_Reconciled], common: int) -> list[_Reconciled]:
    """Take back the iteration that some parts have completed and that cannot be made good for the others.

    One part that goes back may leave others ahead that can only repeat the iteration with it.
    """
    results, done = list(results), -1
    while done != (done := sum(result is not None and result.iteration > common for _, result in results)):
        ahead = _ahead_of_partners(topology, results)
        for number, (replicas, result) in enumerate(results):
            if result is None or result.iteration <= common:
                continue
            alone = not any(status.stages for status in replicas.values())  # nothing to send from a log
            apart = not ahead.isdisjoint(replicas)  # else all of them, and their replicas, would replay
            if alone or apart or result.transfers or result.undo:
                results[number] = replicas, roll_back_to(replicas, common) or result
    return results


def _common_iteration(
    statuses: Mapping[int, StatusReported],
    topology: Topology,
    results: Sequence[_Reconciled],
) -> int:
    """The latest iteration that all parts of the model can continue from.

    A neighbour of a lost part must not skip an iteration by receiving it from a replica: the replay of the
    lost part needs the messages of that iteration, and the neighbour's log would lack them.
    """
    lost = {rank for replicas, result in results if result is None for rank in replicas}
    beside = {other for rank in lost for other in topology.neighbours[rank]} - lost
    own = [statuses[rank].iteration for rank in beside if statuses[rank].live]
    reconciled = [result.iteration for _, result in results if result is not None]
    return min([min(reconciled, default=0), *(iteration for iteration in own if iteration is not None)])


def _ahead_of_partners(topology: Topology, results: Sequence[_Reconciled]) -> set[int]:
    """Ranks that have completed an iteration which others have not that can only repeat it with them."""
    at = {rank: result.iteration for replicas, result in results if result is not None for rank in replicas}
    ahead: set[int] = set()
    for members in {*topology.together.values()}:
        reached = {rank: at[rank] for rank in members if rank in at}
        ahead |= {rank for rank in reached if reached[rank] > min(reached.values())}
    return ahead


def choose_replays(
    statuses: Mapping[int, StatusReported],
    reconciled: Mapping[int, Target],
    topology: Topology,
    committed: int | None,
    log_gap_before: Mapping[int, int],
) -> tuple[dict[int, Target], list[tuple[int, ...]]]:
    """Stages 2 and 3: which workers are rebuilt by a replay, and which of them replay together.

    The members of a replay group begin at one iteration. If theirs differ, all of them load the checkpoint.
    Their replay then needs earlier messages of their neighbours, so the choice is repeated. One or two passes
    are usually enough.

    Args:
        statuses: one report per rank.
        reconciled: the targets of stage 1.
        committed: iteration of the last committed global checkpoint.
        log_gap_before: by rank, the iteration before which a worker's log has gaps.

    Returns:
        The targets, by rank; and the replay groups, each of two or more ranks in ascending order.
    """
    logged_since = _logged_since(statuses, reconciled, log_gap_before)
    targets = _bring_together(reconciled, topology)
    while True:
        # A pass only ever turns workers to the checkpoint, so this ends.
        targets = _add_unlogged_neighbours(targets, logged_since, topology, committed)
        groups = _replay_groups(targets, topology)
        apart = [ranks for ranks in groups if len({targets[r].begin(committed) for r in ranks}) > 1]
        if not apart:
            return targets, groups
        for rank in itertools.chain.from_iterable(apart):
            targets[rank] = replace(targets[rank], iteration=None)


def _bring_together(targets: Mapping[int, Target], topology: Topology) -> dict[int, Target]:
    """Also rebuild workers that can only repeat an iteration together, where some have completed it."""
    targets = dict(targets)
    for members in {*topology.together.values()}:
        # Those behind would need what those ahead have communicated, and no log has it (decision 29).
        if len({targets[rank].iteration for rank in members if targets[rank].live}) > 1:
            for rank in members:
                if targets[rank].live:
                    targets |= dict.fromkeys(topology.replicas_of[rank], FROM_CHECKPOINT)
    return targets


def _logged_since(
    statuses: Mapping[int, StatusReported], targets: Mapping[int, Target], log_gap_before: Mapping[int, int]
) -> dict[int, int]:
    """By rank, the first iteration from which a worker's log is complete up to its target.

    A worker is absent if its log was lost with its machine, or lacks an iteration that a replica completed.
    """
    return {
        rank: max(log_gap_before.get(rank, 0), status.log_gap_before)
        for rank, status in statuses.items()
        if status.live and (status.iteration or 0) >= (targets[rank].iteration or 0)
    }


def _add_unlogged_neighbours(
    targets: Mapping[int, Target],
    logged_since: Mapping[int, int],
    topology: Topology,
    committed: int | None,
) -> dict[int, Target]:
    """Also rebuild live workers whose logs lack messages that a replay needs.

    The log of a rebuilt worker's neighbour lacks them if both are in one group (§5.3), or if a replica gave
    the neighbour its state, now or in an earlier recovery. The neighbour then computes the messages again.
    That takes the gradients of its replicas, so they are rebuilt with it. Members of a group that have no
    replica are rebuilt together, and so are workers whose scripts communicate what no log has.
    """
    targets = dict(targets)
    rebuilt = [rank for rank, target in targets.items() if not target.live]
    groups_done = set[int]()
    while rebuilt:
        rank = rebuilt.pop()
        group, begin = topology.group_of[rank], targets[rank].begin(committed) or 0
        unlogged = [
            other
            for other in topology.neighbours[rank]
            if topology.group_of[other] == group or other not in logged_since or logged_since[other] > begin
        ]
        # Once for each group: for each member it would cost the square of the group's size.
        if group not in groups_done:
            groups_done.add(group)
            unlogged += topology.unreplicated_in.get(group, ())
        unlogged += topology.together.get(rank, ())
        for other in unlogged:
            if targets[other].live:
                # Its messages depend on gradients that all its replicas have averaged (decision 28).
                targets |= dict.fromkeys(topology.replicas_of[other], FROM_CHECKPOINT)
                rebuilt += topology.replicas_of[other]
    return targets


def _replay_groups(targets: Mapping[int, Target], topology: Topology) -> list[tuple[int, ...]]:
    """Rebuilt workers that have to replay together, directly or through others (Appendix B).

    Neighbours do, because no log is left of the messages between them. Replicas do, because they need each
    other's gradients in every iteration. So do workers whose scripts communicate what no log has.
    """
    rebuilt = {rank for rank, target in targets.items() if not target.live}
    partners = {
        rank: [*({*topology.neighbours[rank], *topology.together.get(rank, ())} & rebuilt)]
        for rank in rebuilt
    }
    for replicas in topology.replica_sets:
        # A chain of pairs connects replicas as well as all pairs would.
        for rank, other in itertools.pairwise(rank for rank in replicas if rank in rebuilt):
            partners[rank].append(other)
            partners[other].append(rank)
    groups = []
    while partners:
        rank, due = partners.popitem()
        members = [rank]
        while due:
            if (rank := due.pop()) in partners:
                members.append(rank)
                due += partners.pop(rank)
        if len(members) > 1:
            groups.append(tuple(sorted(members)))
    return groups
