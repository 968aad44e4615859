"""Trains a GPT in nanoGPT's loop, with DDP: random windows of a mapped file, accumulation, a best loss.

torchrun --nproc-per-node 2 examples/integrations/nanogpt_plain.py
"""

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from gpt import Config, build_stage, load_text, loss_fn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def write_tokens(path: Path) -> None:
    """A text as a file of tokens, written once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_name(f"{path.name}-{os.getpid()}")
        load_text().numpy().astype(np.uint16).tofile(begun)
        begun.replace(path)


def main() -> None:
    """Trains one replica."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--eval-interval", type=int, default=5, help="default: %(default)s iterations")
    parser.add_argument("--accumulate", type=int, default=4, help="batches per update, default: %(default)s")
    parser.add_argument("--out", default="runs/nanogpt", help="for the file of tokens, and the best model")
    args = parser.parse_args()
    out, block, batch_size = Path(args.out), 32, 4
    write_tokens(out / "train.bin")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337 + rank)
    config = Config(layers=2, width=32, heads=2, sequence=block)
    model = DistributedDataParallel(build_stage(0, 1, config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    best_loss = math.inf

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        all_tokens = np.memmap(out / "train.bin", dtype=np.uint16, mode="r")
        held_out = len(all_tokens) // 10
        tokens = all_tokens[:-held_out] if split == "train" else all_tokens[-held_out:]
        starts = torch.randint(len(tokens) - block, (batch_size,))
        windows = torch.stack([torch.from_numpy(tokens[i : i + block + 1].astype(np.int64)) for i in starts])
        return windows[:, :-1], windows[:, 1:]

    def rate_of(iteration: int) -> float:
        warm, decay = (
            min(1.0, (iteration + 1) / 5),
            0.5 * (1 + math.cos(math.pi * iteration / args.iterations)),
        )
        return 1e-3 * warm * (0.1 + 0.9 * decay)

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        batches = [get_batch("val") for _ in range(4)]
        losses = [loss_fn(model.module(x), y).item() for x, y in batches]
        model.train()
        return sum(losses) / len(losses)

    def keep_best(loss: float) -> None:
        nonlocal best_loss
        if loss < best_loss:
            best_loss = loss
            if rank == 0:
                checkpoint = {"model": model.module.state_dict(), "best_loss": best_loss}
                torch.save(checkpoint, out / "best.pt")

    x, y = get_batch("train")  # the first one
    iteration = 0
    while iteration < args.iterations:
        if iteration and iteration % args.eval_interval == 0:
            keep_best(estimate_loss())
        for group in optimizer.param_groups:
            group["lr"] = rate_of(iteration)
        for part in range(args.accumulate):
            model.require_backward_grad_sync = part == args.accumulate - 1
            loss = loss_fn(model(x), y) / args.accumulate
            x, y = get_batch("train")  # the next one, while the backward pass runs
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iteration += 1
    print(f"[worker {rank}] the best loss is {best_loss:.3f}", flush=True)

    torch.save({"model": model.module.state_dict(), "best_loss": best_loss}, out / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
