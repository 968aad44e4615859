"""Orders for audits: which machine a spare computes again, and what has to stay for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swift_ft.recovery import events as ev
from swift_ft.recovery.audits import Audits, Due, Interval, Judgement, Mark, Wrong
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.topology import is_whole_model
from swift_ft.units import named


class AuditOrder(NamedTuple):
    """The order to compute a machine's work of an interval again."""

    interval: Interval
    slot: int


def next_audit(state: State, machine: str) -> AuditOrder | None:
    """The order of a spare: its own audit that has begun, else one that nobody has begun, or None."""
    if state.phase != Phase.LIVE or state.round.finished or machine not in auditors(state):
        return None
    if why_nothing_to_audit(state):
        return None
    audits = state.audits
    if (interval := interval_of(state)) is None:
        interval, audits = candidate(state), Audits()
    if interval is None:
        return None
    claimed = open_claims(state) if interval == audits.interval else {}
    open_slots = [slot for slot in range(state.shape.machines) if not audits.is_done(slot)]
    own = [slot for slot in open_slots if claimed.get(slot) == machine]
    free = [slot for slot in open_slots if slot not in claimed and _may_take(state, audits, slot, machine)]
    # A difference is judged first, if it may be judged already.
    ordered = own or sorted(free, key=lambda slot: (slot not in audits.findings, slot))
    return AuditOrder(interval, ordered[0]) if ordered else None


def may_judge(state: State, audits: Audits, slot: int) -> bool:
    """Whether a machine's audit may begin: of one that differs, once it can be seen whether all do.

    That is when a stage has come out as recorded, and when all other replicas are known.
    """
    if slot not in audits.findings or (audits.clean and not has_replicas(state)):
        return True
    every = range(state.shape.machines)
    return all(audits.is_done(other) or other in audits.findings for other in every)


def why_nothing_to_audit(state: State) -> str:
    """Why no spare could compute anything again; empty if one can. Known while the job is live."""
    if reason := _ends_audits(state):
        return reason
    if has_replicas(state):
        return ""
    if has_stages(state):
        return _no_messages(state)
    return "this training sends no messages between stages, and its workers are no replicas"


def _no_messages(state: State) -> str:
    """Why the log has no message between stages; empty if it has them."""
    if state.layouts.pipelines:
        return "pipelines of a LayerStack log no messages: each gets a lost layer from another one"
    groups = {status.group for status in state.round.statuses.values()}
    if len(groups) == 1 and None not in groups:
        return "all machines are one recovery group, and inside of it no messages are logged"
    return ""


def _ends_audits(state: State) -> str:
    """Why an audit that has begun comes to nothing. Not while workers still report: it goes on after that."""
    if state.worlds.present.has_own_program:  # a spare would run that with which the run began
        return "the script was changed since the run began"
    if state.layouts.shares and has_replicas(state):
        return "the replicas' shares of a batch have changed"
    return ""


def has_stages(state: State) -> bool:
    """Whether there are messages between stages: then what a stage was sent is computed with again."""
    return len({stage for status in state.round.statuses.values() for stage in status.stages}) > 1


def has_replicas(state: State) -> bool:
    """Whether all workers have the whole model: then each computes a step on its own up to the average."""
    statuses = state.round.statuses.values()
    return len(statuses) > 1 and all(is_whole_model(status.holds) for status in statuses)


def auditors(state: State) -> set[str]:
    """The spares that may audit: no guests, and none that is to leave or that a planned change needs."""
    change = state.worlds.change
    return {m for m in state.membership.own_spares() if change is None or change.slot_of(m) is None}


def identities(state: State) -> set[str]:
    """By :meth:`Membership.identity_of`, the spares that may audit."""
    return {*map(state.membership.identity_of, auditors(state))}


def open_claims(state: State) -> dict[int, str]:
    """The audits that run: a spare that is used has given its own up."""
    waiting = auditors(state)
    return {slot: machine for slot, machine in state.audits.claims.items() if machine in waiting}


def _may_take(state: State, audits: Audits, slot: int, machine: str) -> bool:
    """Whether no spare is better for a machine: one that can replay it, and has not found the difference."""
    identity_of = state.membership.identity_of
    finding = audits.findings.get(slot)
    finder = set[str]() if finding is None else {identity_of(finding.machine)}
    able = identities(state) - audits.failed.get(slot, frozenset())
    # One that failed tries again if those that could do it are gone: then nobody is left, which ends it.
    best = able - finder or able or identities(state)
    own = identity_of(machine)  # it may have come back under another name
    return own in best and may_judge(state, audits, slot)


def interval_of(state: State) -> Interval | None:
    """The interval that is audited, if it is still one of this history."""
    interval = state.audits.interval
    if interval is None or not {interval.begin, interval.until} <= {*state.checkpoints.kept}:
        return None
    if _ends_audits(state):
        return None
    return interval if interval == _between(state, interval.begin, interval.until) else None


def candidate(state: State) -> Interval | None:
    """The newest interval, if its logs are there and it is not audited yet."""
    kept, saved_in = state.checkpoints.kept, state.audits.saved_in
    if len(kept) < 2:
        return None
    begin, until = kept[-2:]
    if begin not in saved_in or until not in saved_in:  # an earlier run saved one
        return None
    # After a return to a checkpoint logs begin there, and it counts as saved then. Those of a layout before
    # are of no use.
    if saved_in[begin] < state.checkpoints.log_since or begin < state.layouts.since:
        return None
    interval = _between(state, begin, until)
    marked = any((mark.until, mark.epoch) == (until, interval.epoch) for mark in state.audits.marks)
    return None if marked else interval


def _between(state: State, begin: int, until: int) -> Interval:
    epoch, world = state.checkpoints.epoch, state.worlds.present.number
    return Interval(begin, until, epoch, world, state.layouts.changes)


def logs_needed_since(state: State) -> int | None:
    """The iteration from which on the logs stay for the audit that runs; None if none runs."""
    interval = interval_of(state)
    return interval.begin if interval is not None and auditors(state) else None


def pinned(state: State) -> set[int]:
    """Checkpoints that stay: those of the interval that is audited, the newest that was audited, and those
    to which all are to go back.
    """
    interval = interval_of(state)
    own = {interval.begin, interval.until} if interval is not None and auditors(state) else set[int]()
    last = last_audited(state)
    due = {one.back_to for one in state.audits.due if one.back_to is not None}
    return own | due | ({last.right} if last is not None else set())


def last_audited(state: State, at_most: int | None = None) -> Mark | None:
    """The mark of the newest checkpoint that is right, as all machines came out as recorded.

    Args:
        at_most: completed iterations; None for any number.
    """
    kept = state.checkpoints.kept
    found = [m for m in state.audits.marks if m.whole and m.right in kept]
    return next((m for m in reversed(found) if at_most is None or m.right <= at_most), None)


def due_after(state: State, judgement: Judgement, choice: str) -> Due | None:
    """All that is to follow from a judgement; None for nothing.

    Args:
        state: the one in which it was made.
        judgement: the newest one, or one of several.
        choice: ``--on-corruption``.
    """
    if choice in ("", "warn") or judgement.wrong in (Wrong.NOBODY, Wrong.UNDECIDED):
        return None
    reason = why_in_doubt(judgement)
    if judgement.wrong == Wrong.SPARE:
        return Due(choice, reason, leaves=_name_now(state, judgement.spares[0]))
    if choice == "stop":
        return Due(choice, reason, ends=True)
    back = choice == "back" and not _has_gone_back_for(state, judgement)
    leaves = judgement.wrong == Wrong.MACHINE and judgement.machine in state.membership.slots
    return Due(
        choice,
        reason,
        back_to=_back_to(state, judgement) if back else None,
        leaves=judgement.machine if leaves else "",
        at_once=leaves and back,
    )


def still_due(state: State) -> tuple[Due, ...]:
    """The part of what is due that is not done yet."""
    return tuple(due for due in state.audits.due if due.back_to is not None or _act(state, due) is not None)


def next_act(state: State, machine: str) -> ev.Event | None:
    """The event that a machine appends next because it is due after a judgement. One does so for all."""
    if state.phase == Phase.ENDED or machine != _acting(state):
        return None
    acts = (act for due in state.audits.due if (act := _act(state, due)) is not None)
    return next(acts, None)


def _acting(state: State) -> str | None:
    """One that is there, so that nothing is done twice: a spare, and one of the others once none is left."""
    membership = state.membership
    members = [machine for machine in membership.slots if machine not in membership.hosts]
    return min(auditors(state) or members, default=None)


def _act(state: State, due: Due) -> ev.Event | None:
    """The next event of what is due; None if all is done, or cannot be done in this phase."""
    asked_by, membership = f"--on-corruption {due.choice}", state.membership
    if due.ends:
        return ev.JobClosed(reason=due.reason, cause=Cause.MACHINE)
    if due.back_to is not None:
        return _return_to(state, due.back_to, due.reason) if state.phase == Phase.LIVE else None
    if due.leaves not in {*membership.slots, *membership.spares} - {*membership.fenced}:
        return None
    # A machine that trained on meanwhile, as one may that was asked to leave, would spoil what comes after
    # the checkpoint.
    if due.at_once and due.leaves in membership.slots and membership.own_spares():
        return ev.MachineLost(machine=due.leaves, reason=f"{asked_by}: {due.reason}", on_request=True)
    if due.leaves in membership.draining:
        return None
    return ev.DrainRequested(machine=due.leaves, asked_by=asked_by)


def act_at_the_end(state: State, due: Sequence[Due]) -> ev.CheckpointsDoubted | ev.JobClosed:
    """The event that stands for all that is due in a job that ends: the return furthest back, or its end."""
    returns = [(one.back_to, one.reason) for one in due if one.back_to is not None]
    if returns:
        return _return_to(state, *min(returns))
    return ev.JobClosed(reason=due[0].reason, cause=Cause.MACHINE)


def _return_to(state: State, iteration: int, reason: str) -> ev.CheckpointsDoubted | ev.JobClosed:
    kept = [one for one in state.checkpoints.kept if one <= iteration]
    if not kept:  # that one was damaged, and there was none before it
        return ev.JobClosed(reason=f"no checkpoint is left from before: {reason}", cause=Cause.MACHINE)
    return ev.CheckpointsDoubted(generation=state.generation, iteration=kept[-1], reason=reason)


def _name_now(state: State, machine: str) -> str:
    """The present name of a machine, which may have come back under another one."""
    present = sorted({*state.membership.spares, *state.membership.slots})
    identity_of = state.membership.identity_of
    return next((name for name in present if identity_of(name) == identity_of(machine)), machine)


def _has_gone_back_for(state: State, judgement: Judgement) -> bool:
    """Whether it would be for ever: nobody leaves, and all have gone back for the same before."""
    if judgement.wrong not in (Wrong.SEVERAL, Wrong.LINK):
        return False

    def cause(one: Judgement) -> tuple[object, ...]:
        # A link's fault is found at both of its ends.
        where = one.slots if one.wrong == Wrong.SEVERAL else one.slot
        return one.wrong, one.interval.begin, where

    epoch = judgement.interval.epoch
    return any(cause(one) == cause(judgement) for one in state.audits.judged if one.interval.epoch < epoch)


def why_in_doubt(judgement: Judgement) -> str:
    """A judgement in words."""
    what = f"{judgement.tensors} (worker {judgement.rank})"
    if judgement.wrong == Wrong.LINK:
        return f"what machine {judgement.slot} has sent arrived as something else: {what}"
    who = f"machine {judgement.slot}"
    if judgement.wrong == Wrong.SEVERAL:
        who = f"one of {named('machine', judgement.slots)}"
    return f"{who} has computed iteration {judgement.iteration} wrong: {what}"


def _back_to(state: State, judgement: Judgement) -> int:
    """The last checkpoint that an audit shows to be right, else the one from which this audit began."""
    begin = judgement.interval.begin
    mark = last_audited(state, at_most=begin)
    return begin if mark is None else mark.right
