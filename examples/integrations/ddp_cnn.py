"""Trains a CNN with DDP: BatchNorm, mixed precision, accumulated gradients, an EMA, a learning rate schedule.

swift-run --standalone --machines 2 --spares 1 --inject "kill machine=1 iteration=12" \
    examples/integrations/ddp_cnn.py --store runs/cnn
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shapes import Shapes, build_cnn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import swift_ft

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    """Trains one replica."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per update, default: %(default)s")
    parser.add_argument("--store", default="runs/cnn", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--out", help="write the final state as OUT/rank<r>.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_cnn())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.iterations)
    scaler = GradScaler("cpu", enabled=args.precision == "float16", growth_interval=5)

    state: dict[str, Any] = {
        "model": model,
        "ema": ema,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
    }
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
                last = part == args.accumulate - 1
                with nullcontext() if last else model.no_sync():
                    with torch.autocast("cpu", PRECISIONS[args.precision], args.precision != "float32"):
                        loss = F.cross_entropy(model(images), labels) / args.accumulate
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            ema.update_parameters(model.module)
            print(f"iteration {step.index}: loss {args.accumulate * loss.item():.3f}", flush=True)

    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        saved = {name: part.state_dict() for name, part in state.items()}
        torch.save(saved, f"{args.out}/rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
