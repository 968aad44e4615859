"""Rules of a user's own, by a call and by an entry point, held by the conformance suite that ships."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from swift_ft import undo_support, wrap_optimizer
from swift_ft.config import extensions
from swift_ft.config.extensions import Extensions
from swift_ft.errors import UsageError
from swift_ft.testing import UndoRuleConformanceTests
from swift_ft.undo import PARAM, Rule, Tensors, is_lost, register_rule, registry


class Lion(Optimizer):
    """Chen et al. 2023, as people write it: a loop over parameters."""

    def __init__(
        self, params: Any, lr: float = 1e-2, *, beta: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                direction = torch.lerp(average, param.grad, 1 - group["beta"]).sign_()
                param.add_(direction, alpha=-group["lr"])
                average.lerp_(param.grad, 1 - group["beta"] / 1.5)


class LionRule(Rule):
    """The average is inverted first: its sign says which way the parameter went."""

    keys: ClassVar[tuple[str, ...]] = ("average",)

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The parts that the step has nearly forgotten. The direction is lost with the average."""
        lost = set()
        if is_lost(hyper["beta"] / 1.5):
            lost |= {"average", PARAM}
        if is_lost(1 - hyper["lr"] * hyper["weight_decay"]):
            lost.add(PARAM)
        return frozenset(lost)

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """In the reverse of the step's order."""
        weight = 1 - hyper["beta"] / 1.5
        averages = tensors.state["average"]
        for number, (param, grad, average) in enumerate(
            zip(tensors.params, tensors.grads, averages, strict=True)
        ):
            before = torch.zeros_like(average)
            if tensors.computed("average"):
                before = (average - weight * grad) / (1 - weight)
                averages[number].copy_(before)
            if PARAM not in tensors.journaled:
                direction = torch.lerp(before, grad, 1 - hyper["beta"]).sign_()
                param.add_(direction, alpha=hyper["lr"])
                param.div_(1 - hyper["lr"] * hyper["weight_decay"])


class Forgetful(LionRule):
    """A mistake: it leaves the weight decay out."""

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        super().invert(tensors, {**hyper, "weight_decay": 0.0})


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    extensions.load_once.cache_clear()
    yield
    extensions.load_once.cache_clear()


OPTIONS = [{}, {"weight_decay": 0.1}, {"beta": 0.01}, {"lr": 2.0, "weight_decay": 0.5}]
"""The last two forget the average, and the parameter."""


@pytest.mark.usefixtures("rules")
class TestLionRule(UndoRuleConformanceTests):
    @pytest.fixture(params=OPTIONS, ids=str)
    def make(self, request: pytest.FixtureRequest, rules: None) -> Callable[[Sequence[Tensor]], Optimizer]:
        register_rule(Lion, LionRule())
        return lambda params: Lion(params, **request.param)


@pytest.mark.usefixtures("rules")
class TestTorchsOwn(UndoRuleConformanceTests):
    ulps = 10  # of the buffer over the momentum: the table in docs/undo.md

    @pytest.fixture(params=[SGD, AdamW])
    def make(self, request: pytest.FixtureRequest) -> Callable[[Sequence[Tensor]], Optimizer]:
        momentum = {"momentum": 0.9} if request.param is SGD else {}
        return lambda params: request.param(params, lr=1e-2, weight_decay=0.01, **momentum)


def test_the_suite_finds_a_rule_that_is_wrong(rules: None) -> None:
    register_rule(Lion, Forgetful())
    with pytest.raises(AssertionError, match="ulps"):
        UndoRuleConformanceTests().test_the_error_is_bounded(lambda params: Lion(params, weight_decay=0.1))


def test_the_suite_finds_that_there_is_no_rule(rules: None) -> None:
    with pytest.raises(AssertionError):
        UndoRuleConformanceTests().test_there_is_a_rule(Lion)


def test_before_and_after(rules: None) -> None:
    """Without a rule all is copied; with one, single parameters can be updated."""
    params = [torch.zeros(3, requires_grad=True)]
    assert undo_support(Lion(params)).method == "journal"
    register_rule(Lion, LionRule())
    assert undo_support(Lion(params)).method == "algebra"
    assert undo_support(Lion(params)).wait_free


def test_an_entry_point_is_loaded_when_an_unknown_optimizer_comes(
    rules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("lion", f"{__name__}:_bring_rules", Extensions.UNDO_RULES)
    asked: list[str] = []

    def found(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [entry]

    monkeypatch.setattr(extensions, "entry_points", found)
    params = [torch.zeros(3, requires_grad=True)]
    wrap_optimizer(SGD(params, lr=0.1)).step()
    assert not asked, "torch's own need no look at what is installed"
    for _ in range(2):
        assert undo_support(Lion(params)).method == "algebra"
    assert asked == [Extensions.UNDO_RULES]


def _bring_rules() -> None:
    register_rule(Lion, LionRule())


def test_an_entry_point_that_cannot_be_loaded_is_named(rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("lion", "no_such_module:bring", Extensions.UNDO_RULES)
    monkeypatch.setattr(extensions, "entry_points", lambda *, group: [entry])
    with pytest.raises(
        UsageError, match=r"swift_ft.undo_rules .*entry point lion = no_such_module:bring.*No module named"
    ):
        undo_support(Lion([torch.zeros(3, requires_grad=True)]))


@pytest.mark.parametrize(
    ("kind", "rule", "message"),
    [
        (Lion([torch.zeros(1)]), LionRule(), "takes a class of torch.optim.Optimizer first"),
        (torch.nn.Linear, LionRule(), "takes a class of torch.optim.Optimizer first"),
        (Lion, LionRule, "takes an instance of a subclass of swift_ft.undo.Rule"),
    ],
)
def test_what_is_no_optimizer_or_no_rule_is_refused(kind: Any, rule: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        register_rule(kind, rule)
