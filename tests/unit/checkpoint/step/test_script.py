"""What a script keeps in variables is found and put back, wherever it is."""

from __future__ import annotations

import argparse
import copy
import importlib
import random
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.program.own_code import is_own_module

of_module = 0
of_module_list: list[int] = []


class Helper:
    """An object of the script's own, with objects in it."""

    shared = 0

    def __init__(self) -> None:
        self.count = 0
        self.names = {"a": [1]}
        self.inner: Any = None
        self.rng = np.random.RandomState(1)
        self.lock = threading.Lock()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.average = torch.zeros(2)
        self.seen: deque[int] = deque(maxlen=4)
        self.view = self.linear.weight.data[0]
        self.lock: Any = None


class Counted(Helper):
    """What it counts is a variable of the class that it derives from."""


class MadeByALibrary(Counted):
    """Of the script's own class, as ``fully_shard`` makes one."""


MadeByALibrary.__module__ = "torch.distributed.fsdp"


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def rollback(net: Net) -> Rollback:
    return Rollback(TrainingState({"model": net}))


@pytest.mark.parametrize("kind", [Counted, MadeByALibrary])
def test_variables_of_base_classes(kind: type[Helper], net: Net, rollback: Rollback) -> None:
    net.lock = kind()
    rollback.begin(0)
    Helper.shared += 1
    net.lock.count += 1
    rollback.back()
    assert Helper.shared == 0
    assert net.lock.count == 0


def test_a_class_that_gets_a_variable_of_its_own(net: Net, rollback: Rollback) -> None:
    """As it counts one that it inherits: it has none before the first step."""
    net.lock = MadeByALibrary()
    rollback.begin(0)
    MadeByALibrary.shared += 1
    MadeByALibrary.cache = {}  # type: ignore[attr-defined]
    rollback.back()
    assert "shared" not in vars(MadeByALibrary)
    assert MadeByALibrary.shared == Helper.shared
    assert vars(MadeByALibrary).get("cache") == {}, "what a library keeps in a class may be its code's"
    del MadeByALibrary.cache  # type: ignore[attr-defined]


def test_attributes_of_modules(net: Net, rollback: Rollback) -> None:
    rollback.begin(0)
    average = net.average
    average.add_(1)
    net.average = net.average * 2
    net.drop.p = 0.1
    net.linear.eval()
    net.linear.weight.requires_grad_(False)
    net.seen.append(3)
    vars(net)["count"] = 4
    rollback.back()
    assert net.average is average
    assert not average.any()
    assert net.drop.p == 0.5
    assert net.linear.training
    assert net.linear.weight.requires_grad
    assert not net.seen
    assert not hasattr(net, "count")


def test_variables_of_the_loop_and_what_is_in_them(rollback: Rollback) -> None:
    helper, generator, dice = Helper(), torch.Generator(), random.Random(0)
    step, losses, running = 0, [], torch.zeros(())
    total = 0.0

    def counted() -> None:
        nonlocal total
        total += 1

    helper.inner = Helper()
    rollback.begin(0)
    state = generator.get_state()
    drawn = random.Random(0).random(), np.random.RandomState(1).rand()
    step += 1
    losses.append(1.0)
    running += 3
    counted()
    helper.count, helper.inner.count, Helper.shared = 1, 2, 3
    helper.names["a"].append(2)
    helper.names["b"] = []
    torch.rand((), generator=generator)
    dice.random(), helper.rng.rand()
    rollback.back()
    assert (step, losses, float(running), total) == (0, [], 0.0, 0.0)
    assert (helper.count, helper.inner.count, Helper.shared) == (0, 0, 0)
    assert helper.names == {"a": [1]}
    assert generator.get_state().equal(state)
    assert (dice.random(), helper.rng.rand()) == drawn


def handed_on() -> tuple[Callable[[], torch.Tensor], CellType]:
    """A function that gives away what it has kept, and where it keeps it."""
    kept = torch.ones(3)

    def take() -> torch.Tensor:
        nonlocal kept
        found = kept
        del kept
        return found

    assert take.__closure__ is not None
    return take, take.__closure__[0]


def test_variables_that_a_step_deletes(rollback: Rollback) -> None:
    """A step reads what the step before has left, and deletes it to have its memory."""
    hidden = torch.ones(2)
    take, cell = handed_on()
    rollback.begin(0)
    new = hidden + take()[0]
    del hidden
    assert "hidden" not in locals()
    rollback.back()
    assert new.eq(2).all()
    assert locals()["hidden"].eq(1).all()
    assert cell.cell_contents.eq(1).all()


@pytest.mark.parametrize("bytes_of_one", [2**17, 2**20, 2**22])
def test_large_variables_of_the_loop(bytes_of_one: int, rollback: Rollback) -> None:
    """A queue that each step makes anew is put back, and one that it writes to if it is not too large.

    A batch is not held, but by the frame itself up to the next step.
    """
    elements = bytes_of_one // 4
    queue, ring, array = torch.zeros(elements), torch.zeros(elements), np.zeros(elements, dtype=np.float32)
    still = torch.zeros(elements)
    batch = torch.zeros(elements)
    held = [weakref.ref(batch)]
    for iteration in range(6):
        rollback.begin(iteration)
        assert all(one() is None for one in held[:-1])
        batch = torch.full((elements,), float(iteration))
        held.append(weakref.ref(batch))
        queue = torch.cat([batch[:8], queue])[:elements]
        ring[iteration] += batch[0] + still[0]
        array[iteration] += 1
    before = queue.clone(), ring.clone(), array.copy()
    rollback.begin(6)
    queue = torch.cat([batch[:8] + 7, queue])[:elements]
    ring[0], array[0] = 9, 9
    assert rollback.dirty() is None
    rollback.back()
    assert queue.equal(before[0])
    if bytes_of_one <= 2**20:
        assert ring.equal(before[1])
        assert np.array_equal(array, before[2])
    else:
        assert ring[0] == array[0] == 9


def test_a_large_variable_that_changes_for_the_first_time(rollback: Rollback) -> None:
    ring = torch.zeros(2**16)
    for iteration in range(5):
        rollback.begin(iteration)
        assert not ring.any()
    assert rollback.dirty() is None
    ring.add_(1)
    reason = rollback.dirty()
    assert reason is not None
    assert "tensor of" in reason


def test_generators_that_a_generator_spawns(net: Net) -> None:
    """NumPy counts them in the seed, not in the state."""
    net.lock = first = np.random.default_rng(3)
    rollback = Rollback(TrainingState({"model": net}))
    rollback.watch()
    rollback.begin(0)
    drawn = [first.spawn(1)[0].random()]
    rollback.back()
    assert first.spawn(1)[0].random() == drawn[0]
    rollback.begin(1)
    second = [one.random() for one in first.spawn(2)]
    saved = MappingProxyType(rollback.carried.to_save())
    rollback.back()
    assert [one.random() for one in first.spawn(2)] == second
    first.spawn(5)
    rollback.carried.take_over(saved)
    assert first.spawn(1)[0].random() == np.random.default_rng(3).spawn(4)[3].random()
    rollback.close()


@pytest.mark.parametrize(
    "change", [lambda one: one.add(7), lambda one: one.update("abc"), lambda one: one.discard(9), set.clear]
)
def test_a_set_stays_in_its_order(change: Callable[[set[Any]], object], net: Net) -> None:
    """What only came is taken out again. The set was larger, so that its order is that of no other one."""
    net.lock = numbers = set[Any](range(200))
    numbers -= {*range(200)} - {5, 9, 190}
    before = [*numbers]
    assert before != [*{5, 9, 190}]
    rollback = Rollback(TrainingState({"model": net}))
    rollback.begin(0)
    change(numbers)
    rollback.back()
    assert numbers == {5, 9, 190}
    assert [*numbers] == before or change is set.clear


BITS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "bits": (lambda: np.random.PCG64(5), lambda bits: int(bits.random_raw())),
    "older bits": (lambda: np.random.MT19937(5), lambda bits: int(bits.random_raw())),
    "bits that spawn": (lambda: np.random.PCG64(5), lambda bits: bits.spawn(1)[0].random_raw()),
    "a seed": (lambda: np.random.SeedSequence(5), lambda seed: seed.spawn(1)[0].spawn_key),
    "a seed of a rank": (
        lambda: np.random.SeedSequence([5, 6], spawn_key=(1,)),
        lambda seed: np.random.default_rng(seed.spawn(2)[1]).random(),
    ),
}


@pytest.mark.parametrize("kind", BITS)
def test_what_generators_of_numpy_are_made_of(kind: str, net: Net) -> None:
    """Each is put back, and handed over, in itself: others may hold it."""
    make, draw = BITS[kind]
    net.lock = one = make()
    rollback = Rollback(TrainingState({"model": net}))
    rollback.watch()
    rollback.begin(0)
    first = draw(one)
    rollback.back()
    assert draw(one) == first
    rollback.begin(1)
    second = draw(one)
    rollback.back()
    saved = MappingProxyType(rollback.carried.to_save())
    assert draw(one) == second
    rollback.carried.take_over(saved)
    assert net.lock is one
    assert draw(one) == second
    rollback.close()


def test_a_seed_that_a_generator_shares_stays_shared(net: Net) -> None:
    seed = np.random.SeedSequence(5)
    net.lock = [seed, np.random.default_rng(seed)]
    rollback = Rollback(TrainingState({"model": net}))
    rollback.begin(0)
    net.lock[1].spawn(2)
    rollback.back()
    assert seed.n_children_spawned == 0
    assert net.lock[1].bit_generator.seed_seq is seed


def test_a_generator_that_has_no_state(net: Net) -> None:
    """It draws from the system: nothing is put back, and nothing travels."""
    net.lock, dice = random.SystemRandom(), [random.SystemRandom()]
    state = TrainingState({"model": net})
    rollback = Rollback(state)
    rollback.watch()
    rollback.begin(0)
    net.lock.random(), dice[0].random()
    rollback.back()
    assert "model" not in rollback.carried.to_save()
    state.take_over(state.to_save())
    rollback.close()


class Queue(deque[int]):
    """Counts what it was given. A copy of its content, or one that is put back, is not given."""

    def __init__(self) -> None:
        super().__init__(maxlen=3)
        self.given = 0

    def append(self, value: int) -> None:
        super().append(value)
        self.given += 1

    def extend(self, values: Any) -> None:
        raise AssertionError

    clear = extend  # type: ignore[assignment]


class Words(OrderedDict[str, Any]):
    """Is filled by its own function only."""

    __slots__ = ("seen",)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.seen = getattr(self, "seen", 0) + 1

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise AssertionError

    def items(self) -> Any:
        raise AssertionError


class Cells(list[int]):
    def __iter__(self) -> Any:
        raise AssertionError

    __setitem__ = __iter__  # type: ignore[assignment]


def test_containers_of_the_scripts_own_classes(net: Net, rollback: Rollback) -> None:
    """They have attributes, and what they do as the script fills them is not done."""
    queue, words, cells = Queue(), Words(), Cells([4])
    net.lock = {"queue": queue, "words": words, "cells": cells}
    queue.append(1)
    words["a"], words["lock"] = 1, threading.Lock()
    words.move_to_end("a")
    rollback.begin(0)
    for number in (2, 3, 4):
        queue.append(number)
    words["b"] = words["a"] = 2
    cells.append(5)
    vars(cells)["more"] = 1
    rollback.back()
    assert ([*queue], queue.given) == ([1], 1)
    assert ([*words], words["a"], words.seen) == (["lock", "a"], 1, 2)
    assert (list.copy(cells), vars(cells)) == ([4], {})


@pytest.mark.parametrize(("there", "new"), [(0, 3), (80, 3), (1000, 3), (80, 40)])
def test_new_elements_of_containers(there: int, new: int, net: Net, rollback: Rollback) -> None:
    """The last look is some steps ago. Where there are many new ones, a look comes in time."""
    ring: deque[Any] = deque((Helper() for _ in range(there)), maxlen=1020)
    sums = dict.fromkeys(range(there), torch.zeros(1))
    net.lock = [ring, sums]
    rollback.begin(0)
    for iteration in range(1, 23):
        rollback.begin(iteration)
        if iteration == 5:
            ring.extend([Helper() for _ in range(new)])
            sums.update({there + number: torch.zeros(1) for number in range(new)})
    before = [helper.count for helper in ring]
    for helper in ring:
        helper.count += 1
        helper.names["a"].append(2)
    for tensor in [*sums.values()][there:]:
        tensor.add_(1)
    rollback.back()
    assert [helper.count for helper in ring] == before
    assert all(helper.names["a"] == [1] for helper in ring)
    assert not any(map(float, sums.values()))


def test_variables_of_the_scripts_modules(rollback: Rollback) -> None:
    global of_module
    rollback.begin(0)
    of_module += 1
    of_module_list.append(1)
    rollback.back()
    assert of_module == 0
    assert of_module_list == []


def test_what_is_large_or_unknown_stays_as_it_is(net: Net, rollback: Rollback) -> None:
    data = list(range(2**16 + 1))
    pictures = np.zeros(2**21, dtype=np.uint8)
    threads: list[Any] = []
    rollback.begin(0)
    data[0] = 7
    data.append(8)
    pictures[0] = 1
    threads.append(threading.current_thread())
    net.view.fill_(5)  # a view of a parameter
    net.lock = lock = threading.Lock()
    rollback.back()
    assert data[0] == 7
    assert len(data) == 2**16 + 1  # what was appended is cut off
    assert pictures[0] == 1
    assert len(threads) == 1
    assert net.lock is lock
    assert net.linear.weight[0].eq(5).all()


LONG: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [0.5] * 50_000, lambda v: v.__setitem__(7, 1.0)),
    "list, another order": (lambda: [*range(2**16)], lambda v: v.reverse()),
    "list of tensors": (lambda: [torch.zeros(1)] * 5000, lambda v: v.__setitem__(7, torch.ones(1))),
    "dict": (lambda: dict.fromkeys(range(50_000), 0.5), lambda v: v.update({1: 1, -1: 0})),
    "set": (lambda: {*range(50_000)}, lambda v: v.symmetric_difference_update([1, -1])),
    "deque": (lambda: deque([0.5] * 50_000, 50_000), lambda v: v.append(1.0)),
    "bytearray": (lambda: bytearray(2**20), lambda v: v.__setitem__(7, 1)),
}


@pytest.mark.parametrize("kind", LONG)
def test_long_containers(kind: str, rollback: Rollback) -> None:
    """An average for each sample is not applied twice."""
    make, change = LONG[kind]
    start = make()
    value = copy.copy(start)
    rollback.begin(0)
    change(value)
    assert value != start
    rollback.back()
    assert value == start


def test_all_long_containers_together_are_bounded(rollback: Rollback) -> None:
    """What is beyond is as too large ones are. Small ones are put back all the same."""
    many = [[*range(2**15)] for _ in range(10)]
    small = [0]
    rollback.begin(0)
    for one in (*many, small):
        one[0] = 1
    rollback.back()
    assert sum(one[0] for one in many) == 2
    assert small == [0]


def test_back_to_the_step_before(net: Net, rollback: Rollback) -> None:
    for iteration in range(3):
        rollback.begin(iteration)
        net.average += 1
        net.seen.append(iteration)
    rollback.back()
    rollback.back_to(1)
    assert net.average.eq(1).all()
    assert list(net.seen) == [0]


@dataclass(slots=True)
class Slotted:
    count: int = 0
    seen: list[int] = field(default_factory=list)


@pytest.mark.parametrize("made", [argparse.Namespace, SimpleNamespace, Slotted])
def test_objects_that_hold_plain_values(made: Any, rollback: Rollback) -> None:
    holder = made(count=0, seen=[])
    rollback.begin(0)
    holder.count += 1
    holder.seen.append(1)
    rollback.back()
    assert (holder.count, holder.seen) == (0, [])


def test_counters_beside_something_unknown(rollback: Rollback) -> None:
    """A dictionary, one within another, and a list: the lock stays, and the counter goes back."""
    lock = threading.Lock()
    context: dict[str, Any] = {"lock": lock, "step": 0, "seen": []}
    nested: dict[str, Any] = {"inner": {"lock": lock, "step": 0}}
    pair: list[Any] = [lock, 0]
    rollback.begin(0)
    context["step"] += 1
    context["seen"].append(1)
    context["lock"] = other = threading.Lock()
    nested["inner"]["step"] += 1
    pair[1] += 1
    rollback.back()
    assert context == {"lock": other, "step": 0, "seen": []}
    assert nested == {"inner": {"lock": lock, "step": 0}}
    assert pair == [lock, 0]


def test_what_was_made_after_the_last_look(rollback: Rollback) -> None:
    """Such as a new meter of each epoch: the steps 1 to 3 look, and no other one until the 16th."""
    meter, stats, sums = Helper(), {"loss": [0]}, [torch.zeros(2)]
    for iteration in range(4):
        rollback.begin(iteration)
    meter, stats["loss"], sums[0] = Helper(), [], torch.zeros(2)
    meter.inner = Helper()
    rollback.begin(4)
    meter.count += 1
    meter.inner.names["a"].append(2)
    stats["loss"].append(1)
    sums[0].add_(1)
    rollback.back()
    assert (meter.count, meter.inner.names["a"], stats["loss"]) == (0, [1], [])
    assert not sums[0].any()


def test_a_large_new_batch_costs_little(rollback: Rollback) -> None:
    for iteration in range(4):
        rollback.begin(iteration)
    assert rollback._now is not None
    before = len(rollback._now.variables.leaves)
    batch = {"tokens": [list(range(1000)) for _ in range(1000)], "x": torch.zeros(2**20)}
    rollback.begin(4)
    assert len(rollback._now.variables.leaves) < before + 100
    assert len(batch) == 2


SCHEDULE = """
import functools
calls, history = 0, []
@functools.cache
def tracker():
    return {"n": 0}
@functools.lru_cache(maxsize=2)
def bounded():
    return {"n": 0}
def beta():
    global calls
    calls += 1
    history.append(calls)
    tracker()["n"] += 1
    bounded()["n"] += 1
    return calls
def scaled(x, *, seen=[]):
    seen.append(x)
    return len(seen)
class Noise:
    def __call__(self, module, inputs, output):
        global calls
        calls += 1
"""


@pytest.fixture
def schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the script's, of which it imports functions only."""
    (tmp_path / "schedule_of_test.py").write_text(SCHEDULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("schedule_of_test")
    yield module
    del sys.modules["schedule_of_test"]
    is_own_module.cache_clear()


def test_variables_behind_functions(schedule: Any, rollback: Rollback) -> None:
    """Globals of the module that a function is from, what it remembers, and its keyword's default."""
    beta, scaled, tracker, bounded = schedule.beta, schedule.scaled, schedule.tracker, schedule.bounded
    assert (tracker()["n"], bounded()["n"]) == (0, 0)
    rollback.begin(0)
    beta()
    assert scaled(1) == 1
    rollback.back()
    assert (schedule.calls, schedule.history) == (0, [])
    assert (tracker()["n"], bounded()["n"]) == (0, 0)
    assert scaled(1) == 1
    schedule.scaled.__kwdefaults__["seen"].clear()


def test_variables_behind_hooks(schedule: Any, net: Net, rollback: Rollback) -> None:
    """Of a module, of a module in it, of a parameter, and an object that is called."""
    counts = {"forward": 0, "inner": 0, "gradient": 0}

    def counts_one(name: str) -> Any:
        own = {"n": 0}

        def hook(*_: object) -> None:
            own["n"] += 1
            counts[name] = own["n"]

        return hook

    net.register_forward_pre_hook(counts_one("forward"))
    net.linear.register_forward_hook(counts_one("inner"))
    net.linear.register_forward_hook(schedule.Noise())
    net.linear.weight.register_hook(counts_one("gradient"))
    net.forward = lambda x: net.linear(x)
    rollback.begin(0)
    net(torch.ones(2)).sum().backward()
    assert (counts, schedule.calls) == ({"forward": 1, "inner": 1, "gradient": 1}, 1)
    rollback.back()
    net.zero_grad()
    assert schedule.calls == 0
    net(torch.ones(2)).sum().backward()
    assert counts == {"forward": 1, "inner": 1, "gradient": 1}


class PassesOn:
    """Takes steps, as a class of the script's may."""

    def __init__(self, steps: Any) -> None:
        self.steps = iter(steps)
        self.taken = 0

    def __iter__(self) -> PassesOn:
        return self

    def __next__(self) -> Any:
        step = next(self.steps)
        self.taken += 1
        return step


def passes_on(steps: Any) -> Any:
    given = [0]
    for step in steps:
        given[0] += 1
        yield step, given[0]


def steps_of(rollback: Rollback) -> Any:
    """Steps as a session yields them: the second one is interrupted once."""
    rollback.begin(0)
    yield 0
    rollback.begin(1)
    yield 1
    rollback.back()
    yield 1


# As a library's, which the session's is: the loop is around it.
steps_from: Any = steps_of
steps_from.__code__ = steps_from.__code__.replace(co_filename=torch.__file__)


@pytest.mark.parametrize("way", ["a generator", "two generators", "an iterator"])
def test_a_loop_over_steps_that_the_script_passes_on(way: str, rollback: Rollback) -> None:
    seen, given = 0, []
    steps = steps_from(rollback)
    twice = way == "two generators"
    for step in PassesOn(steps) if way == "an iterator" else passes_on(passes_on(steps) if twice else steps):
        seen += 1
        given.append(step)
    assert seen == 2
    assert len(given) == 2
    if way == "a generator":
        assert given == [(0, 1), (1, 2)]


FURTHER = """
import schedule_of_test
from schedule_of_test import beta

class Shared:
    steps = 0
"""


@pytest.fixture
def further(schedule: Any, tmp_path: Path) -> Any:
    """A module that leads to the one that is counted in."""
    (tmp_path / "further_of_test.py").write_text(FURTHER)
    yield importlib.import_module("further_of_test")
    del sys.modules["further_of_test"]
    is_own_module.cache_clear()


def test_variables_of_files_that_own_files_import(schedule: Any, further: Any, rollback: Rollback) -> None:
    rollback.begin(0)
    further.beta()
    further.Shared.steps += 1
    rollback.back()
    assert (schedule.calls, schedule.history) == (0, [])
    assert further.Shared.steps == 0


class Recurrent(nn.Module):
    """Keeps what it gave for the next step: alone, in a tuple, in a dictionary, and added up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.hidden: torch.Tensor | None = None
        self.pair: Any = None
        self.kept: dict[str, torch.Tensor] = {}
        self.total = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.linear(x if self.hidden is None else self.hidden.detach())
        self.pair = self.hidden * 2, self.hidden * 3
        self.kept["h"] = self.hidden * 4
        self.total += self.hidden
        return self.hidden

    def values(self) -> list[torch.Tensor]:
        found = [self.hidden, *self.pair, self.kept["h"], self.total]
        return [one.detach().clone() for one in found if one is not None]


@pytest.mark.parametrize("first", [True, False])
def test_tensors_that_have_a_graph(first: bool) -> None:
    """An interrupted step began with those of the step before, or with none."""
    model, x = Recurrent(), torch.ones(2)
    rollback, sums = Rollback(TrainingState({"model": model})), torch.zeros(())
    if not first:
        rollback.begin(0)
        sums = sums + model(x).sum()
    rollback.begin(1)
    before, total = model.values() if not first else [], float(sums.detach())
    sums = sums + model(x).sum()
    rollback.back()
    assert float(sums.detach()) == total
    if first:
        assert (model.hidden, model.pair, model.kept) == (None, None, {})
        assert not model.total.any()
    else:
        assert all(map(torch.equal, model.values(), before))


def test_a_graph_that_nobody_else_holds_is_not_kept() -> None:
    """It may hold the activations of a step."""
    model = Recurrent()
    rollback = Rollback(TrainingState({"model": model}))
    made = weakref.ref(model(torch.ones(2)))
    rollback.begin(0)
    model.hidden, model.pair, model.total = None, None, torch.zeros(2)
    model.kept.clear()
    assert made() is None


def test_attributes_of_parameters_and_wrappers(net: Net) -> None:
    wrapped = nn.DataParallel(net, device_ids=[])
    weight: Any = net.linear.weight
    holder: Any = wrapped
    weight.count, holder.count, helper = 0, 0, Helper()
    holder.helper = helper
    rollback = Rollback(TrainingState({"model": wrapped}))
    rollback.begin(0)
    weight.count += 1
    holder.count += 1
    helper.count += 1
    devices, holder.device_ids = holder.device_ids, [7]
    rollback.back()
    assert (weight.count, holder.count, helper.count) == (0, 0, 0)
    assert holder.device_ids == [7], "what torch's wrapper keeps there is not the script's"
    holder.device_ids = devices
