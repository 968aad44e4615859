"""A model sharded by FSDP2 on two workers, in a session with memory checkpoints or under torchrun with DCP.

Worker 0 writes a line when an iteration ends: its number and the time. With ``--die N``, worker 1 gets
SIGKILL in iteration N, once, and writes when. Each start of worker 0 is a line, too. With ``--turns N``,
copies are made in every second block of N iterations only.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import swift_ft
from swift_ft.faults.failpoints import Point, hit
from swift_ft.runtime.memory.memory_checkpoints import MemoryCheckpoints

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--way", choices=["memory", "dcp"], required=True)
parser.add_argument("--iterations", type=int, required=True)
parser.add_argument("--checkpoint-every", type=int, required=True)
parser.add_argument("--snapshot-every", default="auto")
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--die", type=int, default=-1)
parser.add_argument("--turns", type=int, default=0, help="iterations with copies, and then without, in turn")
args = parser.parse_args()

if os.environ["RANK"] == "0":
    with (args.folder / "starts.txt").open("a") as starts:
        starts.write(f"{time.time()}\n")
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(6)))
for layer in (*layers, layers):
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
model: nn.Module = layers
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
died = args.folder / "died"


def copy_in_turns(block: int) -> None:
    """Make no copy in every second block."""
    take = MemoryCheckpoints._take

    def take_in_turns(self: MemoryCheckpoints, iteration: int, *, by_plan: bool = False) -> None:
        if by_plan or iteration // block % 2 == 0:
            take(self, iteration, by_plan=by_plan)

    MemoryCheckpoints._take = take_in_turns  # type: ignore[method-assign]


def iterate(iteration: int) -> None:
    """One iteration."""
    hit(Point.FORWARD, iteration, 0)
    x = torch.randn(64, args.width, generator=torch.Generator().manual_seed(2 * iteration + rank))
    loss = model(x).square().mean()
    if iteration == args.die and rank == 1 and not died.exists():
        died.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    hit(Point.BACKWARD, iteration, 0)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def note(iteration: int) -> None:
    """The iteration has ended."""
    if rank == 0:
        print(f"iteration {iteration}: has ended", flush=True)
        with (args.folder / "ends.txt").open("a") as file:
            file.write(f"{iteration} {time.time()}\n")


def by_session() -> Iterator[tuple[int, AbstractContextManager[object]]]:
    """With memory checkpoints."""
    if args.turns:
        copy_in_turns(args.turns)
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer},
        store=str(args.folder / "store"),
        checkpoint_every=args.checkpoint_every,
        snapshot_every=args.snapshot_every if args.snapshot_every == "auto" else int(args.snapshot_every),
    )
    for step in session.steps(args.iterations):
        yield step.index, step


def by_dcp() -> Iterator[tuple[int, AbstractContextManager[object]]]:
    """As scripts of torchrun do it: load the newest checkpoint, save one now and then."""
    folder, begin = args.folder / "dcp", 0
    if saved := sorted(int(path.parent.name) for path in folder.glob("*/.metadata")):
        begin = saved[-1]
        own, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": own, "optimizer": of_optimizer}, checkpoint_id=str(folder / str(begin)))
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=of_optimizer)
    for iteration in range(begin, args.iterations):
        if iteration % args.checkpoint_every == 0 and iteration != begin:
            own, of_optimizer = get_state_dict(model, optimizer)
            state = {"model": own, "optimizer": of_optimizer}
            dcp.save(state, checkpoint_id=str(folder / str(iteration)))
        yield iteration, nullcontext()


for index, step in by_session() if args.way == "memory" else by_dcp():
    with step:
        iterate(index)
        note(index)
dist.destroy_process_group()
