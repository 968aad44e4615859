"""Replicas whose optimizer has another one in it: a wrapper that keeps slow weights, or takes two steps.

optimizers.py STORE HABIT
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
ITERATIONS = 8


class Slow(torch.optim.Optimizer):
    """Each third step the parameters go halfway back to slow ones."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.steps = 0
        if HABIT == "shares its state":
            self.state = base.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = self.base.step(closure) if closure is not None else self.base.step()
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.steps % 3 == 0:
                    p.lerp_(slow, 0.5)
                    slow.copy_(p)
        return loss


class SlowAndSaved(Slow):
    """The same, with the state of the optimizer in it."""

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        saved, base = super().state_dict(), self.base.state_dict()
        for index, fields in base["state"].items():
            saved["state"].setdefault(index, {}).update(
                {f"base.{key}": value for key, value in fields.items()}
            )
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Both states."""
        base = {
            index: {k.removeprefix("base."): v for k, v in fields.items() if k.startswith("base.")}
            for index, fields in state_dict["state"].items()
        }
        own = {
            index: {k: v for k, v in fields.items() if not k.startswith("base.")}
            for index, fields in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": own})
        self.base.load_state_dict({**state_dict, "state": base})
        self.param_groups = self.base.param_groups


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
base = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = SlowAndSaved(base) if HABIT == "saves both states" else Slow(base)
state: dict[str, Any] = {"model": model, "optimizer": optimizer}
if HABIT == "both are passed":
    state["base"] = base
session = swift_ft.Session(state, store=STORE, checkpoint_every=3)
session.attach_ddp(model)
for step in session.steps(ITERATIONS):
    with step:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

leave(rank, {"model": model.state_dict(), "slow": optimizer.state_dict(), "base": base.state_dict()})
dist.destroy_process_group()
