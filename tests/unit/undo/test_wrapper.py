"""A wrapped optimizer behaves like the plain one for all other code."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer, lr_scheduler

from swift_ft import wrap_optimizer
from swift_ft.errors import UndoError, UsageError
from swift_ft.optim import UndoableOptimizer
from swift_ft.testing.undo_rule_conformance import assert_same_bits, picture, set_grads
from swift_ft.torch_core.optimizers import parameters_of
from tests.support.optimizers import BOTH_WAYS

pytestmark = BOTH_WAYS


def adamw(**kwargs: Any) -> tuple[torch.nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **kwargs)


def test_it_is_the_same_object_and_an_optimizer_of_its_class() -> None:
    _, optimizer = adamw()
    text = repr(optimizer)
    wrapped = wrap_optimizer(optimizer)
    assert wrapped is optimizer
    assert isinstance(wrapped, torch.optim.AdamW)
    assert isinstance(wrapped, UndoableOptimizer)
    assert repr(wrapped) == text
    assert wrap_optimizer(wrapped) is wrapped
    assert type(wrapped).__mro__.count(UndoableOptimizer) == 1


@pytest.mark.parametrize("first", ["scheduler", "wrapper"])
def test_schedulers_before_and_after_wrapping(first: str) -> None:
    """Undoing a step restores the rate that it used, although the scheduler has changed it since (§4)."""
    _, optimizer = adamw()
    if first == "wrapper":
        wrap_optimizer(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it does not see the steps
        scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        wrapped = wrap_optimizer(optimizer) if first == "scheduler" else optimizer
        assert isinstance(wrapped, UndoableOptimizer)
        for _ in range(2):
            set_grads(parameters_of(wrapped), 1)
            before = picture(wrapped)
            wrapped.step()
            scheduler.step()
            assert wrapped.param_groups[0]["lr"] == before["group0.lr"] / 2
            assert wrapped.undo() == 4
            assert wrapped.param_groups[0]["lr"] == before["group0.lr"]
            wrapped.step()
            scheduler.step()


def test_a_rate_in_a_tensor_is_restored_in_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    param = torch.nn.Parameter(torch.ones(3))
    wrapped = wrap_optimizer(torch.optim.SGD([param], lr=rate), exact=True)
    scheduler = lr_scheduler.ExponentialLR(wrapped, 0.5)
    param.grad = torch.ones(3)
    wrapped.step()
    scheduler.step()
    assert rate.item() == pytest.approx(0.05)
    wrapped.undo()
    assert wrapped.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    assert param.tolist() == [1, 1, 1]


def test_hooks_run_once_per_step() -> None:
    calls: list[str] = []
    _, optimizer = adamw()
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    wrapped = wrap_optimizer(optimizer, wait_free=True)
    wrapped.register_step_post_hook(lambda *_: calls.append("after"))
    set_grads(parameters_of(wrapped), 0)
    wrapped.step()
    wrapped.undo()
    assert calls == ["before", "after"]
    wrapped.update(parameters_of(wrapped)[:2])
    assert calls == ["before", "after"]
    wrapped.step()
    assert calls == ["before", "after", "before", "after"]


def test_a_state_dict_is_that_of_the_plain_one_both_ways() -> None:
    _, plain = adamw()
    _, other = adamw()
    wrapped = wrap_optimizer(other, exact=True)
    for one in (plain, wrapped):
        set_grads(parameters_of(one), 0)
        one.step()
    ours, theirs = wrapped.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        assert_same_bits(ours["state"][index], state)
    plain.load_state_dict(ours)
    wrapped.load_state_dict(theirs)
    with pytest.raises(UndoError, match="loaded"):
        wrapped.undo()
    for one in (plain, wrapped):
        set_grads(parameters_of(one), 1)
        one.step()
    assert_same_bits(picture(wrapped), picture(plain))


def test_dcp_sees_what_it_saw() -> None:
    plain_model, plain = adamw()
    model, optimizer = adamw()
    wrapped = wrap_optimizer(optimizer)
    set_grads(parameters_of(plain), 0)
    set_grads(parameters_of(wrapped), 0)
    plain.step()
    wrapped.step()
    theirs, ours = get_optimizer_state_dict(plain_model, plain), get_optimizer_state_dict(model, wrapped)
    assert theirs["param_groups"] == ours["param_groups"]
    states: list[Any] = [theirs["state"], ours["state"]]
    for name, state in states[0].items():
        assert_same_bits(states[1][name], state)


def test_dcp_can_make_the_state_before_the_first_step() -> None:
    """DCP steps an optimizer without state, at a rate of 0."""
    model, optimizer = adamw()
    wrapped = wrap_optimizer(optimizer)
    assert len(get_optimizer_state_dict(model, wrapped)["state"]) == 4
    assert wrapped.undo() == 4
    assert not wrapped.state


def test_a_group_that_is_added_later() -> None:
    _, optimizer = adamw()
    wrapped = wrap_optimizer(optimizer, exact=True)
    set_grads(parameters_of(wrapped), 0)
    wrapped.step()
    wrapped.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    set_grads(parameters_of(wrapped), 1)
    before = picture(wrapped)
    wrapped.step()
    assert len(wrapped.updated) == 5
    assert wrapped.undo() == 5
    assert_same_bits(picture(wrapped), before)


def test_a_closure_runs_once_and_its_loss_is_returned() -> None:
    """Its gradients are the ones that the undo needs."""
    param = torch.nn.Parameter(torch.tensor([2.0]))
    wrapped = wrap_optimizer(torch.optim.SGD([param], lr=0.1, momentum=0.9), exact=True)
    calls = []

    def closure() -> Any:
        calls.append(1)
        wrapped.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    losses: list[Any] = [wrapped.step(closure), wrapped.step(closure=closure)]
    assert [loss.item() for loss in losses] == [4.0, pytest.approx(1.6**2)]
    assert len(calls) == 2
    wrapped.undo()
    assert param.item() == pytest.approx(1.6)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_wrapped_and_have_no_window(way: str) -> None:
    _, optimizer = adamw()
    wrapped = wrap_optimizer(optimizer, exact=True, wait_free=True)
    set_grads(parameters_of(wrapped), 0)
    wrapped.step()
    copied = copy.deepcopy(wrapped) if way == "deepcopy" else pickle.loads(pickle.dumps(wrapped))
    assert type(copied) is type(wrapped)
    assert copied.wait_free
    assert_same_bits(picture(copied), picture(wrapped))
    with pytest.raises(UndoError, match="copy"):
        copied.undo()
    before = picture(copied)
    set_grads(parameters_of(copied), 1)
    copied.step()
    copied.undo()
    assert_same_bits(picture(copied), before)
    wrapped.undo()
    assert not wrapped.state


def test_a_subclass_with_its_parents_step_has_its_parents_rule() -> None:
    class Mine(torch.optim.SGD):
        pass

    class Different(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for param in parameters_of(self):
                    param.sub_(1)

    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    wrap_optimizer(Mine([param], lr=0.5), wait_free=True)
    different = Different([param], lr=0.5)
    with pytest.raises(UsageError, match="single parameters"):
        wrap_optimizer(different, wait_free=True)
    wrapped = wrap_optimizer(different)
    wrapped.step()
    assert param.tolist() == [0, 0]
    wrapped.undo()
    assert param.tolist() == [1, 1]


def test_a_step_that_was_replaced_is_refused() -> None:
    _, optimizer = adamw()
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]  # as some libraries do
    with pytest.raises(UsageError, match="before"):
        wrap_optimizer(optimizer)


# --------------------------------------------------------------------------------- GradScaler


def scaled(optimizer: Optimizer, scaler: torch.amp.GradScaler, finite: bool) -> None:
    param = parameters_of(optimizer)[0]
    optimizer.zero_grad()
    loss = (param * (1.0 if finite else float("inf"))).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_step_that_the_scaler_skipped_was_no_step(fused: bool, exact: bool) -> None:
    """If not fused, the step is never called; if fused, the kernel changes nothing."""
    param = torch.nn.Parameter(torch.ones(3))
    wrapped = wrap_optimizer(torch.optim.AdamW([param], lr=0.1, fused=fused), exact=exact)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled(wrapped, scaler, finite=True)
    after = picture(wrapped)
    scaled(wrapped, scaler, finite=False)
    assert_same_bits(picture(wrapped), after)
    if fused:
        assert wrapped.updated == ()
        with pytest.raises(UndoError, match="skipped"):
            wrapped.undo()
        assert_same_bits(picture(wrapped), after)
    wrapped.zero_grad()
    if not fused:
        with pytest.raises(UndoError, match="skipped"):
            wrapped.undo()
    scaled(wrapped, scaler, finite=True)
    assert wrapped.undo() == 1
    torch.testing.assert_close(param.detach(), after["0.param"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("exact", [False, True])
def test_the_fused_kernel_unscales_the_gradient(kind: type[Optimizer], exact: bool) -> None:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    wrapped = wrap_optimizer(kind([param], lr=0.1, fused=True), exact=exact)  # type: ignore[call-arg]  # all four
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        before = picture(wrapped)
        scaled(wrapped, scaler, finite=True)
        after = picture(wrapped)
        wrapped.undo()
        if exact:
            assert_same_bits(picture(wrapped), before)
        torch.testing.assert_close(param.detach(), before["0.param"], rtol=1e-6, atol=1e-7)
        wrapped.step()  # the gradient is the unscaled one by now
        torch.testing.assert_close(param.detach(), after["0.param"], rtol=1e-6, atol=1e-7)


class Proxy:
    """As Lightning Fabric's ``setup()`` wraps an optimizer: it has its class, but no attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type(f"Proxy{type(optimizer).__name__}", (Proxy, type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_a_proxy_with_its_class_steps_and_undoes() -> None:
    _, optimizer = adamw()
    wrapped = wrap_optimizer(optimizer, exact=True)
    proxy: Any = Proxy(wrapped)
    before = picture(wrapped)
    set_grads(parameters_of(wrapped), 0)
    proxy.step()
    assert len(proxy.updated) == len(parameters_of(wrapped))
    assert proxy.windows_opened == wrapped.windows_opened == 1
    assert proxy.undo() == len(parameters_of(wrapped))
    assert_same_bits(picture(wrapped), before)
    proxy.step()
    proxy.zero_grad()
    assert all(param.grad is None for param in parameters_of(wrapped))
    proxy.load_state_dict(proxy.state_dict())
    assert proxy.undo_memory_bytes() == 0
    copy.deepcopy(proxy)  # no KeyError; what a copy of a proxy is good for is the proxy's affair
