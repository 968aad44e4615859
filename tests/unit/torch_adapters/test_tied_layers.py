"""Layers that share a parameter, and that have come to lie on one worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from swift_ft.torch_adapters.pipelining.tied_parameters import TiedParameters


def tied(stages: tuple[int, ...]) -> TiedParameters:
    hook: Any = SimpleNamespace(stage_indices=stages, num_stages=4, group=None)
    interceptor: Any = SimpleNamespace(iteration=7)
    return TiedParameters(hook, interceptor)


def parameter(*gradient: float) -> nn.Parameter:
    made = nn.Parameter(torch.ones(len(gradient)))
    made.grad = torch.tensor(gradient)
    return made


def test_both_copies_get_the_sum() -> None:
    first, second = parameter(0.1, 0.2), parameter(0.3, -0.2)
    ties = tied((0, 3))
    ties.tie_layers([((lambda: first, 0), (lambda: second, 3))])
    ties.sum_gradients([second])
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad is not second.grad
    assert torch.equal(first.grad, torch.tensor([0.1, 0.2]) + torch.tensor([0.3, -0.2]))
    assert torch.equal(first.grad, second.grad)
    assert not ties.stages


def test_what_is_tied_follows_the_layers() -> None:
    """Declared anew, only the ties of now count: those with a stage of another worker."""
    here, there = parameter(1.0), parameter(1.0)
    ties = tied((1,))
    pair = (lambda: here, 1), (lambda: there, 3)
    ties.tie_layers([pair, pair])
    assert ties.stages == (3,)
    ties.tie_layers([((lambda: here, 0), (lambda: there, 1))])
    assert ties.stages == (0,)
    ties.tie_layers([((lambda: here, 0), (lambda: there, 3))])
    assert not ties.stages
