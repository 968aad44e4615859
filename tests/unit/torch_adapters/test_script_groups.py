"""The groups of a script live on: every way in which torch uses a group works in each generation."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys, threading
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from swift_ft.errors import UsageError
from swift_ft.torch_adapters.process_group import GenerationGroup
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_adapters.script_groups import script_groups

# In a process of its own: leaving a group ends connections that its worker's process has opened meanwhile.
server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
rank = next((rank for rank in (0, 1) if os.fork() == 0), None)
if rank is None:
    sys.exit(sum(os.wait()[1] != 0 for _ in range(2)))
store = RendezvousStore(lambda: dist.TCPStore("127.0.0.1", server.port))
torch.set_num_threads(1)
script_groups.install()
dist.init_process_group("gloo", store=store.connection(), rank=rank, world_size=2)
world = dist.group.WORLD
pair = dist.new_group([0, 1], backend="gloo")
alone = [dist.new_group([0]), dist.new_group([1])][rank]
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
torch.manual_seed(0)
linear = torch.nn.Linear(4, 4)
averaged = DistributedDataParallel(torch.nn.Linear(4, 4))
sharded = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["inner"])
tensor = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh["inner"], [Shard(0)])
script_groups.complete()

def reduced(group):
    one = torch.ones(2)
    dist.all_reduce(one, group=group)
    return one.tolist()

def sent():
    other = torch.zeros(1)
    send = dist.P2POp(dist.isend, torch.ones(1) * rank, 1 - rank)
    receive = dist.P2POp(dist.irecv, other, 1 - rank)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return other.item()

def gathered():
    found = [None, None]
    dist.all_gather_object(found, rank)
    return found

def clipped():
    sharded(torch.ones(2, 4)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0).full_tensor().item()
    sharded.zero_grad()
    return round(norm, 4)

def averages():
    averaged(torch.ones(1, 4) * (rank + 1)).sum().backward()
    grad = averaged.module.weight.grad[0, 0].item()
    averaged.zero_grad()
    return grad

def scattered():
    mine = torch.zeros(1)
    dist.reduce_scatter_tensor(mine, torch.ones(2))
    return mine.item()

def everything():
    pending = dist.all_reduce(torch.ones(1), async_op=True)
    pending.wait()
    dist.barrier(group=pair)
    return [
        reduced(None), reduced(world), reduced(pair), reduced(alone), reduced(mesh["inner"].get_group()),
        functional.all_reduce(torch.ones(1), "sum", mesh["inner"]).item(),
        functional.all_reduce(torch.ones(1), "sum", world.group_name).item(),
        tensor.sum().full_tensor().item(), round(tensor.norm().full_tensor().item(), 4),
        sent(), gathered(), scattered(), averages(), clipped(), pending.is_completed(),
    ]

group = GenerationGroup(store, rank=rank, world_size=2, timeout_s=60)
first = everything()

make = script_groups._make
def make_and_ask(*args, **kwargs):  # as other threads may do at any time
    asked = threading.Thread(target=lambda: backends.append((dist.get_backend(), dist.get_backend(pair))))
    asked.start()
    asked.join()
    return make(*args, **kwargs)
script_groups._make = make_and_ask

for generation in (1, 2):
    backends = []
    group.join(generation)
    assert backends == [("gloo", "gloo")] * len(script_groups.groups), backends
    again = everything()
    assert again == first, (first, again)
assert dist.group.WORLD is world
assert dist.distributed_c10d._resolve_process_group(pair.group_name) is pair
with group.subgroup((0, 1)) as whole, group.subgroup((rank,)) as own:
    assert dist.get_process_group_ranks(own) == [rank]
try:
    dist.new_group([0, 1])
except UsageError as error:
    late = str(error)
group.leave()
try:
    reduced(pair)
except RuntimeError as error:
    ended = str(error)
assert (world.size(), world.rank(), pair.group_name) == (2, rank, "1")
group.join(3)
last = reduced(pair)
dist.destroy_process_group()
assert not dist.is_initialized()
if rank == 0:
    print(first, late, ended, last, sep="\\n")
sys.stdout.flush()
os._exit(0)
"""


def test_all_handles_work_in_each_generation() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr[-4000:]
    values, late, ended, last = lines
    two = "[2.0, 2.0]"
    assert values.startswith(f"[{two}, {two}, {two}, [1.0, 1.0], {two}, 2.0, 2.0, 28.0, 11.8322, 1.0, [0, 1]")
    assert "make all groups before session.steps()" in late
    assert "ended with its generation" in ended
    assert last == two


BOUND = """
import torch
import torch.distributed as dist
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.script_groups import script_groups

script_groups.install()
c10d = dist.distributed_c10d
helper, bound = c10d._new_process_group_helper, torch.device("cuda", 1)

def with_device(*args, **kwargs):  # what init_process_group(device_id=...) does where there is a GPU
    return helper(*args, **{**kwargs, "device_id": bound})

c10d._new_process_group_helper = with_device
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
c10d._new_process_group_helper = helper
world = dist.group.WORLD
other = dist.new_group([0])
assert LastingGroup.device == bound
assert world.bound_device_id is None, "torch would split other groups off it"
for generation in range(2):
    script_groups.end()
    for group in script_groups.groups:
        script_groups.renew(group, dist.PrefixStore(str(generation), dist.HashStore()))
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert one.item() == 1
print("formed")
"""


def test_a_group_that_is_bound_to_a_device_forms_in_each_generation() -> None:
    """Torch's own warning says to name one: ``init_process_group(device_id=...)``."""
    done = subprocess.run(
        [sys.executable, "-c", BOUND], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout == "formed\n", done.stderr[-4000:]
