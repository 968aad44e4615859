"""An undo takes back what step hooks of the optimizer's own have changed, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from swift_ft import wrap_optimizer
from swift_ft.errors import UndoError
from swift_ft.optim import UndoableOptimizer
from swift_ft.testing.undo_rule_conformance import assert_same_bits, picture, set_grads
from swift_ft.torch_core.optimizers import parameters_of
from tests.support.optimizers import BOTH_WAYS

pytestmark = BOTH_WAYS

Hook = Callable[[Optimizer], None]


@torch.no_grad()
def decay(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        parameter.mul_(0.9)


@torch.no_grad()
def decay_data(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        parameter.data.mul_(0.9)


@torch.no_grad()
def scale_state(optimizer: Optimizer) -> None:
    for fields in optimizer.state.values():
        fields["exp_avg"].mul_(0.9)


def change_rate(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9


def nothing(_: Optimizer) -> None:
    """As most hooks do."""


def made(**options: Any) -> UndoableOptimizer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 2))
    return wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), **options)


def hooked(optimizer: UndoableOptimizer, before: Hook, after: Hook) -> UndoableOptimizer:
    optimizer.register_step_pre_hook(lambda one, *_: before(one))
    optimizer.register_step_post_hook(lambda one, *_: after(one))
    return optimizer


def step(optimizer: UndoableOptimizer) -> None:
    set_grads(parameters_of(optimizer), 1)
    optimizer.step()


CHANGES = [
    (decay, nothing),
    (nothing, decay),
    (decay, decay),
    (decay_data, nothing),
    (nothing, decay_data),
    (scale_state, nothing),
    (nothing, scale_state),
]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_all_bits_come_back(before: Hook, after: Hook, exact: bool) -> None:
    optimizer = hooked(made(exact=exact), before, after)
    for _ in range(2):
        step(optimizer)
    for _ in range(2):
        then = picture(optimizer)
        step(optimizer)
        assert optimizer.undo() == 4
        assert_same_bits(picture(optimizer), then)
        step(optimizer)


@pytest.mark.parametrize(("before", "after"), [change for change in CHANGES if scale_state not in change])
def test_the_first_time_there_is_no_copy(before: Hook, after: Hook) -> None:
    optimizer = hooked(made(exact=True), before, after)
    step(optimizer)
    with pytest.raises(UndoError, match="Step hooks of this optimizer have changed"):
        optimizer.undo()


def from_step(number: int, change: Hook) -> Hook:
    """What changes nothing before."""
    steps = iter(range(1, 1000))
    return lambda optimizer: change(optimizer) if next(steps) >= number else None


@torch.no_grad()
def clip_one(optimizer: Optimizer) -> None:
    """As a WGAN's critic does it: most weights are within the limits."""
    (weight, *_) = parameters_of(optimizer)
    weight.data[1, 1] = 0.01


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("change", "exact"), [(decay_data, True), (decay_data, False), (clip_one, True)])
def test_a_change_by_data_that_first_comes_in_a_later_step(change: Hook, exact: bool, after: bool) -> None:
    """No count of torch's says so. Where an undo is exact, one element of many is found, too."""
    late = from_step(5, change)
    optimizer = hooked(made(exact=exact), *((nothing, late) if after else (late, nothing)))
    for _ in range(5):
        assert not optimizer.refuses_undo
        step(optimizer)
    with pytest.raises(UndoError, match="Step hooks of this optimizer have changed"):
        optimizer.undo()
    then = picture(optimizer)
    step(optimizer)
    assert optimizer.undo() == 4
    assert_same_bits(picture(optimizer), then)


@torch.no_grad()
def scale_state_data(optimizer: Optimizer) -> None:
    for fields in optimizer.state.values():
        fields["exp_avg"].data.mul_(0.9)


def test_a_state_that_is_changed_by_data() -> None:
    optimizer = hooked(made(exact=True), nothing, scale_state_data)
    step(optimizer)
    with pytest.raises(UndoError, match="Step hooks of this optimizer have changed"):
        optimizer.undo()


def test_a_part_of_what_is_undone_as_a_whole() -> None:
    optimizer = hooked(made(), decay, nothing)
    for _ in range(2):
        step(optimizer)
    with pytest.raises(UndoError, match="Step hooks of this optimizer change parameters or state, so its"):
        optimizer.undo(parameters_of(optimizer)[:1])


def assert_undone_without_copy(optimizer: UndoableOptimizer) -> None:
    then = picture(optimizer)
    step(optimizer)
    assert optimizer._undo.window is not None
    assert optimizer._undo.window.whole is None
    optimizer.undo()
    assert_same_bits(picture(optimizer), then)


def test_hooks_that_change_nothing_cost_no_copy() -> None:
    optimizer = hooked(made(exact=True), nothing, nothing)
    for _ in range(4):
        assert_undone_without_copy(optimizer)
        step(optimizer)


def test_a_rate_that_a_hook_sets_is_not_copied() -> None:
    """The group's values are the session's to put back."""
    optimizer = hooked(made(exact=True), change_rate, nothing)
    for _ in range(2):
        step(optimizer)
    assert optimizer.undo() == 4


def test_hooks_of_all_optimizers_are_around_them() -> None:
    """A session's own: they see one step, before and after all that it changes."""
    optimizer, seen = hooked(made(), decay, decay), list[torch.Tensor]()
    (first, *_) = parameters_of(optimizer)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(first.detach().clone())),
        register_optimizer_step_post_hook(lambda *_: seen.append(first.detach().clone())),
    ]
    for _ in range(2):
        then = first.detach().clone()
        step(optimizer)
        assert seen[0].equal(then)
        assert seen[1].equal(first)
        assert len(seen) == 2
        seen.clear()
    for handle in handles:
        handle.remove()


def test_hooks_that_are_removed() -> None:
    optimizer = made(exact=True)
    handle = optimizer.register_step_pre_hook(lambda one, *_: decay(one))
    for _ in range(2):
        step(optimizer)
    handle.remove()
    assert_undone_without_copy(optimizer)


def test_a_hook_that_fails() -> None:
    """It has changed something, and the step was not made: the one before cannot be undone any more."""
    optimizer = made()
    step(optimizer)

    def fails(one: Optimizer, *_: Any) -> None:
        decay(one)
        raise OSError("a disk is full")

    optimizer.register_step_pre_hook(fails)
    with pytest.raises(OSError, match="a disk"):
        step(optimizer)
    with pytest.raises(UndoError):
        optimizer.undo()


def test_a_part_of_the_step_was_made_before() -> None:
    optimizer = hooked(made(wait_free=True), decay, nothing)
    for _ in range(3):
        set_grads(parameters_of(optimizer), 1)
        optimizer.update(parameters_of(optimizer)[:2])
        optimizer.step()
        with pytest.raises(UndoError, match="unless a part of that one is made by update"):
            optimizer.undo()
