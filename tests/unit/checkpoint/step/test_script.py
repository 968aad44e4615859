"""What a script keeps in variables is found and put back, wherever it is."""

from __future__ import annotations

import random
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState

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


def test_variables_of_the_scripts_modules(rollback: Rollback) -> None:
    global of_module
    rollback.begin(0)
    of_module += 1
    of_module_list.append(1)
    rollback.back()
    assert of_module == 0
    assert of_module_list == []


def test_what_is_large_or_unknown_stays_as_it_is(net: Net, rollback: Rollback) -> None:
    data = list(range(5000))
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
    assert len(data) == 5000  # what was appended is cut off
    assert pictures[0] == 1
    assert len(threads) == 1
    assert net.lock is lock
    assert net.linear.weight[0].eq(5).all()


def test_back_to_the_step_before(net: Net, rollback: Rollback) -> None:
    for iteration in range(3):
        rollback.begin(iteration)
        net.average += 1
        net.seen.append(iteration)
    rollback.back()
    rollback.back_to(1)
    assert net.average.eq(1).all()
    assert list(net.seen) == [0]
