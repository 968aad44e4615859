"""That a parameter has a gradient between two steps, if only zeros, is saved and handed over.

An optimizer moves such a parameter by its decay and its momentum, and skips one without a gradient.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.layered_state import LayeredState
from swift_ft.checkpoint.memory_copy import Block, load_block, payload_of, write_block
from swift_ft.checkpoint.state_payload import pack, unpack
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_core.shards import local
from tests.support.shards import worker_of_mesh


class Process:
    """Trains a body with heads in turn. What a step zeroes first of all has a gradient ever after."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)])
        model = nn.ModuleList([self.body, self.heads])
        self.optimizer = optimizer(model.parameters(), lr=0.1)
        self.state = TrainingState({"model": model, "optimizer": self.optimizer})

    def train(self, begin: int, end: int) -> None:
        for iteration in range(begin, end):
            self.optimizer.zero_grad(set_to_none=False)
            x = torch.full((2, 4), float(iteration + 1))
            self.heads[iteration % 3](self.body(x)).square().mean().backward()
            self.optimizer.step()

    def gradients(self) -> list[bool]:
        return [head.weight.grad is not None for head in self.heads]

    def same_as(self, other: Process) -> bool:
        ours, theirs = self.state.named_tensors(), other.state.named_tensors()
        return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, momentum])
@pytest.mark.parametrize("before", [1, 2, 5])
def test_a_replacement_trains_on_alike(before: int, optimizer: Any) -> None:
    undisturbed, new = Process(optimizer), Process(optimizer)
    undisturbed.train(0, before)
    load_block(new.state, write_block(undisturbed.state, None))
    assert new.gradients() == undisturbed.gradients()
    assert not any(p.grad.any() for _, p in new.state.parameters if p.grad is not None)
    undisturbed.train(before, 7)
    new.train(before, 7)
    assert new.same_as(undisturbed)


def test_a_survivor_goes_back_to_before_the_first_use() -> None:
    undisturbed, survivor = Process(), Process()
    undisturbed.train(0, 4)
    survivor.train(0, 2)
    block = write_block(survivor.state, None)
    survivor.train(2, 3)
    load_block(survivor.state, block)
    assert survivor.gradients() == [True, True, False]
    survivor.train(2, 4)
    assert survivor.same_as(undisturbed)


def test_a_state_of_an_earlier_version_says_nothing_of_them() -> None:
    process = Process()
    process.train(0, 1)
    block = write_block(process.state, None)
    payload = payload_of(Block(block.data, block.length))
    plain = unpack(payload.plain)
    del plain["gradients"]
    process.train(1, 2)
    filled = process.state.to_load(payload.kinds)
    filled["plain"]["bytes"] = io.BytesIO(pack(plain))
    process.state.take_over(filled)
    assert process.gradients() == [True, True, False]


def test_sparse_gradients() -> None:
    def embedding() -> tuple[nn.Embedding, TrainingState]:
        model = nn.Embedding(8, 2, sparse=True)
        optimizer = torch.optim.SparseAdam([*model.parameters()], lr=0.1)
        return model, TrainingState({"model": model, "optimizer": optimizer})

    (model, state), (new, state_of_new) = embedding(), embedding()
    model(torch.tensor([1, 3])).sum().backward()
    load_block(state_of_new, write_block(state, None))
    new(torch.tensor([1, 3])).sum().backward()
    assert model.weight.grad is not None
    assert new.weight.grad is not None
    assert new.weight.grad.is_sparse
    assert torch.equal(new.weight.grad.to_dense(), model.weight.grad.to_dense())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have their parameter's dtype")
def test_gradients_of_another_dtype() -> None:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    model.weight.grad = torch.ones(1, 2)
    state = TrainingState({"model": model})
    load_block(state, write_block(state, None))
    assert model.weight.grad.dtype == torch.float32
    assert not model.weight.grad.any()


WHICH = {"0.bias", "2.weight"}
"""Of three layers."""


def made(model: nn.Module, which: set[str]) -> TrainingState:
    """A state of which some parameters have a gradient."""
    for name, parameter in model.named_parameters():
        if name in which:
            parameter.grad = torch.ones_like(parameter)
    return TrainingState({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})


def with_gradients(state: TrainingState) -> set[str]:
    """Names of the parameters that have one, all zeros."""
    named = dict(state.modules["model"].named_parameters())
    found = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    assert not any(local(gradient).any() for gradient in found.values())
    assert all(
        getattr(g, "placements", None) == getattr(named[n], "placements", None) for n, g in found.items()
    )
    return {*found}


def save(folder: CheckpointFolder, rank: int, state: TrainingState) -> tuple[str, str]:
    """Write a worker's part. Its path and its digest."""
    path, saved = folder.part(20, rank, 1), list[str]()
    checkpointer = Checkpointer(folder, state)
    checkpointer.save(20, path, saved.append)
    assert checkpointer.wait(30)
    return path, saved[0]


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("then", [2, 3])
def test_of_shards(then: int, tmp_path: Path) -> None:
    """Of as many workers as before, and of more."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    parts = {}
    for rank in range(2):
        with worker_of_mesh(rank=rank, replicas=1, shards=2) as mesh:
            parts[rank] = save(folder, rank, made(sharded(mesh), WHICH))
    folder.commit(20, {rank: path for rank, (path, _) in parts.items()}, "run", dict(parts.values()))
    for rank in range(then):
        with worker_of_mesh(rank=rank, replicas=1, shards=then) as mesh:
            state = made(sharded(mesh), {"0.weight"})
            Checkpointer(folder, state).load(20, rank, workers=then)
            assert with_gradients(state) == WHICH


def stack() -> LayerStack:
    return LayerStack(lambda _: nn.Linear(3, 3), 3)


def test_of_layers_of_another_layout(as_worker: Callable[[int, int], None], tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    parts, layers = {}, {}
    for rank in range(3):
        as_worker(rank, 3)
        state = made(stack(), WHICH)
        parts[rank], layers[rank] = save(folder, rank, state), LayeredState(state).layers
    folder.commit(20, {rank: path for rank, (path, _) in parts.items()}, "run", dict(parts.values()), layers)
    found = set()
    for rank in range(2):
        as_worker(rank, 2)
        state = made(stack(), {"0.weight", "1.weight", "2.weight"})
        Checkpointer(folder, state).load(20, rank, (1, 2))
        found |= with_gradients(state)
    assert found == WHICH


@pytest.mark.parametrize("whole", [False, True])
def test_of_layers_that_move(whole: bool, as_worker: Callable[[int, int], None]) -> None:
    """What comes has the gradients that it had. A layer that stays keeps its own."""
    payloads = []
    for rank in range(2, 0, -1):
        as_worker(rank, 3)
        payloads.append(LayeredState(made(stack(), WHICH)).take([rank], rest=whole))
    as_worker(0, 3)
    state = made(stack(), {"0.weight"})
    own = state.modules["model"].get_parameter("0.weight").grad
    assert own is not None
    own.zero_()
    layered = LayeredState(state)
    layered.prepare((3, 0, 0), payloads)
    if whole:
        layered.give_whole((3, 0, 0), payloads)
    else:
        layered.give((3, 0, 0), payloads)
    assert with_gradients(state) == {"0.weight", "2.weight"}
