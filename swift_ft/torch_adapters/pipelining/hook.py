"""The hook on torch's pipeline stages (private parts tested on torch 2.11 to 2.14).

Every schedule asks a stage for the operations of each microbatch (``get_fwd_send_ops`` and three more).
Wrapping those four on the stage instance shows each message with its key and leaves communication as it was.
In a replay, receives are served and sends are dropped. The stage keeps the group that the script gave it; its
messages go over the group of torch beneath, where nothing takes them for the script's own.

Private parts used:

- of a schedule: ``_stage(s)``, ``_n_microbatches``, ``_step_microbatches``, ``_internal_losses``,
  ``_args_chunk_spec``; of a runtime schedule ``fwd_recv_ops``, ``bwd_recv_ops``, ``unshard_ops``,
  ``backward_counter``.
- of a stage: ``stage_index_to_group_rank``, ``bwd_cache``, ``backward_state``, ``dw_runner``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import (
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase

from swift_ft.determinism import set_random_state
from swift_ft.errors import CannotHelpError, UnsupportedError, UsageError
from swift_ft.logging import THROUGH_PIPELINE, Direction
from swift_ft.torch_adapters.comm_errors import is_broken_communication
from swift_ft.torch_adapters.communication import backend_name
from swift_ft.torch_adapters.lasting_group import messenger
from swift_ft.torch_adapters.pipelining.batch_sizes import sizes_of
from swift_ft.torch_adapters.pipelining.interceptor import Message, MessageInterceptor
from swift_ft.torch_adapters.pipelining.layer_averages import LayerAverages
from swift_ft.torch_adapters.pipelining.microbatch import Computed, SharedSteps, why_not_apart
from swift_ft.torch_adapters.pipelining.p2p_routes import Route, receives, sends, skips
from swift_ft.torch_adapters.pipelining.shared_step import gradients_of, inputs_of, leave
from swift_ft.torch_adapters.pipelining.stage_metadata import ShapeExchange, prepare_stage, stages_of
from swift_ft.torch_adapters.step_failures import step_failures


class PipelineHook:
    """Attaches to a schedule and its stages.

    Args:
        schedule: any schedule of ``torch.distributed.pipelining``.
        interceptor: decides about each message.
        on_metadata: called once, before the first message, with the JSON-ready shapes of each stage's
            messages by stage index; a replayed stage starts from them.
        on_batch: called in each step with what the script gives to this worker's stages, by microbatch.
        on_several: called before the second call of the schedule in a step.
        in_step: whether the script is inside of a step.

    Attributes:
        handle: the group of the pipeline, as the script has it: one of a ``DeviceMesh``, or the default one.
        stage_indices: the stages on this worker.
        shapes: of the messages.
        calls_completed: of the schedule, in the last complete step.
        shared: computes this worker's steps together with others; None if it computes them alone.
        averages: of gradients over several pipelines; None if there is one, or if DDP averages them.

    Raises:
        UnsupportedError: ``schedule`` is not a schedule of torch, or its backend cannot send its messages.
    """

    def __init__(
        self,
        schedule: Any,
        interceptor: MessageInterceptor,
        on_metadata: Callable[[dict[int, dict[str, Any]]], None],
        on_batch: Callable[[Any], None] = lambda _: None,
        *,
        on_several: Callable[[], None] = lambda: None,
        in_step: Callable[[], bool] = lambda: True,
    ) -> None:
        self.stages = stages_of(schedule)
        handle = self.stages[0].group or dist.group.WORLD
        assert handle is not None
        self.handle = handle
        self._check_backend()
        self._ranks = dist.get_process_group_ranks(self.handle)
        self._schedule: _PipelineSchedule = schedule
        self._interceptor = interceptor
        self._on_batch = on_batch
        self._on_several = on_several
        self._in_step = in_step
        self.shapes = ShapeExchange(schedule, self.stages, on_metadata)
        self.shared: SharedSteps | None = None
        self.averages: LayerAverages | None = None
        self._calls = 0  # of the schedule, that this step has begun
        self.calls_completed = 0
        self._running = False  # the attached schedule
        self._aside = False
        self._computed_s = 0.0
        # Those under way, by stage, microbatch and direction: each is needed again once it has arrived.
        self._arriving: dict[tuple[int, int, Direction], list[Message]] = {}
        # Asked with each message.
        self.stage_indices = tuple(stage.stage_index for stage in self.stages)
        self._waits_later = isinstance(schedule, _PipelineScheduleRuntime)
        self._wrap_steps()
        for stage in self.stages:
            self._wrap_stage(stage)
        if isinstance(schedule, _PipelineScheduleRuntime):
            schedule.fwd_recv_ops = _Awaited(interceptor.on_wait)
            schedule.bwd_recv_ops = _Awaited(interceptor.on_wait)

    def _check_backend(self) -> None:
        """Over gloo, messages in device memory fail like a lost connection: a socket gets their address."""
        if self.device.type != "cpu" and backend_name(self.handle, self.device) == "gloo":
            raise UnsupportedError(
                f"gloo cannot send messages from {self.device}: use init_process_group('nccl'), or stages "
                "whose inputs and outputs are in host memory."
            )

    @property
    def skipped_to(self) -> set[int]:
        """Stages of other workers that exchange messages with this one's, and are not next to them."""
        return {other for stage in self.stages for other in skips(stage)} - {*self.stage_indices}

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that carries the pipeline's messages in the current generation."""
        return messenger(self.handle)

    def _carried(self, operation: dist.P2POp) -> dist.P2POp:
        """A message of a stage goes its own way, past what decides about the script's operations."""
        if operation.group is not self.handle:
            raise UnsupportedError(
                "A stage sends its messages over a group of its own, which does not live on after a loss: "
                "leave torch.distributed.config.pipeline_per_direction_p2p False."
            )
        operation.group = self.group
        return operation

    @property
    def pipeline(self) -> int:
        """The first rank of the pipeline, which identifies it among its replicas."""
        return min(self._ranks)

    @property
    def num_stages(self) -> int:
        """All stages of the pipeline."""
        return self.stages[0].num_stages

    @property
    def device(self) -> torch.device:
        """The device of messages."""
        return torch.device(self.stages[0].device)

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration."""
        return self._schedule._n_microbatches

    @property
    def scales(self) -> bool:
        """Whether gradients are divided by the number of microbatches."""
        return bool(self._schedule.scale_grads)

    def have_microbatches(self, count: int) -> None:
        """From now on there are so many in an iteration."""
        if count != self.microbatches:
            self._schedule._n_microbatches = count
            self.shapes.recount()

    @property
    def schedule(self) -> _PipelineSchedule:
        """The schedule of torch."""
        return self._schedule

    def why_not_apart(self) -> str:
        """Why others cannot compute microbatches of this worker's stages; empty if they can."""
        return why_not_apart(self._schedule, self.stages)

    def average(self, averages: LayerAverages) -> None:
        """From now on, average the gradients of all stages here over several pipelines."""
        self.averages = averages
        for stage in self.stages:
            averages.attach(stage)

    def holders(self) -> dict[int, int]:
        """The rank of every stage in the pipeline."""
        places = self.stages[0].stage_index_to_group_rank
        return {stage: self._ranks[place] for stage, place in places.items()}

    def neighbours(self, ranks: Collection[int], linked: Collection[int] = ()) -> list[int]:
        """The workers next to some others, in this pipeline.

        Args:
            ranks: the others.
            linked: stages that exchange messages with theirs, and are not next to them.
        """
        holders = self.holders()
        near = {s + step for s, rank in holders.items() if rank in ranks for step in (-1, +1)} | {*linked}
        return sorted({rank for stage, rank in holders.items() if stage in near} - {*ranks})

    def other_stage(self, module: nn.Module, index: int, shapes: dict[str, Any]) -> PipelineStage:
        """Another stage of this pipeline, on this worker during a replay."""
        like = self.stages[0]
        stage = PipelineStage(module, index, self.num_stages, self.device, group=like.group)
        stage.stage_index_to_group_rank = like.stage_index_to_group_rank
        prepare_stage(stage, shapes, microbatches=self.microbatches, has_backward=True)
        return stage

    def aside(self, aside: bool) -> None:
        """Whether this is between two steps, where the schedule is called as if there were no hook."""
        self._aside = aside
        self.shapes.aside(aside)

    def begin(self) -> None:
        """A step of the script begins."""
        self._calls = 0

    def completed(self) -> None:
        """It is complete."""
        self.calls_completed = self._calls

    def _begin_call(self) -> None:
        if not self._schedule._has_backward and self._schedule._loss_fn is not None:
            raise UnsupportedError(
                "schedule.eval() has no place in the log: validate in a function for session.between() "
                "(docs/how-to/between-steps.md).",
                alike=True,
            )
        if not self._in_step():
            raise UsageError(
                "Call schedule.step() inside of `with step:`: the log names messages by iteration and "
                "microbatch, and nothing outside of a step is repeated after a loss.",
                alike=True,
            )
        self._arriving.clear()  # of one that was interrupted
        self._calls += 1
        if self._calls > 1 and self.averages is not None:
            raise UsageError(
                "The pipelines of a LayerStack average their gradients in each call of the schedule, so it "
                "is called once in a step: give it more microbatches.",
                alike=True,
            )
        if self._calls > 1 and self.shared is not None:
            raise CannotHelpError("the script calls its schedule several times in a step")
        if self._calls == 2:
            self._on_several()

    def _numbered(self, microbatch: int, call: int | None = None) -> int:
        """Microbatches are counted on over all calls in a step; by default for the last one."""
        return ((self._calls if call is None else call) - 1) * self.microbatches + microbatch

    def _check_schedule(self) -> None:
        """Another schedule of the same stages would send messages under the same keys."""
        if not self._running:
            raise UsageError(
                "A schedule that is not attached runs the attached one's stages: one schedule trains, and "
                "for evaluation it has schedule.eval(), in a function for session.between().",
                alike=True,
            )

    # ------------------------------------------------------------------------------------ wrapping

    def _wrap_stage(self, stage: Any) -> None:
        for direction, short in ((Direction.FORWARD, "fwd"), (Direction.BACKWARD, "bwd")):
            for wrap, name in (
                (self._receiving, f"get_{short}_recv_ops"),
                (self._sending, f"get_{short}_send_ops"),
            ):
                setattr(stage, name, wrap(stage, getattr(stage, name), direction))
        self._wrap_compute(stage)

    def _receiving(
        self, stage: _PipelineStageBase, original: Callable[[int], list[Any]], direction: Direction
    ) -> Callable[[int], list[Any]]:
        def get_recv_ops(microbatch: int) -> list[Any]:
            if self._aside:
                return [self._carried(operation) for operation in original(microbatch)]
            self._check_schedule()
            found = original(microbatch)  # it may make the buffers
            messages = self._incoming(stage, microbatch, direction)
            self._arriving[stage.stage_index, microbatch, direction] = messages
            operations = [
                self._carried(operation)
                for operation, message in zip(found, messages, strict=True)
                if self._interceptor.on_recv(message)
            ]
            # A runtime schedule waits later (`_Awaited`); the others wait at once.
            if operations and not self._waits_later:
                self._interceptor.on_wait()
            return operations

        return get_recv_ops

    def _sending(
        self, stage: _PipelineStageBase, original: Callable[[int], list[Any]], direction: Direction
    ) -> Callable[[int], list[Any]]:
        def get_send_ops(microbatch: int) -> list[Any]:
            if self._aside:
                return [self._carried(operation) for operation in original(microbatch)]
            self._check_schedule()
            pairs = zip(original(microbatch), sends(stage, direction), strict=True)
            return [
                self._carried(operation)
                for operation, route in pairs
                if self._interceptor.on_send(self.message(stage, microbatch, route, operation.tensor))
            ]

        return get_send_ops

    def _wrap_compute(self, stage: Any) -> None:
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

        def forward_one_chunk(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if not self._aside:
                self._arrived(stage, microbatch, Direction.FORWARD)
                self._interceptor.on_compute(stage.stage_index, self._numbered(microbatch), Direction.FORWARD)
            return self._timed(forward, microbatch, *args, **kwargs)

        def backward_one_chunk(microbatch: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
            if not self._aside:
                self._arrived(stage, microbatch, Direction.BACKWARD)
                self._interceptor.on_compute(
                    stage.stage_index, self._numbered(microbatch), Direction.BACKWARD
                )
            found = self._timed(backward, microbatch, *args, full_backward=full_backward, **kwargs)
            if full_backward:
                self._has_gradients(stage, microbatch)
            return found

        weights = stage.backward_weight_one_chunk

        def backward_weight_one_chunk(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            found = self._timed(weights, microbatch, *args, **kwargs)
            self._has_gradients(stage, microbatch)
            return found

        stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
        stage.backward_weight_one_chunk = backward_weight_one_chunk

    def _has_gradients(self, stage: _PipelineStageBase, microbatch: int) -> None:
        if self.averages is not None and not self._aside:
            self.averages.computed(stage, microbatch)

    def _timed(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return compute(*args, **kwargs)
        finally:
            self._computed_s += time.perf_counter() - began

    def take_computed_s(self) -> float:
        """Seconds since the last call in which the stages of this worker computed."""
        computed, self._computed_s = self._computed_s, 0.0
        return computed

    def _arrived(self, stage: _PipelineStageBase, microbatch: int, direction: Direction) -> None:
        messages = self._arriving.pop((stage.stage_index, microbatch, direction), None)
        if messages is None:
            messages = self._incoming(stage, microbatch, direction)
        for message in messages:
            if message.key.source_stage not in self.stage_indices:  # else it was passed in memory
                self._interceptor.on_received(message)

    def _incoming(self, stage: _PipelineStageBase, microbatch: int, direction: Direction) -> list[Message]:
        return [
            self.message(stage, microbatch, route, buffer)
            for route, buffer in receives(stage, microbatch, direction)
        ]

    # ------------------------------------------------------------------------------- shared replays

    def _wrap_steps(self) -> None:
        schedule: Any = self._schedule
        original = schedule._step_microbatches

        def noted(*args: Any, **kwargs: Any) -> None:
            try:
                step_microbatches(*args, **kwargs)
            except Exception as error:
                step_failures.note(error, is_over=is_broken_communication(error))
                raise

        def step_microbatches(
            arg_mbs: list[Any] | None = None,
            kwarg_mbs: list[Any] | None = None,
            target_mbs: list[Any] | None = None,
            losses: list[Any] | None = None,
            return_outputs: bool = True,
            loss_kwargs: dict[str, Any] | None = None,
        ) -> None:
            more = {} if loss_kwargs is None else {"loss_kwargs": loss_kwargs}  # not before torch 2.13
            if self._aside:
                original(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **more)
                return
            self._begin_call()
            first, last = (any(getattr(s, end) for s in self.stages) for end in ("is_first", "is_last"))
            self._on_batch((arg_mbs if first else None, kwarg_mbs, target_mbs if last else None))
            if self.averages is not None and self.averages.alone:
                self._give_results(self.averages.take_completed(), losses)
                return
            if self.shared is None:
                self._running = True
                try:
                    original(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **more)
                finally:
                    self._running = False
                if self.averages is not None:
                    self.averages.finish(self._results(losses), self._sizes(arg_mbs, target_mbs))
                return
            had = gradients_of(self.stages)
            split = (arg_mbs, kwarg_mbs, target_mbs)
            inputs = inputs_of(schedule, self.stages, split, losses, had, return_outputs, loss_kwargs)
            results, gradients = self.shared.step(self._interceptor.iteration, inputs, had)
            leave(schedule, self.stages, inputs, had, results, gradients, losses)
            for microbatch in range(self.microbatches):
                self._show(microbatch, results[microbatch])

        schedule._step_microbatches = noted

    def _results(self, losses: list[Any] | None) -> tuple[list[Any], list[list[Any]]]:
        """The results that the schedule will give to the script: losses, and the outputs of each stage."""
        return [*(losses or ())], [[*stage.output_chunks] for stage in self.stages]

    def _sizes(self, inputs: list[Any] | None, targets: list[Any] | None) -> list[int]:
        """The samples of microbatches, where they count. Torch splits targets by their first dimension."""
        if self.averages is None or not self.averages.unlike:
            return []
        schedule: Any = self._schedule
        return sizes_of(inputs if schedule._args_chunk_spec is None else None, targets)

    def _give_results(self, results: tuple[list[Any], list[list[Any]]], losses: list[Any] | None) -> None:
        if losses is not None:
            losses[:] = results[0]
        for stage, outputs in zip(self.stages, results[1], strict=True):
            stage.output_chunks[:] = outputs

    def _show(self, microbatch: int, result: Computed) -> None:
        """Show the interceptor the messages of a microbatch of a step that others took part in."""
        by_index = {stage.stage_index: stage for stage in self.stages}
        for stage in self.stages:
            for direction in THROUGH_PIPELINE:
                for route, buffer in receives(stage, microbatch, direction):
                    if (checksum := result.received.get(route)) is not None:
                        message = self.message(stage, microbatch, route, buffer)
                        self._interceptor.on_received_elsewhere(message, checksum)
        for route, tensor in result.sent.items():
            self._interceptor.on_send(self.message(by_index[route.source], microbatch, route, tensor))
        if result.random is not None:
            set_random_state(result.random)

    # ------------------------------------------------------------------------------- keys of messages

    def message(
        self,
        stage: _PipelineStageBase,
        microbatch: int,
        route: Route,
        tensor: torch.Tensor,
        call: int | None = None,
    ) -> Message:
        """A message of a microbatch, in a call of the schedule: by default in the last one."""
        key = route.key(self._interceptor.iteration, self._numbered(microbatch, call))
        other = route.destination if route.source == stage.stage_index else route.source
        return Message(key, tensor, self._ranks[stage.stage_index_to_group_rank[other]])

    # ------------------------------------------------------------------------------------- recovery

    def reset(self) -> None:
        """Forget an aborted step: a reference to its operations would keep the group alive."""
        schedule: Any = self._schedule
        schedule._internal_losses.clear()
        self._arriving.clear()
        if self.averages is not None:
            self.averages.reset()
        if isinstance(schedule, _PipelineScheduleRuntime):
            schedule.fwd_recv_ops.clear()
            schedule.bwd_recv_ops.clear()
            schedule.unshard_ops.clear()
            schedule.backward_counter.clear()
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.bwd_cache.clear()
            stage.backward_state.clear()
            stage.dw_runner.clear()


class _Awaited(dict[tuple[int, int], list[dist.Work]]):
    """Receives under way, by stage and microbatch. A runtime schedule pops those that it waits for."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        works = super().pop(key, *default)
        if works:
            self._on_wait()
        return works
