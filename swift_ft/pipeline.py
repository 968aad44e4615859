"""The hook on torch's pipeline stages: the one module that knows torch's private seams (tested on 2.13).

Under every schedule, a stage is asked for the operations of each microbatch (``get_fwd_send_ops`` and three
more). Wrapping those four on the stage instance shows each message with its key and leaves communication as
it was; in a replay, receives are served and sends are dropped. The process group is not wrapped: torch takes
its coalesced NCCL path only for the plain class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _batch_p2p,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase

from swift_ft.errors import UnsupportedError
from swift_ft.logging import Direction, MessageKey
from swift_ft.shapes import shapes_of, stage_meta
from swift_ft.traffic import Message, Traffic

__all__ = ["PipelineHook"]


class PipelineHook:
    """Attaches to a schedule and its stages.

    Args:
        schedule: any schedule of ``torch.distributed.pipelining``.
        traffic: is asked about each message.
        on_metadata: called once, before the first message, with the JSON-ready shapes of each stage's
            messages by stage index; a replayed stage starts from them (:meth:`adopt_metadata`).

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
        self._on_metadata = on_metadata
        self._wrap_initialisation()
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
    def initialised(self) -> bool:
        """Whether the one-time exchange of shapes is done."""
        single = isinstance(self._schedule, PipelineScheduleSingle)
        return bool(getattr(self._schedule, self._flag("forward", single)))

    def holders(self) -> dict[int, int]:
        """The rank of every stage in the pipeline."""
        places = self.stages[0].stage_index_to_group_rank
        return {stage: self._ranks[place] for stage, place in places.items()}

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
            pairs = zip(original(microbatch), self._receives(stage, microbatch, direction), strict=True)
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
            pairs = zip(original(microbatch), self._sends(stage, direction), strict=True)
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
        for route, buffer in self._receives(stage, microbatch, direction):
            if route.source not in self.stage_indices:  # else handed over in memory: no message
                self._traffic.received(self._message(stage, microbatch, route, buffer))

    # ------------------------------------------------------------------------------- keys of messages

    def _message(
        self, stage: _PipelineStageBase, microbatch: int, route: _Route, tensor: torch.Tensor
    ) -> Message:
        key = MessageKey(
            self._traffic.iteration, microbatch, route.direction, route.source, route.destination, route.slot
        )
        other = route.destination if route.source == stage.stage_index else route.source
        return Message(key, tensor, self._ranks[stage.stage_index_to_group_rank[other]])

    def _receives(
        self, stage: _PipelineStageBase, microbatch: int, direction: Direction
    ) -> list[tuple[_Route, torch.Tensor]]:
        """What a stage receives for a microbatch, with the buffers, in the order of torch's operations."""
        if direction == Direction.BACKWARD and (not stage.has_backward or stage.is_last):
            return []
        infos = stage.args_recv_info if direction == Direction.FORWARD else stage.grad_recv_info
        return [
            (_Route(direction, info.source, stage.stage_index, slot), info.buffer)
            for slot, info in enumerate(infos[microbatch])
            if not info.is_root_arg and info.buffer is not None and info.source is not None
        ]

    def _sends(self, stage: _PipelineStageBase, direction: Direction) -> list[_Route]:
        """What a stage sends for each microbatch, in the order of torch's operations."""
        here = stage.stage_index
        if direction == Direction.FORWARD:
            return [
                _Route(direction, here, destination, slot)
                for slot, destinations in stage.act_send_info.items()
                for destination in destinations
                if destination is not None
            ]
        if not stage.has_backward or stage.is_first:
            return []
        if stage.grad_send_info is None:  # torch makes it when it first sends
            stage.grad_send_info = stage._create_grad_send_info(stage.args_recv_info[0])
        return [
            _Route(direction, here, destination, slot)
            for slot, destination in enumerate(stage.grad_send_info)
            if destination is not None and stage._get_grad_send_meta(slot) is not None
        ]

    # -------------------------------------------------------------------- shapes, exchanged only once

    @staticmethod
    def _flag(direction: str, single: bool) -> str:
        return f"_stage{'' if single else 's'}_{direction}_initialized"

    def _wrap_initialisation(self) -> None:
        single = isinstance(self._schedule, PipelineScheduleSingle)
        name = "_initialize_stage" if single else "_initialize_stages"
        original = getattr(self._schedule, name)

        def wrapped(*args: Any, **kwargs: Any) -> None:
            known = self.initialised
            original(*args, **kwargs)
            if not known and (metadata := shapes_of(self.stages)) is not None:
                self._on_metadata(metadata)

        setattr(self._schedule, name, wrapped)

    def adopt_metadata(self, metadata: dict[int, dict[str, Any]]) -> None:
        """Start from known shapes, without talking to anybody."""
        schedule: Any = self._schedule
        single = isinstance(schedule, PipelineScheduleSingle)
        for stage in self.stages:
            assert isinstance(stage, PipelineStage)
            stage.has_backward = schedule._has_backward
            stage._user_meta = stage_meta(metadata[stage.stage_index])
            stage._inference_mode = InferenceMode.STATIC
            stage._prepare_forward_infra(self.microbatches, None, None, has_backward=schedule._has_backward)
        setattr(schedule, self._flag("forward", single), True)
        if schedule._has_backward:
            for stage in self.stages:
                stage._prepare_backward_infra(self.microbatches)
            setattr(schedule, self._flag("backward", single), True)

    def forget_metadata(self) -> None:
        """Let the next step exchange shapes again, live."""
        single = isinstance(self._schedule, PipelineScheduleSingle)
        for direction in ("forward", "backward"):
            setattr(self._schedule, self._flag(direction, single), False)

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
        self, sent: Callable[[MessageKey, torch.device], torch.Tensor], live: Callable[[int], bool]
    ) -> None:
        """Take part in an iteration that this worker has completed before, without computing anything.

        What the others send is received and handed to ``traffic.received``; what they need is sent again.

        Args:
            sent: the tensor that was sent under a key, on a device.
            live: whether a rank computes this iteration.
        """
        receives: list[Message] = []
        sends: list[Message] = []
        blank = torch.empty(0)
        for is_send, direction, stage, microbatch in self._communication():
            if is_send:
                routes = self._sends(stage, direction)
                sends += [self._message(stage, microbatch, route, blank) for route in routes]
            else:
                pairs = self._receives(stage, microbatch, direction)
                receives += [self._message(stage, microbatch, route, buffer) for route, buffer in pairs]
        receives = [m for m in receives if live(m.peer)]
        scratch = [torch.empty_like(m.tensor, requires_grad=False) for m in receives]
        works = _batch_p2p(
            [dist.P2POp(dist.irecv, t, m.peer, self.group) for t, m in zip(scratch, receives, strict=True)]
        )
        works += _batch_p2p(
            [
                dist.P2POp(dist.isend, sent(m.key, self.device), m.peer, self.group)
                for m in sends
                if live(m.peer)
            ]
        )
        schedules._wait_batch_p2p(works)  # as it is now: see `waits.py`
        for tensor, message in zip(scratch, receives, strict=True):
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


@dataclass(frozen=True, slots=True)
class _Route:
    direction: Direction
    source: int
    destination: int
    slot: int


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
