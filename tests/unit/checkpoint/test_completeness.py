"""What training changes and the session's state lacks is an error that names it; nothing else is."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import swift_ft
from swift_ft.checkpoint.completeness import Completeness
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import IncompleteStateError, UnsupportedError


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        return y


@contextmanager
def attached(stage: nn.Module, **state: Any) -> Iterator[Completeness]:
    """Training of a stage, under the watch of a state."""
    completeness = Completeness(TrainingState(state))
    completeness.attach("stage 1", stage)
    completeness.watch()
    completeness.begin()
    try:
        yield completeness
    finally:
        completeness.close()


def train(stage: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    stage(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()


def adam(stage: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(stage.parameters())


# -------------------------------------------------------------------------------------------- what is missing


def test_a_parameter() -> None:
    stage = Stage()
    with pytest.raises(IncompleteStateError, match=r"stage 1's parameter 'norm\.weight' is not in .*1 more"):
        Completeness(TrainingState({"model": stage.linear})).attach("stage 1", Stage2(stage))


class Stage2(nn.Module):
    """The parameters of a stage, without its buffers."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.linear = stage.linear
        self.norm = nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        return y


def test_a_buffer() -> None:
    stage = Stage()
    counted = nn.ParameterList(stage.parameters())
    with pytest.raises(IncompleteStateError, match=r"stage 1's buffer 'norm\.running_mean' is not in"):
        Completeness(TrainingState({"model": counted})).attach("stage 1", stage)


def test_an_optimizer_before_it_steps() -> None:
    stage = Stage()
    before = [p.detach().clone() for p in stage.parameters()]
    with (
        attached(stage, model=stage),
        pytest.raises(IncompleteStateError, match=r"AdamW that updates stage 1's parameter 'linear\.weight'"),
    ):
        train(stage, adam(stage))
    assert all(torch.equal(p, b) for p, b in zip(stage.parameters(), before, strict=True))


def test_an_optimizer_that_begins_later() -> None:
    """Of two optimizers one is there; the other one begins to step after many iterations."""
    stage = Stage()
    known, late = torch.optim.SGD(stage.linear.parameters(), 0.1), adam(stage.norm)
    with attached(stage, model=stage, optimizer=known) as completeness:
        for _ in range(5):
            completeness.begin()
            train(stage, known)
            completeness.completed()
        with pytest.raises(IncompleteStateError, match=r"'norm\.weight'"):
            train(stage, late)


def test_an_optimizer_of_another_module_of_the_state() -> None:
    stage, other = Stage(), nn.Linear(2, 2)
    with (
        attached(stage, model=stage, optimizer=adam(stage), other=other),
        pytest.raises(IncompleteStateError, match="'weight'"),
    ):
        train(other, torch.optim.SGD(other.parameters(), 0.1))


def test_a_parameter_that_only_an_optimizer_knows() -> None:
    stage, scale = Stage(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*stage.parameters(), scale], 0.1)
    with (
        attached(stage, model=stage, optimizer=optimizer),
        pytest.raises(
            IncompleteStateError, match=r"shape \[3\] \(number 4 of its group 0\).*nn\.ParameterList"
        ),
    ):
        train(stage, optimizer)
    free = nn.ParameterList([scale])
    with attached(stage, model=stage, optimizer=optimizer, free=free):
        train(stage, optimizer)


def chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 30)], milestones=[3])


@pytest.mark.parametrize(
    "make", [LinearLR, lambda o: LambdaLR(o, lambda n: 1 / (n + 1)), lambda o: StepLR(o, 30), chained]
)
def test_a_scheduler_that_steps(make: Any) -> None:
    stage = Stage()
    optimizer = adam(stage)
    scheduler = make(optimizer)
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        train(stage, optimizer)
        completeness.completed()  # it has not stepped yet
        scheduler.step()
        with pytest.raises(IncompleteStateError, match="LR steps with the optimizer and is not in Session"):
            completeness.completed()


def test_a_scaler_that_steps() -> None:
    stage = Stage()
    optimizer = adam(stage)
    scaler = GradScaler("cpu")
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        scaler.scale(stage(torch.randn(4, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        with pytest.raises(IncompleteStateError, match="GradScaler steps"):
            completeness.completed()


def test_a_scheduler_that_is_made_late() -> None:
    """In the fifth iteration. Noted at the beginning of the 16th, before it steps again."""
    stage = Stage()
    optimizer = adam(stage)
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        for iteration in range(1, 16):
            completeness.begin()
            if iteration == 4:
                scheduler = StepLR(optimizer, 30)
            train(stage, optimizer)
            if iteration >= 4:
                scheduler.step()
            if iteration < 15:
                completeness.completed()
        with pytest.raises(IncompleteStateError, match="A StepLR steps with the optimizer"):
            completeness.completed()


def averaged(stage: nn.Module) -> tuple[Any, Any]:
    average = AveragedModel(stage, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return average, average.update_parameters


class ModelEmaV3(nn.Module):
    """As timm has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


class EMAModel:
    """As diffusers has it: no module."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in model.parameters()]

    def step(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.shadow_params, model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow_params = state["shadow_params"]


def timms(stage: nn.Module) -> tuple[Any, Any]:
    average = ModelEmaV3(stage)
    return average, average.update


def diffusers(stage: nn.Module) -> tuple[Any, Any]:
    average = EMAModel(stage)
    return average, average.step


AVERAGES = [averaged, timms, diffusers]


@pytest.mark.parametrize("make", AVERAGES)
def test_an_average_of_the_model(make: Any) -> None:
    stage = Stage()
    optimizer = adam(stage)
    _average, update = make(stage)
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        train(stage, optimizer)
        completeness.completed()  # it begins later, as some do
        completeness.begin()
        update(stage)
        with pytest.raises(IncompleteStateError, match=r'is updated with the model .*"ema": ema'):
            completeness.completed()


# ------------------------------------------------------------------------------------------ what is all right


@pytest.mark.parametrize("make", AVERAGES)
def test_an_average_that_is_there(make: Any) -> None:
    stage = Stage()
    optimizer = adam(stage)
    average, update = make(stage)
    with attached(stage, model=stage, optimizer=optimizer, ema=average) as completeness:
        update(stage)
        completeness.completed()


def test_an_average_within_a_module_that_is_there() -> None:
    student = Stage()
    average = AveragedModel(student)
    both = nn.ModuleDict({"student": student, "teacher": average})
    optimizer = adam(student)
    with attached(student, model=both, optimizer=optimizer) as completeness:
        average.update_parameters(student)
        completeness.completed()


def test_an_average_of_another_model() -> None:
    stage, other = Stage(), nn.Linear(3, 1)
    optimizer = adam(stage)
    average = AveragedModel(other)
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        average.update_parameters(other)
        completeness.completed()


@pytest.mark.parametrize("kind", ["added", "exchanged"])
def test_parameters_that_an_optimizer_is_given_later(kind: str) -> None:
    """As a backbone that is thawed: no checkpoint would have what is trained of it."""
    stage = Stage2(Stage())
    stage.norm.requires_grad_(False)
    optimizer = torch.optim.SGD(stage.linear.parameters(), 0.1)
    with attached(stage, model=stage.linear, optimizer=optimizer) as completeness:
        for _ in range(5):
            completeness.begin()
            train(stage, optimizer)
            completeness.completed()
        before = [p.detach().clone() for p in stage.parameters()]
        stage.norm.requires_grad_(True)
        if kind == "added":
            optimizer.add_param_group({"params": stage.norm.parameters()})
        else:
            optimizer.param_groups[0]["params"] = [*stage.norm.parameters()]  # as many
        with pytest.raises(IncompleteStateError, match=r"SGD updates a parameter of shape \[2\] \(number 0"):
            train(stage, optimizer)
        assert all(torch.equal(p, b) for p, b in zip(stage.parameters(), before, strict=True))


def test_parameters_of_the_state_that_an_optimizer_is_given_later() -> None:
    """In a replacement, too, which is not told of each iteration's begin."""
    stage, late = Stage(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(stage.linear.parameters(), 0.1)
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        train(stage, optimizer)
        completeness.completed()
        optimizer.add_param_group({"params": stage.norm.parameters()})
        train(stage, optimizer)
        completeness.completed()
        stage.register_parameter("late", late)
        optimizer.add_param_group({"params": [late]})
        train(stage, optimizer)


def test_two_optimizers_that_are_given_new_layers_in_one_step() -> None:
    """The second one's are made after the first one's were looked for."""
    nets = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    state = TrainingState({"g": nets[0], "d": nets[1], "of g": optimizers[0], "of d": optimizers[1]})
    completeness = Completeness(state)
    completeness.watch()
    for number in range(5):
        completeness.begin()
        for net, optimizer in zip(nets, optimizers, strict=True):
            if number == 4:
                net.append(nn.Linear(2, 2))
                optimizer.add_param_group({"params": net[-1].parameters()})
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        completeness.completed()
    completeness.close()


def test_lists_of_parameters_that_a_script_goes_round_in_are_vetted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To vet takes a state_dict() of all that is protected."""
    stage = Stage()
    lists = [[*stage.linear.parameters()], [*stage.norm.parameters()]]
    optimizer = torch.optim.SGD(lists[0], 0.1)
    vetted: list[object] = []
    monkeypatch.setattr(Completeness, "_check_parameters", lambda _, one: vetted.append(one))
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        for number in range(6):
            optimizer.param_groups[0]["params"] = lists[number % 2]
            train(stage, optimizer)
            completeness.completed()
    assert vetted == [optimizer] * 2


class Everything:
    """One object that saves a model and its optimizer, as torch's Stateful does."""

    def __init__(self, stage: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.stage, self.optimizer = stage, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.stage.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate has it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Container(torch.optim.Optimizer):
    """Several optimizers in one, whose state_dict() has a form of its own, as torchtitan has it."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = [*optimizers]
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"flat": 1}


def contained(stage: nn.Module) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """The container is in the state."""
    assert isinstance(stage, Stage)
    optimizer = Container(adam(stage.linear), adam(stage.norm))
    return {"model": stage, "optimizer": optimizer}, optimizer


def without_container(stage: nn.Module) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """Only the optimizers in it are."""
    state, optimizer = contained(stage)
    assert isinstance(optimizer, Container)
    first, second = optimizer.optimizers
    return {"model": state["model"], "first": first, "second": second}, optimizer


def everything(stage: nn.Module) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    optimizer = adam(stage)
    return {"all": Everything(stage, optimizer)}, optimizer


def wrapped(stage: nn.Module) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    optimizer = Wrapper(adam(stage))
    return {"model": stage, "optimizer": optimizer}, optimizer


def undoable(stage: nn.Module) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    optimizer = swift_ft.wrap_optimizer(adam(stage))
    return {"model": stage, "optimizer": optimizer}, optimizer


def by_part(stage: nn.Module) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """The modules of a stage under names of their own."""
    assert isinstance(stage, Stage)
    optimizer = adam(stage)
    return {"linear": stage.linear, "norm": stage.norm, "optimizer": optimizer}, optimizer


def scheduled(stage: nn.Module) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    optimizer = adam(stage)
    return {"model": stage, "optimizer": optimizer, "schedule": chained(optimizer)}, optimizer


@pytest.mark.parametrize(
    "make", [everything, wrapped, undoable, by_part, scheduled, contained, without_container]
)
def test_a_whole_state(make: Any) -> None:
    stage = Stage()
    state, optimizer = make(stage)
    with attached(stage, **state) as completeness:
        train(stage, optimizer)
        if "schedule" in state:
            state["schedule"].step()
        completeness.completed()


def test_a_container_is_saved_as_what_it_contains() -> None:
    stage = Stage()
    state, optimizer = contained(stage)
    whole = TrainingState(state)
    train(stage, optimizer)
    saved = whole.to_save()
    assert saved["optimizers"].keys() == {"optimizer.0", "optimizer.1"}
    assert all(one["state"] for one in saved["optimizers"].values())


def test_a_container_of_which_one_is_missing() -> None:
    stage = Stage()
    state, optimizer = without_container(stage)
    del state["second"]
    with attached(stage, **state), pytest.raises(IncompleteStateError, match="Container that updates"):
        train(stage, optimizer)


def test_a_container_that_makes_a_state_of_its_own_later() -> None:
    stage = Stage()
    state, optimizer = contained(stage)
    with attached(stage, **state) as completeness:
        train(stage, optimizer)
        optimizer.state[stage.linear.weight]["average"] = torch.zeros(2, 2)
        with pytest.raises(IncompleteStateError, match="Container keeps a state of its own"):
            completeness.completed()


@pytest.mark.parametrize("key", ["global", 7, ("count",)])
def test_state_that_is_of_no_parameter(key: Any) -> None:
    """It would be saved, and no load would take it."""
    stage = Stage()
    optimizer = adam(stage)
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        train(stage, optimizer)
        completeness.completed()
        optimizer.state[key] = {"seen": torch.ones(2)}
        with pytest.raises(UnsupportedError, match=re.escape(f"optimizer (AdamW) keeps state under {key!r}")):
            completeness.completed()


def test_state_of_no_parameter_that_comes_late_is_not_saved() -> None:
    stage = Stage()
    optimizer = adam(stage)
    state = TrainingState({"stage": stage, "optimizer": optimizer})
    train(stage, optimizer)
    state.to_save()
    state.optimizers["optimizer"].state[cast(Any, "global")] = {}
    with pytest.raises(UnsupportedError, match="keeps state under 'global'"):
        state.to_save()


def test_frozen_parameters_may_be_missing() -> None:
    """A script that trains an adapter saves the adapter only."""
    base, adapter = nn.Linear(2, 2).requires_grad_(requires_grad=False), nn.Linear(2, 2)
    stage = nn.Sequential(base, adapter)
    optimizer = adam(adapter)
    with attached(stage, adapter=adapter, optimizer=optimizer) as completeness:
        train(stage, optimizer)
        completeness.completed()


def test_what_the_script_makes() -> None:
    """Frozen parameters that are not in the state, and buffers that no state holds."""
    stage = Stage()
    stage.norm.requires_grad_(requires_grad=False)
    completeness = Completeness(TrainingState({"linear": stage.linear}))
    with pytest.raises(IncompleteStateError, match="running_mean"):
        completeness.attach("stage 1", stage)
    completeness = Completeness(TrainingState({"linear": stage.linear, "moments": Moments(stage.norm)}))
    completeness.attach("stage 1", stage)
    assert [name for name, _ in completeness.made_by_script()] == [
        *(f"stage 1's parameter 'norm.{name}'" for name in ("weight", "bias")),
        "stage 1's buffer 'mask'",
    ]


class Moments(nn.Module):
    """The buffers of a normalisation."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)


def test_other_models_are_the_scripts_own_business() -> None:
    stage, other = Stage(), nn.Linear(2, 2)
    optimizer, foreign = adam(stage), torch.optim.SGD(other.parameters(), 0.1)
    schedule = StepLR(foreign, 1)
    with attached(stage, model=stage, optimizer=optimizer) as completeness:
        train(other, foreign)
        schedule.step()
        train(stage, optimizer)
        completeness.completed()


def test_no_watch_is_left_behind() -> None:
    stage = Stage()
    with attached(stage, model=stage):
        pass
    train(stage, adam(stage))
