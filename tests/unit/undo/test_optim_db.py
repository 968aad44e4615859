"""torch's own database of optimizers: every optimizer, every input, every implementation (§4)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from swift_ft import wrap_optimizer
from swift_ft.testing.undo_rule_conformance import assert_same_bits, picture, set_grads
from swift_ft.torch_core.optimizers import parameters_of
from tests.support.optimizers import BOTH_WAYS, assert_close

pytestmark = BOTH_WAYS

STEPS = 3
SHAPES = ((5, 7), (3, 2), (1, 4))
ALLOWED_ULPS = 4.0
LOOSER = {"RMSprop": 16.0, "Adadelta": 16.0}
"""Momentum 0.1 divides by 0.1; Adadelta takes its update from an average that is itself computed."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ON_EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


def implementations(info: OptimizerInfo, device: str) -> Iterator[dict[str, bool]]:
    yield {}
    if "foreach" in info.supported_impls:
        yield {"foreach": True}
    if device in info.supports_fused_on:
        yield {"fused": True}
    if "differentiable" in info.supported_impls:
        yield {"differentiable": True}


def is_sound(info: OptimizerInfo, kwargs: dict[str, Any], dtype: torch.dtype, device: str) -> bool:
    """Torch 2.13's fused SGD on a CPU reads uninitialized memory: see test_edges.py."""
    fused_sgd = info.name == "SGD" and kwargs.get("fused")
    return not (fused_sgd and device == "cpu" and dtype is not torch.float32)


def inputs(info: OptimizerInfo, device: str) -> Iterator[dict[str, Any]]:
    """On a GPU, torch adds inputs with ``capturable``."""
    for given in info.optim_inputs_func(device=device):
        for implementation in implementations(info, device):
            refused = isinstance(given.kwargs.get("lr"), Tensor) and not given.kwargs.get("capturable")
            if refused and implementation.get("foreach") and info.name != "Muon":
                continue  # torch refuses the two together, without capturable
            yield copy.deepcopy(given.kwargs) | implementation


def make(info: OptimizerInfo, kwargs: dict[str, Any], dtype: torch.dtype, device: str) -> Optimizer:
    source = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=source).to(device, dtype) for shape in SHAPES]
    params = [value.requires_grad_() for value in values]
    if kwargs.get("differentiable"):
        params = [param.clone() for param in params]
        for param in params:
            param.retain_grad()
    groups: Any = [{"params": params[:2]}, {"params": params[2:]}]
    kind: Any = info.optim_cls
    made: Optimizer = kind(groups if info.supports_param_groups else params, **copy.deepcopy(kwargs))
    return made


def gradients(info: OptimizerInfo, params: list[Tensor], seed: int) -> None:
    set_grads(params, seed)
    if info.only_supports_sparse_grads:
        for param in params:
            assert param.grad is not None
            rows = torch.tensor([[0, param.shape[0] - 1][: param.shape[0]]], device=param.device)
            param.grad = torch.sparse_coo_tensor(
                rows, param.grad[: rows.shape[1]], param.shape, check_invariants=True
            )


def closure_of(info: OptimizerInfo, optimizer: Optimizer) -> Callable[[], Any] | None:
    if not info.step_requires_closure:
        return None

    def closure() -> Any:
        optimizer.zero_grad()
        loss = torch.stack([((param.float() - 0.1) ** 2).sum() for param in parameters_of(optimizer)]).sum()
        loss.backward()
        return loss

    return closure


def step(info: OptimizerInfo, optimizer: Optimizer, seed: int) -> None:
    gradients(info, parameters_of(optimizer), seed)
    closure = closure_of(info, optimizer)
    optimizer.step(closure) if closure else optimizer.step()


ALL = [pytest.param(info, id=info.name) for info in optim_db]
WITHOUT_CLOSURE = [pytest.param(info, id=info.name) for info in optim_db if not info.step_requires_closure]
"""All but LBFGS, whose closure makes the gradients and whose parameters share one state."""


@pytest.mark.parametrize("exact", [False, True], ids=["bounded", "exact"])
@pytest.mark.parametrize("info", ALL)
@ON_EACH_DEVICE
def test_step_undo_step(device: str, info: OptimizerInfo, exact: bool) -> None:
    """Step, undo, compare; step again, compare with an optimizer that was never wrapped."""
    checked = 0
    for kwargs in inputs(info, device):
        dtypes = (torch.float32,) if info.only_supports_sparse_grads else DTYPES
        for dtype in dtypes if info.name != "LBFGS" else DTYPES[:1]:
            if not is_sound(info, kwargs, dtype, device):
                continue
            checked += 1
            straight = make(info, kwargs, dtype, device)
            undone = wrap_optimizer(make(info, kwargs, dtype, device), exact=exact)
            for seed in range(STEPS):
                before = picture(undone)
                step(info, undone, seed)
                after = picture(undone)
                step(info, straight, seed)
                if exact or seed == 0:
                    assert_same_bits(after, picture(straight))
                assert undone.undo() == len(SHAPES)
                if exact or info.name == "LBFGS":
                    assert_same_bits(picture(undone), before)
                else:
                    assert_close(picture(undone), before, after, LOOSER.get(info.name, ALLOWED_ULPS))
                step(info, undone, seed)
                if exact:
                    assert_same_bits(picture(undone), picture(straight))
    assert checked >= 4


@pytest.mark.parametrize("info", WITHOUT_CLOSURE)
@ON_EACH_DEVICE
def test_a_gradient_is_left_as_the_step_found_it(device: str, info: OptimizerInfo) -> None:
    """Some kernels write into gradients; the step that follows an undo must see the first ones."""
    for kwargs in inputs(info, device):
        for exact in (False, True):
            optimizer = wrap_optimizer(make(info, kwargs, torch.float32, device), exact=exact)
            for seed in range(2):
                gradients(info, parameters_of(optimizer), seed)
                grads = [param.grad for param in parameters_of(optimizer)]
                before = {
                    f"{i}.grad": grad.detach().clone() for i, grad in enumerate(grads) if grad is not None
                }
                optimizer.step()
                optimizer.undo()
                now = {
                    f"{i}.grad": p.grad for i, p in enumerate(parameters_of(optimizer)) if p.grad is not None
                }
                if exact:
                    assert_same_bits(now, before)
                else:
                    found, expected = ({k: v.to_dense() for k, v in x.items()} for x in (now, before))
                    assert_close(found, expected, expected, 4.0)
                assert all(p.grad is g for p, g in zip(parameters_of(optimizer), grads, strict=True))
                optimizer.step()


@pytest.mark.parametrize("info", WITHOUT_CLOSURE)
@ON_EACH_DEVICE
def test_single_parameters_make_a_whole_step(device: str, info: OptimizerInfo) -> None:
    """Wait-free (§6): parameter by parameter, backwards, gives the bits of one whole step."""
    for kwargs in inputs(info, device):
        whole = make(info, kwargs, torch.float32, device)
        single = wrap_optimizer(make(info, kwargs, torch.float32, device), wait_free=True)
        for seed in range(STEPS):
            step(info, whole, seed)
            gradients(info, parameters_of(single), seed)
            for param in parameters_of(single)[:0:-1]:
                assert single.update([param]) == 1
            assert len(single.updated) == len(SHAPES) - 1
            single.step()
            assert len(single.updated) == len(SHAPES)
            assert_same_bits(picture(single), picture(whole))
