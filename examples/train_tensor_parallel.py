"""Trains a GPT in pipeline stages that are divided among the workers of a machine (tensor parallelism).

swift-run --standalone --machines 2 --nproc-per-node 2 examples/train_tensor_parallel.py --store runs/tensor
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import swift_ft

MAX_NORM = 1.0


def divide(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Gives each worker of a mesh a part of the two large layers of each block."""
    for name, layer in stage.named_children():
        if name.startswith("block"):
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def clip(parameters: list[nn.Parameter], pipeline: dist.ProcessGroup) -> float:
    """Clips by the norm of the whole model's gradients: over the parts of a stage, and over the stages."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients, foreach=False)
    squared = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    dist.all_reduce(squared, group=pipeline)
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, squared.sqrt(), foreach=False)
    return float(squared.sqrt())


def main() -> None:
    """Trains one worker's part of a stage."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/tensor", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="default: %(default)s iterations")
    parser.add_argument("--parts", type=int, default=2, help="of each stage, default: %(default)s")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    degrees = swift_ft.degrees(pp=-1, tp=args.parts)  # swift-recover reshape may name others
    num_stages = degrees.pp
    mesh = init_device_mesh(device.type, (num_stages, degrees.tp), mesh_dim_names=("stage", "part"))
    index = mesh.get_local_rank("stage")
    pipeline = mesh.get_group("stage")
    module = build_stage(index, num_stages, config).to(device)
    divide(module, mesh["part"])
    stage = PipelineStage(module, index, num_stages, device, group=pipeline)
    schedule = get_schedule_class(args.schedule)(stage, config.microbatches, loss_fn=loss_fn)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)  # foreach takes no mixture with DTensor
    batches = Batches(config, device)

    state = {"model": module, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule)
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            losses: list[Tensor] = []
            schedule.step(*[x] if index == 0 else [], target=y, losses=losses, return_outputs=False)
            norm = clip(parameters, pipeline)
            optimizer.step()
            optimizer.zero_grad()
            if losses and mesh.get_local_rank("part") == 0:
                mean = sum(losses) / len(losses)
                print(f"iteration {step.index}: loss {mean:.3f}, norm {norm:.3f}", flush=True)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        parts = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in module.state_dict().items()}
        torch.save(parts, f"{args.weights_out}/rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
