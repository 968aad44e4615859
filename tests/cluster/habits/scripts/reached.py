"""Replicas whose loss depends on what a script reaches in a roundabout way: reached.py STORE HABIT.

Each value scales the loss, so that a worker with another one has another gradient, and all replicas other
weights: nothing but a comparison with an undisturbed run would notice.
"""

import argparse
import copy
import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.cluster.habits.scripts import reached_from
from tests.cluster.habits.scripts.reached_from import growing, tracker
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
take: Any = importlib.import_module("model").take
ITERATIONS = 8
NEW = "a class that is seen first in step 5"


@dataclass(slots=True)
class Slotted:
    count: int = 0


class Meter:
    def __init__(self) -> None:
        self.count = 0


class Trainer:
    """A part of the state that says what its epoch is, and not what its callbacks count."""

    def __init__(self) -> None:
        self.epoch = 0
        self.callbacks = [Meter()]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.epoch = saved["epoch"]


class History(list[float]):
    """Knows how many losses there were, of which it keeps a few."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def add(self, loss: float) -> None:
        self.append(loss)
        self.total += 1
        del self[:-2]


class Meters(dict[str, float]):
    """Averages what it is given."""

    def update(self, values: dict[str, float]) -> None:  # type: ignore[override]
        for name, value in values.items():
            self[name] = 0.5 * self.get(name, 0.0) + value


class Recurrent(nn.Module):
    """Keeps what it gave, with its graph, for the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(6, 6)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, None if self.hidden is None else self.hidden.detach())
        return self.hidden


def smoothed(value: float, history: list[float] = [], *, sums: dict[str, float] = {"n": 0}) -> float:  # noqa: B006
    """Keeps its values in its own defaults."""
    history.append(value)
    sums["n"] += 1
    return sum(history) / sums["n"]


def add_up(sums: dict[str, float], value: float, *, last: Tensor) -> float:
    sums["all"] = sums.get("all", 0) + value
    last.add_(value)
    return sums["all"] + float(last)


added_up = functools.partial(add_up, {}, last=torch.zeros(()))


def counts_in_a_hook(model: nn.Module) -> dict[str, int]:
    """A hook of a module with a counter in its closure. The script itself has only what it reads."""
    seen = {"n": 0}

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seen["n"] += 1
        return output / seen["n"]

    model.register_forward_hook(hook)
    return {}


def passed_on(session: swift_ft.Session) -> Iterator[Any]:
    """Steps and their batches, as many scripts have them."""
    for step in session.steps(ITERATIONS):
        yield step, torch.randn(4, 6, generator=torch.Generator().manual_seed(step.index))


def main() -> None:
    torch.manual_seed(0)
    last = Recurrent() if HABIT == "a recurrent state" else nn.Linear(6, 6)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), last)
    net.register_buffer("scale", torch.zeros(()), persistent=False)
    weight: Any = net[0].weight
    weight.count = 0
    if HABIT == "a hook":
        counts_in_a_hook(net[0])
    model = DistributedDataParallel(net)
    wrapper: Any = model
    wrapper.count = 0
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    target = copy.deepcopy(net).requires_grad_(False)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if HABIT == "a target":
        state["target"] = target
    trainer, named = Trainer(), Meter()
    state["named" if HABIT == "named as a part" else "trainer"] = trainer
    session = swift_ft.Session(state, store=STORE, checkpoint_every=100 if HABIT == NEW else 3)
    session.attach_ddp(model)
    tracker()["count"] = 0  # what is made in a step is not there yet where a replacement begins
    context: dict[str, Any] = {"lock": threading.Lock(), "count": 0}
    args, slotted, meter, seen = argparse.Namespace(count=0), Slotted(), Meter(), 0
    history, meters = History(), Meters(count=1.0)
    layers, weak = {*net}, weakref.WeakKeyDictionary[nn.Module, int]()
    by_number = {id(layer): Meter() for layer in net}
    prototypes = {number: torch.zeros(2) for number in range(80)}
    for step, x in passed_on(session):
        with step:
            seen += 1
            args.count += 1
            slotted.count += 1
            meter.count += 1
            trainer.callbacks[0].count += 1
            named.count += 1
            context["count"] += 1
            tracker()["count"] += 1
            reached_from.Shared.count += 1
            weight.count += 1
            wrapper.count += 1
            net.get_buffer("scale").add_(1)
            for number, layer in enumerate(net):
                vars(layer)["count"] = getattr(layer, "count", 0) + number
                by_number[id(layer)].count += number
                weak[layer] = weak.get(layer, 0) + number
            history.add(float(x.mean()))
            meters.update({"count": 1.0})
            if step.index >= 5:
                prototypes.setdefault(80, torch.ones(2)).mul_(0.9).add_(x.mean().abs())
            count: dict[str, float] = {
                NEW: float(prototypes.get(80, torch.ones(2)).sum()),
                "a list with attributes": history.total,
                "behind a part": trainer.callbacks[0].count,
                "named as a part": named.count,
                "a dictionary that averages": meters["count"],
                "beside a lock": context["count"],
                "parsed arguments": args.count,
                "slots": slotted.count,
                "a class of another file": reached_from.Shared.count,
                "of a parameter": weight.count,
                "of the wrapper": wrapper.count,
                "a buffer that is not saved": int(net.get_buffer("scale")),
            }
            if HABIT == "in a set":
                count[HABIT] = sum((n + 1) * getattr(net[n], "count", 0) for n in range(len(layers)))
            elif HABIT == "by number":
                count[HABIT] = sum((n + 1) * by_number[id(one)].count for n, one in enumerate(net))
            elif HABIT == "by a weak reference":
                count[HABIT] = sum((n + 1) * weak[one] for n, one in enumerate(net))
            count |= {"made anew": meter.count, "behind a generator": seen}
            if HABIT == "a global of another file":
                count[HABIT] = growing()
            elif HABIT == "a file with a part's name":
                count[HABIT] = take()
            elif HABIT == "two files away":
                count[HABIT] = reached_from.growing_further()
            elif HABIT == "arguments that change":
                count[HABIT] = 1 + smoothed(step.index) + added_up(step.index)
            elif HABIT == "a remembered result":
                count[HABIT] = tracker()["count"]
            loss = model(x).square().mean() / count.get(HABIT, 1)
            if HABIT.startswith("a target"):
                loss = loss + (model(x) - target(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(target.parameters(), net.parameters(), strict=True):
            if HABIT.startswith("a target"):
                one.data.lerp_(other.data, 0.1)
        if step.index == 3:
            meter = Meter()
    if isinstance(last, Recurrent):
        last.hidden = None  # torch copies no tensor that has a graph
    best = copy.deepcopy(net)
    leave(dist.get_rank(), {"model": best.state_dict(), "optimizer": optimizer.state_dict()})


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
