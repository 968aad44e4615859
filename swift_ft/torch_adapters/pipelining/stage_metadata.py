"""The shapes of a stage's messages as JSON: a replayed stage starts from them, without its neighbours.

torch exchanges them once, live, before the first message.

Private parts used (tested on torch 2.11 to 2.14), besides those of
:mod:`swift_ft.torch_adapters.versions.stage_shapes`:

- ``_PipelineStage``, the stage of torch's tracer.
- of a schedule: ``_initialize_stage(s)``, ``_stage(s)_forward_initialized``,
  ``_stage(s)_backward_initialized``, ``_n_microbatches``, ``_has_backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
)
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase

from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.ddp_passes import trial_forward
from swift_ft.torch_adapters.lasting_group import unintercepted
from swift_ft.torch_adapters.versions.first_messages import connect_to_others_only
from swift_ft.torch_adapters.versions.stage_shapes import described, fresh, prepare
from swift_ft.torch_core.buffers import BufferCopies
from swift_ft.torch_core.module_tree import all_within

Undo = Callable[[], None]
"""Puts something back."""


def stages_of(schedule: Any) -> list[_PipelineStageBase]:
    """The stages that a schedule runs on this worker.

    Raises:
        UnsupportedError: if torch does not have such a schedule.
    """
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    if isinstance(schedule, PipelineScheduleMulti):
        return list(schedule._stages)
    raise UnsupportedError(
        f"attach_pipeline() takes a schedule of torch.distributed.pipelining, not a {type(schedule)}."
    )


def learn_shapes_without_trace(schedule: _PipelineSchedule) -> None:
    """Let a schedule learn shapes without a trace in its DDP models, and change nothing else about it."""
    stages = stages_of(schedule)
    name = _initializes(schedule)
    original = getattr(schedule, name)

    def wrapped(*args: Any, **kwargs: Any) -> None:
        with _trial_forwards(stages):
            original(*args, **kwargs)

    setattr(schedule, name, wrapped)


@contextmanager
def _trial_forwards(stages: Sequence[_PipelineStageBase]) -> Iterator[None]:
    """Within the block, forward passes leave no trace in the DDP models of stages."""
    with ExitStack() as trials:
        for stage in stages:
            trials.enter_context(trial_forward(stage.submod))
        yield


def _initializes(schedule: _PipelineSchedule) -> str:
    """The name of the method in which it learns shapes."""
    return f"_initialize_stage{'' if isinstance(schedule, PipelineScheduleSingle) else 's'}"


class ShapeExchange:
    """A schedule's exchange of shapes: observes it, replaces it, or asks for it again.

    Args:
        schedule: torch's.
        stages: on this worker.
        on_metadata: called with the shapes by stage index, before the first message.

    Attributes:
        note: called before torch runs the modules to learn shapes. What it returns is called afterwards.
    """

    def __init__(
        self,
        schedule: _PipelineSchedule,
        stages: Sequence[_PipelineStageBase],
        on_metadata: Callable[[dict[int, dict[str, Any]]], None],
    ) -> None:
        self.note: Callable[[], Undo] = lambda: lambda: None
        self._schedule: Any = schedule
        self._stages = stages
        self._fresh = [fresh(stage) for stage in stages]
        for stage in stages:
            connect_to_others_only(stage)
        self._metadata: dict[int, dict[str, Any]] | None = None
        self._aside = False
        self._plural = "" if isinstance(schedule, PipelineScheduleSingle) else "s"
        name = _initializes(schedule)
        original = getattr(schedule, name)

        def wrapped(*args: Any, **kwargs: Any) -> None:
            if self._aside:
                self._prepare_again()
                return
            known = self.known
            # To learn shapes, torch runs the modules on uninitialised memory: statistics must not count it,
            # nor what a module keeps in attributes.
            buffers = BufferCopies(all_within(stage.submod for stage in stages)) if not known else None
            put_back = self.note() if not known else None
            with _trial_forwards(stages), unintercepted():
                original(*args, **kwargs)
            if buffers is not None and put_back is not None:
                buffers.restore()
                put_back()
            if not known and (metadata := shapes_of(stages)) is not None:
                self._metadata = metadata
                on_metadata(metadata)

        setattr(schedule, name, wrapped)

    @property
    def known(self) -> bool:
        """Whether the exchange is done or no longer needed."""
        return bool(getattr(self._schedule, self._flag("forward")))

    def adopt(self, metadata: dict[int, dict[str, Any]]) -> None:
        """Start from known shapes."""
        self._metadata = metadata
        schedule = self._schedule
        for stage in self._stages:
            prepare_stage(
                stage,
                metadata[stage.stage_index],
                microbatches=schedule._n_microbatches,
                has_backward=schedule._has_backward,
            )
        for direction in ("forward", "backward") if schedule._has_backward else ("forward",):
            setattr(schedule, self._flag(direction), True)

    def aside(self, aside: bool) -> None:
        """Between two steps ``schedule.eval()`` may be called: it starts from the shapes of the steps.

        torch would exchange shapes again, live, for the evaluation and for the step after it. A worker that
        was replayed since has not exchanged any, and would not take part.
        """
        self._aside = aside
        flags = [bool(getattr(self._schedule, self._flag(d))) for d in ("forward", "backward")]
        if not aside and self._metadata is not None and flags != [True, bool(self._schedule._has_backward)]:
            self._prepare_again()

    def _prepare_again(self) -> None:
        if self._metadata is None:
            raise UnsupportedError(
                "schedule.eval() needs stages whose messages are plain tensors: evaluate in a step of its "
                "own, by schedule.step() and without optimizer.step()."
            )
        self.adopt(self._metadata)
        setattr(self._schedule, self._flag("backward"), bool(self._schedule._has_backward))

    def recount(self) -> None:
        """The schedule has another number of microbatches: buffers are for so many, of the same shapes."""
        if not self.known:
            return
        if self._metadata is None:
            self.forget()
        else:
            self.adopt(self._metadata)

    def forget(self) -> None:
        """Let the next step exchange shapes again, live, and on all workers alike."""
        for put_back in self._fresh:
            put_back()
        for direction in ("forward", "backward"):
            setattr(self._schedule, self._flag(direction), False)

    def _flag(self, direction: str) -> str:
        return f"_stage{self._plural}_{direction}_initialized"


def shapes_of(stages: Sequence[_PipelineStageBase]) -> dict[int, dict[str, Any]] | None:
    """The shapes of all messages by stage index, JSON-ready.

    None for tensors that JSON cannot describe (DTensor), and for stages of another class than torch's two.
    """
    if not all(isinstance(stage, PipelineStage | _PipelineStage) for stage in stages):
        return None
    found = {stage.stage_index: described(stage) for stage in stages}
    known = {index: shapes for index, shapes in found.items() if shapes is not None}
    return known if len(known) == len(found) else None


def prepare_stage(
    stage: _PipelineStageBase, shapes: dict[str, Any], *, microbatches: int, has_backward: bool
) -> None:
    """Make a stage start from known shapes, without its neighbours."""
    stage.has_backward = has_backward
    prepare(stage, shapes, microbatches=microbatches, has_backward=has_backward)
