"""Recovery: from the status of all workers to a plan, and from the plan to live training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.attempts import COMMUNICATION, STATE, Way
from swift_ft.recovery.audits import BEFORE_ALL_LOGS, Audits
from swift_ft.recovery.handlers.failures import note_failure
from swift_ft.recovery.handlers.generations import end_job, end_too_early, open_generation, restart_all
from swift_ft.recovery.handlers.layouts import in_layout, placed, with_new_layout
from swift_ft.recovery.handlers.newcomers import (
    MAX_STRANGERS,
    differs_from_the_start,
    refuse_other_steps,
    refuse_stranger,
)
from swift_ft.recovery.handlers.worlds import give_up_change, survivor_reported
from swift_ft.recovery.job_state import Checkpoints, Layouts, Phase, SavedPart, State
from swift_ft.recovery.layout.stage_layers import replicated_layers
from swift_ft.recovery.maps import kept, without
from swift_ft.recovery.plan import Plan, RecoveryMode, make_plan
from swift_ft.recovery.topology import replica_sets
from swift_ft.recovery.values import replace


def status_reported(state: State, event: ev.StatusReported) -> State:
    """Note a worker's status. The last one leads to the plan."""
    if not report_counts(state, event):
        return state
    statuses = state.round.statuses.set(event.rank, status_that_counts(state, event))
    state = replace(state, has_sessions=True, round=replace(state.round, statuses=statuses))
    if (ended := end_too_early(state)) is not None:
        return ended
    if state.phase == Phase.FORMING:
        return survivor_reported(state)
    return state if len(statuses) < state.world_size else _decide(state)


def report_counts(state: State, event: ev.StatusReported) -> bool:
    """Whether a report is of this round, and of the workers that are in its slot now.

    It may come late: in a later generation, or while a slot is empty.
    """
    membership, slot = state.membership, state.slot_of_rank(event.rank)
    # Workers may have begun to carry the plan out, so it takes a new round (decision 78).
    if state.round.decided or slot not in membership.members:
        return False
    return max(state.round.asked_in, membership.started_in[slot]) <= event.generation <= state.generation


def status_that_counts(state: State, event: ev.StatusReported) -> ev.StatusReported:
    """A report, and that its state is still being replayed if an earlier replay did not reach its end."""
    targets = state.tries.replay_targets
    if targets and event.live and (event.iteration or 0) < targets.get(event.rank, 0):
        return dataclasses.replace(event, live=False)
    return event


def _decide(state: State) -> State:
    """Choose the recovery mode, now that every worker has reported."""
    # Persistent maps have no stable order, and the plan depends on one (decision 4).
    statuses = dict(sorted(state.round.statuses.items()))
    if (without_others := refuse_other_steps(state, statuses)) is not None:
        return without_others
    attempts = state.tries.attempts.begin(statuses, state.checkpoints.committed)
    if why := attempts.hopeless(has_sessions=True):
        return end_job(state, why)
    plan = _plan(state, statuses, state.tries.fallback_reason)
    if why := attempts.exhausted(Way.of(plan)):
        plan = _plan(state, statuses, why)  # by memory or the checkpoint, if that was not it already
        if Way.of(plan) == Way.MEMORY and (why := attempts.exhausted(Way.MEMORY)):
            plan = _plan(state, statuses, why, allow_memory=False)
        if last := attempts.exhausted(Way.of(plan)):
            return end_job(state, f"no other way back is left: {last}")
    state = replace(state, tries=replace(state.tries, attempts=attempts.count(Way.of(plan))))
    return _follow(state, with_new_layout(state, plan, statuses), statuses)


def _plan(
    state: State,
    statuses: Mapping[int, ev.StatusReported],
    fallback_reason: str | None,
    *,
    allow_memory: bool = True,
) -> Plan:
    return make_plan(
        statuses,
        workers_per_machine=state.shape.workers_per_machine,
        committed=state.checkpoints.committed,
        fallback_reason=fallback_reason,
        allow_helpers=state.tries.no_helpers_reason is None,
        log_gap_before=state.checkpoints.log_gap_before,
        allow_memory=allow_memory and not state.tries.memory_in_doubt,
        layout_since=state.layouts.since if state.layouts.changes else None,
        layers=replicated_layers(statuses, state.layouts.current),
    )


def _follow(state: State, plan: Plan, statuses: Mapping[int, ev.StatusReported]) -> State:
    """Begin what the plan asks for."""
    if plan.mode == RecoveryMode.RESTART:
        return restart_all(state, plan.reason)
    if (
        plan.mode == RecoveryMode.START
        and state.checkpoints.committed is None
        and _began_apart(state, statuses)
    ):
        return restart_all(
            state, "replicas that were started one after the other began with different values"
        )
    if plan.mode in (RecoveryMode.START, RecoveryMode.FALLBACK):
        checkpoints = _in_new_epoch(state.checkpoints, state.generation)
        state = replace(state, audits=_begun_again(state))
    elif plan.mode == RecoveryMode.MEMORY:
        checkpoints = _from_memory(state.checkpoints, plan, state.generation)
    else:
        checkpoints = _after_partial_recovery(state, plan, statuses)
        state = replace(state, audits=_without_what_was_rounded(state, plan, statuses))
    if plan.mode == RecoveryMode.START and state.checkpoints.committed is None:
        state = replace(state, layouts=Layouts(shares=state.layouts.shares))  # all scripts begin anew
    return _carry_out(replace(state, checkpoints=checkpoints), plan)


def _carry_out(state: State, plan: Plan) -> State:
    """Begin to recover. Workers without a task are ready at once."""
    replays = {rank: task.replay_until for rank, task in plan.tasks.items() if task.begin < task.replay_until}
    if plan.mode == RecoveryMode.REPLICA:  # what is completed without others is a whole state until then
        replays = {}
    # Kept until all are live: a replay that is interrupted leaves a state that others are ahead of.
    tries = replace(state.tries, replay_targets=Map(replays), fallback_reason=plan.reason or None)
    helpers = {rank for replay in plan.parallel_replays for rank in replay.helpers}
    idle = [rank for rank, task in plan.tasks.items() if task.idle and rank not in helpers]
    if plan.new_layout is not None:  # all take part in the group in which layers move
        idle = []
    agreed = replace(state.round, plan=plan, decided=True, ready=Map(dict.fromkeys(idle)))
    layouts = placed(state.layouts, state.round.statuses, state.layouts.current)
    layouts = replace(layouts, pending=None)  # the plan has it
    return _live_if_ready(replace(state, phase=Phase.RECOVERING, round=agreed, tries=tries, layouts=layouts))


def _began_apart(state: State, statuses: Mapping[int, ev.StatusReported]) -> bool:
    """Whether replicas may differ from the start.

    Replicas begin with equal values if they were started together, or received a replica's state. A replica
    whose source died during the transfer has lost even its own initial values.
    """
    started: dict[tuple[str, ...], set[int]] = {}
    for rank, report in statuses.items():
        if report.holds:
            generation = state.membership.started_in[state.slot_of_rank(rank)]
            started.setdefault(report.holds, set()).add(generation)
    return any(len(generations) > 1 for generations in started.values())


def _in_new_epoch(checkpoints: Checkpoints, generation: int) -> Checkpoints:
    """All workers begin from a checkpoint. Earlier parts and logs belong to another history."""
    return replace(
        checkpoints,
        epoch=checkpoints.epoch + 1,
        parts=Map(),
        revoked=Map(),
        log_gap_before=Map(),
        log_since=generation,
    )


def _begun_again(state: State) -> Audits:
    """All have gone back to the last checkpoint, with which the logs begin: what follows can be audited."""
    audits, committed = state.audits, state.checkpoints.committed
    # One of an earlier run, or with which a layout or a world began, may be of other layers.
    if committed is None or committed not in audits.saved_in:
        return audits
    if state.layouts.changes and committed <= state.layouts.since:
        return audits
    return replace(audits, saved_in=audits.saved_in.set(committed, state.generation))


def _without_what_was_rounded(state: State, plan: Plan, statuses: Mapping[int, ev.StatusReported]) -> Audits:
    """Nothing is audited from the last checkpoint to the next: a replay would not round as an undo has.

    Messages may be alike all the same, and then only the states would differ, with nobody at fault.
    """
    audits, committed = state.audits, state.checkpoints.committed
    rounds = any(statuses[rank].rounds for rank, task in plan.tasks.items() if task.undo)
    if not rounds or committed is None or committed not in audits.saved_in:
        return audits
    return replace(audits, saved_in=audits.saved_in.set(committed, BEFORE_ALL_LOGS))


def _from_memory(checkpoints: Checkpoints, plan: Plan, generation: int) -> Checkpoints:
    """All workers begin from a state in memory, which is as good as a checkpoint but in no store.

    So it is after a change of the layout: what stages have logged before is of no use to stages of other
    layers.

    Logs of the iterations before it count as gone, so no replay goes across it before the next commit. If it
    is a checkpoint's iteration, all workers save it again: their earlier parts are of another epoch.
    """
    begun = _in_new_epoch(checkpoints, generation)
    # The store's checkpoint is of the same iteration: no replay needs a log from before it.
    if plan.resume <= (checkpoints.committed or 0):
        return begun
    return replace(
        begun,
        revoked=Map({(plan.resume, rank): generation for rank in plan.tasks}),
        log_gap_before=Map(dict.fromkeys(plan.tasks, plan.resume)),
    )


def _after_partial_recovery(
    state: State, plan: Plan, statuses: Mapping[int, ev.StatusReported]
) -> Checkpoints:
    """Keep the parts and logs that still count when some workers roll back and others keep their state."""
    vouches = _vouches_until(plan, statuses, state.checkpoints)
    return replace(
        state.checkpoints,
        parts=_vouched_for(state.checkpoints.parts, vouches),
        revoked=state.checkpoints.revoked.update(
            dict.fromkeys(_revoked(plan, statuses, vouches), state.generation)
        ),
        log_gap_before=_log_gaps(state, plan, statuses),
    )


def _vouches_until(
    plan: Plan, statuses: Mapping[int, ev.StatusReported], checkpoints: Checkpoints
) -> dict[int, int]:
    """By rank, the last iteration whose part of a checkpoint counts: the worker will have completed it.

    If later parts of a lost worker counted, a checkpoint could be committed, and older logs deleted, before
    its replacement has reached it. If later parts of workers that roll back counted, a checkpoint could mix
    two histories. Replicas that replay save again: all but one of them name a part that is yet to be written.
    So do replicas of a worker that did not complete the last iteration itself but received its state: it has
    not saved it, and what it was to save for all may be incomplete. So do all workers if the script's parts
    before the consensus iteration are done again: the checkpoint follows them, and has what comes of them.
    """
    vouches = {}
    for replicas in replica_sets(statuses):
        for rank in replicas:
            task = plan.tasks[rank]
            vouches[rank] = task.end if len(replicas) == 1 else _whole_at(plan, rank)
        if len(replicas) > 1 and _save_again(replicas, plan, statuses, checkpoints):
            vouches.update({rank: _whole_at(plan, rank) - 1 for rank in replicas})
    if plan.parts_from is not None:
        return {rank: min(until, plan.resume - 1) for rank, until in vouches.items()}
    return vouches


def _save_again(
    replicas: Sequence[int],
    plan: Plan,
    statuses: Mapping[int, ev.StatusReported],
    checkpoints: Checkpoints,
) -> bool:
    """Whether some of these replicas have no part of a checkpoint of the state that all go on with."""
    begin = _whole_at(plan, replicas[0])
    if begin <= (checkpoints.committed or 0):
        return False
    received = any((statuses[rank].iteration or 0) < begin for rank in replicas)
    parts: Mapping[int, SavedPart] = checkpoints.parts.get(begin, {})
    interrupted = any((begin, rank) in checkpoints.revoked and rank not in parts for rank in replicas)
    return received or interrupted


def _whole_at(plan: Plan, rank: int) -> int:
    """With which iteration a worker begins that replays nothing, or completes an interrupted one alone."""
    task = plan.tasks[rank]
    return task.end if plan.mode == RecoveryMode.REPLICA else task.begin


def _vouched_for(
    parts: Map[int, Map[int, SavedPart]], vouches: Mapping[int, int]
) -> Map[int, Map[int, SavedPart]]:
    """Without parts of iterations that their worker will not have completed (:func:`_vouches_until`)."""
    for iteration in sorted(parts):
        dropped = [rank for rank in parts[iteration] if iteration > vouches[rank]]
        parts = parts.set(iteration, without(parts[iteration], dropped))
    return parts


def _revoked(
    plan: Plan, statuses: Mapping[int, ev.StatusReported], vouches: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Iterations, with ranks, that survivors undo or save again: their parts may still become durable."""
    for rank, report in statuses.items():
        last = max(report.iteration or 0, plan.tasks[rank].begin)
        for iteration in range(vouches[rank] + 1, last + 1):
            yield iteration, rank


def _log_gaps(state: State, plan: Plan, statuses: Mapping[int, ev.StatusReported]) -> Map[int, int]:
    """By rank, the iteration before which its log has gaps.

    State that a replica sent comes without a log; a replay writes one. Where an undo has rounded, the
    iteration is in the logs of a pipeline twice, and unlike: no replay may go across it.
    """
    replayed = {rank for rank, task in plan.tasks.items() if task.begin < task.replay_until}
    gaps = kept(state.checkpoints.log_gap_before, lambda rank, _: rank not in replayed)
    for transfer in plan.transfers:
        # Single parameters go to workers that were in the same iteration, and have logged what came before.
        for rank in transfer.targets if transfer.parameters is None else ():
            report, at = statuses[rank], plan.tasks[rank].begin
            logged_itself = report.live and (report.iteration or 0) >= at
            if at > (state.checkpoints.committed or 0) and not logged_itself:
                gaps = gaps.set(rank, at)
    undone = (statuses[rank] for rank, task in plan.tasks.items() if task.undo)
    rounded = {report.pipeline for report in undone if report.rounds}
    across = [rank for rank, report in statuses.items() if report.stages and report.pipeline in rounded]
    return gaps.update(dict.fromkeys(across, plan.resume + 1))


def worker_ready(state: State, event: ev.WorkerReady) -> State:
    """Note that a worker has done its part of the plan."""
    ready = state.round.ready.set(event.rank, None)
    return _live_if_ready(replace(state, round=replace(state.round, ready=ready)))


def _live_if_ready(state: State) -> State:
    if len(state.round.ready) < state.world_size:
        return state
    assert state.plan is not None
    tries = replace(
        state.tries,
        attempts=state.tries.attempts.resume(state.plan.resume),
        fallback_reason=None,
        memory_in_doubt=False,
        no_helpers_reason=None,
        replay_targets=Map(),
        stopped=None,
        live_in=state.generation,
    )
    live = replace(state, phase=Phase.LIVE, tries=tries, round=replace(state.round, awaiting=Map()))
    if (layout := state.plan.new_layout) is None:
        return live
    checkpoints = _from_memory(state.checkpoints, state.plan, state.generation)
    layouts = in_layout(state.layouts, layout, state.plan.resume)
    layouts = placed(layouts, state.round.statuses, layout)
    return replace(live, checkpoints=checkpoints, layouts=layouts)


def group_awaited(state: State, event: ev.GroupAwaited) -> State:
    """Note that a worker is about to form the group of its replay: it does so once all others of it are."""
    awaiting = state.round.awaiting.set(event.rank, None)
    return replace(state, round=replace(state.round, awaiting=awaiting))


def worker_finished(state: State, event: ev.WorkerFinished) -> State:
    """Note that a worker has completed its last iteration: layers do not move, and no other world follows."""
    state = give_up_change(state, "the training is complete")
    finished = state.round.finished.set(event.rank, None)
    layouts = replace(state.layouts, pending=None)
    checkpoints = state.checkpoints
    if event.saves is not None:
        checkpoints = replace(checkpoints, owed=event.saves)
    return replace(
        state, round=replace(state.round, finished=finished), layouts=layouts, checkpoints=checkpoints
    )


def replay_failed(state: State, event: ev.ReplayFailed) -> State:
    """Return to the checkpoint, because the logs cannot be used."""
    if event.diverged:
        return _diverged(state, event)
    why = f"worker {event.rank} cannot replay: {event.reason}"
    if state.plan is not None and state.plan.mode == RecoveryMode.MEMORY:
        why = f"worker {event.rank} cannot continue from the state in memory: {event.reason}"
    elif state.plan is not None and state.plan.mode in (RecoveryMode.START, RecoveryMode.FALLBACK):
        why = f"worker {event.rank} cannot continue from the checkpoint: {event.reason}"
    state = note_failure(state, STATE, why)
    return open_generation(replace(state, tries=replace(state.tries, fallback_reason=why)))


def _diverged(state: State, event: ev.ReplayFailed) -> State:
    """All processes restart from the checkpoint, unless only a strange machine has to go.

    A divergence says that the state or the log is wrong, or that what is computed depends on something else,
    such as a variable of the script. Survivors have that as it is now, and neither a checkpoint nor a copy in
    memory would go with it.

    Its digests prove that a checkpoint was loaded as it was saved, so it is the place to return to.
    """
    why = f"worker {event.rank} cannot replay: {event.reason}"
    if (ended := end_too_early(state)) is not None:
        return ended
    state = note_failure(state, STATE, why)
    if differs_from_the_start(state, event):
        assert state.plan is not None
        if state.plan.parallel_replay_of(event.rank) is not None:  # a helper may be what differs
            return open_generation(replace(state, tries=replace(state.tries, no_helpers_reason=why)))
        if state.tries.strangers < MAX_STRANGERS:
            return refuse_stranger(state, event)
    return restart_all(state, why)


def help_declined(state: State, event: ev.HelpDeclined) -> State:
    """Replay without helpers, because one of them cannot compute for others."""
    why = f"worker {event.rank} cannot help: {event.reason}"
    return open_generation(replace(state, tries=replace(state.tries, no_helpers_reason=why)))


def communication_failed(state: State, event: ev.CommunicationFailed) -> State:
    """Form the groups again, in RECOVERING too: workers that replay jointly are connected."""
    why = f"communication failed, and no machine was found dead: {event.reason}"
    # Counted, so that a broken network leads to the checkpoint, and not to group after group.
    return open_generation(note_failure(state, COMMUNICATION, why))
