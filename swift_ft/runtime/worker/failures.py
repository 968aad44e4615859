"""The events that say why a worker cannot do its task of a plan."""

from __future__ import annotations

from swift_ft.errors import CannotHelpError, DamagedCheckpointError, DivergenceError, SwiftError
from swift_ft.recovery.events import CheckpointDamaged, HelpDeclined, ReplayFailed


def failure_event(
    error: SwiftError, rank: int, generation: int
) -> CheckpointDamaged | HelpDeclined | ReplayFailed:
    """Why a worker cannot do its task of a plan.

    Args:
        error: what happened.
        rank: the worker.
    """
    reason = str(error)
    if isinstance(error, DamagedCheckpointError):
        iteration = error.fields["iteration"]
        return CheckpointDamaged(rank=rank, generation=generation, iteration=iteration, reason=reason)
    if isinstance(error, CannotHelpError):
        return HelpDeclined(rank=rank, generation=generation, reason=reason)
    if not isinstance(error, DivergenceError):
        return ReplayFailed(rank=rank, generation=generation, reason=reason)
    return ReplayFailed(
        rank=rank,
        generation=generation,
        reason=reason,
        diverged=True,
        differs_at=error.fields.get("computed_in"),
    )
