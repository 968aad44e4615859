"""Trains a GPT whose experts are divided among workers (expert parallelism). FSDP2 shards the rest.

swift-run --standalone --machines 4 --spares 1 examples/train_moe.py --store runs/moe
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import Batches, Block, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import swift_ft

MAX_NORM = 1.0


class Experts(nn.Module):
    """Networks of two layers. Each computes its own tokens, which come sorted by expert."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(number, width, 2 * width))
        self.down = nn.Parameter(torch.empty(number, 2 * width, width))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        pieces = tokens.split(counts.tolist())
        return torch.cat([F.gelu(piece @ up[i]) @ down[i] for i, piece in enumerate(pieces)])


class MixtureOfExperts(nn.Module):
    """Each token goes to the best experts that the router finds: ``(batch, sequence, width)`` to the same."""

    def __init__(self, width: int, number: int, top: int) -> None:
        super().__init__()
        self.number, self.top = number, top
        self.router = nn.Linear(width, number, bias=False)
        self.experts = Experts(number, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).topk(self.top)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.number)
        computed = self.experts(tokens.repeat_interleave(self.top, 0)[order], counts)
        back = computed[order.argsort()].unflatten(0, (-1, self.top))
        mixed: Tensor = (back * scores.unsqueeze(-1)).sum(1)
        return mixed.view_as(x)


class ExpertBlock(Block):
    """A transformer block with experts in place of the feed-forward network."""

    def __init__(self, config: Config, number: int, top: int) -> None:
        super().__init__(config)
        del self.up, self.down
        self.moe = MixtureOfExperts(config.width, number, top)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.dropout(self.attend(self.norm1(x)))
        x = x + attended
        mixed: Tensor = self.dropout(self.moe(self.norm2(x)))
        return x + mixed


class ExpertParallel(ParallelStyle):
    """Gives each worker of a mesh an equal part of the experts. Tokens travel to them and back."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._divide, self._dispatch, self._combine)

    def _divide(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            part = distribute_tensor(parameter, mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(part))

    def _dispatch(self, _: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        tokens, counts = inputs
        with torch.no_grad():
            coming = all_to_all_single(counts, None, None, mesh.get_group()).view(mesh.size(), -1)
        self.sent = counts.view(mesh.size(), -1).sum(1).tolist()
        self.received = coming.sum(1).tolist()
        tokens = all_to_all_single_autograd(tokens, self.received, self.sent, mesh.get_group())
        # They come sorted by worker first, and the experts want all of theirs together.
        expert = torch.arange(coming.shape[1], device=coming.device).repeat(mesh.size())
        self.order = expert.repeat_interleave(coming.flatten()).argsort(stable=True)
        return tokens[self.order], coming.sum(0)

    def _combine(self, _: nn.Module, computed: Any, mesh: DeviceMesh) -> Any:
        by_worker = computed[self.order.argsort()]
        return all_to_all_single_autograd(by_worker, self.sent, self.received, mesh.get_group())


def build(config: Config, number: int, top: int) -> nn.Module:
    """The example's GPT with experts in each block. The weights depend on the seed alone."""
    model = build_stage(0, 1, config)
    generator = torch.Generator().manual_seed(config.seed + 1)
    for name, layer in list(model.named_children()):
        if name.startswith("block"):
            block = ExpertBlock(config, number, top)
            for parameter in block.moe.parameters():
                nn.init.normal_(parameter, std=0.02, generator=generator)
            block.load_state_dict(layer.state_dict(), strict=False)
            setattr(model, name, block)
    return model


def shard(model: nn.Module, device_type: str, replicas: int, ep: int) -> None:
    """Experts over ``ep`` workers, and then over others; the rest over all workers of a replica."""
    workers = dist.get_world_size()
    rest = init_device_mesh(
        device_type, (replicas, workers // replicas), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    mesh = init_device_mesh(
        device_type,
        (replicas, workers // replicas // ep, ep),
        mesh_dim_names=("dp_replicate", "dp_shard_mod_ep", "ep"),
    )
    mesh["dp_shard_mod_ep", "ep"]._flatten("dp_shard")  # so that norms are reduced over both at once
    for block in (layer for layer in model.children() if isinstance(layer, ExpertBlock)):
        experts = block.moe.experts
        parallelize_module(experts, mesh["ep"], ExpertParallel())
        sharded = fully_shard(experts, mesh=mesh["dp_replicate", "dp_shard_mod_ep"])
        sharded.set_gradient_divide_factor(workers)  # each has had the tokens of ep workers
        # gloo can do nothing else; torch 2.13 divides twice then, where there is a single shard.
        sharded.set_force_sum_reduction_for_comms(mesh.size(1) > 1)
        fully_shard(block, mesh=rest)
    fully_shard(model, mesh=rest)


def clip(groups: list[list[nn.Parameter]]) -> float:
    """Clips by the norm of all gradients, of which each group is on a mesh of its own."""
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, MAX_NORM, total)
    return float(total)


def main() -> None:
    """Trains one worker's experts, and its shards of the rest."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/moe", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="default: %(default)s iterations")
    parser.add_argument("--snapshot-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--replicas", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--ep", type=int, default=2, help="workers that share the experts, default: %(default)s"
    )
    parser.add_argument("--experts", type=int, default=4, help="of each block, default: %(default)s")
    parser.add_argument("--top", type=int, default=2, help="experts for a token, default: %(default)s")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = build(config, args.experts, args.top).to(device)
    shard(model, device.type, args.replicas, args.ep)
    named = [*model.named_parameters()]
    groups = [[p for name, p in named if (".experts." in name) == among] for among in (False, True)]
    adamw = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)
    optimizer = swift_ft.wrap_optimizer(adamw, exact=True)
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
            x, y = (part.chunk(workers)[rank] for part in batches[step.index])
            loss = loss_fn(model(x), y)
            loss.backward()
            norm = clip(groups)
            optimizer.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}, norm {norm:.3f}", flush=True)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        shards = {name: parameter.to_local() for name, parameter in model.state_dict().items()}
        torch.save(shards, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
