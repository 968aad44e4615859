"""Conformance: the private parts of optimizers that `torch_core/optimizers.py` uses."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR

from swift_ft.torch_core.optimizers import (
    bookkeeping_of,
    contained,
    has_step_hooks,
    is_patched_by_scheduler,
    makes_same_state,
    mark_as_patched_by_scheduler,
    note_step_called,
    orthogonalized,
    orthogonalized_step_size,
    picks_foreach,
    plain_step,
    with_step_hooks,
)


def test_muons_update_is_computed_from_its_parts() -> None:
    parameter = nn.Parameter(torch.randn(4, 3))
    before, gradient = parameter.detach().clone(), torch.randn(4, 3)
    parameter.grad = gradient
    muon = Muon([parameter], lr=0.1, weight_decay=0.0, momentum=0.5, nesterov=False)
    muon.step()
    group = muon.param_groups[0]
    update = orthogonalized(gradient * 0.5, group["ns_coefficients"], group["ns_steps"], group["eps"])
    size = orthogonalized_step_size(group["lr"], group["adjust_lr_fn"], parameter.shape)
    assert torch.equal(parameter.detach(), before.add(update, alpha=-size))


def test_a_step_on_the_host_picks_no_foreach_kernels() -> None:
    assert picks_foreach([nn.Parameter(torch.zeros(2))], differentiable=False) is False


def test_a_class_has_its_step_without_hooks() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))])
    assert plain_step(SGD) is not SGD.step
    assert plain_step(SGD).__qualname__ == "SGD.step"
    assert not hasattr(plain_step(SGD), "hooked")
    assert type(optimizer).step is SGD.step


def test_torch_adds_no_second_hooks_to_a_hooked_step() -> None:
    calls: list[str] = []

    class Own(Optimizer):
        step = with_step_hooks(lambda self: calls.append("step"))

    optimizer = Own([nn.Parameter(torch.zeros(2))], {})
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.step()
    assert calls == ["pre", "step", "post"]


def test_which_classes_make_the_same_state() -> None:
    class Own(Adam):
        pass

    assert makes_same_state(Own, Adam)
    assert makes_same_state(AdamW, Adam)
    assert not makes_same_state(SGD, Adam)


def test_classes_make_the_same_state_after_something_was_compiled() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert AdamW._init_group is not Adam._init_group  # what torch has done
    test_which_classes_make_the_same_state()


def test_a_scheduler_patches_a_step_once_and_notices_its_calls() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    StepLR(optimizer, 1)
    patched: Any = optimizer.step
    assert is_patched_by_scheduler(patched)

    def step() -> None:
        note_step_called(optimizer)

    assert not is_patched_by_scheduler(step)
    mark_as_patched_by_scheduler(step)
    optimizer.step = step  # type: ignore[method-assign, assignment]
    scheduler = StepLR(optimizer, 1)
    assert optimizer.step is step
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        scheduler.step()
    again = StepLR(optimizer, 1)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.step()


def test_bookkeeping_names_what_torch_sets() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))])
    assert "_zero_grad_profile_name" in vars(optimizer)
    StepLR(optimizer, 1)
    optimizer.step()
    assert {"step", "_opt_called", "_zero_grad_profile_name"} <= vars(optimizer).keys() & bookkeeping_of(
        optimizer
    )


OF_TORCH = [
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in OF_TORCH if kind is not Optimizer])
def test_all_that_torchs_classes_have_beside_groups_and_state(kind: Any, fused: bool) -> None:
    """What stays as it was made needs no care, and neither does what is bookkeeping."""
    parameter = nn.Parameter(torch.ones(2, 2))
    if fused and "fused" not in inspect.signature(kind).parameters:
        pytest.skip("it has no fused kernel")
    optimizer = kind([parameter], lr=0.1, **({"fused": True} if fused else {}))
    parameter.grad = torch.ones(2, 2).to_sparse() if kind is torch.optim.SparseAdam else torch.ones(2, 2)
    own = vars(optimizer).keys() - {"state", "param_groups"} - bookkeeping_of(optimizer)
    before = {name: copy.deepcopy(vars(optimizer)[name]) for name in own}
    optimizer.step(lambda: torch.ones(()))
    assert own == vars(optimizer).keys() - {"state", "param_groups"} - bookkeeping_of(optimizer)
    assert {name: vars(optimizer)[name] for name in own} == before


def test_the_list_of_lbfgs_is_that_of_its_group() -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    assert bookkeeping_of(optimizer) - bookkeeping_of(SGD([nn.Parameter(torch.ones(2))])) == {
        "_params",
        "_numel_cache",
    }
    assert vars(optimizer)["_params"] is optimizer.param_groups[0]["params"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert vars(optimizer)["_params"] is optimizer.param_groups[0]["params"]


class Several(Optimizer):
    """A container of optimizers, as torchtitan has it: its state_dict() is flat, and makes states."""

    def __init__(self, *optimizers: Optimizer, more: list[torch.Tensor] | None = None) -> None:
        self.optimizers = [*optimizers]
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        super().__init__([*held, *(more or [])], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it was asked")


def one(size: int = 2) -> Optimizer:
    return AdamW([nn.Parameter(torch.ones(size))])


def test_hooks_of_its_own() -> None:
    optimizer = one()
    assert not has_step_hooks(optimizer)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: None),
        optimizer.register_step_post_hook(lambda *_: None),
    ]
    for handle in handles:
        assert has_step_hooks(optimizer)
        handle.remove()
    assert not has_step_hooks(optimizer)


def test_a_container_of_optimizers_has_theirs() -> None:
    inner = [one(), one(3)]
    assert contained(Several(*inner)) == inner


def test_what_is_no_container_has_none() -> None:
    assert contained(one()) == []
    assert contained(Several(one(), more=[nn.Parameter(torch.ones(1))])) == []  # it updates more than they
    with_state = Several(one())
    with_state.state[with_state.param_groups[0]["params"][0]]["averaged"] = torch.ones(2)
    assert contained(with_state) == []
