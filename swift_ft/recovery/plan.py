"""From the workers' reports to the plan of a recovery: a pure function (paper §3, §5.1).

:func:`make_plan` chooses the cheapest :class:`RecoveryMode` that is possible, in six stages:

1. Reconcile replicas (§4). A worker whose state is lost or half updated gets a replica's.
2. Choose replay targets (§5.1). A part without a usable replica is rebuilt from its checkpoint and from the
   logs of its neighbours. A neighbour that did not log what this needs is rebuilt as well.
3. Form replay groups (Appendix B). Rebuilt workers that need each other replay together.
4. Check whether survivors can keep their state. If not, all workers return to the newest state that is in
   the memory of the living, or else load the committed checkpoint.
5. Assign a task to each worker.
6. Assign helpers to the replays (§5.2).

Stages 1 to 3 are in `recovery/targets.py`. The plan is a frozen value that can be printed, tested and costed
before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.helpers import ParallelReplay, assign_helpers
from swift_ft.recovery.layer_replicas import reconcile_layers, why_no_layers
from swift_ft.recovery.memory import MemoryCheckpoint, newest_in_memory
from swift_ft.recovery.reconcile import Transfer
from swift_ft.recovery.targets import Target, choose_replays, reconcile
from swift_ft.recovery.topology import Topology


class RecoveryMode(StrEnum):
    """The mode in which the job resumes training."""

    START = "start"
    """No worker has state. All load the committed checkpoint, or begin from scratch if there is none."""
    CONTINUE = "continue"
    """All workers still have their state: the network broke, but no machine died."""
    LAYOUT = "layout"
    """All workers keep their state, and layers move between them: nothing was lost."""
    REPLICA = "replica"
    """Lost state comes from live replicas (§4). Only the interrupted iteration is computed again."""
    REPLAY = "replay"
    """Lost state is rebuilt from its checkpoint and the logs (§5). Survivors keep theirs."""
    MEMORY = "memory"
    """All workers return, in their processes, to a recent state that is in the memory of the living."""
    FALLBACK = "fallback"
    """All workers load the committed global checkpoint."""
    RESTART = "restart"
    """All processes start again: there is no checkpoint to load, the script has no session, or the processes
    differ in more than their states."""


@dataclass(frozen=True, slots=True)
class Task:
    """One worker's part of a plan.

    Attributes:
        load: iteration of the checkpoint to load first; None to keep the present state.
        begin: iterations that the state has completed after loading.
        replay_until: iterations ``begin .. replay_until - 1`` are replayed from the log.
        resend_from_log: the worker is one iteration ahead. It resends its messages of the interrupted
            iteration from its log instead of computing them again.
        replay_group: the workers that replay together, including this one. They send messages to each other
            again instead of reading them from a log, and replicas among them average their gradients. Empty
            if the worker replays alone.
        undo: parameters whose last update is undone, before any transfer.
        back: the worker has completed iteration ``begin``, and takes it back before any transfer. ``undo`` is
            empty if that iteration has updated nothing.
        holder: the worker in whose memory the state to load is, this one if it kept a copy; None if the state
            to load is in the store.
    """

    load: int | None
    begin: int
    replay_until: int
    resend_from_log: bool = False
    replay_group: tuple[int, ...] = ()
    undo: tuple[int, ...] = ()
    back: bool = False
    holder: int | None = None

    @property
    def end(self) -> int:
        """Iterations that the state has completed when all workers are live."""
        return max(self.begin, self.replay_until)

    @property
    def replays(self) -> bool:
        """The worker replays at least one iteration."""
        return self.begin < self.replay_until

    @property
    def idle(self) -> bool:
        """The worker has nothing to load and nothing to replay."""
        return self.load is None and not self.replays


@dataclass(frozen=True, slots=True)
class Plan:
    """The tasks that bring each worker to the consensus iteration.

    Attributes:
        mode: the recovery mode.
        resume: the consensus iteration, the first one to run live.
        tasks: by rank; empty for a restart.
        transfers: state that replicas send to each other once the new process group exists, in this order.
        warm_up: the pipeline has to repeat its one-time exchange of shapes live.
        reason: why no cheaper mode was possible; empty for the cheapest.
        parallel_replays: replays in which survivors help.
        parts_from: before the consensus iteration, all workers do the script's parts between two steps from
            this one on (``session.between()``); None if they are done.
        new_layout: the number of layers of each stage from now on; None if that stays as it is.
    """

    mode: RecoveryMode
    resume: int
    tasks: Mapping[int, Task] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    warm_up: bool = False
    reason: str = ""
    parallel_replays: tuple[ParallelReplay, ...] = ()
    parts_from: int | None = None
    new_layout: tuple[int, ...] | None = None

    def parallel_replay_of(self, rank: int) -> ParallelReplay | None:
        """The parallel replay in which a worker takes part, as an owner or a helper."""
        return next((replay for replay in self.parallel_replays if rank in replay.members), None)


def make_plan(
    statuses: Mapping[int, StatusReported],
    *,
    workers_per_machine: int,
    committed: int | None,
    fallback_reason: str | None = None,
    allow_helpers: bool = True,
    log_gap_before: Mapping[int, int] | None = None,
    allow_memory: bool = True,
    layout_since: int | None = None,
    layers: Mapping[int, Sequence[int]] | None = None,
) -> Plan:
    """Choose the cheapest recovery mode that is possible, and what each worker does in it.

    Args:
        statuses: one report per rank.
        workers_per_machine: workers per machine; messages inside a machine are not logged.
        committed: iteration of the last committed global checkpoint.
        fallback_reason: why the logs cannot be used, if so.
        allow_helpers: survivors may help in a replay. False once one of them has declined.
        log_gap_before: by rank, the iteration before which a worker's log has gaps because a replica gave it
            its state. All these iterations are after ``committed``.
        allow_memory: workers may return to a state in memory. False once that has failed.
        layout_since: the iteration at which the layers of a LayerStack moved last. Copies up to that one in
            memory are of other layers.
        layers: of each rank, where pipelines of a LayerStack are replicas of each other; None elsewhere.

    Returns:
        The plan. Its mode is ``RESTART`` if all processes have to start again.
    """
    memory = newest_in_memory(statuses) if allow_memory else None
    # Copies up to the last move are of other layers (decision 15); older ones than the checkpoint cost more.
    oldest = max(committed or 0, 0 if layout_since is None else layout_since + 1)
    if memory is not None and memory.iteration < oldest:
        memory = None
    if all(status.iteration is None for status in statuses.values()):
        if memory is not None:  # all were about to return to it, or to another one
            return _fall_back(statuses, committed, memory, fallback_reason or "no worker has its state")
        # What is left in memory is not what the script began with, so nobody begins from it (decision 94).
        if committed is None and (spoiled := [rank for rank, s in statuses.items() if not s.fresh]):
            lost = f"worker {min(spoiled)} has lost its state, and no longer has what its script began with"
            return _fall_back(statuses, committed, memory, lost)
        return _load_checkpoint(RecoveryMode.START, statuses, committed, fallback_reason or "")
    if fallback_reason:
        return _fall_back(statuses, committed, memory, fallback_reason)

    if layers is not None:
        return _by_layer(statuses, layers, committed) or _fall_back(
            statuses, committed, memory, why_no_layers(statuses, layers)
        )
    topology = Topology.of(statuses, workers_per_machine)
    reconciled, transfers = reconcile(statuses, topology)
    targets, replay_groups = choose_replays(statuses, reconciled, topology, committed, log_gap_before or {})
    # A source that is rebuilt after all is rebuilt with all its replicas: nothing is left to send.
    transfers = tuple(transfer for transfer in transfers if targets[transfer.source].live)
    if reason := _why_survivors_lose_state(statuses, targets, committed):
        return _fall_back(statuses, committed, memory, reason)
    resume = min(_live_iterations(targets).values())
    tasks = _assign_tasks(targets, replay_groups, resume, committed)
    return Plan(
        mode=_mode(tasks, transfers),
        resume=resume,
        tasks=tasks,
        transfers=transfers,
        warm_up=_needs_warm_up(statuses),
        parallel_replays=_parallel_replays(tasks, statuses) if allow_helpers else (),
        parts_from=_parts_from(statuses, targets, resume, committed),
    )


def _by_layer(
    statuses: Mapping[int, StatusReported], layers: Mapping[int, Sequence[int]], committed: int | None
) -> Plan | None:
    """The plan of pipelines that are replicas of each other: nothing is replayed. None if it cannot be."""
    if (found := reconcile_layers(statuses, layers)) is None:
        return None
    at = found.iteration
    tasks = {
        rank: Task(
            None,
            # It has all averages already: as a replay of one step it computes nothing (decision 17).
            at - (rank in found.completing),
            at,
            undo=found.undo.get(rank, ()),
            back=rank in found.undo and status.iteration == at + 1,
        )
        for rank, status in statuses.items()
    }
    targets = {rank: Target(at, live=True) for rank in statuses}
    changes = found.transfers or found.undo or found.completing
    return Plan(
        mode=RecoveryMode.REPLICA if changes else RecoveryMode.CONTINUE,
        resume=at,
        tasks=tasks,
        transfers=found.transfers,
        warm_up=_needs_warm_up(statuses),
        parts_from=_parts_from(statuses, targets, at, committed),
    )


def _live_iterations(targets: Mapping[int, Target]) -> dict[int, int]:
    return {rank: t.iteration for rank, t in targets.items() if t.live and t.iteration is not None}


def _why_survivors_lose_state(
    statuses: Mapping[int, StatusReported], targets: Mapping[int, Target], committed: int | None
) -> str:
    """Stage 4: the first reason why the survivors cannot keep their state, or an empty string."""
    for rank, target in targets.items():
        if target.dirty:
            return f"worker {rank} stopped in the middle of an update: {target.dirty}"
    live = _live_iterations(targets)
    if not live:
        return "no worker with a complete state is left" + _why_gaps(statuses, committed) + _why_all(statuses)
    return (
        _why_survivors_disagree(live, committed)
        or _why_no_replay(statuses, targets, live, committed)
        or _why_no_resend(statuses, targets, live)
    )


def _why_gaps(statuses: Mapping[int, StatusReported], committed: int | None) -> str:
    """The reasons for gaps in logs, where workers with a live state have to go back because of them."""
    gaps = {
        rank: status.log_gap_reason
        for rank, status in statuses.items()
        if status.live and status.log_gap_before > (committed or 0)
    }
    return "".join(f"; the log of worker {rank} has a gap: {reason}" for rank, reason in gaps.items())


def _why_all(statuses: Mapping[int, StatusReported]) -> str:
    """The reason, a call of the script, for which workers with a live state have to go back; often empty."""
    reasons = [s.together_reason for s in statuses.values() if s.live and s.together_reason]
    return f"; {min(reasons)}" if reasons else ""


def _why_survivors_disagree(live: Mapping[int, int], committed: int | None) -> str:
    resume, latest = min(live.values()), max(live.values())
    # Steps communicate, so survivors of one training are one iteration apart at most (decision 25).
    if latest > resume + 1:
        return f"survivors are {latest - resume} iterations apart"
    if committed is not None and resume < committed:  # a commit deletes the logs before it
        behind = min(rank for rank, iteration in live.items() if iteration == resume)
        return f"worker {behind} is at iteration {resume}, before the committed checkpoint {committed}"
    return ""


def _why_no_replay(
    statuses: Mapping[int, StatusReported],
    targets: Mapping[int, Target],
    live: Mapping[int, int],
    committed: int | None,
) -> str:
    resume = min(live.values())
    # In order, since all participants must find the same reason (decision 4).
    for rank in sorted(targets.keys() - live.keys()):
        if not statuses[rank].stages:  # nothing is logged without a pipeline
            if not statuses[rank].holds:
                return f"no other worker has the state of worker {rank}"
            parts = ", ".join(statuses[rank].holds)
            return f"all replicas of {parts} are lost"
        begin = targets[rank].begin(committed)
        if begin is None:
            return "the lost state was never in a checkpoint"
        if begin > resume:
            return f"worker {rank} is at iteration {begin}, after the consensus iteration {resume}"
    return ""


def _why_no_resend(
    statuses: Mapping[int, StatusReported], targets: Mapping[int, Target], live: Mapping[int, int]
) -> str:
    resume = min(live.values())
    ahead = sorted(rank for rank, iteration in live.items() if iteration > resume)
    for rank in ahead:
        if not statuses[rank].stages:
            return (
                f"worker {rank} has completed iteration {resume}, which workers with other shards have "
                "not, and cannot undo it: that takes optimizers which swift_ft.wrap_optimizer() has wrapped, "
                "and parameters that nothing else has changed since"
            )
        # A state that a replica sent comes without a log of what led to it.
        if targets[rank].received or targets[rank].undo:
            return (
                f"worker {rank} would have to resend iteration {resume}, "
                "but its own state was just reconciled with its replicas"
            )
    rounded = sorted(rank for rank, target in targets.items() if target.undo and statuses[rank].rounds)
    if ahead and rounded:
        return (
            f"worker {rounded[0]} undoes its update with other roundings, but worker {ahead[0]} has used "
            f"what it sent in iteration {resume}"
        )
    for rank in ahead:
        if not statuses[rank].can_resend:
            return f"worker {rank} would have to resend iteration {resume}, but kept no copy of what it sent"
    return ""


def _assign_tasks(
    targets: Mapping[int, Target],
    replay_groups: Iterable[tuple[int, ...]],
    resume: int,
    committed: int | None,
) -> dict[int, Task]:
    """Stage 5: what each worker does to reach the consensus iteration."""
    group_of = {rank: members for members in replay_groups for rank in members}
    tasks: dict[tuple[Target, tuple[int, ...]], Task] = {}  # most workers of a large job share one
    found = {}
    for rank, target in targets.items():
        group = group_of.get(rank, ())
        if (task := tasks.get((target, group))) is None:
            task = tasks[target, group] = Task(
                load=committed if target.iteration is None else None,
                begin=target.begin(committed) or 0,
                replay_until=resume,
                resend_from_log=target.live and (target.iteration or 0) > resume,
                replay_group=group,
                undo=target.undo,
                back=target.back,
            )
        found[rank] = task
    return found


def _parts_from(
    statuses: Mapping[int, StatusReported], targets: Mapping[int, Target], resume: int, committed: int | None
) -> int | None:
    """From where the script's parts before the consensus iteration are done again.

    No worker begins that iteration before all have done them, as far as it communicates. A worker
    beyond it cannot go back: then they are not done again. A worker that is rebuilt, or takes over a
    replica's state, may not have done those in which it alone had something to do, such as writing a file.
    Where all have saved the checkpoint of the consensus iteration, all have done them: it comes after them,
    and who loads it has what follows from them.
    """
    live = _live_iterations(targets)
    if resume == committed or any(iteration > resume for iteration in live.values()):
        return None
    here = [s for rank, s in statuses.items() if rank in live and s.iteration == resume]
    some_are_rebuilt = any(not s.live or (s.iteration or 0) < resume for s in statuses.values())
    if some_are_rebuilt and any(s.parts_due for s in here):
        return 0
    return min((s.parts_done for s in here if s.parts_done is not None), default=None)


def _mode(tasks: Mapping[int, Task], transfers: Sequence[Transfer]) -> RecoveryMode:
    if not all(task.idle for task in tasks.values()):
        return RecoveryMode.REPLAY
    if transfers or any(task.undo or task.back for task in tasks.values()):
        return RecoveryMode.REPLICA
    return RecoveryMode.CONTINUE


def _parallel_replays(
    tasks: Mapping[int, Task], statuses: Mapping[int, StatusReported]
) -> tuple[ParallelReplay, ...]:
    """Stage 6: survivors that have nothing else to do help in the replays."""
    replays = {}
    for rank, task in tasks.items():
        owners = task.replay_group or (rank,)
        if task.replays and rank == owners[0]:  # once per group
            replays[owners] = (task.begin, task.replay_until)
    return assign_helpers(replays, statuses, sorted(rank for rank, task in tasks.items() if task.idle))


def _fall_back(
    statuses: Mapping[int, StatusReported],
    committed: int | None,
    memory: MemoryCheckpoint | None,
    reason: str,
) -> Plan:
    """Return to a state in memory, or else to the checkpoint.

    All processes start again where one was in the middle of an update: what its script did there, outside of
    the session's state, nothing takes back.
    """
    if memory is not None:
        at = memory.iteration
        tasks = {rank: Task(at, at, at, holder=memory.holders[rank]) for rank in statuses}
        return Plan(RecoveryMode.MEMORY, at, tasks, warm_up=_needs_warm_up(statuses), reason=reason)
    if committed is None:
        return Plan(RecoveryMode.RESTART, 0, reason=f"{reason}; no checkpoint is committed yet")
    if any(status.dirty for status in statuses.values()):
        return Plan(RecoveryMode.RESTART, committed, reason=reason)
    return _load_checkpoint(RecoveryMode.FALLBACK, statuses, committed, reason)


def _load_checkpoint(
    mode: RecoveryMode, statuses: Mapping[int, StatusReported], committed: int | None, reason: str
) -> Plan:
    resume = committed or 0
    tasks = {rank: Task(load=committed, begin=resume, replay_until=resume) for rank in statuses}
    return Plan(mode, resume, tasks, warm_up=_needs_warm_up(statuses), reason=reason)


def _needs_warm_up(statuses: Mapping[int, StatusReported]) -> bool:
    return not all(status.pipeline_known for status in statuses.values())
