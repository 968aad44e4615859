"""Trains a CNN in a loop of Lightning Fabric, with DDP, mixed precision and accumulated gradients.

swift-run --standalone --machines 2 --spares 1 --inject "kill machine=1 iteration=12" \
    examples/integrations/fabric_loop.py --store runs/fabric
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from shapes import Shapes, build_cnn

import swift_ft


def main() -> None:
    """Trains one replica."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per update, default: %(default)s")
    parser.add_argument("--store", default="runs/fabric", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--out", help="write the final state as OUT/rank<r>.pt")
    args = parser.parse_args()

    workers, per_machine = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(
        accelerator="cpu",
        strategy="ddp",
        devices=per_machine,
        num_nodes=workers // per_machine,
        precision="bf16-mixed",
    )
    fabric.launch()
    model = build_cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.iterations)

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
                with fabric.no_backward_sync(model, enabled=part < args.accumulate - 1):
                    loss = F.cross_entropy(model(images), labels) / args.accumulate
                    fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {args.accumulate * loss.item():.3f}", flush=True)

    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        saved = {name: part.state_dict() for name, part in state.items()}
        torch.save(saved, f"{args.out}/rank{fabric.global_rank}.pt")


if __name__ == "__main__":
    main()
