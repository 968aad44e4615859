"""Gradients averaged layer by layer over pipelines that may have different cuts (Oobleck §5).

The holders of a layer send each other what their microbatches have added up to, as soon as a stage has
computed its last one, while other stages still compute. Each adds up all of it in the order of the pipelines,
so all have the same bits, and the same as with any other cut.

    sums ──▶ averages ──▶ all have theirs ──▶ the script updates parameters
      └─────────┴── a loss: repeated  └─────────────┴── a loss: who has not updated completes it alone

No worker updates a parameter before all have what they need for that. So if one has, when a machine is lost,
any other one can complete the iteration, too, and no update is ever undone.

With ``LayerStack(exact=True)`` each microbatch's gradients are a leaf of one tree, so
the bits do not depend on how many microbatches a pipeline has either. So it is in a single pipeline,
which exchanges nothing: another world may have more.

Private parts used (tested on torch 2.11 to 2.14): ``PipelineStage.scale_grads`` and ``.perform_reduce_grad``,
one of which a schedule calls with the number of microbatches once a stage has all its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from swift_ft.faults.failpoints import Point, hit
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.torch_adapters.communication import begin, device_of, wait_on_host
from swift_ft.torch_adapters.lasting_group import beginning
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_adapters.pipelining.batch_sizes import check_sizes
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output

Sums = Sequence[torch.Tensor]
"""Gradients of a layer, added up: one for each parameter or, on their way, a flat tensor for each dtype."""


@dataclass(slots=True)
class _Exchange:
    """The sums of one layer that are under way.

    Attributes:
        parameters: of the layer, those that are trained.
        pieces: by pipeline, what its microbatches add up to: one sum, or the nodes of the tree.
    """

    parameters: list[nn.Parameter]
    pieces: Sequence[Sequence[Sums]]


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
        layout: over all pipelines.
        counts: microbatches of each pipeline in the beginning.
        scale: the sum is divided by the number of all microbatches, and not only of pipelines.

    Attributes:
        alone: the next iteration is the one that was interrupted, and completed without other workers.
    """

    def __init__(self, stack: LayerStack, layout: StageLayers, counts: Sequence[int], *, scale: bool) -> None:
        self._stack = stack
        self._scale = scale
        self._with_others = stack.pipelines > 1
        self._counts: Sequence[int] = ()
        self._sizes: Sequence[int] = ()  # of this step's microbatches
        self._nodes: list[list[Node]] = []  # by pipeline, what it sends of the tree
        self._holders: Mapping[int, Sequence[int]] = {}
        self._group: dist.ProcessGroup | None = None
        self._iteration = 0
        self._parameters: dict[int, list[nn.Parameter]] = {}  # of the layers that are here
        self._trees: dict[int, GradientTree] = {}
        self._under_way: dict[int, _Exchange] = {}
        self._works: list[dist.Work] = []
        self._completed: _Completed | None = None
        self.alone = False
        self.share(counts)
        self.place(layout)

    @property
    def first(self) -> int:
        """The global number of this pipeline's first microbatch."""
        return sum(self._counts[: self._stack.pipeline])

    def share(self, counts: Sequence[int]) -> None:
        """From now on the pipelines have so many microbatches each."""
        if counts == self._counts:
            return
        self._counts, total = counts, sum(counts)
        ends = [0, *accumulate(counts)]
        self._nodes = [nodes_of(range(first, end), total) for first, end in pairwise(ends)]

    @property
    def unlike(self) -> bool:
        """Whether pipelines have unlike numbers of microbatches, so that the samples of these count."""
        return len({*self._counts}) > 1

    def attach(self, stage: Any) -> None:
        """Average the gradients of a stage in the place of scaling them."""
        stage.scale_grads = stage.perform_reduce_grad = partial(self._begin_stage, stage)

    def place(self, layout: StageLayers) -> None:
        """From now on layers are where a layout of all pipelines puts them."""
        self._holders = self._stack.holders(layout)
        self._parameters.clear()

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
        self._trees.clear()
        self._under_way.clear()
        self._works.clear()

    def computed(self, stage: Any, microbatch: int) -> None:
        """A stage has the gradients of a microbatch: they are a leaf of their own, if that is wanted."""
        if not self._stack.exact:
            return
        total = sum(self._counts)
        for name, layer in stage.submod.named_children():
            parameters = self._trained(int(name), layer)
            tree = self._trees.setdefault(int(name), GradientTree(total))
            tree.add(Node(0, self.first + microbatch), [_gradient(parameter) for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None  # it is the tree's from now on

    def _begin_stage(self, stage: Any, _: int) -> None:
        """A stage has computed its last microbatch: send its sums, those of the last layer first."""
        for name, layer in reversed([*stage.submod.named_children()]):
            self._begin_layer(int(name), layer)

    def _begin_layer(self, number: int, layer: nn.Module) -> None:
        hit(Point.REDUCE, self._iteration, number)
        parameters = self._trained(number, layer)
        tree = self._trees.pop(number, None)
        found = [*tree.nodes.values()] if tree is not None else [[_gradient(p) for p in parameters]]
        own = [_flat(parameters, gradients) for gradients in found]
        if outputs.are_watched():
            sums = {f"sum {i} of layer {number}'s gradients": s for i, s in enumerate(chain(*own))}
            outputs.show(Output(f"the gradients of layer {number}", sums, tuple(self._holders[number])))
        pieces = [
            own if pipeline == self._stack.pipeline else self._room_for(pipeline, own[0])
            for pipeline in range(self._stack.pipelines)
        ]
        self._under_way[number] = _Exchange(parameters, pieces)
        if operations := [*self._operations(number, pieces)]:
            with beginning(self._group):
                self._works += begin(operations)
        hit(Point.REDUCING, self._iteration, number)

    def _trained(self, number: int, layer: nn.Module) -> list[nn.Parameter]:
        """The parameters of a layer that have gradients, without a look through its modules each time."""
        if number not in self._parameters:
            self._parameters[number] = [*layer.parameters()]
        return [parameter for parameter in self._parameters[number] if parameter.requires_grad]

    def _room_for(self, pipeline: int, like: Sums) -> list[Sums]:
        """Memory for what another pipeline sends."""
        count = len(self._nodes[pipeline]) if self._stack.exact else 1
        return [[torch.empty_like(one) for one in like] for _ in range(count)]

    def _operations(self, number: int, pieces: Sequence[Sequence[Sums]]) -> Iterator[dist.P2POp]:
        mine = pieces[self._stack.pipeline]
        for pipeline, peer in enumerate(self._holders[number]):
            if pipeline == self._stack.pipeline:
                continue
            for own in (one for sums in mine for one in sums):
                yield dist.P2POp(dist.isend, own, peer, self._group, tag=number)
            for other in (one for sums in pieces[pipeline] for one in sums):
                yield dist.P2POp(dist.irecv, other, peer, self._group, tag=number)

    def finish(self, results: Any, sizes: Sequence[int] = ()) -> None:
        """Wait for all sums, and let the gradients of this worker's layers be the averages.

        Args:
            results: what the schedule gives to the script in this iteration.
            sizes: where :attr:`unlike`, what :func:`~.batch_sizes.sizes_of` says of the microbatches here.

        Raises:
            RuntimeError: as torch does, if a peer is gone. Then no gradient has changed.
            UsageError: not all microbatches have equally many samples, and their numbers are unlike.
        """
        works, self._works = self._works, []
        self._sizes = sizes
        # On the host, also where it could run ahead of its device: this worker says that it can complete the
        # iteration only if nothing of this was aborted.
        exchanges = self._under_way.values() if self._with_others else ()
        own = self._stack.pipeline  # what others have sent is on the same devices
        wait_on_host(works, {one.device for exchange in exchanges for one in exchange.pieces[own][0]})
        if outputs.are_watched():
            self._show_arrived()
        divisor = sum(self._counts) if self._scale else self._stack.pipelines
        averages = [
            (exchange.parameters, [one.div_(divisor) for one in self._total(exchange.pieces)])
            for exchange in self._under_way.values()
        ]
        if self._with_others:
            self._completed = _Completed(self._iteration, averages, results)
            self._wait_for_all()
        for number, (parameters, of_layer) in zip(self._under_way, averages, strict=True):
            for parameter, gradient in _of_each(parameters, of_layer):
                if parameter.grad is not None and not parameter.grad.is_contiguous():
                    parameter.grad.copy_(gradient)
                else:
                    parameter.grad = gradient  # a view: from here on nothing else needs the averages
            hit(Point.REDUCED, self._iteration, number)
        self._under_way.clear()
        self._completed = None

    def _show_arrived(self) -> None:
        """Show what other pipelines have sent."""
        for number, exchange in self._under_way.items():
            for pipeline, theirs in enumerate(exchange.pieces):
                if pipeline != self._stack.pipeline:
                    sums = {f"sum {i} of layer {number}'s gradients": s for i, s in enumerate(chain(*theirs))}
                    place = f"the gradients of layer {number} from pipeline {pipeline}"
                    outputs.show(Output(place, sums, received=True))

    def _total(self, pieces: Sequence[Sequence[Sums]]) -> Sums:
        """The sum of all pipelines, by the tree or in their order. The pieces are used up."""
        if not self._stack.exact:
            first, *rest = (sums for of_pipeline in pieces for sums in of_pipeline)
            for sums in rest:
                for one, other in zip(first, sums, strict=True):
                    one.add_(other)
            return first
        tree = GradientTree(sum(self._counts))
        for nodes, of_pipeline in zip(self._nodes, pieces, strict=True):
            for node, sums in zip(nodes, of_pipeline, strict=True):
                tree.add(node, sums)
        return tree.root

    def _wait_for_all(self) -> None:
        """Until all workers have their averages."""
        # Without it, a machine that is killed between the averages of two layers leaves one layer
        # updated everywhere and the other one nowhere (decision 17).
        device = device_of(self._group) if self._group is not None else None
        sizes = torch.tensor(self._sizes, device=device) if self._sizes else torch.zeros(1, device=device)
        with beginning(self._group):
            work = dist.all_reduce(sizes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        wait_on_host([work], [sizes.device])
        if self._sizes:
            check_sizes(sizes.tolist(), self._counts)
        # Another worker may update from now on. So a loss must not keep this one from it, as it would if its
        # host waited once more, and an abort came first.
        if LastingWork.waits is not None:
            LastingWork.waits.unawaited = False

    def completes(self, iteration: int) -> bool:
        """Whether this worker can complete an iteration without others, since it has all averages."""
        return self._completed is not None and self._completed.iteration == iteration

    def take_completed(self) -> Any:
        """Put the averages of the interrupted iteration in place. Returns what the script is to be given."""
        assert self._completed is not None
        for parameters, averages in self._completed.averages:  # they stay: there may be another loss
            for parameter, gradient in _of_each(parameters, averages):
                parameter.grad = gradient.clone()
        return self._completed.results


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """The places of parameters that are alike, so that their gradients fit into one tensor."""
    found: dict[torch.dtype, list[int]] = {}
    for place, parameter in enumerate(parameters):
        found.setdefault(parameter.dtype, []).append(place)
    return [*found.values()]


def _flat(parameters: Sequence[nn.Parameter], gradients: Sums) -> list[torch.Tensor]:
    """The gradients of parameters one after the other, a tensor for each dtype."""
    return [torch.cat([gradients[n].reshape(-1) for n in alike]) for alike in _by_dtype(parameters)]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter; zeros where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _of_each(parameters: Sequence[nn.Parameter], flat: Sums) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The inverse of :func:`_flat`, by parameter. What it gives are views."""
    for alike, one in zip(_by_dtype(parameters), flat, strict=True):
        pieces = one.split([parameters[n].numel() for n in alike])
        for parameter, piece in zip((parameters[n] for n in alike), pieces, strict=True):
            yield parameter, piece.view_as(parameter)


# A sum over microbatches whose bits do not depend on who adds up which of them.
#
# The terms are the leaves of a binary tree, by their global number. Two neighbours are added as soon as both
# are there, and a node without a right neighbour goes up as it is. So a worker with consecutive leaves has
# few nodes of the one tree, at most twice its depth, and the root is the same however the leaves were dealt.


class Node(NamedTuple):
    """A node: the leaves ``number << level`` to ``((number + 1) << level) - 1``, as far as there are any."""

    level: int
    number: int


class GradientTree:
    """A sum that grows leaf by leaf, in any order.

    Args:
        leaves: of the whole tree, at least one.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._root = Node((leaves - 1).bit_length(), 0)
        self._nodes: dict[Node, Sequence[torch.Tensor]] = {}

    @property
    def nodes(self) -> Mapping[Node, Sequence[torch.Tensor]]:
        """The nodes that are there, in ascending order of their leaves."""
        return {node: self._nodes[node] for node in sorted(self._nodes, key=lambda n: n.number << n.level)}

    @property
    def root(self) -> Sequence[torch.Tensor]:
        """The whole sum. All leaves are there."""
        return self._nodes[self._root]

    def add(self, node: Node, terms: Sequence[torch.Tensor]) -> None:
        """Add a node, or a leaf.

        Args:
            node: which is not there yet, nor a part of it.
            terms: one tensor for each sum. They belong to the tree from now on.
        """
        while node != self._root:
            parent = Node(node.level + 1, node.number // 2)
            if node.number % 2 == 0 and (node.number + 1) << node.level >= self._leaves:
                node = parent  # it has no right neighbour
                continue
            neighbour = self._nodes.pop(Node(node.level, node.number ^ 1), None)
            if neighbour is None:
                break
            left, right = (neighbour, terms) if node.number % 2 else (terms, neighbour)
            if terms:
                torch._foreach_add_([*left], [*right])
            terms = left
            node = parent
        self._nodes[node] = terms


def nodes_of(leaves: Iterable[int], total: int) -> list[Node]:
    """The nodes that some leaves of a tree add up to, ascending.

    Args:
        leaves: their numbers.
        total: of the whole tree.
    """
    tree = GradientTree(total)
    for leaf in leaves:
        tree.add(Node(0, leaf), ())
    return [*tree.nodes]
