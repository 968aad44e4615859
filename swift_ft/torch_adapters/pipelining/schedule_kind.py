"""The kind of a schedule of torch, among those that can be planned."""

from __future__ import annotations

from typing import Any

from swift_ft.costs.schedule_orders import Schedule

_KINDS = {
    "ScheduleGPipe": Schedule.GPIPE,
    "Schedule1F1B": Schedule.ONE_F_ONE_B,
    "ScheduleLoopedBFS": Schedule.LOOPED_BFS,
    "ScheduleInterleaved1F1B": Schedule.INTERLEAVED,
    "ScheduleInterleavedZeroBubble": Schedule.ZERO_BUBBLE,
    "ScheduleZBVZeroBubble": Schedule.ZBV,
    "ScheduleDualPipeV": Schedule.DUAL_PIPE_V,
}


def kind_of(schedule: Any) -> Schedule | None:
    """The schedule's kind; None for a class of the user's own."""
    return _KINDS.get(type(schedule).__name__)
