"""Invariants of a simulated job, whatever fails. Each check raises :class:`Violation`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swift_ft.recovery import events as ev
from swift_ft.recovery.exclusion import machines_left_out
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.testing.simulation.store import Content, Violation, advance
from swift_ft.testing.simulation.worker import Worker


def check_step(before: State, after: State, event: ev.Event) -> None:
    """Check what the protocol guarantees for any event."""
    if before.phase == Phase.ENDED:
        raise Violation("a state changed after the end")
    if after.generation not in (before.generation, before.generation + 1) and not (
        isinstance(event, ev.DeadlinePassed)
    ):
        raise Violation(f"generation {before.generation} became {after.generation}")
    if (
        after.checkpoints.epoch < before.checkpoints.epoch
        or after.checkpoints.log_since < before.checkpoints.log_since
    ):
        raise Violation("an epoch decreased")
    _check_checkpoints(before, after, event)
    if any(iteration <= (after.checkpoints.committed or 0) for iteration, _ in after.checkpoints.revoked):
        raise Violation(
            f"{after.checkpoints.revoked} is remembered although {after.checkpoints.committed} is committed"
        )
    if (after.plan is not None) != (after.phase in (Phase.RECOVERING, Phase.LIVE)):
        raise Violation(f"plan {after.plan} in phase {after.phase}")
    if any(started_in > after.generation for started_in in after.membership.started_in.values()):
        raise Violation("workers were started in a generation that has not begun")
    _check_members(after)
    _check_asked_once(before, event)


def _check_asked_once(before: State, event: ev.Event) -> None:
    """However many machines are lost in the meantime, a worker reports once until a plan is made."""
    asked_again = isinstance(event, ev.StatusReported) and event.rank in before.round.statuses
    if asked_again and not before.round.decided:
        raise Violation(f"{event} comes a second time, and no plan was made since the first")


def _check_checkpoints(before: State, after: State, event: ev.Event) -> None:
    was, now = before.checkpoints, after.checkpoints
    if list(now.kept) != sorted({*now.kept}):
        raise Violation(f"{now.kept} is not in order")
    if was.committed is None or (now.committed is not None and now.committed >= was.committed):
        return
    if not isinstance(event, ev.CheckpointDamaged) or now.kept != was.earlier or now.epoch == was.epoch:
        raise Violation(f"committed decreased from {was.kept} to {now.kept}")


def _check_members(state: State) -> None:
    members = [m for m in state.members if m is not None]
    exited = {state.members[slot] for slot in state.membership.exited}
    spares = set(state.membership.spares)
    if len(members) != len(set(members)) or spares & set(members):
        raise Violation("a machine is in two places")
    live = set(members) - exited if state.phase != Phase.ENDED else set()
    if (live | spares) & set(state.membership.fenced):
        raise Violation("a fenced machine is a member or a spare")
    if (set(members) | spares) & set(state.membership.refused):
        raise Violation("a refused machine is a member or a spare")
    left_out = machines_left_out(state)
    if any(state.membership.identity_of(machine) in left_out for machine in live | spares):
        raise Violation("a machine that was lost too often is a member or a spare")
    if state.phase != Phase.ENDED and state.shape.machines:
        if (state.phase == Phase.FORMING) != (None in state.members):
            raise Violation(f"phase {state.phase} with members {state.members}")
        if state.phase == Phase.LIVE and len(state.round.ready) != state.world_size:
            raise Violation("live before all workers were ready")
        if state.round.finished and state.phase not in (Phase.LIVE, Phase.FORMING):
            raise Violation(f"finished in phase {state.phase}")


def check_requested_checkpoint(
    before: State, after: State, event: ev.Event, workers: Iterable[Worker]
) -> None:
    """An early checkpoint belongs to its generation, and no worker that has yet to reach it misses it."""
    requested = after.checkpoints.requested
    if requested is None:
        return
    if after.generation != before.generation:
        raise Violation(f"the request for a checkpoint at {requested} outlives its generation")
    if requested <= (-1 if after.checkpoints.committed is None else after.checkpoints.committed):
        raise Violation(
            f"a checkpoint is requested at {requested}, and {after.checkpoints.committed} is committed"
        )
    if before.checkpoints.requested == requested:
        return
    if not isinstance(event, ev.CheckpointRequested) or event.generation != after.generation:
        raise Violation(f"{event} is no request of generation {after.generation}")
    if before.checkpoints.requested is None:
        return
    for worker in workers:
        before_it = worker.content is not None and worker.content.iteration < before.checkpoints.requested
        if worker.active_generation == after.generation and before_it:
            raise Violation(
                f"{worker} would have saved at {before.checkpoints.requested}: {requested} is too early"
            )


def check_plan(state: State, plan: Plan, *, resumed: bool) -> None:
    """Check that a plan asks only what it may ask of a pipeline.

    Args:
        state: that the plan is part of.
        plan: to check.
        resumed: the job began with a checkpoint.
    """
    if set(plan.tasks) != set(range(state.world_size)):
        raise Violation(f"a plan for ranks {sorted(plan.tasks)} of {state.world_size}")
    if plan.mode == RecoveryMode.START and resumed and state.checkpoints.committed is None:
        raise Violation("a resumed run began without its checkpoint")
    moved = {rank for transfer in plan.transfers for rank in transfer.targets}
    moved |= {rank for rank, task in plan.tasks.items() if task.undo or task.back}
    for rank, task in plan.tasks.items():
        if task.load is not None and task.holder is None and task.load != state.checkpoints.committed:
            raise Violation(
                f"rank {rank} is to load {task.load}, and {state.checkpoints.committed} is committed"
            )
        if plan.mode in (RecoveryMode.REPLAY, RecoveryMode.CONTINUE):
            _check_state_kept(state, plan, rank, moved=rank in moved)
    if plan.mode == RecoveryMode.FALLBACK and not plan.reason:
        raise Violation("a fallback without a reason")
    if any(never in plan.reason for never in ("iterations apart", "after the consensus")):
        raise Violation(f"this cannot happen in a pipeline: {plan.reason}")


def _check_state_kept(state: State, plan: Plan, rank: int, *, moved: bool) -> None:
    """A worker with a state continues from it.

    Exceptions are workers that become equal to a replica (``moved``), and workers that replay together with
    others: those that lost their states, or a worker whose own log has a gap where a neighbour needs it.
    """
    report, task = state.round.statuses[rank], plan.tasks[rank]
    if report.iteration is None:
        return
    lost = {other for other, r in state.round.statuses.items() if not r.live} & {*task.replay_group}
    if not report.holds:  # with replicas, workers of other machines replay too
        workers = state.shape.workers_per_machine
        lost = {other for other in lost if other // workers == rank // workers}
    gaps = (state.round.statuses[other].log_gap_before for other in task.replay_group)
    has_gap = any(gap > (task.load or 0) for gap in gaps)
    replays_from_checkpoint = (bool(lost) or has_gap) and task.begin == task.load
    continues = moved or (task.load, task.begin) == (None, report.iteration)
    if not (replays_from_checkpoint or continues) or report.iteration > plan.resume + 1:
        raise Violation(f"rank {rank} at {report.iteration} is to do {task} and to resume at {plan.resume}")


def check_reports(state: State, plan: Plan, workers: Iterable[Worker]) -> int:
    """The reports of which a plan is made are true now, whenever they were given.

    Returns:
        How many of them were given in an earlier generation.
    """
    for worker in workers:
        if not plan.tasks or worker.order(state) == WorkerOrder.DIE:
            continue
        report = state.round.statuses[worker.rank]
        at = None if worker.content is None else worker.content.iteration
        if (report.iteration, report.dirty) != (at, worker.dirty):
            raise Violation(f"{worker} has reported {report}, and is dirty: {worker.dirty}")
    return sum(report.generation < state.generation for report in state.round.statuses.values())


def kinds_of_replays(state: State, plan: Plan) -> list[str]:
    """The kinds of replays that a plan asks for."""
    tasks = {rank: task for rank, task in plan.tasks.items() if task.begin < task.replay_until}
    replay_groups = {task.replay_group for task in tasks.values()}
    kinds = [f"replay group of {len(replay_group)}" for replay_group in replay_groups]  # of 0: alone
    if () in replay_groups and len(replay_groups) > 1:
        kinds.append("alone and jointly at once")
    had_state = {rank for rank in tasks if state.round.statuses[rank].iteration is not None}
    if any(tasks[rank].load is not None for rank in had_state):
        kinds.append("replay began again")
    elif any(tasks[rank].replay_group for rank in had_state):
        kinds.append("joint replay continued")
    return kinds


def check_contents(generation: int, plan: Plan, group: Sequence[Worker]) -> None:
    """All states are of one history, and a worker that is ahead is so by one iteration of it."""
    at: dict[int, set[Content | None]] = {0: set(), 1: set()}
    histories = {w.history for w in group}
    for worker in group:
        at[plan.tasks[worker.rank].resend_from_log].add(worker.content)
    if len(at[0]) != 1 or len(at[1]) > 1 or len(histories) != 1:
        raise Violation(
            f"generation {generation} goes live from different states: {at}, histories {histories}"
        )
    behind, ahead = next(iter(at[0])), next(iter(at[1]), None)
    assert behind is not None
    if ahead is not None and ahead != advance(behind, behind.iteration, histories.pop()):
        raise Violation(f"generation {generation}: a worker that is ahead is of another history")
