"""Parameters that stages share, as first and last stage share the embedding: their gradients are summed.

Each stage sends its gradient to the others in messages of its own, which are logged like those of the
pipeline: a replay gets them from the logs, and a stage that is ahead serves them again. Everybody adds up in
the order of the stages, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules

from swift_ft.errors import UsageError
from swift_ft.logging import Direction
from swift_ft.pipeline import PipelineHook
from swift_ft.routes import Route
from swift_ft.traffic import Message, Traffic

__all__ = ["TiedParameters"]


@dataclass(frozen=True, slots=True)
class _Tie:
    parameter: nn.Parameter
    here: int
    others: tuple[int, ...]
    slot: int


class TiedParameters:
    """The parameters that a worker's stages share with others.

    Args:
        hook: of the pipeline.
        traffic: is asked about each message.
    """

    def __init__(self, hook: PipelineHook, traffic: Traffic) -> None:
        self._hook = hook
        self._traffic = traffic
        self._ties: list[_Tie] = []

    @property
    def stages(self) -> tuple[int, ...]:
        """All stages of other workers with which one of this worker's shares a parameter."""
        return tuple(sorted({stage for tie in self._ties for stage in tie.others}))

    def tie(self, parameter: nn.Parameter, stages: Sequence[int]) -> None:
        """Let stages share a parameter. On each of them this is called in the same order.

        Raises:
            UsageError: not exactly one of the stages is on this worker, or they are no stages.
        """
        hook = self._hook
        here = sorted(set(stages) & {*hook.stage_indices})
        if len(here) != 1 or len(set(stages)) < 2 or not set(stages) <= set(range(hook.num_stages)):
            raise UsageError(
                f"tie() was given stages {list(stages)}: it takes two or more of 0 to "
                f"{hook.num_stages - 1}, and exactly one of this worker's, {list(hook.stage_indices)}, which "
                "share the parameter itself."
            )
        others = tuple(sorted(set(stages) - set(here)))
        self._ties.append(_Tie(parameter, here[0], others, len(self._ties)))

    def sum_gradients(self) -> None:
        """Give each tied parameter the sum of all stages' gradients.

        Raises:
            RuntimeError: as torch does, if one of the workers is gone.
        """
        operations: list[dist.P2POp] = []
        awaited: list[Message] = []
        group = self._hook.group
        for tie in self._ties:
            own = tie.parameter.grad
            if own is None:
                own = tie.parameter.grad = torch.zeros_like(tie.parameter)
            for message in self._outgoing(own, tie):
                if self._traffic.sending(message):
                    operations.append(dist.P2POp(dist.isend, message.tensor, message.peer, group))
            for message in self._incoming(tie):
                if self._traffic.receiving(message):
                    operations.append(dist.P2POp(dist.irecv, message.tensor, message.peer, group))
                awaited.append(message)
        if operations:
            works = schedules._batch_p2p(operations)
            self._traffic.waiting()
            schedules._wait_batch_p2p(works)  # as it is now: see `waits.py`
        for message in awaited:
            self._traffic.received(message)
        for tie in self._ties:
            self._add_up(tie, awaited)

    def _add_up(self, tie: _Tie, received: Sequence[Message]) -> None:
        assert tie.parameter.grad is not None
        parts = {tie.here: tie.parameter.grad}
        parts |= {m.key.source_stage: m.tensor for m in received if m.key.slot == tie.slot}
        first, *rest = (parts[stage] for stage in sorted(parts))
        total = first
        for part in rest:
            total = total + part  # a new tensor: what was sent is logged by reference
        tie.parameter.grad = total

    def exchange(self) -> tuple[list[Message], list[Message]]:
        """What this worker receives, and sends, in an iteration; tensors that are sent are left out."""
        incoming = [message for tie in self._ties for message in self._incoming(tie)]
        blank = torch.empty(0)
        return incoming, [message for tie in self._ties for message in self._outgoing(blank, tie)]

    def _incoming(self, tie: _Tie) -> list[Message]:
        """Messages of one tie, with buffers."""
        return [
            self._message(stage, tie.here, stage, tie.slot, torch.empty_like(tie.parameter).detach())
            for stage in tie.others
        ]

    def _outgoing(self, tensor: torch.Tensor, tie: _Tie) -> list[Message]:
        """Messages of one tie."""
        return [self._message(tie.here, stage, stage, tie.slot, tensor) for stage in tie.others]

    def _message(self, source: int, to: int, other: int, slot: int, tensor: torch.Tensor) -> Message:
        route = Route(Direction.FORWARD if source < to else Direction.BACKWARD, source, to, slot)
        after_all = self._hook.microbatches  # where the number of a microbatch stands
        return Message(route.key(self._traffic.iteration, after_all), tensor, self._hook.holders()[other])
