"""Workers whose script ends before the others are done, in words. Pure."""

from __future__ import annotations

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.job_state import State


def why_too_early(state: State) -> str:
    """Why the job cannot go on without the workers whose script has ended. Empty if there is none.

    Without a session, scripts decide for themselves what they need of each other.
    """
    ended = state.membership.ended
    if not ended or not state.has_sessions:
        return ""
    # Any would do, but all participants must name the same one (decision 4).
    rank = min(ended)
    others = min((other for other in range(state.world_size) if other not in ended), default=None)
    needed = f"worker {others} still needs it" if others is not None else "the others still needed it"
    return (
        f"worker {rank} ended{_after(state, rank)} with exit code 0, while {needed}: "
        "let the scripts of all workers leave the loop after the same iteration"
    )


def why_incomplete(state: State, what: str, reason: str) -> str:
    """Why the job ends with a machine that was lost, or whose script failed, when the loop was over.

    The others may have written their results already, so nothing of it is repeated without being asked for.

    Args:
        state: in which that happened.
        what: has happened to which machine.
        reason: why.
    """
    if not state.has_sessions:
        return f"{what} when the script of another machine had ended: {reason}"
    lost = (
        f"{what} after the last iteration: {reason.removesuffix('.')}. Training is complete; what its "
        "script does after the loop is not: "
    )
    return lost + _how_to_go_on(state)


def why_in_doubt_at_the_end(state: State, reason: str) -> str:
    """Why the job ends if what it has computed is found to be wrong when nobody can go back any more.

    Empty as long as all workers can.

    Args:
        state: without the checkpoints that are in doubt.
        reason: what was wrong.
    """
    if not (state.all_finished or why_too_early(state)):
        return ""
    return (
        f"{reason}. That was found when the loop was over, so nobody goes back: what follows the checkpoint "
        f"at iteration {state.checkpoints.committed} may be wrong, and so may results of the script. "
        f"{_how_to_go_on(state)}"
    )


def why_not_saved(state: State) -> str:
    """Why a job has failed all of whose scripts have succeeded. Empty if it has not.

    Whoever starts it again, or takes the checkpoint elsewhere, would get an older state.
    """
    owed = state.checkpoints.owed
    if owed is None or state.checkpoints.covers(owed):
        return ""
    return (
        f"training is complete, and its last checkpoint, of iteration {owed}, is not in the store, as the "
        f"lines above say: once the store can be used again, {_how_to_go_on(state)}"
    )


def _how_to_go_on(state: State) -> str:
    saved = state.checkpoints.committed
    steps = max((steps for steps in _steps_of(state).values() if steps is not None), default=None)
    if saved is None:
        return "no checkpoint is committed, so --fresh trains once more from the beginning"
    if steps is None:
        rest = "trains again what came after it"
    elif saved < steps:
        rest = f"trains the last {steps - saved} of {steps} iterations again"
    else:
        rest = "trains no more"
    return (
        f"--resume begins from the checkpoint at iteration {saved}, {rest}, and runs what follows the "
        "loop on all machines"
    )


def _after(state: State, rank: int) -> str:
    iteration, steps = state.membership.ended[rank], _steps_of(state).get(rank)
    if iteration is None:
        return ""
    return f" after {iteration} iterations" if steps is None else f" after {iteration} of {steps} iterations"


def _steps_of(state: State) -> dict[int, int | None]:
    return {rank: report.steps for rank, report in state.round.statuses.items()}


def why_steps_differ(one: StatusReported, other: StatusReported) -> str:
    """In words: two workers train for different numbers of iterations."""
    shorter, longer = sorted((one, other), key=lambda report: report.steps or 0)
    return (
        f"worker {shorter.rank} ends after {shorter.steps} iterations, and worker {longer.rank} after "
        f"{longer.steps}: give session.steps() the same number in all workers"
    )
