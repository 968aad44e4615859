"""The shapes of a stage's messages as JSON: a replayed stage starts from them (see `pipeline.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining._utils import _StageMeta, _TensorMeta
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase

__all__ = ["shapes_of", "stage_meta"]

_FIELDS = ("inputs", "outputs", "input_grads", "output_grads")


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


def stage_meta(shapes: dict[str, Any]) -> _StageMeta:
    """The inverse, for one stage."""
    fields: dict[str, Any] = {name: _metas_from_json(shapes[name]) for name in _FIELDS}
    return _StageMeta(**fields)


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
