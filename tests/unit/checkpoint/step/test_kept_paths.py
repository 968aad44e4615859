"""Things keep their paths from look to look: a replacement, after other steps, finds them by the same."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState

LARGE = 2**20


class Counts:
    def __init__(self, size: int = 0) -> None:
        self.n = 0
        self.data = torch.zeros(size)


def new_rollback(model: nn.Module | None = None) -> Rollback:
    """Notes the variables of who calls it."""
    rollback = Rollback(TrainingState({"model": model or nn.Linear(1, 1)}))
    rollback.watch()
    return rollback


def names_in(saved: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {f"{path}.{name}" for path, values in saved.items() for name in values}


def test_an_object_keeps_its_path_whatever_a_step_has_given_it_to() -> None:
    """The last one that a loop within a step went over, and one that an attribute names."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5), nn.Linear(1, 1))
    meters = {"a": Counts(), "b": Counts()}
    holder: Any = SimpleNamespace(phases=[Counts(), Counts()], current=None)
    rollback = new_rollback(model)
    saved = []
    for iteration in range(4):
        rollback.begin(iteration)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.1
        for meter in meters.values():
            meter.n += 1
        holder.current = holder.phases[iteration % 2]
        holder.current.n += 1
        rollback.completed()
        saved.append(rollback.carried.to_save())
    named = {f"{path}.{name}" for path, values in saved[-1].items() for name in values}
    there = {"meters['a'].n", "meters['b'].n", "holder.phases[0].n", "holder.phases[1].n", "model.1.p"}
    assert there <= named
    assert not {"meter.n", "part.p", "holder.current.n"} & named
    rollback.carried.take_over(saved[1])
    assert [meter.n for meter in meters.values()] == [2, 2]
    assert [phase.n for phase in holder.phases] == [1, 1]


def test_another_object_in_the_place_of_one_that_is_gone_has_its_path() -> None:
    """Each epoch has a meter of its own. A replacement that begins in a later one has never had the first."""
    holder: Any = SimpleNamespace(meter=Counts(), other=Counts())
    variables = new_rollback()
    for epoch in range(3):
        holder.meter = Counts()
        for iteration in range(2):
            variables.begin(2 * epoch + iteration)
            holder.meter.n += 1
            holder.other.n += 1
            variables.completed()
        saved = variables.carried.to_save()
        named = {f"{path}.{name}" for path, values in saved.items() for name in values}
        assert {"holder.meter.n", "holder.other.n"} <= named, named


@pytest.mark.parametrize("is_left", [False, True])
def test_objects_of_an_epoch_keep_their_paths_in_it(is_left: bool) -> None:
    """An attribute may still have one of the epoch before. A replacement that begins later has none of it."""
    holder: Any = SimpleNamespace(meters={}, current=None)
    rollback = new_rollback()
    for epoch in range(3):
        rollback.carried.epoch_begins()
        holder.meters = {"a": Counts(), "b": Counts()}
        holder.current = holder.current if is_left else None
        rollback.carried.top_is_over()
        for iteration in range(2):
            rollback.begin(2 * epoch + iteration)
            holder.current = holder.meters["ab"[iteration]]
            holder.current.n += 1
            rollback.completed()
        saved = rollback.carried.to_save()
        named = {f"{path}.{name}" for path, values in saved.items() for name in values}
        assert {"holder.meters['a'].n", "holder.meters['b'].n"} <= named, named
        assert "holder.current.n" not in named


def trained_in_epochs(first: int, last: int, arrives: Any = None) -> tuple[Any, list[int]]:
    """What is saved after some epochs, or taken over at the top of the first one; and the counts then."""
    trackers: dict[str, Counts] | None = None
    tracker = None
    rollback = new_rollback()
    for epoch in range(first, last):
        rollback.carried.epoch_begins()
        if trackers is None:  # when they are first needed
            trackers = {"a": Counts(), "b": Counts()}
        rollback.carried.top_is_over()
        if arrives is not None:
            rollback.carried.take_over(arrives)
            break
        for iteration in range(4 * epoch, 4 * epoch + 4):
            rollback.begin(iteration)
            for tracker in trackers.values():
                tracker.n += 1
            rollback.completed()
    assert trackers is not None
    return rollback.carried.to_save(), [one.n for one in trackers.values()]


def test_what_the_first_epoch_has_made_keeps_its_path_in_the_next_ones() -> None:
    """There the variable of a loop within the steps of before leads to one of them first."""
    saved, counts = trained_in_epochs(0, 3)
    assert counts == [12, 12]
    assert {"trackers['a'].n", "trackers['b'].n"} <= names_in(saved)
    assert trained_in_epochs(2, 3, arrives=saved)[1] == counts


@pytest.mark.parametrize("size", [1, LARGE])
def test_a_dictionary_with_large_tensors_keeps_its_path(size: int) -> None:
    tasks = [{"loader": object(), "x": torch.zeros(size), "n": 0} for _ in range(2)]
    holder: Any = SimpleNamespace(current=None)
    rollback = new_rollback()
    saved = []
    for iteration in range(6):
        rollback.begin(iteration)
        holder.current = tasks[iteration % 2]
        holder.current["n"] += 1
        rollback.completed()
        saved.append(rollback.carried.to_save())
    assert {"tasks[0].n", "tasks[1].n"} <= names_in(saved[-1])
    rollback.carried.take_over(saved[2])
    assert [task["n"] for task in tasks] == [2, 1]


def test_a_dictionary_with_large_tensors_is_not_held() -> None:
    """Another thing may get its number then, and has a path of its own."""
    holder: Any = SimpleNamespace(batch={"x": torch.zeros(LARGE), "file": object(), "n": 0}, other=None)
    rollback = new_rollback()
    tensor, number = weakref.ref(holder.batch["x"]), id(holder.batch)
    holder.batch = None
    rollback.begin(0)
    assert tensor() is None
    made = [{"file": object(), "n": 0} for _ in range(1000)]
    holder.other = next((one for one in made if id(one) == number), made[0])
    del made
    holder.other["n"] = 1
    rollback.completed()
    assert "holder.other.n" in names_in(rollback.carried.to_save())


@pytest.mark.parametrize("size", [1, LARGE])
def test_what_is_given_up_is_not_held(size: int) -> None:
    """Neither something else in its place, nor nothing."""
    holder: Any = SimpleNamespace(data=Counts(size), more={"data": Counts(size), "file": object()})
    rollback = new_rollback()
    gone = [weakref.ref(holder.data), weakref.ref(holder.more["data"])]
    rollback.begin(0)
    rollback.completed()
    holder.data, holder.more = Counts(size), None
    for iteration in range(1, 4):
        rollback.begin(iteration)
        rollback.completed()
    rollback.carried.to_save()
    rollback.begin(4)
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_layers_that_come_keep_their_paths() -> None:
    """Those that have left are not held: another worker's machine has room for them, and this one may not."""
    layers = nn.ModuleDict({name: nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)) for name in "01"})
    rollback = new_rollback(layers)

    def names_after(iteration: int) -> set[str]:
        rollback.begin(iteration)
        for part in layers.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.1 + iteration / 100
        rollback.completed()
        return {name for name in names_in(rollback.carried.to_save()) if name.endswith(".p")}

    assert names_after(0) == names_after(1) == {"model.0.1.p", "model.1.1.p"}
    left = weakref.ref(next(layers["1"].parameters()))
    del layers["1"]
    rollback.forget()
    assert names_after(2) == {"model.0.1.p"}
    gc.collect()
    assert left() is None
    layers["1"] = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    rollback.forget()
    rollback.carried.note_made(lambda place: place[0].startswith("model.1"))
    assert names_after(3) == names_after(4) == {"model.0.1.p", "model.1.1.p"}


def test_defaults_of_a_function_that_is_made_at_the_top_of_an_epoch() -> None:
    """They travel with all else that steps change."""
    holder: Any = SimpleNamespace(smooth=None)

    def begin_epoch(rollback: Rollback) -> None:
        rollback.carried.epoch_begins()

        def smooth(value: float, seen: list[float] = []) -> None:  # noqa: B006
            seen.append(value)

        holder.smooth = smooth
        rollback.carried.top_is_over()

    rollback = new_rollback()
    for epoch in range(2):
        begin_epoch(rollback)
        rollback.begin(epoch)
        holder.smooth(1.0)
        rollback.completed()
    saved = rollback.carried.to_save()
    holder.smooth = None
    replacement = new_rollback()
    begin_epoch(replacement)
    replacement.carried.take_over(saved)
    assert holder.smooth.__defaults__ == ([1.0],)


@pytest.mark.parametrize("kept", ["history", "the one before"])
def test_what_is_in_an_object_of_an_epoch_has_its_path(kept: str) -> None:
    """Also where the script keeps that of an epoch before, which has the path until the top is over."""
    holder: Any = SimpleNamespace(tracker=None, previous=None, history=[])
    rollback = new_rollback()
    for epoch in range(4):
        rollback.carried.epoch_begins()
        holder.previous = holder.tracker if kept == "the one before" else None
        holder.tracker = SimpleNamespace(steps=0, loss=Counts())
        if kept == "history":
            holder.history.append(holder.tracker)
        rollback.carried.top_is_over()
        rollback.begin(epoch)
        holder.tracker.steps += 1
        holder.tracker.loss.n += 1
        rollback.completed()
        saved = rollback.carried.to_save()
        assert saved["holder.tracker"]["steps"] == saved["holder.tracker.loss"]["n"] == 1, saved


def test_objects_that_the_top_of_each_epoch_gives_to_other_variables() -> None:
    """A replacement has run these lines once, and knows the objects by what they are called since."""

    def trained(first: int, last: int, arrives: Any = None) -> tuple[Any, list[int]]:
        phases: list[Counts] = []
        active = idle = None
        rollback = new_rollback()
        for epoch in range(first, last):
            rollback.carried.epoch_begins()
            phases = phases or [Counts(), Counts()]
            active, idle = phases[epoch % 2], phases[1 - epoch % 2]
            rollback.carried.top_is_over()
            if arrives is not None:
                rollback.carried.take_over(arrives)
                break
            rollback.begin(epoch)
            active.n += 10
            idle.n += 1
            rollback.completed()
        return rollback.carried.to_save(), [one.n for one in phases]

    for epochs in range(1, 5):
        saved, counts = trained(0, epochs)
        assert trained(epochs - 1, epochs, arrives=saved)[1] == counts


@pytest.mark.parametrize("since", ["the start", "a step"])
def test_a_proxy_of_what_is_gone(since: str) -> None:
    """Any question to it is an error."""
    target: Any = Counts()
    holder: Any = SimpleNamespace(proxy=weakref.proxy(target))
    target = target if since == "a step" else None
    rollback = new_rollback()
    for iteration in range(4):
        rollback.begin(iteration)
        rollback.completed()
        target = None
        rollback.carried.to_save()
    with pytest.raises(ReferenceError):
        _ = holder.proxy.n


class Slow(Counts):
    pass


def trained_in_phases(kind: type[Counts], later: str, last: int, arrives: Any = None) -> tuple[Any, Any]:
    """What is saved after some steps, or taken over before the first one; and the trainer then."""
    phases: list[Any] = [Counts(), kind()]
    trainer: Any = SimpleNamespace(phases=phases, phase=phases[0])
    rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    rollback.watch()
    if arrives is not None:
        rollback.carried.take_over(arrives)
        return None, trainer
    for iteration in range(last):
        rollback.begin(iteration)
        if iteration == 2:
            trainer.phase = trainer.phases[1]
        if iteration == 4:
            trainer.phase = {"another": trainer.phase, "none": None, "back": trainer.phases[0]}[later]
        for phase in trainer.phases:
            phase.n += 1 + (phase is trainer.phase)
        rollback.completed()
    return rollback.carried.to_save(), trainer


@pytest.mark.parametrize("kind", [Counts, Slow])
@pytest.mark.parametrize("later", ["another", "none", "back"])
def test_which_object_a_variable_has_travels(kind: type[Counts], later: str) -> None:
    """By the path that the object has kept."""
    for last in range(1, 7):
        saved, trainer = trained_in_phases(kind, later, last)
        _, replacement = trained_in_phases(kind, later, last, arrives=saved)
        assert [one.n for one in replacement.phases] == [one.n for one in trainer.phases]
        places = [
            next((i for i, one in enumerate(each.phases) if one is each.phase), None)
            for each in (trainer, replacement)
        ]
        assert places[0] == places[1] == (0 if last < 3 else 1 if last < 5 else places[0])


def test_objects_that_change_places_travel_with_their_places() -> None:
    def trained(arrives: Any = None) -> tuple[Any, tuple[int, int]]:
        pair: Any = SimpleNamespace(active=Counts(), spare=Counts())
        rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
        rollback.watch()
        if arrives is not None:
            rollback.carried.take_over(arrives)
            return None, (pair.active.n, pair.spare.n)
        for iteration in range(3):
            rollback.begin(iteration)
            pair.active.n += 10
            pair.spare.n += 1
            pair.active, pair.spare = pair.spare, pair.active
            rollback.completed()
        return rollback.carried.to_save(), (pair.active.n, pair.spare.n)

    saved, counts = trained()
    assert counts == (12, 21)
    assert trained(arrives=saved)[1] == counts


@pytest.mark.parametrize("saver", [0, 1])
def test_what_only_one_rank_has_at_the_top_of_an_epoch_stays(saver: int) -> None:
    """A library's object, which nothing understands, and an own one: another rank's None replaces neither."""
    trainer: Any = SimpleNamespace(bar=None)

    def trained(rank: int, arrives: Any = None) -> Any:
        rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
        rollback.carried.epoch_begins()
        rollback.watch()
        trainer.bar = Counts() if rank == 0 else None
        shown = logging.StreamHandler() if rank == 0 else None
        rollback.carried.top_is_over()
        if arrives is not None:
            rollback.carried.take_over(arrives)
        rollback.begin(0)
        rollback.completed()
        if arrives is not None:
            return type(trainer.bar), type(shown)
        return rollback.carried.to_save()

    saved = trained(saver)
    trainer.bar = None
    kinds = (Counts, logging.StreamHandler) if saver == 1 else (type(None), type(None))
    assert trained(1 - saver, arrives=saved) == kinds


def test_which_object_each_rank_chooses_for_itself_stays() -> None:
    """Where nothing says that all have chosen alike: the variable had none before the first step."""

    def trained(rank: int, arrives: Any = None) -> Any:
        trainer: Any = SimpleNamespace(shards=[Counts(), Counts()], shard=None)
        rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
        rollback.watch()
        if arrives is not None:
            rollback.carried.take_over(arrives)
        rollback.begin(0)
        trainer.shard = trainer.shard or trainer.shards[rank]
        rollback.completed()
        return rollback.carried.to_save(), trainer.shards.index(trainer.shard)

    saved, _ = trained(0)
    assert trained(1, arrives=saved)[1] == 1


class Recent(deque[Any]):
    pass


@pytest.mark.parametrize("kind", [deque, Recent])
def test_an_own_container_is_no_mere_object(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One that grows too large to travel is named, whatever its class."""

    def trained(arrives: Any = None) -> Any:
        recent: Any = kind()
        rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
        rollback.watch()
        if arrives is not None:
            rollback.carried.take_over(arrives)
            return len(recent)
        for iteration in range(3):
            rollback.begin(iteration)
            recent.extend((torch.zeros(1), number) for number in range(500))
            rollback.completed()
        return rollback.carried.to_save()

    assert trained(arrives=trained()) == 0
    assert "1,500 elements) has changed since the start" in caplog.text
