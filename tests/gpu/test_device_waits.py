"""The host waits for a real device before an update, where an abort would be silent."""

from __future__ import annotations

import pytest
import torch

from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.device_waits import DeviceWaits

CYCLES = 1_000_000_000
"""Half a second of a GPU."""


@pytest.mark.parametrize("streams", ["the current one", "one behind another"])
def test_the_host_waits_for_the_stream(streams: str) -> None:
    waits = AbortableWaits()
    waits.silent = True
    on_device = DeviceWaits(waits, lambda: [torch.device("cuda", torch.cuda.current_device())])
    on_device.begin()
    side = torch.cuda.Stream()
    if streams == "the current one":
        torch.cuda._sleep(CYCLES)
    else:
        with torch.cuda.stream(side):  # as FSDP's communication does
            torch.cuda._sleep(CYCLES)
        torch.cuda.current_stream().wait_stream(side)
    end = torch.cuda.current_stream().record_event()
    assert not end.query()
    on_device.finish()
    assert end.query()
    assert not waits.unawaited


def test_over_gloo_the_host_goes_on() -> None:
    on_device = DeviceWaits(AbortableWaits(), lambda: [torch.device("cuda", 0)])
    on_device.begin()
    torch.cuda._sleep(CYCLES)
    end = torch.cuda.current_stream().record_event()
    on_device.finish()
    assert not end.query()
    torch.cuda.synchronize()
