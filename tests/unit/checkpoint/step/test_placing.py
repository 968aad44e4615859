"""Values come back into what holds them: what is one thing in a script stays one thing."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.frozen import Copier, same
from swift_ft.checkpoint.step.namespaces import MISSING
from swift_ft.checkpoint.step.placing import Placing
from swift_ft.checkpoint.step.references import UNKNOWN
from swift_ft.torch_core.tensors import version_of


def copied(*values: Any) -> list[Any]:
    copier = Copier()
    return [copier.copy(value) for value in values]


@pytest.mark.parametrize("made", [list, deque, tuple, lambda pair: dict(enumerate(pair))])
def test_tensors_in_containers_are_filled(made: Any) -> None:
    mean, var = torch.zeros(2), torch.zeros(2)
    array, raw = np.zeros(2), bytearray(2)
    both = made([mean, var, array, raw])
    value = made([torch.ones(2), torch.full((2,), 2.0), np.ones(2), bytearray(b"ab")])
    assert Placing().put(both, value) is both
    assert (mean.tolist(), var.tolist(), array.tolist()) == ([1, 1], [2, 2], [1, 1])
    assert raw == b"ab"
    inner = list(both.values()) if isinstance(both, dict) else list(both)
    assert all(one is other for one, other in zip(inner, [mean, var, array, raw], strict=True))


def test_one_thing_in_two_places() -> None:
    """Also where there is nothing yet."""
    mean = torch.ones(2)
    ours = copied(mean, [mean, mean + 1], {"mean": mean})
    placing = Placing()
    one, both, named = (placing.put(MISSING, value) for value in ours)
    assert both[0] is one
    assert named["mean"] is one
    assert one is not ours[0]


def test_what_is_another_thing_by_now() -> None:
    """A window has moved on by one, and a variable still holds one of its tensors."""
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    window, held = [first, second], second
    theirs = [torch.tensor([2.0]), torch.tensor([3.0])]
    values = copied(theirs, theirs[0])
    placing = Placing()
    window = placing.put(window, values[0])
    held = placing.put(held, values[1])
    assert [one.item() for one in window] == [2, 3]
    assert held is window[0]


def test_a_variable_that_is_put_back_does_not_change_another_one() -> None:
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    window, held = [first, second], second
    placing = Placing()
    placing.put(window, [torch.tensor([2.0]), torch.tensor([3.0])])
    held = placing.put(held, torch.tensor([2.0]))
    assert [one.item() for one in window] == [2, 3]
    assert held.item() == 2


@pytest.mark.parametrize("start", [0, 2])
def test_views(start: int) -> None:
    """One that is of another part by now is a tensor of its own."""
    whole = torch.zeros(4)
    part = whole[:2]
    theirs = torch.arange(4.0)
    placing = Placing()
    whole = placing.put(whole, theirs.clone())
    part = placing.put(part, theirs[start : start + 2].clone())
    assert torch.equal(whole, theirs)
    assert torch.equal(part, theirs[start : start + 2])
    assert (part.data_ptr() == whole.data_ptr()) == (start == 0)


def test_what_is_protected_or_cannot_be_written_to() -> None:
    weight, expanded = torch.zeros(2), torch.zeros(1).expand(2)
    with torch.inference_mode():
        inferred = torch.zeros(2)
    for one in (weight, expanded, inferred, torch.zeros(2, dtype=torch.float64), nn.Parameter(weight)):
        put = Placing(lambda tensor: tensor is weight).put(one, torch.ones(2))
        assert put is not one
        assert put.tolist() == [1, 1]
        assert not one.any()


def test_what_has_its_value_is_not_written_to() -> None:
    tensor = torch.ones(2)
    version = version_of(tensor)
    here = {"table": tensor, "count": 1}
    Placing().put(here, {"table": torch.ones(2), "count": 2})
    assert here["table"] is tensor
    assert (version_of(tensor), here["count"]) == (version, 2)


def test_parameters_stay_parameters() -> None:
    ours, theirs = (
        [nn.Parameter(torch.full((2,), x)), nn.Parameter(torch.ones(2), False)] for x in (0.0, 1.0)
    )
    first = ours[0]
    (value,) = copied(theirs)
    assert Placing().put(ours, value) is ours
    assert ours[0] is first
    made = Placing().put(MISSING, value)
    for one in (ours, made):
        assert [type(p) for p in one] == [nn.Parameter] * 2
        assert [p.requires_grad for p in one] == [True, False]
        assert same(copied(one), copied(theirs))


def test_generators_in_a_list() -> None:
    dice, draws = random.Random(1), torch.Generator()
    ours: list[Any] = [dice, draws]
    (value,) = copied([random.Random(2), torch.Generator().manual_seed(3)])
    assert Placing().put(ours, value) is ours
    assert ours == [dice, draws]
    assert dice.random() == random.Random(2).random()
    assert Placing().put(MISSING, value[0]) is UNKNOWN
    assert Placing().put([dice], value) == [dice]


def test_a_window_keeps_its_length() -> None:
    (value,) = copied(deque([1.0], maxlen=2))
    assert Placing().put(MISSING, value).maxlen == 2
    longer = deque([1.0])
    assert Placing().put(longer, value) is not longer


def test_a_list_that_holds_itself() -> None:
    value: list[Any] = [1]
    value.append(value)
    assert copied(value) == [UNKNOWN]


class Meters(dict[str, float]):
    def mean(self) -> float:
        return sum(self.values()) / len(self)


class Losses(list[float]):
    pass


class Ring(deque[float]):
    pass


class Sums(defaultdict[str, float]):
    pass


class Remembers(dict[str, float]):
    """What it knows besides is a variable of its own, which nothing could put here."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.total = 3.0


def of_a_library() -> Any:
    kind = type("Output", (OrderedDict,), {"__module__": "transformers.utils.generic"})
    return kind(a=1.0)


CLASSES: list[Any] = [
    Counter("aab"),
    OrderedDict(a=1.0),
    defaultdict(float, a=1.0),
    defaultdict(None, a=1.0),
    Meters(a=1.0),
    Losses([1.0]),
    Ring([1.0], maxlen=2),
    Sums(float, a=1.0),
    Counter(range(1025)),  # more than are looked into one by one
    OrderedDict.fromkeys(range(1025)),
    defaultdict(int, dict.fromkeys(range(1025), 1)),
    Losses(range(1025)),
]
NOT_MADE: list[Any] = [of_a_library(), defaultdict(lambda: 1.0, a=1.0), Remembers({"a": 1.0})]


@pytest.mark.parametrize("made", CLASSES, ids=lambda one: type(one).__qualname__)
def test_containers_keep_their_classes(made: Any) -> None:
    """Where nothing is yet, where something of another class is, and within another container."""
    value, nested = copied(made), copied([made])
    places: list[Any] = [MISSING, {}, [], 1]
    for now in places:
        put = Placing().put(now, value[0])
        assert type(put) is type(made)
        assert put == made
        assert getattr(put, "default_factory", None) is getattr(made, "default_factory", None)
        assert getattr(put, "maxlen", None) == getattr(made, "maxlen", None)
    inner = Placing().put(MISSING, nested[0])[0]
    assert type(inner) is type(made)
    assert inner == made


@pytest.mark.parametrize("made", [*CLASSES, *NOT_MADE], ids=lambda one: type(one).__qualname__)
def test_what_is_there_takes_the_content(made: Any) -> None:
    there = [made]
    value, within = copied(made, there)
    made.clear()
    assert Placing().put(made, value) is made
    assert same(copied(made)[0], value)
    made.clear()
    assert Placing().put(there, within) is there
    assert there[0] is made
    assert same(copied(made)[0], value)


@pytest.mark.parametrize("made", NOT_MADE, ids=lambda one: type(one).__qualname__)
def test_what_cannot_be_made_is_known_to_lack(made: Any) -> None:
    (value, within) = copied(made, {"meters": made, "count": 1})
    assert Placing().put(MISSING, value) is UNKNOWN
    assert Placing().put({}, value) is UNKNOWN
    placing = Placing()
    assert placing.put({}, within) == {"count": 1}
    assert placing.lacks
