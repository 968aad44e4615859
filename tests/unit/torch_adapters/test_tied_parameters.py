"""Which messages carry the gradients of tied parameters, and under which keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from swift_ft.errors import UsageError
from swift_ft.torch_adapters.pipelining.interceptor import Message
from swift_ft.torch_adapters.pipelining.tied_parameters import TiedParameters

STAGES = 4
ITERATION = 7


class Served:
    """Drops what is sent, and fills what is received with ones."""

    iteration = ITERATION

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def on_send(self, message: Message) -> bool:
        self.sent.append(message)
        return False

    def on_recv(self, message: Message) -> bool:
        message.tensor.fill_(1)
        return False

    def on_received(self, message: Message) -> None: ...


def tied_on(stage: int) -> tuple[TiedParameters, Served]:
    """The ties of a worker with one stage of four."""
    hook = SimpleNamespace(
        stage_indices=(stage,),
        num_stages=STAGES,
        group=None,
        holders=lambda: dict(enumerate(range(STAGES))),
    )
    interceptor = Served()
    tied = TiedParameters(cast(Any, hook), cast(Any, interceptor))
    tied.begin(ITERATION)
    return tied, interceptor


def parameter(gradient: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(()))
    made.grad = torch.tensor(gradient)
    return made


def test_both_ends_number_their_ties_alike() -> None:
    """Stage 1 has no part in the first one. Its only tie is the second one of the stages 0 and 3."""
    keys = {}
    for stage in range(STAGES):
        tied, interceptor = tied_on(stage)
        if stage in (0, 3):
            tied.tie(parameter(1.0), (0, 3))
        tied.tie(parameter(1.0), range(STAGES))
        tied.sum_gradients()
        keys[stage] = {m.key for m in interceptor.sent}, {m.key for m in tied.exchange(ITERATION)[0]}
    for stage, (_, received) in keys.items():
        assert received == {
            key for sent, _ in keys.values() for key in sent if key.destination_stage == stage
        }
    assert all(key.microbatch == -1 for sent, _ in keys.values() for key in sent)


def test_some_are_summed_before_others() -> None:
    tied, interceptor = tied_on(0)
    weight, carrier = parameter(2.0), parameter(0.0)
    tied.tie(carrier, range(STAGES))
    tied.tie(weight, (0, 3))
    tied.sum_gradients([])
    assert not interceptor.sent
    tied.sum_gradients([weight])
    assert weight.grad == 3.0
    assert carrier.grad == 0.0
    carrier.grad = weight.grad**2
    tied.sum_gradients([carrier])
    assert carrier.grad == 9.0 + 3
    assert [m.key for m in tied.exchange(ITERATION)[1]] == [m.key for m in interceptor.sent]  # in this order
    tied.begin(ITERATION + 1)
    assert len(tied.exchange(ITERATION)[1]) == 4  # for neighbours that were interrupted
    tied.begin(ITERATION + 2)
    assert tied.exchange(ITERATION) == ([], [])


def test_a_view_is_sent_as_a_copy() -> None:
    """Views share a version, so clipping another parameter's gradient looked like a change of this one."""
    tied, interceptor = tied_on(0)
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    weight.grad, other.grad = torch.ones(4).split(2)
    tied.tie(weight, (0, 3))
    tied.sum_gradients()
    (message,) = interceptor.sent
    version = message.tensor._version
    other.grad.mul_(0.5)
    assert message.tensor._version == version
    assert message.tensor.tolist() == [1, 1]


def test_each_is_summed_once() -> None:
    tied, _ = tied_on(0)
    weight = parameter(2.0)
    tied.tie(weight, (0, 3))
    with pytest.raises(UsageError, match="not tied"):
        tied.sum_gradients([parameter(1.0)])
    tied.sum_gradients([weight])
    with pytest.raises(UsageError, match="twice in a step"):
        tied.sum_gradients()
    assert weight.grad == 3.0
    tied.begin(ITERATION)  # the step is repeated
    tied.sum_gradients()
    assert weight.grad == 4.0
