"""Conformance: what a stage sends back is what is expected of it, on a stage whose backward pass has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from swift_ft.logging import Direction
from swift_ft.torch_adapters.pipelining.p2p_routes import sends
from swift_ft.torch_adapters.pipelining.stage_metadata import prepare_stage
from swift_ft.torch_adapters.versions.gradient_sends import gradient_destinations

FLOAT = {"shape": [2, 3], "stride": [3, 1], "dtype": "float32", "requires_grad": True}
GRADIENT = FLOAT | {"requires_grad": False}


pytestmark = pytest.mark.usefixtures("one_process")


class Sum(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack(inputs).sum(0)


@pytest.mark.parametrize("inputs", [1, 2])
def test_a_gradient_is_sent_for_each_input_that_has_one(inputs: int) -> None:
    stage: Any = PipelineStage(Sum(), 1, 2, torch.device("cpu"))
    stage.stage_index_to_group_rank = {0: 0, 1: 0}
    shapes = {
        "inputs": [FLOAT] * inputs,
        "outputs": [FLOAT],
        "input_grads": [GRADIENT] * inputs,
        "output_grads": None,
    }
    prepare_stage(stage, shapes, microbatches=1, has_backward=True)
    expected = sends(stage, Direction.BACKWARD)
    output = stage.forward_one_chunk(0, (), {})
    stage.backward_one_chunk(0, loss=output.sum())
    operations = stage.get_bwd_send_ops(0)
    assert len(operations) == len(expected) == inputs
    assert all(operation.tensor.equal(torch.ones(2, 3)) for operation in operations)
    assert gradient_destinations(stage, [0, None][:inputs]) == [0]
