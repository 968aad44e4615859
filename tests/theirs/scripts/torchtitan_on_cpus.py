"""Runs a module of torchtitan's, or ours around it, on CPUs: ``torchtitan_on_cpus.py MODULE ARGUMENTS``.

torchtitan trains on accelerators only. What it asks of one stands in for it here, and nothing else.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules


def stand_in() -> None:
    """Give torch's CPU what torchtitan asks of an accelerator. Call it before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    stand_ins: dict[str, Any] = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "memory_stats": lambda *_: {},
    }
    for name, function in stand_ins.items():
        setattr(torch.cpu, name, function)
    if not hasattr(torch.distributed, "set_timeout"):  # from torch 2.14 on
        vars(torch.distributed)["set_timeout"] = lambda *_: None
    _take_microbatches(schedules.PipelineScheduleSingle)
    divide = FSDPModule.set_gradient_divide_factor

    def divide_sums(model: FSDPModule, factor: float) -> None:
        divide(model, factor)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction

    FSDPModule.set_gradient_divide_factor = divide_sums  # type: ignore[assignment]
    sys.modules["triton"] = sys.modules["triton.language"] = mock.MagicMock()  # its kernels are not called
    importlib.import_module("torchtitan.distributed.minimal_async_ep.kernels")
    del sys.modules["triton"], sys.modules["triton.language"]


def _take_microbatches(schedule: type[Any]) -> None:
    """Let a schedule's ``step`` take microbatches, as from torch 2.14 on: whole batches before."""
    whole = schedule.step
    if "arg_mbs" in inspect.signature(whole).parameters:
        return

    def step(
        self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, target: Any = None, **rest: Any
    ) -> Any:
        args = [torch.cat(parts) for parts in zip(*(arg_mbs or []), strict=True)]
        kwargs = {name: torch.cat([each[name] for each in kwarg_mbs]) for name in kwarg_mbs[0]}
        target = torch.cat(target_mbs) if target_mbs is not None else None
        return whole(self, *args, target=target, **kwargs, **rest)

    schedule.step = step


def main() -> None:
    """Run the module as ``python -m`` does."""
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


stand_in()  # torchtitan asks when it is imported

if __name__ == "__main__":
    main()
