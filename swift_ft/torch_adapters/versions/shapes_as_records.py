"""A stage knows the shapes of its messages as records, gradients included. Since torch 2.12.

Private parts used (tested on torch 2.12 to 2.14):

- ``torch.distributed.pipelining._utils``: ``InferenceMode``, ``_StageMeta``, ``_TensorMeta``.
- of a stage: ``_stage_meta``, ``_user_meta``, ``_inference_mode``, ``_prepare_forward_infra``,
  ``_prepare_backward_infra``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining._utils import InferenceMode, _StageMeta, _TensorMeta
from torch.distributed.pipelining.stage import PipelineStage

_FIELDS = ("inputs", "outputs", "input_grads", "output_grads")


def described(stage: Any) -> dict[str, Any] | None:
    """See `stage_shapes`."""
    fields = {name: getattr(stage._stage_meta, name) for name in _FIELDS}
    metas = [meta for of_field in fields.values() for meta in of_field or () if meta is not None]
    if any(type(meta) is not _TensorMeta for meta in metas):
        return None
    return {name: _to_json(of_field) for name, of_field in fields.items()}


def prepare(stage: Any, shapes: dict[str, Any], *, microbatches: int, has_backward: bool) -> None:
    """See `stage_shapes`. A stage of torch's tracer only needs the number of its arguments."""
    fields: dict[str, Any] = {name: _from_json(shapes[name]) for name in _FIELDS}
    if isinstance(stage, PipelineStage):
        stage._user_meta = _StageMeta(**fields)
        stage._inference_mode = InferenceMode.STATIC
    stage._prepare_forward_infra(microbatches, fields["inputs"], None, has_backward=has_backward)
    if has_backward:
        stage._prepare_backward_infra(microbatches)


def fresh(stage: Any) -> Callable[[], None]:
    """See `stage_shapes`."""
    if not isinstance(stage, PipelineStage):
        return lambda: None
    meta, mode = stage._user_meta, stage._inference_mode

    def put_back() -> None:
        stage._user_meta, stage._inference_mode = meta, mode

    return put_back


def _to_json(metas: Sequence[_TensorMeta | None] | None) -> list[Any] | None:
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


def _from_json(metas: list[Any] | None) -> tuple[_TensorMeta | None, ...] | None:
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
