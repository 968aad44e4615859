"""An optimizer's state is loaded as it was saved, where torch gives it the dtype of the parameters."""

from __future__ import annotations

import copy
import threading
from collections import deque, namedtuple
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.memory_copy import load_block, write_block
from swift_ft.checkpoint.optimizer_groups import load_optimizer
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import RecoveryError, UnsupportedError
from swift_ft.optim import wrap_optimizer
from swift_ft.storage.store import Store
from swift_ft.torch_core.tensors import same_values

DEADLINE_S = 60.0


class Own(Optimizer):
    """As many that people write: its state is float32 beside whatever parameters, and in containers, too."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["average"] = torch.zeros(p.shape)
                    s["factors"] = [torch.zeros(p.shape), torch.zeros(p.shape)]
                    s["latest"], s["kind"], s["shape"] = deque(maxlen=2), "plain", p.shape
                    s["seen"] = torch.zeros((), dtype=torch.int64)
                for average in (s["average"], *s["factors"]):
                    average.lerp_(p.grad.float(), 1 / 3)
                s["seen"] += 257  # is no number of bfloat16
                s["latest"].append(s["average"].mean())
                p -= group["lr"] * s["average"].to(p.dtype)


def nadam(model: nn.Module) -> Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=0.1)


def undoable_nadam(model: nn.Module) -> Optimizer:
    optimizer = nadam(model)
    wrap_optimizer(optimizer)
    return optimizer


def asgd(model: nn.Module) -> Optimizer:
    return torch.optim.ASGD(model.parameters(), lr=0.1, t0=0)


def own(model: nn.Module) -> Optimizer:
    return Own(model.parameters())


class Worker:
    """A model of bfloat16 and its optimizer."""

    def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 4).bfloat16()
        self.optimizer = make(self.model)
        self.state = TrainingState({"model": self.model, "optimizer": self.optimizer})

    def train(self, steps: int) -> None:
        for step in range(steps):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
            self.optimizer.zero_grad()
            self.model(x).square().sum().backward()
            self.optimizer.step()

    def values(self) -> dict[Any, Any]:
        return copy.deepcopy(self.optimizer.state_dict()["state"])


def assert_same(found: Any, expected: Any) -> None:
    """Of the same types, dtypes and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple | deque):
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def by_memory(worker: Worker, into: Worker, _: Path) -> None:
    block = write_block(worker.state, None)
    worker.train(1)
    load_block(into.state, block)


def by_store(worker: Worker, into: Worker, place: Path) -> None:
    folder, durable, saved = CheckpointFolder(Store(str(place))), threading.Event(), list[str]()
    path = folder.part(10, 0, 1)

    def note(digest: str) -> None:
        saved.append(digest)
        durable.set()

    checkpointer = Checkpointer(folder, worker.state)
    checkpointer.save(10, path, note, tensor_digests(worker.state.named_tensors()))
    assert durable.wait(DEADLINE_S)
    folder.commit(10, {0: path}, "run", {path: saved[0]})
    worker.train(1)
    Checkpointer(folder, into.state).load(10, 0)


@pytest.mark.parametrize("way", [by_memory, by_store])
@pytest.mark.parametrize("same_process", [True, False])
@pytest.mark.parametrize("make", [nadam, undoable_nadam, asgd, own])
def test_values_come_back_as_they_were(
    make: Callable[[nn.Module], Optimizer],
    same_process: bool,
    way: Callable[[Worker, Worker, Path], None],
    tmp_path: Path,
) -> None:
    worker = Worker(make)
    worker.train(2)
    before = worker.values()
    floats = [v for s in before.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert any(tensor.dtype == torch.float32 for tensor in floats)
    into = worker if same_process else Worker(make)
    way(worker, into, tmp_path)
    assert_same(into.values(), before)
    into.train(1)  # and it goes on


Factors = namedtuple("Factors", ["left", "right"])


def test_what_torch_cannot_make_anew() -> None:
    worker = Worker(own)
    worker.train(1)
    saved = worker.optimizer.state_dict()
    saved["state"][0]["factors"] = Factors(torch.ones(2), "text")
    saved["state"][1]["kind"] = {"names": ["a", ("b", "c")]}
    load_optimizer(worker.optimizer, saved)
    weight, bias = worker.model.weight, worker.model.bias
    assert isinstance(weight, nn.Parameter)
    assert isinstance(bias, nn.Parameter)
    assert_same(worker.optimizer.state[weight]["factors"], Factors(torch.ones(2), "text"))
    assert worker.optimizer.state[bias]["kind"] == {"names": ["a", ("b", "c")]}


def test_an_optimizer_that_loads_other_values_is_said() -> None:
    """It has a way of its own to load a state, and its copy in memory does not come back."""

    class Halves(Own):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for fields in self.state.values():
                fields["average"] = fields["average"] / 2

    worker = Worker(lambda model: Halves(model.parameters()))
    worker.train(2)
    block = write_block(worker.state, None)
    with pytest.raises(RecoveryError, match=r"not the one that was copied: .*average"):
        load_block(worker.state, block)


def test_options_and_state_stay_the_same_objects() -> None:
    worker = Worker(nadam)
    worker.train(1)
    group, state = worker.optimizer.param_groups[0], worker.optimizer.state
    load_optimizer(worker.optimizer, worker.optimizer.state_dict())
    assert worker.optimizer.param_groups[0] is group
    assert worker.optimizer.state is state
    assert same_values(group["lr"], 0.1)


class Shell(Optimizer):
    """Wraps an optimizer, and never calls torch's constructor, so that it has no defaults."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Unlinked(Shell):
    """Its load gives new groups, and new state, to the wrapped optimizer alone."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class InPlace(torch.optim.Adam):
    """Its load changes the groups that it has."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups


@pytest.mark.parametrize("way", [by_memory, by_store])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: Shell(torch.optim.Adam(model.parameters())),
        lambda model: Unlinked(torch.optim.Adam(model.parameters())),
        lambda model: InPlace(model.parameters()),
    ],
    ids=["no defaults", "unlinked", "in place"],
)
def test_an_optimizer_with_a_load_of_its_own(
    make: Callable[[Any], Optimizer], way: Callable[[Worker, Worker, Path], None], tmp_path: Path
) -> None:
    worker, into = Worker(make), Worker(make)
    worker.train(2)
    before = worker.values()
    way(worker, into, tmp_path)
    assert_same(into.values(), before)
    assert [len(group["params"]) for group in into.optimizer.param_groups] == [2]
    inner = getattr(into.optimizer, "inner", into.optimizer)
    assert inner.state is into.optimizer.state
    assert inner.param_groups is into.optimizer.param_groups
    into.train(1)
    undisturbed = Worker(make)
    undisturbed.train(2)
    undisturbed.train(1)
    assert_same(into.values(), undisturbed.values())


class Named(torch.optim.SGD):
    """Knows its parameters by names, as some libraries' do."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        groups = [{**one, "params": [f"p{n}" for n in one["params"]]} for one in saved["param_groups"]]
        return {"state": {f"p{n}": value for n, value in saved["state"].items()}, "param_groups": groups}


def test_parameters_by_names_are_refused() -> None:
    worker = Worker(lambda model: Named(model.parameters(), lr=0.1, momentum=0.9))
    for check in (worker.state.check_optimizers, worker.state.to_save):
        with pytest.raises(UnsupportedError, match=r"\(Named\) knows a parameter as 'p0', and not"):
            check()


class Numbered(Own):
    """Keeps a tensor, and a number, under numbers."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for fields in self.state.values():
            fields[0], fields[1] = fields["average"].clone(), 7


def test_a_tensor_under_a_number_is_refused() -> None:
    """A checkpoint has text in its place, under which the optimizer would not find it."""
    worker = Worker(lambda model: Numbered(model.parameters()))
    worker.state.check_optimizers()  # no state yet
    worker.train(1)
    expected = r"optimizer \(Numbered\) keeps a tensor for parameter 0 under 0, .* Keep it under '0'\."
    for check in (worker.state.check_optimizers, worker.state.to_save):
        with pytest.raises(UnsupportedError, match=expected):
            check()
    for fields in worker.optimizer.state.values():
        fields["0"] = fields.pop(0)
    into = Worker(own)
    load_block(into.state, write_block(worker.state, None))  # a number that is under one stays there
    assert_same(into.values(), worker.values())
