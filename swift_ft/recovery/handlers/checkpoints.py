"""Checkpoints: parts that become durable, commits, and early checkpoints on request."""

from __future__ import annotations

from collections.abc import Set

from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.audit_orders import pinned
from swift_ft.recovery.audits import BEFORE_ALL_LOGS, Audits
from swift_ft.recovery.handlers.generations import end_job, open_generation
from swift_ft.recovery.handlers.worlds import give_up_change
from swift_ft.recovery.job_state import Checkpoints, Doubt, Phase, SavedPart, State
from swift_ft.recovery.maps import kept
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.values import replace


def part_persisted(state: State, event: ev.PartPersisted) -> State:
    """Note a part of a checkpoint, if it counts."""
    if (part := part_that_counts(state, event)) is None:
        return state
    checkpoints = state.checkpoints
    of_iteration = checkpoints.parts.get(event.iteration, Map[int, SavedPart]()).set(event.rank, part)
    return replace(
        state,
        checkpoints=replace(checkpoints, parts=checkpoints.parts.set(event.iteration, of_iteration)),
    )


def part_that_counts(state: State, event: ev.PartPersisted) -> SavedPart | None:
    """A part, unless its worker was replaced since it was saved, or has undone the iteration: then None."""
    checkpoints = state.checkpoints
    if event.epoch != checkpoints.epoch:  # before any look at its rank, which may be one of a larger world
        return None
    valid_from = max(
        state.membership.started_in[state.slot_of_rank(event.rank)],
        # However late it becomes durable, a part from before an undo does not count (decision 7).
        checkpoints.revoked.get((event.iteration, event.rank), 0),
    )
    if checkpoints.covers(event.iteration) or event.generation < valid_from:
        return None
    return SavedPart(event.path, event.digest)


def checkpoint_committed(state: State, event: ev.CheckpointCommitted) -> State:
    """Forget what lies before the commit, and all failures: the job has made progress."""
    checkpoints, iteration = state.checkpoints, event.iteration
    if event.epoch != checkpoints.epoch or checkpoints.covers(iteration):
        return state
    requested = checkpoints.requested
    checkpoints = replace(
        checkpoints,
        committed=iteration,
        earlier=_kept_beside(checkpoints, event, pinned(state)),
        requested=requested if requested is not None and requested > iteration else None,
        parts=kept(checkpoints.parts, lambda at, _: at > iteration),
        revoked=kept(checkpoints.revoked, lambda at, _: at[0] > iteration),
        log_gap_before=kept(checkpoints.log_gap_before, lambda _, gap: gap > iteration),
    )
    attempts = replace(state.tries.attempts, tried=Map(), tried_for=frozenset())
    tries = replace(state.tries, attempts=attempts, failures=0, strangers=0)
    state = replace(
        state,
        checkpoints=checkpoints,
        membership=_seen_again(state.membership),
        tries=tries,
        audits=_with_commit(state, checkpoints),
    )
    return _without_older_offers(state, iteration)


def _without_older_offers(state: State, committed: int) -> State:
    """After a loss, no next world begins with an iteration before the last checkpoint."""
    change, pending = state.worlds.change, state.layouts.pending
    if change is None or not change.held or pending is None or pending.iteration >= committed:
        return state
    return give_up_change(state, f"checkpoint {committed} is newer than what survivors offer")


def _with_commit(state: State, checkpoints: Checkpoints) -> Audits:
    """Of an iteration that was committed before, what was known is of another history."""
    audits, iteration = state.audits, checkpoints.committed
    assert iteration is not None
    # An undo may have rounded the state that it has.
    generation = BEFORE_ALL_LOGS if checkpoints.log_gap_before else state.generation
    saved_in = kept(audits.saved_in, lambda at, _: at in checkpoints.kept).set(iteration, generation)
    marks = tuple(mark for mark in audits.marks if mark.until < iteration)
    return replace(audits, saved_in=saved_in, marks=marks)


def _seen_again(membership: Membership) -> Membership:
    """All members have saved their part, so all others reach them, and they work."""
    if not membership.silenced and not membership.losses:
        return membership
    members = {*map(membership.identity_of, membership.slots)}
    silenced = kept(membership.silenced, lambda identity, _: identity not in members)
    return replace(membership, silenced=silenced).forget_losses(members)


def _kept_beside(
    checkpoints: Checkpoints, event: ev.CheckpointCommitted, needed: Set[int]
) -> tuple[int, ...]:
    """The older checkpoints that stay, now that a newer one is committed.

    Args:
        needed: those that stay in any case.
    """
    older = checkpoints.kept or event.earlier
    # Not `older[-(keep - 1):]`, which is all of them where one is kept.
    newest = older[len(older) - min(len(older), event.keep - 1) :]
    return tuple(iteration for iteration in older if iteration in newest or iteration in needed)


def checkpoint_damaged(state: State, event: ev.CheckpointDamaged) -> State:
    """Give up a checkpoint: no worker loads any part of it any more."""
    state = give_up_checkpoint(state, event.iteration, f"worker {event.rank}: {event.reason}")
    return state if state.phase == Phase.ENDED else open_generation(state)


def give_up_checkpoint(state: State, iteration: int, why: str) -> State:
    """An older checkpoint counts, unless a newer one was committed meanwhile. The caller returns to it.

    Without any, the job ends. The logs since the older one are gone, so replay is impossible: survivors
    return to it, too. It begins a new epoch, so that nothing which was about to be committed makes the
    iterations in between count.
    """
    checkpoints = state.checkpoints
    earlier = tuple(kept for kept in checkpoints.earlier if kept != iteration)
    if iteration != checkpoints.committed:
        return replace(state, checkpoints=replace(checkpoints, earlier=earlier))
    if not earlier:
        return end_job(state, f"no intact checkpoint is left: {why}")
    checkpoints = _of_new_epoch(replace(checkpoints, committed=earlier[-1], earlier=earlier[:-1]))
    tries = replace(state.tries, fallback_reason=why)
    return replace(state, checkpoints=checkpoints, tries=tries)


def doubt_what_follows(state: State, iteration: int) -> State:
    """All that was computed after a checkpoint may be wrong: no saved part of that becomes a checkpoint.

    Nor does a marker count that is in the store already, in this run or in one that goes on from it.
    """
    doubts = tuple(doubt for doubt in state.checkpoints.doubts if doubt.after < iteration)
    doubts = (*doubts, Doubt(iteration, state.generation))
    return replace(state, checkpoints=_of_new_epoch(replace(state.checkpoints, doubts=doubts)))


def _of_new_epoch(checkpoints: Checkpoints) -> Checkpoints:
    return replace(checkpoints, epoch=checkpoints.epoch + 1, parts=Map(), revoked=Map(), log_gap_before=Map())


def checkpoint_requested(state: State, event: ev.CheckpointRequested) -> State:
    """Accept a request, unless a worker has not reached an earlier one yet: it would then save for neither.

    A request is not a promise. If a worker learns too late, its part is missing and nothing is committed.
    """
    checkpoints = state.checkpoints
    passed_by_all = event.iteration - ev.REQUESTED_AHEAD - 1  # the asker has completed at least one more
    if checkpoints.covers(event.iteration):
        return state
    # Two workers could replace each other's requests for ever otherwise (decision 47).
    if checkpoints.requested is not None and checkpoints.requested > passed_by_all:
        return state
    return replace(state, checkpoints=replace(checkpoints, requested=event.iteration))
