"""Incidents: each failure from its cause to what was done about it, for a person to act on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import ADVICE, Cause, cause_of, evidence_of
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.exclusion import domain_in_words, domains_left_out, machine_in_words, machines_left_out
from swift_ft.recovery.job_state import State, Verdict
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.recovery.recoveries import Course, loss_in_words

ENDED = "the run ended"
"""The way of an incident after which no worker has gone on."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One failure: what it came from, and what became of it.

    Attributes:
        number: 1 for the run's first.
        at: Unix time in seconds of the first event of it.
        cause: whose fault it was (see :class:`swift_ft.recovery.causes.Cause`).
        reason: the first event of it that tells the cause, in its reporter's words.
        evidence: what that reporter saw besides.
        machines: names of the machines that it has cost, or on which it was; the first is the reason's. Where
            communication broke and none was lost: the one that has said so, and the one that its text names.
        slots: the slots of these machines, in the same order.
        others: the reasons of the other losses that belong to it.
        way: the way back to training, as in a recovery's ``mode``, or that the run ended.
        seconds: until training went on; 0 if it did not.
        iterations_lost: completed iterations that were computed again.
        times: the number of incidents so far, with this one, that had this cause on one of these machines.
        advice: what a person should do.
    """

    number: int
    at: float
    cause: Cause
    reason: str
    evidence: tuple[str, ...]
    machines: tuple[str, ...]
    slots: tuple[int, ...]
    others: tuple[str, ...]
    way: str
    seconds: float
    iterations_lost: int
    times: int
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


_ENDS_BY_ITSELF = (
    *(ev.ScriptFailed, ev.MachineLost, ev.JobClosed, ev.DeadlinePassed),
    *(ev.ReplayFailed, ev.CheckpointDamaged),
)
"""Events that say themselves why they end a run. Others end it because of the loss before them."""


def incident_of(course: Course, known: State, earlier: Sequence[Incident], way: str = "") -> Incident | None:
    """The incident that a recovery was about; None if all of it was on purpose.

    Args:
        course: the recovery. Its cause is that of its first failure; that of a machine that was late, if
            the first failure was one of communication.
        known: the state after it: who the machines are, and which of them are left out.
        earlier: the incidents before it.
        way: of what became of it, where that is not the recovery's own.
    """
    if course.failure is None:
        return None
    recovery, first, teller = course.recovery, course.failure, course.failure
    # Communication that breaks by a timeout says nothing of a network: one machine was late already.
    if isinstance(first.event, ev.CommunicationFailed) and course.late is not None:
        teller = course.late
    cause, evidence = cause_of(teller.event), evidence_of(teller.event)
    # What a test has done says more than what its victim's machine could see.
    if course.fault is not None and isinstance(course.fault.event, ev.FaultInjected):
        cause, evidence = Cause.INJECTED, (f"--inject {course.fault.event.fault}", *evidence)
    others = [*recovery.reasons, *([_reason_of(first.event)] if teller is not first else [])]
    if (reason := loss_in_words(teller.event)) in others:
        others.remove(reason)
    where = dict(zip(recovery.machines, recovery.slots, strict=True)) or course.link
    return _incident(
        replace(teller, at=first.at),
        known,
        earlier,
        cause=cause,
        evidence=evidence,
        machines=tuple(where),
        slots=tuple(where.values()),
        others=tuple(others),
        way=way or recovery.mode,
        seconds=recovery.seconds,
        iterations_lost=recovery.most_lost,
    )


def incident_of_end(
    course: Course, before: State, entry: Entry, earlier: Sequence[Incident], ended: Verdict | None
) -> Incident | None:
    """The incident of an event that ends a run in a recovery; None for what was asked for.

    Args:
        course: the recovery.
        before: the state before the event.
        entry: the event.
        earlier: the incidents before it.
        ended: how the run has ended.
    """
    if not isinstance(entry.event, _ENDS_BY_ITSELF):
        return incident_of(course, before, earlier, ENDED)
    last = incident_of_event(before, entry, earlier, ended)
    if last is None or course.failure is None or course.failure is entry:
        return last
    recovery, injected = course.recovery, course.fault
    cause, evidence = last.cause, last.evidence
    if injected is not None and isinstance(injected.event, ev.FaultInjected) and _is_loss(entry.event):
        cause, evidence = Cause.INJECTED, (f"--inject {injected.event.fault}", *evidence)
    own = zip(last.machines, last.slots, strict=False)
    slots = dict([*own, *zip(recovery.machines, recovery.slots, strict=True)])
    reasons = dict.fromkeys((loss_in_words(course.failure.event), *recovery.reasons))
    reasons.pop(loss_in_words(entry.event), None)
    return _incident(
        entry,
        before,
        earlier,
        cause=cause,
        evidence=evidence,
        machines=tuple(slots),
        slots=tuple(slots.values()),
        others=tuple(reasons),
        way=ENDED,
        iterations_lost=recovery.most_lost,
    )


def end_by_stop(state: State, stop: Entry) -> Entry:
    """The end of a run by a signal that a launcher got, as an entry of its own.

    Scripts that save and end at a signal leave other events last. The signal has ended the run in any order.

    Args:
        state: that of the end.
        stop: the loss of that launcher's machine; the last event, if that was before all that is known.
    """
    assert state.verdict is not None
    closed = ev.JobClosed(reason=state.verdict.reason, exit_code=state.verdict.exit_code)
    if isinstance(stop.event, ev.MachineLost) and stop.event.stopped_by:
        closed = replace(closed, cause=stop.event.cause, evidence=stop.event.evidence)
    return replace(stop, event=closed)


def _is_loss(event: ev.Event) -> bool:
    return isinstance(event, ev.MachineLost | ev.DeadlinePassed)


def incident_of_event(
    before: State, entry: Entry, earlier: Sequence[Incident], ended: Verdict | None
) -> Incident | None:
    """The incident of an event that restarts all processes or ends the run; None for what was asked for.

    Args:
        before: the state before the event.
        entry: the event.
        earlier: the incidents before it.
        ended: how the run has ended with it; None if it has not.
    """
    event = entry.event
    if isinstance(event, ev.ScriptExited | ev.CommunicationFailed) and ended is not None:
        event = ev.JobClosed(reason=ended.reason, cause=_cause_of_end(before))
        entry = replace(entry, event=event)
    if not isinstance(event, _ENDS_BY_ITSELF):
        return None
    # One that the user can mend has its remedy in its text; a person who stops a run knows why.
    if isinstance(event, ev.ScriptFailed) and event.usage:
        return None
    if isinstance(event, ev.JobClosed) and event.exit_code > 128 and cause_of(event) == Cause.SIGNAL:
        return None
    machine = getattr(event, "machine", "")
    machines = (machine,) if machine else tuple(getattr(event, "machines", ()))
    return _incident(
        entry,
        before,
        earlier,
        cause=cause_of(event),
        evidence=evidence_of(event),
        machines=machines,
        slots=tuple(slot for name in machines if (slot := before.slot_of(name)) is not None),
        way=RecoveryMode.RESTART.value if ended is None else ENDED,
    )


def _cause_of_end(before: State) -> Cause:
    """The cause of an end that came with the end of scripts."""
    if any(one.ends or one.back_to is not None for one in before.audits.due):
        return Cause.MACHINE  # an audit has found that one computes wrong
    # All are done, and the store has not taken the last checkpoint; or a script has ended too early.
    return Cause.STORE if before.all_finished else Cause.SCRIPT


def _incident(
    first: Entry,
    known: State,
    earlier: Sequence[Incident],
    *,
    cause: Cause,
    evidence: tuple[str, ...],
    machines: tuple[str, ...],
    slots: tuple[int, ...],
    way: str,
    others: tuple[str, ...] = (),
    seconds: float = 0.0,
    iterations_lost: int = 0,
) -> Incident:
    """The incident that an entry began with: its number, its reason, and what follows from its cause."""
    return Incident(
        number=len(earlier) + 1,
        at=first.at,
        cause=cause,
        reason=_reason_of(first.event),
        evidence=evidence,
        machines=machines,
        slots=slots,
        others=others,
        way=way,
        seconds=seconds,
        iterations_lost=iterations_lost,
        times=_times(cause, machines, known.membership, earlier),
        advice="; ".join([ADVICE[cause], *_left_out_in_words(known, machines)]),
    )


def _left_out_in_words(known: State, machines: Sequence[str]) -> Iterator[str]:
    """Of those machines that are left out from now on, and of their failure domains."""
    membership, left_out, domains = known.membership, machines_left_out(known), domains_left_out(known)
    identities = dict.fromkeys(map(membership.identity_of, machines))
    yield from (machine_in_words(known, identity) for identity in identities if identity in left_out)
    of = dict.fromkeys(membership.losses[one].domain for one in identities if one in membership.losses)
    yield from (domain_in_words(known, domain) for domain in of if domain in domains)


def _reason_of(event: ev.Event) -> str:
    return getattr(event, "reason", "")


def _times(cause: Cause, machines: Sequence[str], known: Membership, earlier: Sequence[Incident]) -> int:
    """A machine keeps its identity under all its names."""
    here = {*map(known.identity_of, machines)}
    alike = (one for one in earlier if one.cause == cause)
    return 1 + sum(not here.isdisjoint(map(known.identity_of, one.machines)) for one in alike)
