"""Hugging Face GPT-2, cut into pipeline stages by hand. The embedding is also the head: both ends share it.

swift-run --standalone --machines 4 --spares 1 examples/integrations/gpt2_stages.py --store runs/gpt2
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from help_topics import HelpTopics
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import GPT2Config, GPT2LMHeadModel

import swift_ft

MICROBATCHES, SEQUENCE = 4, 32


class Stage(nn.Module):
    """Some blocks of a ``GPT2LMHeadModel``, with the embedding on the first stage and the head on the last.

    The modules keep the names that they have in the whole model, so its state dict is that of all stages.
    """

    def __init__(self, model: GPT2LMHeadModel, index: int, num_stages: int) -> None:
        super().__init__()
        whole, count = model.transformer, len(model.transformer.h)
        first, end = (count * edge // num_stages for edge in (index, index + 1))
        blocks = {str(number): whole.h[number] for number in range(first, end)}
        self.transformer = nn.ModuleDict({"h": nn.ModuleDict(blocks)})
        if index == 0:
            self.transformer.update({"wte": whole.wte, "wpe": whole.wpe, "drop": whole.drop})
        if index == num_stages - 1:
            self.transformer["ln_f"] = whole.ln_f
            self.lm_head = model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before has sent, to what the next one gets, or logits."""
        parts = self.transformer
        if "wte" in parts:
            x = parts["drop"](parts["wte"](x) + parts["wpe"](torch.arange(x.shape[1], device=x.device)))
        for block in parts["h"].children():
            x = block(x)  # no mask: attention is causal by itself
        if "ln_f" in parts:
            x = self.lm_head(parts["ln_f"](x))
        return x


def build_stage(index: int, num_stages: int) -> Stage:
    """The stage of a tiny GPT-2 with random weights, the same on all machines."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=SEQUENCE, n_embd=32, n_layer=8, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return Stage(GPT2LMHeadModel(config).train(), index, num_stages)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Trains one worker's stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="runs/gpt2", help="a path or a URL, default: %(default)s")
    parser.add_argument("--iterations", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="default: %(default)s iterations")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_stage(rank, world_size)
    stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = HelpTopics(batch_size=8, sequence=SEQUENCE)

    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_pipeline(schedule, build=lambda index: build_stage(index, world_size))
    if stage.is_first:  # GPT-2 has one matrix for the embedding and the head
        session.tie(model.get_parameter("transformer.wte.weight"), (0, world_size - 1))
    if stage.is_last:
        session.tie(model.get_parameter("lm_head.weight"), (0, world_size - 1))
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            losses: list[Tensor] = []
            schedule.step(*[x] if stage.is_first else [], target=y, losses=losses, return_outputs=False)
            session.sum_tied_gradients()
            optimizer.step()
            optimizer.zero_grad()
            if stage.is_last:
                print(f"iteration {step.index}: loss {torch.stack(losses).mean():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
