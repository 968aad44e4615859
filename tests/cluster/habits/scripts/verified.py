"""A pipeline of two stages with much that an update changes, and that a verified step could change twice.

verified.py STORE HABIT

kept   lists of tensors in an optimizer's state, a second optimizer over the same parameters, a large average
       that the script keeps, and a layer that a step thaws
late   a large array of one worker that first changes in a step that is to be verified
"""

import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
ITERATIONS, THAWED, LATE = 10, 5, 7
SIZE = 600


class Factors(torch.optim.Optimizer):
    """Keeps its averages in lists."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                averages = self.state[p].setdefault("averages", [torch.zeros_like(p), torch.zeros_like(p)])
                averages[0].lerp_(p.grad, 0.1)
                averages[1].lerp_(p.grad.square(), 0.1)
                p.sub_(averages[0] / (averages[1].sqrt() + 1e-3), alpha=group["lr"])


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, SIZE), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 4))
    optimizer = Factors(module[1:].parameters())
    second = torch.optim.SGD(module[3].parameters(), lr=1e-3, momentum=0.9)
    average = {name: one.detach().clone() for name, one in module.named_parameters()}
    table = np.zeros(2**18)
    state: dict[str, Any] = {"model": module, "optimizer": optimizer, "second": second}
    session = swift_ft.Session(state, store=STORE, checkpoint_every=3)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: (y - target).square().mean())
    session.attach_pipeline(schedule)
    for step in session.steps(ITERATIONS):
        with step:
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step.index))
            schedule.step(*[x] if rank == 0 else [], target=x if rank == size - 1 else None)
            if HABIT == "kept" and step.index == THAWED and rank == 0:
                optimizer.add_param_group({"params": [*module[0].parameters()]})
            optimizer.step()
            second.step()
            module.zero_grad()
            if HABIT == "kept":
                for name, parameter in module.named_parameters():
                    average[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)
            elif rank == 1 and step.index >= LATE:
                table[0] = 1
    kept = {name: optimizer.state_dict()["state"] for name, optimizer in state.items() if name != "model"}
    leave(rank, {"model": module.state_dict(), "average": average, **kept})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
