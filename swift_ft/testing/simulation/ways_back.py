"""No way back to training is tried a third time for the same loss, whatever fails.

This is derived from what happens, and not from what the protocol counts (`recovery/attempts.py`).
"""

from __future__ import annotations

from collections import Counter

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.testing.simulation.store import Violation

_MAX_TRIES = 2


class WaysBack:
    """Counts, for each part that fails, the plans of one way that it has ended since training advanced."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, str]] = Counter()  # by way and part
        self._ended_last: list[str] = []
        self._plan: Plan | None = None
        self._went_live = False

    def check(self, before: State, after: State, event: ev.Event) -> None:
        """Look at one event.

        Raises:
            Violation: if a way is chosen that the same part has ended twice.
        """
        if after.checkpoints.committed != before.checkpoints.committed:
            self._ended.clear()
        if before.plan is not None and after.plan is None:
            self._plan, self._went_live = before.plan, before.phase == Phase.LIVE
            self._ended_last = _ended_by(before, before.plan, event)
            for part in self._ended_last:
                self._ended[_way(before.plan), part] += 1
        if isinstance(event, ev.StatusReported) and after.round is not before.round:
            self._note_progress([*before.round.statuses.values(), event], before)
        if before.plan is None and after.plan is not None:
            self._begins(after.plan)

    def _note_progress(self, reports: list[ev.StatusReported], state: State) -> None:
        """If an iteration was trained since the last plan, the next loss is another one."""
        reached = [report.iteration for report in reports if report.live and report.iteration is not None]
        if len(reports) == state.world_size and self._plan is not None and self._went_live:
            saved = state.checkpoints.committed or 0  # all that is left if all machines were lost
            if min(reached, default=saved) > self._plan.resume:
                self._ended.clear()
            self._went_live = False

    def _begins(self, plan: Plan) -> None:
        worn = [part for part in self._ended_last if self._ended[_way(plan), part] >= _MAX_TRIES]
        if worn:
            raise Violation(f"{plan.mode} is tried again although {', '.join(worn)} ended it twice")


def _way(plan: Plan) -> str:
    in_place = (
        RecoveryMode.CONTINUE,
        RecoveryMode.LAYOUT,
        RecoveryMode.REPLICA,
        RecoveryMode.REPLAY,
    )
    if plan.mode == RecoveryMode.MEMORY:
        return "from memory"
    return "in place" if plan.mode in in_place else "from the checkpoint"


def _ended_by(state: State, plan: Plan, event: ev.Event) -> list[str]:
    """The parts that end a plan in which they had something to do."""
    match event:
        case ev.CommunicationFailed():
            return ["communication"]
        case ev.ReplayFailed():
            return ["the state"]
        case ev.DeadlinePassed():
            return ["a deadline"]
        case ev.MachineLost(on_request=False):
            slot = state.slot_of(event.machine)
            ranks = range(0) if slot is None else state.ranks_of(slot)
            return [f"slot {slot}"] if any(not plan.tasks[rank].idle for rank in ranks) else []
        case _:
            return []
