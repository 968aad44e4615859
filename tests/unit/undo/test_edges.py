"""Numbers and tensors at the edges: lost factors, NaN, sparse, complex, odd layouts, unknown optimizers."""

from __future__ import annotations

import importlib
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft import wrap_optimizer
from swift_ft.errors import UndoError
from swift_ft.optim import Lamb, UndoableOptimizer
from swift_ft.testing.undo_rule_conformance import assert_same_bits, picture, set_grads
from swift_ft.torch_core.optimizers import parameters_of
from tests.support.optimizers import BOTH_WAYS, assert_close, ulps

pytestmark = BOTH_WAYS

OPTIM = torch.optim
BOTH = pytest.mark.parametrize("exact", [False, True], ids=["bounded", "exact"])


def round_trip(optimizer: UndoableOptimizer, exact: bool, allowed: float = 4.0, steps: int = 3) -> None:
    """Step, undo, compare, step; the gradients are there already the first time."""
    for seed in range(steps):
        if seed:
            set_grads(parameters_of(optimizer), seed)
        before = picture(optimizer)
        optimizer.step()
        after = picture(optimizer)
        optimizer.undo()
        if exact:
            assert_same_bits(picture(optimizer), before)
        else:
            assert_close(picture(optimizer), before, after, allowed)
        optimizer.step()


def one(kind: type[Optimizer], values: Tensor, exact: bool, **kwargs: Any) -> UndoableOptimizer:
    param = torch.nn.Parameter(values.clone())
    wrapped = wrap_optimizer(kind([param], **kwargs), exact=exact)
    set_grads([param], 0)
    return wrapped


@BOTH
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (OPTIM.SGD, {"lr": 0.5, "weight_decay": 2.0}),
        (OPTIM.SGD, {"lr": 0.5, "weight_decay": 2.0, "momentum": 0.9, "nesterov": True}),
        (OPTIM.SGD, {"lr": 0.5, "momentum": 1e-6}),
        (OPTIM.SGD, {"lr": 0.5, "weight_decay": 2.0 - 1e-6}),
        (OPTIM.AdamW, {"lr": 0.5, "weight_decay": 2.0}),
        (OPTIM.AdamW, {"lr": 0.5, "weight_decay": 1.9999}),
        (OPTIM.AdamW, {"betas": (0.0, 0.0)}),
        (OPTIM.Adam, {"betas": (1e-5, 1e-5), "weight_decay": 0.1}),
        (OPTIM.RAdam, {"betas": (0.0, 0.9), "lr": 0.5, "weight_decay": 2.0, "decoupled_weight_decay": True}),
        (OPTIM.NAdam, {"betas": (0.0, 0.0), "lr": 0.5, "weight_decay": 2.0}),
        (OPTIM.RMSprop, {"alpha": 0.0, "momentum": 1e-3}),
        (OPTIM.Adadelta, {"rho": 0.0}),
        (OPTIM.ASGD, {"lr": 0.5, "lambd": 2.0, "t0": 0}),
        (Lamb, {"lr": 0.5, "weight_decay": 2.0}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_factors_of_zero_or_nearly(kind: type[Optimizer], kwargs: dict[str, Any], exact: bool) -> None:
    """A part that was multiplied by 0 has no inverse: its snapshot restores every bit."""
    wrapped = one(kind, torch.linspace(-2, 2, 33), exact, **kwargs)
    round_trip(wrapped, exact)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_that_is_wrong(dtype: torch.dtype, exact: bool) -> None:
    """Torch 2.13's fused SGD on a CPU does not change such parameters and leaves buffers uninitialized.

    No formula inverts that; a snapshot restores every bit.
    """
    wrapped = one(OPTIM.SGD, torch.ones(64, dtype=dtype), exact, lr=0.5, momentum=0.9, fused=True)
    round_trip(wrapped, exact=True)


@BOTH
def test_undoing_the_first_step_removes_its_state(exact: bool) -> None:
    for kind in (OPTIM.SGD, OPTIM.AdamW, OPTIM.RMSprop, OPTIM.ASGD, Lamb):
        wrapped = one(kind, torch.ones(3), exact, **({"momentum": 0.9} if kind is OPTIM.SGD else {}))
        wrapped.step()
        assert wrapped.state
        wrapped.undo()
        assert parameters_of(wrapped)[0] not in wrapped.state


def test_momentum_that_is_turned_on_later() -> None:
    wrapped = one(OPTIM.SGD, torch.ones(3), True, lr=0.1)
    wrapped.step()
    wrapped.param_groups[0]["momentum"] = 0.9
    round_trip(wrapped, True)


def test_a_buffer_of_none_is_none_again() -> None:
    wrapped = one(OPTIM.SGD, torch.ones(3), True, lr=0.1, momentum=0.9)
    wrapped.state[parameters_of(wrapped)[0]]["momentum_buffer"] = None
    wrapped.step()
    wrapped.undo()
    assert wrapped.state[parameters_of(wrapped)[0]] == {"momentum_buffer": None}


def test_exact_with_what_is_not_finite() -> None:
    """NaN with its payload, infinities, signed zeros, subnormals: bits are bits."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42, 3e38, 1.0])
    for kind in (OPTIM.SGD, OPTIM.AdamW, OPTIM.RMSprop, OPTIM.Adagrad, Lamb):
        wrapped = one(kind, values, True)
        for grad in (values.flip(0), values, torch.ones(8)):
            parameters_of(wrapped)[0].grad = grad.clone()
            before = picture(wrapped)
            wrapped.step()
            wrapped.undo()
            assert_same_bits(picture(wrapped), before)
            wrapped.step()


@BOTH
@pytest.mark.parametrize(
    "kind", [OPTIM.SGD, OPTIM.Adam, OPTIM.AdamW, OPTIM.NAdam, OPTIM.RAdam, OPTIM.Adagrad, OPTIM.RMSprop]
)
def test_complex_parameters(kind: type[Optimizer], exact: bool) -> None:
    values = torch.complex(torch.linspace(-1, 1, 9), torch.linspace(2, 1, 9))
    round_trip(one(kind, values, exact, weight_decay=0.01), exact)


@BOTH
def test_odd_layouts_and_empty_tensors(exact: bool) -> None:
    transposed = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).t()
    channels = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    params = [torch.nn.Parameter(t) for t in (transposed, channels, torch.ones(0, 3), torch.tensor(2.0))]
    wrapped = wrap_optimizer(OPTIM.AdamW(params), exact=exact)
    set_grads(params, 0)
    round_trip(wrapped, exact)


@BOTH
def test_parameters_larger_than_a_slice(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into slices that do not divide it, and listed with small parameters."""
    monkeypatch.setattr("swift_ft.undo.slices.CPU_ELEMENTS", 16)
    monkeypatch.setattr("swift_ft.undo.exact.BUCKET_BYTES", 400)
    params = [torch.nn.Parameter(torch.linspace(0, 1, n)) for n in (3, 50, 1, 7, 32)]
    for kind in (OPTIM.AdamW, OPTIM.SGD, OPTIM.NAdam, OPTIM.ASGD, Lamb):
        wrapped = wrap_optimizer(kind(params, lr=0.01), exact=exact)
        set_grads(params, 0)
        round_trip(wrapped, exact)


@BOTH
def test_residuals_that_a_byte_cannot_hold(exact: bool, copied_bytes: int) -> None:
    """After a huge gradient nothing of a small parameter is left in the result."""
    wrapped = one(OPTIM.SGD, torch.full((40,), 1e-6), exact, lr=1.0)
    parameters_of(wrapped)[0].grad = torch.full((40,), 1e6)
    before = picture(wrapped)
    wrapped.step()
    of_each = 4 if copied_bytes else 1 + 4 + 4
    assert wrapped.undo_memory_bytes() == (40 * of_each if exact else 0)
    wrapped.undo()
    if exact:
        assert_same_bits(picture(wrapped), before)
    else:
        assert ulps(parameters_of(wrapped)[0].detach(), before["0.param"]) > 1000


@BOTH
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (OPTIM.SGD, {"lr": 0.1}),
        (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9}),
        (OPTIM.Adagrad, {}),
        (OPTIM.SparseAdam, {}),
    ],
    ids=str,
)
def test_sparse_gradients(kind: type[Optimizer], kwargs: dict[str, Any], exact: bool) -> None:
    """Snapshots restore the rows that the gradient names; without momentum no others change."""
    param = torch.nn.Parameter(torch.ones(100, 4))
    wrapped = wrap_optimizer(kind([param], **kwargs), exact=exact)
    for _ in range(3):
        param.grad = torch.sparse_coo_tensor(
            torch.tensor([[3, 50, 3]]), torch.ones(3, 4), (100, 4), check_invariants=True
        )
        before = picture(wrapped)
        wrapped.step()
        if "momentum" not in kwargs:
            assert 0 < wrapped.undo_memory_bytes() <= 3 * (2 * 4 * 4 + 2 * 8)
        wrapped.undo()
        assert_same_bits(picture(wrapped), before)
        wrapped.step()


def test_differentiable_restores_the_values() -> None:
    """The graph of the undone step is not restored: its derivative is of no use."""
    source = torch.ones(3, requires_grad=True)
    param = source.clone()
    wrapped = wrap_optimizer(OPTIM.SGD([param], lr=0.5, momentum=0.9, differentiable=True))
    param.grad = torch.ones(3)
    before = picture(wrapped)
    wrapped.step()
    wrapped.undo()
    assert_same_bits(picture(wrapped), before)


CAPTURABLE = ["adam", "asgd", "adadelta", "adamax", "nadam", "radam", "rmsprop", "rprop"]


@BOTH
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable(name: str, foreach: bool, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch allows this on accelerators only; the patched list says that a CPU is one."""
    module = importlib.import_module(f"torch.optim.{name}")
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    kind = next(k for k in vars(OPTIM).values() if isinstance(k, type) and k.__module__ == module.__name__)
    rate = torch.tensor(0.01)
    wrapped = one(kind, torch.linspace(-1, 1, 33), exact, lr=rate, capturable=True, foreach=foreach)
    round_trip(wrapped, exact, allowed=16.0)


# ---------------------------------------------------------------------------------- unknown optimizers


class Strange(Optimizer):
    """Everything an optimizer can hide its state in."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.total = torch.zeros(())
        self.history: list[float] = []
        state: dict[Any, Any] = self.state  # torch calls the keys tensors; they may be anything
        state["shared"] = {"calls": 0, "last": [torch.zeros(2)]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["previous"] = param.clone()
                state.setdefault("maximum", torch.zeros_like(param)).copy_(param.abs().max())
                param.copy_(param.sin() * 0.5 + 0.01 * param.grad)
                self.total += param.sum()
        self.history.append(float(self.total))
        shared = cast(dict[Any, Any], self.state)["shared"]
        shared["calls"] += 1
        shared["last"][0].add_(1)
        return None if closure is None else closure()


@BOTH
def test_an_unknown_optimizer_is_journaled(exact: bool) -> None:
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    wrapped = wrap_optimizer(Strange(params), exact=exact)
    state: dict[Any, Any] = wrapped.state
    for seed in range(3):
        set_grads(params, seed)
        before = picture(wrapped)
        hidden = (wrapped.total.clone(), list(wrapped.history), state["shared"]["last"][0].clone())  # type: ignore[attr-defined]  # Strange's
        calls = state["shared"]["calls"]
        wrapped.step()
        assert len(wrapped.updated) == 2
        with pytest.raises(UndoError, match="whole"):
            wrapped.undo(params[:1])
        assert wrapped.undo() == 2
        assert_same_bits(picture(wrapped), before)
        assert (wrapped.total, wrapped.history) == hidden[:2]  # type: ignore[attr-defined]  # Strange's
        assert torch.equal(state["shared"]["last"][0], hidden[2])
        assert state["shared"]["calls"] == calls
        with pytest.raises(UndoError):
            wrapped.undo()
        wrapped.step()


# ---------------------------------------------------------------------------------- LAMB


def test_lamb_steps_by_the_ratio_of_the_norms() -> None:
    """The step's length is lr times the parameter's norm, whatever the gradient's."""
    for scale in (1e-3, 1e3):
        param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        optimizer = Lamb([param], lr=0.01)
        param.grad = torch.tensor([1.0, -2.0]) * scale
        before = param.detach().clone()
        optimizer.step()
        assert float((param.detach() - before).norm()) == pytest.approx(0.05, rel=1e-5)


def test_lamb_without_weight_decay_or_norms_is_adam() -> None:
    """A parameter of zeros has no norm: its ratio is 1."""
    lamb, adam = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizers = (Lamb([lamb], lr=0.1, weight_decay=0, eps=1e-8), OPTIM.Adam([adam], lr=0.1))
    for param, optimizer in zip((lamb, adam), optimizers, strict=True):
        param.grad = torch.linspace(-1, 1, 4)
        optimizer.step()
    torch.testing.assert_close(lamb, adam)


def test_lamb_refuses_what_it_could_undo_only_wrongly() -> None:
    """A ratio that grew from one step to the next until the factor was lost (§4)."""
    wrapped = one(Lamb, torch.full((4,), 1e-3), False, lr=0.5, weight_decay=0.1, betas=(0.5, 0.5))
    wrapped.step()
    param = parameters_of(wrapped)[0]
    with torch.no_grad():
        param.fill_(100.0)
    param.grad = torch.full((4,), -80.0)
    wrapped.param_groups[0]["lr"] = 1.0
    wrapped.step()
    ratio = float(wrapped.state[param]["trust_ratio"])
    if abs(1 - ratio * 0.1) < 1 / 16:
        with pytest.raises(UndoError, match="exact=True"):
            wrapped.undo()
    else:
        wrapped.undo()
