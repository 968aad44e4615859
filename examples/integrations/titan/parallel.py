"""The mesh, and what is done over more than one of its dimensions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from titan.config import Parallelism
from titan.model import Stage

DATA = ("dp_replicate", "dp_shard")


def build_mesh(sizes: Parallelism) -> DeviceMesh:
    """All four dimensions, also those of size 1."""
    rest = sizes.dp_replicate * sizes.dp_shard * sizes.tp
    pp = sizes.pp or dist.get_world_size() // rest
    shape = (pp, sizes.dp_replicate, sizes.dp_shard, sizes.tp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", *DATA, "tp"))


def split(stage: Stage, mesh: DeviceMesh) -> None:
    """Tensor parallelism, and sequences split between its parts, as torchtitan plans it for a Llama.

    Args:
        stage: whole.
        mesh: the dimension ``tp``.
    """
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    ends = {name: style for name, style in plan.items() if getattr(stage, name) is not None}
    parallelize_module(stage, mesh, ends)
    for layer in stage.layers.values():
        first = dict.fromkeys(
            ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"),
            ColwiseParallel(),
        )
        last = dict.fromkeys(("attention.wo", "feed_forward.w2"), RowwiseParallel(output_layouts=Shard(1)))
        norms = dict.fromkeys(("attention_norm", "ffn_norm"), SequenceParallel())
        parallelize_module(layer, mesh, {"attention": whole, "feed_forward": whole, **norms, **first, **last})


def shard(stage: Stage, mesh: DeviceMesh) -> None:
    """FSDP2 over ``dp_replicate`` and ``dp_shard``. What is gathered stays until the update."""
    for layer in stage.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, pp: dist.ProcessGroup) -> Tensor:
    """Clip by the norm of all stages' gradients, as torchtitan does it. Returns that norm."""
    parameters = list(parameters)
    total = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(total, DTensor):
        total = total.full_tensor()
    total **= 2
    dist.all_reduce(total, group=pp)
    total **= 0.5
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


def mean_of_last_stage(losses: list[Tensor], mesh: DeviceMesh) -> float:
    """The mean of the losses that the last stages have, of all data; on all workers."""
    loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    for name in (*DATA, "pp"):  # the other stages add nothing
        dist.all_reduce(loss, group=mesh[name].get_group())
    return loss.item() / mesh[DATA].size()
