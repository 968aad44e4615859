"""Machines that join, are lost, or finish, and the slots that they fill."""

from __future__ import annotations

import dataclasses

from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.attempts import DEADLINE, MAX_TRIES
from swift_ft.recovery.causes import Cause, cause_of
from swift_ft.recovery.early_ends import why_incomplete, why_not_saved
from swift_ft.recovery.exclusion import domain_in_words, domains_left_out, why_left_out
from swift_ft.recovery.guests import guests_of
from swift_ft.recovery.handlers.failures import note_failure, note_machine, note_run
from swift_ft.recovery.handlers.generations import end_job, end_too_early, fill_slots, restart_all, vacate
from swift_ft.recovery.handlers.guests import guest_declined, relieve_guests
from swift_ft.recovery.handlers.newcomers import (
    is_newcomer,
    refuse,
    refuse_strange_script,
    why_refused,
)
from swift_ft.recovery.handlers.worlds import give_up_change
from swift_ft.recovery.job_state import JobShape, Layouts, Phase, State, Verdict
from swift_ft.recovery.membership import Spare, base_of
from swift_ft.recovery.repeats import error_to_note, passes, why_again
from swift_ft.recovery.values import replace

_OF_THE_MACHINE = frozenset({Cause.MACHINE, Cause.DEVICE})
"""Causes of losses that another machine in its place would not have met.

Not the network: it may be the reporter's own, or that of a server.
"""
_MOST_DIFFERED = 8
"""Steps that the state names: the journal has all of them."""


def job_opened(state: State, event: ev.JobOpened) -> State:
    """Fix the job's shape. All slots are empty."""
    if state.shape.machines:
        return state
    started_in = Map(dict.fromkeys(range(event.machines), 0))
    return replace(
        state,
        shape=JobShape(
            event.machines,
            event.workers_per_machine,
            event.max_failures,
            event.setup,
            event.min_machines,
            event.shrinks,
            event.max_machine_failures,
        ),
        membership=replace(state.membership, started_in=started_in),
        checkpoints=replace(state.checkpoints, committed=event.checkpoint),
        tries=replace(state.tries, restarts_left=event.restarts),
        layouts=Layouts(current=event.layers),
    )


def machine_joined(state: State, event: ev.MachineJoined) -> State:
    """Add a machine to the spares, and fill the empty slots if there are spares for all of them.

    What is left of the spares relieves guests.
    """
    membership = state.membership
    if membership.knows(event.machine):
        return state
    if reason := why_refused(state, event):
        return refuse(state, event.machine, reason)
    if event.host:
        membership = replace(membership, hosts=membership.hosts.set(event.machine, event.host))
        if (
            event.host not in membership.slots and event.host not in membership.spares
        ):  # it was lost meanwhile
            return replace(
                state, membership=replace(membership, fenced=membership.fenced.set(event.machine, None))
            )
    membership = membership.identify(event.machine, event.identity)
    if not event.host:
        known = replace(state, membership=membership)
        if reason := why_left_out(known, event.machine, event.domain):
            return refuse(known, event.machine, reason)
    if (base := base_of(event.machine)) in membership.silent:  # it was frozen for longer than allowed
        state = replace(state, tries=replace(state.tries, thawed=state.tries.thawed + 1))
        membership = replace(membership, silent=membership.silent.delete(base))
    spare = Spare(membership.arrivals, event.preferred_slot, event.domain)
    membership = replace(
        membership,
        spares=membership.spares.set(event.machine, spare),
        arrivals=membership.arrivals + 1,
        addresses=membership.addresses.set(event.machine, event.address),
    )
    return relieve_guests(fill_slots(replace(state, membership=membership)))


def health_check_failed(state: State, event: ev.HealthCheckFailed) -> State:
    """Refuse a machine that says itself that it is not healthy."""
    return state if state.membership.knows(event.machine) else refuse(state, event.machine, event.reason)


def machine_lost(state: State, event: ev.MachineLost) -> State:
    """Fence a machine, and its guests with it. If one of them fills a slot, the generation is over."""
    # It may have been frozen, and its view of the others be an old one (decision 8).
    if event.reporter in state.membership.fenced or event.machine in state.membership.refused:
        return state
    state = _note_records(state, event)
    # Several watchers report one loss, which counts once.
    if event.reporter and event.machine not in state.membership.fenced:
        membership = state.membership
        if not _blames_the_link(event):
            membership = membership.silence(event.machine)
        if event.silent:
            membership = membership.fell_silent(event.machine)
        state = replace(state, membership=membership)
    if event.stopped_by and event.machine in state.membership.slots:
        stopped = Verdict(False, event.reason, 128 + event.stopped_by)
        state = replace(state, tries=replace(state.tries, stopped=stopped))
    before, generation = state, state.generation
    # Before its slot is empty: what has failed, and in which task, is known by slot.
    if not event.on_request:
        before = note_machine(
            state,
            event.machine,
            event.reason,
            cause_of(event),
            ran_s=event.ran_s,
            on_purpose=event.starts_again,
        )
    after = _lose_with_guests(before, event)
    if event.silent and after.generation > generation:
        return replace(after, round=replace(after.round, after_silence=True))
    return after


def _note_records(state: State, event: ev.MachineLost) -> State:
    """Note up to where the lost workers have given their records: those in their place go on from there."""
    slot, membership = state.membership.slots.get(event.machine), state.membership
    if slot is None or not event.recorded:
        return state
    known = membership.recorded
    told = zip(state.ranks_of(slot), event.recorded, strict=False)
    more = {rank: before for rank, before in told if before > known.get(rank, 0)}
    return replace(state, membership=replace(membership, recorded=known.update(more)))


def drain_requested(state: State, event: ev.DrainRequested) -> State:
    """Note that a machine is to leave, if it takes part."""
    membership = state.membership
    takes_part = event.machine in membership.slots or event.machine in membership.spares
    if not takes_part or event.machine in membership.fenced or event.machine in membership.draining:
        return state
    committed = state.checkpoints.committed
    since = -1 if committed is None else committed
    return replace(
        state, membership=replace(membership, draining=membership.draining.set(event.machine, since))
    )


def _lose_with_guests(state: State, event: ev.MachineLost) -> State:
    reason = f"its host was lost: {event.reason}"
    # Slots are filled after the last one: all are lost at once, and one generation is enough.
    for guest in guests_of(state, event.machine):
        if state.phase != Phase.ENDED:
            state = _lose(state, dataclasses.replace(event, machine=guest, reason=reason), last=False)
    return _lose(state, event) if state.phase != Phase.ENDED else state


def _lose(state: State, event: ev.MachineLost, *, last: bool = True) -> State:
    """Fence a machine and empty its slot; ``last`` unless others are lost with it."""
    state = _leave_out_spares(_fence(_charge(state, event), event))
    membership, slot = state.membership, state.slot_of(event.machine)
    # A spare's loss interrupts nothing, nor that of a machine whose script has ended with success.
    if slot is None or slot in membership.exited:
        return state
    failures = state.tries.failures + _is_failure(event)
    limit = state.shape.max_failures
    if limit is not None and failures > limit:
        return end_job(
            state,
            f"{failures} machines were lost since the last checkpoint, "
            f"more than the limit of {limit} (the last one: {event.reason})",
        )
    if not state.all_finished and (ended := end_too_early(state)) is not None:
        return ended
    if membership.exited or state.all_finished:
        return end_job(state, why_incomplete(state, f"machine {event.machine} was lost", event.reason))
    if why := state.tries.attempts.hopeless(has_sessions=state.has_sessions):
        return end_job(state, why)
    state = replace(vacate(state, event.machine), tries=replace(state.tries, failures=failures))
    if not last:
        return state
    unheard = state.tries.attempts.unheard.get(slot, 0)
    # Machine after machine that is lost before it reports: something else must be wrong.
    if unheard < MAX_TRIES:
        return fill_slots(state)
    why = f"{unheard} machines in a row were lost in slot {slot} before they reported: {event.reason}"
    if unheard >= 2 * MAX_TRIES:
        return end_job(state, f"{why}; all workers were started again in between, and no way back is left")
    return restart_all(state, why)


def _is_failure(event: ev.MachineLost) -> bool:
    return not (event.on_request or event.starts_again)


def _blames_the_link(event: ev.MachineLost) -> bool:
    """Whether another machine, whose own link may be at fault, does not hear this one."""
    return bool(event.reporter) and cause_of(event) == Cause.NETWORK


def _charge(state: State, event: ev.MachineLost) -> State:
    """Count a loss for the machine, if it may be broken. Its program's errors would meet it anywhere."""
    membership, slot = state.membership, state.slot_of(event.machine)
    is_there = slot not in membership.exited if slot is not None else event.machine in membership.spares
    if not is_there or event.machine in membership.hosts:
        return state
    if not _is_failure(event) or cause_of(event) not in _OF_THE_MACHINE:
        return state
    return replace(state, membership=membership.note_loss(event.machine))


def _fence(state: State, event: ev.MachineLost) -> State:
    membership, machine = state.membership, event.machine
    if machine in membership.addresses:
        membership = replace(membership, addresses=membership.addresses.delete(machine))
    if machine in membership.spares:
        membership = replace(membership, spares=membership.spares.delete(machine))
    if machine in membership.draining:
        membership = replace(membership, draining=membership.draining.delete(machine))
    change = state.worlds.change
    if change is not None and change.slot_of(machine) is not None:  # a spare's loss interrupts nothing else
        state = give_up_change(state, f"machine {machine} was lost")
    if event.on_request:
        membership = replace(membership, left=membership.left.set(machine, None))
    return replace(state, membership=replace(membership, fenced=membership.fenced.set(machine, None)))


def _leave_out_spares(state: State) -> State:
    """Refuse spares whose failure domain is left out by now."""
    if not state.membership.spares or not (domains := domains_left_out(state)):
        return state
    for machine, spare in sorted(state.membership.spares.items()):
        if spare.domain not in domains or machine in state.membership.hosts:
            continue
        change = state.worlds.change
        if change is not None and change.slot_of(machine) is not None:
            state = give_up_change(state, f"machine {machine} is left out")
        state = refuse(state, machine, domain_in_words(state, spare.domain))
    return state


def worker_came_back(state: State, event: ev.WorkerCameBack) -> State:
    """Note a false alarm, so that the deadline grows. Its machine stays lost."""
    return replace(state, tries=replace(state.tries, came_back=state.tries.came_back + 1))


def sessionless_workers(state: State, event: ev.SessionlessWorkers) -> State:
    """A script without a session can only be started again, and with it all others, as under torchrun."""
    slot = state.slot_of(event.machine)
    if slot is None or state.has_sessions:  # its session has not begun yet
        return state
    sessionless = state.round.sessionless.set(slot, None)
    state = note_run(replace(state, round=replace(state.round, sessionless=sessionless)), event.ran_s)
    return restart_all(state, "the script has no session")


def script_exited(state: State, event: ev.ScriptExited) -> State:
    """Note that a worker's script has succeeded. The job ends with the last one.

    In a recovery all workers are needed, so the job ends at once. While all train, the others may be done,
    too: it ends when the communication of one of them fails.
    """
    slot = state.slot_of(event.machine)
    if slot is None or state.membership.started_in[slot] != event.started_in:
        return state
    ranks = state.ranks_of(slot) if event.rank is None else (event.rank,)
    ended = state.membership.ended.update(dict.fromkeys(ranks, event.iteration))
    state = replace(state, membership=replace(state.membership, ended=ended))
    if all(rank in ended for rank in state.ranks_of(slot)):
        exited = state.membership.exited.set(slot, None)
        state = replace(state, membership=replace(state.membership, exited=exited))
    if len(ended) == state.world_size:
        if not_saved := why_not_saved(state):
            return end_job(state, not_saved)
        verdict = Verdict(True, "finished")
        return replace(state, phase=Phase.ENDED, round=replace(state.round, plan=None), verdict=verdict)
    if state.phase == Phase.LIVE:  # no worker has to wait for this worker's last iteration
        finished = state.round.finished.update(dict.fromkeys(ranks))
        state = give_up_change(state, "a script has ended")
        return replace(state, round=replace(state.round, finished=finished))
    if not state.membership.restart_all and (too_early := end_too_early(state)) is not None:
        return too_early
    return state


def script_failed(state: State, event: ev.ScriptFailed) -> State:
    """Restart all processes, as often as the user allows; a usage error ends the job at once.

    What fails in a newcomer, and did not in those whose state it is to share, costs its machine first.
    """
    slot = state.slot_of(event.machine)
    if slot is None or state.membership.started_in[slot] != event.started_in:
        return state
    if (without_it := refuse_strange_script(state, event, slot)) is not None:
        return without_it
    if not event.usage and _fails_before_it_trains(state, slot):
        return _lose_newcomer(state, event)
    if not event.usage and _is_repairing(state, slot):
        return restart_all(state, event.reason)  # the loss under repair most likely caused it
    if event.usage or state.tries.restarts_left == 0:
        reason = event.reason
        if state.all_finished:
            reason = why_incomplete(state, f"the script of machine {event.machine} failed", reason)
        return end_job(state, reason, event.exit_code)
    if again := why_again(state, event):
        reason = f"{event.reason} ({again}: another restart would meet it again)"
        return end_job(state, reason, event.exit_code)
    left, error = state.tries.restarts_left - 1, error_to_note(state, event)
    tries = replace(state.tries, restarts_left=left, script_error=error)
    return restart_all(replace(state, tries=tries), event.reason)


def _fails_before_it_trains(state: State, slot: int) -> bool:
    """Whether a slot's workers were started to replace others, and have never trained with the rest.

    Another loss may have ended the generation in which they were started. Where all are about to start again
    in any case, their machine may stay.
    """
    newcomer = is_newcomer(state, slot) and state.membership.started_in[slot] > state.tries.live_in
    return newcomer and state.has_sessions and not state.membership.restart_all


def _lose_newcomer(state: State, event: ev.ScriptFailed) -> State:
    """A newcomer cannot begin: its machine counts as lost, unless what it has met may pass.

    Then it, or the next guest of its host, comes later. Else the host of a guest has no room for another one.
    """
    attempts, host = state.tries.attempts, state.membership.hosts.get(event.machine)
    # No way back is to blame for a server that does not answer, and the survivors' state is worth a wait.
    waits = passes(event) and attempts.may_wait
    lost = ev.MachineLost(
        machine=event.machine,
        reason=event.reason,
        starts_again=waits,
        cause=cause_of(event),
        evidence=event.evidence,
    )
    if waits:
        put_off = attempts.put_off(state.membership.identity_of(host or event.machine))
        return _lose_with_guests(replace(state, tries=replace(state.tries, attempts=put_off)), lost)
    if host is None:
        noted = note_machine(state, event.machine, event.reason, cause_of(event))
        return _lose_with_guests(noted, lost)
    declined = ev.GuestDeclined(machine=host, reason=f"its guest failed: {event.reason}")
    return guest_declined(_lose_with_guests(state, lost), declined)


def _is_repairing(state: State, slot: int) -> bool:
    """Whether a generation has just ended, and the slot's older workers have not reported yet."""
    if state.phase == Phase.FORMING:
        return state.generation > 0
    return state.phase == Phase.AGREEING and state.membership.started_in[slot] < state.generation


def deadline_passed(state: State, event: ev.DeadlinePassed) -> State:
    """Fence the machines that have not answered in time."""
    if event.phase != state.phase:
        return state
    late = [machine for machine in state.missing() if machine in event.machines]  # by slot, for all the same
    losses = [
        ev.MachineLost(
            machine=machine, reason=event.reason, cause=Cause.SCRIPT if machine in event.located else ""
        )
        for machine in late
    ]
    if late:
        state = note_failure(state, DEADLINE, event.reason)
    # Note all of them first: the first loss ends the plan and the phase by which failures are judged.
    for lost in losses:
        state = note_machine(state, lost.machine, lost.reason, cause_of(lost))
    for lost in losses:
        if state.phase != Phase.ENDED and lost.machine not in state.membership.fenced:
            state = _lose_with_guests(state, lost)
    return state


def fault_injected(state: State, event: ev.FaultInjected) -> State:
    """Remember a test's fault, which happens once in a run."""
    return replace(state, injected=state.injected | {event.fault})


def step_differed(state: State, event: ev.StepDiffered) -> State:
    """Remember a step whose computations differed."""
    return replace(state, differed=(*state.differed, event)[-_MOST_DIFFERED:])


def job_closed(state: State, event: ev.JobClosed) -> State:
    """End the job on request, or because it cannot continue."""
    return end_job(state, event.reason, event.exit_code)
