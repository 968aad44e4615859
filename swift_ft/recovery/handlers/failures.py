"""Notes what has failed in a recovery, so that no way back is tried a third time for it (`attempts`)."""

from __future__ import annotations

from swift_ft.recovery.attempts import machine_in
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.values import replace

_LONG_S = 600
"""A script without a session that has run for such a time may have trained, and has begun in any case."""


def note_failure(state: State, part: str, reason: str) -> State:
    """Note that a part that is not a machine has failed. In a recovery it had a task."""
    return _note(state, part, reason, had_task=state.plan is not None)


def note_machine(
    state: State, machine: str, reason: str, cause: Cause, *, ran_s: int = 0, on_purpose: bool = False
) -> State:
    """Note that a member has failed: as a survivor, in a task of its own, or before it reported at all.

    Args:
        state: before its slot is empty.
        machine: the member.
        reason: how it has failed.
        cause: whose fault that is.
        ran_s: seconds that its workers had run; 0 if that is unknown.
        on_purpose: its workers only begin again, as they must where a store was lost with another machine.
    """
    slot = state.slot_of(machine)
    if slot is None:
        return state
    state = _note(state, machine_in(slot), reason, had_task=_had_task(state, slot))
    state = _note_own_end(note_run(state, ran_s), machine_in(slot), cause, ran_s)
    if on_purpose or not _is_unheard(state, slot):
        return state
    return replace(state, tries=replace(state.tries, attempts=state.tries.attempts.miss(slot)))


def note_run(state: State, ran_s: int) -> State:
    """Note for how many seconds a worker of a script without a session had run."""
    if state.has_sessions or ran_s < _LONG_S:
        return state
    return replace(state, tries=replace(state.tries, attempts=state.tries.attempts.has_run()))


def _note_own_end(state: State, part: str, cause: Cause, ran_s: int) -> State:
    """Note an end that the next start would meet again: for want of memory, or in native code."""
    attempts = state.tries.attempts
    if not state.has_sessions and ran_s >= _LONG_S:
        return state
    if cause == Cause.MEMORY:
        attempts = attempts.starve(part)
    elif cause == Cause.NATIVE and not state.has_sessions:
        attempts = attempts.crash(part)
    return replace(state, tries=replace(state.tries, attempts=attempts))


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
    """Whether a slot's workers were started since reports were asked for, and have not all reported yet."""
    # Not in this generation: two that are lost in turn would each be of the one before, and so for ever.
    newcomer = state.membership.started_in[slot] >= max(state.round.asked_in, state.tries.live_in + 1)
    silent = any(rank not in state.round.statuses for rank in state.ranks_of(slot))
    asked = state.phase in (Phase.AGREEING, Phase.FORMING) and not state.round.decided
    return state.has_sessions and asked and newcomer and silent
