"""Things in sets, and by keys that are others in each process, have one name in all of them, or none."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.references import References
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.step.unordered import NAMELESS, NamesOfKeys
from swift_ft.checkpoint.training_state import TrainingState


class Layer(nn.Module):
    """One with a counter. Its place in a set is told by its process."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.n = 0
        self.place = place

    def __hash__(self) -> int:
        return self.place


class Counts:
    """An own object with a counter, with a place of its own as well."""

    def __init__(self, first: int, place: int) -> None:
        self.n, self.first, self.place = 0, first, place

    def __hash__(self) -> int:
        return self.place

    def __eq__(self, other: object) -> bool:
        return self is other


class Key:
    """A key by its identity."""

    def __init__(self) -> None:
        self.n = 0


def square(x: float) -> float:
    return x * x


class Process:
    """One of the script, with a session that has started."""

    def __init__(self, order: int, make: Callable[[nn.Module, int], Any]) -> None:
        layers = (Layer(order * place % 7) for place in range(1, 7))
        blocks = (nn.Sequential(nn.Identity(), nn.Sequential(layer)) for layer in layers)
        self.model = nn.Sequential(*blocks)
        self.held = make(self.model, order)
        vars(self.model)["held"] = self.held
        self.state = TrainingState({"model": self.model})
        self.rollback = Rollback(self.state)
        self.rollback.watch()

    @property
    def layers(self) -> list[Layer]:
        return layers_of(self.model)


Pair = Mapping[str, Process]


def pair_of(make: Callable[[nn.Module, int], Any]) -> Pair:
    """Two processes whose sets have other orders, and neither of which finds the other one."""
    return MappingProxyType({"one": Process(1, make), "other": Process(6, make)})


def layers_of(model: nn.Module) -> list[Layer]:
    return [one for one in model.modules() if isinstance(one, Layer)]


SETS: dict[str, Callable[[set[Any]], Any]] = {
    "a set": lambda all_of: all_of,
    "a frozenset": frozenset,
    "keys": lambda all_of: dict.fromkeys(all_of, 0),
    "a view of keys": lambda all_of: dict.fromkeys(all_of, 0).keys(),
    "a view of values": lambda all_of: dict(enumerate(all_of)).values(),
    "a view of items": lambda all_of: dict.fromkeys(all_of, 0).items(),
    "a set in a list": lambda all_of: [all_of],
}


@pytest.mark.parametrize("kind", SETS)
def test_what_a_set_holds_has_its_other_path(kind: str) -> None:
    """Also where that is longer, and found later."""
    pair = pair_of(lambda model, _: SETS[kind]({*layers_of(model)}))
    orders = [[process.layers.index(layer) for layer in {*process.layers}] for process in pair.values()]
    assert orders[0] != orders[1]
    for number, layer in enumerate(pair["one"].layers):
        layer.n = number + 1
    pair["one"].rollback.begin(0)
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert [layer.n for layer in pair["other"].layers] == [1, 2, 3, 4, 5, 6]


def counts(_: nn.Module, order: int) -> list[Counts]:
    return [Counts(place, order * place % 7) for place in range(1, 7)]


@pytest.mark.parametrize("kind", SETS)
def test_own_objects_have_their_other_path(kind: str, caplog: Any) -> None:
    def make(model: nn.Module, order: int) -> Any:
        made = counts(model, order)
        return SimpleNamespace(all_of=SETS[kind]({*made}), deeper={"a": {"b": {"c": made}}})

    pair = pair_of(make)
    for number, one in enumerate(pair["one"].held.deeper["a"]["b"]["c"]):
        one.n = number + 1
    pair["one"].rollback.begin(0)
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert [one.n for one in pair["other"].held.deeper["a"]["b"]["c"]] == [1, 2, 3, 4, 5, 6]
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]


def everything_in(held: Any) -> tuple[Counts, ...]:
    """The objects that a set or the like holds, in the order of their places."""
    if isinstance(held, Counts):
        return (held,)
    if isinstance(held, int):
        return ()
    return tuple(sorted((c for one in held for c in everything_in(one)), key=lambda one: one.first))


@pytest.mark.parametrize("kind", SETS)
def test_what_only_a_set_holds_goes_back_and_is_named(kind: str, caplog: Any) -> None:
    pair = pair_of(lambda model, order: SETS[kind]({*counts(model, order)}))
    of = {name: everything_in(process.held) for name, process in pair.items()}
    hidden = MappingProxyType(of)
    del of
    for iteration in range(3):
        pair["one"].rollback.begin(iteration)
        for number, one in enumerate(hidden["one"]):
            one.n += number + 1
    pair["one"].rollback.back()
    assert [one.n for one in hidden["one"]] == [2 * number for number in range(1, 7)]
    saved = pair["one"].rollback.carried.to_save()
    assert not any(NAMELESS in path for path in saved)
    pair["other"].rollback.carried.take_over(saved)
    assert [one.n for one in hidden["other"]] == [0] * 6
    (line,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert line.event == "nameless_values_change"
    assert [name.rpartition("[...]")[2].removeprefix("[0]") for name in line.variables] == [".n"]


@pytest.mark.parametrize("change", [lambda one: one.add_(1), lambda _: None])
def test_a_tensor_in_a_set_is_named(change: Callable[[torch.Tensor], Any], caplog: Any) -> None:
    pair = pair_of(lambda *_: {torch.zeros(1)})
    for iteration in range(3):
        pair["one"].rollback.begin(iteration)
        change(*pair["one"].held)
    named = [one.variables for one in caplog.records if one.levelno == logging.WARNING]
    assert named == ([["model.held[...]"]] if next(iter(pair["one"].held)) else [])


def test_a_variable_of_a_loop_over_a_set() -> None:
    """It has the last one, which is another one in each process. The model names its own modules."""
    blocks = (nn.Sequential(nn.Sequential(Layer(place)), nn.Identity()) for place in range(1, 3))
    model = nn.Sequential(*blocks)
    layer = None
    for layer in {*layers_of(model)}:
        layer.n = 0
    assert layer is not None
    rollback = Rollback(TrainingState({"model": model}))
    rollback.watch()
    layer.n = 5
    rollback.begin(0)
    saved = rollback.carried.to_save()
    assert [path for path, values in saved.items() if "n" in values] == [f"model.{layer.place - 1}.0.0"]


def shared(model: nn.Module, order: int) -> Any:
    """Dictionaries of own objects, by all kinds of keys."""
    layers, keys = layers_of(model), [Key(), Key()]
    functions = [square, torch.sin, Counts, lambda: 1, lambda: 2]
    return SimpleNamespace(
        by_parameter={p: Key() for p in model.parameters()},
        by_id={id(p): Key() for p in model.parameters()},
        by_module={m: Key() for m in layers},
        by_id_of_module={id(m): Key() for m in {*layers}},
        by_own={key: Key() for key in keys},
        by_id_of_own={id(key): Key() for key in keys},
        by_pair={(key, order_free): Key() for key in keys for order_free in (1, "a", None)},
        by_function={function: Key() for function in functions},
        by_text={frozenset({"a", "b", "c"}): Key(), torch.float32: Key(), 2**60 + 1: Key()},
        deeper={keys[0]: {keys[1]: Key()}},
        keys=keys,
        functions=functions,
    )


DICTIONARIES = [name for name in vars(shared(nn.Linear(1, 1), 1)) if name.startswith(("by", "deep"))]


def objects_in(held: Any, name: str, layers: list[Layer]) -> list[Key]:
    values = getattr(held, name)
    if name == "by_id_of_module":  # which is in the order of a set
        return [values[id(layer)] for layer in layers]
    return [*values[held.keys[0]].values()] if name == "deeper" else [*values.values()]


@pytest.mark.parametrize("name", DICTIONARIES)
def test_own_objects_by_key(name: str, caplog: Any) -> None:
    pair = pair_of(shared)
    for number, one in enumerate(objects_in(pair["one"].held, name, pair["one"].layers)):
        one.n = number + 1
    pair["one"].rollback.begin(0)
    pair["other"].state.take_over(pair["one"].state.to_save())
    there = [one.n for one in objects_in(pair["other"].held, name, pair["other"].layers)]
    assert there == [*range(1, len(there) + 1)]
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]


def test_a_path_is_as_a_user_would_write_it() -> None:
    process = pair_of(shared)["one"]
    for name in DICTIONARIES:
        objects_in(process.held, name, process.layers)[0].n = 1
    process.rollback.begin(0)
    paths = {path for path, values in process.rollback.carried.to_save().items() if "n" in values}
    assert {
        "model.held.by_parameter[model.0.1.0.weight]",
        "model.held.by_id[id(model.0.1.0.weight)]",
        "model.held.by_module[model.0.1.0]",
        "model.held.by_id_of_module[id(model.0.1.0)]",
        "model.held.by_own[model.held.keys[0]]",
        "model.held.by_pair[(model.held.keys[0], 1)]",
        "model.held.by_text[frozenset({'a', 'b', 'c'})]",
    } <= paths, paths


@pytest.mark.parametrize("by", [lambda key: key, id, lambda key: (key, 1), lambda key: key.__init__])
def test_objects_by_a_key_that_nothing_else_holds(by: Callable[[Key], Any], caplog: Any) -> None:
    hidden = MappingProxyType({"keys": [Key(), Key()]})
    pair = pair_of(lambda *_: {by(key): Key() for key in [Key(), *hidden["keys"]]})
    for iteration in range(3):
        pair["one"].rollback.begin(iteration)
        for one in pair["one"].held.values():
            one.n += 1
    pair["one"].rollback.back()
    assert {one.n for one in pair["one"].held.values()} == {2}
    pair["other"].rollback.carried.take_over(pair["one"].rollback.carried.to_save())
    events = {one.event for one in caplog.records if one.levelno == logging.WARNING}
    assert events == {"variable_missing" if by is id else "nameless_values_change"}


@pytest.mark.parametrize("count", [1, 2000])
def test_plain_values_by_the_number_of_a_module(count: int) -> None:
    def make(model: nn.Module, _: int) -> Any:
        numbers = dict.fromkeys(map(id, layers_of(model)), 0.0)
        return SimpleNamespace(table={**dict.fromkeys(range(count), 0.0), **numbers})

    pair = pair_of(make)
    for number, layer in enumerate(pair["one"].layers):
        pair["one"].held.table[id(layer)] = float(number)
    pair["one"].rollback.begin(0)
    pair["other"].state.take_over(pair["one"].state.to_save())
    there = [pair["other"].held.table[id(layer)] for layer in pair["other"].layers]
    assert len(pair["other"].held.table) == count + len(there)
    assert there == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0] if count == 1 else [0.0] * 6)


def test_weak_keys() -> None:
    weak = weakref.WeakKeyDictionary[nn.Module, Any]
    pair = pair_of(lambda *_: SimpleNamespace(plain=weak(), own=weak()))
    for process in pair.values():
        process.held.own.update({layer: Key() for layer in process.layers})
        process.rollback.variables.look()
    pair["other"].held.plain[pair["other"].layers[0]] = 0
    there = id(pair["other"].held.plain)
    pair["one"].rollback.begin(0)
    for layer in pair["one"].layers:
        pair["one"].held.plain[layer] = 5
    pair["one"].rollback.back()
    assert not pair["one"].held.plain
    for number, layer in enumerate(pair["one"].layers):
        pair["one"].held.plain[layer] = number
        pair["one"].held.own[layer].n = number
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert id(pair["other"].held.plain) == there
    assert [pair["other"].held.plain[layer] for layer in pair["other"].layers] == [0, 1, 2, 3, 4, 5]
    assert [pair["other"].held.own[layer].n for layer in pair["other"].layers] == [0, 1, 2, 3, 4, 5]


def test_weak_values(caplog: Any) -> None:
    """It goes back; which modules it has does not travel, and a line says so."""
    pair = pair_of(lambda *_: SimpleNamespace(table=weakref.WeakValueDictionary[str, Any]()))
    pair["one"].held.table["first"] = pair["one"].layers[0]
    pair["one"].rollback.begin(0)
    pair["one"].held.table["second"] = pair["one"].layers[1]
    pair["one"].rollback.back()
    assert [*pair["one"].held.table] == ["first"]
    pair["one"].held.table["second"] = pair["one"].layers[1]
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert [record.variable for record in caplog.records] == ["model.held.table.data.second"]


class Unshown:
    """A key that cannot be shown."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        raise ValueError("not yet")


def test_tables_of_functions() -> None:
    """Methods of classes that are built in, as ``__torch_function__`` looks them up, and functions."""
    numbers: list[int] = []
    held = {torch.Tensor.add: 1, str.upper: 2, numbers.append: 3, torch.add: 4, len: 5, math.sqrt: 6}
    names = NamesOfKeys({}, {}, References())
    assert [*map(names.of, held)][:3] == ["torch._C.TensorBase.add", "builtins.str.upper", None]
    assert all(map(names.of, [torch.add, len, math.sqrt]))
    holder = SimpleNamespace(table={key: Key() for key in held})
    rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    rollback.watch()
    rollback.begin(0)
    holder.table[str.upper].n = 1
    rollback.completed()
    saved = rollback.carried.to_save()
    assert saved["holder.table[builtins.str.upper]"] == {"n": 1}
    assert names.of(Unshown()) is None
