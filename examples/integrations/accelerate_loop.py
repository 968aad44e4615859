"""Trains a CNN in a loop of Hugging Face accelerate, with DDP, mixed precision and accumulated gradients.

swift-run --standalone --machines 2 --spares 1 --inject "kill machine=1 iteration=12" \
    examples/integrations/accelerate_loop.py --store runs/accelerate
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from shapes import Shapes, build_cnn

import swift_ft


def main() -> None:
    """Trains one replica."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per update, default: %(default)s")
    parser.add_argument("--store", default="runs/accelerate", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--out", help="write the final state as OUT/rank<r>.pt")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=args.accumulate)
    model = build_cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    updates = args.iterations * accelerator.num_processes  # accelerate counts those of all workers
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)
    batches = swift_ft.data.IndexedBatches(
        Shapes(),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        num_replicas=session.replicas,
        rank=session.replica,
    )
    for step in session.steps(args.iterations):
        with step:
            for part in range(args.accumulate):
                images, labels = batches[step.index * args.accumulate + part]
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}", flush=True)

    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        saved = {name: part.state_dict() for name, part in state.items()}
        torch.save(saved, f"{args.out}/rank{accelerator.process_index}.pt")


if __name__ == "__main__":
    main()
