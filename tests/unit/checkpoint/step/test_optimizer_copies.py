"""An ordinary step copies all that it may write to in the state of an optimizer, and each thing once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from swift_ft.checkpoint.step.parameter_copies import Kind, ParameterCopies, owners_of


class Clones(TorchDispatchMode):
    """Counts the tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def _copied(net: nn.Module, optimizer: Optimizer) -> tuple[int, Callable[[], None]]:
    """Copies of tensors that a step begins with, and what puts them back."""
    parameters = [*net.parameters()]
    owners = owners_of((optimizer, parameter) for parameter in parameters)
    with Clones() as clones:
        copies = ParameterCopies(dict.fromkeys(parameters, Kind.AFTER), owners)
    return clones.count, lambda: copies.put_back(())


def test_the_history_of_lbfgs_is_not_copied() -> None:
    """Only which tensors are in it: it is many times as large as the model."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=3, history_size=8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.eye(4)).sin().square().mean()
        loss.backward()
        return loss

    for _ in range(10):
        optimizer.step(closure)
    state = optimizer.state[net.weight]
    before = {name: [*state[name]] for name in ("old_dirs", "old_stps", "ro", "al")}
    values = [one.clone() for one in state["old_dirs"]]
    assert len(values) > 5
    count, put_back = _copied(net, optimizer)
    assert count <= sum(isinstance(value, torch.Tensor) for value in state.values())
    optimizer.step(closure)
    put_back()
    for name, elements in before.items():
        assert [*map(id, optimizer.state[net.weight][name])] == [*map(id, elements)]
    assert all(map(torch.equal, optimizer.state[net.weight]["old_dirs"], values))


def test_what_entries_share_is_copied_once() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shared = {"all": [torch.zeros(2) for _ in range(5)]}
    for parameter in net.parameters():
        optimizer.state[parameter].update(shared=shared, own=[torch.zeros(1)])
    count, put_back = _copied(net, optimizer)
    assert count == 5 + 8
    shared["all"][0].add_(1)
    shared["all"].pop()
    put_back()
    assert len(shared["all"]) == 5
    assert not any(one.any() for one in shared["all"])
