"""The example training, with several calls of the schedule in each step.

--kind accumulate    gradients of two batches, in even iterations of one, and one update
--kind updates       each batch has an update of its own
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from tests.support.script import script_parser

CALLS = 2


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--kind", choices=("accumulate", "updates"))
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    module = build_stage(rank, size, config)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn, scale_grads=False)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(module.parameters(), lr=1e-3), exact=True)
    batches = Batches(config)
    session = swift_ft.Session(
        {"model": module, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_pipeline(schedule, build=lambda index: build_stage(index, size, config))
    for step in session.steps(args.iterations):
        with step:
            calls = 1 if args.kind == "accumulate" and step.index % 2 == 0 else CALLS
            for call in range(calls):
                x, y = batches[step.index * CALLS + call]
                schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
                if args.kind == "updates" or call == calls - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
