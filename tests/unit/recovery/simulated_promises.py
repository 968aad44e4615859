"""What must never happen in a simulated network, whatever fails: each raises :class:`Violation`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from simulated_store import Content, Violation, advance

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, Way

if TYPE_CHECKING:
    from simulated_worker import Worker

__all__ = ["check_contents", "check_plan", "check_served", "check_step", "check_wish", "replays_of"]


def check_step(before: State, after: State, event: ev.Event) -> None:
    """What the state machine promises, whatever comes in."""
    if before.phase == Phase.ENDED:
        raise Violation("a state changed after the end")
    if after.generation not in (before.generation, before.generation + 1) and not (
        isinstance(event, ev.TimedOut)
    ):
        raise Violation(f"generation {before.generation} became {after.generation}")
    if after.epoch < before.epoch or after.log_since < before.log_since:
        raise Violation("an epoch went back")
    if before.committed is not None and (after.committed or 0) < before.committed:
        raise Violation(f"committed went back from {before.committed} to {after.committed}")
    if any(iteration <= (after.committed or 0) for iteration, _ in after.taken_back):
        raise Violation(f"{after.taken_back} is remembered, and {after.committed} is committed")
    if (after.plan is not None) != (after.phase in (Phase.RECOVERING, Phase.LIVE)):
        raise Violation(f"plan {after.plan} in phase {after.phase}")
    members = [m for m in after.members if m is not None]
    exited = {after.members[slot] for slot in after.exited}
    spares = {m for m, _ in after.spares}
    if len(members) != len(set(members)) or spares & set(members):
        raise Violation("a machine has two places")
    live_places = set(members) - exited if after.phase != Phase.ENDED else set()
    if (live_places | spares) & after.fenced:
        raise Violation("a fenced machine has a place")
    if any(launched > after.generation for launched in after.launched):
        raise Violation("workers were launched for a generation to come")
    if after.phase != Phase.ENDED and after.machines:
        if (after.phase == Phase.FORMING) != (None in after.members):
            raise Violation(f"phase {after.phase} with members {after.members}")
        if after.phase == Phase.LIVE and len(after.ready) != after.world:
            raise Violation("live before everybody was ready")
        if after.finished and after.phase not in (Phase.LIVE, Phase.FORMING):
            raise Violation(f"finished in phase {after.phase}")


def check_wish(before: State, after: State, event: ev.Event, workers: Iterable[Worker]) -> None:
    """An early checkpoint belongs to its generation, and a worker that has it ahead keeps it."""
    if after.wanted is None:
        return
    if after.generation != before.generation:
        raise Violation(f"the wish for a checkpoint at {after.wanted} outlives its generation")
    if after.wanted <= (-1 if after.committed is None else after.committed):
        raise Violation(f"a checkpoint is wanted at {after.wanted}, and {after.committed} is committed")
    if before.wanted == after.wanted:
        return
    if not isinstance(event, ev.CheckpointWanted) or event.generation != after.generation:
        raise Violation(f"{event} is no wish of generation {after.generation}")
    if before.wanted is None:
        return
    for worker in workers:
        before_it = worker.content is not None and worker.content.iteration < before.wanted
        if worker.running == after.generation and before_it:
            raise Violation(f"{worker} would have saved at {before.wanted}: {after.wanted} is too early")


def check_plan(state: State, plan: Plan, *, resumed: bool) -> None:
    """What a pipeline may be asked to do; ``resumed``: there was a checkpoint from the beginning."""
    if set(plan.tasks) != set(range(state.world)):
        raise Violation(f"a plan for ranks {sorted(plan.tasks)} of {state.world}")
    if plan.way == Way.START and resumed and state.committed is None:
        raise Violation("a resumed run began from nothing")
    moved = {rank for transfer in plan.transfers for rank in transfer.targets}
    moved |= {rank for rank, task in plan.tasks.items() if task.undo}
    for rank, task in plan.tasks.items():
        if task.load is not None and task.load != state.committed:
            raise Violation(f"rank {rank} is to load {task.load}, and {state.committed} is committed")
        report = state.reports[rank]
        if plan.way in (Way.REPLAY, Way.CONTINUE) and report.iteration is not None:
            at = report.iteration
            with_it = {other for other, r in state.reports.items() if not r.live} & {*task.portion}
            if not report.holds:  # with replicas, more have to go back with one
                with_it = {other for other in with_it if other // state.workers == rank // state.workers}
            again = bool(with_it) and task.begin == task.load
            kept = again or rank in moved or (task.load, task.begin) == (None, at)
            if not kept or at > plan.resume + 1:
                raise Violation(f"rank {rank} at {at} is to do {task} and to resume at {plan.resume}")
    if plan.way == Way.FALLBACK and not plan.reason:
        raise Violation("a fallback without a reason")
    if any(never in plan.reason for never in ("iterations apart", "after the consensus")):
        raise Violation(f"a pipeline cannot come to this: {plan.reason}")


def replays_of(state: State, plan: Plan) -> list[str]:
    """Which kinds of replays a plan asks for."""
    tasks = {rank: task for rank, task in plan.tasks.items() if task.begin < task.replay_until}
    portions = {task.portion for task in tasks.values()}
    found = [f"portion of {len(portion)}" for portion in portions]  # of 0: somebody who is alone
    if () in portions and len(portions) > 1:
        found.append("alone and jointly at once")
    had = {rank for rank in tasks if state.reports[rank].iteration is not None}
    if any(tasks[rank].load is not None for rank in had):
        found.append("began again")
    elif any(tasks[rank].portion for rank in had):
        found.append("went on jointly")
    return found


def check_contents(generation: int, plan: Plan, group: Sequence[Worker]) -> None:
    """All states are of one history, and whoever is ahead is so by one iteration of that."""
    at: dict[int, set[Content | None]] = {0: set(), 1: set()}
    histories = {w.history for w in group}
    for worker in group:
        at[plan.tasks[worker.rank].serve].add(worker.content)
    if len(at[0]) != 1 or len(at[1]) > 1 or len(histories) != 1:
        raise Violation(
            f"generation {generation} goes live from different states: {at}, histories {histories}"
        )
    behind, ahead = next(iter(at[0])), next(iter(at[1]), None)
    assert behind is not None
    if ahead is not None and ahead != advance(behind, behind.iteration, histories.pop()):
        raise Violation(f"generation {generation}: who is ahead is of another history")


def check_served(worker: Worker, peer: int, iteration: int, got: tuple[int, int]) -> None:
    """Who serves gets again what it got before."""
    own = worker.sim.store.read_log(worker.rank, iteration, worker.log_since)
    if not isinstance(own, str) and got != (own.chain, own.history):
        raise Violation(f"{worker} serves, and rank {peer} sends other bytes than before")
