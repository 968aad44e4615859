"""Audits by spares: who computes what again, what came out, and the return to what is not in doubt."""

from __future__ import annotations

from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.audit_orders import (
    auditors,
    candidate,
    has_replicas,
    interval_of,
    may_judge,
    open_claims,
)
from swift_ft.recovery.audits import MOST_MARKS, Audits, Finding, Interval, Judgement, Mark, Wrong, judge
from swift_ft.recovery.handlers.checkpoints import give_up_checkpoint
from swift_ft.recovery.handlers.generations import open_generation
from swift_ft.recovery.job_state import State
from swift_ft.recovery.maps import kept, without
from swift_ft.recovery.values import replace


def audit_begun(state: State, event: ev.AuditBegun) -> State:
    """Note who audits a machine, if nobody does, and if it is due."""
    if event.machine not in auditors(state) or event.slot not in range(state.shape.machines):
        return state
    audits = state.audits
    if (interval := interval_of(state)) is None:
        interval = candidate(state)
        audits = Audits(interval, marks=audits.marks, judged=audits.judged, saved_in=audits.saved_in)
    if interval is None or (event.begin, event.until) != (interval.begin, interval.until):
        return state
    claims = open_claims(state) if state.audits.interval == interval else {}
    if event.slot in claims or audits.is_done(event.slot) or not may_judge(state, audits, event.slot):
        return state
    others = {slot: machine for slot, machine in claims.items() if machine != event.machine}
    return replace(state, audits=replace(audits, claims=Map({**others, event.slot: event.machine})))


def audit_ended(state: State, event: ev.AuditEnded) -> State:
    """Note what came out. A difference waits for another replay, which decides."""
    audits, interval, slot = state.audits, interval_of(state), event.slot
    asked = event.begin, event.until
    if interval is None or asked != (interval.begin, interval.until):
        return state
    if audits.claims.get(slot) != event.machine:
        return state
    audits = replace(audits, claims=without(audits.claims, [slot]))
    before, found = audits.findings.get(slot), _finding(event)
    if event.problem:
        audits = _closed(audits, slot)
    elif before is None and found is not None:
        audits = replace(audits, findings=audits.findings.set(slot, found))
    else:
        if before is not None:
            wrong = judge(before, found, changed=event.changed)
            if wrong == Wrong.MACHINE and has_replicas(state) and not _stands_out(audits):
                wrong = Wrong.NOBODY
            if wrong != Wrong.SPARE:
                audits = replace(audits, differed=audits.differed.set(slot, None))
            judgement = _judgement(state, interval, before, event, wrong)
            audits = replace(audits, judged=(*audits.judged, judgement)[-MOST_MARKS:])
        audits = _clean(audits, {slot, *event.slots}) if found is None else _closed(audits, slot)
    return replace(state, audits=_marked(state, audits, interval))


def _stands_out(audits: Audits) -> bool:
    """Whether no fewer replicas came out as recorded than differ.

    They run the same script. What differs on most of them is in the spare, or in the script.
    """
    return len(audits.clean) >= len({*audits.differed, *audits.findings})


def _clean(audits: Audits, slots: set[int]) -> Audits:
    """The work of these machines came out as recorded."""
    audits = replace(audits, clean=audits.clean.update(dict.fromkeys(sorted(slots))))
    return replace(audits, findings=kept(audits.findings, lambda slot, _: slot not in slots))


def _closed(audits: Audits, slot: int) -> Audits:
    """No more can be said of a machine's work."""
    findings = kept(audits.findings, lambda other, _: other != slot)
    return replace(audits, closed=audits.closed.set(slot, None), findings=findings)


def _finding(event: ev.AuditEnded) -> Finding | None:
    if event.iteration is None:
        return None
    return Finding(event.machine, event.rank, event.iteration, event.tensors, event.digest)


def _judgement(
    state: State, interval: Interval, first: Finding, event: ev.AuditEnded, wrong: Wrong
) -> Judgement:
    membership, slot = state.membership, state.slot_of_rank(first.rank)
    # It computed the interval itself if it was there when that began.
    began = state.audits.saved_in[interval.begin]
    stayed = membership.started_in[slot] <= began
    return Judgement(
        interval,
        slot,
        membership.members[slot] if stayed else "",
        wrong,
        (first.machine, event.machine),
        first.rank,
        first.iteration,
        first.tensors,
    )


def _marked(state: State, audits: Audits, interval: Interval) -> Audits:
    """The interval gets its mark once all machines are done."""
    slots = range(state.shape.machines)
    if not all(audits.is_done(slot) for slot in slots):
        return audits
    clean = tuple(sorted(audits.clean))
    mark = Mark(interval.begin, interval.until, clean, len(clean) == len(slots), interval.epoch)
    return replace(
        audits,
        interval=None,
        claims=Map(),
        findings=Map(),
        clean=Map(),
        closed=Map(),
        differed=Map(),
        marks=(*audits.marks, mark)[-MOST_MARKS:],
    )


def checkpoints_doubted(state: State, event: ev.CheckpointsDoubted) -> State:
    """Give up all checkpoints after one. All workers go back to that one."""
    if event.iteration not in state.checkpoints.kept:
        return state
    while state.checkpoints.committed != event.iteration:
        assert state.checkpoints.committed is not None
        state = give_up_checkpoint(state, state.checkpoints.committed, event.reason)
    marks = tuple(mark for mark in state.audits.marks if mark.until <= event.iteration)
    state = replace(state, audits=replace(state.audits, interval=None, marks=marks))
    # Also where no checkpoint is given up: what came after it is in doubt, in memory as well.
    tries = replace(state.tries, fallback_reason=event.reason, memory_in_doubt=True)
    return open_generation(replace(state, tries=tries))
