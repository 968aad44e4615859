"""The check of DDP models when they are attached: one that would not survive a loss is refused.

Private parts used (tested on torch 2.11 to 2.14):

- ``_comm_hooks`` of a DDP model: it has a communication hook.
- ``_st_info`` of a parameter: DDP has made it of a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.fsdp import is_sharded
from swift_ft.torch_adapters.wrappers import wrapped_ddp


def accepted_ddp(model: Any) -> DistributedDataParallel:
    """The model itself, or the one that another library has wrapped.

    Raises:
        UnsupportedError: for a model that is not DDP's, or one that a hook cannot average for.
    """
    inside = _ddp_in(model)
    _check(inside)
    return inside


def _ddp_in(model: Any) -> DistributedDataParallel:
    if isinstance(model, torch.nn.Module) and is_sharded(model):
        raise UnsupportedError("The model is sharded by fully_shard: call session.attach_fsdp(model).")
    inside = wrapped_ddp(model) if isinstance(model, torch.nn.Module) else None
    if inside is None:
        raise UnsupportedError(
            f"attach_ddp() takes a torch.nn.parallel.DistributedDataParallel, not a {type(model)}."
        )
    return inside


def _check(model: DistributedDataParallel) -> None:
    if model._comm_hooks:
        raise UnsupportedError(
            "The model already has a communication hook, and swift_ft needs its own: do not register one."
        )
    if model.static_graph:
        raise UnsupportedError(
            "DDP's static_graph=True does not survive that DDP's reducer is made anew, at the start and "
            "after a loss: omit it."
        )
    whole = dist.get_process_group_ranks(model.process_group)
    for layer in synchronised_norms(model):
        if layer.process_group is not None and dist.get_process_group_ranks(layer.process_group) != whole:
            raise UnsupportedError(
                "A SyncBatchNorm has a group of its own, which is not formed again after a loss: leave its "
                "process_group out, or give it that of the DDP model."
            )
    if any(hasattr(parameter, "_st_info") for parameter in model.parameters()):
        raise UnsupportedError(
            "DistributedDataParallel(device_mesh=...) around a module of parallelize_module() takes the "
            "parameters out of the module in the first forward pass, so nothing could save or restore them: "
            'use fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"]) in its place '
            "(docs/how-to/own-trainer.md)."
        )
    if model.mixed_precision is not None:
        raise UnsupportedError(
            "DDP's mixed_precision needs the communication hook for itself: use torch.autocast instead."
        )


def synchronised_norms(model: torch.nn.Module) -> list[Any]:
    """Layers that communicate in forward passes. Stock DDP wants them on GPUs."""
    return [module for module in model.modules() if isinstance(module, torch.nn.SyncBatchNorm)]
