"""Whatever code a step can run, the variables of its file are found."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError
from swift_ft.optim import wrap_optimizer
from tests.support.own_modules import own_module

HOME = "home_of_test"
HEAD = """
import functools
import torch
from torch.utils.data import Dataset, Sampler
calls = 0
"""
COUNT = """
        global calls
        calls += 1
"""
CODE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "an operator": (f"class Made:\n    def __call__(self):{COUNT}", lambda made: made()),
    "a data set": (f"class Made(Dataset):\n    def __getitem__(self, index):{COUNT}", lambda made: made[0]),
    "a sampler": (
        f"class Made(Sampler):\n    def __iter__(self):{COUNT}        return iter([0])",
        lambda made: [*made],
    ),
    "a static method": (
        f"class Made:\n    @staticmethod\n    def count():{COUNT}",
        lambda made: made.count(),
    ),
    "a class method": (
        f"class Made:\n    @classmethod\n    def count(kind):{COUNT}",
        lambda made: made.count(),
    ),
    "a property": (f"class Made:\n    @property\n    def count(self):{COUNT}", lambda made: made.count),
    "a property that is set": (
        f"class Made:\n    count = property()\n    @count.setter\n    def count(self, value):{COUNT}",
        lambda made: setattr(made, "count", 1),
    ),
    "a cached property": (
        f"class Made:\n    @functools.cached_property\n    def count(self):{COUNT}",
        lambda made: made.count,
    ),
    "a function of autograd": (
        f"class Twice(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):{COUNT}"
        "        return 2 * x\ndef Made():\n    return Twice",
        lambda made: made.apply(torch.ones(1)),
    ),
    "a class that it derives from": (
        f"class Base:\n    def __len__(self):{COUNT}        return 1\nclass Made(Base):\n    pass",
        len,
    ),
}


@pytest.fixture
def made(code: str, tmp_path: Path) -> Iterator[Any]:
    """An object of a module that the script itself has no variable for."""
    with own_module(tmp_path, HOME, HEAD + CODE[code][0]) as module:
        yield module.Made()


def calls() -> int:
    return int(vars(sys.modules[HOME])["calls"])


@pytest.mark.parametrize("code", CODE)
def test_variables_of_the_file_of_a_class(code: str, made: Any) -> None:
    rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    rollback.begin(0)
    CODE[code][1](made)
    assert calls() == 1
    rollback.back()
    assert calls() == 0


@pytest.mark.parametrize("code", ["a data set"])
def test_a_data_set_behind_a_loader(code: str, made: Any) -> None:
    loader, rollback = DataLoader(made), Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    del made
    rollback.begin(0)
    loader.dataset[0]
    assert calls() == 1
    rollback.back()
    assert calls() == 0


class Sample:
    """One of very many."""

    def __init__(self) -> None:
        self.weight = 1.0


@pytest.mark.parametrize("much", ["samples", "modules", "few"])
def test_too_many_objects_are_said(
    much: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the name of what holds most of them, and once. Modules may be as many as a model has."""
    monkeypatch.setattr("swift_ft.checkpoint.step.reach._MOST_NAMESPACES", 200)
    model = nn.Sequential(*(nn.Identity() for _ in range(400 if much == "modules" else 1)))
    pool = {"samples": [Sample() for _ in range(400 if much == "samples" else 20)]}
    rollback = Rollback(TrainingState({"model": model}))
    for iteration in range(3):
        rollback.begin(iteration)
    said = [one for one in caplog.records if getattr(one, "event", "") == "too_many_objects"]
    assert len(said) == (much == "samples")
    assert all("most of them in pool['samples']:" in one.getMessage() for one in said)
    assert pool


class Calls:
    """Says that it calls what is above it."""

    def __init__(self) -> None:
        super().__init__()


BEHIND: dict[str, tuple[Callable[[Any], Any], Callable[[Any], int]]] = {
    "__call__": (lambda count: count, lambda made: made()),
    "static": (staticmethod, lambda made: made.static()),
    "of_class": (classmethod, lambda made: made.of_class()),
    "value": (property, lambda made: made.value),
    "cached": (functools.cached_property, lambda made: made.cached),
    "part": (lambda count: functools.partialmethod(count, 1), lambda made: made.part()),
}


def with_counter(name: str) -> Any:
    """An object whose class alone leads to a counter, which is in no file's variable."""
    counted = 0

    def count(*_: object) -> int:
        nonlocal counted
        counted += 1
        return counted

    return type("Made", (Calls,), {name: BEHIND[name][0](count)})()


@pytest.mark.parametrize("name", BEHIND)
def test_variables_around_a_class(name: str) -> None:
    """What calls of ``super()`` need is the class itself, which is no variable."""
    made, rollback = with_counter(name), Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    rollback.begin(0)
    assert BEHIND[name][1](made) == 1
    rollback.back()
    assert BEHIND[name][1](made) == 1
    names = {path.rpartition(".")[2] for path, _ in rollback.variables.cells}
    assert "counted" in names
    assert "__class__" not in names


def counting() -> Callable[[int], float]:
    """A function that nothing but who is given it leads to."""
    calls = 0

    def rate(_: int) -> float:
        nonlocal calls
        calls += 1
        return 1 / calls

    return rate


def cyclic(optimizer: Any) -> Any:
    rates = torch.optim.lr_scheduler.CyclicLR
    return rates(optimizer, 0.1, 1.0, scale_fn=counting(), cycle_momentum=False)  # type: ignore[arg-type]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, counting()),
    "MultiplicativeLR": lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, counting()),
    "ChainedScheduler": lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LambdaLR(optimizer, counting())]
    ),
    "CyclicLR": cyclic,
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("in_state", [True, False])
def test_what_only_a_scheduler_calls(in_state: bool, kind: str) -> None:
    """Its state says nothing of it. A replacement calls it from the beginning on."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = SCHEDULERS[kind](optimizer)
    parts = {"model": model, "optimizer": optimizer, **({"rates": scheduler} if in_state else {})}
    state = TrainingState(parts)
    rollback = Rollback(state)
    rollback.watch()
    (cell,) = [one for path, one in rollback.variables.cells if path.endswith("calls")]
    for iteration in range(2):
        rollback.begin(iteration)
        optimizer.step()
        scheduler.step()
    once, rate = cell.cell_contents, optimizer.param_groups[0]["lr"]
    rollback.back()
    assert cell.cell_contents < once
    optimizer.step()
    scheduler.step()
    assert cell.cell_contents == once
    assert optimizer.param_groups[0]["lr"] == rate or not in_state, "what it counts is its own"
    saved = rollback.carried.to_save()
    cell.cell_contents = 1
    rollback.carried.take_over(saved)
    assert cell.cell_contents == once
    rollback.close()


@pytest.mark.parametrize("kind", ["LambdaLR", "MultiplicativeLR"])
def test_a_function_that_a_step_gives_to_a_scheduler(kind: str) -> None:
    """It is gone in a repeated step. A replacement would lack it, so that the next step is refused."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    scheduler = SCHEDULERS[kind](optimizer)
    rollback = Rollback(TrainingState({"model": model, "optimizer": optimizer, "rates": scheduler}))
    for iteration in range(3):
        rollback.begin(iteration)
        optimizer.step()
        scheduler.step()
        scheduler.lr_lambdas[0] = counting()  # made again, and the same
    for _ in range(2):
        rollback.begin(3)
        assert len(scheduler.lr_lambdas) == len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [model.bias], "lr": 0.5, "initial_lr": 0.5})
        scheduler.base_lrs.append(0.5)
        scheduler.lr_lambdas.append(lambda _: 0.5)
        rollback.back()
    scheduler.lr_lambdas[0] = lambda _: 0.5  # each step may do so, also that of a replacement
    rollback.begin(4)
    scheduler.lr_lambdas.append(lambda _: 0.5)
    with pytest.raises(
        UnsupportedError, match=r"A step has given rates \(\w+LR\) another number of functions"
    ) as caught:
        rollback.begin(5)
    assert caught.value.fields["alike"]  # else the machine of a replacement that fails first is refused


def test_a_scheduler_that_a_step_gives_to_another_one() -> None:
    rates = torch.optim.lr_scheduler
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chained: Any = rates.ChainedScheduler([rates.LambdaLR(optimizer, counting())])
    rollback = Rollback(TrainingState({"model": model, "optimizer": optimizer, "rates": chained}))
    rollback.begin(0)
    chained._schedulers[0] = rates.LambdaLR(optimizer, counting())
    rollback.begin(1)
    chained._schedulers.append(rates.LambdaLR(optimizer, lambda _: 0.5))
    with pytest.raises(UnsupportedError, match="or of schedulers"):
        rollback.begin(2)


def test_what_lbfgs_has_beside_its_groups() -> None:
    """The list of its group and a count: no replacement needs them, and an undo makes no other list."""
    model = nn.Linear(2, 2)
    optimizer = wrap_optimizer(torch.optim.LBFGS(model.parameters()), exact=True)
    state = TrainingState({"model": model, "optimizer": optimizer})
    rollback = Rollback(state)
    rollback.watch()
    for iteration in range(2):
        rollback.begin(iteration)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        rollback.completed()
    rollback.back_to(1)
    optimizer.undo()
    rollback.undone()
    assert vars(optimizer)["_params"] is optimizer.param_groups[0]["params"]
    assert "optimizer" not in rollback.carried.to_save()
    rollback.close()


class Counts:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.n = 0
