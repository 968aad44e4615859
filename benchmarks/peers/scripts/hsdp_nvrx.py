"""FSDP2 within two replicas (HSDP) under nvidia-resiliency-ext: all call the function again."""

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it, which a restart would interrupt
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.inprocess.rank_assignment import Layer, LayerFlag, Tree
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from benchmarks.peers.scripts.cpu_state import CpuState
from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's shards, or waits as a spare."""
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
    model = build_stage(0, 1, config)
    mesh = init_device_mesh("cpu", (2, workers // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for name, layer in model.named_children():
        if name.startswith("block"):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    harness = Harness(args, rank, model)
    checkpoints = LocalCheckpointManager(args.store)
    first = max(checkpoints.find_latest(), 0)
    if first:
        loaded = checkpoints.load()[0].state_dict
        put_back(model, optimizer, loaded)
    for iteration in range(first, args.iterations):
        with harness.iteration(iteration):
            x, y = (part.chunk(workers)[rank] for part in batches[iteration])
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (iteration + 1) % args.checkpoint_every == 0:
            checkpoints.save(CpuState(shards_of(model, optimizer)), iteration + 1)
    dist.destroy_process_group()


def shards_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of this worker, without the mesh, which the next call makes again."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    shards: dict[str, Any] = tree_map_only(DTensor, DTensor.to_local, state)
    return shards


def put_back(model: torch.nn.Module, optimizer: torch.optim.Optimizer, shards: dict[str, Any]) -> None:
    """Fill a model and an optimizer that were made anew."""
    for name, tensor in model.state_dict().items():
        tensor.to_local().copy_(shards["model"][name])
    state = optimizer.state_dict()
    for number, parameter in enumerate(model.parameters()):
        state["state"][number] = {
            name: _as(parameter, value) if value.dim() else value
            for name, value in shards["optimizer"][number].items()
        }
    optimizer.load_state_dict(state)


def _as(parameter: Any, shard: torch.Tensor) -> DTensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=parameter.stride())


if __name__ == "__main__":
    main()
