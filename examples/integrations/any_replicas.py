"""Trains a CNN on global batches that any number of replicas can share.

swift-run --standalone --machines 3 examples/integrations/any_replicas.py --store runs/any --iterations 15
swift-run --standalone --machines 2 --resume examples/integrations/any_replicas.py --store runs/any
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shapes import Shapes, build_cnn
from torch.nn.parallel import DistributedDataParallel

import swift_ft


def main() -> None:
    """Trains one replica."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--store", default="runs/any", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--samples", help="a folder for the samples of each iteration")
    parser.add_argument("--out", help="write the final state as OUT/rank<r>.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_cnn())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = swift_ft.data.GlobalBatches(Shapes(), 32, shuffle=True, log=args.samples)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": batches}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step:
            images, labels = batches[step.index]
            loss = F.cross_entropy(model(images), labels)
            (batches.weight * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}", flush=True)

    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, f"{args.out}/rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
