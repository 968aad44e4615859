"""What happens in a job, in sentences for people."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Way

__all__ = ["counted", "sentences"]


def sentences(before: State, after: State, event: ev.Event) -> list[str]:
    """What an event means, in words; nothing for what a reader need not know."""
    told = [text] if (text := _fact(before, after, event)) else []
    if after.generation > before.generation:
        told.append(_generation_in_words(before, after))
    if after.plan is not None and before.plan is None:
        told.append(_plan_in_words(after))
    if after.phase == Phase.LIVE and before.phase != Phase.LIVE and after.plan is not None:
        told.append(f"all are live, and go on with iteration {after.plan.resume}")
    if after.verdict is not None and before.verdict is None:
        told.append("the run is complete" if after.verdict.ok else f"the run ends: {after.verdict.reason}")
    return told


def _fact(before: State, after: State, event: ev.Event) -> str:
    match event:
        case ev.Opened():
            return (
                f"a run on {counted(event.machines, 'machine')}, {counted(event.workers, 'worker')} on each"
            )
        case ev.Joined() if after.slot_of(event.machine) is None and before.generation:
            return "a spare machine joins"
        case ev.Injected():
            return f"fault: {event.fault}"
        case ev.Lost() if (slot := before.slot_of(event.machine)) is not None:
            return f"machine {slot} is lost: {event.reason}"
        case ev.Lost():
            return f"a spare machine is lost: {event.reason}"
        case ev.Interrupted() | ev.CannotReplay() | ev.CannotHelp():
            return f"worker {event.rank}: {event.reason}"
        case ev.Failed() | ev.TimedOut():
            return event.reason
        case ev.Ready() if event.replayed:
            return f"worker {event.rank} has replayed {counted(event.replayed, 'iteration')}"
        case ev.Committed():
            return f"the checkpoint of iteration {event.iteration} is committed"
        case ev.CheckpointWanted() if after.wanted != before.wanted:
            return f"worker {event.rank} asks for a checkpoint of iteration {event.iteration}: {event.reason}"
        case ev.Finished() if len(after.finished) == after.world:
            return "all workers have completed the last iteration"
    return ""


def counted(number: int, noun: str) -> str:
    """``1 machine``, ``2 machines``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _generation_in_words(before: State, after: State) -> str:
    if before.generation == 0:
        return "all machines are here"
    if set(after.launched) == {after.generation}:
        why = f": {after.must_fall_back}" if after.must_fall_back else ""
        return f"generation {after.generation}: all processes start again{why}"
    filled = [slot for slot, member in enumerate(after.members) if member not in before.members]
    who = " and ".join(f"machine {slot}" for slot in filled)
    return f"generation {after.generation}" + (f": a replacement for {who}" if who else ": all meet again")


def _plan_in_words(state: State) -> str:
    plan = state.plan
    assert plan is not None
    match plan.way:
        case Way.START:
            return "everybody starts" + (
                f" from the checkpoint of iteration {plan.resume}" * bool(plan.resume)
            )
        case Way.CONTINUE:
            return f"everybody has its state and goes on with iteration {plan.resume}"
        case Way.REPLAY:
            who = ", ".join(
                f"worker {rank} replays iterations {task.begin} to {task.replay_until - 1}"
                for rank, task in sorted(plan.tasks.items())
                if task.begin < task.replay_until
            )
            together = " jointly" * any(task.portion for task in plan.tasks.values())
            helpers = sorted(rank for shared in plan.shared for rank in shared.helpers)
            helped = f", helped by {', '.join(f'worker {rank}' for rank in helpers)}" if helpers else ""
            return f"survivors keep their state; {who or 'nothing is to be replayed'}{together}{helped}"
        case Way.REPLICA:
            takers = sorted({rank for transfer in plan.transfers for rank in transfer.targets})
            who = ", ".join(f"worker {rank}" for rank in takers) or "nobody"
            return f"{who} becomes equal to a replica; all go on with iteration {plan.resume}"
    return f"everybody returns to the checkpoint of iteration {plan.resume}: {plan.reason}"
