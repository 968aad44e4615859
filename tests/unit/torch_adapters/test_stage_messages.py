"""Messages of a stage go past what decides about the script's operations, whatever torch does with groups."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.process_group import GenerationGroup
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_adapters.script_groups import script_groups

server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
rank = next((rank for rank in (0, 1) if os.fork() == 0), None)
if rank is None:
    sys.exit(sum(os.wait()[1] != 0 for _ in range(2)))
store = RendezvousStore(lambda: dist.TCPStore("127.0.0.1", server.port))
torch.set_num_threads(1)
script_groups.install()
dist.init_process_group("gloo", store=store.connection(), rank=rank, world_size=2)
pair = dist.new_group([0, 1])

class Seen:
    iteration = 0
    def __init__(self):
        self.messages = []
        self.awaited = []
    def on_send(self, message):
        self.messages.append(message.key)
        return True
    def on_recv(self, message):
        self.awaited.append(message)
        return self.on_send(message)
    def on_wait(self): ...
    def on_received(self, message):  # the very one, which is not made twice
        assert any(message is one for one in self.awaited), message.key
        self.awaited = [one for one in self.awaited if one is not message]
    def on_compute(self, *where): ...

class OfTheScript:
    def begin_unseen(self, name, workers):
        return None

    def begin(self, operation):
        self.operations.append(operation.name)
        return lambda: None

def schedule(group, own=None):
    def stage(index, count):
        made = PipelineStage(nn.Linear(3, 3), index, count, torch.device("cpu"), group=group)
        if own is not None:
            for name in ("get_fwd_send_ops", "get_fwd_recv_ops"):
                setattr(made, name, elsewhere(getattr(made, name)))
        return made
    def elsewhere(get):
        def get_ops(microbatch):
            found = get(microbatch)
            for operation in found:
                operation.group = own
            return found
        return get_ops
    if group is None:
        stages = [stage(rank, 4), stage(rank + 2, 4)]
        return ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    return Schedule1F1B(stage(rank, 2), 4, loss_fn=nn.functional.mse_loss)

group = GenerationGroup(store, rank=rank, world_size=2, timeout_s=60)
hooks = []
for made in (schedule(pair), schedule(None)):
    hooks.append(PipelineHook(made, Seen(), lambda _: None))
    group.follow(hooks[-1].handle)
LastingGroup.interceptor = OfTheScript()
operations = LastingGroup.interceptor.operations = []
counts = []
for generation in (1, 2):
    group.join(generation)
    for hook in hooks:
        hook.begin()
        hook.schedule.step(*([torch.ones(8, 3)] if rank == 0 else []), target=torch.zeros(8, 3))
        counts.append(len(hook._interceptor.messages))
        assert not hook._interceptor.awaited and not hook._arriving
        hook._interceptor.messages.clear()
        hook.aside(True)
        hook.schedule.step(*([torch.ones(8, 3)] if rank == 0 else []), target=torch.zeros(8, 3))
        hook.aside(False)
        counts.append(len(hook._interceptor.messages))
    assert {stage.group for hook in hooks for stage in hook.stages} == {pair, None}
assert operations == [], operations
dist.all_reduce(torch.ones(1))
assert operations == ["allreduce"], operations
hook = PipelineHook(schedule(pair, own=dist.group.WORLD), Seen(), lambda _: None)
hook.begin()
try:
    hook.schedule.step(*([torch.ones(8, 3)] if rank == 0 else []), target=torch.zeros(8, 3))
except UnsupportedError as error:
    refused = str(error)
if rank == 0:
    print(counts, refused, sep="\\n")
sys.stdout.flush()
os._exit(0)
"""


def test_no_message_of_a_stage_is_taken_for_the_scripts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts, refused = done.stdout.splitlines()
    # 4 microbatches, forward and backward: over one border, or as the first of two workers over three.
    assert counts == str([8, 0, 24, 0] * 2)
    assert "pipeline_per_direction_p2p" in refused
