"""A plain loop: a model on each worker, gradients averaged by hand, and nothing attached to the session."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from placement import add_device_options, join
from torch import nn

import swift_ft
from swift_ft.faults.failpoints import Point, hit
from swift_ft.recovery.job_state import Phase, State
from swift_ft.runtime.memory.holder import Held
from tests.support.copies import wait_for_copy
from tests.support.waiting import wait_until

parser = argparse.ArgumentParser()
parser.add_argument("--store", required=True)
parser.add_argument("--weights-out", required=True)
parser.add_argument("--iterations", type=int, default=14)
parser.add_argument("--checkpoint-every", type=int, default=100)
parser.add_argument("--snapshot-every", default="5")
parser.add_argument("--fully-shard", action="store_true")
parser.add_argument("--ddp", action="store_true")
parser.add_argument("--sync-batch-norm", action="store_true", help="normalise over all workers, on GPUs")
parser.add_argument("--hidden", type=int, default=33, help="width of the model")
parser.add_argument("--memory-left", type=int, help="bytes that each host has left for copies")
parser.add_argument(
    "--damage", choices=["own", "held"], help="worker 0 flips a bit of a copy in iteration 11"
)
parser.add_argument("--settle", action="store_true", help="go on when the last copy is complete")
add_device_options(parser)
args = parser.parse_args()

swift_ft.deterministic()
device = join(args)
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
first, last = nn.Linear(16, args.hidden), nn.Linear(args.hidden, 8)
layers = nn.Sequential(first, nn.BatchNorm1d(args.hidden), nn.ReLU(), nn.Dropout(0.1), last).to(device)
if args.sync_batch_norm:
    layers = nn.SyncBatchNorm.convert_sync_batchnorm(layers)
if args.fully_shard:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size,))
    for layer in (layers[0], layers[4], layers):
        fully_shard(layer, mesh=mesh)
model: nn.Module = nn.parallel.DistributedDataParallel(layers) if args.ddp else layers
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
every = args.snapshot_every if args.snapshot_every == "auto" else int(args.snapshot_every)
session = swift_ft.Session(
    {"model": model, "optimizer": optimizer, "schedule": schedule},
    store=args.store,
    checkpoint_every=args.checkpoint_every,
    snapshot_every=every,
)
if args.memory_left is not None:
    session._assembly._in_memory._available = lambda: args.memory_left
if args.ddp:
    session.attach_ddp(model)


def damage(which: str) -> None:
    """Flip a bit of the newest copy of this worker's state, or of the one that it holds for another."""
    snapshots = session._assembly._in_memory
    found = snapshots._own[10] if which == "own" else snapshots._held.as_sent(10)
    assert isinstance(found, Held)
    found.block.data[found.block.length // 2] ^= 1


def settle(completed: int) -> None:
    """Wait until the newest copy is complete, and a checkpoint committed, or a loss is known."""
    wait_for_copy(session, completed - completed % int(every))

    def over(state: State) -> bool:
        return state.phase != Phase.LIVE or state.checkpoints.committed is not None

    if session._assembly._participant.wait_for(over, 30.0) is None:
        raise TimeoutError("no checkpoint was committed")


def wait_for_update(iteration: int) -> None:
    """Wait until worker 0 has updated its parameters."""
    what = f"worker 0 does not update its parameters in iteration {iteration}"
    wait_until(updated(iteration).exists, what, 30.0)


def updated(iteration: int) -> Path:
    return Path(args.weights_out).with_name(f"updated{iteration}")


for step in session.steps(args.iterations):
    with step:
        if args.settle:
            settle(step.index)
        if args.damage and rank == 0 and step.index == 11:
            damage(args.damage)
        hit(Point.FORWARD, step.index, 0)
        generator = torch.Generator().manual_seed(1000 * step.index + rank)
        x, y = (torch.randn(4, size, generator=generator).to(device) for size in (16, 8))
        loss = nn.functional.mse_loss(model(x), y)
        hit(Point.BACKWARD, step.index, 0)
        loss.backward()
        hit(Point.REDUCE, step.index, 0)
        if not args.fully_shard and not args.ddp:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world_size)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if args.ddp and rank != 0:
            wait_for_update(step.index)
        optimizer.step()
        if args.ddp and rank == 0:
            updated(step.index).touch()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
folder = Path(args.weights_out)
folder.mkdir(parents=True, exist_ok=True)
local = {
    name: tensor.to_local() if hasattr(tensor, "to_local") else tensor
    for name, tensor in model.state_dict().items()
}
torch.save(local, folder / f"rank{rank}.pt")
(folder / f"rank{rank}.pid").write_text(f"{os.getpid()} {mean.item()!r}")
