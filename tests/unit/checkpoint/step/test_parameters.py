"""Parameters that change outside of an optimizer's step are found, copied and put back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import CheckStep, Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import RecoveryError
from swift_ft.optim import wrap_optimizer


class Training:
    """A model with a part that no optimizer has, and steps that end in an update."""

    def __init__(self, check: CheckStep = CheckStep.FIRST) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"trained": nn.Linear(3, 3), "follower": nn.Linear(3, 3)})
        self.trained: nn.Module = self.model["trained"]
        self.follower: nn.Module = self.model["follower"]
        self.optimizer = wrap_optimizer(torch.optim.AdamW(self.trained.parameters(), lr=0.1), exact=True)
        self.rollback = Rollback(TrainingState({"model": self.model, "optimizer": self.optimizer}), check)
        self.average = torch.zeros(2**19)
        self.model.average = self.average
        self.rollback.watch()
        self.iteration = 0

    def begin(self) -> None:
        self.rollback.begin(self.iteration)

    def compute(self) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(self.iteration))
        self.trained(x).square().sum().backward()

    def update(self) -> None:
        self.optimizer.step()

    def complete(self) -> None:
        self.rollback.completed()
        self.iteration += 1

    @property
    def changes_parameters(self) -> bool:
        """Whether it was found that steps change parameters outside of the optimizer."""
        return bool(self.rollback._parameters._kinds)

    def bits(self) -> list[torch.Tensor]:
        state = self.optimizer.state.values()
        found = [*self.model.parameters(), self.average, *(v for fields in state for v in fields.values())]
        return [tensor.detach().clone() for tensor in found]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def training() -> Training:
    return Training()


def train(training: Training, steps: int) -> None:
    """Steps that change nothing outside of the optimizer's."""
    for _ in range(steps):
        training.begin()
        training.compute()
        training.update()
        training.complete()


@torch.no_grad()
def clamp_data(training: Training) -> None:
    for parameter in training.trained.parameters():
        parameter.data.clamp_(-0.3, 0.3)


@torch.no_grad()
def clamp(training: Training) -> None:
    for parameter in training.trained.parameters():
        parameter.clamp_(-0.3, 0.3)


@torch.no_grad()
def follow(training: Training) -> None:
    for f, p in zip(training.follower.parameters(), training.trained.parameters(), strict=True):
        f.data = f.data * 0.9 + p.data * 0.1


def grow(training: Training) -> None:
    """A large average in an attribute, in place: it counts as a parameter does."""
    training.average.data.add_(1)


@pytest.mark.parametrize("change", [clamp_data, clamp, follow, grow])
@pytest.mark.parametrize("updated", [False, True])
def test_put_back(training: Training, change: Callable[[Training], None], updated: bool) -> None:
    for _ in range(2):
        training.begin()
        training.compute()
        training.update()
        change(training)
        training.complete()
    before = training.bits()
    training.begin()
    training.compute()
    change(training)
    if updated:
        training.update()
        change(training)
    assert training.rollback.dirty() is None
    training.rollback.back()
    if training.optimizer.windows_opened == 3 and training.optimizer.updated:
        training.optimizer.undo()  # as a plan would say
        training.rollback.undone()
    assert same(training.bits(), before)
    training.rollback.close()


def scale_state(training: Training) -> None:
    """As momentum is corrected when the rate changes."""
    for fields in training.optimizer.state.values():
        fields["exp_avg"].mul_(0.5)


def renew_state(training: Training) -> None:
    """As at a warm restart: with other tensors."""
    for fields in training.optimizer.state.values():
        fields["exp_avg_sq"] = fields["exp_avg_sq"] * 2


def drop_state(training: Training) -> None:
    training.optimizer.state.clear()


@pytest.mark.parametrize("change", [scale_state, renew_state, drop_state])
@pytest.mark.parametrize("place", ["before", "after"])
def test_state_that_a_script_changes_is_put_back(
    training: Training, change: Callable[[Training], None], place: str
) -> None:
    """From the first such step on, whether it changes before the update or after it."""
    for _ in range(3):
        training.begin()
        if place == "before":
            change(training)
        training.compute()
        training.update()
        if place == "after":
            change(training)
        training.complete()
    training.begin()
    before = training.bits()
    change(training)
    assert training.rollback.dirty() is None
    training.rollback.back()
    assert same(training.bits(), before)
    training.begin()
    training.compute()
    training.update()
    change(training)
    assert training.rollback.dirty() is None
    training.rollback.back()
    assert same(training.bits(), before)
    training.rollback.close()


@pytest.mark.parametrize("check", CheckStep)
@pytest.mark.parametrize("change", [scale_state, renew_state, drop_state])
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_state_that_changes_for_the_first_time(
    check: CheckStep, change: Callable[[Training], None], place: str
) -> None:
    """There is no copy: not where the update has come since, either."""
    training = Training(check)
    for _ in range(5):
        training.begin()
        training.compute()
        training.update()
        training.complete()
    training.begin()
    assert training.rollback.dirty() is None
    training.compute()
    if place != "after":
        change(training)
    if place != "before":
        training.update()
    if place == "after":
        change(training)
    reason = training.rollback.dirty()
    assert reason is not None
    assert "an optimizer's state of model.trained.weight" in reason
    training.rollback.close()


def test_one_line_names_all_of_a_part(caplog: pytest.LogCaptureFixture) -> None:
    """Averaged weights have as many tensors as the model."""
    model = nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 50))
    ema, head = copy.deepcopy(model), nn.Linear(2, 2, bias=False)
    rollback = Rollback(TrainingState({"model": model, "ema": ema, "head": head}))
    with caplog.at_level(logging.INFO), torch.no_grad():
        for iteration in range(3):
            rollback.begin(iteration)
            for parameter in (*ema.parameters(), *head.parameters()):
                parameter.mul_(0.9)
            rollback.completed()
    rollback.close()
    assert [
        one.getMessage() for one in caplog.records if getattr(one, "event", "") == "parameter_copied"
    ] == [
        "4 tensors of ema, such as ema.0.weight, change outside of an optimizer's step: they are copied as "
        "each step begins (0.14 MB)",
        "head.weight changes outside of an optimizer's step: it is copied as each step begins (0.00 MB)",
    ]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("change", [scale_state, clamp_data])
def test_a_completed_step_is_undone(
    training: Training, change: Callable[[Training], None], begun: bool
) -> None:
    """Its update was followed by what no undo takes back: a copy does."""
    for _ in range(3):
        training.begin()
        training.compute()
        training.update()
        change(training)
        training.complete()
    training.begin()
    before = training.bits()
    training.compute()
    training.update()
    change(training)
    training.complete()
    if begun:
        training.begin()
        training.compute()
        training.rollback.back()
    assert len(training.optimizer.updated) == 2, "as it is reported"
    training.rollback.back_to(training.iteration - 1)
    training.optimizer.undo()
    training.rollback.undone()
    assert same(training.bits(), before)
    training.rollback.close()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_completed_step_of_which_there_is_no_copy(training: Training, begun: bool, place: str) -> None:
    for number in range(5):
        training.begin()
        if number == 4 and place == "before":
            scale_state(training)
        training.compute()
        training.update()
        if number == 4 and place == "after":
            scale_state(training)
        training.complete()
    if begun:
        training.begin()
        training.rollback.back()
    with pytest.raises(RecoveryError, match=r"cannot be undone: it has changed .*model.trained.weight"):
        training.rollback.back_to(training.iteration - 1)
    training.rollback.close()


def test_state_that_others_put_in_place_is_no_change_by_the_script(training: Training) -> None:
    """As a recovery between two steps does. A look at state that there is not yet is none, either."""
    for _ in range(3):
        training.begin()
        for parameter in training.trained.parameters():
            training.optimizer.state[parameter].get("exp_avg")
        training.compute()
        training.update()
        training.complete()
    scale_state(training)
    training.rollback.may_be_given()
    training.begin()
    assert training.rollback.dirty() is None
    assert not training.changes_parameters
    training.rollback.close()


@pytest.mark.parametrize("check", CheckStep)
@pytest.mark.parametrize("change", [clamp_data, clamp])
def test_a_first_change_that_a_look_has_seen_has_no_copy_either(
    check: CheckStep, change: Callable[[Training], None]
) -> None:
    """In a step that is looked at closely, the look comes before the loss."""
    training = Training(check)
    training.begin()
    change(training)
    training.rollback._before_forward()  # as the hook on the model calls it
    training.compute()
    reason = training.rollback.dirty()
    assert reason is not None
    assert "model.trained.weight" in reason
    training.rollback.close()


@pytest.mark.parametrize("check", CheckStep)
@pytest.mark.parametrize("change", [clamp_data, clamp, follow])
def test_what_is_seen_for_the_first_time_cannot_be_put_back(
    check: CheckStep, change: Callable[[Training], None]
) -> None:
    training = Training(check)
    for _ in range(5):
        training.begin()
        training.compute()
        training.update()
        training.complete()
    assert not training.changes_parameters
    training.begin()
    assert training.rollback.dirty() is None
    change(training)
    reason = training.rollback.dirty()
    assert reason is not None
    assert "model.follower.weight" in reason or "model.trained.weight" in reason
    training.rollback.close()


@pytest.mark.parametrize("change", [clamp_data, clamp, None])
def test_a_change_after_the_update_cannot_be_undone(change: Callable[[Training], None] | None) -> None:
    """An interrupted step whose update would be undone from other values than it has left."""
    training = Training()
    for _ in range(5):
        training.begin()
        training.compute()
        training.update()
        training.complete()
    training.begin()
    training.compute()
    training.update()
    if change is not None:
        change(training)
    reason = training.rollback.dirty()
    assert (reason is not None and "model.trained.weight" in reason) == (change is not None)
    training.rollback.close()


def test_an_update_alone_is_no_such_change(training: Training) -> None:
    for _ in range(3):
        training.begin()
        training.compute()
        training.update()
        training.complete()
    assert not training.changes_parameters
    training.rollback.close()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("change", [clamp_data, clamp])
def test_a_first_change_before_the_update_cannot_be_put_back(
    change: Callable[[Training], None], exact: bool
) -> None:
    """As each fifth step shrinks its weights. An undo of the update leads to the shrunk ones."""
    training = Training()
    wrap_optimizer(training.optimizer, exact=exact)
    train(training, 5)
    training.begin()
    change(training)
    training.compute()
    training.update()
    reason = training.rollback.dirty()
    assert reason is not None
    assert "model.trained.weight" in reason
    training.rollback.close()


def test_a_first_change_before_the_updates_of_a_backward_pass(training: Training) -> None:
    """A wait-free optimizer has updated before its step begins."""
    wrap_optimizer(training.optimizer, exact=True, wait_free=True)
    weight, bias = training.trained.parameters()
    train(training, 5)
    for place in (None, "before"):
        training.begin()
        if place == "before":
            clamp_data(training)
        training.rollback._before_forward()  # as the hook on the model calls it
        training.compute()
        training.optimizer.update([weight])
        assert (training.rollback.dirty() is not None) == (place == "before")
        training.optimizer.update([bias])
        training.optimizer.backward_ended()
        training.update()
        assert (training.rollback.dirty() is not None) == (place == "before")
        training.complete()
    training.rollback.close()


def test_a_change_that_is_seen_twice_in_one_step_is_rare_all_the_same(training: Training) -> None:
    """A wait-free optimizer is looked at before each forward, and before its step."""
    wrap_optimizer(training.optimizer, wait_free=True)
    for number in range(7):
        training.begin()
        if number == 5:
            clamp(training)
        for _ in range(2):
            training.rollback._before_forward()  # as the hook on the model calls it
        training.compute()
        training.update()
        training.complete()
    training.begin()
    assert not training.changes_parameters
    training.rollback.close()


def test_updates_one_after_another_are_no_such_changes() -> None:
    """Of one optimizer, and of another one that has a parameter of it, too."""
    training = Training()
    other = wrap_optimizer(torch.optim.SGD([*training.trained.parameters()][:1], lr=0.1), exact=True)
    state = TrainingState({"model": training.model, "optimizer": training.optimizer, "other": other})
    training.rollback.close()
    training.rollback = Rollback(state)
    training.rollback.watch()
    for number in range(6):
        training.begin()
        training.compute()
        training.update()
        if number % 2:
            training.update()
        other.step()
        assert training.rollback.dirty() is None
        training.complete()
    training.begin()
    assert training.rollback._parameters.lost() == []
    assert not training.changes_parameters
    training.rollback.close()


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_change_of_each_fifth_step_is_copied_from_the_second_one_on(training: Training, place: str) -> None:
    """No close look meets it: versions tell."""
    for number in range(15):
        training.begin()
        before = training.bits()
        if number % 5 == 4 and place == "before":
            clamp(training)
        training.compute()
        training.update()
        if number % 5 == 4 and place == "after":
            clamp(training)
        if number < 14:
            training.complete()
    assert training.rollback.dirty() is None
    training.rollback.back()
    if training.optimizer.updated:
        training.optimizer.undo()
        training.rollback.undone()
    assert same(training.bits(), before)
    training.rollback.close()


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_change_now_and_then_is_not_copied_for(training: Training, place: str) -> None:
    """It costs its own step the way back, and not each later step the memory of all parameters."""
    for number in range(50):
        training.begin()
        if number % 20 == 4 and place == "before":
            clamp(training)
        training.compute()
        training.update()
        if number % 20 == 4 and place == "after":
            clamp(training)
        assert (training.rollback.dirty() is not None) == (number % 20 == 4)
        training.complete()
    assert not training.changes_parameters
    training.rollback.close()


@pytest.mark.parametrize("change", [clamp_data, clamp, scale_state])
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("repeated", [False, True])
def test_a_step_of_which_there_is_no_copy_is_not_undone_once_the_next_one_has_begun(
    training: Training, change: Callable[[Training], None], place: str, repeated: bool
) -> None:
    """A second interruption of the next one changes nothing about it."""
    train(training, 4)
    training.begin()
    if place == "before":
        change(training)
    training.compute()
    training.update()
    if place == "after":
        change(training)
    training.complete()
    for _ in range(2 if repeated else 1):
        training.begin()
        training.compute()
        assert training.rollback.dirty() is None
        training.rollback.back()
        training.rollback.may_be_given()
    with pytest.raises(RecoveryError, match=r"cannot be undone: it has changed .*model.trained.weight"):
        training.rollback.back_to(training.iteration - 1)
    training.rollback.close()


@pytest.mark.parametrize("kind", ["added", "exchanged"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_an_update_of_parameters_that_the_step_has_given_to_its_optimizer(
    training: Training, kind: str, place: str
) -> None:
    """No plan could name them: groups go back first. After the update it is what the step began with."""
    train(training, 5)
    training.begin()
    before = training.bits()

    def regroup() -> None:
        others = [*training.follower.parameters()]
        if kind == "added":
            training.optimizer.add_param_group({"params": others})
        else:
            training.optimizer.param_groups[0]["params"] = others

    training.model.zero_grad()
    if place == "before":
        regroup()
    training.compute()
    training.follower(torch.ones(1, 3)).square().sum().backward()
    training.update()
    if place == "after":
        regroup()
    reason = training.rollback.dirty()
    assert (reason is not None and "has given the AdamW other parameters" in reason) == (place == "before")
    training.rollback.back()
    assert len(training.optimizer.updated) == (4 if place == "before" and kind == "added" else 2)
    training.optimizer.undo()
    training.rollback.undone()
    assert same(training.bits(), before)
    training.rollback.close()


def test_perturbed_between_two_passes_and_put_back_by_the_script(training: Training) -> None:
    """Before and after it, all bits and counts are the same: only the second pass sees another value."""
    weight = training.trained.weight
    assert isinstance(weight, nn.Parameter)
    hook = training.rollback
    training.begin()
    training.compute()
    old = weight.data.clone()
    weight.data.add_(1.0)
    training.model.register_forward_pre_hook(lambda *_: None)
    hook._before_forward()  # as the hook on the model calls it
    weight.data.copy_(old)
    training.update()
    training.complete()
    assert training.changes_parameters
    training.rollback.close()


def reset_at(training: Training, steps: set[int]) -> list[int]:
    """Trains 40 steps, some of which begin without state. How many parameters each has copied."""
    copied = []
    for step in range(40):
        if step in steps:
            drop_state(training)
        training.begin()
        copied.append(len(training.rollback._parameters._copied))
        training.compute()
        training.update()
        training.complete()
    training.rollback.close()
    return copied


def test_a_restart_now_and_then_is_not_copied_for(training: Training) -> None:
    """It costs the step before it its way back, and not each later step the memory of all state."""
    assert not any(reset_at(training, {5, 22, 39}))


def test_state_that_changes_between_steps_again_and_again(training: Training) -> None:
    copied = reset_at(training, {5, 9})
    assert not any(copied[:9])
    assert copied[9:] == [2] * 31
