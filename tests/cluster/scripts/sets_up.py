"""The example trainings, whose scripts communicate before their first step, as real ones do."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.script import script_parser


def set_up(rank: int, size: int) -> dict[str, object]:
    """What every worker learns from the others before training."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("workers",))
    ends = dist.new_group([0, size - 1])
    settings: list[object] = [{"seed": int.from_bytes(os.urandom(4)), "run": "x"}] if rank == 0 else [None]
    dist.broadcast_object_list(settings, src=0)
    names: list[object] = [None] * size
    dist.all_gather_object(names, f"worker {rank}")
    count = torch.tensor([rank + 1])
    dist.all_reduce(count)
    counted = functional.all_reduce(count, "sum", mesh["workers"]).tolist()
    gathered: list[object] | None = [None] * size if rank == 1 else None
    dist.gather_object(rank, gathered, dst=1)
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    told = torch.zeros(1)
    if rank == 0:
        dist.send(torch.tensor([7.0]), dst=1)
    elif rank == 1:
        dist.recv(told, src=0)
    at_the_ends = torch.tensor([rank])
    if rank in (0, size - 1):
        dist.broadcast(at_the_ends, src=size - 1, group=ends)
    dist.barrier()
    return {
        "settings": settings,
        "names": names,
        "count": [count.item(), counted],
        "gathered": gathered,
        "mine": mine,
        "told": told.item(),
        "ends": at_the_ends.item(),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--large", action="store_true", help="more than is noted")
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    learnt = set_up(rank, size)
    if args.large:
        dist.broadcast(torch.zeros(1 << 20), src=0)
    folder = Path(os.environ["SWIFT_TEST_FOLDER"])
    with (folder / f"learnt{rank}.jsonl").open("a") as file:
        file.write(json.dumps(learnt) + "\n")
    batches = Batches(config)
    if args.ddp:
        inner = build_stage(0, 1, config)
        module: torch.nn.Module = DistributedDataParallel(inner)
    else:
        module = inner = build_stage(rank, size, config)
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    # What was communicated matters for what follows.
    rate = 1e-4 * learnt["count"][0]  # type: ignore[index]
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(module.parameters(), lr=rate))
    session = swift_ft.Session(
        {"model": module, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    if args.ddp:
        session.attach_ddp(module)
    else:
        session.attach_pipeline(schedule)
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            if args.ddp:
                x, y = (part.chunk(size)[rank] for part in (x, y))
                loss_fn(module(x), y).backward()
            else:
                schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    torch.save(inner.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
