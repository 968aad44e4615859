"""The steps that begin and end generations: fill slots, open a generation, restart all, end the job."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from immutables import Map

from swift_ft.recovery.early_ends import why_too_early
from swift_ft.recovery.job_state import Layouts, Phase, RecoveryRound, State, Tries, Verdict
from swift_ft.recovery.maps import without
from swift_ft.recovery.membership import Membership, Spare
from swift_ft.recovery.values import replace
from swift_ft.recovery.worlds import without_change


def fill_slots(state: State) -> State:
    """Fill all empty slots at once, as soon as there are spares for all of them."""
    membership = state.membership
    empty = state.shape.machines - len(membership.members)
    # A plan needs the reports of all, so a generation with an empty slot could only wait.
    if state.phase != Phase.FORMING or not empty or len(membership.spares) < empty:
        return state
    slots = [slot for slot in range(state.shape.machines) if slot not in membership.members]
    own = [machine for machine in membership.waiting() if machine not in membership.hosts]
    chosen = _choose_spares(slots, own, membership)
    # Guests come last, whatever slot they prefer: they share their host's hardware.
    guests = [machine for machine in membership.waiting() if machine in membership.hosts]
    chosen |= _choose_spares([slot for slot in slots if slot not in chosen], guests, membership)
    domains = {slot: membership.spares[machine].domain for slot, machine in chosen.items()}
    came = [slot for slot in membership.requested if slot in chosen and chosen[slot] not in membership.hosts]
    membership = replace(
        membership,
        members=membership.members.update(chosen),
        slots=membership.slots.update({machine: slot for slot, machine in chosen.items()}),
        domains=membership.domains.update(domains),
        requested=without(membership.requested, came),
        asked_again=0 if came else membership.asked_again,
        spares=without(membership.spares, chosen.values()),
    )
    started = range(state.shape.machines) if membership.restart_all else slots
    return open_generation(replace(state, membership=membership), started)


def _choose_spares(slots: list[int], in_order: list[str], membership: Membership) -> dict[int, str]:
    """For each empty slot a spare that prefers it, else one that prefers none of them, else the first."""
    spares = membership.spares
    preferring: dict[int, deque[str]] = {slot: deque() for slot in slots}
    indifferent, anyone = deque[str](), deque(in_order)
    for machine in in_order:
        preferring.get(_preference(spares[machine]), indifferent).append(machine)
    chosen: dict[int, str] = {}
    taken: set[str] = set()
    for slot in slots:
        for candidates in (preferring[slot], indifferent, anyone):
            while candidates and candidates[0] in taken:
                candidates.popleft()
            if candidates:
                chosen[slot] = candidates.popleft()
                taken.add(chosen[slot])
                break
    return chosen


def _preference(spare: Spare) -> int:
    return -1 if spare.preferred_slot is None else spare.preferred_slot


def vacate(state: State, machine: str) -> State:
    """Empty the slot of a machine: the job waits for another one. Reports of its workers do not count."""
    agreed, ranks = replace(state.round, plan=None), state.ranks_of(state.membership.slots[machine])
    # After a plan no report counts any more, as it may be carried out by now (decision 78).
    if not agreed.decided:
        gone = [rank for rank in ranks if rank in agreed.statuses]
        agreed = replace(agreed, statuses=without(agreed.statuses, gone))
    membership = state.membership.without(machine)
    if state.phase == Phase.LIVE or not state.has_sessions:  # a new loss: who has declined is asked again
        membership = replace(membership, declined=Map())
    worlds = without_change(state.worlds, f"machine {machine} was lost")
    if state.phase == Phase.LIVE:  # a new loss, which a smaller world may answer
        worlds = replace(worlds, declined="")
    return replace(state, phase=Phase.FORMING, membership=membership, round=agreed, worlds=worlds)


def open_generation(state: State, started: Collection[int] = ()) -> State:
    """Ask all workers for their status, in a new generation that starts the workers of some slots.

    Who has reported since the last plan is not asked again. A worker whose script has ended cannot answer.
    The job ends at once, since the others need it.
    """
    if (ended := end_too_early(state)) is not None:
        return ended
    generation = state.generation + 1
    membership = replace(
        state.membership,
        started_in=state.membership.started_in.update(dict.fromkeys(started, generation)),
        restart_all=False,
    )
    return replace(
        state,
        phase=Phase.AGREEING,
        generation=generation,
        membership=membership,
        round=_next_round(state, generation, started),
        # A request for a checkpoint ends with its generation (decision 47), and so does one for a move.
        checkpoints=replace(state.checkpoints, requested=None),
        layouts=replace(state.layouts, pending=None),
        # The next world counts on the one that was interrupted: it is planned again, or not.
        worlds=without_change(state.worlds, "a recovery came first"),
        tries=_with_restart(state, started),
    )


def _with_restart(state: State, started: Collection[int]) -> Tries:
    """Counts a generation that starts all workers, unless it is the first one."""
    if not state.generation or len(started) < state.shape.machines:
        return state.tries
    return replace(state.tries, restarts=state.tries.restarts + 1)


def _next_round(state: State, generation: int, started: Collection[int]) -> RecoveryRound:
    """With the reports that still count, unless all are to report."""
    if state.round.decided or len(started) == state.shape.machines:
        return RecoveryRound(asked_in=generation)
    # Nothing of a report changes before a plan is carried out. If each loss asked all workers again, k
    # losses would cost k times n reports (decision 78).
    return RecoveryRound(asked_in=state.round.asked_in, statuses=state.round.statuses)


def restart_all(state: State, reason: str) -> State:
    """Start all processes again, at once or when the empty slots are filled. Their plan states the reason."""
    state = replace(
        state,
        membership=replace(_without_fenced(state.membership), exited=Map(), ended=Map()),
        round=replace(state.round, plan=None),
        # Survivors lose their state, too: what made the difference may be in no state (decision 7).
        checkpoints=replace(state.checkpoints, parts=Map()),
        tries=replace(state.tries, fallback_reason=reason),
        layouts=_as_begun(state),
        worlds=without_change(state.worlds, reason),
    )
    if len(state.membership.members) < state.shape.machines:
        waiting = replace(state.membership, restart_all=True)
        return fill_slots(replace(state, membership=waiting, phase=Phase.FORMING))
    return open_generation(state, started=range(state.shape.machines))


def _as_begun(state: State) -> Layouts:
    """The layouts once all scripts start again, with the first layout of the present world.

    Shares stay: they say how earlier batches were dealt. So does the iteration up to which checkpoints may be
    of other layers: no log that is written from now on belongs to those.
    """
    layouts = state.layouts
    saved_moved = state.checkpoints.committed if layouts.current else None
    since = max(layouts.since, saved_moved or 0)
    return Layouts(since=since, changes=min(1, layouts.changes), shares=layouts.shares)


def _without_fenced(membership: Membership) -> Membership:
    """Empty the slots of machines that left after their script had ended."""
    for slot in sorted(membership.exited):
        machine = membership.members.get(slot)
        if machine is not None and machine in membership.fenced:
            membership = membership.without(machine)
    return membership


def end_job(state: State, reason: str, exit_code: int = 1) -> State:
    """End the job: it cannot continue, or the user asked for it."""
    return replace(
        state,
        phase=Phase.ENDED,
        round=replace(state.round, plan=None),
        verdict=Verdict(False, reason, exit_code),
    )


def end_too_early(state: State) -> State | None:
    """End the job if it cannot go on without workers whose script has ended. None if it can.

    Scripts that save and end at a signal may do so on all machines before each launcher has said that it got
    one. Then the signal has ended the job, and not the script.
    """
    if not (reason := why_too_early(state)):
        return None
    stopped = state.tries.stopped
    return end_job(state, reason) if stopped is None else end_job(state, stopped.reason, stopped.exit_code)
