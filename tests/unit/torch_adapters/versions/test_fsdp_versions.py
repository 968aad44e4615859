"""Conformance: parameter groups and reductions of FSDP, and its way back to the beginning of an iteration.

That a repeated step has the same bits, wherever the first was interrupted: see `test_fsdp.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swift_ft.torch_adapters.versions.fsdp_groups import groups_of, take_reductions
from swift_ft.torch_adapters.versions.fsdp_reset import reset_iteration


@pytest.fixture
def model(one_process: None) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    sharded: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh())
    for module in (sharded[0], sharded[1], sharded):
        fully_shard(module, mesh=mesh)
    return sharded


def test_a_module_with_parameters_has_a_group_and_one_without_has_none(model: Any) -> None:
    groups = [groups_of(module._get_fsdp_state()) for module in (model[0], model[1], model)]
    assert [len(found) for found in groups] == [1, 1, 0]
    assert [len(group.fsdp_params) for found in groups for group in found] == [2, 2]


def test_reductions_under_way_are_taken_once(model: Any) -> None:
    """A backward pass that is not the last one leaves them under way."""
    model.set_is_last_backward(False)
    model(torch.ones(1, 2)).sum().backward()
    shared = model._get_fsdp_state()._comm_ctx
    assert len(take_reductions(shared)) == 1
    assert take_reductions(shared) == []


def test_a_model_is_brought_back_from_within_a_forward_pass(model: Any) -> None:
    def lose(*_: Any) -> None:
        raise InterruptedError

    handle = model[1].register_forward_pre_hook(lose)
    with pytest.raises(InterruptedError):
        model(torch.ones(1, 2))
    handle.remove()
    state = model._get_fsdp_state()
    assert state._state_ctx.iter_forward_root is state
    reset_iteration(model)
    assert state._state_ctx.iter_forward_root is None
    assert all(hasattr(parameter, "to_local") for parameter in model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
