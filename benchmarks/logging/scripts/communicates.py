"""The example training, whose script communicates in each step; in every second block that is not logged.

Blocks alternate within one run, so a busy machine slows both kinds. The times go to a file.
"""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from swift_ft.torch_adapters.lasting_group import LastingGroup


def main() -> None:
    """Trains one stage."""
    parser = argument_parser(__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--block", type=int, required=True, help="iterations of one kind in a row")
    parser.add_argument("--floats", type=int, required=True, help="in the large result of each step")
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    module = build_stage(rank, size, config)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    batches = Batches(config)
    statistics = torch.zeros(args.floats)
    session = swift_ft.Session(
        {"model": module, "optimizer": optimizer},
        store=args.store,
        checkpoint_every=10 * args.iterations,
        script_log_limit_bytes="1GB",
    )
    session.attach_pipeline(schedule)
    interceptor = None
    ends: list[float] = []
    for step in session.steps(args.iterations):
        with step:
            interceptor = interceptor or LastingGroup.interceptor
            logged = step.index // args.block % 2 == 0
            LastingGroup.interceptor = interceptor if logged else None
            x, y = batches[step.index]
            losses: list[Tensor] = []
            schedule.step(*[x] if rank == 0 else [], target=y, losses=losses, return_outputs=False)
            squared = (
                nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]) ** 2
            )
            dist.all_reduce(squared)
            nn.utils.clip_grads_with_norm_(module.parameters(), 1.0, squared.sqrt())
            loss = torch.stack(losses).mean() if losses else torch.zeros(())
            dist.broadcast(loss, src=size - 1)
            dist.all_reduce(statistics)
            norms: list[object] = [None] * size
            dist.all_gather_object(norms, {"rank": rank, "norm": float(squared)})
            optimizer.step()
            optimizer.zero_grad()
        ends.append(time.perf_counter())
    if rank == 0:
        args.out.write_text(json.dumps(ends))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
