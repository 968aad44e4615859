"""Conformance: FSDP2 comes back to its shards from anywhere in an iteration, and says who holds which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.ddp import DataParallelHook
from swift_ft.torch_adapters.fsdp import (
    ShardedModels,
    is_sharded,
    place_of,
    refuse_wrapped_shards,
    replicas_of,
)
from swift_ft.torch_adapters.versions.fsdp_groups import groups_of
from tests.support.shards import sharded, worker_of_cube, worker_of_mesh


class LostError(Exception):
    """A worker was lost, here and now."""


class Training:
    """Two blocks within a root; each accumulates two microbatches in a step."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.model: Any = nn.Sequential(self.blocks[0], nn.Tanh(), self.blocks[1], nn.Tanh())
        self.model.append(nn.Linear(4, 1))
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        for block in (*self.blocks, self.model):
            fully_shard(block, mesh=mesh, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.sharded = ShardedModels([self.model])

    def step(self, iteration: int) -> None:
        self.sharded.begin()
        for microbatch in range(2):
            self.model.set_requires_gradient_sync(microbatch == 1)
            x = torch.full((2, 4), 0.1 * (iteration + 1) + microbatch, requires_grad=True)
            self.model(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def interrupted_step(self, iteration: int, register: Callable[[Any], Any], calls: int) -> None:
        """The hook raises when it is called for the last time of some calls."""
        left = iter(range(calls - 1, -1, -1))

        def lose(*_: Any) -> None:
            if next(left) == 0:
                raise LostError

        handle = register(lose)
        with pytest.raises(LostError):
            self.step(iteration)
        handle.remove()
        self.sharded.reset()
        for parameter in self.model.parameters():
            parameter.grad = None

    def weights(self) -> list[torch.Tensor]:
        return [parameter.to_local().detach().clone() for parameter in self.model.parameters()]


PLACES: dict[str, Callable[[Training], Callable[[Any], Any]]] = {
    "forward, before a block": lambda t: t.blocks[1].register_forward_pre_hook,
    "forward, after a block": lambda t: t.blocks[0].register_forward_hook,
    "backward, before a block": lambda t: t.blocks[1].register_full_backward_pre_hook,
    "backward, after a block": lambda t: t.blocks[0].register_full_backward_pre_hook,
    "before the optimizer": lambda t: t.optimizer.register_step_pre_hook,
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("calls", [1, 2])
def test_an_interrupted_step_is_repeated(calls: int, place: str, reshard: bool, one_process: None) -> None:
    """In the first microbatch, and in the second, when gradients have been accumulated."""
    if "optimizer" in place and calls == 2:
        pytest.skip("it steps once")
    disturbed, straight = (Training(reshard_after_forward=reshard) for _ in range(2))
    for iteration in range(3):
        if iteration < 2:  # in its very first iteration, too
            disturbed.interrupted_step(iteration, PLACES[place](disturbed), calls)
        disturbed.step(iteration)
        straight.step(iteration)
    for one, other in zip(disturbed.weights(), straight.weights(), strict=True):
        assert torch.equal(one, other)


def test_a_validation_does_not_decide_what_a_backward_pass_gathers(one_process: None) -> None:
    """Or this worker would gather in another order than one that was replaced, or that was interrupted."""
    training = Training()
    training.step(0)
    with torch.no_grad():
        training.model(torch.ones(2, 4))
    shared = training.model._get_fsdp_state()._comm_ctx
    assert shared.post_forward_order
    training.sharded.begin()
    assert not shared.post_forward_order
    blocks: list[Any] = training.blocks
    groups = [group for block in blocks for group in groups_of(block._get_fsdp_state())]
    assert groups
    assert not any(group._post_forward_indices for group in groups)


def test_what_a_validation_gathered_is_sharded_again(one_process: None) -> None:
    """Or this worker would not take part when a replaced one gathers it."""
    training = Training()
    training.step(0)
    with torch.no_grad():
        training.model(torch.ones(1, 4))
    assert not all(hasattr(p, "to_local") for p in training.model.parameters())
    training.sharded.begin()
    assert all(hasattr(p, "to_local") for p in training.model.parameters())


def test_gradients_that_are_carried_over_are_refused(one_process: None) -> None:
    training = Training()
    training.sharded.begin()
    training.model.set_requires_gradient_sync(False)
    training.model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UnsupportedError, match="carried over from one step to the next"):
        training.sharded.begin()


def test_who_holds_which_shard() -> None:
    places = []
    for rank in range(6):
        with worker_of_mesh(rank=rank, replicas=3, shards=2) as mesh:
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            fully_shard(model, mesh=mesh)
            places.append((place_of([model]), replicas_of([model])))
            assert ShardedModels([model]).number == rank
    assert places == [(f"shard {rank % 2} of 2", [rank % 2, rank % 2 + 2, rank % 2 + 4]) for rank in range(6)]


def test_parameters_over_axes_of_their_own_have_no_replicas() -> None:
    """Eight workers in a cube, and three parameters: each axis shards another one."""
    places, replicas = set(), []
    for rank in range(8):
        with worker_of_cube(rank) as mesh:
            model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
            for axis, layer in enumerate(model):
                placements = [Shard(0) if axis == dimension else Replicate() for dimension in range(3)]
                part = DTensor.from_local(torch.ones(1, 2), mesh, placements, run_check=False)
                layer.register_parameter("weight", nn.Parameter(part))
            places.add(place_of([model]))
            replicas.append(replicas_of([model]))
    assert len(places) == 8
    assert replicas == [[rank] for rank in range(8)]


def test_shards_that_fsdp_did_not_make() -> None:
    with worker_of_mesh(rank=3) as mesh:
        model = nn.Linear(3, 4)
        model.weight = nn.Parameter(sharded(torch.ones(4, 3), mesh))
        assert place_of([model]) == "shard 1 of 2"
        assert not is_sharded(model)
        assert not ShardedModels([model])
        assert ShardedModels([model]).number == 0


def test_without_shards() -> None:
    model = nn.Linear(2, 2)
    assert place_of([model]) == ""
    assert replicas_of([model]) == []
    assert not is_sharded(model)


def test_a_sharded_model_is_no_ddp_model(one_process: None) -> None:
    with pytest.raises(UnsupportedError, match=r"session\.attach_fsdp"):
        DataParallelHook(Training().model, lambda _: None, lambda _: None)


def test_the_older_wrapper_is_refused() -> None:
    old = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)
    with pytest.raises(
        UnsupportedError, match=r"shard it with torch\.distributed\.fsdp\.fully_shard"
    ) as refused:
        refuse_wrapped_shards("The state's 'model'", nn.Sequential(old))
    assert "\n" not in str(refused.value)
    refuse_wrapped_shards("The optimizer", torch.optim.SGD([torch.zeros(1)], 0.1))
