"""What follows from the protocol's state: what each worker and each agent has to do now. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swift_ft.recovery.job_state import Phase, State

__all__ = ["AgentOrder", "AgentTodo", "WorkerOrder", "agent_order", "commit_due", "worker_order"]


class WorkerOrder(StrEnum):
    """What a worker has to do now."""

    DIE = "die"
    """Its machine is fenced, or its slot was given new workers: it must not act any more."""
    STOP = "stop"
    """The job has ended."""
    HOLD = "hold"
    """Leave the groups and wait: a slot is empty, or others have not answered yet."""
    REPORT = "report"
    """Leave the groups, flush the log, say where it stands."""
    EXECUTE = "execute"
    """Do its task of the plan, then say that it is ready."""
    RUN = "run"
    """Form the group of this generation and train."""


def worker_order(state: State, *, machine: str, rank: int, launched: int) -> WorkerOrder:
    """What the worker ``rank``, started by ``machine`` in generation ``launched``, has to do."""
    slot = state.slot_of(machine)
    if slot is None or state.launched[slot] != launched:
        return WorkerOrder.STOP if state.phase == Phase.ENDED and slot is not None else WorkerOrder.DIE
    match state.phase:
        case Phase.ENDED:
            return WorkerOrder.STOP
        case Phase.FORMING:
            return WorkerOrder.HOLD
        case Phase.AGREEING:
            return WorkerOrder.HOLD if rank in state.reports else WorkerOrder.REPORT
        case Phase.RECOVERING:
            return WorkerOrder.HOLD if rank in state.ready else WorkerOrder.EXECUTE
        case Phase.LIVE:
            return WorkerOrder.RUN


class AgentTodo(StrEnum):
    """What an agent has to do now."""

    WAIT = "wait"
    """A spare, or the machine's workers run as they should."""
    LAUNCH = "launch"
    """Stop what runs, if anything, and start the slot's workers."""
    REJOIN = "rejoin"
    """Its machine was fenced: stop all workers and offer itself under a new name."""
    STOP = "stop"
    """The job has ended."""


@dataclass(frozen=True, slots=True)
class AgentOrder:
    """An agent's order, with the slot and the generation to launch for."""

    todo: AgentTodo
    slot: int | None = None
    generation: int = 0


def agent_order(state: State, *, machine: str, launched: int | None) -> AgentOrder:
    """What the agent of ``machine`` has to do; ``launched`` is the generation its workers were started in."""
    if state.phase == Phase.ENDED:
        return AgentOrder(AgentTodo.STOP)
    if machine in state.fenced:
        return AgentOrder(AgentTodo.REJOIN)
    slot = state.slot_of(machine)
    if slot is None or state.phase == Phase.FORMING or launched == state.launched[slot]:
        return AgentOrder(AgentTodo.WAIT, slot, state.generation)
    if slot in state.exited:
        return AgentOrder(AgentTodo.WAIT, slot, state.generation)
    return AgentOrder(AgentTodo.LAUNCH, slot, state.launched[slot])


def commit_due(state: State, rank: int) -> int | None:
    """The iteration whose checkpoint marker this worker has to write, if any.

    The lowest rank commits, once every worker's part is durable; a replacement inherits the duty.
    """
    if rank != 0:
        return None
    complete = [i for i, parts in state.durable.items() if len(parts) == state.world]
    return max(complete, default=None)
