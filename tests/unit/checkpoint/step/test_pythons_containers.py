"""Containers of Python's library go back and travel; what answers for any attribute is asked for none."""

from __future__ import annotations

import threading
from array import array
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from swift_ft.checkpoint.plain_classes import attributes
from swift_ft.checkpoint.step.frozen import frozen, same
from swift_ft.checkpoint.step.kinds import is_namespace
from swift_ft.checkpoint.step.large_values import LargeValues
from swift_ft.checkpoint.step.placing import Placing
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState


class AttrDict(dict[str, Any]):
    """A widespread one: a name that it does not have is a ``KeyError``."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Slotted(dict[str, Any]):
    """The same, without a dictionary of attributes, and with a slot that is empty."""

    __slots__ = ("more",)
    __getattr__ = dict.__getitem__


class Numbers(array):  # type: ignore[type-arg]  # Python 3.11 has no such
    """An own one."""


class Bag(UserDict[str, float]):
    """An own one."""


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "UserDict": (lambda: UserDict(a=1.0), lambda one: one.update(a=2.0, b=3.0)),
    "UserList": (lambda: UserList([1.0]), lambda one: one.append(2.0)),
    "ChainMap": (lambda: ChainMap({"a": 1.0}, {"b": 2.0}), lambda one: one.update(b=3.0)),
    "array": (lambda: array("d", [0.0]), lambda one: one.append(2.0)),
    "array of other bits": (lambda: array("d", [0.0]), lambda one: one.__setitem__(0, -0.0)),
    "class of array": (lambda: Numbers("f", [0.0]), lambda one: one.extend([1.0, 2.0])),
    "class of UserDict": (lambda: Bag(a=1.0), lambda one: one.update(a=2.0)),
    "AttrDict": (lambda: AttrDict(a=1.0), lambda one: one.update(a=2.0, b=3.0)),
    "AttrDict with slots": (lambda: Slotted(a=1.0), lambda one: one.update(a=2.0, b=3.0)),
}


def local(**attributes: float) -> Any:
    made = threading.local()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Local(threading.local):
    """An own one."""

    def __init__(self) -> None:
        self.a = 1.0


KINDS |= {
    "threading.local": (lambda: local(a=1.0), lambda one: setattr(one, "a", 2.0)),
    "class of threading.local": (Local, lambda one: setattr(one, "a", 2.0)),
}


def shown(one: Any) -> str:
    return repr(vars(one)) if isinstance(one, threading.local) else repr(one)


class Process:
    """A process of the script, whose model holds a container."""

    def __init__(self, container: Any, *, in_list: bool) -> None:
        model: Any = nn.Linear(1, 1)
        model.held = [container] if in_list else container
        self.held, self._in_list = model.held, in_list
        del container  # this frame counts as the one that runs the loop
        self.rollback = Rollback(TrainingState({"model": model}))
        self.rollback.watch()

    @property
    def container(self) -> Any:
        return self.held[0] if self._in_list else self.held

    def saved(self) -> str:
        carried = self.rollback.carried
        return carried.packed(carried.to_save(), 2**20)

    def take_over(self, saved: str) -> None:
        self.rollback.carried.take_over(self.rollback.carried.unpacked(saved))


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_back_and_travels_in_place(kind: str, in_list: bool) -> None:
    make, change = KINDS[kind]
    one, other = (Process(make(), in_list=in_list) for _ in range(2))
    first, before, there = shown(one.container), one.saved(), id(other.container)
    one.rollback.begin(0)
    change(one.container)
    changed = shown(one.container)
    one.rollback.back()
    assert shown(one.container) == first
    change(one.container)
    other.take_over(one.saved())
    assert (shown(other.container), id(other.container)) == (changed, there)
    other.take_over(before)
    assert shown(other.container) == first


def test_a_large_array_is_named() -> None:
    process = Process(array("d", [0.0]) * 200_000, in_list=False)
    values = LargeValues(process.rollback.variables)
    process.rollback.begin(0)
    values.note()
    assert values.changed() == []
    process.container[5] = 1.0
    assert "model.held" in values.changed()


@pytest.mark.parametrize("now", [array("f", [1.0]), [1.0], None])
def test_an_array_in_the_place_of_something_else(now: Any) -> None:
    put = Placing().put(now, frozen(array("d", [0.1, 0.2])))
    assert put == array("d", [0.1, 0.2])
    assert put.typecode == "d"


@pytest.mark.parametrize("kind", [AttrDict, Slotted])
def test_no_attribute_is_asked_for(kind: Any) -> None:
    assert is_namespace(kind())
    assert attributes(kind(a=1)) == {}
    there = kind(a=1)
    assert Placing().put(there, {"a": 2}) is there
    assert there == {"a": 2}
    assert same(frozen(there), frozen(kind(a=2)))
    assert Placing().put(there, frozen(kind(a=3))) is there
