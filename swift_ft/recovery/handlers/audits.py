"""Audits by spares: who computes what again, what came out, and the return to what is not in doubt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.audit_orders import (
    act_at_the_end,
    auditors,
    candidate,
    due_after,
    has_replicas,
    identities,
    interval_of,
    may_judge,
    open_claims,
    still_due,
)
from swift_ft.recovery.audits import MOST_MARKS, Audits, Finding, Interval, Judgement, Mark, Wrong, judge
from swift_ft.recovery.early_ends import why_in_doubt_at_the_end
from swift_ft.recovery.handlers.checkpoints import doubt_what_follows, give_up_checkpoint
from swift_ft.recovery.handlers.generations import end_job, open_generation
from swift_ft.recovery.job_state import State
from swift_ft.recovery.maps import kept, without
from swift_ft.recovery.values import replace


def audit_begun(state: State, event: ev.AuditBegun) -> State:
    """Note who audits a machine, if nobody does, and if it is due."""
    if event.machine not in auditors(state) or event.slot not in range(state.shape.machines):
        return state
    audits = state.audits
    if (interval := interval_of(state)) is None:
        judged = (*audits.judged, *_left_undecided(state))[-MOST_MARKS:]
        interval = candidate(state)
        audits = replace(audits.between(), interval=interval, judged=judged)
    if interval is None or (event.begin, event.until) != (interval.begin, interval.until):
        return state
    claims = open_claims(state) if state.audits.interval == interval else {}
    if event.slot in claims or audits.is_done(event.slot) or not may_judge(state, audits, event.slot):
        return state
    others = {slot: machine for slot, machine in claims.items() if machine != event.machine}
    return replace(state, audits=replace(audits, claims=Map({**others, event.slot: event.machine})))


def audit_ended(state: State, event: ev.AuditEnded) -> State:
    """Note what came out. A difference waits for another replay, which decides.

    What is to follow from that is noted with it. Nothing that happens meanwhile can come between the two.
    """
    audits, interval, slot = state.audits, interval_of(state), event.slot
    asked = event.begin, event.until
    if interval is None or asked != (interval.begin, interval.until):
        return state
    if audits.claims.get(slot) != event.machine:
        return state
    audits = replace(audits, claims=without(audits.claims, [slot]))
    if event.problem:
        failed = audits.failed.get(slot, frozenset()) | {state.membership.identity_of(event.machine)}
        audits = replace(audits, failed=audits.failed.set(slot, failed))
        if not identities(state) <= failed:  # another spare may have what this one lacks
            return replace(state, audits=audits)
    found, before = _finding(event), _to_judge(state, audits, event)
    if found is not None and not before:
        return replace(state, audits=replace(audits, findings=audits.findings.set(slot, found)))
    made: list[Judgement] = []
    for first in before:
        wrong = _wrong(state, audits, first, found, event)
        if wrong != Wrong.SPARE:
            audits = replace(audits, differed=audits.differed.set(slot, None))
        spares = (first.machine, *([event.machine] if wrong != Wrong.UNDECIDED else []))
        made.append(_judgement(state, interval, first, wrong, spares, {slot, *event.slots}))
    audits = replace(audits, judged=(*audits.judged, *made)[-MOST_MARKS:])
    if found is None and not event.problem:
        audits = _clean(audits, {slot, *event.slots})
    else:
        audits = _closed(audits, {slot, *event.slots})
    state = replace(state, audits=_marked(state, audits, interval))
    follows = [due for one in made if (due := due_after(state, one, event.on_corruption)) is not None]
    return replace(state, audits=replace(state.audits, due=(*still_due(state), *follows)))


def _to_judge(state: State, audits: Audits, event: ev.AuditEnded) -> Sequence[Finding]:
    """The differences that a replay decides on. Machines that are rebuilt together have had the same one.

    Each spare that has found what this replay does not find was wrong. Two replays of one machine that both
    differ are enough for a judgement on the machine, once it can be made.
    """
    slots = [event.slot, *sorted({*event.slots} - {event.slot})]
    before = {slot: audits.findings[slot] for slot in slots if slot in audits.findings}
    if event.iteration is None:
        return [*before.values()]
    ripe = [slot for slot in before if slot == event.slot or may_judge(state, audits, slot)]
    return [before[slot] for slot in ripe[:1]]


def _wrong(
    state: State, audits: Audits, first: Finding, second: Finding | None, event: ev.AuditEnded
) -> Wrong:
    if event.problem:
        return Wrong.UNDECIDED
    wrong = judge(first, second, changed=event.changed)
    accuses = wrong in (Wrong.MACHINE, Wrong.SEVERAL)
    return Wrong.NOBODY if accuses and not _stands_out(state, audits) else wrong


def _stands_out(state: State, audits: Audits) -> bool:
    """Whether enough machines came out as recorded. What differs on all is in the spare, or in the script.

    Replicas run the same script, so no fewer of them than differ. Stages compute each something else, so one.
    """
    least = len({*audits.differed, *audits.findings}) if has_replicas(state) else 1
    return len(audits.clean) >= least


def _clean(audits: Audits, slots: set[int]) -> Audits:
    """The work of these machines came out as recorded."""
    audits = replace(audits, clean=audits.clean.update(dict.fromkeys(sorted(slots))))
    return replace(audits, findings=kept(audits.findings, lambda slot, _: slot not in slots))


def _closed(audits: Audits, slots: set[int]) -> Audits:
    """No more can be said of the work of these machines."""
    closed = audits.closed.update(dict.fromkeys(sorted(slots - {*audits.clean})))
    return replace(audits, closed=closed, findings=kept(audits.findings, lambda slot, _: slot not in slots))


def _finding(event: ev.AuditEnded) -> Finding | None:
    if event.iteration is None:
        return None
    return Finding(event.machine, event.rank, event.iteration, event.tensors, event.digest, event.slots)


def _left_undecided(state: State) -> Iterator[Judgement]:
    """The differences of an interval that has come to nothing: no second replay can be made."""
    if (interval := state.audits.interval) is not None:
        for slot, found in sorted(state.audits.findings.items()):
            yield _judgement(state, interval, found, Wrong.UNDECIDED, (found.machine,), {slot})


def _judgement(
    state: State, interval: Interval, first: Finding, wrong: Wrong, spares: tuple[str, ...], slots: set[int]
) -> Judgement:
    membership, slot = state.membership, state.slot_of_rank(first.rank)
    # It computed the interval itself if it was there when that began.
    of_present = interval.world == state.worlds.present.number
    began = state.audits.saved_in.get(interval.begin) if of_present else None
    stayed = began is not None and membership.started_in[slot] <= began
    return Judgement(
        interval,
        slot,
        membership.members[slot] if stayed else "",
        wrong,
        spares,
        first.rank,
        first.iteration,
        first.tensors,
        tuple(sorted({*slots, *first.slots})),
    )


def _marked(state: State, audits: Audits, interval: Interval) -> Audits:
    """The interval gets its mark once all machines are done."""
    slots = range(state.shape.machines)
    if not all(audits.is_done(slot) for slot in slots):
        return audits
    clean = tuple(sorted(audits.clean))
    right = interval.begin if has_replicas(state) else interval.until
    mark = Mark(interval.begin, interval.until, clean, len(clean) == len(slots), right, interval.epoch)
    return replace(audits.between(), marks=(*audits.marks, mark)[-MOST_MARKS:])


def checkpoints_doubted(state: State, event: ev.CheckpointsDoubted) -> State:
    """Give up all checkpoints after one. All workers go back to that one, or the job ends if some cannot."""
    if event.iteration not in state.checkpoints.kept:
        return state
    state = _doubt(state, event.iteration, event.reason)
    if reason := why_in_doubt_at_the_end(state, event.reason):
        return end_job(state, reason)
    # Also where no checkpoint is given up: what came after it is in doubt, in memory as well.
    tries = replace(state.tries, fallback_reason=event.reason, memory_in_doubt=True)
    return open_generation(replace(state, tries=tries))


def _doubt(state: State, iteration: int, reason: str) -> State:
    """Nothing counts that was computed after a checkpoint, and nobody is to go back to it once more."""
    while state.checkpoints.committed != iteration:
        assert state.checkpoints.committed is not None
        state = give_up_checkpoint(state, state.checkpoints.committed, reason)
    state = doubt_what_follows(state, iteration)
    marks = tuple(mark for mark in state.audits.marks if mark.until <= iteration)
    due = tuple(
        replace(one, back_to=None) if one.back_to is not None and one.back_to >= iteration else one
        for one in state.audits.due
    )
    return replace(state, audits=replace(state.audits, marks=marks, due=due))


def settled(state: State) -> State:
    """The state of a job that has ended, with all that was due after judgements.

    It may end before any machine has appended that. A resumed run must not begin with a checkpoint that is in
    doubt, and scripts that have all succeeded do not make it a success.
    """
    due = [one for one in state.audits.due if one.ends or one.back_to is not None]
    verdict = state.verdict
    if not due or verdict is None:
        return state
    act = act_at_the_end(state, due)
    why = act.reason if verdict.ok else ""
    if isinstance(act, ev.CheckpointsDoubted):
        state = _doubt(state, act.iteration, act.reason)
        if doubted := why_in_doubt_at_the_end(state, act.reason):
            # The line of a loop that is over names a checkpoint that is in doubt; others say more.
            also_said = not verdict.ok and not state.all_finished
            why = f"{verdict.reason}; {doubted}" if also_said else doubted
    state = replace(state, audits=replace(state.audits, due=()))
    return end_job(state, why) if why and verdict.exit_code in (0, 1) else state
