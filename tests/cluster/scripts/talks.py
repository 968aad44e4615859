"""The example training, whose script communicates as real ones do, on groups of its own."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from tests.support.script import script_parser

CLIP = 0.05


def clip_by_global_norm(module: torch.nn.Module, group: dist.ProcessGroup) -> float:
    """As torchtitan does it: each stage's norm, reduced over the stages."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    norm **= 2
    dist.all_reduce(norm, group=group)
    norm **= 0.5
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), CLIP, norm)
    return norm.item()


def tell_by_tags(values: torch.Tensor, told: torch.Tensor, last: int) -> None:
    """From the last worker to the first, which takes the second message before the first one."""
    rank, (first, second) = dist.get_rank(), told.split(1)
    if rank == last:
        messages = [dist.P2POp(dist.isend, value, 0, tag=tag) for tag, value in enumerate(values.split(1), 1)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    elif rank == 0:
        dist.recv(second, src=last, tag=2)
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, first, last, tag=1)])
        work.wait()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only-first", action="store_true", help="communicate at a step's beginning only")
    parser.add_argument("--tags", action="store_true", help="tell the first worker by tags, out of order")
    parser.add_argument("--scatter", action="store_true", help="do what no log has")
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    pipeline = mesh["pp"].get_group()
    ends = dist.new_group([0, last])
    module = build_stage(rank, size, config)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    batches = Batches(config)
    session = swift_ft.Session(
        {"model": module, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_pipeline(schedule, build=lambda index: build_stage(index, size, config))
    seen = {}
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            seed = torch.tensor([float(step.index)]) if rank == last else torch.zeros(1)
            dist.broadcast(seed, src=last)
            counted = dist.all_reduce(torch.ones(1), async_op=True)
            assert counted is not None
            # What is logged is what came, and not what the script makes of it.
            doubled = counted.get_future().then(lambda ended: [one.mul_(2) for one in ended.value()])
            assert doubled.wait()[0].item() == 2 * size
            assert functional.all_reduce(seed, "sum", mesh["pp"]).item() == size * step.index
            if args.scatter:
                dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(size))
            losses: list[torch.Tensor] = []
            schedule.step(*[x] if rank == 0 else [], target=y, losses=losses, return_outputs=False)
            if args.only_first:
                optimizer.step()
                optimizer.zero_grad()
                continue
            norm = clip_by_global_norm(module, pipeline)
            loss = torch.stack(losses).mean() if losses else torch.zeros(())
            pending = dist.broadcast(loss, src=last, async_op=True)  # on the default group
            norms: list[object] = [None] * size
            dist.all_gather_object(norms, {"rank": rank, "norm": norm})
            assert pending is not None
            pending.wait()
            if rank in (0, last):
                dist.all_reduce(loss, group=ends)
            told = torch.zeros(2)
            values = torch.tensor([norm, loss.item()])
            if args.tags:
                tell_by_tags(values, told, last)
            elif rank == last:
                dist.send(values, dst=0)
            elif rank == 0:
                dist.recv(told, src=last)
            for group in optimizer.param_groups:  # what was communicated matters for what follows
                group["lr"] = 1e-3 / (1.0 + loss.item() + (told[0] - told[1]).item() * 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            seen[step.index] = [norm, loss.item(), told.tolist(), norms]
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    folder = Path(os.environ["SWIFT_TEST_FOLDER"])
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
