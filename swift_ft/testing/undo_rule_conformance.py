"""Conformance suite for the undo rule of an optimizer.

from swift_ft.testing import UndoRuleConformanceTests

swift_ft.undo.register_rule(Lion, LionRule())

class TestLionRule(UndoRuleConformanceTests):
    ulps = 4

    @pytest.fixture(params=[{}, {"weight_decay": 0.1}])
    def make(self, request):
        return lambda params: Lion(params, lr=0.01, **request.param)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.optim import UndoableOptimizer, wrap_optimizer
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.tensors import same_values
from swift_ft.undo import copies
from swift_ft.undo.registry import rule_for

_SHAPES = ((33,), (7, 5), (1,), (2, 3, 4))
_SCALES = (1.0, 1e-3, 30.0)
"""Of the gradients of three steps."""

Make = Callable[[Sequence[Tensor]], Optimizer]


Picture = dict[str, Any]


class UndoRuleConformanceTests:
    """Inherit from it, and add a fixture ``make``: a function that makes the optimizer of given parameters.

    Parametrize the fixture by the options that change what a step computes.

    Attributes:
        ulps: the error that ``undo()`` may have without ``exact``, in units in the last place of the largest
            value of the tensor before and after the step.
        dtypes: of the parameters.
    """

    ulps: ClassVar[float] = 4.0
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)

    @pytest.fixture(autouse=True)
    def _nothing_is_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Small parameters would be copied with ``exact``, and the rule would have nothing to do."""
        monkeypatch.setattr(copies, "COPIED_BYTES", 0)

    @pytest.fixture
    def make(self) -> Make:
        """Makes the optimizer of given parameters."""
        raise NotImplementedError(
            "UndoRuleConformanceTests needs a fixture `make` in the class that inherits"
        )

    def test_there_is_a_rule(self, make: Make) -> None:
        """Without one all other tests pass, since everything is copied."""
        assert rule_for(type(make(_params(torch.float32)))) is not None

    def test_a_wrapped_step_has_the_bits_of_a_plain_one(self, make: Make) -> None:
        """With and without ``exact``."""
        for dtype in self.dtypes:
            plain = make(_params(dtype))
            wrapped = [wrap_optimizer(make(_params(dtype)), exact=exact) for exact in (False, True)]
            for seed, scale in enumerate(_SCALES):
                for optimizer in (plain, *wrapped):
                    _step(optimizer, seed, scale)
                for optimizer in wrapped:
                    assert_same_bits(picture(optimizer), picture(plain))

    def test_exact_restores_every_bit(self, make: Make) -> None:
        """After the first step, which makes the state, and after later ones; a repeated step has its bits."""
        for dtype in self.dtypes:
            optimizer = wrap_optimizer(make(_params(dtype)), exact=True)
            for seed, scale in enumerate(_SCALES):
                before = picture(optimizer)
                _step(optimizer, seed, scale)
                after = picture(optimizer)
                optimizer.undo()
                assert_same_bits(picture(optimizer), before)
                _step(optimizer, seed, scale)
                assert_same_bits(picture(optimizer), after)

    def test_the_error_is_bounded(self, make: Make) -> None:
        """Without ``exact``, in float32."""
        optimizer = wrap_optimizer(make(_params(torch.float32)))
        for seed, scale in enumerate(_SCALES):
            before = picture(optimizer)
            _step(optimizer, seed, scale)
            after = picture(optimizer)
            optimizer.undo()
            found = picture(optimizer)
            assert found.keys() == before.keys()
            for name, value in before.items():
                error = _ulps(found[name], value, after[name])
                assert error <= self.ulps, f"step {seed}, {name}: {error:g} ulps"
            _step(optimizer, seed, scale)

    def test_parameters_can_be_updated_and_undone_one_by_one(self, make: Make) -> None:
        """As a wait-free update does, and a loss in the middle of it."""
        straight, single = (wrap_optimizer(make(_params(torch.float32)), exact=True) for _ in range(2))
        set_grads(parameters_of(single), 1)
        first, *others = parameters_of(single)
        before = picture(single)
        single.update([first])
        single.undo()
        assert_same_bits(picture(single), before)
        single.update([first])
        single.update(others)
        single.step()
        _step(straight, 0, 1.0)
        assert_same_bits(picture(single), picture(straight))

    def test_a_rate_that_changes_after_the_step(self, make: Make) -> None:
        """A scheduler has stepped before the loss is noticed: the undo uses the rates of the step."""
        optimizer = wrap_optimizer(make(_params(torch.float32)), exact=True)
        _step(optimizer, 0, 1.0)
        before = picture(optimizer)
        _step(optimizer, 1, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
        optimizer.undo()
        assert_same_bits(picture(optimizer), before)

    def test_a_gradient_that_is_not_finite(self, make: Make) -> None:
        """An update that cannot be inverted is restored all the same with ``exact``."""
        optimizer = wrap_optimizer(make(_params(torch.float32)), exact=True)
        _step(optimizer, 0, 1.0)
        before = picture(optimizer)
        set_grads(parameters_of(optimizer), 2)
        grad = parameters_of(optimizer)[0].grad
        assert grad is not None
        grad[0], grad[1] = float("nan"), float("inf")
        optimizer.step()
        optimizer.undo()
        assert_same_bits(picture(optimizer), before)


def _params(dtype: torch.dtype) -> list[Tensor]:
    return [value.requires_grad_() for value in randoms(_SHAPES, dtype, 0)]


def _step(optimizer: Optimizer | UndoableOptimizer, seed: int, scale: float) -> None:
    set_grads(parameters_of(optimizer), 1 + seed, scale)
    optimizer.step()


def _ulps(found: Any, before: Any, after: Any) -> float:
    """The largest error in units in the last place of the largest value."""
    if not (isinstance(before, Tensor) and before.is_floating_point()):
        return 0.0 if bool(torch.as_tensor(found == before).all()) else float("inf")
    if not before.numel():
        return 0.0
    largest = max(float(before.abs().max()), float(after.abs().max()))
    if largest == 0.0:
        return 0.0 if torch.equal(found, before) else float("inf")
    # The distance of two neighbours of this size in the tensor's own dtype.
    exponent = torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent.item()
    last_place = 2.0 ** (exponent - 1) * torch.finfo(before.dtype).eps
    return float((found.double() - before.double()).abs().max()) / last_place


def picture(optimizer: Optimizer) -> Picture:
    """Copies of parameters, state and hyper-parameters, as flat names to values."""
    found: Picture = {}
    for index, param in enumerate(parameters_of(optimizer)):
        found[f"{index}.param"] = param.detach().clone()
        found[f"{index}.has_state"] = param in optimizer.state
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{index}.{key}"] = copy.deepcopy(value.detach() if isinstance(value, Tensor) else value)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"group{index}.{key}"] = copy.deepcopy(value)
    return found


def assert_same_bits(now: Picture, then: Picture) -> None:
    """Two pictures are equal, tensors bit for bit, those in lists too."""
    assert now.keys() == then.keys()
    for name, value in then.items():
        assert same_values(now[name], value), name


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
