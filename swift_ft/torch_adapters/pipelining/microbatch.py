"""Microbatches that are computed one at a time through some stages on this worker (paper §5.2).

A parallel replay knows all inputs from the log. So a microbatch goes forward and backward through the lost
stages without any other microbatch, by the same functions of torch's stages that the schedule calls. The
schedule only decides in which order gradients are added up.

Private parts used (tested on torch 2.11 to 2.14):

- of a schedule: ``_n_microbatches``, ``_loss_fn``, ``_compute_loss``, ``_comp_type_to_function_map``.
- of a stage: ``bwd_cache``, ``dw_builder``, ``set_local_fwd_input``, ``set_local_bwd_input``,
  ``get_local_bwd_output``, ``get_fwd_send_ops``, ``get_bwd_send_ops``.
- ``_backward_hooks`` and ``_post_accumulate_grad_hooks`` of a parameter, and ``batchnorm._NormBase``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage, _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from swift_ft.determinism import random_state
from swift_ft.errors import CannotHelpError
from swift_ft.logging import THROUGH_PIPELINE, Direction, checksum_of
from swift_ft.torch_adapters.pipelining.p2p_routes import Route, receives, sends
from swift_ft.torch_adapters.pipelining.schedule_order import ComputeOrder
from swift_ft.torch_core.buffers import BufferCopies
from swift_ft.torch_core.module_tree import all_within

_AUTOCAST = ("cpu", "cuda")


def evaluating(module: nn.Module) -> list[str]:
    """The names of a module's parts that are in eval mode, itself included."""
    return [name for name, part in module.named_modules() if not part.training]


def autocast_here() -> dict[str, torch.dtype]:
    """The dtypes of automatic mixed precision by device type, where it is on."""
    return {kind: torch.get_autocast_dtype(kind) for kind in _AUTOCAST if torch.is_autocast_enabled(kind)}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The script's input to a schedule's step, by microbatch.

    Attributes:
        args: of the first stage; empty for the owner of others.
        kwargs: of this worker's stages.
        targets: of the loss; None where the script gave none, or this is not the last stage's owner.
        loss_kwargs: for the loss function; None where the script gave none, as torch before 2.13 takes none.
        outputs: whether the script asked for the last stage's outputs.
        begun: stages whose parameters already have gradients.
        autocast: the dtype by device type, where the script computes with automatic mixed precision.
        evaluating: the names of the modules in eval mode, by stage.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    loss_kwargs: dict[str, Any] | None
    outputs: bool
    begun: Sequence[int] = ()
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    evaluating: Mapping[int, Sequence[str]] = field(default_factory=dict)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Within the block, compute in the script's precision."""
        with ExitStack() as stack:
            for kind in {*self.autocast, *autocast_here()}:
                dtype = self.autocast.get(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield


Gradients = list[torch.Tensor | None]
"""Gradients of a stage's parameters, in order; None for a parameter without one."""


@dataclass(slots=True)
class Computed:
    """The results of a microbatch in the stages of one worker.

    Attributes:
        sent: the messages that they would have sent.
        received: checksums of the messages that they would have received.
        gradients: by stage. Left empty where autograd adds them up.
        output: of the last stage, if it is among them and the script asked for it.
        loss: the last stage's.
        random: of torch's generators after the forward pass, and its loss, that is the last of the worker's.
    """

    sent: dict[Route, torch.Tensor] = field(default_factory=dict)
    received: dict[Route, int] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    output: Any = None
    loss: torch.Tensor | None = None
    random: dict[str, torch.Tensor] | None = None


class SharedSteps(Protocol):
    """Computes an owner's steps, together with others."""

    def step(
        self, iteration: int, inputs: Inputs, had: Mapping[int, Gradients]
    ) -> tuple[dict[int, Computed], dict[int, Gradients]]:
        """Returns the results by microbatch and, by stage, the gradients added to those that it had."""


def why_not_apart(schedule: _PipelineSchedule, stages: Sequence[_PipelineStageBase]) -> str:
    """Why the microbatches of stages cannot be computed apart from each other; empty if they can."""
    if schedule._n_microbatches < 2:
        return "an iteration has only one microbatch"
    if schedule._loss_fn is None:
        return "this worker's schedule has no loss function"
    if getattr(schedule, "_comp_type_to_function_map", None):
        return "the schedule replaces torch's functions"
    for stage in stages:
        if isinstance(stage, _PipelineStage):
            return "a stage of torch's tracer needs the graph of the whole pipeline"
        if not isinstance(stage, PipelineStage) or stage.dw_builder is not None:
            return "the stage computes gradients in its own way"
        if isinstance(stage.submod, DistributedDataParallel | FSDPModule):
            return "the stage's gradients are averaged among replicas"
        for module in stage.submod.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                return f"{type(module).__name__} keeps running statistics: microbatches depend on each other"
        for parameter in stage.submod.parameters():
            if isinstance(parameter, DTensor):
                return "the stage's parameters are distributed among workers"
            hooks = ((parameter._backward_hooks or {}), (parameter._post_accumulate_grad_hooks or {}))
            if any(not _is_ours(hook) for of_kind in hooks for hook in of_kind.values()):
                return "parameters have hooks"
    return ""


def _is_ours(hook: Any) -> bool:
    """Whether a hook only looks: see `torch_core/module_hooks.py`."""
    return str(getattr(hook, "__module__", "")).startswith("swift_ft.")


Fill = Callable[[Route, torch.Tensor], int]
"""Fills a receive buffer with what was logged, and returns the checksum of that."""


class StageChain:
    """The stages of one or more workers, on this one.

    Args:
        schedule: of this worker: its loss function, its order.
        stages: by index, with their shapes prepared.
        seed: derives torch's random state for (iteration, stage, microbatch).
    """

    def __init__(
        self,
        schedule: _PipelineSchedule,
        stages: Mapping[int, PipelineStage],
        seed: Callable[[int, int, int], None],
    ) -> None:
        self._loss: Callable[..., Any] = schedule._compute_loss
        self._own_loss: Callable[..., Any] | None = schedule._loss_fn
        self.stages = dict(sorted(stages.items()))
        self._seed = seed
        self.iteration = 0
        self._adding_up: Collection[int] = ()
        self._received: dict[tuple[int, Route], int] = {}  # checksums, by microbatch
        self._unchanged: BufferCopies | None = None
        self._places: Mapping[int, int] = next(iter(self.stages.values())).stage_index_to_group_rank
        self.order = ComputeOrder(schedule, self._places)

    @property
    def device(self) -> torch.device:
        """The device of all stages."""
        return torch.device(next(iter(self.stages.values())).device)

    def place(self, stage: int) -> int:
        """The worker of a stage, as a rank in the pipeline's group."""
        return self._places[stage]

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """Of a stage, in order."""
        return [*self.stages[stage].submod.parameters()]

    def code_of(self, stages: Collection[int]) -> tuple[dict[int, nn.Module], Callable[..., Any] | None]:
        """The modules of some stages, and the script's loss function if the last stage is among them."""
        last = any(self.stages[index].is_last for index in stages)
        modules = {index: self.stages[index].submod for index in stages}
        return modules, self._own_loss if last else None

    def set_modes(self, stage: int, evaluating: Sequence[str]) -> None:
        """Put these parts of a stage in eval mode, and all others in training mode."""
        for name, part in self.stages[stage].submod.named_modules():
            part.training = name not in evaluating

    def begin(self, iteration: int, adding_up: Collection[int]) -> None:
        """A step begins: no gradients yet.

        Args:
            iteration: counted from 0.
            adding_up: stages whose parameters keep the sum of all gradients, in the order in which they are
                computed. Of the others, each microbatch's are kept.
        """
        self.iteration, self._adding_up, self._unchanged = iteration, adding_up, None
        for stage in self.stages.values():
            stage.has_backward = True
            stage.clear_runtime_states()
            self.take_gradients(stage.stage_index)

    def take_gradients(self, stage: int) -> Gradients:
        """The gradients of a stage's parameters, which have none afterwards.

        Raises:
            CannotHelpError: gradients are sparse.
        """
        found: Gradients = []
        for parameter in self.parameters(stage):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise CannotHelpError(f"gradients of stage {stage} are sparse: others cannot add them up")
            found.append(parameter.grad)
            parameter.grad = None
        return found

    def receive(self, microbatch: int, fill: Fill) -> None:
        """Take all that a microbatch received from stages that are not here. It need not be computed yet.

        Args:
            microbatch: its index.
            fill: serves what came from other stages.
        """
        for stage in self.stages.values():
            for direction in THROUGH_PIPELINE:
                for route, buffer in receives(stage, microbatch, direction):
                    if route.source not in self.stages:
                        self._received[microbatch, route] = fill(route, buffer)

    def compute(self, microbatch: int, inputs: Mapping[int, Inputs]) -> dict[int, Computed]:
        """Forward and backward through all stages. :meth:`receive` comes before it.

        Args:
            microbatch: its index.
            inputs: by stage, of the worker that holds it.

        Returns:
            By the place of the worker that holds the stages.

        Raises:
            CannotHelpError: microbatches depend on each other, by a buffer that a forward pass changes, or by
                random numbers that a backward pass draws.
        """
        results = {self._places[index]: Computed() for index in self.stages}
        buffers = self._unchanged or self._buffers()
        loss = None
        for index, stage in self.stages.items():
            with inputs[index].precision():
                loss = self._forward(stage, microbatch, inputs[index], results[self._places[index]])
        self._unchanged = self._buffers()
        if self._unchanged.differs_from(buffers):
            raise CannotHelpError(
                "a forward pass changes the module's buffers (as BatchNorm does): its microbatches cannot be "
                "computed apart"
            )
        random = random_state()
        for stage in reversed(self.stages.values()):
            with inputs[stage.stage_index].precision():
                self._backward(stage, microbatch, loss, results[self._places[stage.stage_index]])
        if any(not torch.equal(state, random[kind]) for kind, state in random_state().items()):
            # A schedule has other forward passes in between, so that it draws others.
            raise CannotHelpError(
                "a backward pass draws random numbers: microbatches cannot be computed apart"
            )
        return results

    def _buffers(self) -> BufferCopies:
        return BufferCopies(all_within(stage.submod for stage in self.stages.values()))

    def _forward(
        self, stage: PipelineStage, microbatch: int, inputs: Inputs, result: Computed
    ) -> torch.Tensor | None:
        """Returns the loss, of the last stage."""
        index = stage.stage_index
        kind: Any = type(stage)  # the class's functions: the hook is for the schedule's own steps
        self._note_received(stage, microbatch, Direction.FORWARD, result)
        self._seed(self.iteration, index, microbatch)
        args = inputs.args[microbatch] if stage.is_first else ()
        output = kind.forward_one_chunk(
            stage, microbatch, args, inputs.kwargs[microbatch], save_forward_output=False
        )
        loss: torch.Tensor | None = None
        if stage.is_last:
            targets = inputs.targets
            target = targets[microbatch] if targets is not None else None
            more = () if inputs.loss_kwargs is None else (inputs.loss_kwargs,)
            loss = self._loss(output, target, *more)
            assert loss is not None
            result.loss = loss.detach()
            result.output = output if inputs.outputs else None
        if self.order.is_last(self._places[index], index, microbatch):
            result.random = random_state()  # a loss may draw, too
        if stage.is_last:
            return loss
        after = self.stages.get(index + 1)
        if self._beside(index, index + 1):
            assert after is not None  # all stages of a worker are here
            after.set_local_fwd_input(output, microbatch)
            return None
        operations = kind.get_fwd_send_ops(stage, microbatch)
        self._sent(stage, Direction.FORWARD, operations, result, after, microbatch)
        return None

    def _backward(
        self,
        stage: PipelineStage,
        microbatch: int,
        loss: torch.Tensor | None,
        result: Computed,
    ) -> None:
        index = stage.stage_index
        kind: Any = type(stage)
        self._note_received(stage, microbatch, Direction.BACKWARD, result)
        split = self.order.is_split(index, microbatch)
        kind.backward_one_chunk(
            stage, microbatch, loss=loss if stage.is_last else None, full_backward=not split
        )
        if split:
            kind.backward_weight_one_chunk(stage, microbatch)
        if index not in self._adding_up:
            result.gradients[index] = self.take_gradients(index)
        before = self.stages.get(index - 1)
        if stage.is_first:
            stage.bwd_cache.pop(microbatch)
        elif self._beside(index, index - 1):
            assert before is not None
            before.set_local_bwd_input(kind.get_local_bwd_output(stage, microbatch), microbatch)
        else:
            operations = kind.get_bwd_send_ops(stage, microbatch)
            self._sent(stage, Direction.BACKWARD, operations, result, before, microbatch)

    def _note_received(
        self, stage: PipelineStage, microbatch: int, direction: Direction, result: Computed
    ) -> None:
        for route, buffer in receives(stage, microbatch, direction):
            if route.source not in self.stages:
                result.received[route] = self._received.pop((microbatch, route))
            elif not self._beside(route.source, stage.stage_index):
                result.received[route] = checksum_of(buffer)

    def _sent(
        self,
        stage: PipelineStage,
        direction: Direction,
        operations: Sequence[Any],
        result: Computed,
        to: PipelineStage | None,
        microbatch: int,
    ) -> None:
        """Keep what torch would send, and pass it to the destination stage if that is here."""
        tensors = [operation.tensor for operation in operations]
        result.sent.update(zip(sends(stage, direction), tensors, strict=True))
        if to is not None:
            buffers = [buffer for _, buffer in receives(to, microbatch, direction)]
            with torch.no_grad():
                for buffer, tensor in zip(buffers, tensors, strict=True):
                    buffer.copy_(tensor)

    def _beside(self, one: int, other: int) -> bool:
        """Whether two stages are on one worker: then no message passes between them."""
        return self._places[one] == self._places[other]
