"""A pipeline under nvidia-resiliency-ext: all call the function again, from a local checkpoint."""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # an optimizer imports it, which a restart would interrupt
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.inprocess.rank_assignment import Layer, LayerFlag, Tree
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers.scripts.cpu_state import CpuState
from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's stage, or waits as a spare."""
    args = parse_arguments(
        __doc__,
        ("--store", {"type": Path}),
        ("--checkpoint-every", {"type": int}),
        ("--workers", {"type": int}),
        ("--heartbeat-timeout", {"type": float}),
        ("--gloo-timeout", {"type": float}),
    )
    host, port = (
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
    )  # the wrapper has the other one
    store = dist.TCPStore(host, port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)
    root = Layer(max_ranks=args.workers, key_or_fn="root", flag=LayerFlag.RESERVE)
    soon = timedelta(seconds=0.1)
    wrapper = inprocess.Wrapper(
        rank_assignment=Tree([root]),
        monitor_thread_interval=soon,
        monitor_process_interval=soon,
        heartbeat_interval=timedelta(seconds=args.heartbeat_timeout / 5),
        heartbeat_timeout=timedelta(seconds=args.heartbeat_timeout),
        last_call_wait=soon,
    )
    wrapper(train)(args, store)


def train(
    args: argparse.Namespace, base: dist.Store, call_wrapper: inprocess.CallWrapper | None = None
) -> None:
    """Called again in the same process after a fault."""
    assert call_wrapper is not None
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(str(call_wrapper.iteration), base)
    # The wrapper's abort is for NCCL: with gloo, a worker whose own peers live waits until this.
    timeout = timedelta(seconds=args.gloo_timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timeout)
    config = Config.from_args(args)
    batches = Batches(config)
    model = build_stage(rank, workers, config)
    stage = PipelineStage(model, rank, workers, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    harness = Harness(args, rank, model)
    checkpoints = LocalCheckpointManager(args.store)
    first = max(checkpoints.find_latest(), 0)
    if first:
        loaded = checkpoints.load()[0].state_dict
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    for iteration in range(first, args.iterations):
        with harness.iteration(iteration):
            x, y = batches[iteration]
            schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
        if (iteration + 1) % args.checkpoint_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(CpuState(state), iteration + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
