"""The kind of a schedule of torch, and the order in which it computes and communicates on a worker.

Private parts used (tested on torch 2.11 to 2.14): a runtime schedule's ``pipeline_order_with_comms`` and
``rank``, ``_ComputationType``, the ``sub_actions`` of an action, ``_n_microbatches``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import (
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)

from swift_ft.config.extensions import Extensions, load_once
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.logging import THROUGH_PIPELINE, Direction

_COMMUNICATION = {
    _ComputationType.SEND_F: (True, Direction.FORWARD),
    _ComputationType.SEND_B: (True, Direction.BACKWARD),
    _ComputationType.RECV_F: (False, Direction.FORWARD),
    _ComputationType.RECV_B: (False, Direction.BACKWARD),
}

_KINDS = {
    "ScheduleGPipe": Schedule.GPIPE,
    "Schedule1F1B": Schedule.ONE_F_ONE_B,
    "ScheduleLoopedBFS": Schedule.LOOPED_BFS,
    "ScheduleInterleaved1F1B": Schedule.INTERLEAVED,
    "ScheduleInterleavedZeroBubble": Schedule.ZERO_BUBBLE,
    "ScheduleZBVZeroBubble": Schedule.ZBV,
    "ScheduleDualPipeV": Schedule.DUAL_PIPE_V,
}  # by name: not every torch has all of them

_registered: dict[type, Schedule] = {}


def communication(
    schedule: _PipelineSchedule, stages: Sequence[int]
) -> Iterator[tuple[bool, Direction, int, int]]:
    """The sends and receives of this worker in one iteration, in the order of the schedule.

    Args:
        schedule: this worker's.
        stages: on this worker, by index.

    Yields:
        Whether it is a send, the direction, the stage's index, the microbatch.
    """
    if isinstance(schedule, _PipelineScheduleRuntime):
        for action in schedule.pipeline_order_with_comms[schedule.rank]:
            for part in action.sub_actions or (action,):
                if part.computation_type in _COMMUNICATION:
                    is_send, direction = _COMMUNICATION[part.computation_type]
                    yield is_send, direction, part.stage_index, part.microbatch_index or 0
        return
    for direction in THROUGH_PIPELINE:
        for microbatch in range(schedule._n_microbatches):
            for is_send in (False, True):
                yield is_send, direction, stages[0], microbatch


class ComputeOrder:
    """In which order a schedule computes on a worker.

    Args:
        schedule: of any of the pipeline's workers: it knows the order of all.
        places: the worker of each stage, as a rank in the pipeline's group.
    """

    def __init__(self, schedule: _PipelineSchedule, places: Mapping[int, int]) -> None:
        self._split: set[tuple[int, int]] = set()
        self._added: dict[int, list[int]] = {}
        self._last: dict[int, tuple[int, int]] = {}
        everything = range(schedule._n_microbatches)
        if not isinstance(schedule, _PipelineScheduleRuntime):
            for stage, place in places.items():
                self._added[stage] = list(everything)
                self._last[place] = (stage, everything[-1])
            return
        for place, actions in schedule.pipeline_order_with_comms.items():
            for action in actions:
                for part in action.sub_actions or (action,):
                    self._note(place, part.computation_type, part.stage_index, part.microbatch_index or 0)

    def _note(self, place: int, kind: _ComputationType, stage: int, microbatch: int) -> None:
        if kind == _ComputationType.FORWARD:
            self._last[place] = (stage, microbatch)
        elif kind == _ComputationType.BACKWARD_WEIGHT:
            self._split.add((stage, microbatch))
        if kind in (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_WEIGHT):
            self._added.setdefault(stage, []).append(microbatch)

    def added(self, stage: int) -> Sequence[int]:
        """Microbatches in the order in which their gradients are added up."""
        return self._added[stage]

    def is_split(self, stage: int, microbatch: int) -> bool:
        """Whether gradients of inputs and of weights are computed apart, which can give other roundings."""
        return (stage, microbatch) in self._split

    def is_last(self, place: int, stage: int, microbatch: int) -> bool:
        """Whether this is the last forward pass on a worker: what it left of random state stays."""
        return self._last[place] == (stage, microbatch)


def register_schedule(schedule: type[_PipelineSchedule], like: Schedule) -> None:
    """Makes a schedule of your own known to what plans: ``swift-plan``, layers that move.

    Any subclass of torch's schedule classes is *protected* as it is: the log sits on the stages. To plan with
    it, name the schedule of torch that computes in the same order on each worker.
    ``swift_ft.testing.ScheduleConformanceTests`` says whether it does. A package brings it with an entry
    point of the group ``swift_ft.schedules`` that names a function without arguments which calls this one.

    Args:
        schedule: the class, not an instance.
        like: the schedule of torch.

    Raises:
        UsageError: ``schedule`` is not such a class, or ``like`` another name than torch has.
    """
    if not (isinstance(schedule, type) and issubclass(schedule, _PipelineSchedule)):
        raise UsageError(
            "register_schedule() takes a subclass of a schedule of torch.distributed.pipelining first, "
            f"not {schedule!r}."
        )
    if like not in list(Schedule):
        raise UsageError(f"like= must be one of {', '.join(Schedule)}, not {like!r}.")
    _registered[schedule] = Schedule(like)


def kind_of(schedule: Any) -> Schedule | None:
    """The schedule's kind; None for a class of the user's own that is not registered.

    Raises:
        UsageError: what an installed package brings for schedules cannot be loaded.
    """
    kind = type(schedule)
    if kind.__module__.startswith("torch."):
        return _KINDS.get(kind.__name__)
    load_once(Extensions.SCHEDULES)
    return _registered.get(kind)
