"""Two replicas of two shards. Some iterations update nothing. One is lost when others are ahead of it."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import swift_ft
from tests.support.habits import leave
from tests.support.machines import is_first_process
from tests.support.waiting import wait_until

ITERATIONS, LOST_IN, DIES, AHEAD = 8, 5, 3, (0, 2)
store, habit, fault = sys.argv[1:]
folder = Path(os.environ["SWIFT_TEST_FOLDER"])
now = {"iteration": -1}
all_reduce = dist.all_reduce


def dying(*args: Any, **kwargs: Any) -> Any:
    """Before the replicas of its shard have the averages, one dies. Both of the other shard are done."""
    if fault == "lost" and dist.get_rank() == DIES and now["iteration"] == LOST_IN and is_first_process():
        files = [folder / f"done-{rank}" for rank in AHEAD]
        wait_until(lambda: all(file.exists() for file in files), f"not all of {files} are there")
        os.kill(os.getpid(), signal.SIGKILL)
    return all_reduce(*args, **kwargs)


dist.all_reduce = dying

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
halves = [list(model[0].parameters()), list(model[2].parameters())]
if habit != "two optimizers":
    halves = [halves[0] + halves[1]]
optimizers = [swift_ft.wrap_optimizer(torch.optim.AdamW(half, lr=1e-2), exact=True) for half in halves]
skipped = {"some iterations": (2, 5), "two optimizers": (2, 5)}[habit]
state = {"model": model, **{f"optimizer {n}": o for n, o in enumerate(optimizers)}}
session = swift_ft.Session(state, store=store, checkpoint_every=4)
session.attach_fsdp(model)
for step in session.steps(ITERATIONS):
    with step:
        now["iteration"] = step.index
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(4 * step.index + rank))
        model(x).square().mean().backward()
        for number, optimizer in enumerate(optimizers):
            if step.index not in skipped or number == 1:
                optimizer.step()
        model.zero_grad()  # of which no optimizer learns
        if step.index == LOST_IN:
            (folder / f"done-{rank}").touch()

leave(
    rank,
    {
        "model": {name: tensor.to_local() for name, tensor in model.state_dict().items()},
        "moments": [
            {k: v.to_local() if hasattr(v, "to_local") else v for k, v in optimizer.state[p].items()}
            for optimizer in optimizers
            for p in optimizer.param_groups[0]["params"]
        ],
    },
)
dist.destroy_process_group()
