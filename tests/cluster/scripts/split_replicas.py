"""Tensor parallelism by hand, within a machine, in the stages of two pipelines that DDP makes replicas of.

As in Megatron-LM: parameters are plain tensors, and each worker has half of them. Clipped by the global norm.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import swift_ft

WIDTH, MICROBATCHES, CLIP = 8, 4, 0.5


class Enter(torch.autograd.Function):
    """The same for all parts, whose gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """The sum of what the parts have, whose gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """A worker's part of two layers: by columns, then by rows."""

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        super().__init__()
        torch.manual_seed(2 * seed + group.rank())
        self.up = nn.Linear(WIDTH, 2 * WIDTH // group.size())
        self.down = nn.Linear(2 * WIDTH // group.size(), WIDTH, bias=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        entered: Tensor = Enter.apply(x, self.group)  # type: ignore[no-untyped-call]
        left: Tensor = Leave.apply(self.down(self.up(entered).tanh()), self.group)  # type: ignore[no-untyped-call]
        return x + left


def clip(parameters: list[nn.Parameter], groups: list[dist.ProcessGroup]) -> None:
    """By the norm over all parts of all stages."""
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
    for group in groups:
        dist.all_reduce(total, group=group)
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, total**0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store")
    parser.add_argument("--weights-out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    split = mesh["tp"].get_group()
    module = nn.Sequential(*[Block(split, seed=2 * index + number) for number in range(2)])
    model = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2), exact=True)
    session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=3)
    session.attach_pipeline(schedule)
    session.attach_ddp(model)
    for step in session.steps(8):
        with step:
            generator = torch.Generator().manual_seed(2 * step.index + replica)
            x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)
            schedule.step(*[x] if index == 0 else [], target=y, return_outputs=False)
            clip(list(module.parameters()), [split, mesh["pp"].get_group()])
            optimizer.step()
            optimizer.zero_grad()
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
