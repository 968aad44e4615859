"""torch's dump of a whole schedule: kept out of the log where a connection broke, and only there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.comm_errors import hide_broken_schedules
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.versions.first_messages import connect_to_others_only

LOGGER = logging.getLogger("torch.distributed.pipelining.schedules")


pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What torch logs, in a test that begins without the filter."""
    before, LOGGER.filters = LOGGER.filters, []
    yield caplog
    LOGGER.filters = before


class Stage(nn.Module):
    """A module that calls something first."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call()
        out: torch.Tensor = self.layer(x)
        return out


def _wait_batch_p2p() -> None:
    """Fails as torch's function of this name does. On a single rank torch waits for nobody."""
    raise RuntimeError("gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")


def a_mistake() -> None:
    raise RuntimeError("the model's own error")


def step(call: Callable[[], None]) -> None:
    """One step of a real schedule, in which something raises."""
    shape = torch.ones(2, 4)  # else torch calls the stages before the step, to find it
    cpu = torch.device("cpu")
    stages: list[Any] = [
        PipelineStage(Stage(call), i, 2, cpu, input_args=shape, output_args=shape) for i in range(2)
    ]
    for stage in stages:
        connect_to_others_only(stage)
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError):
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))


def dumps(log: pytest.LogCaptureFixture) -> list[str]:
    """Tables of a whole schedule."""
    messages = [record.getMessage() for record in log.records if record.levelno >= logging.ERROR]
    return [message for message in messages if "0F0" in message and "0F1" in message]


def test_without_the_filter_torch_dumps_the_schedule(log: pytest.LogCaptureFixture) -> None:
    """Else the next test could not fail."""
    step(_wait_batch_p2p)
    assert len(dumps(log)) == 1
    assert "0F0" in dumps(log)[0]


def test_the_filter_keeps_it_out_when_a_connection_breaks(log: pytest.LogCaptureFixture) -> None:
    hide_broken_schedules()
    hide_broken_schedules()  # a second pipeline
    assert len(LOGGER.filters) == 1
    step(_wait_batch_p2p)
    assert [record.getMessage() for record in log.records if record.levelno >= logging.ERROR] == []


def test_the_users_own_error_is_dumped_as_usual(log: pytest.LogCaptureFixture) -> None:
    hide_broken_schedules()
    step(a_mistake)
    assert len(dumps(log)) == 1


def test_an_error_that_may_come_of_an_abort_is_not_dumped(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL: a comparison of what the abort has left fails, say, and the step is repeated."""
    waits = AbortableWaits()
    waits.silent = True
    waits.begun()
    waits.abort()
    monkeypatch.setattr(LastingWork, "waits", waits)
    hide_broken_schedules()
    step(a_mistake)
    assert dumps(log) == []
