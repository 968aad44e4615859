"""The shapes of a stage's messages as JSON: a replayed stage starts from them, without talking to anybody.

torch exchanges them once, live, before the first message (private seams of 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining._utils import InferenceMode, _StageMeta, _TensorMeta
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineSchedule
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase

__all__ = ["ShapeExchange", "prepare_stage", "shapes_of"]

_FIELDS = ("inputs", "outputs", "input_grads", "output_grads")


class ShapeExchange:
    """A schedule's exchange of shapes: noticed when it happens, made needless, or asked for again.

    Args:
        schedule: torch's.
        stages: on this worker.
        on_metadata: called with the shapes by stage index, before the first message.
    """

    def __init__(
        self,
        schedule: _PipelineSchedule,
        stages: Sequence[_PipelineStageBase],
        on_metadata: Callable[[dict[int, dict[str, Any]]], None],
    ) -> None:
        self._schedule: Any = schedule
        self._stages = stages
        self._plural = "" if isinstance(schedule, PipelineScheduleSingle) else "s"
        name = f"_initialize_stage{self._plural}"
        original = getattr(schedule, name)

        def wrapped(*args: Any, **kwargs: Any) -> None:
            known = self.known
            original(*args, **kwargs)
            if not known and (metadata := shapes_of(stages)) is not None:
                on_metadata(metadata)

        setattr(schedule, name, wrapped)

    @property
    def known(self) -> bool:
        """Whether the exchange is done, or not needed any more."""
        return bool(getattr(self._schedule, self._flag("forward")))

    def adopt(self, metadata: dict[int, dict[str, Any]]) -> None:
        """Start from known shapes."""
        schedule = self._schedule
        for stage in self._stages:
            assert isinstance(stage, PipelineStage)
            prepare_stage(
                stage,
                metadata[stage.stage_index],
                microbatches=schedule._n_microbatches,
                has_backward=schedule._has_backward,
            )
        for direction in ("forward", "backward") if schedule._has_backward else ("forward",):
            setattr(schedule, self._flag(direction), True)

    def forget(self) -> None:
        """Let the next step exchange shapes again, live."""
        for direction in ("forward", "backward"):
            setattr(self._schedule, self._flag(direction), False)

    def _flag(self, direction: str) -> str:
        return f"_stage{self._plural}_{direction}_initialized"


def shapes_of(stages: Sequence[_PipelineStageBase]) -> dict[int, dict[str, Any]] | None:
    """The shapes of all messages by stage index, JSON-ready.

    None for kinds that cannot be written down (DTensor).
    """
    if not all(isinstance(stage, PipelineStage) for stage in stages):
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
    stage: PipelineStage, shapes: dict[str, Any], *, microbatches: int, has_backward: bool
) -> None:
    """Make a stage start from known shapes, without talking to anybody."""
    fields: dict[str, Any] = {name: _metas_from_json(shapes[name]) for name in _FIELDS}
    stage.has_backward = has_backward
    stage._user_meta = _StageMeta(**fields)
    stage._inference_mode = InferenceMode.STATIC
    stage._prepare_forward_infra(microbatches, None, None, has_backward=has_backward)
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
