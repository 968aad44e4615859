"""The state of a worker whose parameters are shards: saved, sent and taken over without the other workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.completeness import Completeness
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.part_loading import PartLoader
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.state_payload import TensorKind, tensor_at, tensors_in
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import TopologyMismatchError
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.store import Store
from swift_ft.torch_core.shards import local
from tests.support.shards import worker_of_mesh


class Training:
    """One worker's shards, trained with gradients of its own."""

    def __init__(self, mesh: Any, seed: int, optimizer: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.state = TrainingState({"model": self.model, "optimizer": self.optimizer})
        for step in range(2):
            for index, parameter in enumerate(self.model.parameters()):
                parameter.grad = torch.full_like(parameter, float(seed + step + index))
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def digests(self) -> dict[str, int]:
        return tensor_digests(self.state.named_tensors())


def taken_over(source: Training, target: Training, aside: bool) -> list[str]:
    """As from one replica to another."""
    saved = source.state.to_save(source.digests)
    tensors = dict(tensors_in(saved))
    filled = target.state.to_load({p: TensorKind.of(t) for p, t in tensors.items()}, aside=aside)
    for path, tensor in tensors.items():
        tensor_at(filled, path).copy_(tensor)
    filled["plain"]["bytes"] = saved["plain"]["bytes"]
    return target.state.take_over(filled)


@pytest.mark.parametrize("rank", [0, 1], ids=["the larger shard", "the smaller shard"])
@pytest.mark.parametrize("aside", [False, True])
def test_a_replica_takes_over_shards(aside: bool, rank: int) -> None:
    with worker_of_mesh(rank=rank) as mesh:
        source, target = Training(mesh, 1), Training(mesh, 2)
        places = {name: local(p).data_ptr() for name, p in target.model.named_parameters()}
        assert source.digests != target.digests
        with CommDebugMode() as communication:
            assert taken_over(source, target, aside) == []
        assert communication.get_total_counts() == 0
        assert source.digests == target.digests
        for name, parameter in target.model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert local(parameter).data_ptr() == places[name]  # FSDP keeps a padded buffer behind it
            moment = target.optimizer.state[parameter]["exp_avg"]
            assert isinstance(moment, DTensor)
            assert moment.placements == parameter.placements
            assert moment.shape == parameter.shape


def test_what_is_saved_has_no_distributed_tensors() -> None:
    with worker_of_mesh() as mesh:
        for _, tensor in tensors_in(Training(mesh, 1).state.to_save()):
            assert not isinstance(tensor, DTensor)


def test_another_worker_s_shard_is_refused() -> None:
    with worker_of_mesh(rank=2, replicas=1, shards=4) as mesh:
        saved = Training(mesh, 1).state.to_save()
    with worker_of_mesh(rank=1, replicas=1, shards=4) as mesh:
        training = Training(mesh, 2)
        tensors = dict(tensors_in(saved))
        filled = training.state.to_load({p: TensorKind.of(t) for p, t in tensors.items()}, aside=True)
        filled["plain"]["bytes"] = saved["plain"]["bytes"]
        with pytest.raises(
            TopologyMismatchError, match=r"model.0.weight is the part at \[4, 0\] of the shape"
        ):
            training.state.take_over(filled)


def test_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    """Each worker's part is written and read without any other worker."""
    with worker_of_mesh() as mesh:
        saved, loaded = Training(mesh, 1), Training(mesh, 2)
        store = Store(str(tmp_path))
        folder = CheckpointFolder(store)
        with CommDebugMode() as communication:
            writer = Checkpointer(folder, saved.state)
            digests: list[str] = []
            writer.save(1, "part", digests.append, saved.digests)
            assert writer.wait(30)
            PartLoader(folder, None, loaded.state)._load_part(SavedPart("part", *digests))
        assert communication.get_total_counts() == 0
        assert saved.digests == loaded.digests


def test_a_step_begins_and_goes_back_without_communication() -> None:
    with worker_of_mesh() as mesh:
        training = Training(mesh, 1)
        rollback, completeness = Rollback(training.state), Completeness(training.state)
        with CommDebugMode() as communication:
            completeness.attach("the model", training.model)
            for iteration in range(3):
                completeness.begin()
                for parameter in training.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                rollback.begin(iteration)
                rollback.back()
                completeness.completed()
        assert communication.get_total_counts() == 0
