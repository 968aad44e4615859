"""State of an optimizer comes with the memory format of its parameter, whichever way it comes.

A fused step reads a parameter and its state by their places in memory, so it gives wrong weights if the two
have other formats.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.layered_state import LayeredState
from swift_ft.checkpoint.memory_copy import load_block, write_block
from swift_ft.checkpoint.sliced_part import SlicedPart, load_slices
from swift_ft.checkpoint.state_payload import StatePayload, pack, unpack
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.runtime.replicas.payloads import parameters_payload, put_parameters
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.layer_stack import LayerStack

DEADLINE_S = 60.0


class Contiguous(torch.optim.AdamW):
    """Makes its state contiguous, whatever its parameters are."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros(())
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][name] = torch.zeros(parameter.shape)
        return super().step(closure)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def contiguous(parameters: Any) -> torch.optim.Optimizer:
    return Contiguous(parameters, lr=0.01)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS = pytest.mark.parametrize("make", [fused, contiguous])


def build(number: int) -> nn.Module:
    return nn.Conv2d(4, 4, 3)


class Job:
    """A stack of one worker, which has all layers, and its optimizer."""

    def __init__(self, make: Make, channels_last: bool = True) -> None:
        torch.manual_seed(0)
        self.model = LayerStack(build, 2)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its types
        self.optimizer = make(self.model.parameters())
        self.state = TrainingState({"model": self.model, "optimizer": self.optimizer})
        self.steps = 0

    def train(self, steps: int) -> None:
        """With gradients that do not depend on the memory format, as those of a convolution do."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.steps)
            for parameter in self.model.parameters():
                parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
            self.optimizer.step()
            self.steps += 1

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    def strides(self) -> list[Any]:
        held = [*self.weights()]
        held += [t for one in self.model.parameters() for t in self.optimizer.state[one].values()]
        return [tensor.stride() for tensor in held]


Way = Callable[[Job, Job, Path], None]


def by_memory(source: Job, other: Job, _: Path) -> None:
    load_block(other.state, write_block(source.state, None))


def by_replica(source: Job, other: Job, _: Path) -> None:
    indices = range(len(source.state.parameters))
    put_parameters(other.state, indices, sent(parameters_payload(source.state, indices)))


def by_store(source: Job, other: Job, place: Path) -> None:
    Checkpointer(committed(source, place), other.state).load(20, 0)


def by_layers_of_a_checkpoint(source: Job, other: Job, place: Path) -> None:
    Checkpointer(committed(source, place), other.state).load(20, 0, (2,))


def by_slices(source: Job, other: Job, place: Path) -> None:
    folder = committed(source, place)
    load_slices({0: SlicedPart(folder.reader(folder.part_of(20, 0)))}, 0, other.state)


def by_layers(source: Job, other: Job, _: Path) -> None:
    layers = [*LayeredState(source.state).layers]
    arrived = sent(LayeredState(source.state).take(layers, rest=True))
    LayeredState(other.state).give_whole((2,), [arrived])


def by_older_checkpoint(source: Job, other: Job, _: Path) -> None:
    """Earlier versions kept no strides."""
    saved = source.state.to_save()
    plain = unpack(saved["plain"]["bytes"].getvalue())
    for name in ("order", "strides"):
        plain["optimizers"]["optimizer"].pop(name, None)
    payload = sent(StatePayload.of(saved))
    loaded = other.state.to_load(payload.kinds)
    for (first, *path, last), tensor in payload.tensors.items():
        inner = loaded[first]
        for key in path:
            inner = inner[key]
        if first == "models":
            inner[last].detach().copy_(tensor)
        else:
            inner[last] = tensor
    loaded["plain"]["bytes"] = io.BytesIO(pack(plain))
    assert not other.state.take_over(loaded)


def sent(payload: StatePayload) -> StatePayload:
    """As it arrives: contiguous."""
    tensors = {
        path: tensor.detach().clone(memory_format=torch.contiguous_format)
        for path, tensor in payload.tensors.items()
    }
    return StatePayload(tensors, payload.plain)


def committed(job: Job, place: Path) -> CheckpointFolder:
    folder = CheckpointFolder(Store(str(place)))
    path = folder.part(20, 0, 1)
    saved: list[str] = []
    checkpointer = Checkpointer(folder, job.state)
    checkpointer.save(20, path, saved.append)
    assert checkpointer.wait(DEADLINE_S)
    folder.commit(20, {0: path}, "run", {path: saved[0]}, {0: LayeredState(job.state).layers})
    return folder


WAYS: list[Way] = [by_memory, by_replica, by_store, by_layers_of_a_checkpoint, by_slices, by_layers]


@OPTIMIZERS
@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_came_trains_on_as_at_its_source(
    way: Way, make: Make, as_worker: Callable[..., None], tmp_path: Path
) -> None:
    as_worker(0, 1)
    source, other = Job(make), Job(make)
    source.train(2)
    way(source, other, tmp_path)
    other.steps = 2
    assert other.strides() == source.strides()
    for job in (source, other):
        job.train(3)
    assert all(map(torch.equal, other.weights(), source.weights()))


@pytest.mark.parametrize("way", [by_older_checkpoint, *WAYS])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_script_with_another_memory_format(
    way: Way, channels_last: bool, as_worker: Callable[..., None], tmp_path: Path
) -> None:
    """A checkpoint of a model with ``channels_last`` is resumed without it, and the other way round."""
    as_worker(0, 1)
    for here in (channels_last, not channels_last):
        source, other = Job(fused, channels_last), Job(fused, here)
        source.train(2)
        way(source, other, tmp_path / str(here))
        other.steps = 2
        for job in (source, other):
            job.train(3)
        for ours, theirs in zip(other.weights(), source.weights(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", ["one", "next"])
def test_a_state_says_of_which_run_it_is(
    run: str, way: Way, as_worker: Callable[..., None], tmp_path: Path
) -> None:
    """What workers give each other is of their own run."""
    as_worker(0, 1)
    source, other = Job(fused), Job(fused)
    source.state.run, other.state.run = "one", run
    source.train(2)
    way(source, other, tmp_path)
    given = way in (by_replica, by_layers)
    assert other.state.of_earlier_run == (run == "next" and not given)
