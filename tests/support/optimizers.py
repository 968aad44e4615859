"""Shared by the tests of the undo: pictures of an optimizer, and comparisons in ulps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
    """Two pictures are equal, tensors bit for bit."""
    assert now.keys() == then.keys()
    for name, value in then.items():
        if isinstance(value, Tensor):
            assert now[name].dtype == value.dtype, name
            assert torch.equal(bits(now[name]), bits(value)), name
        elif not isinstance(value, list):
            assert now[name] == value, name


def ulps(now: Tensor, then: Tensor, *others: Tensor) -> float:
    """The largest error, in units in the last place of the largest of the values concerned."""
    if not then.numel() or not (then.is_floating_point() or then.is_complex()):
        return 0.0 if torch.equal(now, then) else float("inf")
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in (now, then, *others)]
    limits = torch.finfo(tensors[1].dtype)
    values = [tensor.double() for tensor in tensors]
    size = torch.stack([value.abs() for value in values]).amax(0).clamp_min(limits.smallest_normal)
    return float(((values[0] - values[1]).abs() / (size * limits.eps)).max())


def assert_close(
    now: Picture, then: Picture, after: Picture, allowed: float, added: Mapping[str, Tensor] | None = None
) -> None:
    """Checks that an undo restored all tensors within ``allowed`` ulps, and all counters exactly.

    An ulp is that of the largest value before or after the step, or of what the step added up, if that is
    given by name: its parts may nearly cancel out.
    """
    assert now.keys() == then.keys()
    for name, value in then.items():
        if not isinstance(value, Tensor):
            assert now[name] == value, name
        elif value.numel() == 1 and name.split(".")[1] in ("step", "eta", "mu", "mu_product", "lr"):
            assert torch.equal(now[name], value), name
        else:
            error = ulps(now[name], value, after[name], *(t for n, t in (added or {}).items() if n == name))
            assert error <= allowed, f"{name}: {error:.1f} ulps"


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
