"""The example training with tensor parallelism inside its stages, clipped by the global norm."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import swift_ft
from tests.support.machines import die
from tests.support.script import script_parser
from tests.support.waiting import wait_until

CLIP = 0.05
APART = 4
"""The iteration that only some of the workers complete, with --apart."""


def shard(stage: torch.nn.Module, mesh: DeviceMesh) -> None:
    """The two layers of each block, the embedding and the head."""
    for name, layer in stage.named_children():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if name == "embedding":
            plan = {"token": RowwiseParallel(input_layouts=Replicate())}
        elif name == "head":
            plan = {"logits": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(layer, mesh, plan)


def clip_by_global_norm(
    parameters: list[torch.nn.Parameter], group: dist.ProcessGroup, mark: Path | None
) -> float:
    """As torchtitan does it for pipelines: DTensor norms, reduced over the stages."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=False)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if mark is not None:
        die_after(mark)
    norm **= 2
    dist.all_reduce(norm, group=group)
    norm **= 0.5
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, norm, foreach=False)
    return norm.item()


def swapped(value: float, rank: int, peer: int) -> float:
    """As context parallelism does, on the default group: a batch in which both send first."""
    taken = torch.zeros(1)
    sent = torch.tensor([value + rank])
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, taken, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return taken.item()


def die_after(mark: Path) -> None:
    """The whole machine, once its other worker has reduced its norm, and rank 0 is ahead."""
    wait_until(mark.exists, "rank 0 did not get ahead")
    die()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--tp", type=int, default=2, help="workers of a stage")
    parser.add_argument(
        "--across", action="store_true", help="the workers of a stage are on different machines"
    )
    parser.add_argument("--limit", help="how large results may be that are logged")
    parser.add_argument("--exact", action="store_true", help="the optimizer can undo its update")
    parser.add_argument("--swap", action="store_true", help="the workers of a stage swap messages in batches")
    parser.add_argument("--apart", action="store_true", help="rank 3 dies when rank 0 is ahead of rank 1")
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = size // args.tp
    mesh = init_device_mesh("cpu", (stages, args.tp), mesh_dim_names=("pp", "tp"))
    index = mesh.get_local_rank("pp")
    module = build_stage(index, stages, config)
    shard(module, mesh["tp"])
    stage = PipelineStage(module, index, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    if args.exact:
        swift_ft.wrap_optimizer(optimizer, exact=True)
    batches = Batches(config)
    options = {} if args.limit is None else {"script_log_limit_bytes": args.limit}
    session = swift_ft.Session(
        {"model": module, "optimizer": optimizer},
        store=args.store,
        checkpoint_every=args.checkpoint_every,
        **options,
    )
    session.attach_pipeline(schedule)
    seen, plan = {}, ""
    mark = Path(os.environ["SWIFT_TEST_FOLDER"]) / "ahead"
    for step in session.steps(args.iterations):
        if rank == 0 and step.index > APART:
            mark.touch()
        with step:
            x, y = batches[step.index]
            losses: list[torch.Tensor] = []
            schedule.step(*[x] if index == 0 else [], target=y, losses=losses, return_outputs=False)
            doomed = args.apart and rank == 3 and step.index == APART and not mark.exists()
            norm = clip_by_global_norm(parameters, mesh.get_group("pp"), mark if doomed else None)
            if args.swap:
                norm += swapped(norm, rank, rank ^ 1)
            optimizer.step()
            optimizer.zero_grad()
            seen[step.index] = [norm, *[loss.item() for loss in losses]]
        plan = str(session.plan()) if step.index == args.iterations - 1 else ""
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in module.state_dict().items()}
    torch.save(local, f"{args.weights_out}/rank{rank}.pt")
    folder = Path(os.environ["SWIFT_TEST_FOLDER"])
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))
    (folder / f"plan{rank}.txt").write_text(plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
