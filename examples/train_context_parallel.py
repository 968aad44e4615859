"""Trains a GPT on sequences that are divided among workers (context parallelism), as its shards are.

swift-run --standalone --machines 4 --spares 1 examples/train_context_parallel.py --store runs/context
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import Batches, Block, Config, Embedding, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _ContextParallel
from torch.distributed.tensor.parallel import parallelize_module

import swift_ft


class Attention(nn.Module):
    """Each position sees those up to itself. It is given some queries, and the keys of the whole sequence."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # of this worker's part of the sequence

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(k.shape[2], device=k.device)
        own = positions[self.number * q.shape[2] :][: q.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=own.unsqueeze(1) >= positions)


class PartBlock(Block):
    """A transformer block for a part of the sequence."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__(config)
        self.attention = Attention(number)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended: Tensor = self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return attended


class PartEmbedding(Embedding):
    """Bytes to vectors, for a part of the sequence."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__(config)
        self.number = number

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.token(tokens)
        return vectors + self.position.weight[self.number * tokens.shape[1] :][: tokens.shape[1]]


def build(config: Config, number: int) -> nn.Module:
    """The example's GPT for a part of the sequence. Its weights depend on the seed alone."""
    model = build_stage(0, 1, config)
    for name, layer in list(model.named_children()):
        if name != "head":
            part = (PartEmbedding if name == "embedding" else PartBlock)(config, number)
            part.load_state_dict(layer.state_dict())
            setattr(model, name, part)
    return model


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Attention gathers keys and values over ``cp``; FSDP2 shards parameters over it, within replicas."""
    for block in (layer for layer in model.children() if isinstance(layer, PartBlock)):
        gathers = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
        parallelize_module(block, mesh["cp"], {"attention": gathers})
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    """Trains on one worker's part of the sequences."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/context", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="default: %(default)s iterations")
    parser.add_argument("--snapshot-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--replicas", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    sizes = (args.replicas, dist.get_world_size() // args.replicas)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp_replicate", "cp"))
    model = build(config, mesh.get_local_rank("cp")).to(device)
    parallelize(model, mesh)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), exact=True)
    batches = Batches(config, device)

    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer},
        store=args.store,
        snapshot_every=args.snapshot_every,
        checkpoint_every=args.checkpoint_every,
    )
    if args.replicas > 1:
        session.attach_fsdp(model)
    for step in session.steps(args.iterations):
        with step:
            replica = mesh.get_local_rank("dp_replicate")
            whole = [part.chunk(args.replicas)[replica] for part in batches[step.index]]
            parts: Any = _context_parallel_shard(mesh["cp"], whole, seq_dims=[1, 1])
            x, y = parts
            loss = loss_fn(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}", flush=True)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        shards = {name: parameter.to_local() for name, parameter in model.state_dict().items()}
        torch.save(shards, f"{args.weights_out}/rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
