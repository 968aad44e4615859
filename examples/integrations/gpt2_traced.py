"""Hugging Face GPT-2, cut into pipeline stages by torch's tracer. The model stays as it comes.

swift-run --standalone --machines 4 --spares 1 examples/integrations/gpt2_traced.py --store runs/gpt2-traced
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from help_topics import HelpTopics
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from transformers import GPT2Config, GPT2LMHeadModel

import swift_ft

BATCH_SIZE, MICROBATCHES, SEQUENCE, LAYERS = 8, 4, 32, 8


def build_model() -> GPT2LMHeadModel:
    """A tiny GPT-2 with random weights, the same on all machines."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=SEQUENCE,
            n_embd=32,
            n_layer=LAYERS,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,  # else the stages would have to hand on all keys and values
        )
    )


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Trains one worker's stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="runs/gpt2-traced", help="a path or a URL, default: %(default)s")
    parser.add_argument("--iterations", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="default: %(default)s iterations")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = HelpTopics(BATCH_SIZE, SEQUENCE)
    x, _ = batches[0]
    cuts = [f"transformer.h.{LAYERS * index // world_size}" for index in range(1, world_size)]
    pipe = pipeline(
        build_model().train(),  # a trace keeps the mode: dropout stays on
        mb_args=(x[: BATCH_SIZE // MICROBATCHES],),
        split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING),
    )
    stage = pipe.build_stage(rank, torch.device("cpu"))
    model = stage.submod
    if stage.is_first:
        del model.lm_head  # the tracer leaves a copy of the embedding under this name, which nothing uses
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_pipeline(schedule)
    if stage.is_first:  # the tracer unties parameters that stages share
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
