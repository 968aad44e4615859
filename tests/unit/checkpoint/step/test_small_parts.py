"""Small parts of the state go back with a step, whatever their ``load_state_dict`` binds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from swift_ft.checkpoint.step.rollback import CheckStep, Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.optim import wrap_optimizer
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import same_bits

STEPS, REPEATED = 6, 4
LARGE = 600
"""A square of it is larger than what a step copies of a script's values."""


class Average:
    """Of parameters, as scripts keep them. Loading binds others."""

    def __init__(self, net: nn.Module, width: int) -> None:
        self.shadow: Any = {"w": torch.ones(width, width), "n": torch.zeros(1)}
        self.begin(net)

    def begin(self, net: nn.Module) -> None:
        """More of a kind's own."""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: value.clone() for name, value in state["shadow"].items()}

    def tensors(self) -> list[Any]:
        return [*self.shadow.values()]

    @torch.no_grad()
    def follow(self, net: nn.Module) -> None:
        for one in self.shadow.values() if type(self) is Aside else self.tensors():
            one.mul_(0.9).add_(1)


class Entries(Average):
    """Loading binds other entries."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["shadow"].items():
            self.shadow[name] = value.clone()


class OneEntry(Average):
    """And of one only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow["n"].copy_(state["shadow"]["n"])
        self.shadow["w"] = state["shadow"]["w"].clone()


class InPlace(Average):
    """Loading binds nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


class Cloned(Average):
    """Nobody can write to what it gives out."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


class Detached(Average):
    """It gives out views."""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": {name: value.detach().view(-1) for name, value in self.shadow.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {n: v.clone().view_as(self.shadow[n]) for n, v in state["shadow"].items()}


class Deep(Average):
    """Tensors in lists and dictionaries."""

    def begin(self, net: nn.Module) -> None:
        self.shadow = [{"inner": [self.shadow["w"]]}, (self.shadow["n"],)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = copy.deepcopy(state["shadow"])

    def tensors(self) -> list[Any]:
        return [self.shadow[0]["inner"][0], self.shadow[1][0]]


class OfModule(Average):
    """Parameters and buffers of a module of its own, which loading makes anew."""

    def begin(self, net: nn.Module) -> None:
        self.net: nn.Module = nn.BatchNorm1d(len(self.shadow["w"]) ** 2)

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net = copy.deepcopy(self.net)
        self.net.load_state_dict(state)

    def tensors(self) -> list[Any]:
        return [one for one in self.net.state_dict().values() if one.is_floating_point()]


class OfNumpy(Average):
    """Arrays."""

    def begin(self, net: nn.Module) -> None:
        self.shadow = {name: value.numpy() for name, value in self.shadow.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: value.copy() for name, value in state["shadow"].items()}

    def follow(self, net: nn.Module) -> None:
        for one in self.tensors():
            one *= 0.9
            one += 1


class Sparse(Average):
    """A layout that has no dense memory."""

    def begin(self, net: nn.Module) -> None:
        self.shadow = {name: value.to_sparse() for name, value in self.shadow.items()}

    @torch.no_grad()
    def follow(self, net: nn.Module) -> None:
        for one in self.tensors():
            one.add_(torch.ones(one.shape).to_sparse())


class Half(Average):
    """It saves a part of what it keeps in one memory."""

    def begin(self, net: nn.Module) -> None:
        self.all = torch.zeros(20)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "half": self.all[:10]}

    def tensors(self) -> list[Any]:
        return [*super().tensors(), self.all]


class Sharded(Average):
    """Over a mesh."""

    def begin(self, net: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (1,))
        self.shadow = {n: DTensor.from_local(v, mesh, [Replicate()]) for n, v in self.shadow.items()}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _trained(kind: Callable[..., Average], width: int, *, whole: bool, repeated: bool) -> list[torch.Tensor]:
    """The values of a part after some steps.

    Args:
        width: of its matrix.
        whole: one of the steps is verified.
        repeated: the same one is put back after its end, and repeated.
    """
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    part = kind(net, width)
    rollback = Rollback(TrainingState({"model": net, "optimizer": optimizer, "part": part}), CheckStep.NEVER)
    vars(net)["reached"] = part
    rollback.watch()
    for iteration in range(STEPS):
        in_whole = whole and iteration == REPEATED
        for again in (True, False) if repeated and iteration == REPEATED else (False,):
            rollback.begin(iteration, whole=in_whole)
            optimizer.zero_grad()
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            part.follow(net)
            if again:
                rollback.back()
                if not in_whole:
                    optimizer.undo()
                    rollback.undone()
        rollback.completed()
    rollback.close()
    return [local(torch.as_tensor(one)).to_dense().detach() for one in (*part.tensors(), net.weight)]


KINDS = [
    *(Average, Entries, OneEntry, InPlace, Cloned, Detached, Deep),
    *(OfModule, OfNumpy, Sparse, Half, Sharded),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("width", [4, LARGE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_step_leaves_what_an_undisturbed_one_leaves(
    kind: type[Average], width: int, whole: bool
) -> None:
    undisturbed = _trained(kind, width, whole=False, repeated=False)
    repeated = _trained(kind, width, whole=whole, repeated=True)
    assert len(repeated) == len(undisturbed)
    assert all(map(same_bits, repeated, undisturbed))


class Aside(Average):
    """Loading begins anew what is not saved, and draws from a generator that goes on."""

    def begin(self, net: nn.Module) -> None:
        self.recent, self.seen = 0.0, {0}
        self.generator = torch.Generator()
        self.generator.manual_seed(3)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": [*self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        torch.randperm(7, generator=self.generator)
        self.recent, self.seen = 0.0, {*state["seen"]}

    def follow(self, net: nn.Module) -> None:
        super().follow(net)
        step = int(self.recent)
        for number in range(7):
            self.seen.add((step * 7 + number) * 7919 % 1009)
            self.seen.discard((step * 5 + number) * 7919 % 1009)
        self.recent += 1

    def tensors(self) -> list[Any]:
        return [*super().tensors(), torch.tensor(self.recent), torch.rand(1, generator=self.generator)]


@pytest.mark.parametrize("width", [4, LARGE])
def test_what_a_part_does_not_save_is_as_the_step_began(width: int) -> None:
    """Nothing is loaded again, or asked for, once variables and generators are put back."""
    undisturbed = _trained(Aside, width, whole=False, repeated=False)
    repeated = _trained(Aside, width, whole=False, repeated=True)
    assert all(map(same_bits, repeated, undisturbed))


def test_nothing_of_a_part_is_called_but_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group may be gone."""
    net = nn.Linear(4, 4)
    part = Aside(net, 4)
    rollback = Rollback(TrainingState({"model": net, "part": part}), CheckStep.NEVER)
    rollback.watch()
    rollback.begin(0)
    part.follow(net)
    monkeypatch.setattr(Aside, "state_dict", None)
    rollback.back()
    assert torch.equal(part.shadow["w"], torch.ones(4, 4))
    rollback.close()


def test_others_that_hold_a_tensor_of_a_part_still_hold_it() -> None:
    """A script may have it in a variable of its own."""
    net = nn.Linear(4, 4)
    part = Average(net, 4)
    held = part.shadow["w"]
    rollback = Rollback(TrainingState({"model": net, "part": part}), CheckStep.NEVER)
    rollback.watch()
    rollback.begin(0)
    part.follow(net)
    rollback.back()
    assert part.shadow["w"] is held
    assert torch.equal(held, torch.ones(4, 4))
    rollback.close()
