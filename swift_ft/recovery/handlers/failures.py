"""Notes what has failed in a recovery, so that no way back is tried a third time for it (`attempts`)."""

from __future__ import annotations

from swift_ft.recovery.attempts import machine_in
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.values import replace


def note_failure(state: State, part: str, reason: str) -> State:
    """Note that a part that is not a machine has failed. In a recovery it had a task."""
    return _note(state, part, reason, had_task=state.plan is not None)


def note_machine(state: State, machine: str, reason: str, *, out_of_memory: bool = False) -> State:
    """Note that a member has failed: as a survivor, in a task of its own, or before it reported at all."""
    slot = state.slot_of(machine)
    if slot is None:
        return state
    state = _note(state, machine_in(slot), reason, had_task=_had_task(state, slot))
    if out_of_memory:
        attempts = state.tries.attempts.starve(machine_in(slot))
        state = replace(state, tries=replace(state.tries, attempts=attempts))
    if not _is_unheard(state, slot):
        return state
    return replace(state, tries=replace(state.tries, attempts=state.tries.attempts.miss(slot)))


def _note(state: State, part: str, reason: str, *, had_task: bool) -> State:
    attempts = state.tries.attempts.fail(part, reason, had_task=had_task)
    return replace(state, tries=replace(state.tries, attempts=attempts))


def _had_task(state: State, slot: int) -> bool:
    plan, ranks = state.plan, state.ranks_of(slot)
    if plan is None:
        return False
    # A transfer can fail like a task, and is in no task.
    received = {rank for transfer in plan.transfers for rank in transfer.targets}
    return any(rank in received or not plan.tasks[rank].idle for rank in ranks)


def _is_unheard(state: State, slot: int) -> bool:
    """Whether a slot's workers were started in this generation, and have not all reported yet."""
    newcomer = state.membership.started_in[slot] == state.generation
    silent = any(rank not in state.round.statuses for rank in state.ranks_of(slot))
    return state.has_sessions and state.phase == Phase.AGREEING and newcomer and silent
