"""Which way back: a pure function from where everybody stands to who does what (paper §3, §5.1).

The plan is a frozen value that can be printed, tested and costed before anything moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from swift_ft.recovery.events import Reported
from swift_ft.recovery.ladder import Transfer, agree, groups_by_part, retreat
from swift_ft.recovery.sharing import SharedReplay, share_replays

__all__ = ["Plan", "Task", "Way", "make_plan"]


class Way(StrEnum):
    """How the job gets back to work."""

    START = "start"
    """Nobody has state: everybody begins, from the committed checkpoint if there is one."""
    CONTINUE = "continue"
    """Everybody still has its state (the network broke, nobody died)."""
    REPLICA = "replica"
    """The lost part comes from a living replica; nothing is computed again but the interrupted iteration."""
    REPLAY = "replay"
    """The lost part is rebuilt from its checkpoint and the logs; nobody else goes back."""
    FALLBACK = "fallback"
    """Everybody returns to the committed global checkpoint."""
    RESTART = "restart"
    """All processes start again: there is no checkpoint to return to, or there is no session."""


@dataclass(frozen=True, slots=True)
class Task:
    """One worker's part of a plan.

    Attributes:
        load: iteration of the checkpoint to load first; None to keep the state at hand.
        begin: completed iterations after loading.
        replay_until: iterations ``begin .. replay_until - 1`` are replayed from the log.
        serve: the worker is one iteration ahead: it serves the interrupted iteration from its own log.
        portion: the workers with which it replays jointly, itself included: their messages to each other are
            sent again instead of being read, and replicas among them average their gradients. Empty where it
            replays alone.
        undo: parameters whose last update is taken back, before any transfer.
    """

    load: int | None
    begin: int
    replay_until: int
    serve: bool = False
    portion: tuple[int, ...] = ()
    undo: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Iterations that the state has completed when all are live."""
        return max(self.begin, self.replay_until)

    @property
    def idle(self) -> bool:
        """Nothing to do before going live."""
        return self.load is None and self.begin >= self.replay_until


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what to get everybody to the consensus iteration.

    Attributes:
        way: the way back.
        resume: the consensus iteration, the first one to run live.
        tasks: by rank; empty for a restart.
        transfers: state that goes from replica to replica once the new group stands, in this order.
        warm_up: the pipeline's one-time exchange of shapes must be done live again.
        reason: why not a cheaper way, in words; empty where the cheapest was taken.
        shared: replays in which survivors help.
    """

    way: Way
    resume: int
    tasks: Mapping[int, Task] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    warm_up: bool = False
    reason: str = ""
    shared: tuple[SharedReplay, ...] = ()

    def shared_by(self, rank: int) -> SharedReplay | None:
        """The shared replay in which a worker takes part."""
        return next((shared for shared in self.shared if rank in shared.members), None)


def make_plan(
    standings: Mapping[int, Reported],
    *,
    workers: int,
    committed: int | None,
    must_fall_back: str | None = None,
    unaided: bool = False,
    restored: Mapping[int, int] | None = None,
) -> Plan:
    """Choose the cheapest way back that is possible.

    Args:
        standings: one report per rank.
        workers: workers per machine; messages inside a machine are not logged.
        committed: iteration of the last committed global checkpoint.
        must_fall_back: why the logs cannot be used, if so.
        unaided: no survivor may help in a replay, since one of them could not.
        restored: iterations before which a worker's log has gaps, since a replica gave it its state, by rank.

    Returns:
        The plan. With no way back but a fresh start of all processes, its way is ``RESTART``.
    """
    standing = [s for s in standings.values() if s.iteration is not None]
    if not standing:
        return _all_load(standings, committed, Way.START, reason=must_fall_back or "")
    # An update that a replay was interrupted in has no beginning to go back to but the checkpoint.
    standings = {
        r: replace(s, iteration=None) if s.updated and not s.live else s for r, s in standings.items()
    }
    settled, undo, transfers = _settle_replicas(standings)
    settled, portions = _who_replays(standings, settled, workers, committed, restored or {})
    transfers = tuple(transfer for transfer in transfers if settled[transfer.source].live)
    undo = {rank: updated for rank, updated in undo.items() if settled[rank].live}
    moved = {rank for transfer in transfers for rank in transfer.targets} | undo.keys()
    why_not = must_fall_back or _why_no_replay(settled, moved, committed)
    if why_not:
        if committed is None:
            return Plan(Way.RESTART, 0, reason=f"{why_not}; no checkpoint is committed yet")
        return _all_load(standings, committed, Way.FALLBACK, reason=why_not)
    resume = min(s.iteration for s in settled.values() if s.live and s.iteration is not None)
    tasks = {
        rank: replace(_task(s, resume, committed), portion=portions.get(rank, ()), undo=undo.get(rank, ()))
        for rank, s in settled.items()
    }
    way = Way.REPLAY
    if all(t.idle for t in tasks.values()):
        way = Way.REPLICA if transfers or undo else Way.CONTINUE
    warm_up = not all(s.pipeline_known for s in standings.values())
    shared = () if unaided else _shared(tasks, standings)
    return Plan(way, resume, tasks, transfers, warm_up, shared=shared)


def _shared(tasks: Mapping[int, Task], standings: Mapping[int, Reported]) -> tuple[SharedReplay, ...]:
    replays = {
        task.portion or (rank,): (task.begin, task.replay_until)
        for rank, task in tasks.items()
        if task.begin < task.replay_until
    }
    return share_replays(replays, standings, sorted(rank for rank in tasks if tasks[rank].idle))


def _settle_replicas(
    standings: Mapping[int, Reported],
) -> tuple[dict[int, Reported], dict[int, tuple[int, ...]], tuple[Transfer, ...]]:
    """Replication first (§3): where everybody will stand once replicas are equal, and what that takes."""
    settled, undo = dict(standings), dict[int, tuple[int, ...]]()
    transfers: tuple[Transfer, ...] = ()
    groups = groups_by_part(standings)
    agreed = [(group, found) for group in groups if (found := agree(group))]
    resume = min((agreement.iteration for _, agreement in agreed), default=0)
    # Whoever goes forward has not logged all that it would have sent, and a replay needs that.
    lost = {rank for group in groups if agree(group) is None for rank in group}
    beside = {other for rank, others in _neighbours(standings).items() if rank in lost for other in others}
    needed = [standings[rank] for rank in sorted(beside - lost)]
    resume = min([resume, *(s.iteration for s in needed if s.live and s.iteration is not None)])
    for group, agreement in agreed:
        if agreement.iteration > resume and (agreement.transfers or agreement.undo):
            agreement = retreat(group, resume) or agreement
        undo.update(agreement.undo)
        transfers += agreement.transfers
        for rank, s in group.items():
            settled[rank] = replace(s, iteration=agreement.iteration, live=True, dirty=None, updated=())
    return settled, undo, transfers


def _all_load(standings: Mapping[int, Reported], committed: int | None, way: Way, reason: str) -> Plan:
    at = committed or 0
    tasks = {rank: Task(load=committed, begin=at, replay_until=at) for rank in standings}
    warm_up = not all(s.pipeline_known for s in standings.values())
    return Plan(way, at, tasks, warm_up=warm_up, reason=reason)


def _task(standing: Reported, resume: int, committed: int | None) -> Task:
    if standing.iteration is None:
        return Task(load=committed, begin=committed or 0, replay_until=resume)
    if not standing.live:
        return Task(load=None, begin=standing.iteration, replay_until=resume)
    ahead = standing.iteration > resume
    return Task(load=None, begin=standing.iteration, replay_until=resume, serve=ahead)


def _why_no_replay(standings: Mapping[int, Reported], moved: Set[int], committed: int | None) -> str:
    """The first reason why survivors cannot keep their state, or an empty string.

    Args:
        standings: where everybody stands once replicas are equal.
        moved: who got there by a replica's state.
        committed: iteration of the last committed global checkpoint.
    """
    for s in standings.values():
        if s.dirty:
            return f"worker {s.rank} stopped in the middle of an update: {s.dirty}"
    live = {s.rank: s.iteration for s in standings.values() if s.live and s.iteration is not None}
    if not live:
        return "no worker with a complete state is left"
    resume = min(live.values())
    if max(live.values()) > resume + 1:
        return f"survivors stand {max(live.values()) - resume} iterations apart"
    if committed is not None and resume < committed:  # logs before a commit are deleted
        behind = min(rank for rank, iteration in live.items() if iteration == resume)
        return f"worker {behind} stands at iteration {resume}, before the committed checkpoint {committed}"
    for rank in sorted(standings.keys() - live.keys()):
        if not standings[rank].stages:  # without a pipeline, nothing is logged
            return f"all replicas of {', '.join(standings[rank].holds)} are lost"
        begin = _begin(standings[rank], committed)
        if begin is None:
            return "the lost state was never in a checkpoint"
        if begin > resume:
            return f"worker {rank} stands at iteration {begin}, after the consensus iteration {resume}"
    ahead = {rank for rank, iteration in live.items() if iteration > resume}
    for rank in sorted(ahead & moved):
        return f"worker {rank} would have to serve iteration {resume}, which its replica has completed"
    for rank in sorted(ahead):
        if not standings[rank].serves:
            return (
                f"worker {rank} would have to serve iteration {resume}, and has not kept what it sent in it"
            )
    return ""


def _who_replays(
    standings: Mapping[int, Reported],
    settled: Mapping[int, Reported],
    workers: int,
    committed: int | None,
    restored: Mapping[int, int],
) -> tuple[dict[int, Reported], dict[int, tuple[int, ...]]]:
    """Where everybody begins, and who replays jointly with whom.

    Who stands apart in a portion begins together, at the checkpoint; what that needs of others' logs may be
    missing, so that they go back, too.
    """
    while True:
        found = _with_who_logged_too_little(standings, settled, workers, committed or 0, restored)
        portions = _portions(found)
        for portion in portions.values():
            if len({_begin(found[member], committed) for member in portion}) > 1:
                found |= {member: replace(found[member], iteration=None) for member in portion}
        if found == settled:
            return found, portions
        settled = found


def _with_who_logged_too_little(
    standings: Mapping[int, Reported],
    settled: Mapping[int, Reported],
    workers: int,
    committed: int,
    restored: Mapping[int, int],
) -> dict[int, Reported]:
    """A replay needs what the neighbours sent: who has no log of that replays, too, with all of its replicas.

    Such are those that a replica gives its state, since their log is lost or lacks an iteration, now or
    earlier (``restored``), and who shares a group (§5.3) with a worker that is rebuilt: they logged no
    messages to it. (Without replicas, all of a group goes back as one.) What is not logged is computed
    again, and a replica cannot do that without the gradients of the others, which go back with it.

    Args:
        standings: what everybody reported.
        settled: where everybody stands once replicas are equal.
        workers: workers per machine.
        committed: iteration of the last committed global checkpoint.
        restored: iterations before which a worker's log has gaps, by rank.
    """
    settled, near = dict(settled), _neighbours(standings)
    replicas = {rank: tuple(group) for group in groups_by_part(standings) for rank in group}

    def goes_back(other: int, rank: int) -> bool:
        own, begin = standings[other], _begin(settled[rank], committed)
        if _group(own, workers) == _group(standings[rank], workers):
            return other in near[rank] or len(replicas[other]) == 1
        whole = own.live and (own.iteration or 0) >= (settled[other].iteration or 0)
        return other in near[rank] and not (whole and restored.get(other, 0) <= (begin or 0))

    due = [rank for rank, s in settled.items() if not s.live]
    while due:
        rank = due.pop()
        for other in standings:
            if settled[other].live and goes_back(other, rank):
                due += replicas[other]
                for replica in replicas[other]:
                    s = standings[replica]
                    settled[replica] = replace(s, iteration=None, live=False, dirty=None, updated=())
    return settled


def _group(standing: Reported, workers: int) -> int:
    return standing.rank // workers if standing.group is None else standing.group


def _neighbours(standings: Mapping[int, Reported]) -> dict[int, set[int]]:
    """Who exchanges messages with whom: the holders of neighbouring, and of linked, stages in a pipeline."""
    holder = {(s.pipeline, stage): rank for rank, s in standings.items() for stage in s.stages}
    near: dict[int, set[int]] = {rank: set() for rank in standings}
    for (pipeline, stage), rank in holder.items():
        after = holder.get((pipeline, stage + 1), rank)
        if after != rank:
            near[rank].add(after)
            near[after].add(rank)
    for rank, s in standings.items():
        for other in {holder.get((s.pipeline, stage), rank) for stage in s.linked} - {rank}:
            near[rank].add(other)
            near[other].add(rank)
    return near


def _portions(standings: Mapping[int, Reported]) -> dict[int, tuple[int, ...]]:
    """Who replays jointly (Appendix B), by rank: rebuilt neighbours in a pipeline, and rebuilt replicas.

    What neighbours sent each other was not logged, or its log was lost with the sender; replicas need each
    other's gradients in every iteration.
    """
    near = _neighbours(standings)
    for group in groups_by_part(standings):
        for rank in group:
            near[rank] |= group.keys()
    joint: dict[int, tuple[int, ...]] = {}
    for rank, s in standings.items():
        if s.live or rank in joint:
            continue
        found, due = {rank}, [rank]
        while due:
            new = {other for other in near[due.pop()] - found if not standings[other].live}
            found |= new
            due += new
        joint |= dict.fromkeys(found, tuple(sorted(found)))
    return {rank: members for rank, members in joint.items() if len(members) > 1}


def _begin(standing: Reported, committed: int | None) -> int | None:
    """Where a worker that is rebuilt begins: where its replay stopped, or at the checkpoint."""
    return committed if standing.iteration is None else standing.iteration
