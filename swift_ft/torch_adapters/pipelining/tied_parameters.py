"""Parameters that stages share, as first and last stage share the embedding: their gradients are summed.

Each stage sends its gradient to the others in separate messages, which are logged like those of the pipeline:
a replay reads them from the logs, and a stage that is ahead sends them again. All add up in the order of the
stages, so that all get the same bits. In a LayerStack two layers share a parameter, and may move: also to one
worker, which then adds up alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from swift_ft.errors import UsageError
from swift_ft.logging import Direction
from swift_ft.torch_adapters.communication import begin, wait_for
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.interceptor import Message, MessageInterceptor
from swift_ft.torch_adapters.pipelining.p2p_routes import Route

Place = tuple[Callable[[], nn.Parameter], int]
"""Finds the copy of a parameter, if it is on this worker; and its stage."""

_NO_MICROBATCH = -1
"""Stands where a key has the number of a microbatch."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tie:
    """One shared parameter.

    Attributes:
        find: returns the copy of one of this worker's stages.
        here: that stage.
        slots: the other workers' stages, and how many ties with each of them came before.
        find_twin: returns the copy of a later layer that is on this worker, too.
    """

    find: Callable[[], nn.Parameter]
    here: int
    slots: Mapping[int, int]
    find_twin: Callable[[], nn.Parameter] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        return self.find()


class TiedParameters:
    """The parameters that a worker's stages share with others.

    Args:
        interceptor: decides about each message.
    """

    def __init__(self, hook: PipelineHook, interceptor: MessageInterceptor) -> None:
        self._hook = hook
        self._interceptor = interceptor
        self._ties: list[_Tie] = []
        self._summed: dict[int, list[_Tie]] = {}  # by iteration, the last two: what this worker has exchanged

    @property
    def stages(self) -> tuple[int, ...]:
        """All stages of other workers with which one of this worker's shares a parameter."""
        return tuple(sorted({stage for tie in self._ties for stage in tie.slots}))

    def tie(self, parameter: nn.Parameter, stages: Sequence[int]) -> None:
        """Declare that stages share a parameter. Each of them makes these calls in the same order.

        Raises:
            UsageError: this worker does not hold exactly one of the stages, or they are not stages.
        """
        hook = self._hook
        here = sorted(set(stages) & {*hook.stage_indices})
        if len(here) != 1 or len(set(stages)) < 2 or not set(stages) <= set(range(hook.num_stages)):
            raise UsageError(
                f"tie() was given stages {list(stages)}: it takes two or more of 0 to "
                f"{hook.num_stages - 1}, and exactly one of this worker's, {list(hook.stage_indices)}, which "
                "share the parameter itself."
            )
        self._add(lambda: parameter, here[0], sorted(set(stages) - set(here)))

    def tie_layers(self, pairs: Iterable[tuple[Place, Place]]) -> None:
        """Declare again which layers share a parameter, all at once: some of them may have moved.

        Args:
            pairs: the two places of each parameter, the earlier layer first.
        """
        own = {*self._hook.stage_indices}
        self._ties.clear()
        for (first, stage), (second, later) in pairs:
            if stage in own and later in own:
                self._ties.append(_Tie(first, stage, {}, second))
            elif stage in own:
                self._add(first, stage, [later])
            elif later in own:
                self._add(second, later, [stage])

    def _add(self, find: Callable[[], nn.Parameter], here: int, others: Sequence[int]) -> None:
        before = Counter(other for tie in self._ties if tie.here == here for other in tie.slots)
        self._ties.append(_Tie(find, here, {other: before[other] for other in others}))

    def begin(self, iteration: int) -> None:
        """A step begins: nothing is summed yet."""
        self._summed = {number: ties for number, ties in self._summed.items() if number == iteration - 1}

    def sum_gradients(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Give tied parameters the sum of all stages' gradients.

        Args:
            parameters: these; all by default.

        Raises:
            UsageError: a parameter is not tied, or was summed in this step before.
            RuntimeError: as torch does, if one of the workers is gone.
        """
        ties = self._ties if parameters is None else [self._tie_of(parameter) for parameter in parameters]
        summed = self._summed.setdefault(self._interceptor.iteration, [])
        if any(tie in summed for tie in ties):
            raise UsageError(
                "sum_tied_gradients() was called twice in a step for the same parameter. Without arguments "
                "it sums all: name the parameters in each call.",
                alike=True,
            )
        summed += ties
        self._exchange(ties)

    def _tie_of(self, parameter: nn.Parameter) -> _Tie:
        for tie in self._ties:
            if parameter is tie.parameter or (tie.find_twin is not None and parameter is tie.find_twin()):
                return tie
        raise UsageError("sum_tied_gradients() was given a parameter that was not tied: call tie() first.")

    def _exchange(self, ties: Sequence[_Tie]) -> None:
        operations: list[dist.P2POp] = []
        awaited: list[Message] = []
        group = self._hook.group
        for tie in ties:
            own = tie.parameter.grad
            if own is None:
                own = tie.parameter.grad = torch.zeros_like(tie.parameter)
            if own.untyped_storage().nbytes() != own.nbytes:
                # A view, as helpers leave gradients. The log would take a change of another view, by clipping
                # for example, for a change of this one.
                own = own.clone()
            for message in self._outgoing(own, tie):
                if self._interceptor.on_send(message):
                    operations.append(dist.P2POp(dist.isend, message.tensor, message.peer, group))
            for message in self._incoming(tie):
                if self._interceptor.on_recv(message):
                    operations.append(dist.P2POp(dist.irecv, message.tensor, message.peer, group))
                awaited.append(message)
        if operations:
            works = begin(operations)
            self._interceptor.on_wait()
            wait_for(works)
        for message in awaited:
            self._interceptor.on_received(message)
        for tie in ties:
            self._add_up(tie, awaited)

    def _add_up(self, tie: _Tie, received: Sequence[Message]) -> None:
        assert tie.parameter.grad is not None
        if tie.find_twin is not None:
            twin = tie.find_twin()
            tie.parameter.grad = tie.parameter.grad + (0 if twin.grad is None else twin.grad)
            twin.grad = tie.parameter.grad.clone()
            return
        parts = {tie.here: tie.parameter.grad}
        for message in received:
            if tie.slots.get(other := message.key.source_stage) == message.key.slot:
                parts[other] = message.tensor
        first, *rest = (parts[stage] for stage in sorted(parts))
        total = first
        for part in rest:
            total = total + part  # a new tensor: what was sent is logged by reference
        tie.parameter.grad = total

    def exchange(self, iteration: int) -> tuple[list[Message], list[Message]]:
        """The messages that this worker received, and those it sent, in one of the last two iterations.

        The received ones have buffers, the sent ones no values.
        """
        ties = self._summed.get(iteration, [])
        incoming = [message for tie in ties for message in self._incoming(tie)]
        blank = torch.empty(0)
        return incoming, [message for tie in ties for message in self._outgoing(blank, tie)]

    def _incoming(self, tie: _Tie) -> list[Message]:
        """Messages of one tie, with buffers."""
        return [
            self._message(stage, tie.here, stage, slot, torch.empty_like(tie.parameter).detach())
            for stage, slot in tie.slots.items()
        ]

    def _outgoing(self, tensor: torch.Tensor, tie: _Tie) -> list[Message]:
        """Messages of one tie."""
        return [self._message(tie.here, stage, stage, slot, tensor) for stage, slot in tie.slots.items()]

    def _message(self, source: int, to: int, other: int, slot: int, tensor: torch.Tensor) -> Message:
        route = Route(Direction.FORWARD if source < to else Direction.BACKWARD, source, to, slot)
        key = route.key(self._interceptor.iteration, _NO_MICROBATCH)
        return Message(key, tensor, self._hook.holders()[other])
