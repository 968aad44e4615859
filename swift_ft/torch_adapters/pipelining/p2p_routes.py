"""The tensors that a stage receives and sends for a microbatch.

Private parts used (tested on torch 2.11 to 2.14): of ``_PipelineStageBase``, ``args_recv_info``,
``grad_recv_info``, ``act_send_info``, ``grad_send_info`` and ``_create_grad_send_info``; of the tracer's
``_PipelineStage``, ``pipe_info.graph``; ``_RecvInfo``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.pipelining.stage import _PipelineStage, _PipelineStageBase, _RecvInfo

from swift_ft.logging import Direction, MessageKey
from swift_ft.torch_adapters.versions.gradient_sends import gradient_destinations


@dataclass(frozen=True, slots=True)
class Route:
    """From which stage to which, and which of the tensors between them.

    Slots are counted per pair of stages. Its place among all outputs of the one stage and its place among all
    inputs of the other may differ, where torch's tracer has made a connection that skips stages.
    """

    direction: Direction
    source: int
    destination: int
    slot: int

    def key(self, iteration: int, microbatch: int) -> MessageKey:
        """The key of the message on this route for a microbatch."""
        return MessageKey(iteration, microbatch, self.direction, self.source, self.destination, self.slot)


def receives(
    stage: _PipelineStageBase, microbatch: int, direction: Direction
) -> list[tuple[Route, torch.Tensor]]:
    """The routes and buffers of a microbatch's arriving messages, in the order of torch's operations."""
    if direction == Direction.BACKWARD and (not stage.has_backward or stage.is_last):
        return []
    infos = stage.args_recv_info if direction == Direction.FORWARD else stage.grad_recv_info
    sources: list[int] = []
    buffers: list[torch.Tensor] = []
    for info in infos[microbatch]:
        # An argument of the pipeline itself has no buffer.
        if isinstance(info, _RecvInfo) and info.buffer is not None and info.source is not None:
            sources.append(info.source)
            buffers.append(info.buffer)
    here = stage.stage_index
    routes = [_route(direction, source, here, slot) for source, slot in _slots(sources)]
    return list(zip(routes, buffers, strict=True))


def sends(stage: _PipelineStageBase, direction: Direction) -> list[Route]:
    """The routes on which a stage sends for each microbatch, in the order of torch's operations."""
    here = stage.stage_index
    if direction == Direction.FORWARD:
        to = [place for places in stage.act_send_info.values() for place in places if place is not None]
        return [_route(direction, here, place, slot) for place, slot in _slots(to)]
    if not stage.has_backward or stage.is_first:
        return []
    if stage.grad_send_info is None:  # torch makes it when it first sends
        stage.grad_send_info = stage._create_grad_send_info(stage.args_recv_info[0])
    to = gradient_destinations(stage, stage.grad_send_info)
    return [_route(direction, here, place, slot) for place, slot in _slots(to)]


def skips(stage: _PipelineStageBase) -> set[int]:
    """The stages with which a stage exchanges messages although they are not next to it.

    The tracer makes such connections, for a mask that is computed once and used by all blocks, for example.
    """
    if not isinstance(stage, _PipelineStage):
        return set()
    nodes = [node for node in stage.pipe_info.graph.nodes if node.op == "call_module"]
    index = {node: number for number, node in enumerate(nodes)}
    pairs = [(index[source], index[node]) for node in nodes for source in _sources(node) if source in index]
    here = stage.stage_index
    return {other for pair in pairs if here in pair for other in pair if abs(other - here) > 1}


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose outputs a stage's node takes."""
    for source in node.all_input_nodes:
        yield source.all_input_nodes[0] if source.target is operator.getitem else source


def _slots(others: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers the messages with each other stage; most stages have one."""
    if len(others) == 1:
        return [(others[0], 0)]
    return [(other, others[:place].count(other)) for place, other in enumerate(others)]


_route = functools.cache(Route)  # the same few in each microbatch
