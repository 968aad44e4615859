"""Worker 0 writes the layers of all stages once every worker has measured its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.config.worker_context import WorkerContext
from swift_ft.costs.layer_profile import LayerProfile, read_layers
from swift_ft.network import JobSecret
from swift_ft.runtime.elastic.layer_profiler import LayerProfiler, joined
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.writers import AtOnce


def profilers(out: Path) -> list[tuple[LayerProfiler, nn.Module]]:
    """Of two workers with a stage each."""
    held = HashStore()
    store = RendezvousStore(lambda: held)
    made: list[tuple[LayerProfiler, nn.Module]] = []
    for rank in range(2):
        context = WorkerContext(
            run_id="run",
            store=StoreAddress.tcp("localhost", 1),
            machine=f"machine{rank}",
            address="localhost",
            agent_pid=1,
            rank=rank,
            world_size=2,
            workers_per_machine=1,
            started_in=1,
            config=RunConfig(),
            secret=JobSecret.generated(),
        )
        stage = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        profiler = LayerProfiler(context, store, AtOnce(store), TrainingState({"model": stage}), out)
        profiler.attach({rank: stage})
        made.append((profiler, stage))
    return made


def train(profiler: LayerProfiler, stage: nn.Module, iterations: int) -> None:
    for _ in range(iterations):
        stage(torch.ones(4, 8)).sum().backward()
        profiler.add()


def test_the_layers_of_all_stages_are_written(tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    (first, one), (second, other) = profilers(out)
    train(first, one, 6)
    assert not out.exists(), "the other worker has not measured yet"
    train(second, other, 5)
    first.close(30)
    layers = read_layers(out)
    assert [layer.name for layer in layers] == ["0.0", "0.1", "1.0", "1.1"]
    assert all(layer.forward_ns and layer.backward_ns and layer.activation_bytes for layer in layers)
    assert {layer.state_bytes for layer in layers} == {2 * 4 * 72}


def test_a_run_that_is_too_short_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "layers.json"
    (first, one), (second, other) = profilers(out)
    train(first, one, 4)
    train(second, other, 4)
    for profiler in (first, second):
        profiler.close(30)
    assert not out.exists()
    (record,) = caplog.records
    assert f"{out} was not written: it takes 5 iterations" in record.getMessage()


def test_shared_layers_keep_their_place() -> None:
    stage = [LayerProfile(1, 1, 1), LayerProfile(1, 1, 1, shared_with=0)]
    assert [layer.shared_with for layer in joined({0: stage, 1: stage})] == [None, 0, None, 2]


def test_a_file_that_cannot_be_written_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = profilers(tmp_path / "gone" / "layers.json")
    for profiler, stage in reversed(workers):
        train(profiler, stage, 6)
    workers[0][0].close(30)
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["profile_not_written"]
