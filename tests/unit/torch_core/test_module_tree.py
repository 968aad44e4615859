"""Modules and parameters are found as torch finds them, whatever changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from swift_ft.torch_core.module_tree import ModuleTree


def model() -> nn.Sequential:
    shared = nn.Linear(2, 2)
    return nn.Sequential(shared, nn.Sequential(shared, nn.BatchNorm1d(2)), nn.ReLU())


def assert_as_torch(tree: ModuleTree, root: nn.Module) -> None:
    assert [*tree.modules()] == [*root.modules()]
    assert [*tree.named_parameters().items()] == [(f"model.{n}", p) for n, p in root.named_parameters()]


def another_parameter(root: nn.Sequential) -> None:
    root[0].weight = nn.Parameter(torch.ones(2, 2))


def a_new_one(root: nn.Sequential) -> None:
    root[2].scale = nn.Parameter(torch.ones(1))


def one_in_the_place_of_another(root: nn.Sequential) -> None:
    """The count of parameters stays."""
    weight = root[0].weight
    del root[0].weight
    root[2].weight = weight


def another_module(root: nn.Sequential) -> None:
    root[1].register_module("1", nn.LayerNorm(2))


def one_module_less(root: nn.Sequential) -> None:
    del root[2]


CHANGES = [another_parameter, a_new_one, one_in_the_place_of_another, another_module, one_module_less]


@pytest.mark.parametrize("change", CHANGES)
def test_it_follows(change: Callable[[nn.Sequential], None]) -> None:
    root = model()
    tree = ModuleTree({"model": root})
    assert_as_torch(tree, root)
    before = tree.named_parameters()
    assert tree.named_parameters() is before
    change(root)
    modules, named = tree.content()
    assert [*modules] == [*root.modules()]
    assert [*named.values()] == [*root.parameters()]
    assert_as_torch(tree, root)


def test_modules_of_two_roots() -> None:
    one, other = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1))
    other.append(one)
    tree = ModuleTree({"one": one, "other": other})
    assert [*tree.named_parameters()] == ["one.weight", "one.bias", "other.0.weight", "other.0.bias"]
    assert len(tree.modules()) == 3
    assert ModuleTree({}).named_parameters() == {}
