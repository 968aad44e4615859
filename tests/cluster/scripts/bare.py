"""A plain torchrun script: no session."""

import os
import signal
import sys

import torch
import torch.distributed as dist

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print(f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}", flush=True)
dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
print(f"sum {total.item()}", flush=True)
if rank == "1" and "raise" in sys.argv:
    raise ValueError("on purpose")  # the others fail too, in the barrier
if rank == "1" and attempt == "0" and "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
