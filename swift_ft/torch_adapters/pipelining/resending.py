"""A stage that is ahead repeats the communication of an iteration, and computes nothing (paper §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from swift_ft.logging import MessageKey
from swift_ft.torch_adapters.communication import begin, wait_for
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.interceptor import Message, MessageInterceptor
from swift_ft.torch_adapters.pipelining.p2p_routes import receives, sends
from swift_ft.torch_adapters.pipelining.schedule_order import communication


def resend(
    hook: PipelineHook,
    interceptor: MessageInterceptor,
    sent: Callable[[MessageKey, torch.device], torch.Tensor],
    live: Callable[[int], bool],
    further: tuple[Sequence[Message], Sequence[Message]] = ((), ()),
) -> None:
    """Receive what the others send, for ``interceptor.on_received``, and send again what they need.

    Args:
        hook: on this worker's schedule and stages.
        interceptor: of their messages; its iteration is the one that others repeat.
        sent: the tensor that was sent under a key, on a device.
        live: whether a rank computes this iteration.
        further: messages that are received and sent after those of the schedule. The first one between two
            workers may hold this one until the other is as far in its step, for which it needs the rest.

    Raises:
        RuntimeError: as torch does, if a peer is gone.
    """
    works: list[dist.Work] = []
    filled: list[Message] = []
    for received, wanted in (_exchanged(hook), further):
        awaited = [
            Message(m.key, torch.empty_like(m.tensor, requires_grad=False), m.peer)
            for m in received
            if live(m.peer)
        ]
        works += begin([dist.P2POp(dist.irecv, m.tensor, m.peer, hook.group) for m in awaited])
        works += begin(
            [
                dist.P2POp(dist.isend, sent(m.key, hook.device), m.peer, hook.group)
                for m in wanted
                if live(m.peer)
            ]
        )
        filled += awaited
    wait_for(works)
    for message in filled:
        interceptor.on_received(message)


def _exchanged(hook: PipelineHook) -> tuple[list[Message], list[Message]]:
    """All messages of a step's calls: the received ones with buffers, the sent ones without values."""
    blank = torch.empty(0)
    by_index = {stage.stage_index: stage for stage in hook.stages}
    received: list[Message] = []
    wanted: list[Message] = []
    for call in range(1, hook.calls_completed + 1):
        for is_send, direction, index, microbatch in communication(hook.schedule, hook.stage_indices):
            stage = by_index[index]
            if is_send:
                routes = sends(stage, direction)
                wanted += [hook.message(stage, microbatch, route, blank, call) for route in routes]
            else:
                pairs = receives(stage, microbatch, direction)
                received += [hook.message(stage, microbatch, route, buffer, call) for route, buffer in pairs]
    return received, wanted
