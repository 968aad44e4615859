"""Words that console, JSON lines, live view and reports share. Nothing here is escaped."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swift_ft.faults import Fault
from swift_ft.recovery.history import History
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.recovery.recoveries import Recovery
from swift_ft.units import counted, format_seconds, named


def plan_in_words(plan: Plan) -> str:
    """The acts of all workers that go on."""
    match plan.mode:
        case RecoveryMode.START:
            return "all workers start" + f" from the checkpoint of iteration {plan.resume}" * bool(
                plan.resume
            )
        case RecoveryMode.CONTINUE:
            return f"all workers have their state and continue with iteration {plan.resume}"
        case RecoveryMode.LAYOUT:
            layers = numbers_in_words(plan.new_layout or ())
            return f"layers move after iteration {plan.resume - 1}: {layers} on the stages"
        case RecoveryMode.REPLAY:
            return f"survivors keep their state; {_replays(plan)}"
        case RecoveryMode.REPLICA:
            targets = sorted({rank for transfer in plan.transfers for rank in transfer.targets})
            who = ", ".join(f"worker {rank}" for rank in targets) or "no worker"
            return f"{who} becomes equal to a replica; all go on with iteration {plan.resume}"
        case RecoveryMode.MEMORY:
            return f"all workers return to iteration {plan.resume}, which is in memory: {plan.reason}"
    return f"all workers return to the checkpoint of iteration {plan.resume}: {plan.reason}"


def _replays(plan: Plan) -> str:
    who = ", ".join(
        f"worker {rank} replays iterations {task.begin} to {task.replay_until - 1}"
        for rank, task in sorted(plan.tasks.items())
        if task.begin < task.replay_until
    )
    together = " jointly" * any(task.replay_group for task in plan.tasks.values())
    helpers = sorted(rank for replay in plan.parallel_replays for rank in replay.helpers)
    helped = f", helped by {', '.join(f'worker {rank}' for rank in helpers)}" if helpers else ""
    return f"{who or 'nothing is to be replayed'}{together}{helped}"


def cost_in_words(recovery: Recovery) -> str:
    """The completed iterations that a recovery cost, as far as anybody is left who could say it."""
    if not recovery.mode:
        return "how many iterations are lost is not known yet"
    if not recovery.iterations_lost:
        return "no worker is left that could say how many iterations are lost"
    ranks: dict[int, list[int]] = {}
    for rank, count in sorted(recovery.iterations_lost.items()):
        if count:
            ranks.setdefault(count, []).append(rank)
    losses = [
        f"{named('worker', those)} lost {counted(n, 'iteration')}" for n, those in sorted(ranks.items())
    ]
    return "; ".join(losses) or "no completed iteration is lost"


def summary(history: History) -> str:
    """All recoveries in one line, or all restarts of a script without a session; empty if there was none."""
    if not history.state.has_sessions:
        return _restarts(history.state.tries.restarts)
    done = [recovery for recovery in history.recoveries if recovery.live is not None]
    if not history.recoveries:
        return ""
    lost = sum(recovery.most_lost for recovery in done)
    number = counted(len(done), "recovery", "recoveries")
    text = f"{number}, {format_seconds(history.lost_seconds())}, {counted(lost, 'iteration')} lost"
    if unknown := sum(not recovery.iterations_lost for recovery in done):
        text += f" as far as it is known (in {unknown} of them no worker was left that could say it)"
    return text + ", and one that did not end" * (len(done) < len(history.recoveries))


def _restarts(count: int) -> str:
    """Without a session nobody reports: what a restart took and cost is not known."""
    if not count:
        return ""
    times = "once" if count == 1 else f"{count} times"
    return (
        f"all processes were started again {times}, as torchrun does it. The script has no swift_ft.Session: "
        "each time all was lost that its own checkpoints lack"
    )


def missed_in_words(fault: Fault, passed: Collection[str]) -> str:
    """Why an injected fault never struck.

    Args:
        fault: which.
        passed: the points that workers of this launcher have passed.
    """
    if not passed:
        why = "no worker here has passed any point, and without a swift_ft.Session there are none"
    elif fault.point not in passed:
        why = f"no worker here has passed point={fault.point}, only {', '.join(sorted(passed))}"
    else:
        where = "" if fault.iteration is None else f" in iteration {fault.iteration}"
        if fault.part is not None:
            where += f" at {'microbatch' if fault.bucket is None else 'bucket'} {fault.part}"
        why = f"workers have passed point={fault.point}, but not {fault.target} {fault.index}{where}"
    return f"--inject '{fault}' never struck: {why}. Omit it, or name another point."


def machine_in_words(state: State, machine: str) -> str:
    """``machine 3`` for a member, ``a spare machine`` for any other."""
    slot = state.slot_of(machine)
    return "a spare machine" if slot is None else f"machine {slot}"


def numbers_in_words(numbers: Iterable[int]) -> str:
    """``10, 22``."""
    return ", ".join(map(str, numbers))
