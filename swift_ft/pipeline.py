"""The hook on torch's pipeline stages: the one module that knows torch's private seams (tested on 2.13).

Under every schedule, a stage is asked for the operations of each microbatch (``get_fwd_send_ops`` and three
more). Wrapping those four on the stage instance shows each message with its key and leaves communication as
it was; in a replay, receives are served and sends are dropped. The process group is not wrapped: torch takes
its coalesced NCCL path only for the plain class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _batch_p2p,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase

from swift_ft.determinism import set_random_state
from swift_ft.errors import UnsupportedError
from swift_ft.logging import Direction, MessageKey
from swift_ft.microbatch import Computed, Gradients, Inputs, SharedSteps, autocast_here, why_not_apart
from swift_ft.routes import Route, receives, sends
from swift_ft.shapes import ShapeExchange, prepare_stage
from swift_ft.traffic import Message, Traffic

__all__ = ["PipelineHook"]


class PipelineHook:
    """Attaches to a schedule and its stages.

    Args:
        schedule: any schedule of ``torch.distributed.pipelining``.
        traffic: is asked about each message.
        on_metadata: called once, before the first message, with the JSON-ready shapes of each stage's
            messages by stage index; a replayed stage starts from them.

    Attributes:
        shapes: of the messages.
        shared: who computes this worker's steps, if they are shared.

    Raises:
        UnsupportedError: for anything else than a schedule.
    """

    def __init__(
        self,
        schedule: Any,
        traffic: Traffic,
        on_metadata: Callable[[dict[int, dict[str, Any]]], None],
    ) -> None:
        if isinstance(schedule, PipelineScheduleSingle):
            self.stages: list[_PipelineStageBase] = [schedule._stage]
        elif isinstance(schedule, PipelineScheduleMulti):
            self.stages = list(schedule._stages)
        else:
            raise UnsupportedError(
                f"attach_pipeline() takes a schedule of torch.distributed.pipelining, not a {type(schedule)}."
            )
        self._check_backend()
        self._ranks = dist.get_process_group_ranks(self.group)
        self._schedule: _PipelineSchedule = schedule
        self._traffic = traffic
        self.shapes = ShapeExchange(schedule, self.stages, on_metadata)
        self.shared: SharedSteps | None = None
        self._wrap_steps()
        for stage in self.stages:
            self._wrap_stage(stage)
        if isinstance(schedule, _PipelineScheduleRuntime):
            schedule.fwd_recv_ops = _Awaited(traffic.waiting)
            schedule.bwd_recv_ops = _Awaited(traffic.waiting)

    def _check_backend(self) -> None:
        """With gloo a device's messages fail like a lost connection: it hands their address to a socket."""
        if self.device.type != "cpu" and self.group._get_backend(self.device).name() == "gloo":
            raise UnsupportedError(
                f"gloo cannot send messages from {self.device}: use init_process_group('nccl'), or stages "
                "whose inputs and outputs are in host memory."
            )

    @property
    def stage_indices(self) -> tuple[int, ...]:
        """The stages on this worker."""
        return tuple(stage.stage_index for stage in self.stages)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of the pipeline: one of a ``DeviceMesh``, or the default one."""
        group = self.stages[0].group or dist.group.WORLD
        assert group is not None
        return group

    def renew(self, group: dist.ProcessGroup) -> None:
        """Go on with another group of the same workers."""
        for stage in self.stages:
            stage.group = group

    @property
    def pipeline(self) -> int:
        """The first rank of the pipeline: tells replicas of a pipeline apart."""
        return min(self._ranks)

    @property
    def num_stages(self) -> int:
        """All stages of the pipeline."""
        return self.stages[0].num_stages

    @property
    def device(self) -> torch.device:
        """Where messages are."""
        return torch.device(self.stages[0].device)

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration."""
        return self._schedule._n_microbatches

    @property
    def schedule(self) -> _PipelineSchedule:
        """Torch's."""
        return self._schedule

    def why_not_apart(self) -> str:
        """Why others cannot compute microbatches of this worker's stages; empty if they can."""
        return why_not_apart(self._schedule, self.stages)

    def holders(self) -> dict[int, int]:
        """The rank of every stage in the pipeline."""
        places = self.stages[0].stage_index_to_group_rank
        return {stage: self._ranks[place] for stage, place in places.items()}

    def other_stage(self, module: nn.Module, index: int, shapes: dict[str, Any]) -> PipelineStage:
        """Another stage of this pipeline, on this worker for a while."""
        like = self.stages[0]
        stage = PipelineStage(module, index, self.num_stages, self.device, group=like.group)
        stage.stage_index_to_group_rank = like.stage_index_to_group_rank
        prepare_stage(stage, shapes, microbatches=self.microbatches, has_backward=True)
        return stage

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
            pairs = zip(original(microbatch), receives(stage, microbatch, direction), strict=True)
            operations = [
                operation
                for operation, (route, buffer) in pairs
                if self._traffic.receiving(self._message(stage, microbatch, route, buffer))
            ]
            # Other schedules wait at once for what they ask for.
            if operations and not isinstance(self._schedule, _PipelineScheduleRuntime):
                self._traffic.waiting()
            return operations

        return get_recv_ops

    def _sending(
        self, stage: _PipelineStageBase, original: Callable[[int], list[Any]], direction: Direction
    ) -> Callable[[int], list[Any]]:
        def get_send_ops(microbatch: int) -> list[Any]:
            pairs = zip(original(microbatch), sends(stage, direction), strict=True)
            return [
                operation
                for operation, route in pairs
                if self._traffic.sending(self._message(stage, microbatch, route, operation.tensor))
            ]

        return get_send_ops

    def _wrap_compute(self, stage: Any) -> None:
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

        def forward_one_chunk(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            self._arrived(stage, microbatch, Direction.FORWARD)
            self._traffic.computing(stage.stage_index, microbatch, Direction.FORWARD)
            return forward(microbatch, *args, **kwargs)

        def backward_one_chunk(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            self._arrived(stage, microbatch, Direction.BACKWARD)
            self._traffic.computing(stage.stage_index, microbatch, Direction.BACKWARD)
            return backward(microbatch, *args, **kwargs)

        stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk

    def _arrived(self, stage: _PipelineStageBase, microbatch: int, direction: Direction) -> None:
        for route, buffer in receives(stage, microbatch, direction):
            if route.source not in self.stage_indices:  # else handed over in memory: no message
                self._traffic.received(self._message(stage, microbatch, route, buffer))

    # ------------------------------------------------------------------------------- shared replays

    def _wrap_steps(self) -> None:
        schedule: Any = self._schedule
        original = schedule._step_microbatches

        def step_microbatches(
            arg_mbs: list[Any] | None = None,
            kwarg_mbs: list[Any] | None = None,
            target_mbs: list[Any] | None = None,
            losses: list[Any] | None = None,
            return_outputs: bool = True,
            loss_kwargs: dict[str, Any] | None = None,
        ) -> None:
            if self.shared is None:
                original(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)
                return
            args, kwargs = schedule._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            had = {s.stage_index: [p.grad for p in s.submod.parameters()] for s in self.stages}
            begun = [index for index, own in had.items() if any(gradient is not None for gradient in own)]
            inputs = Inputs(args, kwargs, target_mbs, loss_kwargs, return_outputs, begun, autocast_here())
            self._share_step(self.shared, inputs, had, losses)

        schedule._step_microbatches = step_microbatches

    def _share_step(
        self, shared: SharedSteps, inputs: Inputs, had: Mapping[int, Gradients], losses: list[Any] | None
    ) -> None:
        """Leave everything as the schedule would, which does not run."""
        schedule: Any = self._schedule
        results, gradients = shared.step(self._traffic.iteration, inputs, had)
        ordered = [results[microbatch] for microbatch in range(self.microbatches)]
        for stage in self.stages:
            index = stage.stage_index
            parameters = stage.submod.parameters()
            for parameter, before, gradient in zip(parameters, had[index], gradients[index], strict=True):
                if before is None or gradient is None:
                    parameter.grad = gradient
                else:  # in place, as autograd adds
                    parameter.grad = before.copy_(gradient)
            if stage.is_last:
                schedule._internal_losses.extend(result.loss for result in ordered)
                stage.output_chunks.extend(result.output for result in ordered if inputs.outputs)
        schedule._update_losses(self.stages, losses)
        for stage in self.stages:
            stage.perform_reduce_grad(self.microbatches if schedule.scale_grads else 1)
        for microbatch, result in enumerate(ordered):
            self._show(microbatch, result)
            if result.random is not None:
                set_random_state(result.random)

    def _show(self, microbatch: int, result: Computed) -> None:
        """Show the messages of a microbatch that was computed apart."""
        by_index = {stage.stage_index: stage for stage in self.stages}
        for stage in self.stages:
            for direction in Direction:
                for route, buffer in receives(stage, microbatch, direction):
                    if (checksum := result.received.get(route)) is not None:
                        message = self._message(stage, microbatch, route, buffer)
                        self._traffic.received_elsewhere(message, checksum)
        for route, tensor in result.sent.items():
            self._traffic.sending(self._message(by_index[route.source], microbatch, route, tensor))

    # ------------------------------------------------------------------------------- keys of messages

    def _message(
        self, stage: _PipelineStageBase, microbatch: int, route: Route, tensor: torch.Tensor
    ) -> Message:
        key = route.key(self._traffic.iteration, microbatch)
        other = route.destination if route.source == stage.stage_index else route.source
        return Message(key, tensor, self._ranks[stage.stage_index_to_group_rank[other]])

    # ------------------------------------------------------------------------------------- recovery

    def reset(self) -> None:
        """Forget an aborted step: nothing may hold on to its operations, or the group never goes away."""
        schedule: Any = self._schedule
        schedule._internal_losses.clear()
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

    def serve(
        self,
        sent: Callable[[MessageKey, torch.device], torch.Tensor],
        live: Callable[[int], bool],
        further: tuple[Sequence[Message], Sequence[Message]] = ((), ()),
    ) -> None:
        """Take part in an iteration that this worker has completed before, without computing anything.

        What the others send is received and handed to ``traffic.received``; what they need is sent again.

        Args:
            sent: the tensor that was sent under a key, on a device.
            live: whether a rank computes this iteration.
            further: messages that are received and sent after those of the schedule.
        """
        awaited: list[Message] = []
        wanted: list[Message] = []
        blank = torch.empty(0)
        for is_send, direction, stage, microbatch in self._communication():
            if is_send:
                routes = sends(stage, direction)
                wanted += [self._message(stage, microbatch, route, blank) for route in routes]
            else:
                pairs = receives(stage, microbatch, direction)
                awaited += [self._message(stage, microbatch, route, buffer) for route, buffer in pairs]
        awaited = [m for m in (*awaited, *further[0]) if live(m.peer)]
        wanted += further[1]
        scratch = [torch.empty_like(m.tensor, requires_grad=False) for m in awaited]
        works = _batch_p2p(
            [dist.P2POp(dist.irecv, t, m.peer, self.group) for t, m in zip(scratch, awaited, strict=True)]
        )
        works += _batch_p2p(
            [
                dist.P2POp(dist.isend, sent(m.key, self.device), m.peer, self.group)
                for m in wanted
                if live(m.peer)
            ]
        )
        schedules._wait_batch_p2p(works)  # as it is now: see `waits.py`
        for tensor, message in zip(scratch, awaited, strict=True):
            self._traffic.received(Message(message.key, tensor, message.peer))

    def _communication(self) -> Iterator[tuple[bool, Direction, _PipelineStageBase, int]]:
        """Sends (True) and receives of this worker in one iteration, in the order of the schedule."""
        if isinstance(self._schedule, _PipelineScheduleRuntime):
            by_index = {stage.stage_index: stage for stage in self.stages}
            for action in self._schedule.pipeline_order_with_comms[self._schedule.rank]:
                for part in action.sub_actions or (action,):
                    if part.computation_type in _COMMUNICATION:
                        stage = by_index[part.stage_index]
                        yield *_COMMUNICATION[part.computation_type], stage, part.microbatch_index or 0
            return
        for direction in Direction:
            for microbatch in range(self.microbatches):
                for is_send in (False, True):
                    yield is_send, direction, self.stages[0], microbatch


_COMMUNICATION = {
    _ComputationType.SEND_F: (True, Direction.FORWARD),
    _ComputationType.SEND_B: (True, Direction.BACKWARD),
    _ComputationType.RECV_F: (False, Direction.FORWARD),
    _ComputationType.RECV_B: (False, Direction.BACKWARD),
}


class _Awaited(dict[tuple[int, int], list[dist.Work]]):
    """Receives under way, by stage and microbatch: a runtime schedule takes out those that it waits for."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        works = super().pop(key, *default)
        if works:
            self._on_wait()
        return works
