"""A checkpoint of one sharding is loaded in another one, range by range."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.sliced_part import _carried
from swift_ft.checkpoint.state_payload import StatePath, TensorKind
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError, TopologyMismatchError
from swift_ft.storage.store import Store
from swift_ft.torch_core.shards import describe, local
from tests.support.shards import worker_of_mesh

IN, INNER, OUT = 6, 8, 5


def whole_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, INNER), nn.ReLU(), nn.Linear(INNER, OUT))


def by_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def by_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh[mesh.mesh_dim_names[1]], style)  # type: ignore[index]


def by_both(model: nn.Module, mesh: DeviceMesh) -> None:
    """Rows that tensor parallelism has, FSDP divides once more."""
    replicas, shards = mesh.mesh_dim_names or ()
    parallelize_module(model.get_submodule("0"), mesh[shards], ColwiseParallel())
    fully_shard(model, mesh=mesh[replicas])


def not_at_all(model: nn.Module, mesh: DeviceMesh) -> None:
    """One worker, which has everything."""


def trained(model: nn.Module, steps: int) -> TrainingState:
    """A state whose every element says what it belongs to."""
    for parameter, like in zip(model.parameters(), whole_model(1).parameters(), strict=False):
        box, values = describe(parameter), local(parameter).detach()  # torch's own scatter is a fake here
        if box is not None and like.shape == torch.Size(box["shape"]):
            here = zip(box["offset"], values.shape, strict=True)
            values.copy_(like.detach()[tuple(slice(a, a + size) for a, size in here)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainingState({"model": model, "optimizer": optimizer})
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            own, box = local(parameter), describe(parameter)
            shape = torch.Size(box["shape"]) if box is not None else own.shape
            whole = torch.arange(shape.numel(), dtype=torch.float32).view(shape) / 7 + number + step
            at = box["offset"] if box is not None else [0] * own.dim()
            ranges = tuple(slice(a, a + size) for a, size in zip(at, own.shape, strict=True))
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(whole[ranges])
        optimizer.step()
        optimizer.zero_grad()
    return state


def tensors_of(state: TrainingState) -> dict[str, tuple[list[int], torch.Tensor]]:
    """What a worker has, by name, and where it begins in the whole."""
    found = {}
    for name, tensor in state.named_tensors().items():
        box = describe(tensor)
        begin = box["offset"] if box is not None else [0] * tensor.dim()
        found[name] = (begin, local(tensor).detach().clone())
    return found


def save(folder: CheckpointFolder, how: Any, replicas: int, shards: int) -> None:
    """Each worker of a mesh writes its part; of replicas the first."""
    parts, digests = {}, {}
    for rank in range(replicas * shards):
        with worker_of_mesh(rank=rank, replicas=replicas, shards=shards) as mesh:
            owner = rank % shards
            path = folder.part(20, owner, 1)
            parts[rank] = path
            if rank != owner:
                continue
            model = whole_model(1)
            how(model, mesh)
            checkpointer, saved = Checkpointer(folder, trained(model, 3)), list[str]()
            checkpointer.save(20, path, saved.append)
            assert checkpointer.wait(30)
            digests[path] = saved[0]
    folder.commit(20, parts, "run", digests)


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[list[int], torch.Tensor]]:
    return tensors_of(trained(whole_model(1), 3))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((by_fsdp, 1, 2), (by_fsdp, 1, 3)),
        ((by_fsdp, 1, 4), (by_fsdp, 1, 2)),
        ((by_fsdp, 2, 2), (by_fsdp, 1, 3)),
        ((by_fsdp, 1, 2), (by_fsdp, 1, 7)),  # some have nothing of some tensors
        ((by_fsdp, 1, 3), (not_at_all, 1, 1)),
        ((not_at_all, 1, 1), (by_fsdp, 1, 3)),
        ((by_tensor_parallelism, 1, 2), (by_tensor_parallelism, 1, 4)),
        ((by_tensor_parallelism, 1, 2), (not_at_all, 1, 1)),
        ((by_tensor_parallelism, 1, 4), (by_tensor_parallelism, 1, 2)),
        ((by_tensor_parallelism, 1, 2), (by_fsdp, 1, 3)),
        ((by_tensor_parallelism, 1, 4), (by_fsdp, 1, 4)),
        ((by_fsdp, 2, 2), (by_fsdp, 1, 4)),  # as many workers
        ((by_fsdp, 1, 4), (by_fsdp, 2, 2)),
        ((by_fsdp, 1, 3), (by_both, 2, 2)),
    ],
)
def test_every_range_is_what_was_saved(first: Any, then: Any, expected: Any, tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    save(folder, *first)
    how, replicas, shards = then
    for rank in range(replicas * shards):
        with worker_of_mesh(rank=rank, replicas=replicas, shards=shards) as mesh:
            model = whole_model(2)
            how(model, mesh)
            state = trained(model, 1)
            Checkpointer(folder, state).load(20, rank, workers=replicas * shards)
            found = tensors_of(state)
            assert found.keys() == expected.keys()
            for name, (begin, values) in found.items():
                _, whole = expected[name]
                ranges = tuple(slice(a, a + size) for a, size in zip(begin, values.shape, strict=True))
                assert torch.equal(values, whole[ranges]), name


def test_before_the_first_step_optimizers_have_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    save(folder, by_fsdp, 1, 2)
    with worker_of_mesh(rank=1, replicas=1, shards=3) as mesh:
        model = whole_model(2)
        by_fsdp(model, mesh)
        state = trained(model, 0)
        Checkpointer(folder, state).load(20, 1, workers=3)
        (optimizer,) = state.optimizers.values()
        assert all("exp_avg" in optimizer.state[p] for p in model.parameters())


def test_another_model(tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    save(folder, by_fsdp, 1, 2)
    with worker_of_mesh(rank=0, replicas=1, shards=3) as mesh:
        wider = nn.Sequential(nn.Linear(IN, INNER + 1), nn.ReLU(), nn.Linear(INNER + 1, OUT))
        by_fsdp(wider, mesh)
        shapes = r"model\.0\.weight has the shape \(8, 6\) there and the shape \(9, 6\) here"
        with pytest.raises(TopologyMismatchError, match=shapes):
            Checkpointer(folder, trained(wider, 0)).load(20, 0, workers=3)
        longer = nn.Sequential(*whole_model(1), nn.Linear(OUT, OUT))
        with pytest.raises(TopologyMismatchError, match=r"model\.3\.weight has no tensor there"):
            Checkpointer(folder, trained(longer, 0)).load(20, 0, workers=3)


def test_a_part_is_missing(tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    save(folder, by_fsdp, 1, 3)
    one, two = folder.part(20, 0, 1), folder.part(20, 1, 1)
    digests = {part.path: part.digest for part in folder.parts_of(20).values()}
    folder.commit(20, {0: one, 1: two}, "run", digests)
    state = trained(whole_model(2), 0)
    with pytest.raises(CheckpointError, match="do not cover"):
        Checkpointer(folder, state).load(20, 0, workers=1)


def test_variables_of_modules_that_only_another_part_has() -> None:
    """Of three stages two become one: what the script has changed in a block comes with its tensors."""

    def part(block: str, **carried: dict[str, Any]) -> Any:
        kinds = {("models", "model", f"{block}.weight"): TensorKind(torch.float32, (1,))}
        return SimpleNamespace(kinds=kinds, plain={"carried": carried})

    flags = {"(requires_grad)": {"model.block1.weight": True}}
    first = part("block0", scale={"value": 1}, **{"model.block0.dropout": {"p": 0.1}})
    second = part("block1", scale={"value": 2}, **{"model.block1.dropout": {"p": 0.2}}, **flags)
    third = part("block2", **{"model.block2.dropout": {"p": 0.3}})
    parts = {0: first, 1: second, 2: third}
    here: list[StatePath] = [("models", "model", f"block{number}.weight") for number in range(2)]
    of_blocks = {**first.plain["carried"], "model.block1.dropout": {"p": 0.2}, **flags}
    assert _carried(parts, 0, here) == of_blocks
    del of_blocks["scale"]  # which is each worker's own
    assert _carried(parts, 2, here) == of_blocks
