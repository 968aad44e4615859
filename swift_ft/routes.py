"""Which tensors a stage receives and sends for a microbatch (a private seam of torch's, tested on 2.13)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.pipelining.stage import _PipelineStageBase

from swift_ft.logging import Direction, MessageKey

__all__ = ["Route", "receives", "sends"]


@dataclass(frozen=True, slots=True)
class Route:
    """From which stage to which, and which of the tensors that go there together."""

    direction: Direction
    source: int
    destination: int
    slot: int

    def key(self, iteration: int, microbatch: int) -> MessageKey:
        """The key of the message that takes it for a microbatch."""
        return MessageKey(iteration, microbatch, self.direction, self.source, self.destination, self.slot)


def receives(
    stage: _PipelineStageBase, microbatch: int, direction: Direction
) -> list[tuple[Route, torch.Tensor]]:
    """What a stage receives for a microbatch, with the buffers, in the order of torch's operations."""
    if direction == Direction.BACKWARD and (not stage.has_backward or stage.is_last):
        return []
    infos = stage.args_recv_info if direction == Direction.FORWARD else stage.grad_recv_info
    return [
        (Route(direction, info.source, stage.stage_index, slot), info.buffer)
        for slot, info in enumerate(infos[microbatch])
        if not info.is_root_arg and info.buffer is not None and info.source is not None
    ]


def sends(stage: _PipelineStageBase, direction: Direction) -> list[Route]:
    """What a stage sends for each microbatch, in the order of torch's operations."""
    here = stage.stage_index
    if direction == Direction.FORWARD:
        return [
            Route(direction, here, destination, slot)
            for slot, destinations in stage.act_send_info.items()
            for destination in destinations
            if destination is not None
        ]
    if not stage.has_backward or stage.is_first:
        return []
    if stage.grad_send_info is None:  # torch makes it when it first sends
        stage.grad_send_info = stage._create_grad_send_info(stage.args_recv_info[0])
    return [
        Route(direction, here, destination, slot)
        for slot, destination in enumerate(stage.grad_send_info)
        if destination is not None and stage._get_grad_send_meta(slot) is not None
    ]
