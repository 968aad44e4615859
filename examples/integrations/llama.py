"""A Llama with what a real training has: RoPE, RMSNorm, tied embeddings, bf16, clipping, validation, metrics.

Gradients are clipped by the norm of all stages, with an all-reduce of the script's own. One thing is written
in another way than without swift_ft: every fifth step validates instead of training.

swift-run --standalone --machines 4 --spares 1 examples/integrations/llama.py --store runs/llama
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from help_topics import HelpTopics
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaConfig, LlamaForCausalLM

import swift_ft

MICROBATCHES, SEQUENCE, MAX_NORM, VALIDATE_EVERY = 4, 32, 1.0, 5


class Stage(nn.Module):
    """Some layers of a ``LlamaForCausalLM``, the embedding on the first stage and the head on the last."""

    def __init__(self, whole: LlamaForCausalLM, index: int, num_stages: int) -> None:
        super().__init__()
        layers = whole.model.layers
        first, end = (len(layers) * edge // num_stages for edge in (index, index + 1))
        self.embed_tokens = whole.model.embed_tokens if index == 0 else None
        self.rotary_emb = whole.model.rotary_emb
        self.layers = nn.ModuleList(layers[first:end])
        self.norm = whole.model.norm if index == num_stages - 1 else None
        self.lm_head = whole.lm_head if index == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before has sent, to what the next one gets, or logits."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotation = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotation)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x

    @property
    def shared_weight(self) -> nn.Parameter | None:
        """One matrix is the embedding of the first stage and the head of the last one."""
        holder = self.embed_tokens or self.lm_head
        return holder.weight if holder is not None else None


class Metrics:
    """The script's own: a replacement goes on with the numbers of the machine that it replaces."""

    def __init__(self) -> None:
        self.tokens = 0
        self.best_validation = float("inf")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        vars(self).update(state)


def build_stage(index: int, num_stages: int) -> Stage:
    """The stage of a tiny Llama with random weights, the same on all machines."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
    )
    return Stage(LlamaForCausalLM(config).train(), index, num_stages)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def clip_by_global_norm(model: Stage) -> Tensor:
    """Clip gradients by the norm of all stages' gradients, and return that norm.

    The gradients of tied parameters are summed already. They count once, on the first stage.
    """
    counted = [p for p in model.parameters() if model.lm_head is None or p is not model.lm_head.weight]
    squared = get_total_norm([p.grad for p in counted if p.grad is not None]) ** 2
    dist.all_reduce(squared)
    norm = squared.sqrt()
    clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
    return norm


def main() -> None:
    """Trains one worker's stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="runs/llama", help="a path or a URL, default: %(default)s")
    parser.add_argument("--iterations", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="default: %(default)s iterations")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_stage(rank, world_size)
    stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.iterations)
    metrics = Metrics()
    training = HelpTopics(batch_size=8, sequence=SEQUENCE)
    validation = HelpTopics(batch_size=8, sequence=SEQUENCE, seed=1)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "metrics": metrics}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule, build=lambda index: build_stage(index, world_size))
    if (weight := model.shared_weight) is not None:
        session.tie(weight, (0, world_size - 1))

    for step in session.steps(args.iterations):
        with step:
            validating = step.index % VALIDATE_EVERY == VALIDATE_EVERY - 1
            x, y = (validation if validating else training)[step.index]
            losses: list[Tensor] = []
            with torch.autocast("cpu", dtype=torch.bfloat16):
                schedule.step(*[x] if stage.is_first else [], target=y, losses=losses, return_outputs=False)
            session.sum_tied_gradients()
            norm = clip_by_global_norm(model)
            if not validating:  # else the gradients are thrown away
                optimizer.step()
                scheduler.step()
                metrics.tokens += x.numel()
            optimizer.zero_grad()
            if stage.is_last:
                loss = torch.stack(losses).mean().item()
                if validating:
                    metrics.best_validation = min(metrics.best_validation, loss)
                kind = "validation" if validating else f"gradient norm {norm:.3f},"
                print(f"iteration {step.index}: {kind} loss {loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
