"""Trains a GPT with pipelines that are replicas of each other, on a device mesh.

A lost stage comes from its replica if one lives, else from its log.

swift-run --standalone --machines 4 examples/train_hybrid.py --store runs/hybrid
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

import swift_ft


def main() -> None:
    """Trains one worker's stage of one pipeline."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/hybrid", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="default: %(default)s iterations")
    parser.add_argument("--replicas", type=int, default=2, help="of each stage, default: %(default)s")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_stages = world_size // args.replicas
    mesh = init_device_mesh(device.type, (args.replicas, num_stages), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    module = build_stage(index, num_stages, config).to(device)
    model = DistributedDataParallel(module, process_group=mesh.get_group("replica"))
    stage = PipelineStage(model, index, num_stages, device, group=mesh.get_group("stage"))
    schedule = get_schedule_class(args.schedule)(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), exact=True)
    batches = Batches(config, device)

    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule)
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index * args.replicas + replica]
            losses: list[Tensor] = []
            schedule.step(*[x] if index == 0 else [], target=y, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            if losses:  # on the last stage
                print(f"iteration {step.index}: loss {sum(losses) / len(losses):.3f}", flush=True)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
