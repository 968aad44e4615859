"""A small DDP training that notes, in each second step, what its process and the store hold open by then.

``held-RANK.jsonl`` has a line for each of these steps: descriptors, threads and memory (KiB) of this process,
descriptors of its agent, connections at the rendezvous store, and bytes on a GPU, if there is one. It waits
for no event of a loss when its connections break: no process dies in this test.
"""

import argparse
import json
import os
import threading
from pathlib import Path

import pynvml
import torch
import torch.distributed as dist
from placement import add_device_options, join
from torch import nn

import swift_ft
from swift_ft.config import detection_timings as timings
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination import participant
from tests.support.waiting import wait_until

parser = argparse.ArgumentParser()
parser.add_argument("--store", required=True)
parser.add_argument("--iterations", type=int, required=True)
parser.add_argument("--checkpoint-every", type=int, default=10_000)
add_device_options(parser)
args = parser.parse_args()
CONTEXT = WorkerContext.from_env()
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
STORE_PORT = f"{int(CONTEXT.store.port):04X}"
ESTABLISHED = "01"

timings.LOSS_MARGIN_S = 0.05
participant.Participant._loss_known_after_s = lambda *_: 0.0


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def store_connections() -> int:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{STORE_PORT}") and row[3] == ESTABLISHED for row in rows)


def memory_kib() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0])


def on_the_device() -> dict[str, int]:
    """What torch has taken, and all of this process, NCCL's buffers included, where the driver says it."""
    if args.device == "cpu":
        return {}
    torch.cuda.synchronize()
    held = {"torch": torch.cuda.memory_allocated()}
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            held["driver"] = process.usedGpuMemory
    pynvml.nvmlShutdown()
    return held


def destroys() -> bool:
    return any(thread.name == "swift-retired-groups" for thread in threading.enumerate())


def note(index: int) -> None:
    wait_until(lambda: not destroys(), "the groups that were left are not destroyed")
    dist.barrier()  # so the other worker's are, too
    held = {
        "iteration": index,
        "descriptors": descriptors(os.getpid()),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "of the agent": descriptors(CONTEXT.agent_pid),
        "at the store": store_connections(),
        "KiB": memory_kib(),
        "on the device": on_the_device(),
    }
    with (FOLDER / f"held-{CONTEXT.rank}.jsonl").open("a") as file:
        file.write(json.dumps(held) + "\n")


device = join(args)
pair = dist.new_group([0, 1])
torch.manual_seed(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = swift_ft.Session(
    {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
)
session.attach_ddp(model)
for step in session.steps(args.iterations):
    with step:
        model(torch.ones(4, 8, device=device) * (step.index + CONTEXT.rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        norm = torch.ones(1, device=device)
        dist.all_reduce(norm, group=pair)
        if step.index % 2:
            note(step.index)
dist.destroy_process_group()
