"""A pipeline of two stages with large messages that computes next to nothing, until it is stopped."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from tests.support.script import script_parser

WIDTH, MICROBATCHES = 1 << 18, 4  # a message has 1 MiB


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def main() -> None:
    args = script_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=10**6
    )
    session.attach_pipeline(schedule)
    for step in session.steps(args.iterations):
        with step:
            x, y = torch.zeros(2, MICROBATCHES, WIDTH)
            schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
        metrics = session.metrics()
        busy, rate = metrics.link_busy or 0.0, metrics.link_bytes_per_s or 0.0
        print(
            f"iteration {step.index}: link of {rank}, {busy:.2f} of the time, {rate:.0f} bytes/s", flush=True
        )


if __name__ == "__main__":
    main()
