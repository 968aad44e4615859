"""The next world from what the survivors of a loss hold, with fewer workers, where they hold all of it. Pure.

    a machine is lost, none comes ──▶ workers of the next world start on the machines that survive,
              as pipelines of unlike numbers of stages where it is a LayerStack of several
            ──▶ all survivors have reported: those that are whole at one iteration offer their state
            ──▶ all have taken what they need: the next world is the present one
                └── whatever fails before that: guests, as if nothing had been planned

Where a lost worker has no replica, they offer copies of all states (`recovery/memory.py`): of the newest
iteration of which they have all.

Survivors only read what they have: no state is undone, nor sent to another worker of the present world. So
what comes after a failure is what would have come without the try.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from immutables import Map

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.memory import CopyPlacement, newest_in_memory
from swift_ft.recovery.next_pipelines import is_plan_for, next_pipelines, sizes_of

Held = tuple[str, ...]
"""Names of the layers of a LayerStack on a worker, or else of the parts whose whole state it has."""


class Answer(NamedTuple):
    """The answer to a loss for which no machine comes.

    Attributes:
        machines: of the smaller world, by slot; empty for guests.
        pipelines: the number of stages of each; they are dealt to these machines in turn. Empty if the
            script makes them without a plan.
        why_guests: the reason for these; empty if nothing else was asked for, or there is nothing to answer.
    """

    machines: tuple[str, ...] = ()
    pipelines: tuple[int, ...] = ()
    why_guests: str = ""

    def is_asked_for(self, state: State, machines: tuple[str, ...], plan: str) -> bool:
        """Whether a world of these machines, with this plan, is the one that follows the loss."""
        if not machines or machines != self.machines:
            return False
        return is_plan_for(plan, self.pipelines, sizes_of(state)) if self.pipelines else not plan


def answer_of(state: State) -> Answer:
    """A smaller world, if one was asked for and can come from the survivors as far as that is known now."""
    if not state.shape.shrinks or state.phase != Phase.FORMING or not state.generation:
        return Answer()
    if reason := state.worlds.declined:
        return Answer(why_guests=reason)
    if state.worlds.change is not None:
        return Answer()
    if reason := _why_not(state):
        return Answer(why_guests=reason)
    own = _own_machines(state)
    formed = next_pipelines(state, own)
    if formed is None:
        answer = Answer(alike(state, own, shares_of(state)))
    elif formed.reason:
        return Answer(why_guests=formed.reason)
    else:
        answer = Answer(*formed.dealt(state.shape.workers_per_machine))
    if len(answer.machines) < (least := state.shape.min_machines or 1):
        return Answer(why_guests=f"fewer than {least} machines could share its work")
    return answer


def comes_from_survivors(state: State) -> bool:
    """Whether no guest comes, as a smaller world is about to be planned, or under way."""
    change = state.worlds.change
    under_way = state.phase == Phase.FORMING and change is not None
    return under_way or bool(answer_of(state).machines)


def held_of(state: State) -> Map[int, Held]:
    """The layers or the parts that each worker had when a loss interrupted the present world, by rank."""
    placed, reports = state.layouts.placed, state.round.statuses
    return Map({rank: _held_by(reports[rank], placed.get(rank, ())) for rank in range(state.world_size)})


def _held_by(report: StatusReported, layers: Sequence[int]) -> Held:
    if held := tuple(f"layer {layer}" for layer in layers) or report.holds:
        return held
    return (f"the shards of worker {report.rank}",) if report.copies else ()


def _why_not(state: State) -> str:
    agreed, membership = state.round, state.membership
    if membership.restart_all or not state.has_sessions:
        return "all processes start again"
    # What all held, their reports before the last live training have said.
    if len(agreed.ready) < state.world_size or len(agreed.statuses) < state.world_size:
        return "it was lost before all had trained since the last recovery"
    if agreed.finished or membership.ended:
        return "the training is nearly complete"
    held = held_of(state)
    if any(report.stages for report in agreed.statuses.values()) and not state.layouts.placed:
        return "the stages of its pipeline cannot be dealt to fewer workers: those of a LayerStack can"
    left = [rank for rank in held if state.slot_of_rank(rank) in membership.members]
    there = _pieces(held, left)
    lost = next((rank for rank in sorted(held) if not held[rank] or not there.issuperset(held[rank])), None)
    return "" if lost is None else _why_not_from_copies(state, lost)


def _why_not_from_copies(state: State, lost: int) -> str:
    """Why copies in memory cannot stand in for what a lost worker held; empty if they can."""
    reports, members = state.round.statuses.values(), state.membership.members
    placement = CopyPlacement.of(state.domains, state.shape.workers_per_machine)
    # Where layers are, copies of some of them may be of another cut; a pipeline has logs.
    if placement is None or state.layouts.placed or not all(report.copies for report in reports):
        return f"nobody else holds what worker {lost} held"
    if state.membership.hosts:  # a guest that was lost with its host says no more whose domain it shared
        return ""
    for rank in range(state.world_size):
        if state.slot_of_rank(rank) in members or state.slot_of_rank(placement.holders[rank]) in members:
            continue
        return f"worker {rank} is lost, and so is the one that had a copy of its state"
    return ""


def _own_machines(state: State) -> tuple[str, ...]:
    """All machines that survive, by slot."""
    membership = state.membership
    return tuple(
        machine
        for machine in membership.by_slot
        if machine not in membership.hosts and machine not in membership.draining
    )


def shares_of(state: State) -> int:
    """The number of parts in which the state is held: pipelines of a LayerStack, or else shards.

    Shards without replicas are as many as there are workers: any number of these can have all of them.
    """
    if state.layouts.placed:
        return max(1, len(state.layouts.pipelines))
    shards = len({*held_of(state).values()})
    return 1 if shards == state.world_size else shards


def alike(state: State, own: tuple[str, ...], shares: int) -> tuple[str, ...]:
    """As many of the machines as can have equally many workers for each share.

    Args:
        own: the machines that there are.
        shares: a script has as many pipelines as before, and as many shards: without a plan none are unlike.
    """
    each, count = state.shape.workers_per_machine, len(own)
    while count and count * each % shares:
        count -= 1
    return own[:count]


def _pieces(held: Mapping[int, Held], ranks: Iterable[int]) -> set[str]:
    """All layers, or all parts, that some workers have."""
    return {piece for rank in ranks for piece in held[rank]}


class Sources(NamedTuple):
    """The states that survivors offer, or why they offer none.

    Attributes:
        ranks: the workers whose states they are.
        iteration: completed iterations of these states.
        reason: why there are none.
        copies: by rank of these workers, the survivor in whose memory it is; empty if they are survivors, and
            in these states.
    """

    ranks: tuple[int, ...] = ()
    iteration: int = 0
    reason: str = ""
    copies: Map[int, int] = Map()


def sources_of(
    statuses: Mapping[int, StatusReported], held: Mapping[int, Held], committed: int | None
) -> Sources:
    """The states that together are all of one iteration: the latest one of which that is so.

    Copies count only where a lost worker has no replica: else nobody has to go back.

    Args:
        statuses: the reports of all survivors.
        held: by rank, what each worker held, lost ones too.
        committed: iteration of the last committed checkpoint, before which nobody goes back.
    """
    everything = _pieces(held, held)
    if _pieces(held, statuses) != everything:
        return _copies_of(statuses, len(held), committed or 0)
    rank = next((rank for rank in sorted(statuses) if _has_open_parts(statuses[rank])), None)
    if rank is not None:
        return Sources(reason=f"worker {rank} has something left to do between two iterations")
    whole = {
        rank: status.iteration
        for rank, status in sorted(statuses.items())
        # What a part of an update has changed could be undone, but nobody undoes anything here.
        if status.live and status.iteration is not None and not status.dirty and not status.updated
    }
    for iteration in sorted({*whole.values()}, reverse=True):
        ranks = tuple(rank for rank, at in whole.items() if at == iteration)
        if _pieces(held, ranks) == everything and iteration >= (committed or 0):
            return Sources(ranks, iteration)
    return Sources(reason="in no iteration do the survivors have all of the state")


def _copies_of(statuses: Mapping[int, StatusReported], workers: int, committed: int) -> Sources:
    """Copies of all states, of the newest iteration of which survivors have all in memory."""
    found = newest_in_memory(statuses, workers)
    if found is None:
        return Sources(reason="of no iteration do the survivors have copies of all states in memory")
    if found.iteration < committed:
        return Sources(reason=f"the copies in memory are older than checkpoint {committed}")
    return Sources(tuple(range(workers)), found.iteration, copies=Map(found.holders))


def _has_open_parts(status: StatusReported) -> bool:
    """Whether the script's parts between two iterations are not done, or the lost worker may not have."""
    return status.parts_done is not None or bool(status.parts_due)
