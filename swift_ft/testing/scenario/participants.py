"""Names of participants in a line of a scenario."""

from __future__ import annotations

from swift_ft.recovery.job_state import State


def ranks_of(state: State, word: str) -> list[int]:
    """One rank, several with commas between them, or ``all``."""
    return list(range(state.world_size)) if word == "all" else [int(rank) for rank in word.split(",")]


def started_in_of(state: State, machine: str) -> int:
    """The generation in which a member's workers were started; -1 for a machine that is not a member."""
    slot = state.slot_of(machine)
    return -1 if slot is None else state.membership.started_in[slot]
