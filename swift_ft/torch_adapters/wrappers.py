"""Wrappers of other libraries around models and optimizers: Lightning Fabric, accelerate, torch.compile.

A state is saved, sent and put back below these, where torch's own functions know every name.

Private parts used (tested on torch 2.11 to 2.14):

- ``Optimizer._optimizer_step_post_hooks``: only an optimizer whose constructor was called has them.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel


def is_torchs_wrapper(module: nn.Module) -> bool:
    """Whether a module is one of torch that communicates for the module in it, such as DDP.

    What ``fully_shard`` was applied to is none: it is the script's module, with a class of torch's making.
    """
    of_torch = type(module).__module__.startswith(("torch.nn.parallel", "torch.distributed"))
    return of_torch and not any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def unwrapped_model(module: nn.Module) -> nn.Module:
    """The DDP model that is all of a wrapper; a module that wraps none is returned as it is.

    So is torch's ``AveragedModel``, which counts in a buffer of its own.
    """
    inside = wrapped_ddp(module)
    return module if inside is None or isinstance(module, AveragedModel) else inside


def wrapped_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """The one DDP model in a module that has all of its parameters; None without such a one."""
    inside = [inner for inner in module.modules() if isinstance(inner, DistributedDataParallel)]
    return inside[0] if len(inside) == 1 and {*module.parameters()} == {*inside[0].parameters()} else None


def unwrapped_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer below a wrapper that has nothing of its own, as accelerate's; else the optimizer itself.

    Such a wrapper inherits from torch's class and never calls its constructor, so it cannot hold hooks.
    """
    inner = getattr(optimizer, "optimizer", None)
    is_shell = (
        isinstance(inner, Optimizer)
        and not hasattr(optimizer, "_optimizer_step_post_hooks")
        and optimizer.state is inner.state
        and optimizer.param_groups is inner.param_groups
    )
    return unwrapped_optimizer(inner) if is_shell and isinstance(inner, Optimizer) else optimizer
