"""A stage knows the shapes of its messages as tensors, without those of gradients. Before torch 2.12.

Private parts used (tested on torch 2.11): of a stage, ``inputs_meta``, ``_outputs_meta``,
``_configure_outputs_meta``, ``args_recv_info``, ``_prepare_forward_infra``, ``_prepare_backward_infra``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor


def described(stage: Any) -> dict[str, Any] | None:
    """See `stage_shapes`. Gradients have the shapes of what they belong to."""
    if _is_manual(stage):
        inputs = [*stage.inputs_meta]
    else:
        inputs = [info.buffer if hasattr(info, "buffer") else info.meta for info in stage.args_recv_info[0]]
    outputs = [*stage._outputs_meta]
    if any(not isinstance(one, torch.Tensor) or isinstance(one, DTensor) for one in (*inputs, *outputs)):
        return None
    travels = stage.has_backward
    return {
        "inputs": _to_json(inputs, requires_grad=travels and not stage.is_first),
        "outputs": _to_json(outputs, requires_grad=travels),
        "input_grads": _to_json(inputs) if travels and not stage.is_first else None,
        "output_grads": _to_json(outputs) if travels and not stage.is_last else None,
    }


def prepare(stage: Any, shapes: dict[str, Any], *, microbatches: int, has_backward: bool) -> None:
    """See `stage_shapes`. A stage of torch's tracer needs none: they are in its graph."""
    stage._outputs_meta = None  # torch sets them once only
    if _is_manual(stage):
        stage.inputs_meta = _from_json(shapes["inputs"])
        stage._configure_outputs_meta(_from_json(shapes["outputs"]))
    stage._prepare_forward_infra(microbatches, ())
    if has_backward:
        stage._prepare_backward_infra(microbatches)


def fresh(stage: Any) -> Callable[[], None]:
    """See `stage_shapes`."""
    inputs, outputs = getattr(stage, "inputs_meta", None), stage._outputs_meta

    def put_back() -> None:
        stage.inputs_meta, stage._outputs_meta = inputs, outputs

    return put_back


def _is_manual(stage: Any) -> bool:
    """Not one of torch's tracer."""
    return isinstance(stage, PipelineStage)


def _to_json(tensors: Sequence[torch.Tensor], *, requires_grad: bool = False) -> list[Any]:
    return [
        {
            "shape": list(one.shape),
            "stride": list(one.stride()),
            "dtype": str(one.dtype).removeprefix("torch."),
            "requires_grad": requires_grad and one.is_floating_point(),
        }
        for one in tensors
    ]


def _from_json(metas: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty_strided(m["shape"], m["stride"], dtype=getattr(torch, m["dtype"]), device="meta")
        for m in metas
    )
