"""Replicas (by DDP or FSDP2), or the stages of a pipeline, with state in attributes and generators.

attributes.py STORE HABIT [pipeline | shards | memory]
"""

import io
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import swift_ft
from tests.support.habits import attach, leave

STORE, HABIT = sys.argv[1:3]
KIND = "".join(sys.argv[3:])
ITERATIONS = 8


class Centred(nn.Module):
    """Its output is centred by an average that is no buffer, as the loss of DINO does."""

    shared_count = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.center = torch.zeros(1, 6)
        self.calls = 0
        self.history: list[float] = []
        self.scales: dict[str, Any] = {"amax": torch.zeros(2), "rounds": 0}
        self.state = torch.zeros(1)
        self.positions = torch.arange(6.0).expand(4, 6)
        with torch.inference_mode():
            self.shift = torch.ones(6)
        self.noise = torch.Generator().manual_seed(3)
        self.choices = np.random.default_rng(4)
        self.dice = random.Random(5)
        if HABIT == "expanded":
            places = torch.arange(6.0)  # DDP writes to buffers, as torch cannot to an expanded one
            places = places.expand(4, 6) if KIND == "pipeline" else places
            self.register_buffer("places", places, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        type(self).shared_count += 1
        y: Tensor = self.net(x)
        with torch.no_grad():
            if HABIT == "centre, made anew":
                self.center = 0.9 * self.center + 0.1 * y.mean(0, keepdim=True)
            elif HABIT == "centre, in place":
                self.center.mul_(0.9).add_(y.mean(0, keepdim=True), alpha=0.1)
            elif HABIT.startswith("extra state"):
                self.state = 0.5 * self.state + y.mean()
        scale = 1.0
        if HABIT == "counter":
            scale = 1 / self.calls
        elif HABIT == "counter of a class":
            scale = 1 / type(self).shared_count
        elif HABIT == "list":
            self.history.append(float(y.detach().mean()))
            scale = 1 + sum(self.history)
        elif HABIT == "dictionary of tensors":
            self.scales["amax"][0] += y.detach().abs().amax()
            self.scales["rounds"] += 1
            scale = 1 + float(self.scales["amax"][0])
        elif HABIT == "torch.Generator":
            scale = float(torch.rand((), generator=self.noise))
        elif HABIT == "NumPy's generator":
            scale = float(self.choices.random())
        elif HABIT == "random.Random":
            scale = self.dice.random()
        elif HABIT == "expanded":
            y = y + self.positions[: len(y)] * self.get_buffer("places")[0] + self.shift
        elif HABIT == "made in the first forward":
            self.lazy = getattr(self, "lazy", 0) + 1
            scale = 1 / self.lazy
        elif HABIT.startswith("extra state"):
            scale = 1 + float(self.state)
        return (y - self.center) * scale


class WithExtraState(Centred):
    """It also saves what is in its attributes, as layers of other libraries do."""

    def get_extra_state(self) -> Any:
        if HABIT == "extra state, dict":
            return {"state": self.state, "calls": self.calls}
        file = io.BytesIO()
        torch.save(self.state, file)
        if HABIT == "extra state, BytesIO":
            return file
        padded = bytearray(file.getvalue()) + bytes(self.calls)  # of another size each time
        return torch.frombuffer(padded, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if HABIT == "extra state, dict":
            self.state, self.calls = state["state"], state["calls"]
            return
        file = state if HABIT == "extra state, BytesIO" else io.BytesIO(bytes(state.tolist()))
        file.seek(0)
        self.state = torch.load(file, weights_only=True)


def centred() -> Centred:
    return WithExtraState() if HABIT.startswith("extra state") else Centred()


def batch(index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(index))  # the same on all replicas


def train_replicas() -> Any:
    torch.manual_seed(0)
    inner = centred()
    model: nn.Module = inner
    if KIND == "shards":  # of which each replica has all
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    elif KIND == "memory":  # each shard is on one worker only, and a copy of it in the other one's memory
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer},
        store=STORE,
        checkpoint_every=10 if KIND == "memory" else 3,
        snapshot_every=2 if KIND == "memory" else None,
    )
    if KIND == "shards":
        session.attach_fsdp(model)
    elif KIND != "memory":
        session.attach_ddp(model)
    for step in session.steps(ITERATIONS):
        with step:
            model(batch(step.index)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return inner.state_dict(), optimizer.state_dict()


def train_stage() -> Any:
    torch.manual_seed(dist.get_rank())
    module = centred()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    session = swift_ft.Session({"model": module, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
    schedule = attach(session, module, pipeline=True)
    for step in session.steps(ITERATIONS):
        with step:
            x = batch(step.index)
            schedule.step(*[x] if dist.get_rank() == 0 else [], target=x)
            optimizer.step()
            optimizer.zero_grad()
    return module.state_dict(), optimizer.state_dict()


dist.init_process_group("gloo")
model_state, optimizer_state = train_stage() if KIND == "pipeline" else train_replicas()
kept = {k: v for k, v in model_state.items() if not isinstance(v, io.BytesIO)}
leave(
    dist.get_rank(), tree_map_only(DTensor, DTensor.to_local, {"model": kept, "optimizer": optimizer_state})
)
dist.destroy_process_group()
