"""Pictures of an optimizer (parameters, state, rates), compared bit for bit, and gradients to step with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Picture = dict[str, Any]


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of their groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def picture(optimizer: Optimizer) -> Picture:
    """Copies of parameters, state and hyper-parameters, as flat names to values."""
    found: Picture = {}
    for index, param in enumerate(params_of(optimizer)):
        found[f"{index}.param"] = param.detach().clone()
        found[f"{index}.has_state"] = param in optimizer.state
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{index}.{key}"] = copy.deepcopy(value.detach() if isinstance(value, Tensor) else value)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"group{index}.{key}"] = copy.deepcopy(value)
    return found


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a dense or sparse, real or complex tensor."""
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def assert_same_bits(now: Picture, then: Picture) -> None:
    """Two pictures are equal, tensors bit for bit, those in lists too."""
    assert now.keys() == then.keys()
    for name, value in then.items():
        assert _are_same(now[name], value), name


def _are_same(now: Any, then: Any) -> bool:
    if isinstance(then, Tensor):
        return bool(now.dtype == then.dtype) and torch.equal(bits(now), bits(then))
    if isinstance(then, list):
        return len(now) == len(then) and all(map(_are_same, now, then))
    return bool(now == then)


def randoms(shapes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Normally distributed tensors that depend on the seed alone."""
    source = torch.Generator().manual_seed(seed)
    real = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return [torch.randn(tuple(shape), generator=source, dtype=real).to(dtype) for shape in shapes]


def set_grads(params: Sequence[Tensor], seed: int, scale: float = 1.0) -> None:
    """New gradients; the tensors are new too, as after ``set_to_none``."""
    grads = randoms([param.shape for param in params], params[0].dtype, seed)
    for param, grad in zip(params, grads, strict=True):
        param.grad = (grad * scale).to(param.device)
