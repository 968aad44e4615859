"""What a script has changed since its start comes with the state, into another process or an earlier step."""

from __future__ import annotations

import copy
import enum
import logging
import random
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import TopologyMismatchError
from swift_ft.optim import wrap_optimizer
from swift_ft.runtime.steps import Loop, Step


class Window(NamedTuple):
    scales: torch.Tensor
    sizes: list[int]


class Net(nn.Module):
    calls = 0

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.center = torch.zeros(2)
        self.history: list[float] = []
        self.table = np.zeros(3)
        self.place = f"log-of-{rank}"
        self.status: HTTPStatus | None = None
        self.window = Window(torch.zeros(2), [])
        self.noise = torch.Generator().manual_seed(1)
        self.dice = random.Random(2)
        self.held = [self.head.weight]


class Process:
    """A process of the script: made as the script makes it, with a session that has started."""

    def __init__(self, rank: int, status: HTTPStatus | None = None) -> None:
        torch.manual_seed(0)
        self.net = Net(rank)
        self.net.status = status
        self.rate = torch.tensor(0.1)
        optimizer = torch.optim.AdamW(
            self.net.head.parameters(), lr=self.rate, capturable=False, foreach=False
        )
        self.optimizer = wrap_optimizer(optimizer)
        self.group = self.optimizer.param_groups[0]
        self.state = TrainingState({"model": self.net, "optimizer": self.optimizer})
        self.rollback = Rollback(self.state)
        self.rollback.watch()

    def step(self) -> None:
        self.net.head(self.net.backbone(torch.ones(1, 2))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self) -> dict[str, Any]:
        return self.state.to_save()


@pytest.fixture
def one() -> Process:
    return Process(0)


@pytest.fixture
def other() -> Process:
    return Process(1)


def change(process: Process) -> None:
    net = process.net
    net.drop.p = 0.25
    net.head.eval()
    net.backbone.requires_grad_(False)
    net.center = net.center + 1
    net.history.append(1.5)
    net.table[1] = 4
    torch.rand((), generator=net.noise)
    net.dice.random()
    vars(net)["count"] = 3


def test_another_process(one: Process, other: Process) -> None:
    one.step()
    change(one)
    center, dice = other.net.center, other.net.dice
    other.state.take_over(one.saved())
    net = other.net
    assert (net.drop.p, net.head.training, net.backbone.weight.requires_grad) == (0.25, False, False)
    assert net.center is center
    assert center.eq(1).all()
    assert (net.history, vars(net)["count"]) == ([1.5], 3)
    assert net.table.tolist() == [0, 4, 0]
    assert net.noise.get_state().equal(one.net.noise.get_state())
    assert dice.random() == one.net.dice.random()
    assert net.place == "log-of-1"  # what has not changed does not travel
    assert net.held[0] is net.head.weight


@pytest.mark.parametrize("value", [None, False, 0, "", ()])
def test_a_variable_that_has_become_nothing(one: Process, other: Process, value: Any) -> None:
    for iteration in range(2):
        one.rollback.begin(iteration)
        one.net.place, one.net.status = value, HTTPStatus.OK if iteration == 0 else None
        one.rollback.completed()
    other.state.take_over(one.saved())
    assert (other.net.place, type(other.net.place)) == (value, type(value))
    assert other.net.status is None


def test_back_to_a_state_of_before(one: Process) -> None:
    """What was as at the start then is so again."""
    before = one.saved()
    change(one)
    one.state.take_over(before)
    net = one.net
    assert (net.drop.p, net.head.training, net.backbone.weight.requires_grad) == (0.5, True, True)
    assert not net.center.any()
    assert net.history == []
    assert not net.table.any()
    assert net.noise.get_state().equal(torch.Generator().manual_seed(1).get_state())


def test_what_a_session_gives_to_the_script_is_no_variable_of_it(one: Process) -> None:
    """A step, and what yields them."""
    before = one.state.unpack(one.saved()["plain"]["bytes"].getvalue())["carried"]
    loop = Loop.__new__(Loop)
    vars(one.net).update(latest=Step.__new__(Step), loop=loop, steps=loop.steps(4), history=[1])
    now = one.state.unpack(one.saved()["plain"]["bytes"].getvalue())["carried"]
    assert now == {**before, "model": {"history": [1]}}


@pytest.mark.parametrize("there_at_the_start", [True, False])
def test_an_enum_of_a_library(there_at_the_start: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its class is looked for among those of the values that the script begins with. Else a line names it."""
    one, other = (Process(rank, HTTPStatus.OK if there_at_the_start else None) for rank in (0, 1))
    one.net.status = HTTPStatus.GONE
    with caplog.at_level(logging.WARNING):
        other.state.take_over(one.saved())
    assert other.net.status == (HTTPStatus.GONE if there_at_the_start else None)
    said = [one.getMessage() for one in caplog.records if getattr(one, "event", "") == "variable_not_taken"]
    assert ["model.status (of http.HTTPStatus)" in line for line in said] == [True] * (not there_at_the_start)


def test_a_named_tuple_of_what_changes(one: Process, other: Process) -> None:
    there, one.net.window = other.net.window, Window(torch.ones(2), [1])
    other.state.take_over(one.saved())
    found = other.net.window
    assert type(found) is Window
    assert found.scales is there.scales
    assert (found.scales.tolist(), found.sizes) == ([1, 1], [1])


def test_what_only_arrived_is_of_no_time_before_the_first_step(one: Process, other: Process) -> None:
    """A step of the process that it comes from has made it: there it was not before the first step either."""
    one.rollback.begin(0)
    change(one)
    carried = one.rollback.carried.to_save()
    other.rollback.carried.take_over(carried)
    other.rollback.begin(1)
    assert vars(other.net)["count"] == 3
    found = [process.rollback.carried.digests_of_earlier(carried) for process in (one, other)]
    ours, theirs = ({n: d for n, d in each.items() if n.startswith("model.")} for each in found)
    assert ours == theirs
    assert "model.history" in ours
    assert "model.count" not in ours


@pytest.mark.parametrize(
    ("length", "travels"), [(1024, True), (1025, True), (2**16, True), (2**16 + 1, False)]
)
def test_a_history_of_losses(
    length: int, travels: bool, one: Process, other: Process, caplog: pytest.LogCaptureFixture
) -> None:
    one.net.history += [0.5] * length
    with caplog.at_level(logging.WARNING):
        other.state.take_over(one.saved())
    assert other.net.history == ([0.5] * length if travels else [])
    said = [record for record in caplog.records if getattr(record, "event", "") == "variable_not_taken"]
    assert len(said) == (not travels)
    if said:
        assert f"model.history (a list of {length:,} elements)" in said[0].getMessage()


def test_a_long_list_that_both_have_made_is_not_named(
    one: Process, other: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a list of files, made after the session."""
    for process in (one, other):
        vars(process.net)["files"] = [str(number) for number in range(2**16 + 1)]
        process.rollback.begin(0)
    with caplog.at_level(logging.WARNING):
        other.state.take_over(one.saved())
    assert not caplog.records


def test_dictionaries_that_make_entries_stay_such(one: Process, other: Process) -> None:
    """TRL's trainers collect their metrics so."""
    for process in (one, other):
        process.net.metrics = {"train": defaultdict(list)}  # type: ignore[assignment]
        process.net.sums = defaultdict(lambda: defaultdict(float))  # type: ignore[assignment]
        process.rollback.watch()
    metrics: Any = one.net.metrics
    sums: Any = one.net.sums
    metrics["train"]["loss"].append(0.5)
    sums["eval"]["loss"] += 2.0
    other.state.take_over(one.saved())
    metrics, sums = other.net.metrics, other.net.sums
    assert metrics == {"train": {"loss": [0.5]}}
    assert sums == {"eval": {"loss": 2.0}}
    metrics["train"]["entropy"].append(1.0)
    sums["train"]["entropy"] += 1.0
    sums["eval"]["entropy"] += 1.0


class Made(Net):
    """As ``fully_shard`` makes a class: it inherits a variable, and gets one of its own as a step counts."""


def test_what_a_step_has_made_is_gone_again(one: Process) -> None:
    """Also if it was made in the last step, and no step has looked at it since."""
    one.net.__class__ = Made
    before = one.saved()
    one.rollback.begin(0)
    vars(one.net)["made"] = 1
    Made.calls += 1
    one.state.take_over(before)
    assert "made" not in vars(one.net)
    assert "calls" not in vars(Made)
    assert Made.calls == 0


def test_what_the_script_has_made_before_its_first_step_stays(one: Process, other: Process) -> None:
    """An older run's checkpoint does not have it: the script was changed, or it is of this process only."""
    before = one.saved()
    vars(other.net)["made"] = object()
    vars(other.net)["rank"] = 1
    other.state.take_over(before)
    other.rollback.begin(0)
    other.state.take_over(before)
    assert other.net.rank == 1
    assert "made" in vars(other.net)


class Phase(enum.Enum):
    WARM, HOT = range(2)


class Meter:
    """A part of the state, with variables of its own."""

    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_a_value_that_cannot_be_saved_stays_as_it_is(one: Process, other: Process) -> None:
    """It is not taken for one that has not changed."""
    vars(one.net)["handle"] = None
    vars(other.net)["handle"] = None
    for process in (one, other):
        process.rollback.watch()
    vars(one.net)["handle"] = threading.Lock()
    vars(other.net)["handle"] = lock = threading.Lock()
    other.state.take_over(one.saved())
    assert vars(other.net)["handle"] is lock
    other.state.take_over(Process(2).saved())
    assert vars(other.net)["handle"] is lock


def test_parts_of_the_state_say_themselves_what_is_their_state() -> None:
    meter = Meter()
    model = nn.Linear(2, 2)
    vars(model)["phase"] = Phase.WARM
    state = TrainingState({"model": model, "meter": meter})
    Rollback(state).watch()
    meter.value, vars(model)["phase"] = Phase.HOT, Phase.HOT
    saved = state.to_save()
    meter.value, vars(model)["phase"] = 7, Phase.WARM
    state.take_over(saved)
    assert meter.value is Phase.HOT
    assert vars(model)["phase"] is Phase.HOT


def test_groups_that_were_added_and_held(one: Process, other: Process) -> None:
    one.step()
    one.optimizer.add_param_group({"params": one.net.backbone.parameters(), "lr": 0.2, "name": "late"})
    one.step()
    one.group["weight_decay"] = 0.5
    one.rate.fill_(0.3)
    other.state.take_over(one.saved())
    assert [group.get("name") for group in other.optimizer.param_groups] == [None, "late"]
    assert other.optimizer.param_groups[0] is other.group
    assert other.group["weight_decay"] == 0.5
    assert other.group["lr"] is other.rate
    assert float(other.rate) == pytest.approx(0.3)
    for mine, theirs in zip(one.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(one.optimizer.state[mine]["exp_avg"], other.optimizer.state[theirs]["exp_avg"])
    before = Process(2).saved()
    other.state.take_over(before)  # to before the group was added
    assert len(other.optimizer.param_groups) == 1
    assert {*other.optimizer.state} <= {*other.net.head.parameters()}


PARAMETERS_LATER = {
    "of another layer": ["backbone.weight", "backbone.bias"],
    "of two layers": ["backbone.weight", "head.bias"],
    "of that layer in another order": ["head.bias", "head.weight"],
}


@pytest.mark.parametrize("later", PARAMETERS_LATER.values(), ids=PARAMETERS_LATER)
def test_a_group_that_got_as_many_other_parameters(later: list[str], one: Process, other: Process) -> None:
    """As block-wise training does, with blocks that are alike: state belongs to parameters, not to places."""
    one.step()
    one.group["params"] = [one.net.get_parameter(name) for name in later]
    one.optimizer.state.clear()
    one.step()
    other.step()
    other.state.take_over(copy.deepcopy(one.saved()))  # which has its live tensors
    names: dict[Any, str] = {parameter: name for name, parameter in one.net.named_parameters()}
    there: dict[Any, str] = {parameter: name for name, parameter in other.net.named_parameters()}
    trained = [names[parameter] for parameter in one.group["params"]]
    assert [there[parameter] for parameter in other.group["params"]] == trained
    assert other.optimizer.param_groups[0] is other.group
    ours = {names[p]: state["exp_avg"] for p, state in one.optimizer.state.items() if names[p] in trained}
    theirs = {there[p]: state["exp_avg"] for p, state in other.optimizer.state.items() if there[p] in trained}
    assert ours.keys() == theirs.keys() == {*trained}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for process in (one, other):
        process.net.zero_grad()
        process.step()
    for mine, theirs_ in zip(one.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(mine, theirs_)


def test_a_group_of_parameters_that_no_module_has(one: Process, other: Process) -> None:
    one.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(TopologyMismatchError, match=r"groups of \[2, 1\] parameters when it was saved"):
        other.state.take_over(one.saved())


def test_a_sparse_tensor_stays_where_it_is(one: Process, other: Process) -> None:
    """A copy of its elements would be none of it. What is beside it travels."""
    sparse = torch.eye(2).to_sparse()
    vars(one.net).update(gradient=sparse, gradients={"newest": sparse})
    one.net.history.append(1.0)
    one.rollback.begin(0)
    saved = one.saved()
    one.net.history.append(2.0)
    vars(one.net)["gradient"] = torch.zeros(2, 2).to_sparse()
    one.rollback.back()
    assert vars(one.net)["gradient"] is sparse
    other.state.take_over(saved)
    assert other.net.history == [1.0]


def test_one_tensor_in_two_places_stays_one(one: Process, other: Process) -> None:
    """In a replacement, and after a return to a state of before."""
    for process in (one, other):
        vars(process.net)["all"] = [process.net.center, torch.zeros(1)]
        process.rollback.watch()
    before = one.saved()
    one.net.center += 1
    vars(one.net)["made"] = vars(one.net)["again"] = torch.ones(1)
    other.state.take_over(one.saved())
    one.state.take_over(before)
    for process, mean in ((one, 0), (other, 1)):
        assert vars(process.net)["all"][0] is process.net.center
        assert process.net.center.eq(mean).all()
    assert vars(other.net)["made"] is vars(other.net)["again"]


@pytest.mark.parametrize(
    ("start", "change"),
    [
        ([0.0] * 2000, lambda v: v.__setitem__(1999, -0.0)),
        ([(0, "a")] * 2000, lambda v: v.__setitem__(7, (1, "a"))),
        (dict.fromkeys(range(2000), 0.5), lambda v: v.update({1: 1})),
        ({*range(2000)}, lambda v: v.symmetric_difference_update([1, 5000])),
        (deque([0.5] * 2000, 2000), lambda v: v.append(1.0)),
        (bytearray(2000), lambda v: v.__setitem__(7, 1)),
    ],
)
def test_many_plain_values(start: Any, change: Any) -> None:
    # Variables of this test would be found by both.
    hidden = MappingProxyType({"one": Process(0), "other": Process(1)})
    for name in hidden:
        vars(hidden[name].net)["many"] = copy.copy(start)
        hidden[name].rollback.watch()
    kept = MappingProxyType({"many": vars(hidden["other"].net)["many"], "before": hidden["one"].saved()})
    change(vars(hidden["one"].net)["many"])
    hidden["other"].state.take_over(hidden["one"].saved())
    assert vars(hidden["other"].net)["many"] is kept["many"]
    assert repr(kept["many"]) == repr(vars(hidden["one"].net)["many"]) != repr(start)
    hidden["other"].state.take_over(kept["before"])
    assert repr(kept["many"]) == repr(start)


class Trainer:
    """A script's own subclass of an integration's."""

    def __init__(self) -> None:
        self.loss, self.steps = torch.zeros(()), 0
        self.net = nn.Linear(1, 1)
        self.net.callbacks = [self]  # type: ignore[assignment]


class ProgressOf:
    """The part of the state that an integration makes for it: each rank's sum comes with it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.gives_attributes = ((trainer, "loss"),)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.trainer.loss.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.loss = torch.tensor(state["loss"] + 1)  # this rank's, say


@dataclass
class OfTrainer:
    """A process of a script that subclasses the integration's trainer."""

    trainer: Trainer = field(default_factory=Trainer)

    def __post_init__(self) -> None:
        self.state = TrainingState({"model": self.trainer.net, "progress": ProgressOf(self.trainer)})
        self.rollback = Rollback(self.state)
        self.rollback.watch()


def test_attributes_that_a_part_gives_are_no_variables_of_the_script() -> None:
    """Else they would be named as each replica's own, and as of an earlier iteration."""
    first = OfTrainer()
    first.trainer.loss, first.trainer.steps = torch.tensor(3.0), 2
    saved = first.state.to_save()
    (values,) = (one for one in first.rollback.carried.to_save().values() if "steps" in one)
    assert values.keys() == {"steps"}
    second = OfTrainer()
    second.state.take_over(second.state.to_load({}) | saved)
    assert (second.trainer.loss.item(), second.trainer.steps) == (4.0, 2)


class Meters(dict[str, Any]):
    """A part of the script's own, that has any attribute."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


def test_a_part_that_has_any_attribute() -> None:
    rollback = Rollback(TrainingState({"model": nn.Linear(1, 1), "meters": Meters(n=1)}))
    rollback.watch()
    rollback.begin(0)
    rollback.completed()
    rollback.carried.to_save()
