"""Conformance: shapes of messages are read from stages, and stages are prepared from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from swift_ft.torch_adapters.versions.first_messages import connect_to_others_only
from swift_ft.torch_adapters.versions.stage_shapes import described, fresh, prepare

MICROBATCHES = 2
X = {"shape": [2, 3], "stride": [3, 1], "dtype": "float32"}


pytestmark = pytest.mark.usefixtures("one_process")


def trained() -> list[Any]:
    """Two stages on this worker, after a step in which torch has exchanged their shapes."""
    stages = [PipelineStage(nn.Linear(3, 3), index, 2, torch.device("cpu")) for index in range(2)]
    for stage in stages:
        connect_to_others_only(stage)
    schedule = ScheduleInterleaved1F1B([*stages], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    schedule.step(torch.ones(4, 3), target=torch.zeros(4, 3))
    return stages


def test_a_trained_stage_is_described() -> None:
    first, second = (described(stage) for stage in trained())
    assert first is not None
    assert second is not None
    assert first["inputs"] == [X | {"requires_grad": False}]
    assert first["outputs"] == second["inputs"] == [X | {"requires_grad": True}]
    gradient = [X | {"requires_grad": False}]
    assert first["output_grads"] == second["input_grads"] == gradient
    assert second["output_grads"] is None


def test_a_prepared_stage_is_described_in_the_same_words() -> None:
    shapes = described(trained()[1])
    assert shapes is not None
    stage: Any = PipelineStage(nn.Linear(3, 3), 1, 2, torch.device("cpu"))
    for microbatches in (MICROBATCHES, 3 * MICROBATCHES):  # a stage may be prepared again
        stage.has_backward = True
        prepare(stage, shapes, microbatches=microbatches, has_backward=True)
        assert len(stage.args_recv_info) >= microbatches
        assert [info.buffer.shape for info in stage.args_recv_info[microbatches - 1]] == [torch.Size([2, 3])]


def test_a_stage_that_was_prepared_can_learn_other_shapes() -> None:
    """As if it had never been prepared: torch exchanges them anew, live."""
    shapes = described(trained()[0])
    assert shapes is not None
    stage: Any = PipelineStage(nn.Linear(3, 3), 0, 1, torch.device("cpu"))
    put_back = fresh(stage)
    stage.has_backward = True
    prepare(stage, shapes, microbatches=MICROBATCHES, has_backward=True)
    put_back()
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    schedule.step(torch.ones(10, 3), target=torch.zeros(10, 3))
    found = described(stage)
    assert found is not None
    assert found["inputs"] == [X | {"shape": [5, 3], "requires_grad": False}]
