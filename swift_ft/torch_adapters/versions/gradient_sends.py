"""The gradients that a stage sends back for each microbatch.

torch 2.13 leaves out an input for which the stage before has made no room; where autograd gives no gradient,
it sends zeros. An older one sends all, and raises where there is none.

Private parts used (tested on torch 2.11 to 2.14): of ``_PipelineStageBase``, ``_get_grad_send_meta`` (torch
2.13), ``grad_send_info``.
"""

from __future__ import annotations

from torch.distributed.pipelining.stage import _PipelineStageBase


def _with_room(stage: _PipelineStageBase, destinations: list[int | None]) -> list[int]:
    return [
        place
        for number, place in enumerate(destinations)
        if place is not None and stage._get_grad_send_meta(number) is not None
    ]


def _all(_: _PipelineStageBase, destinations: list[int | None]) -> list[int]:
    return [place for place in destinations if place is not None]


gradient_destinations = _with_room if hasattr(_PipelineStageBase, "_get_grad_send_meta") else _all
"""The stages to which a stage sends gradients, in the order of its inputs, given its ``grad_send_info``."""
