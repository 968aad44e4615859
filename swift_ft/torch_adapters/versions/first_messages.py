"""The messages by which a stage connects to its neighbours, before the first microbatch.

Before torch 2.12 a stage also sends one to a neighbour on the same worker. gloo has no such connection, so
schedules like ``ScheduleZBVZeroBubble`` would end there. They need none: such stages pass on their tensors.

Private part used (tested on torch 2.11): ``_get_init_p2p_neighbors_ops`` of a stage, whose operations have a
``group_peer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining.stage import PipelineStage


def _leave_out_itself(stage: Any) -> None:
    original = stage._get_init_p2p_neighbors_ops

    def operations() -> list[Any]:
        return [operation for operation in original() if operation.group_peer != stage.group_rank]

    stage._get_init_p2p_neighbors_ops = operations


def _nothing(_: Any) -> None: ...


connect_to_others_only: Callable[[Any], None] = (
    _nothing if hasattr(PipelineStage, "_warmup_forward_vote") else _leave_out_itself
)
"""Let a stage exchange its first messages with other workers only."""
