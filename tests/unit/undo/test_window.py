"""The undo window: tags, references to gradients, and when it closes (§4, §6)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from swift_ft import wrap_optimizer
from swift_ft.errors import UndoError, UsageError
from swift_ft.optim import UndoableOptimizer
from swift_ft.testing.undo_rule_conformance import assert_same_bits, picture, set_grads
from swift_ft.torch_core.optimizers import parameters_of
from tests.support.optimizers import BOTH_WAYS, assert_close

pytestmark = BOTH_WAYS


def wrapped_sgd(exact: bool = True, **kwargs: Any) -> UndoableOptimizer:
    params = [torch.nn.Parameter(torch.full((n,), float(n))) for n in (1, 2, 3)]
    return wrap_optimizer(torch.optim.SGD(params, lr=0.5, momentum=0.5, **kwargs), exact=exact)


def stepped(exact: bool = True) -> UndoableOptimizer:
    optimizer = wrapped_sgd(exact)
    set_grads(parameters_of(optimizer), 0)
    optimizer.step()
    return optimizer


def test_nothing_to_undo_before_the_first_step() -> None:
    with pytest.raises(UndoError, match="no step"):
        wrapped_sgd().undo()


def test_a_second_undo_is_an_error_and_changes_nothing() -> None:
    optimizer = stepped()
    assert optimizer.undo() == 3
    now = picture(optimizer)
    with pytest.raises(UndoError, match="already"):
        optimizer.undo()
    assert_same_bits(picture(optimizer), now)


def test_an_undo_after_the_window_is_an_error_and_changes_nothing() -> None:
    optimizer = stepped()
    optimizer.close_undo_window()
    now = picture(optimizer)
    assert optimizer.updated == ()
    with pytest.raises(UndoError, match="closed"):
        optimizer.undo()
    assert_same_bits(picture(optimizer), now)


def test_a_step_that_had_no_gradients_updated_nothing() -> None:
    optimizer = wrapped_sgd()
    optimizer.step()
    assert optimizer.updated == ()
    with pytest.raises(UndoError):
        optimizer.undo()


def test_each_window_has_a_number() -> None:
    optimizer = wrapped_sgd()
    assert optimizer.windows_opened == 0
    for number in (1, 2):
        set_grads(parameters_of(optimizer), number)
        optimizer.update(parameters_of(optimizer)[:1])
        optimizer.step()
        assert optimizer.windows_opened == number
    optimizer.close_undo_window()
    assert optimizer.windows_opened == 2


def test_tags_of_parameters_that_are_in_no_group_any_more() -> None:
    """As block-wise training exchanges them after its update. An undo needs them all the same."""
    optimizer = wrapped_sgd()
    params = parameters_of(optimizer)
    before = [param.detach().clone() for param in params]
    set_grads(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["params"] = params[1:2]
    assert optimizer.updated[0] is params[1]
    assert {*optimizer.updated} == {*params}
    optimizer.undo(optimizer.updated)
    for param, value in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), value)


def test_tags_are_in_the_groups_order_without_parameters_that_have_no_gradient() -> None:
    optimizer = wrapped_sgd()
    params = parameters_of(optimizer)
    set_grads(params, 0)
    params[1].grad = None
    optimizer.update([params[2]])
    assert [p.numel() for p in optimizer.updated] == [3]
    optimizer.step()
    assert [p.numel() for p in optimizer.updated] == [1, 3]
    optimizer.undo([params[0]])
    assert [p.numel() for p in optimizer.updated] == [3]
    with pytest.raises(UsageError, match="1 of 1"):
        optimizer.undo([params[0]])


# ---------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("exact", [False, True])
def test_zero_grad_moves_the_gradients_into_the_window_without_copies(exact: bool) -> None:
    optimizer = wrapped_sgd(exact)
    set_grads(parameters_of(optimizer), 0)
    grads = [weakref.ref(param.grad) for param in parameters_of(optimizer)]
    addresses = {grad().data_ptr() for grad in grads}  # type: ignore[union-attr]  # still alive
    before = picture(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in parameters_of(optimizer))
    held = {entry.grad.data_ptr() for entry in optimizer._undo.window.entries()}  # type: ignore[union-attr]  # open
    assert held == addresses
    after = picture(optimizer)
    optimizer.undo()
    assert_close(picture(optimizer), before, after, 0.0 if exact else 3.0)
    gc.collect()
    assert all(grad() is None for grad in grads), "the window releases them"


def test_closing_releases_gradients() -> None:
    optimizer = stepped()
    grad = weakref.ref(parameters_of(optimizer)[0].grad)
    optimizer.zero_grad()
    assert grad() is not None
    assert optimizer.undo_memory_bytes() > 0
    optimizer.close_undo_window()
    assert grad() is None
    assert optimizer.undo_memory_bytes() == 0


def test_zeroing_gives_new_gradients_while_the_window_is_open() -> None:
    optimizer = wrapped_sgd()
    set_grads(parameters_of(optimizer), 0)
    before = picture(optimizer)
    optimizer.step()
    kept = [param.grad for param in parameters_of(optimizer)]
    for _ in range(2):  # at the end of an iteration, and at the beginning of the next
        optimizer.zero_grad(set_to_none=False)
        for param, old in zip(parameters_of(optimizer), kept, strict=True):
            assert param.grad is not old
            assert param.grad is not None
            assert not param.grad.any()
            assert old is not None
            assert old.any()
    parameters_of(optimizer)[0].grad.add_(1)  # type: ignore[union-attr]  # the next backward pass
    optimizer.undo()
    assert_same_bits(picture(optimizer), before)


def test_zeroing_a_closed_windows_gradients_is_in_place() -> None:
    optimizer = stepped()
    grad = parameters_of(optimizer)[0].grad
    optimizer.close_undo_window()
    optimizer.zero_grad(set_to_none=False)
    assert parameters_of(optimizer)[0].grad is grad
    assert grad is not None
    assert not grad.any()


@pytest.mark.parametrize("part", ["gradient", "parameter"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_change_after_the_step_is_noticed(part: str, steps: int) -> None:
    """An undo with another gradient would be silently wrong; copies would drop what a script did since."""
    optimizer = stepped()
    for seed in range(1, steps):
        set_grads(parameters_of(optimizer), seed)
        optimizer.step()
    param = parameters_of(optimizer)[1]
    with torch.no_grad():
        (param.grad if part == "gradient" else param).add_(1)  # type: ignore[union-attr]  # it has one
    now = picture(optimizer)
    with pytest.raises(UndoError, match=part):
        optimizer.undo()
    assert_same_bits(picture(optimizer), now)
    others = [parameters_of(optimizer)[0], parameters_of(optimizer)[2]]
    assert optimizer.undo(others) == 2


def test_clipping_and_replacing_gradients_before_the_step() -> None:
    optimizer = wrapped_sgd()
    for seed in range(3):
        params = parameters_of(optimizer)
        set_grads(params, seed, 10.0)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        params[0].grad = torch.ones(1)
        before = picture(optimizer)
        optimizer.step()
        params[1].grad = None
        params[2].grad = torch.zeros(3)  # after the step: the window has the one that was used
        optimizer.undo()
        assert_same_bits(picture(optimizer), before)
        set_grads(params, seed)
        optimizer.step()


# ---------------------------------------------------------------------------------- wait-free


def test_the_updated_part_of_an_interrupted_step_is_undone() -> None:
    """Exactly the tagged parameters are undone; the others were never touched (§2.3)."""
    optimizer = stepped()
    params = parameters_of(optimizer)
    set_grads(params, 1)
    before = picture(optimizer)
    optimizer.update(params[2:])
    optimizer.update(params[1:2])
    assert optimizer.undo() == 2
    assert_same_bits(picture(optimizer), before)
    optimizer.step()
    assert len(optimizer.updated) == 3


def test_an_update_after_a_partial_undo_makes_the_step_whole() -> None:
    optimizer, other = stepped(), stepped()
    for one in (optimizer, other):
        set_grads(parameters_of(one), 1)
    optimizer.update(parameters_of(optimizer)[1:])
    optimizer.undo(parameters_of(optimizer)[2:])
    optimizer.update(parameters_of(optimizer)[2:])
    optimizer.step()
    other.step()
    assert_same_bits(picture(optimizer), picture(other))
    optimizer.undo()
    other.undo()
    assert_same_bits(picture(optimizer), picture(other))


def test_updating_twice_or_an_unknown_parameter_is_an_error() -> None:
    optimizer = stepped()
    params = parameters_of(optimizer)
    set_grads(params, 1)
    optimizer.update(params[:1])
    with pytest.raises(UsageError, match="already"):
        optimizer.update(params[:2])
    with pytest.raises(UsageError, match="groups"):
        optimizer.update([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(UsageError, match="not updated"):
        optimizer.undo([params[1]])


@pytest.mark.parametrize("kind", [torch.optim.LBFGS])
def test_parameters_that_share_state_are_not_updated_one_by_one(kind: type[Optimizer]) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(UsageError, match="single parameters"):
        wrap_optimizer(kind([param]), wait_free=True)  # type: ignore[call-arg]  # LBFGS has defaults
    wrapped = wrap_optimizer(kind([param]))  # type: ignore[call-arg]  # ditto
    with pytest.raises(UsageError, match="single parameters"):
        wrapped.update([param])


def test_the_rates_of_each_update_are_remembered() -> None:
    """Rates that change between two updates of one step are each undone with their own."""
    optimizer = wrapped_sgd()
    params = parameters_of(optimizer)
    set_grads(params, 0)
    before = picture(optimizer)
    optimizer.update(params[:1])
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 77.0
    optimizer.undo()
    assert_same_bits(picture(optimizer), before)


def test_a_step_that_fails_closes_the_window() -> None:
    optimizer = wrapped_sgd(exact=False)
    parameters_of(optimizer)[0].grad = torch.ones(1)
    optimizer.param_groups[0]["momentum"] = "heavy"
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    assert optimizer.updated == ()
    with pytest.raises(UndoError):
        optimizer.undo()
