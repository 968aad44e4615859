"""Gradients averaged layer by layer over pipelines that may have different cuts (Oobleck §5).

The holders of a layer send each other what their microbatches have added up to, as soon as a stage has
computed its last one, while other stages still compute. Each adds up all of it in the order of the pipelines,
so all have the same bits, and the same as with any other cut.

    sums ──▶ averages ──▶ all have theirs ──▶ the script updates parameters
      └─────────┴── a loss: repeated  └─────────────┴── a loss: who has not updated completes it alone

No worker updates a parameter before all have what they need for that. So if one has, when a machine is lost,
any other one can complete the iteration, too, and no update is ever undone.

Private parts used (tested on torch 2.13): ``PipelineStage.scale_grads`` and ``.perform_reduce_grad``, one of
which a schedule calls with the number of microbatches once a stage has all its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swift_ft.failpoints import Point, hit
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.torch_adapters.communication import begin, device_of, wait_for
from swift_ft.torch_adapters.layer_stack import LayerStack

__all__ = ["LayerAverages"]


@dataclass(slots=True)
class _Exchange:
    """The sums of one layer that are under way.

    Attributes:
        parameters: of the layer, those that are trained.
        divisor: of the sum.
        parts: by pipeline, what its microbatches add up to: a flat tensor for each dtype.
    """

    parameters: list[nn.Parameter]
    divisor: int
    parts: list[list[torch.Tensor]]


@dataclass(slots=True)
class _Completed:
    """An iteration whose averages are here, while it is not known whether all other workers have theirs.

    Attributes:
        iteration: which one.
        averages: what each exchange has led to.
        results: what the schedule would give to the script: losses and outputs.
    """

    iteration: int
    averages: list[tuple[list[nn.Parameter], list[torch.Tensor]]]
    results: Any


class LayerAverages:
    """One worker's part.

    Args:
        stack: has the layers of this worker.
        layout: of all pipelines.

    Attributes:
        alone: the next iteration is the one that was interrupted, and completed without other workers.
    """

    def __init__(self, stack: LayerStack, layout: StageLayers) -> None:
        self._stack = stack
        self._holders: Mapping[int, Sequence[int]] = {}
        self._group: dist.ProcessGroup | None = None
        self._iteration = 0
        self._under_way: dict[int, _Exchange] = {}
        self._works: list[dist.Work] = []
        self._completed: _Completed | None = None
        self.alone = False
        self.place(layout)

    def attach(self, stage: Any) -> None:
        """Average the gradients of a stage in the place of scaling them."""
        stage.scale_grads = stage.perform_reduce_grad = partial(self._begin_stage, stage)

    def place(self, layout: StageLayers) -> None:
        """From now on layers are where a layout of all pipelines puts them."""
        self._holders = self._stack.holders(layout)

    def renew(self, group: dist.ProcessGroup) -> None:
        """Continue with another group of all workers."""
        self._group = group

    def begin(self, iteration: int) -> None:
        """The step of an iteration begins."""
        self._iteration = iteration
        if not self.alone:
            self._completed = None

    def reset(self) -> None:
        """Discard what an aborted step has begun."""
        self._under_way.clear()
        self._works.clear()

    def _begin_stage(self, stage: Any, factor: int) -> None:
        """A stage has computed its last microbatch: send its sums, those of the last layer first."""
        for name, layer in reversed([*stage.submod.named_children()]):
            self._begin_layer(int(name), layer, factor)

    def _begin_layer(self, number: int, layer: nn.Module, factor: int) -> None:
        hit(Point.REDUCE, self._iteration, number)
        parameters = [p for p in layer.parameters() if p.requires_grad]
        own = _flat(parameters)
        parts = [
            own if pipeline == self._stack.pipeline else [torch.empty_like(part) for part in own]
            for pipeline in range(self._stack.pipelines)
        ]
        self._under_way[number] = _Exchange(parameters, factor * self._stack.pipelines, parts)
        self._works += begin([*self._operations(number, own, parts)])
        hit(Point.REDUCING, self._iteration, number)

    def _operations(
        self, number: int, own: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]]
    ) -> Iterator[dist.P2POp]:
        for pipeline, (peer, theirs) in enumerate(zip(self._holders[number], parts, strict=True)):
            if pipeline == self._stack.pipeline:
                continue
            for mine, other in zip(own, theirs, strict=True):
                yield dist.P2POp(dist.isend, mine, peer, self._group, tag=number)
                yield dist.P2POp(dist.irecv, other, peer, self._group, tag=number)

    def finish(self, results: Any) -> None:
        """Wait for all sums, and let the gradients of this worker's layers be the averages.

        Args:
            results: what the schedule gives to the script in this iteration.

        Raises:
            RuntimeError: as torch does, if a peer is gone. Then no gradient has changed.
        """
        works, self._works = self._works, []
        wait_for(works)
        averages = []
        for exchange in self._under_way.values():
            sums = (_sum(parts) for parts in zip(*exchange.parts, strict=True))
            averages.append((exchange.parameters, [one.div_(exchange.divisor) for one in sums]))
        self._completed = _Completed(self._iteration, averages, results)
        self._wait_for_all()
        for number, (parameters, of_layer) in zip(self._under_way, averages, strict=True):
            _give(parameters, of_layer)
            hit(Point.REDUCED, self._iteration, number)
        self._under_way.clear()
        self._completed = None

    def _wait_for_all(self) -> None:
        """Until all workers have their averages."""
        done = torch.zeros(1, device=device_of(self._group) if self._group is not None else None)
        wait_for([dist.all_reduce(done, group=self._group, async_op=True)])

    def completes(self, iteration: int) -> bool:
        """Whether this worker can complete an iteration without others, since it has all averages."""
        return self._completed is not None and self._completed.iteration == iteration

    def take_completed(self) -> Any:
        """Put the averages of the interrupted iteration in place. Returns what the script is to be given."""
        assert self._completed is not None
        for parameters, averages in self._completed.averages:
            _give(parameters, averages)
        return self._completed.results


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return [*found.values()]


def _flat(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients one after the other, a tensor for each dtype. Where there is none, it counts as zero."""
    return [torch.cat([_gradient(p).reshape(-1) for p in alike]) for alike in _by_dtype(parameters)]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In the order of the pipelines, on all of them."""
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def _give(parameters: Sequence[nn.Parameter], averages: Sequence[torch.Tensor]) -> None:
    for alike, average in zip(_by_dtype(parameters), averages, strict=True):
        pieces = average.split([parameter.numel() for parameter in alike])
        for parameter, piece in zip(alike, pieces, strict=True):
            if parameter.grad is None:
                parameter.grad = piece.view_as(parameter).clone()
            else:
                parameter.grad.copy_(piece.view_as(parameter))
