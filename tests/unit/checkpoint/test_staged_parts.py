"""Shards in the stages of a pipeline are loaded into other shards and other stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.stages import StagesHere
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import TopologyMismatchError
from swift_ft.storage.store import Store
from swift_ft.torch_core.shards import describe, local
from tests.support.shards import worker_of_mesh

IN, INNER = 6, 8
LAYERS = 4


class Layer(nn.Module):
    """A layer of the model whose every element says which layer it is of."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, INNER, bias=False), nn.Linear(INNER, IN, bias=False)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(100.0 * number + torch.arange(parameter.numel()).view(parameter.shape))


def stage_of(numbers: Sequence[int], *, by_model: bool, scale: float = 1.0) -> nn.Module:
    """A stage with some layers, named as in the whole model, or from 0 on in each stage."""
    layers = [Layer(number) for number in numbers]
    stage: nn.Module = nn.Sequential(*layers)
    if by_model:
        stage = nn.ModuleDict({str(number): layer for number, layer in zip(numbers, layers, strict=True)})
    for parameter in stage.parameters():
        parameter.data.mul_(scale)
    return stage


def divided(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The layers of a stage, by tensor parallelism."""
    assert mesh.mesh_dim_names is not None
    parts = mesh[mesh.mesh_dim_names[1]]
    for layer in stage.children():
        whole = {name: p.detach().clone() for name, p in layer.named_parameters()}
        parallelize_module(layer, parts, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for name, parameter in layer.named_parameters():  # torch's own scatter is a fake here
            box = describe(parameter)
            assert box is not None
            begin, size = box["offset"], local(parameter).shape
            here = tuple(slice(a, a + n) for a, n in zip(begin, size, strict=True))
            local(parameter).data.copy_(whole[name][here])


def state_of(stage: nn.Module, number: int, stages: int) -> TrainingState:
    """After a step that changes nothing but the optimizer's moments."""
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.0, weight_decay=0.0)
    state = TrainingState({"model": stage, "optimizer": optimizer})
    state.stages = StagesHere((number,), stages)
    for parameter in stage.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return state


def cut(stages: int) -> list[list[int]]:
    each = LAYERS // stages
    return [[*range(first, first + each)] for first in range(0, LAYERS, each)]


def save(folder: CheckpointFolder, stages: int, parts: int, *, by_model: bool) -> None:
    """Each worker of a pipeline writes its part."""
    paths, digests = {}, {}
    for rank in range(stages * parts):
        with worker_of_mesh(rank=rank, replicas=stages, shards=parts) as mesh:
            stage = stage_of(cut(stages)[rank // parts], by_model=by_model)
            divided(stage, mesh)
            paths[rank] = folder.part(20, rank, 1)
            checkpointer = Checkpointer(folder, state_of(stage, rank // parts, stages))
            saved = list[str]()
            checkpointer.save(20, paths[rank], saved.append)
            assert checkpointer.wait(30)
            digests[paths[rank]] = saved[0]
    folder.commit(20, paths, "run", digests)


def load(folder: CheckpointFolder, rank: int, stages: int, parts: int, *, by_model: bool) -> Any:
    """What a worker has afterwards, and what it should have, by name."""
    with worker_of_mesh(rank=rank, replicas=stages, shards=parts) as mesh:
        numbers = cut(stages)[rank // parts]
        found = []
        for scale in (0.0, 1.0):
            stage = stage_of(numbers, by_model=by_model, scale=scale)
            divided(stage, mesh)
            state = state_of(stage, rank // parts, stages)
            if not scale:
                Checkpointer(folder, state).load(20, rank, workers=stages * parts)
            found.append({name: local(tensor).clone() for name, tensor in state.named_tensors().items()})
        return found


@pytest.mark.parametrize("by_model", [True, False])
@pytest.mark.parametrize("parts", [1, 4])
def test_as_many_stages(by_model: bool, parts: int, tmp_path: Path) -> None:
    """A stage's tensors are those of that stage, also where both stages name them alike."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    save(folder, 2, 2, by_model=by_model)
    for rank in range(2 * parts):
        loaded, expected = load(folder, rank, 2, parts, by_model=by_model)
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), (rank, name)


@pytest.mark.parametrize(("stages", "parts"), [(1, 2), (1, 1), (4, 1), (4, 2)])
def test_another_number_of_stages(stages: int, parts: int, tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    save(folder, 2, 2, by_model=True)
    for rank in range(stages * parts):
        loaded, expected = load(folder, rank, stages, parts, by_model=True)
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), (rank, name)


def test_names_that_two_stages_have_are_refused(tmp_path: Path) -> None:
    """Nobody can say which of the two it is."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    save(folder, 2, 2, by_model=False)
    same = r"model\.0\.up\.weight is in stage 0 of 2 and in stage 1 of 2, with other values"
    with pytest.raises(TopologyMismatchError, match=same):
        load(folder, 0, 4, 1, by_model=False)
