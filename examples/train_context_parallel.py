"""Trains a GPT on sequences that are divided among workers (context parallelism), which share its shards as well.

swift-run --standalone --machines 4 --spares 1 examples/train_context_parallel.py --store runs/context
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import Batches, Block, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _ContextParallel
from torch.distributed.tensor.parallel import parallelize_module

import swift_ft


class Attention(nn.Module):
    """Each position sees those up to itself. It is given some queries, and the keys of the whole sequence."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        seen = positions.unsqueeze(1) >= torch.arange(k.shape[2], device=k.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class PartBlock(Block):
    """A transformer block for a part of the sequence."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention = Attention()

    def attend_at(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended: Tensor = self.out(self.attention(q, k, v, positions).transpose(1, 2).flatten(2))
        return attended

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.dropout(self.attend_at(self.norm1(x), positions))
        down: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + down


class Model(nn.Module):
    """The example's GPT. Its weights depend on the seed alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        layers = build_stage(0, 1, config)
        self.token, self.position = layers.embedding.token, layers.embedding.position
        self.blocks = nn.ModuleList(PartBlock(config) for _ in range(config.layers))
        for index, block in enumerate(self.blocks):
            block.load_state_dict(layers.get_submodule(f"block{index}").state_dict())
        self.head = layers.head

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, positions)
        logits: Tensor = self.head(x)
        return logits


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    """Attention gathers keys and values over ``cp``; FSDP2 shards parameters over it, within replicas."""
    for block in model.blocks:
        of_keys = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
        parallelize_module(block, mesh["cp"], {"attention": of_keys})
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
    model = Model(config).to(device)
    parallelize(model, mesh)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), exact=True)
    batches = Batches(config, device)
    positions = torch.arange(config.sequence, device=device)

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
            whole = [*(part.chunk(args.replicas)[replica] for part in batches[step.index]), positions]
            x, y, at = _context_parallel_shard(mesh["cp"], whole, seq_dims=[1, 1, 0])
            loss = loss_fn(model(x, at), y)
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
