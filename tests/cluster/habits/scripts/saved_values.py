"""Keeps more than numbers and tensors in a state: what people put into ``state_dict()``.

A meter notes what it saw, with NumPy's numbers, in a deque; a layer has scales that are no tensors, or a
tensor that grows. All of them decide what is computed next.
"""

import collections
import dataclasses
import datetime
import enum
import io
import os
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT, FORM = sys.argv[1:4]
ITERATIONS = int(sys.argv[4]) if len(sys.argv) > 4 else 8


class Phase(enum.Enum):
    WARM = "warm"
    HOT = "hot"


@dataclasses.dataclass
class Best:
    value: np.float64
    at: int


class Meter:
    """What a trainer keeps beside the model."""

    def __init__(self) -> None:
        self.seen: collections.deque[Any] = collections.deque(maxlen=4)
        self.counts: dict[Any, int] = collections.defaultdict(int)
        self.phase = Phase.WARM
        self.best: Best | None = None
        self.files = [pathlib.Path("out/first")]
        self.began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        self.sum = np.zeros(3)
        self.skipped = {np.int64(1), frozenset({2})}

    def step(self, loss: float) -> None:
        number = np.float64(loss)
        self.seen.append(number)
        self.counts[self.phase] += 1
        self.sum = self.sum + np.array([number, 1.0, -number])
        if self.counts[self.phase] == 3:
            self.phase = Phase.HOT
        if self.best is None or number < self.best.value:
            self.best = Best(number, len(self.seen))
        self.began += datetime.timedelta(hours=1)

    def factor(self) -> float:
        """By which a learning rate is multiplied: it depends on all of this."""
        seen = float(np.mean(self.seen)) if self.seen else 1.0
        late = 0.5 if self.phase is Phase.HOT else 1.0
        return late * seen * (1 + 1e-3 * float(self.sum.sum())) * (1 + 1e-3 * self.began.hour)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Foreign:
    """Nothing that could be read without executing code."""


class Odd(Meter):
    def __init__(self) -> None:
        super().__init__()
        self.history = [1, 2, 3, Foreign()]


class Scaled(nn.Module):
    """A layer whose scales are no parameters and no buffers, as those of an FP8 library."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.history = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.linear(x) * (sum(self.history) / len(self.history))
        return scaled

    def note(self) -> None:
        """After an update."""
        self.history.append(float(self.linear.weight.detach().abs().max()))

    def get_extra_state(self) -> Any:
        if HABIT == "extra-dict":
            return {"history": self.history, "largest": np.float32(max(self.history))}
        file = io.BytesIO()
        torch.save(self.history, file)
        if HABIT == "extra-file":
            return file
        return torch.frombuffer(bytearray(np.array(self.history).tobytes()), dtype=torch.uint8).clone()

    def set_extra_state(self, state: Any) -> None:
        if HABIT == "extra-dict":
            self.history = list(state["history"])
        elif HABIT == "extra-file":
            state.seek(0)
            self.history = torch.load(state, weights_only=True)
        else:
            self.history = np.frombuffer(state.numpy().tobytes()).tolist()


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    layer = nn.Linear(4, 4) if HABIT in ("values", "odd") else Scaled()
    module: nn.Module = nn.Sequential(layer, nn.Tanh())
    meter = Odd() if HABIT == "odd" else Meter()
    model = DistributedDataParallel(module) if FORM == "ddp" else module
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.param_groups[0]["note"] = np.float32(0.1)
    state = {"model": model, "optimizer": optimizer, "meter": meter}
    snapshots = 2 if FORM == "memory" else None
    session = swift_ft.Session(state, store=STORE, checkpoint_every=3, snapshot_every=snapshots)
    if FORM == "ddp":
        session.attach_ddp(model)
    elif FORM == "pipeline":
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, t: (y - t).square().mean())
        session.attach_pipeline(schedule)
    for step in session.steps(ITERATIONS):
        with step:
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step.index))
            if FORM == "pipeline":
                schedule.step(*[x] if rank == 0 else [], target=x if rank == size - 1 else None)
                loss = float(step.index)
            else:
                output = model(x)
                output.square().mean().backward()
                loss = float(output.detach().mean()) if FORM == "memory" else float(step.index)
            optimizer.param_groups[0]["lr"] = 1e-2 * meter.factor()
            optimizer.step()
            optimizer.zero_grad()
            meter.step(loss)
            if isinstance(layer, Scaled):
                layer.note()
    kept = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    extra = {"meter": repr(sorted(vars(meter).items(), key=str)), "history": getattr(layer, "history", None)}
    kept["model"].pop("_extra_state", None)
    leave(rank, {**kept, **extra, "note": repr(optimizer.param_groups[0]["note"])})
    print(f"done by {os.environ.get('RANK')}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
