"""Gradients of the step before are stale, or carried over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.carried_gradients import CarriedGradients
from swift_ft.checkpoint.step.rollback import CheckStep, Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError
from swift_ft.optim import wrap_optimizer
from swift_ft.torch_core.optimizers import parameters_of
from tests.support.loose_parameter import Temperature


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


@pytest.mark.parametrize("closely", [True, False])
def test_each_place_of_zero_grad(model: nn.Module, closely: bool) -> None:
    carried = CarriedGradients()
    for set_to_none in (True, False):
        backward(model)
        carried.begin(dict(model.named_parameters()), closely=closely)
        model.zero_grad(set_to_none=set_to_none)
        backward(model)
        backward(model)  # an accumulation within the step
    carried.forget()
    backward(model)


@pytest.mark.parametrize("closely", [True, False])
def test_carried_over(model: nn.Module, closely: bool) -> None:
    carried = CarriedGradients()
    carried.begin(dict(model.named_parameters()), closely=closely)
    backward(model)
    carried.begin(dict(model.named_parameters()), closely=closely)
    with pytest.raises(UnsupportedError, match=r"The gradient of 1\..* is carried over"):
        backward(model)


@pytest.mark.parametrize("closely", [True, False])
def test_an_update_before_a_new_gradient(model: nn.Module, closely: bool) -> None:
    """It is found where a step is looked at closely. Zeros and new gradients are no such thing."""
    carried, optimizer = CarriedGradients(), torch.optim.SGD(model.parameters(), lr=0.1)
    named = dict(model.named_parameters())
    backward(model)
    for set_to_none in (False, True):
        carried.begin(named, closely=closely)
        model.zero_grad(set_to_none=set_to_none)
        if set_to_none:
            backward(model)
        carried.refuse_carried(parameters_of(optimizer))
        model.zero_grad()
        backward(model)
    carried.begin(named, closely=closely)
    with pytest.raises(UnsupportedError, match="before this step computes one") if closely else nullcontext():
        carried.refuse_carried(parameters_of(optimizer))


def test_gradients_are_not_held(model: nn.Module) -> None:
    """A step that zeroes first of all has their memory back."""
    carried = CarriedGradients()
    backward(model)
    carried.begin(dict(model.named_parameters()), closely=True)
    gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert gradients
    assert all(gradient() is None for gradient in gradients)


def test_a_parameter_that_has_no_part_in_the_step(model: nn.Sequential) -> None:
    """Its old gradient is not added to."""
    carried = CarriedGradients()
    backward(model)
    model.zero_grad()
    model[0](torch.ones(2, 3)).sum().backward()
    carried.begin(dict(model.named_parameters()), closely=True)
    model[1](torch.ones(2, 3)).sum().backward()


@contextmanager
def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Rollback]:
    rollback = Rollback(TrainingState({"model": model, "optimizer": optimizer}), CheckStep.ALWAYS)
    rollback.watch()
    yield rollback
    rollback.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrapped(model: nn.Module) -> torch.optim.Optimizer:
    return wrap_optimizer(sgd(model))


@contextmanager
def heads_in_turn() -> Iterator[tuple[Rollback, Callable[[int], None], nn.ModuleList]]:
    """Two heads, of which a step computes with one. A head that was used once has zeros then."""
    heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    with watched(heads, optimizer := torch.optim.AdamW(heads.parameters(), lr=0.1)) as rollback:

        def step(iteration: int) -> None:
            rollback.begin(iteration)
            optimizer.zero_grad(set_to_none=False)
            backward(heads[iteration % 2])

        yield rollback, step, heads


def gradients_of(heads: nn.Module) -> list[bool]:
    return [parameter.grad is not None for parameter in heads.parameters()]


def test_the_step_before_began_without_a_gradient() -> None:
    """The first step that uses a head is undone: an optimizer must skip that head before it."""
    with heads_in_turn() as (rollback, step, heads):
        for iteration in range(3):
            step(iteration)
        rollback.back()
        assert all(gradients_of(heads))
        rollback.back_to(1)
        assert gradients_of(heads) == [True, True, False, False]


def test_sparse_gradients_stay_sparse() -> None:
    """The optimizer for them refuses others."""
    model = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SparseAdam([*model.parameters()], lr=0.1)
    with watched(model, optimizer) as rollback:
        for iteration in (0, 1, 1):
            rollback.begin(iteration)
            optimizer.zero_grad(set_to_none=False)
            model(torch.tensor([iteration, 3])).square().sum().backward()
            if iteration == 0:
                optimizer.step()
                rollback.completed()
            else:
                rollback.back()
                zeros = model.weight.grad
                assert zeros is not None
                assert zeros.is_sparse
                assert not zeros.to_dense().any()
        model(torch.tensor([3, 3])).square().sum().backward()
        optimizer.step()


def test_a_parameter_in_no_module() -> None:
    """Its gradient, too, would be counted twice."""
    own, model = Temperature(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*model.parameters(), own.value], lr=0.1)
    rollback = Rollback(TrainingState({"model": model, "own": own, "optimizer": optimizer}))
    rollback.begin(0)
    (model(torch.ones(2, 3)).sum() * own.value).backward()
    assert own.value.grad is not None
    rollback.back()
    assert own.value.grad is None


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=3)


@pytest.mark.parametrize("make", [sgd, wrapped, lbfgs])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_computes_the_gradients(
    model: nn.Module,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    by_name: bool,
    set_to_none: bool,
) -> None:
    """As torch's documents have it: it zeroes what the step before has left."""
    optimizer = make(model)

    def closure() -> float:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss: torch.Tensor = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return float(loss.detach())

    losses = []
    with watched(model, optimizer) as rollback:
        for iteration in range(4):
            rollback.begin(iteration)
            losses.append(optimizer.step(closure=closure) if by_name else optimizer.step(closure))
            rollback.completed()
    assert losses[3] < losses[0]


@pytest.mark.parametrize("make", [sgd, wrapped])
def test_a_closure_that_computes_none(
    model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    optimizer = make(model)
    backward(model)
    with watched(model, optimizer) as rollback:
        rollback.begin(0)
        with pytest.raises(UnsupportedError, match="before this step computes one"):
            optimizer.step(lambda: 0.0)
