"""A verified step goes back as a whole, updates included: each computation begins where the first did."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.step.rollback import CheckStep, Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.determinism import seed_step
from swift_ft.errors import RecoveryError
from swift_ft.optim import UndoableOptimizer, wrap_optimizer
from swift_ft.runtime.epoch_top import Epochs
from swift_ft.runtime.verify import part
from swift_ft.runtime.verify.part import OnCorruption, VerifyPart
from swift_ft.runtime.worker.part import StepInfo
from swift_ft.torch_core.tensors import dense_parts
from tests.support.log import events_of
from tests.unit.runtime.verify.test_part import Job

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]

STEPS = 8
LATE = 6
"""The step in which some things happen for the first time."""
LARGE = 600
"""Of a layer whose weight is larger than what a step copies of a script's values."""


class Habit:
    """A small training, in one process."""

    def __init__(self, *, wrap: bool) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.begin()
        self.parts: dict[str, Any] = {"model": self.net, **self.made()}
        if wrap:
            self.parts = {
                n: wrap_optimizer(p) if isinstance(p, Optimizer) else p for n, p in self.parts.items()
            }
        vars(self.net)["habit"] = self  # a step can reach it, as it could a variable of the script

    def begin(self) -> None:
        """Whatever there is before the first step."""

    def made(self) -> dict[str, Any]:
        return {"optimizer": torch.optim.AdamW(self.net.parameters(), lr=0.1)}

    @property
    def optimizer(self) -> Optimizer:
        return cast(Optimizer, self.parts["optimizer"])

    def gradients(self, iteration: int) -> None:
        self.net.zero_grad()
        x = torch.randn(2, self.width, generator=torch.Generator().manual_seed(iteration))
        self.net(x).square().mean().backward()

    width = 4

    def step(self, iteration: int) -> None:
        self.gradients(iteration)
        self.optimizer.step()

    def kept(self) -> list[Any]:
        """Further values that are compared."""
        return []

    def digests(self) -> list[Any]:
        state = TrainingState(self.parts)
        return [tensor_digests({**state.named_tensors(), **state.inner_tensors()}), *map(plain, self.kept())]


def plain(value: Any) -> Any:
    """One that can be compared."""
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


class TwoOptimizers(Habit):
    """Over the same parameters."""

    def made(self) -> dict[str, Any]:
        second = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return {**super().made(), "second": second}

    def step(self, iteration: int) -> None:
        super().step(iteration)
        self.gradients(iteration)
        self.parts["second"].step()


@dataclass
class Factor:
    """Of a matrix, as distributed Shampoo keeps them."""

    value: torch.Tensor
    rank: int = 0


class Nested(Optimizer):
    """Keeps tensors in lists, dictionaries, tuples, sets and objects, and in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("norms", {"all": [torch.zeros(1)]})["all"][0].add_(1)
            for parameter in group["params"]:
                self._update(parameter, self.state[parameter])

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        def zeros() -> torch.Tensor:
            return torch.zeros_like(parameter)

        if not state:
            state.update(GG=[zeros()], by={"first": {"m": zeros()}}, pair=(zeros(), [zeros()]))
            state.update(factor=Factor(zeros()), seen={0}, last=[zeros()])
        first, second = state["GG"][0], state["by"]["first"]["m"]
        for one in (first, second, *state["pair"][:1], *state["pair"][1], state["factor"].value):
            one.lerp_(parameter.grad, 0.1)
        state["factor"].rank += 1
        state["seen"].add(len(state["seen"]))
        state["last"][0] = state["last"][0] + parameter.grad
        moved = first + second + state["pair"][1][0] + state["factor"].value + state["last"][0]
        parameter.add_(moved, alpha=-0.1 * state["factor"].rank)


class NestedState(Habit):
    """In the optimizer's state."""

    def made(self) -> dict[str, Any]:
        return {"optimizer": Nested(self.net.parameters())}

    def kept(self) -> list[Any]:
        states = [*self.optimizer.state.values()]
        values = [(state["factor"].rank, len(state["seen"])) for state in states]
        factors = [state["factor"].value.tolist() for state in states]
        return [values, factors, self.optimizer.param_groups[0]["norms"]["all"][0]]


class Slow(Optimizer):
    """An optimizer within another one, which saves both states."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.lerp_(slow.lerp_(parameter, 0.5), 0.5)


class SlowWithGraph(Optimizer):
    """Its state still has the graph that made it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["slow"], state["wide"] = parameter.clone(), (parameter[:1] * 0).expand(3, -1)
                parameter.data.add_(parameter.grad, alpha=-0.1)
                state["slow"].data.lerp_(parameter.data, 0.5)
                parameter.data.lerp_(state["slow"].data, 0.5)


class WithGraph(Habit):
    """Tensors in the optimizer's state."""

    def begin(self) -> None:
        self.net = nn.Linear(4, 4, bias=False)

    def made(self) -> dict[str, Any]:
        return {"optimizer": SlowWithGraph(self.net.parameters())}


class Within(Habit):
    """An optimizer that is no part of the state, since one of the state has it."""

    def made(self) -> dict[str, Any]:
        return {"optimizer": Slow(torch.optim.AdamW(self.net.parameters(), lr=0.1))}

    def kept(self) -> list[Any]:
        return [
            plain(one) for fields in cast(Any, self.optimizer).base.state.values() for one in fields.values()
        ]


class Lbfgs(Habit):
    """A step of it computes gradients several times, and keeps lists of tensors."""

    def made(self) -> dict[str, Any]:
        return {"optimizer": torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)}

    def step(self, iteration: int) -> None:
        def closure() -> torch.Tensor:
            self.gradients(0)
            return cast(nn.Linear, self.net[0]).weight.detach().sum()  # type: ignore[index]

        self.optimizer.step(cast(Any, closure))


class Temperature:
    """A tensor in a small part of the state, as soft actor-critic has one."""

    def __init__(self) -> None:
        self.log = torch.zeros(3, requires_grad=True)

    def state_dict(self) -> dict[str, Any]:
        return {"log": self.log.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.log.copy_(state["log"])


class InNoModule(Habit):
    """An optimizer over such a tensor."""

    def made(self) -> dict[str, Any]:
        self.temperature = Temperature()
        other = torch.optim.Adam([self.temperature.log], lr=0.1)
        return {**super().made(), "temperature": self.temperature, "other": other}

    def step(self, iteration: int) -> None:
        super().step(iteration)
        self.parts["other"].zero_grad()
        self.temperature.log.exp().sum().backward()
        self.parts["other"].step()


class Thaws(Habit):
    """A step gives the optimizer a layer, and updates it."""

    def made(self) -> dict[str, Any]:
        return {"optimizer": torch.optim.AdamW(self.net[1].parameters(), lr=0.1)}  # type: ignore[index]

    def step(self, iteration: int) -> None:
        if iteration == LATE:
            self.optimizer.add_param_group({"params": [*self.net[0].parameters()]})  # type: ignore[index]
        super().step(iteration)


class ThawsWithoutRule(Thaws):
    """With an optimizer whose step could be undone as a whole only."""

    def made(self) -> dict[str, Any]:
        return {"optimizer": Nested(self.net[1].parameters())}  # type: ignore[index]


class Restarts(Habit):
    """A step gives the optimizer another state."""

    def step(self, iteration: int) -> None:
        if iteration == LATE:
            self.optimizer.state = defaultdict(dict)
        super().step(iteration)
        if iteration == LATE + 1:
            self.optimizer.state.clear()


class Large(Habit):
    """An average of parameters of a large layer, held by the script."""

    width = LARGE

    def begin(self) -> None:
        self.net = nn.Linear(LARGE, LARGE)
        self.shadow = {name: one.detach().clone() for name, one in self.net.named_parameters()}

    def kept(self) -> list[Any]:
        return [*self.shadow.values()]

    @torch.no_grad()
    def step(self, iteration: int) -> None:
        with torch.enable_grad():
            super().step(iteration)
        for name, parameter in self.net.named_parameters():
            self.follow(name, parameter)

    def follow(self, name: str, parameter: torch.Tensor) -> None:
        self.shadow[name].mul_(0.9).add_(parameter, alpha=0.1)


class LargeByData(Large):
    """Torch counts no such change."""

    def follow(self, name: str, parameter: torch.Tensor) -> None:
        self.shadow[name].data.mul_(0.9).add_(parameter, alpha=0.1)


class LargeOfNumpy(Habit):
    """An array, a list and a dictionary that no step notes."""

    def begin(self) -> None:
        self.table = np.zeros(300_000)
        self.counts = [0] * 70_000
        self.many = {str(number): torch.zeros(2) for number in range(1100)}
        self.pairs = [(torch.zeros(2), [0]) for _ in range(1100)]

    def step(self, iteration: int) -> None:
        super().step(iteration)
        self.table[iteration] += 1
        self.counts[iteration] += 1
        self.many["1099"].add_(1)
        self.pairs[1099][0].add_(1)
        self.pairs[1099][1][0] += 1

    def kept(self) -> list[Any]:
        return [self.table, self.counts, self.many["1099"], self.pairs[1099][0], self.pairs[1099][1]]


class SparseKept(Habit):
    """Tensors that no dense memory has, of a shape that no memory could have."""

    def begin(self) -> None:
        place = torch.tensor([[0], [0]])
        self.sparse = torch.sparse_coo_tensor(place, torch.ones(1), (10**9, 10**9))
        self.rows = torch.eye(3).to_sparse_csr()

    @torch.no_grad()
    def step(self, iteration: int) -> None:
        with torch.enable_grad():
            super().step(iteration)
        place = torch.tensor([[iteration], [0]])
        self.sparse.add_(torch.sparse_coo_tensor(place, torch.ones(1), (10**9, 10**9)))
        self.rows.values().add_(1)

    def kept(self) -> list[Any]:
        return [*map(plain, dense_parts(self.sparse)), *map(plain, dense_parts(self.rows))]


class LargeSparse(SparseKept):
    """Larger than what a step copies of a script's values."""

    def begin(self) -> None:
        self.sparse = torch.sparse_coo_tensor(
            torch.arange(200_000).expand(2, -1), torch.ones(200_000), (10**9, 10**9)
        )
        self.rows = torch.ones(LARGE, LARGE).to_sparse_csr()


class Expanded(Habit):
    """Tensors of a nominal size that no memory could have, in an object and in a module."""

    def begin(self) -> None:
        self.all = torch.zeros(1).expand(10**6, 10**6)
        self.constant = torch.zeros(1, LARGE**2).expand(10**6, -1)
        self.mask = torch.zeros(1, 4, dtype=torch.bool).expand(10**9, 4)
        vars(self.net)["bias"] = torch.zeros(1, LARGE).expand(LARGE, LARGE)

    def step(self, iteration: int) -> None:
        super().step(iteration)
        self.all[0, 0] += 1
        self.mask[0, iteration % 4].logical_not_()
        cast(Any, self.net).bias[0, 0] += 1

    def kept(self) -> list[Any]:
        return [self.all[0, 0], self.mask[0], cast(Any, self.net).bias[1]]


class Recurrent(Habit):
    """A large state that still has its graph as the next step begins."""

    def begin(self) -> None:
        self.hidden = torch.zeros(LARGE, LARGE)

    def step(self, iteration: int) -> None:
        super().step(iteration)
        self.hidden = self.hidden.detach() * 0.9 + cast(Any, self.net)[0].weight.sum()

    def kept(self) -> list[Any]:
        return [self.hidden]


class LateArray(Habit):
    """A large array that never changed before."""

    def begin(self) -> None:
        self.table = np.zeros(300_000)

    def step(self, iteration: int) -> None:
        super().step(iteration)
        self.table[0] += iteration >= LATE

    def kept(self) -> list[Any]:
        return [self.table[0]]


class LateTensor(LateArray):
    """As above, where torch counts no change."""

    def begin(self) -> None:
        self.table = cast(Any, torch.zeros(LARGE, LARGE))

    def step(self, iteration: int) -> None:
        Habit.step(self, iteration)
        cast(Any, self.table).data[0] += iteration >= LATE


class Run:
    """Steps of a training, each but the first one verified, or none."""

    def __init__(self, habit: Callable[..., Habit], *, wrap: bool, every: int) -> None:
        self.habit = habit(wrap=wrap)
        state = TrainingState(self.habit.parts)
        self.rollback = Rollback(state, CheckStep.NEVER)
        self.job, self.counted_at_once = Job(), list[int]()
        self._numbers = itertools.count()  # an iterator, since numbers are put back with the step
        job, act = cast(Any, self.job), OnCorruption.WARN
        self.verify = VerifyPart(0, state, job, Epochs(), every, act, self.rollback.uncopied)
        self.rollback.watch()
        for iteration in range(STEPS):
            self._step(iteration)
        self.rollback.close()

    @property
    def computed(self) -> int:
        return next(copy.copy(self._numbers))

    def _step(self, iteration: int) -> None:
        again = True
        while again:
            info = StepInfo(iteration, 1)
            info.computation = self.verify.computation(info)
            self.rollback.begin(iteration, whole=info.computation > 0)
            seed_step(0, iteration, None)
            self.verify.begin(info)
            self.habit.step(iteration)
            next(self._numbers)
            again = bool(info.computation) and self.verify.judge(info).again
            if again:
                self.rollback.back()
        self.counted_at_once += [iteration] if info.computation == 1 else []
        self.rollback.completed()


HABITS: list[type[Habit]] = [
    *(TwoOptimizers, NestedState, Within, Lbfgs, InNoModule, Thaws, ThawsWithoutRule, Restarts, WithGraph),
    *(Large, LargeByData, LargeOfNumpy, SparseKept, Expanded, Recurrent),
]


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("habit", HABITS)
def test_a_verified_step_leaves_what_one_that_is_not_leaves(habit: type[Habit], wrap: bool) -> None:
    unverified = Run(habit, wrap=wrap, every=0)
    verified = Run(habit, wrap=wrap, every=1)
    assert verified.job.events == []
    assert (unverified.computed, verified.computed) == (STEPS, 2 * STEPS - 1)
    assert verified.habit.digests() == unverified.habit.digests()


@pytest.mark.parametrize("habit", [LateArray, LateTensor])
def test_a_step_of_which_there_is_no_copy_counts_as_it_is(
    habit: type[Habit], caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be computed again, so it is not. The next one is."""
    caplog.set_level(logging.WARNING)
    unverified = Run(habit, wrap=False, every=0)
    verified = Run(habit, wrap=False, every=1)
    assert verified.counted_at_once == [LATE]
    assert events_of(caplog).count("step_not_verified") == 1
    assert verified.job.events == []
    assert verified.habit.digests() == unverified.habit.digests()


def test_a_large_sparse_tensor_is_copied_once_it_is_known_to_change() -> None:
    unverified = Run(LargeSparse, wrap=False, every=0)
    verified = Run(LargeSparse, wrap=False, every=1)
    assert verified.counted_at_once == [1]
    assert verified.habit.digests() == unverified.habit.digests()


def test_an_error_of_this_worker_is_not_taken_for_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Rollback) -> list[str]:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Rollback, "uncopied", full)
    with pytest.raises(torch.OutOfMemoryError):
        Run(Habit, wrap=False, every=1)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_no_worker_computes_again_where_one_cannot(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "any_of_all", lambda one: one or elsewhere)
    assert Run(Habit, wrap=False, every=1).computed == (STEPS if elsewhere else 2 * STEPS - 1)


def test_what_is_compared_of_a_state() -> None:
    """Also tensors in containers of an optimizer's state, and parameters that no module has."""
    nested, alone = NestedState(wrap=False), InNoModule(wrap=False)
    for one in (nested, alone):
        one.step(0)
    names = {*TrainingState(nested.parts).inner_tensors()}
    assert {"optimizer.GG[0] of model.0.weight", "optimizer.by[0] of model.1.bias"} <= names
    assert {*TrainingState(alone.parts).inner_tensors()} == {"parameter 4"}


@pytest.mark.parametrize("habit", [Thaws, ThawsWithoutRule, TwoOptimizers])
def test_an_update_that_was_put_back_is_not_undone_as_well(habit: type[Habit]) -> None:
    """After a loss a plan undoes what is reported as updated, in an order that copies know nothing of."""
    one = habit(wrap=True)
    rollback = Rollback(TrainingState(one.parts), CheckStep.NEVER)
    rollback.watch()
    for iteration in range(LATE):
        rollback.begin(iteration)
        one.step(iteration)
        rollback.completed()
    before = one.digests()
    rollback.begin(LATE, whole=True)
    one.step(LATE)
    assert rollback.dirty() is None
    rollback.back()
    optimizers = [part for part in one.parts.values() if isinstance(part, UndoableOptimizer)]
    assert not any(optimizer.updated for optimizer in optimizers)
    assert one.digests() == before
    rollback.close()


def test_an_interrupted_step_of_which_there_is_no_copy() -> None:
    one = LateTensor(wrap=True)
    rollback = Rollback(TrainingState(one.parts), CheckStep.NEVER)
    rollback.watch()
    rollback.begin(LATE, whole=True)
    one.step(LATE)
    reason = rollback.dirty()
    assert reason is not None
    assert "tensor of 1.44 MB, which the script keeps, in place for the first time" in reason
    rollback.close()


@pytest.mark.parametrize("next_begins", [False, True])
@pytest.mark.parametrize("habit", [LateArray, LateTensor])
def test_a_step_that_counted_as_it_was_is_not_undone(habit: type[Habit], next_begins: bool) -> None:
    """Its second time would change a large value twice."""
    one = habit(wrap=True)
    rollback = Rollback(TrainingState(one.parts), CheckStep.NEVER)
    rollback.watch()
    for iteration in range(LATE - 1, LATE + 1):
        rollback.begin(iteration, whole=iteration == LATE)
        one.step(iteration)
        rollback.completed()
    if next_begins:
        rollback.begin(LATE + 1)
    with pytest.raises(RecoveryError, match=r"of 1\.44 MB|of 2\.40 MB"):
        rollback.back_to(LATE)
    rollback.close()


def test_a_step_is_undone_if_the_next_one_changes_a_large_value() -> None:
    one = LateTensor(wrap=True)
    rollback = Rollback(TrainingState(one.parts), CheckStep.NEVER)
    rollback.watch()
    rollback.begin(LATE - 1, whole=True)
    one.step(LATE - 1)
    rollback.completed()
    rollback.begin(LATE)
    one.table.data[0] += 1
    rollback.back_to(LATE - 1)
    rollback.close()


def test_a_completed_verified_step_is_undone() -> None:
    """As a plan would, where another machine has not completed it."""
    one = Habit(wrap=True)
    rollback = Rollback(TrainingState(one.parts), CheckStep.NEVER)
    rollback.watch()
    rollback.begin(0)
    one.step(0)
    rollback.completed()
    before = one.digests()
    rollback.begin(1, whole=True)
    one.step(1)
    rollback.completed()
    rollback.back_to(1)
    one.parts["optimizer"].undo()
    rollback.undone()
    assert one.digests() == before
    rollback.close()
