"""Trains a GPT with pipeline parallelism. A machine that dies is replaced; the others keep their state.

swift-run --standalone --machines 4 examples/train_swift.py --store runs/swift
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn, stages_of
from placement import add_device_options, join
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import swift_ft


def main() -> None:
    """Trains one worker's stages."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/swift", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="default: %(default)s iterations")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    indices, num_stages = stages_of(args.schedule, rank, world_size)
    modules = {index: build_stage(index, num_stages, config).to(device) for index in indices}
    stages = [PipelineStage(part, index, num_stages, device) for index, part in modules.items()]
    model = nn.ModuleList(modules.values())
    pipeline = stages if len(stages) > 1 else stages[0]
    schedule = get_schedule_class(args.schedule)(pipeline, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(config, device)

    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule, build=lambda index: build_stage(index, num_stages, config).to(device))
    for step in session.steps(args.iterations):
        with step:
            iteration = step.index
            x, y = batches[iteration]
            losses: list[Tensor] = []
            schedule.step(*[x] if rank == 0 else [], target=y, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            if losses:  # on the last stage
                print(f"iteration {iteration}: loss {sum(losses) / len(losses):.3f}", flush=True)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
