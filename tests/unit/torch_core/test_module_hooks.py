"""A copy of a module, and one that is read from a file, do without the hooks of the original."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.torch_core.module_hooks import OwnHook, hooks_ever_registered, hooks_of, kept_hooks


class Session:
    """Holds what can be neither copied nor saved."""

    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0

    def before(self, *_: object) -> None:
        self.calls += 1


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def net(session: Session) -> nn.Module:
    net = nn.Linear(2, 2)
    net.register_forward_pre_hook(OwnHook(session.before))
    return net


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy])
def test_a_copy(way: Any, net: nn.Module, session: Session) -> None:
    other = way(net)
    net(torch.ones(2))
    assert session.calls == 1
    other(torch.ones(2))
    assert session.calls == (1 if way is copy.deepcopy else 2), "a shallow copy has the very same hooks"


def test_a_copy_of_a_hook_that_is_given_keywords(session: Session) -> None:
    net = nn.Linear(2, 2)
    net.register_forward_pre_hook(OwnHook(session.before), with_kwargs=True)
    copy.deepcopy(net)(input=torch.ones(2))
    assert session.calls == 0
    net(input=torch.ones(2))
    assert session.calls == 1


def test_a_file_needs_no_package_of_ours(net: nn.Module, session: Session, tmp_path: Path) -> None:
    torch.save(net, tmp_path / "best.pt")
    code = (
        "import sys, torch; net = torch.load(sys.argv[1], weights_only=False); net(torch.ones(2)); "
        "assert 'swift_ft' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "best.pt")], check=True, timeout=120)
    assert session.calls == 0


def test_all_hooks_are_found() -> None:
    """Of a module, of its own parameters, and of an optimizer; none of a module in it."""
    layer, found = nn.Linear(2, 2), list[str]()
    net = nn.Sequential(layer)

    def hook(name: str) -> Any:
        def called(*_: object) -> None:
            found.append(name)

        called.__name__ = name
        return called

    layer.register_forward_pre_hook(hook("before"))
    layer.register_forward_hook(hook("after"))
    layer.register_full_backward_pre_hook(hook("before_backward"))
    layer.register_full_backward_hook(hook("after_backward"))
    layer.weight.register_hook(hook("gradient"))
    layer.bias.register_post_accumulate_grad_hook(hook("accumulated"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(hook("before_step"))
    optimizer.register_step_post_hook(hook("after_step"))
    assert [*hooks_of(net)] == []
    names = [name for name, _ in (*hooks_of(layer), *hooks_of(optimizer))]
    of_layer = ["before", "after", "before_backward", "after_backward", "weight.gradient", "bias.accumulated"]
    assert sorted(names) == sorted([*of_layer, "before_step", "after_step"])
    net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    optimizer.step()
    assert len(found) == len(names)


def test_where_hooks_are_kept() -> None:
    """Each dictionary that is not empty, with those that say how its hooks are called. They can be filled."""
    layer, calls = nn.Linear(2, 2), list[dict[str, Any]]()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert [*kept_hooks(layer), *kept_hooks(layer.weight), *kept_hooks(optimizer)] == []
    count = hooks_ever_registered()
    handle = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    layer.weight.register_hook(lambda _: None)
    layer.bias.register_post_accumulate_grad_hook(lambda _: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert hooks_ever_registered() == count + 4
    (of_layer,), (of_weight,) = kept_hooks(layer), kept_hooks(layer.weight)
    assert len([*kept_hooks(layer.bias), *kept_hooks(optimizer)]) == 2
    assert (of_layer.owner, of_weight.owner) == (layer, layer.weight)
    hooks, beside = dict(of_layer.hooks), tuple(map(dict, of_layer.beside))
    handle.remove()
    assert [*kept_hooks(layer)] == []
    of_layer.fill(hooks, beside)
    layer(input=torch.ones(2))
    assert [kwargs.keys() for kwargs in calls] == [{"input"}]
    handle.remove()
    layer(input=torch.ones(2))
    assert len(calls) == 1
