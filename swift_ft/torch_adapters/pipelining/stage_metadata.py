"""The shapes of a stage's messages as JSON: a replayed stage starts from them, without its neighbours.

torch exchanges them once, live, before the first message.

Private parts used (tested on torch 2.13):

- ``torch.distributed.pipelining._utils``: ``InferenceMode``, ``_StageMeta``, ``_TensorMeta``.
- ``_PipelineStage``, the stage of torch's tracer.
- of a stage: ``_stage_meta``, ``_user_meta``, ``_inference_mode``, ``_prepare_forward_infra``,
  ``_prepare_backward_infra``.
- of a schedule: ``_initialize_stage(s)``, ``_stage(s)_forward_initialized``,
  ``_stage(s)_backward_initialized``, ``_n_microbatches``, ``_has_backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.pipelining._utils import InferenceMode, _StageMeta, _TensorMeta
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineSchedule
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase

from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.core.buffers import BufferCopies
from swift_ft.torch_adapters.core.module_tree import all_within
from swift_ft.torch_adapters.ddp import trial_forward
from swift_ft.torch_adapters.lasting_group import unintercepted

__all__ = ["ShapeExchange", "Undo", "prepare_stage", "shapes_of"]

Undo = Callable[[], None]
"""Puts something back."""

_FIELDS = ("inputs", "outputs", "input_grads", "output_grads")


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
        self._metadata: dict[int, dict[str, Any]] | None = None
        self._aside = False
        self._plural = "" if isinstance(schedule, PipelineScheduleSingle) else "s"
        name = f"_initialize_stage{self._plural}"
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
            with ExitStack() as trials:
                for stage in stages:
                    trials.enter_context(trial_forward(stage.submod))
                trials.enter_context(unintercepted())
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
        stages: list[Any] = [stage for stage in self._stages if isinstance(stage, PipelineStage)]
        modes = [(stage._user_meta, stage._inference_mode) for stage in stages]
        self.adopt(self._metadata)
        setattr(self._schedule, self._flag("backward"), bool(self._schedule._has_backward))
        for stage, mode in zip(stages, modes, strict=True):  # a later exchange is the same on all workers
            stage._user_meta, stage._inference_mode = mode

    def recount(self) -> None:
        """The schedule has another number of microbatches: buffers are for so many, of the same shapes."""
        if not self.known:
            return
        if self._metadata is None:
            self.forget()
        else:
            self.adopt(self._metadata)

    def forget(self) -> None:
        """Let the next step exchange shapes again, live."""
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
    metas: dict[int, dict[str, Any]] = {
        stage.stage_index: {name: getattr(stage._stage_meta, name) for name in _FIELDS} for stage in stages
    }
    every = [m for fields in metas.values() for group in fields.values() if group for m in group if m]
    if any(type(m) is not _TensorMeta for m in every):
        return None
    return {
        index: {name: _metas_to_json(value) for name, value in fields.items()}
        for index, fields in metas.items()
    }


def prepare_stage(
    stage: _PipelineStageBase, shapes: dict[str, Any], *, microbatches: int, has_backward: bool
) -> None:
    """Make a stage start from known shapes, without its neighbours.

    A stage of torch's tracer has its shapes in its graph. It only needs the number of its arguments.
    """
    fields: dict[str, Any] = {name: _metas_from_json(shapes[name]) for name in _FIELDS}
    stage.has_backward = has_backward
    if isinstance(stage, PipelineStage):
        stage._user_meta = _StageMeta(**fields)
        stage._inference_mode = InferenceMode.STATIC
    stage._prepare_forward_infra(microbatches, fields["inputs"], None, has_backward=has_backward)
    if has_backward:
        stage._prepare_backward_infra(microbatches)


def _metas_to_json(metas: tuple[Any, ...] | None) -> list[Any] | None:
    if metas is None:
        return None
    return [
        None
        if m is None
        else {
            "shape": list(m.shape),
            "stride": list(m.stride),
            "dtype": str(m.dtype).removeprefix("torch."),
            "requires_grad": m.requires_grad,
        }
        for m in metas
    ]


def _metas_from_json(metas: list[Any] | None) -> tuple[_TensorMeta | None, ...] | None:
    if metas is None:
        return None
    return tuple(
        None
        if m is None
        else _TensorMeta(
            torch.Size(m["shape"]), tuple(m["stride"]), getattr(torch, m["dtype"]), m["requires_grad"]
        )
        for m in metas
    )
