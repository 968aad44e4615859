"""Orders for each worker and each agent, derived from the protocol's state. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from swift_ft.recovery.guests import leaving
from swift_ft.recovery.handlers.worlds import all_offered
from swift_ft.recovery.job_state import Phase, SavedPart, State
from swift_ft.recovery.pauses import kept_out_s

WATCHED_EACH = 3
"""Machines that each machine watches. Where one in sixteen is lost at once, one in 4,096 of these has lost
all its watchers, and is found by the next ones."""


class WorkerOrder(StrEnum):
    """The order of a worker: what it has to do now."""

    DIE = "die"
    """Its machine is fenced, or its slot was given new workers: it must not act any more."""
    STOP = "stop"
    """The job has ended."""
    HOLD = "hold"
    """Leave the groups and wait: a slot is empty, or others have not answered yet."""
    REPORT = "report"
    """Leave the groups, flush the log, report the status."""
    EXECUTE = "execute"
    """Do its task of the plan, then report that it is ready."""
    RUN = "run"
    """Form the group of this generation and train."""
    OFFER = "offer"
    """After a loss: offer its state to the next world, or a copy that it has in memory."""
    PREPARE = "prepare"
    """Of the next world: say that it is ready to take its state."""
    TAKE = "take"
    """Of the next world: take its state from the present one."""


def worker_order(state: State, *, machine: str, rank: int, started_in: int, world: int = 0) -> WorkerOrder:
    """The order of worker ``rank`` of a world, which ``machine`` started in generation ``started_in``."""
    if world > state.worlds.present.number:
        return _order_in_next(state, rank, world)
    # One that was dropped may have been started for the very generation in which another world began.
    if world < state.worlds.present.number:
        return WorkerOrder.DIE
    slot = state.slot_of(machine)
    # Before any phase: a worker that was replaced must not act (decision 8).
    if slot is None or state.membership.started_in[slot] != started_in:
        return WorkerOrder.STOP if state.phase == Phase.ENDED and slot is not None else WorkerOrder.DIE
    match state.phase:
        case Phase.ENDED:
            return WorkerOrder.STOP
        case Phase.FORMING:
            return _order_after_loss(state, rank)
        case Phase.AGREEING:
            # A report counts on until a plan is made, in later generations too (decision 78).
            return WorkerOrder.HOLD if rank in state.round.statuses else WorkerOrder.REPORT
        case Phase.RECOVERING:
            return WorkerOrder.HOLD if rank in state.round.ready else WorkerOrder.EXECUTE
        case Phase.LIVE:
            return WorkerOrder.RUN


def _order_after_loss(state: State, rank: int) -> WorkerOrder:
    """The order of a survivor while a slot is empty."""
    change = state.worlds.change
    if change is None or not change.held:
        return WorkerOrder.HOLD
    if not change.sources:
        return WorkerOrder.HOLD if rank in state.round.statuses else WorkerOrder.REPORT
    return WorkerOrder.OFFER if change.owed_by(rank) else WorkerOrder.HOLD


def _order_in_next(state: State, rank: int, world: int) -> WorkerOrder:
    """The order of a worker whose world has not taken over."""
    change = state.worlds.change
    if state.phase == Phase.ENDED:
        return WorkerOrder.STOP
    if change is None or change.world.number != world:
        return WorkerOrder.DIE
    if rank not in change.prepared:
        return WorkerOrder.PREPARE
    if all_offered(state, change) and rank not in change.taken:
        return WorkerOrder.TAKE
    return WorkerOrder.HOLD


class AgentTodo(StrEnum):
    """The order of an agent: what it has to do now."""

    WAIT = "wait"
    """The machine is a spare, or its workers run as they should."""
    LAUNCH = "launch"
    """Stop what runs, if anything, and start the slot's workers."""
    REFUSED = "refused"
    """Its machine differs from the job: stop all workers and end, with the reason."""
    REJOIN = "rejoin"
    """Its machine was fenced: stop all workers and offer itself under a new name."""
    LEAVE = "leave"
    """It was asked to leave, and can or has to, or it is a guest of no use: report it, stop all workers and
    end."""
    RETIRE = "retire"
    """Its slot is gone, as another world has taken over: stop all workers, and wait as a spare."""
    STOP = "stop"
    """The job has ended."""


@dataclass(frozen=True, slots=True)
class AgentOrder:
    """An agent's order, with its arguments.

    Attributes:
        todo: the order.
        slot: to launch for.
        generation: to launch for.
        reason: why the machine is refused.
        wait_s: seconds to stay away before the machine joins again.
    """

    todo: AgentTodo
    slot: int | None = None
    generation: int = 0
    reason: str = ""
    wait_s: float = 0.0


def agent_order(state: State, *, machine: str, started_in: int | None) -> AgentOrder:
    """The order of ``machine``'s agent, whose workers were started in generation ``started_in``."""
    if state.phase == Phase.ENDED:
        return AgentOrder(AgentTodo.STOP)
    if machine in state.membership.refused:
        return AgentOrder(AgentTodo.REFUSED, reason=state.membership.refused[machine])
    # Before the fence, since a guest does not join again: its host takes another one.
    if _is_guest_without_use(state, machine) or machine in state.membership.left:
        return AgentOrder(AgentTodo.LEAVE)
    if machine in state.membership.fenced:
        return AgentOrder(AgentTodo.REJOIN, wait_s=kept_out_s(state, machine))
    if machine in state.membership.draining and _may_leave(state, machine):
        return AgentOrder(AgentTodo.LEAVE)
    slot = state.slot_of(machine)
    if slot is None and started_in is not None and machine in state.membership.spares:
        return AgentOrder(AgentTodo.RETIRE)
    if slot is None or state.phase == Phase.FORMING or started_in == state.membership.started_in[slot]:
        return AgentOrder(AgentTodo.WAIT, slot, state.generation)
    if slot in state.membership.exited:
        return AgentOrder(AgentTodo.WAIT, slot, state.generation)
    return AgentOrder(AgentTodo.LAUNCH, slot, state.membership.started_in[slot])


def _is_guest_without_use(state: State, machine: str) -> bool:
    """Whether a machine is a guest that was lost, or for whose slot another machine came sooner."""
    membership = state.membership
    waits_in_vain = machine in membership.spares and state.phase != Phase.FORMING and not leaving(state)
    return machine in membership.hosts and (machine in membership.fenced or waits_in_vain)


def _may_leave(state: State, machine: str) -> bool:
    """Whether a machine that was asked to leave can do so without a loss: a spare at once.

    A member waits for a spare, for the end of a recovery, and for a checkpoint: its replacement then replays
    the few iterations since. If another world is about to take over that does without it, it waits for that.
    After the last iteration it stays: nobody else does what its script does then.
    """
    membership, committed = state.membership, state.checkpoints.committed
    if machine in membership.spares:
        return True
    if state.all_finished or membership.exited:
        return False
    change = state.worlds.change
    if change is not None and change.slot_of(machine) is None:
        return False
    # A guest hands over to a machine of its own only: another guest would be no gain.
    own = machine not in membership.hosts
    spare = any(
        spare not in membership.draining and (own or spare not in membership.hosts)
        for spare in membership.spares
    )
    saved = committed is not None and committed > membership.draining[machine]
    return spare and saved and state.phase == Phase.LIVE


def leaves_after_checkpoint(state: State) -> tuple[str, ...]:
    """Members that were asked to leave, and wait for a checkpoint of all workers."""
    committed = -1 if state.checkpoints.committed is None else state.checkpoints.committed
    draining, slots = state.membership.draining, state.membership.slots
    return tuple(sorted(m for m, since in draining.items() if m in slots and committed <= since))


def commit_due(state: State, rank: int) -> int | None:
    """The iteration whose checkpoint marker this worker has to write, if any.

    The lowest rank commits once every worker's part is durable. A replacement inherits the duty.
    """
    if rank != 0:
        return None
    complete = [iteration for iteration in state.checkpoints.parts if is_complete(state, iteration)]
    # Only the newest: a commit forgets all that lies before it.
    return max(complete, default=None)


def is_complete(state: State, iteration: int) -> bool:
    """Whether all parts of a checkpoint that workers name are durable.

    A worker whose replica saves for it names that part at once. If both save again, in a later generation, an
    earlier part of the replica may still count: it is another one.
    """
    parts: Mapping[int, SavedPart] = state.checkpoints.parts.get(iteration, {})
    if len(parts) < state.world_size:
        return False
    durable = {part.path for part in parts.values() if part.digest}
    return all(part.path in durable for part in parts.values())


def saves_again(state: State, rank: int) -> bool:
    """Whether a worker that begins to train has to save the state it begins with, if that is to be saved.

    It has received that state from a replica, or is a replica of such a worker. None of them has a part of
    that checkpoint which counts. One that is ahead begins with a later state, which it has saved.
    """
    checkpoints = state.checkpoints
    if state.phase != Phase.LIVE or state.plan is None:
        return False
    begin = state.plan.resume
    if state.plan.tasks[rank].begin > begin:
        return False
    return (begin, rank) in checkpoints.revoked and rank not in checkpoints.parts.get(begin, {})


def neighbours_of(machine: str, addresses: Mapping[str, str]) -> tuple[str, ...]:
    """The machines that ``machine`` watches: the next few by name, in a ring, the nearest first.

    So each machine has as many watchers, and those of neighbours are others. None if it is alone, or is not
    in the ring. The cost grows with the size of the job: call it again only when the addresses have changed.
    """
    if machine not in addresses:
        return ()
    # By name, which is random. In an order of arrival the machines of one rack would watch each other,
    # and the loss of the rack would be found one machine at a time (decision 75).
    after = heapq.nsmallest(WATCHED_EACH, (name for name in addresses if name > machine))
    missing = WATCHED_EACH - len(after)
    return (*after, *heapq.nsmallest(missing, (name for name in addresses if name < machine)))
